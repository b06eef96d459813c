"""The frames of the node's log, and where a batch lies in it. Pure, but for the reading of a file.

Owns what a round of writes looks like on disk, and the decision whether the end of a file was torn or has rotted. A
frame begins on a page of 4,096 bytes of its own, so no write touches a page that holds an acknowledged round:

    head     crc u32, generation (8 random bytes), number of the round u64, bytes of rows u32, of batches u64, rows
    batches  the values of table BATCHES, one after another, in the order of their rows

The head is stored in sectors of 512 bytes: 508 of content, then the first four bytes of the generation. The batches
follow at the next sector, as they are. A row: code u8, length of the key u16, length of the value u32, then key and
value; of a batch: the CRC-32C of its value and the key; of a deletion, the two keys between which all goes.

Frames follow one another, and each is durable before the next begins. A power loss leaves each sector of the last write
as it was before, or as it should be. Hence, for the last frame: if a sector of its head does not belong to the
generation, or a batch does not match its CRC, and no frame lies beyond it, it was never acknowledged, and the file ends
before it. Otherwise something else has changed the file: damage. So is a sector whose four bytes are almost the
generation's, and a batch of which one bit has flipped.
"""

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from smq.replication.ports import Delete, Op, Put, Table

PAGE_BYTES: Final = 4096  # what a disk writes as one
SECTOR_BYTES: Final = 512  # what a power loss leaves whole
KEY_BYTES_MAX: Final = 511  # the index's
GENERATION_BYTES: Final = 8
PARTS_MAX: Final = 1000  # of one write; the system's limit is 1,024

_TAG_BYTES: Final = 4
_CONTENT_BYTES: Final = SECTOR_BYTES - _TAG_BYTES
_CRC_BYTES: Final = 4
_HEAD: Final = struct.Struct(f">I{GENERATION_BYTES}sQIQ")
_GENERATION_AT: Final = _CRC_BYTES
_NUMBER: Final = struct.Struct(">Q")
_FLIPPED_BITS_MAX: Final = 2  # in a tag: two random ones differ by no more once in eight million times
_SEARCHED_BYTES: Final = 1 << 20  # at a time
_ROW: Final = struct.Struct(">BHI")
_VALUE_CRC: Final = struct.Struct(">I")
_TABLES: Final = (Table.META, Table.RAFT_LOG, Table.RAFT_META, Table.BATCHES, Table.TIMES, Table.CHECKPOINTS)
_CODES: Final = {table: code for code, table in enumerate(_TABLES)}
_BATCH: Final = _CODES[Table.BATCHES]
_DELETED: Final = 0x80  # in a code
_NEXT_FILE: Final = 0x7F  # the code of the row that ends a file
_NEXT: Final = struct.Struct(f">Q{GENERATION_BYTES}s")
_LOCATION: Final = struct.Struct(">QQII")
_POLYNOMIAL: Final = 0x82F63B78  # of CRC-32C, reflected
_STEPS_LOG2: Final = 12


class Rotten(Exception):
    """Something other than an interrupted write has changed a file."""


class Location(NamedTuple):
    """Where the value of a batch lies: what the index has in its place."""

    file: int
    at: int
    length: int
    crc: int

    def row(self, key: bytes) -> bytes:
        body = _LOCATION.pack(*self)
        return crc32c(key + body).to_bytes(_CRC_BYTES, "big") + body


def parse_location(key: bytes, row: bytes) -> Location | None:
    """None if the row is damaged, or is another key's."""
    body = row[_CRC_BYTES:]
    if len(body) != _LOCATION.size or crc32c(key + body).to_bytes(_CRC_BYTES, "big") != row[:_CRC_BYTES]:
        return None
    return Location(*_LOCATION.unpack(body))


class Round(NamedTuple):
    """What one frame makes durable."""

    rows: bytes
    values: list[bytes]  # of the batches
    crcs: list[int]  # of these


def encode_round(ops: Sequence[Op]) -> Round:
    """ValueError for a key that the index would not take."""
    parts: list[bytes] = []
    values: list[bytes] = []
    crcs: list[int] = []
    for op in ops:
        if isinstance(op, Delete):
            parts += (_ROW.pack(_CODES[op.table] | _DELETED, len(op.start), len(op.stop)), op.start, op.stop)
            continue
        key, value = op.key, op.value
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key of {len(key)} bytes: keys have 1 to {KEY_BYTES_MAX}")
        if op.table is Table.BATCHES:
            crc = crc32c(value)
            values.append(value)
            crcs.append(crc)
            parts += (_ROW.pack(_BATCH, len(key), len(value)), _VALUE_CRC.pack(crc), key)
        else:
            parts += (_ROW.pack(_CODES[op.table], len(key), len(value)), key, value)
    return Round(b"".join(parts), values, crcs)


