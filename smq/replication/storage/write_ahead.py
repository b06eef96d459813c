"""The write-ahead file: a small round of writes is durable with one write to one place, before the store has it.

Owns the file, its format and its recovery. The store's META table holds the generation that counts, and changes it in
the transaction that takes over the rounds. So each round is either in the store or replayed, and what an older
generation left in the file is not. It must never decide which rounds come here: the real disk does, its only user.

The file has a fixed size and is written in full when it is made, so no later write needs space or changes metadata.
It consists of sectors of 512 bytes: 508 of content, then the first four bytes of the generation. A frame holds one
round and begins on a page of 4,096 bytes of its own, so no write touches a page that holds an acknowledged round:

    crc u32, generation (8 random bytes), number in the generation u32, length u32, then the rows:
    table u8, key length u16, value length u32, key, value

Frames follow one another, and each is durable before the next begins. A power loss leaves each sector of the last write
as it was before, or as it should be. Hence, for the first frame that is not whole: if a sector of it does not belong to
the generation, and no frame of the generation lies beyond it, it was never acknowledged, and the file ends before it.
Otherwise something else has changed the file: damage. So is a sector whose four bytes are almost the generation's.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from smq.replication.ports import DataDamaged, Put, Table
from smq.replication.storage.directory import FILE_MODE, REPLACE_ADVICE, DiskOpenError, sync_directory

WRITE_AHEAD_FILE: Final = "data.wal"
WRITE_AHEAD_KEY: Final = b"write_ahead"  # of table meta: which generation counts
NEW: Final = ".new"  # after the name, until the file is whole
WRITE_AHEAD_BYTES: Final = 4 << 20  # 1,024 small rounds: a store takes them in some 10 ms, and a start replays them
PAGE_BYTES: Final = 4096  # what a disk writes as one, and what direct writes are aligned to
SECTOR_BYTES: Final = 512  # what a power loss leaves whole
ROUND_BYTES_MAX: Final = 40 << 10  # of rows: beyond this, writing them twice costs more than the tree's pages

_TAG_BYTES: Final = 4
_CONTENT_BYTES: Final = SECTOR_BYTES - _TAG_BYTES
_PAGE_CONTENT_BYTES: Final = PAGE_BYTES // SECTOR_BYTES * _CONTENT_BYTES
_GENERATION_BYTES: Final = 8
_HEAD: Final = struct.Struct(f">I{_GENERATION_BYTES}sII")
_FLIPPED_BITS_MAX: Final = 2  # in a tag: two random ones differ by no more once in eight million times
_CRC_BYTES: Final = 4
_ACTIVE: Final = struct.Struct(f">Q{_GENERATION_BYTES}s{_GENERATION_BYTES}s")
_ROW: Final = struct.Struct(">BHI")
_TABLES: Final = (Table.META, Table.RAFT_LOG, Table.RAFT_META, Table.BATCHES, Table.TIMES, Table.CHECKPOINTS)
_CODES: Final = {table: code for code, table in enumerate(_TABLES)}
_WAITS: Final = os.O_DSYNC  # each write returns once it is durable
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # past the page cache: a page is written, not what the cache groups


class WriteAheadDamaged(DiskOpenError):
    """The file has lost or changed a round that may have been acknowledged."""


@dataclass(frozen=True, slots=True)
class Active:
    """What the store says of the file. `generation` is empty if no round in the file counts."""

    size: int
    generation: bytes
    before: bytes  # the last generation before it that had a round, which may still lie in the file

    def next(self, *, has_rounds: bool) -> "Active":
        """A generation is random, so that nothing written before, and nothing that a client sends, looks like it."""
        generation = os.urandom(_GENERATION_BYTES)
        if not any(generation[:_TAG_BYTES]):  # the tag of a sector that was never written
            return self.next(has_rounds=has_rounds)
        return Active(self.size, generation, self.generation if has_rounds else self.before)

    def encode(self) -> bytes:
        body = _ACTIVE.pack(self.size, self.generation, self.before)
        return crc32c(body).to_bytes(_CRC_BYTES, "big") + body

    @classmethod
    def decode(cls, row: bytes | None) -> "Active":
        """Raises DataDamaged."""
        body = row[_CRC_BYTES:] if row is not None else b""
        if row is None or len(body) != _ACTIVE.size or crc32c(body).to_bytes(_CRC_BYTES, "big") != row[:_CRC_BYTES]:
            raise DataDamaged("its row in table meta is missing or does not match its CRC-32C")
        size, generation, before = _ACTIVE.unpack_from(row, _CRC_BYTES)
        return cls(size, generation if any(generation) else b"", before if any(before) else b"")


def encode_rows(puts: Sequence[Put]) -> bytes:
    parts: list[bytes] = []
    for put in puts:
        parts += (_ROW.pack(_CODES[put.table], len(put.key), len(put.value)), put.key, put.value)
    return b"".join(parts)


def decode_rows(data: bytes) -> list[Put]:
    puts, at = [], 0
    while at < len(data):
        code, key_bytes, value_bytes = _ROW.unpack_from(data, at)
        key_at = at + _ROW.size
        at = key_at + key_bytes + value_bytes
        puts.append(Put(_TABLES[code], data[key_at : key_at + key_bytes], data[key_at + key_bytes : at]))
    return puts


def frame_bytes(rows_bytes: int) -> int:
    """In the file, for a round of that many bytes."""
    return -(-(_HEAD.size + rows_bytes) // _PAGE_CONTENT_BYTES) * PAGE_BYTES


_FRAME_BYTES_MAX: Final = frame_bytes(ROUND_BYTES_MAX)


class WriteAhead:
    """The file, open for writing. One thread writes."""

    def __init__(self, path: Path, active: Active) -> None:
        """The store names this generation by now, durably: nothing that is in the file counts any more."""
        self.active = active
        self._at = 0
        self._number = 0
        self._buffer = mmap.mmap(-1, _FRAME_BYTES_MAX)  # aligned to pages, as direct writes need it
        try:
            self._fd = _open_direct(path, memoryview(self._buffer)[:PAGE_BYTES])
        except OSError as e:
            raise DiskOpenError(f"{path} cannot be written: {e.strerror}; correct its owner or mode") from e

    def next(self) -> Active:
        """For a transaction that takes over all rounds. A generation without any goes on."""
        return self.active.next(has_rounds=True) if self._number else self.active

    def closed(self) -> Active:
        """As `next`, for the last transaction: the data file alone is complete."""
        return Active(self.active.size, b"", self.active.generation if self._number else self.active.before)

    def has_space(self, rows_bytes: int) -> bool:
        return rows_bytes <= ROUND_BYTES_MAX and self._at + frame_bytes(rows_bytes) <= self.active.size

    def restart(self, active: Active) -> None:
        """Begins again with the first page, as in the constructor."""
        self.active = active
        self._at = self._number = 0

    def append(self, rows: bytes) -> None:
        """Returns once the round is durable. OSError if that is not certain: nothing may be written any more."""
        frame = _frame(self.active.generation, self._number, rows)
        view = memoryview(self._buffer)[: len(frame)]
        view[:] = frame
        if os.pwrite(self._fd, view, self._at) != len(frame):
            raise OSError(errno.EIO, "the write-ahead file took only a part of a write")
        self._at += len(frame)
        self._number += 1

    def close(self) -> None:
        os.close(self._fd)


def make_file(path: Path, size: int) -> None:
    """Makes a whole file, or none, unless there is one of that size. Its content does not count."""
    if path.exists() and path.stat().st_size == size:
        return
    new = path.with_name(path.name + NEW)
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            for at in range(0, size, PAGE_BYTES):  # in pieces that the page cache keeps apart
                os.pwrite(fd, bytes(min(PAGE_BYTES, size - at)), at)
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(path)
        sync_directory(path.parent)
    except OSError as e:
        with suppress(OSError):
            new.unlink()
        raise DiskOpenError(f"{path} cannot be made: {e.strerror}; it needs {size >> 20} MiB of that disk") from e


def _open_direct(path: Path, zeros: memoryview) -> int:
    """Each write through the descriptor waits for the disk. Erases the first page: some file systems refuse direct
    writes only when they come."""
    flags = os.O_WRONLY | os.O_CLOEXEC | _WAITS
    for more in (_DIRECT, 0):
        try:
            fd = os.open(path, flags | more)
        except OSError as e:
            if e.errno == errno.EINVAL and more:
                continue
            raise
        try:
            os.pwrite(fd, zeros, 0)
            return fd
        except OSError as e:
            os.close(fd)
            if e.errno != errno.EINVAL or not more:
                raise
    raise AssertionError("the last attempt returns or raises")


def _frame(generation: bytes, number: int, rows: bytes) -> bytes:
    head = _HEAD.pack(0, generation, number, len(rows))[_CRC_BYTES:]
    crc = crc32c(rows, crc32c(head)).to_bytes(_CRC_BYTES, "big")
    size = frame_bytes(len(rows)) // SECTOR_BYTES * _CONTENT_BYTES
    content = (crc + head + rows).ljust(size, b"\x00")
    tag = generation[:_TAG_BYTES]
    return tag.join([content[at : at + _CONTENT_BYTES] for at in range(0, size, _CONTENT_BYTES)]) + tag


# ------------------------------------------------------------------------------------------------------ recovery
def recover(path: Path, active: Active) -> list[list[Put]]:
    """The rounds that count, in order. WriteAheadDamaged if these are not all that may have been acknowledged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as e:
        raise WriteAheadDamaged(
            f"{path} is missing: it belongs to the data file beside it and holds its newest writes. If the directory "
            f"was copied, copy all its files. Otherwise: {REPLACE_ADVICE}"
        ) from e
    except OSError as e:
        raise WriteAheadDamaged(f"{path} cannot be read: {e.strerror}. {REPLACE_ADVICE}") from e
    if len(data) != active.size:
        raise _damaged(path, f"it has {len(data)} bytes instead of {active.size}")
    try:
        rounds = list(_rounds(data, active.generation)) if active.generation else []
        if not rounds:
            _check_first(data, active)
        return [decode_rows(rows) for rows in rounds]
    except _Changed as e:
        raise _damaged(path, str(e)) from e


