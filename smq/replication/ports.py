"""The ports through which a node meets the world: Clock, Rng, Compute, Network, Disk; and what it hears of Raft.

Production gives the node the real ones, the simulation its own; the code between is the same. Everything runs on one
thread, the node's loop: no port may call back from another thread, and no call here may block (`get` and the scans of
a disk are the exceptions: for starts and look-ups). A callback is never made from inside the call that requested it.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.raft_state.replies import Applied

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------- clock, rng
class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def monotonic_ns(self) -> int:
        """Never goes back; says nothing about the time of day."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 by this machine's clock; may jump either way."""

    def call_later(self, delay_ms: float, fn: Callable[[], None]) -> Timer:
        """Runs fn on the node's loop after `delay_ms`."""

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs fn on the node's loop after the current callback, in order."""


class Rng(Protocol):
    def random(self) -> float:
        """Uniform in [0, 1)."""

    def randbytes(self, n: int) -> bytes: ...


class Compute(Protocol):
    def run(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """Runs a pure function, off the loop if it can, and then `done` with its result on the loop: never within this
        call, and in any order with other jobs. Nothing may follow after the node has stopped. `job` must not raise."""


# ------------------------------------------------------------------------------------------------------- network
class Channel(enum.IntEnum):
    """One ordered session per pair of nodes and purpose, so that record batches never delay Raft."""

    CONTROL = 0  # Raft, heartbeats, forwarded proposals, elections
    DATA = 1  # record replication


class NetworkHandler(Protocol):
    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        """A new session: messages of an older one are no longer delivered, in either direction."""

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        """Messages sent and not yet delivered may be lost."""

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        """In the order sent, at most once. The receiver may keep the memory: it is never reused."""


class Network(Protocol):
    """Length-framed, FIFO, at-most-once messages within a session; the network itself opens sessions again."""

    def start(self, handler: NetworkHandler) -> None: ...

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        """Queues one message given as parts (gather). False, and nothing sent, if no session is open."""

    def is_open(self, peer: NodeId, channel: Channel) -> bool: ...

    def is_at_address(self, peer: NodeId) -> bool:
        """Whether the process of the open CONTROL session answers at the peer's address, too. False may mean that
        no process does."""

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        """Bytes queued and not yet taken by the operating system."""

    def close(self) -> None: ...


# ---------------------------------------------------------------------------------------------------------- disk
GiveUp: TypeAlias = Callable[[], None]  # its caller no longer wants a read


class DataDamaged(Exception):
    """Bytes on disk fail their CRC, or do not decode. The message names table and key."""


class Table(enum.Enum):
    """The named tables of a node's one environment (docs/formats.md)."""

    __hash__ = object.__hash__  # Enum's own is Python code, and a table is looked up several times for every row

    META = "meta"  # format version, cluster id, node id, incarnation
    RAFT_LOG = "raft_log"  # be64 index -> crc, term, command
    RAFT_META = "raft_meta"  # term and vote, commit, snapshot
    BATCHES = "batches"  # partition id, be64 base offset -> envelope + batch
    TIMES = "times"  # partition id, kind, be64 time, be64 base offset -> index row, or nothing
    CHECKPOINTS = "checkpoints"  # partition id -> where recovery may start; producer state


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Put:
    table: Table
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes every key in [start, stop)."""

    table: Table
    start: bytes
    stop: bytes


Op: TypeAlias = Put | Delete


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Space to write to: on the file system, and in pages that the store has freed and not used again. `total_bytes` is
    the size of the file system."""

    free_bytes: int
    reusable_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One slice of a table: the keys that failed the check, those whose value the medium could not give (the check got
    an empty one), the bytes read, and the next slice's first key (None at the end)."""

    damaged: list[bytes]
    unreadable: list[bytes]
    size: int
    next_key: bytes | None


class Rows(Protocol):
    """Committed rows, to be read immediately. The caller waits for the medium if it has to."""

    def get(self, table: Table, key: bytes) -> bytes | None: ...

    def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool = False,
        limit: int = 1 << 30,
        bytes_max: int = 1 << 62,
    ) -> list[tuple[bytes, bytes]]:
        """Committed pairs with start <= key < stop, ascending or (reverse) descending; at most `limit` pairs, and
        it ends after the pair that makes the values' total reach `bytes_max`. Copies."""

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        """As `scan`, keys only."""