def located(ops: Sequence[Op], made: Round, file: int, at: int) -> list[Op]:
    """The changes of the index. `at`: where the first value lies."""
    changes: list[Op] = []
    crcs = iter(made.crcs)
    for op in ops:
        if isinstance(op, Put) and op.table is Table.BATCHES:
            length = len(op.value)
            changes.append(Put(Table.BATCHES, op.key, Location(file, at, length, next(crcs)).row(op.key)))
            at += length
        else:
            changes.append(op)
    return changes


def next_file_round(number: int, generation: bytes) -> Round:
    """The last one of a file: the log goes on in that one."""
    return Round(_ROW.pack(_NEXT_FILE, 0, _NEXT.size) + _NEXT.pack(number, generation), [], [])


def head_bytes(rows_bytes: int) -> int:
    return -(-(_HEAD.size + rows_bytes) // _CONTENT_BYTES) * SECTOR_BYTES


def frame_bytes(rows_bytes: int, values_bytes: int) -> int:
    return -(-(head_bytes(rows_bytes) + values_bytes) // PAGE_BYTES) * PAGE_BYTES


def write_frame(fd: int, at: int, generation: bytes, number: int, made: Round, zeros: int = 0) -> int:
    """Returns where the next frame begins. `zeros`: bytes after it that are written, too. OSError if not all are."""
    values_bytes = sum(map(len, made.values))
    head = _encoded_head(generation, number, made.rows, values_bytes)
    size = frame_bytes(len(made.rows), values_bytes)
    padding = bytes(size - len(head) - values_bytes + zeros)
    values = made.values if len(made.values) <= PARTS_MAX else [b"".join(made.values)]
    if os.pwritev(fd, [head, *values, padding], at) != size + zeros:
        raise OSError(errno.EIO, "the log took only a part of a write")
    return at + size


def _encoded_head(generation: bytes, number: int, rows: bytes, values_bytes: int) -> bytes:
    head = _HEAD.pack(0, generation, number, len(rows), values_bytes)[_CRC_BYTES:]
    crc = crc32c(rows, crc32c(head)).to_bytes(_CRC_BYTES, "big")
    size = head_bytes(len(rows)) // SECTOR_BYTES * _CONTENT_BYTES
    content = (crc + head + rows).ljust(size, b"\x00")
    tag = generation[:_TAG_BYTES]
    return tag.join([content[at : at + _CONTENT_BYTES] for at in range(0, size, _CONTENT_BYTES)]) + tag


# ------------------------------------------------------------------------------------------------------- reading
class Frame(NamedTuple):
    """The head of one has been read, and is whole."""

    number: int
    rows: bytes
    values_at: int
    end: int

    def changes(self, file: int) -> list[Op]:
        """As `located`."""
        changes: list[Op] = []
        at, value_at = 0, self.values_at
        while at < len(self.rows):
            code, key_bytes, value_bytes = _ROW.unpack_from(self.rows, at)
            at += _ROW.size
            if code == _BATCH:
                (crc,) = _VALUE_CRC.unpack_from(self.rows, at)
                key = self.rows[at + _VALUE_CRC.size : at + _VALUE_CRC.size + key_bytes]
                changes.append(Put(Table.BATCHES, key, Location(file, value_at, value_bytes, crc).row(key)))
                value_at += value_bytes
                at += _VALUE_CRC.size + key_bytes
                continue
            key, value = self.rows[at : at + key_bytes], self.rows[at + key_bytes : at + key_bytes + value_bytes]
            at += key_bytes + value_bytes
            if code & _DELETED:
                changes.append(Delete(_TABLES[code & ~_DELETED], key, value))
            elif code != _NEXT_FILE:
                changes.append(Put(_TABLES[code], key, value))
        return changes

    def next_file(self) -> tuple[int, bytes] | None:
        """Number and generation, if the file ends here."""
        if self.rows[:1] != bytes((_NEXT_FILE,)):
            return None
        number, generation = _NEXT.unpack_from(self.rows, _ROW.size)
        return number, generation

    def are_values_whole(self, fd: int) -> bool:
        """True as well if one bit has changed, of all: then the round is whole, and that batch damaged."""
        wrong: list[tuple[int, int]] = []
        for change in self.changes(0):
            if isinstance(change, Put) and change.table is Table.BATCHES:
                found = parse_location(change.key, change.value)
                assert found is not None
                value = os.pread(fd, found.length, found.at)
                if difference := crc32c(value) ^ found.crc:
                    wrong.append((difference, found.length if len(value) == found.length else 0))
        return not wrong or (len(wrong) == 1 and _is_one_bit(*wrong[0]))


def _is_one_bit(difference: int, length: int) -> bool:
    """Whether the CRCs of two values of that length differ thus if one bit of theirs does. A bit further to the front
    makes one step more. The last 4,096 steps are made one by one, and those before them 4,096 at a time, backwards: a
    value may have 16 MiB, and the start waits."""
    last: set[int] = set()
    changed = _POLYNOMIAL  # by the last bit
    for _ in range(min(1 << _STEPS_LOG2, length * 8)):
        last.add(changed)
        changed = (changed >> 1) ^ (_POLYNOMIAL if changed & 1 else 0)
    back = [1 << (bit + 1) for bit in range(31)] + [(1 << 31 ^ _POLYNOMIAL) << 1 | 1]  # one step back, of each bit
    for _ in range(_STEPS_LOG2):
        back = [_linear(back, column) for column in back]
    for _ in range(0, length * 8, 1 << _STEPS_LOG2):
        if difference in last:
            return True
        difference = _linear(back, difference)
    return False


def _linear(columns: list[int], value: int) -> int:
    """The sum, without carries, of the columns whose bits are set."""
    total = 0
    for column in columns:
        if value & 1:
            total ^= column
        value >>= 1
    return total


def frames(fd: int, at: int, size: int, generation: bytes, number: int) -> Iterator[Frame]:
    """Those that count, in order, from the one of that number at `at` on. Rotten if these are not all that may have
    been acknowledged. OSError if the medium cannot give one."""
    last: Frame | None = None
    while at < size and (found := read_frame(fd, at, size, generation, number)) is not None:
        if last is not None:
            yield last
        last, at, number = found, found.end, number + 1
        if found.next_file() is not None:
            yield found
            return
    _refuse_later(fd, at + PAGE_BYTES, size, generation, number)
    if last is not None and last.are_values_whole(fd):
        yield last


def first_number(fd: int, at: int) -> int:
    """Of the round of a file's first frame, as it stands there."""
    found: int = _HEAD.unpack(os.pread(fd, _HEAD.size, at))[2]
    return found


def values_bytes(fd: int, at: int, size: int, generation: bytes) -> int:
    """Of all frames, as their heads have it; 0 if one head is another's."""
    total = 0
    while at < size and (found := _HEAD.unpack(os.pread(fd, _HEAD.size, at)))[1] == generation:
        total += found[4]
        at += frame_bytes(found[3], found[4])
    return total


def is_begun(fd: int, at: int, generation: bytes) -> bool:
    """Whether a whole head is there, of any round."""
    try:
        return read_frame(fd, at, os.fstat(fd).st_size, generation, first_number(fd, at)) is not None
    except Rotten:
        return True


def read_frame(fd: int, at: int, size: int, generation: bytes, number: int) -> Frame | None:
    """None if it was never written, or its head not to its end."""
    first = os.pread(fd, SECTOR_BYTES, at)
    if not _is_written(first, generation):
        return None
    _, found, found_number, rows_bytes, values_bytes = _HEAD.unpack_from(first)
    end = at + frame_bytes(rows_bytes, values_bytes)
    if found != generation or found_number != number or end > size:
        raise Rotten(f"the frame of round {number} at byte {at} has a wrong head")
    stored = os.pread(fd, head_bytes(rows_bytes), at)
    if not _is_written(stored, generation):
        return None
    content = b"".join([stored[i : i + _CONTENT_BYTES] for i in range(0, len(stored), SECTOR_BYTES)])
    head = content[: _HEAD.size + rows_bytes]
    if crc32c(head[_CRC_BYTES:]) != int.from_bytes(head[:_CRC_BYTES], "big"):
        raise Rotten(f"the frame of round {number} at byte {at} does not match its CRC-32C")
    return Frame(number, head[_HEAD.size :], at + len(stored), end)


def _is_written(sectors: bytes, generation: bytes) -> bool:
    """Whether all of them were written in this generation."""
    if not sectors or len(sectors) % SECTOR_BYTES:
        raise Rotten("the file has been cut")
    tag = int.from_bytes(generation[:_TAG_BYTES], "big")
    ends = range(SECTOR_BYTES, len(sectors) + 1, SECTOR_BYTES)
    wrong = {int.from_bytes(sectors[at - _TAG_BYTES : at], "big") ^ tag for at in ends}
    wrong.discard(0)
    if any(bits.bit_count() <= _FLIPPED_BITS_MAX for bits in wrong):
        raise Rotten("a bit of a frame has flipped")
    return not wrong


def _refuse_later(fd: int, at: int, size: int, generation: bytes, number: int) -> None:
    """Rotten if a frame of a later round lies there. Nothing has been written to a hole."""
    try:
        at = max(at, os.lseek(fd, at, os.SEEK_DATA) // PAGE_BYTES * PAGE_BYTES)
    except OSError as e:
        if e.errno == errno.ENXIO:
            return  # otherwise the file system does not know
    while at < size and (data := os.pread(fd, min(_SEARCHED_BYTES, size - at), at)):
        hit = data.find(generation)
        while hit >= 0:
            if hit % PAGE_BYTES == _GENERATION_AT and len(data) >= hit + GENERATION_BYTES + _NUMBER.size:
                (found,) = _NUMBER.unpack_from(data, hit + GENERATION_BYTES)
                if found > number:
                    raise Rotten(f"round {number} is lost, but round {found} is there")
            hit = data.find(generation, hit + 1)
        at += len(data)