def _damaged(path: Path, what: str) -> WriteAheadDamaged:
    return WriteAheadDamaged(f"{path} is damaged: {what}. {REPLACE_ADVICE}")


class _Changed(Exception):
    """Something other than an interrupted write has changed the file."""


def _check_first(data: bytes, active: Active) -> None:
    """The first frame is of the generation before, or was never written, or not to its end. A whole one of another
    generation shows that the store has lost its newest transaction, or that the two files do not belong together."""
    generation = _HEAD.unpack_from(data, 0)[1]
    try:
        is_whole = any(generation) and generation != active.before and _rows_at(data, 0, generation, 0) is not None
    except _Changed:
        return
    if is_whole:
        raise _Changed("its rounds belong to another data file, or to a newer state of the one beside it")


def _rounds(data: bytes, generation: bytes) -> Iterator[bytes]:
    at = number = 0
    while at < len(data) and (rows := _rows_at(data, at, generation, number)) is not None:
        yield rows
        at += frame_bytes(len(rows))
        number += 1
    for later in range(at + PAGE_BYTES, len(data), PAGE_BYTES):
        _, found, found_number, _ = _HEAD.unpack_from(data, later)
        if found == generation and found_number > number:
            raise _Changed(f"round {number} is lost, but round {found_number} is there")


