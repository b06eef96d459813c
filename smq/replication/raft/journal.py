"""Raft's memory: the journal, term and vote, and the snapshot.

Owns the rows of the tables RAFT_LOG and RAFT_META. It reads them at the start; after that it only changes what is in
memory, and collects what is to be persisted until `take_changes` hands it out, as one submission: a truncation, what
replaces it and the term that caused it are on disk together or not at all. A JournalWriter submits them. The rows of
RAFT_LOG, one per command, are written by hand, for speed. The journal must never write by itself, nor drop an entry
that it cannot read: damage is an error, RaftDamaged. The engine and its roles import it, and tools that write a journal
without an engine.

On disk, all integers big-endian, every CRC a CRC-32C of the key and of everything after the CRC:
    RAFT_LOG   index u64          -> crc u32, term u64, entry (type byte, command)
    RAFT_META  "vote"             -> crc u32, version u8, term u64, voted for u64 (0 = none)
    RAFT_META  "journal"          -> crc u32, version u8, first index u64, last index u64, commit index u64
    RAFT_META  "snapshot"         -> crc u32, version u8, index u64, its term u64, state
    RAFT_META  "marks"            -> crc u32, version u8, writes u64, what other disks have reported

`writes` counts the submissions that changed any of this: a copy of the disk has fewer (raft/voters.py).
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from crc32c import crc32c

from smq.raft_state.binary import UINT64, Bytes, CodecError, TaggedLayout
from smq.raft_state.ids import NodeId
from smq.replication.ports import DataDamaged, Delete, Disk, Op, Put, Table
from smq.replication.raft.messages import NO_OP

Entry: TypeAlias = tuple[bytes, int, int]  # (type byte and command, index, term)

_VERSION: Final = 1
_CRC = struct.Struct(">I")
_KEY = struct.Struct(">Q")
_LOG = struct.Struct(">Q")  # term

_VOTE_KEY: Final = b"vote"
_BOUNDS_KEY: Final = b"journal"
_SNAPSHOT_KEY: Final = b"snapshot"
MARKS_KEY: Final = b"marks"
_FIRST_KEY: Final = _KEY.pack(0)
_END_KEY: Final = b"\xff" * 9  # after every index

_BEYOND_ALL: Final = b"\xff" * 16
_ASIDE: Final = b"damaged/"
_STARTED_KEY: Final = b"raft_started"  # in META: Raft's tables have been written, so they are not empty

_SCAN_BYTES: Final = 1 << 20  # a start reads the journal in pieces of this size
_SCAN_ENTRIES: Final = 500  # or of this many entries: about 2 ms
_ADVICE: Final = (
    "this node's Raft data cannot be trusted. Where other nodes hold it, it is fetched from them, and this node votes "
    "again when `smq status` shows it ready; stop none of the others before: they hold what was acknowledged"
)


class RaftDamaged(DataDamaged):
    """Journal, vote or snapshot cannot be read completely: this disk is no longer a voter."""


def damaged(table: Table, key: object, what: str) -> RaftDamaged:
    return RaftDamaged(f"{table.value}, {key}: {what}; {_ADVICE}")


def set_aside(disk: Disk) -> list[Op]:
    """Empties Raft's tables, and keeps their rows in META: they may still help if too many disks are damaged."""
    ops: list[Op] = []
    for table in (Table.RAFT_LOG, Table.RAFT_META):
        kept = _ASIDE + table.value.encode() + b"/"
        ops += [Put(Table.META, kept + key, value) for key, value in disk.scan(table, _FIRST_KEY[:1], _BEYOND_ALL)]
        ops.append(Delete(table, b"", _BEYOND_ALL))
    ops.append(Delete(Table.META, _STARTED_KEY, _STARTED_KEY + b"\x00"))
    return ops


def has_voted(disk: Disk) -> bool:
    """Whether this directory has taken part in an election, as far as its rows can be read."""
    stored = disk.get(Table.RAFT_META, _VOTE_KEY)
    return stored is not None and stored[_CRC.size :] != b"".join(_META[_VOTE_KEY].encode(_Vote(0, 0)))