class Disk(Rows, Protocol):
    """An ordered key-value store with one FIFO writer and group commit.

    Submissions are committed in order, each whole or not at all, any number of them in one synced transaction.
    A failed commit is fatal: `on_fatal` (given at construction) is called once, and nothing more is reported durable.
    Reads see all committed data, which may be more than has been reported. A value of table BATCHES that the medium
    cannot give is read as empty: it then fails its check, as damaged bytes do. `get`, `scan` and `scan_keys` hold up
    the loop until the medium has answered: they are for a start, before Raft begins, for deletions, which look up what
    they delete, and for a log's producers. All other reads are `read_from`, `look_up` and `examine`.
    """

    def submit(self, ops: Sequence[Op], done: Callable[[], None] | None = None) -> int:
        """Queues ops; returns their sequence number (from 1, +1 per call). `done` runs on the loop once they are
        on disk, in order of submission."""

    @property
    def submitted_seq(self) -> int:
        """The sequence number of the last submission; 0 before the first."""

    @property
    def durable_seq(self) -> int:
        """Everything submitted with this number or a lower one is on disk, as reported to the loop."""

    @property
    def is_closed(self) -> bool:
        """Whether submissions have ended. Reports of earlier submissions may still come."""

    @property
    def queued_bytes(self) -> int:
        """Size of the values submitted and not yet durable."""

    def read_from(
        self,
        table: Table,
        lowest: bytes,
        start: bytes,
        stop: bytes,
        *,
        place: bytes,
        bytes_max: int,
        done: Callable[[list[tuple[bytes, bytes]] | DataDamaged], None],
    ) -> GiveUp | None:
        """As `scan` in [start, stop), beginning with the last key in [lowest, start] if there is one. It ends before
        the pair that would make the values' total exceed `bytes_max`, but not before the first. The rows may have to
        come from the medium, so a thread of the disk's own reads them if it has one. `done` runs on the loop, not
        necessarily in order, with what was committed at some moment in between. DataDamaged if the table cannot be
        walked. None, and nothing is read, if too many reads wait. A read that is given up before it begins leaves the
        queue, and `done` is not called; after that it may be.

        `place`: what the rows belong to. If the medium is slow to give one of its rows, other reads of the place may
        wait for that one, but no others: those of the same start always, and the rest once it is slow."""

    def look_up(
        self, place: bytes, find: Callable[[Rows], T], done: Callable[[T | DataDamaged], None]
    ) -> GiveUp | None:
        """Runs `find` on a thread of the disk's own if it has one, over what was committed at one moment: it must touch
        nothing that the loop may change. `done` runs on the loop with what it returns, or with the DataDamaged that it
        raises. None, and giving up: as for `read_from`. Look-ups of one place run one after another. A value of any
        table that the medium cannot give is empty; the rows that are read after it may be of a later moment."""

    def examine(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        bytes_max: int,
        check: Callable[[bytes, bytes], bool],
        done: Callable[[Examined], None],
    ) -> None:
        """Reads committed rows as `scan` does and gives key and value of each to `check`, on the disk's own thread if
        it has one: `check` must be pure. `done` runs on the loop. One slice at a time. A table that cannot be walked is
        fatal, as a failed commit is."""

    def space(self) -> Space:
        """As of now."""

    def size_bytes(self) -> int:
        """The store's size on disk."""

    def close(self) -> None:
        """Commits what is queued, then releases the directory. If the disk hangs, that is fatal, as a failed commit is:
        the directory is released by the end of the process."""


# ---------------------------------------------------------------------------------------------------------- Raft
class ProposalLost(enum.Enum):
    NOT_LEADER = "not_leader"  # definite: never entered the log
    UNKNOWN = "unknown"  # indefinite: may have been, or may yet be, committed


@dataclass(frozen=True, slots=True)
class Committed:
    index: LogIndex
    applied: Applied


ProposalDone: TypeAlias = Callable[[Committed | ProposalLost], None]
ReadIndexDone: TypeAlias = Callable[[LogIndex | ProposalLost], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumReplica:
    """One disk with Raft's log, as the Raft leader knows it. `end` is after the last entry that is durable there. Times
    are in milliseconds of the leader's wall clock. -1 is unknown."""

    node: NodeId
    disk: DiskId  # empty if unknown
    end: int
    heard_ms: int  # its last answer; -1 for the leader itself
    caught_up_ms: int  # when it last had the whole log


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """Raft, as its leader knows it. An observer is a disk without a vote: its node has not been admitted with it."""

    leader: NodeId
    term: Term
    committed_end: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]