def _rows_at(data: bytes, at: int, generation: bytes, number: int) -> bytes | None:
    """The rows of the frame that begins there; None if it was never written, or not to its end."""
    if not _is_written(data, at, at + SECTOR_BYTES, generation):
        return None
    _, found, found_number, size = _HEAD.unpack_from(data, at)
    stop = at + frame_bytes(size)
    if found != generation or found_number != number or size > ROUND_BYTES_MAX or stop > len(data):
        raise _Changed(f"round {number} has a wrong header")
    if not _is_written(data, at, stop, generation):
        return None
    content = b"".join([data[start : start + _CONTENT_BYTES] for start in range(at, stop, SECTOR_BYTES)])
    frame = content[: _HEAD.size + size]
    if not _is_whole(frame):
        raise _Changed(f"round {number} does not match its CRC-32C")
    return frame[_HEAD.size :]


def _is_written(data: bytes, start: int, stop: int, generation: bytes) -> bool:
    """Whether all these sectors were written in this generation."""
    tag = int.from_bytes(generation[:_TAG_BYTES], "big")
    ends = range(start + SECTOR_BYTES, stop + 1, SECTOR_BYTES)
    wrong = {int.from_bytes(data[at - _TAG_BYTES : at], "big") ^ tag for at in ends}
    wrong.discard(0)
    if any(bits.bit_count() <= _FLIPPED_BITS_MAX for bits in wrong):
        raise _Changed(f"a bit of the sectors at byte {start} has flipped")
    return not wrong


def _is_whole(frame: bytes) -> bool:
    return crc32c(frame[_CRC_BYTES:]) == int.from_bytes(frame[:_CRC_BYTES], "big")