def forget_set_aside() -> list[Op]:
    """The others have admitted the disk: they have everything that it had."""
    return [Delete(Table.META, _ASIDE, _ASIDE + b"\xff")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state machine's state after the entry `index`, whose term is `term`."""

    index: int
    term: int
    state: bytes

    @property
    def crc(self) -> int:
        """As stored and as sent: over the row's key, its fields and the state."""
        head, state = _META[_SNAPSHOT_KEY].encode(self)
        return crc32c(state, crc32c(_SNAPSHOT_KEY + bytes(head)))


class _Vote(NamedTuple):
    term: int
    voted_for: int  # 0: none


class _Bounds(NamedTuple):
    first: int
    last: int
    commit: int


class Reports(NamedTuple):
    """How many writes this disk has had, and what other disks have reported of theirs."""

    writes: int
    marks: bytes


_META: Final = {
    _VOTE_KEY: TaggedLayout(_VERSION, _Vote, ("term", UINT64), ("voted_for", UINT64)),
    _BOUNDS_KEY: TaggedLayout(_VERSION, _Bounds, ("first", UINT64), ("last", UINT64), ("commit", UINT64)),
    _SNAPSHOT_KEY: TaggedLayout(_VERSION, Snapshot, ("index", UINT64), ("term", UINT64), rest=[("state", Bytes())]),
    MARKS_KEY: TaggedLayout(_VERSION, Reports, ("writes", UINT64), rest=[("marks", Bytes())]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is to be persisted, in one submission: all of it or nothing.

    `ops` are rows of the tables above: entries put, a truncated tail deleted, term and vote, a snapshot. `vote` is the
    term and the node voted for, if `ops` change them. `last_index` is the journal's with these changes, `writes` their
    number among all writes of this disk.
    """

    ops: tuple[Op, ...]
    vote: tuple[int, NodeId | None] | None
    last_index: int
    writes: int


class RaftJournal:
    """In memory. Holds at least one entry from the moment the engine has started; its first is committed."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._bytes = 0
        self._bytes_at_snapshot = 0  # that a snapshot could not drop: they waited to be committed
        self._term = 0
        self._voted_for: NodeId | None = None
        self._commit = 1
        self.snapshot: Snapshot | None = None

        self._ops: list[Op] = []  # taken by `take_changes`, which ends every turn of the engine
        self._vote_changed = False
        self._has_written = False  # in this process
        self._durable_index = 0
        # (writes, last index then) of changes that were taken and are not durable; as bounded as the disk's queue
        self._unsynced: deque[tuple[int, int]] = deque()
        self.base_writes = 0  # that were on the disk when this process began
        self.durable_writes = 0
        self._writes = 0
        self.marks = b""
        self._marks_changed = False
        self._is_stored = False  # the rows below are on disk, or submitted: marks are never alone

    # ------------------------------------------------------------------------------------------------- start
    def load(self, disk: Disk) -> Iterator[None]:
        """Reads everything and checks every CRC, a few milliseconds of work between two yields. RaftDamaged if anything
        is missing or wrong."""
        self._entries, self._bytes, self.snapshot = [], 0, None
        self._term, self._voted_for, self._commit = 0, None, 1  # an attempt before this one may have met damage
        self._durable_index, self._is_stored = 0, False
        reports: Reports | None = _load_meta(disk, MARKS_KEY)
        self._writes, self.marks = reports or (0, b"")  # as on a new disk
        self.base_writes = self.durable_writes = self._writes
        bounds: _Bounds | None = _load_meta(disk, _BOUNDS_KEY)
        vote: _Vote | None = _load_meta(disk, _VOTE_KEY)
        self.snapshot = _load_meta(disk, _SNAPSHOT_KEY)
        yield from self._load_entries(disk)
        if bounds is None and vote is None and self.snapshot is None and not self._entries:
            if disk.get(Table.META, _STARTED_KEY) is not None:
                raise damaged(Table.RAFT_LOG, "all of it", "both of Raft's tables are empty")
            return  # a new node: its first submission writes vote and bounds together
        if vote is None:
            raise damaged(Table.RAFT_META, _VOTE_KEY.decode(), "term and vote are missing")
        if bounds is None:
            raise damaged(Table.RAFT_META, _BOUNDS_KEY.decode(), "the journal's bounds are missing")
        if not self._writes:
            raise damaged_marks("the count of writes is missing")
        self._term, self._voted_for = vote.term, NodeId(vote.voted_for) if vote.voted_for else None
        self._commit = bounds.commit
        self._check_bounds(bounds.first, bounds.last)
        self._durable_index = bounds.last
        self._is_stored = True

    def _load_entries(self, disk: Disk) -> Iterator[None]:
        start = _FIRST_KEY
        while True:
            pairs = disk.scan(Table.RAFT_LOG, start, _END_KEY, limit=_SCAN_ENTRIES, bytes_max=_SCAN_BYTES)
            for key, value in pairs:
                self._load_entry(key, value)
            if not pairs:
                return
            start = pairs[-1][0] + b"\0"
            yield

    def _load_entry(self, key: bytes, value: bytes) -> None:
        if len(key) != _KEY.size:
            raise damaged(Table.RAFT_LOG, f"key {key.hex()}", "it is no index")
        index = _KEY.unpack(key)[0]
        if self._entries and index != self._entries[-1][1] + 1:
            raise damaged(Table.RAFT_LOG, f"index {self._entries[-1][1] + 1}", "the entry is missing")
        if len(value) <= _CRC.size + _LOG.size or not is_whole_row(key, value):
            raise damaged(Table.RAFT_LOG, f"index {index}", "the checksum does not match")
        term = _LOG.unpack_from(value, _CRC.size)[0]
        command = value[_CRC.size + _LOG.size :]
        self._entries.append((command, index, term))
        self._bytes += len(command)

    def _check_bounds(self, first: int, last: int) -> None:
        """The journal's bounds must match the entries that were found, to the last one."""
        if not self._entries or self.first_index != first:
            raise damaged(Table.RAFT_LOG, f"index {first}", "the first entry is missing")
        if self.last_index != last:
            missing = min(self.last_index, last) + 1
            raise damaged(Table.RAFT_LOG, f"index {missing}", f"the journal should end with {last}")
        if self._commit > last or self._term < self.last_term:
            raise damaged(Table.RAFT_META, "journal, vote", "commit index or term does not fit the entries")
        covered = 1 if self.snapshot is None else self.snapshot.index
        if not first <= covered <= last or (self.snapshot and self.term_at(covered) != self.snapshot.term):
            raise damaged(Table.RAFT_META, _SNAPSHOT_KEY.decode(), "it does not fit the journal")

    # ------------------------------------------------------------------------------------------------- reading
    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: int) -> Entry:
        return self._entries[position]

    @property
    def first_index(self) -> int:
        return self._entries[0][1]

    @property
    def last_index(self) -> int:
        return self._entries[-1][1]

    @property
    def last_term(self) -> int:
        return self._entries[-1][2]

    def bytes_from(self, index: int) -> int:
        """Of the entries in memory from `index` on."""
        return sum(len(entry[0]) for entry in self._entries[self._position(index) :])

    @property
    def grown_bytes(self) -> int:
        """By which the entries in memory have grown since the last snapshot, or the start."""
        return self._bytes - self._bytes_at_snapshot

    @property
    def durable_index(self) -> int:
        """Every entry of the present journal up to this one is on disk."""
        return self._durable_index

    @property
    def is_behind(self) -> bool:
        """Changes that were taken are not on disk yet."""
        return bool(self._unsynced)

    @property
    def term(self) -> int:
        return self._term

    @property
    def voted_for(self) -> NodeId | None:
        return self._voted_for

    @property
    def commit_index(self) -> int:
        return self._commit

    def term_at(self, index: int) -> int:
        """Of an entry that is in the journal."""
        return self._entries[self._position(index)][2]

    def entries_from(self, index: int, *, count_max: int, bytes_max: int = 1 << 62) -> list[Entry]:
        """Entries from `index` on: at least one if there is one, and no more than fit bytes_max."""
        start = self._position(index)
        total = 0
        for stop in range(start, min(start + count_max, len(self._entries))):
            total += len(self._entries[stop][0])
            if total > bytes_max and stop > start:
                return self._entries[start:stop]
        return self._entries[start : start + count_max]

    def _position(self, index: int) -> int:
        position = index - self._entries[0][1]
        if position < 0:
            raise IndexError(f"entry {index} is no longer in the journal, which begins with {self._entries[0][1]}")
        return position

    # ------------------------------------------------------------------------------------------------- changing
    def set_term(self, term: int, voted_for: NodeId | None) -> None:
        """ValueError for what Raft excludes: an older term, or a second vote in the same one."""
        if term < self._term or (term == self._term and self._voted_for not in (None, voted_for)):
            raise ValueError(f"vote for {voted_for} in term {term} after a vote for {self._voted_for} in {self._term}")
        if (term, voted_for) != (self._term, self._voted_for):
            self._term, self._voted_for = term, voted_for
            self._vote_changed = True

    def commit_to(self, index: int) -> None:
        self._commit = max(self._commit, index)

    def add(self, command: bytes, index: int, term: int) -> None:
        if self._entries and index != self.last_index + 1:
            raise ValueError(f"entry {index} cannot follow entry {self.last_index}")
        self._entries.append((command, index, term))
        self._bytes += len(command)
        self._ops.append(_entry_put(command, index, term))

    def truncate_from(self, index: int) -> None:
        """Drops `index` and everything after it; never a committed entry."""
        if index <= self._commit:
            raise ValueError(f"entry {index} is committed (up to {self._commit}) and cannot be dropped")
        position = self._position(index)
        self._bytes -= sum(len(entry[0]) for entry in self._entries[position:])
        self._ops.append(Delete(Table.RAFT_LOG, _KEY.pack(index), _KEY.pack(self.last_index + 1)))
        del self._entries[position:]
        self._durable_index = min(self._durable_index, index - 1)
        self._unsynced = deque((writes, min(last, index - 1)) for writes, last in self._unsynced)

    def compact(self, snapshot: Snapshot, first_kept: int) -> None:
        """Stores the snapshot and drops the entries before `first_kept` (<= the snapshot's index), as one."""
        if not self.first_index <= first_kept <= snapshot.index <= self.last_index:
            raise ValueError(f"a snapshot of {snapshot.index} cannot keep from {first_kept}")
        position = self._position(first_kept)
        self._bytes -= sum(len(entry[0]) for entry in self._entries[:position])
        del self._entries[:position]
        self.snapshot = snapshot
        self._bytes_at_snapshot = self._bytes
        self._ops.append(_meta_put(_SNAPSHOT_KEY, snapshot))
        self._ops.append(Delete(Table.RAFT_LOG, _FIRST_KEY, _KEY.pack(first_kept)))

    def install(self, snapshot: Snapshot) -> None:
        """Replaces the whole journal by a snapshot received from the leader, as one."""
        self._entries = []
        self._bytes = 0
        self._durable_index = 0
        self._unsynced = deque((writes, 0) for writes, _ in self._unsynced)
        self._commit = snapshot.index
        self.snapshot = snapshot
        self._ops.append(_meta_put(_SNAPSHOT_KEY, snapshot))
        self._ops.append(Delete(Table.RAFT_LOG, _FIRST_KEY, _END_KEY))
        # The entry itself was compacted away at the leader; its index and term are all that is ever asked of it.
        self.add(bytes([NO_OP]), snapshot.index, snapshot.term)
        self._bytes_at_snapshot = self._bytes

    def take_changes(self) -> Changes | None:
        """What has changed since the last call; None if nothing has. The commit index alone is not worth a write: it
        goes with the next one, and is only ever too low."""
        if not self._ops and not self._vote_changed:
            return None
        is_first, self._has_written = not self._has_written, True
        vote_changed, self._vote_changed = self._vote_changed, False
        if is_first:
            self._ops.append(Put(Table.META, _STARTED_KEY, b"1"))
        if vote_changed or is_first:
            self._ops.append(_meta_put(_VOTE_KEY, _Vote(self._term, self._voted_for or 0)))
        self._ops.append(_meta_put(_BOUNDS_KEY, _Bounds(self.first_index, self.last_index, self._commit)))
        self._writes += 1
        self._ops.append(self._marks_put())
        self._is_stored = True
        ops, self._ops = self._ops, []
        self._unsynced.append((self._writes, self.last_index))
        return Changes(
            ops=tuple(ops),
            vote=(self._term, self._voted_for) if vote_changed else None,
            last_index=self.last_index,
            writes=self._writes,
        )

    def on_durable(self, writes: int) -> None:
        """The changes with this number, and all before them, are on disk."""
        while self._unsynced and self._unsynced[0][0] <= writes:
            self.durable_writes, self._durable_index = self._unsynced.popleft()

    def keep_marks(self, marks: bytes) -> None:
        """With the next write, or when `take_marks` is asked."""
        self.marks = marks
        self._marks_changed = True

    def take_marks(self) -> list[Op]:
        """If no other write has taken them along. It counts as none, or two idle nodes would wake each other."""
        return [self._marks_put()] if self._marks_changed and self._is_stored else []

    def _marks_put(self) -> Put:
        self._marks_changed = False
        return _meta_put(MARKS_KEY, Reports(self._writes, self.marks))

    def rewrite_row(self, table: Table, key: bytes) -> None:
        """Writes a row again from memory that has rotted since it was read at the start."""
        if table is Table.RAFT_META and key == _SNAPSHOT_KEY and self.snapshot is not None:
            self._ops.append(_meta_put(_SNAPSHOT_KEY, self.snapshot))
        elif table is Table.RAFT_LOG and len(key) == _KEY.size and self._entries:
            index = _KEY.unpack(key)[0]
            if self.first_index <= index <= self.last_index:
                command, _, term = self._entries[self._position(index)]
                self._ops.append(_entry_put(command, index, term))
            else:
                self._ops.append(Delete(Table.RAFT_LOG, key, key + b"\x00"))
        if self._entries:
            self._vote_changed = True  # with every such write: vote and bounds are small


class JournalWriter:
    """The journal's way to the disk: submits its changes, and reports to it which of them are durable. It must never
    split changes, nor report any that the disk has not reported."""

    def __init__(self, disk: Disk, journal: RaftJournal, on_durable: Callable[[], None]) -> None:
        """`on_durable` is called on the loop after each submission of the journal that reached the disk."""
        self._disk = disk
        self._journal = journal
        self._on_durable = on_durable
        self._in_flight: deque[tuple[int, int]] = deque()  # (submission, writes); as bounded as the disk's queue

    def write(self, changes: Changes) -> int:
        """Returns the number of the submission."""
        seq = self._disk.submit(changes.ops, self._on_submission_done)
        self._in_flight.append((seq, changes.writes))
        return seq

    def flush(self) -> None:
        """Submits what has changed, if anything has."""
        if (changes := self._journal.take_changes()) is not None:
            self.write(changes)

    def flush_marks(self) -> None:
        if ops := self._journal.take_marks():
            self._disk.submit(ops)

    def _on_submission_done(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self._disk.durable_seq:
            self._journal.on_durable(self._in_flight.popleft()[1])
        self._on_durable()


def _load_meta(disk: Disk, key: bytes) -> Any:
    """What the row holds; None if there is none."""
    value = disk.get(Table.RAFT_META, key)
    return None if value is None else parse_meta(key, value)


def parse_meta(key: bytes, value: bytes) -> Any:
    """What a row of RAFT_META holds. Raises RaftDamaged."""
    if not is_whole_row(key, value):
        raise damaged(Table.RAFT_META, key.decode(), "the checksum does not match")
    try:
        return _META[key].decode(memoryview(value)[_CRC.size :])
    except CodecError as e:
        raise damaged(Table.RAFT_META, key.decode(), f"it does not decode: {e}") from e


def is_whole_row(key: bytes, value: bytes) -> bool:
    """Whether a row of RAFT_LOG or RAFT_META matches its CRC."""
    return len(value) > _CRC.size and crc32c(value[_CRC.size :], crc32c(key)) == _CRC.unpack_from(value)[0]


def damaged_marks(why: object) -> RaftDamaged:
    return damaged(Table.RAFT_META, MARKS_KEY.decode(), str(why))


def _entry_put(command: bytes, index: int, term: int) -> Put:
    key, head = _KEY.pack(index), _LOG.pack(term)
    return Put(Table.RAFT_LOG, key, _CRC.pack(crc32c(command, crc32c(key + head))) + head + command)


def _meta_put(key: bytes, value: Any) -> Put:
    body = b"".join(_META[key].encode(value))
    return Put(Table.RAFT_META, key, _CRC.pack(crc32c(body, crc32c(key))) + body)
