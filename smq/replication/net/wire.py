"""Messages between nodes, other than Raft's own: shapes and bytes.

Owns the first byte of every message on both channels, and how the messages that a turn sends to one peer share a frame.
The bytes of a message are a row of the table at the end. The two that are sent for every batch, Append and Ack, are
written by hand: the table makes no message as fast. Parsing is bounded: for any input, `decode` returns a message or
raises CodecError, and only the session that it came from suffers. No pickle, ever.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

from smq.raft_state.binary import (
    BYTE,
    FLAG,
    INT32,
    INT64,
    UINT32,
    UINT64,
    Bytes,
    Choice,
    CodecError,
    Fixed,
    Items,
    Layout,
    Pieces,
    Reader,
    TaggedLayout,
    View,
    cut,
    packed,
)
from smq.raft_state.fields import EPOCH, OFFSET, PARTITION
from smq.raft_state.ids import (
    NO_BIRTH,
    NO_DISK,
    BirthId,
    DiskId,
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    Term,
)
from smq.raft_state.limits import BIRTH_ID_BYTES, DISK_ID_BYTES, NODES_MAX, SEGMENT_DIGEST_BYTES
from smq.replication.monitoring.anomalies import DIGEST_BYTES
from smq.replication.net.disk_marks import MARKS, Mark
from smq.replication.ports import Buffer, Quorum, QuorumReplica

RAFT: Final = 0  # the rest of the message belongs to the engine
ENDS_MAX: Final = 1_000  # partitions in one question: a millisecond or two of the leader's loop
TABLE_PIECE_BYTES: Final = 1 << 20  # of producers in one message: as an Append, it must not hold up the link
TABLE_PIECES_MAX: Final = 4096  # 4 GiB: more than twenty million producers, which no node remembers


class DiskCondition(enum.IntEnum):
    """The worse, the larger."""

    FINE = 0
    FULL = 1  # it takes no records until it has room again
    HANGS = 2  # it has written nothing for a while, without an error


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """CONTROL: this process is alive. A node that `is_leaving` gets no more work, and is fenced once it is gone. A node
    whose `disk` is not fine leads only if no other node can. `marks` are its own disk's mark, and then those that it
    knows of other nodes' disks. `digest` is that of the replicated state after the entry `digest_index`, the newest
    that this process has computed; zeros before the first. `birth` is the directory's, zeros before it has one; then
    `may_found` says that an operator wants a new cluster. The first message of every session."""

    incarnation: Incarnation
    marks: tuple[Mark, ...]
    is_leaving: bool = False
    disk: DiskCondition = DiskCondition.FINE
    digest_index: LogIndex = LogIndex(0)
    digest: bytes = bytes(DIGEST_BYTES)
    birth: BirthId = NO_BIRTH
    may_found: bool = False


@dataclass(frozen=True, slots=True)
class Birth:
    """CONTROL, to a node whose directory has no birth, from one that has: the cluster's, with the disk of each node
    when it began (rule 18). `forgotten` is the receiver's disk if that is registered already: it had a birth; zeros
    otherwise."""

    birth: BirthId
    disks: tuple[tuple[NodeId, DiskId], ...]
    forgotten: DiskId = NO_DISK


@dataclass(frozen=True, slots=True)
class Propose:
    """CONTROL, to the Raft leader. `request` is unique among all processes (it starts at a random number)."""

    request: int
    command: bytes


@dataclass(frozen=True, slots=True)
class ReadIndex:
    """CONTROL, to the Raft leader: which index is committed now? Answered by Proposed, with the index that the reader
    must have applied."""

    request: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """CONTROL, the answer. `reply` is empty unless the command was committed."""

    request: int
    outcome: int
    index: LogIndex
    reply: bytes


COMMITTED: Final = 0
NOT_LEADER: Final = 1
UNKNOWN: Final = 2


@dataclass(frozen=True, slots=True)
class ElectionQuery:
    """CONTROL, from the Raft leader of this term: seal these epochs (rule 21), and say where your logs end."""

    query: int
    term: Term
    partitions: tuple[tuple[PartitionId, Epoch], ...]


class SealedLog(NamedTuple):
    """The durable, verified log of a replica that has sealed. `good` is how far it is intact beyond what is known to be
    committed, and so what the replica offers as a candidate; NO_CANDIDATE if it must not lead."""

    partition: PartitionId
    end: Offset
    good: Offset


NO_CANDIDATE: Final = Offset(-1)


@dataclass(frozen=True, slots=True)
class ElectionReport:
    """CONTROL: only of partitions whose applied epoch is the one in the query."""

    query: int
    incarnation: Incarnation
    logs: tuple[SealedLog, ...]


@dataclass(frozen=True, slots=True)
class Resign:
    """CONTROL, to the Raft leader: this node will stop leading these epochs."""

    partitions: tuple[tuple[PartitionId, Epoch], ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """CONTROL, to a partition's leader, from the Raft leader or a node whose operator wants it: hand over to
    `target`."""

    partition: PartitionId
    epoch: Epoch
    target: NodeId


@dataclass(frozen=True, slots=True)
class DescribeQuorum:
    """CONTROL, to the Raft leader: what does it know of Raft's voters?"""

    request: int


@dataclass(frozen=True, slots=True)
class QuorumDescribed:
    """CONTROL, the answer; from a node that leads Raft only."""

    request: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Ping:
    """DATA, both ways: a leader that gets no answer is isolated (rule 20)."""

    number: int
    is_answer: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """DATA, leader to follower: report where your log ends. Opens stream number `stream`."""

    partition: PartitionId
    epoch: Epoch
    stream: int


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Ack:
    """DATA, follower to leader: the state of its log at the moment of sending (rule 7).

    `end` is the durable verified end; `expect` is where the next append must start. `resync` answers a probe, or an
    append of `stream` that did not fit: the leader starts again at `expect`. `needs_producers` asks the leader to send
    its producer state at `expect` first: this log jumped over batches that others had (rule 16). `is_full` asks the
    leader to send nothing until a later Ack says otherwise: the disk takes no records. `is_held` asks for the same
    because too much waits for the disk already; what was sent meanwhile has been dropped. With `resync`, `tail` is the
    CRC of the envelope of the batch that ends at `expect`; 0 if that is not known, or compaction may have changed it.
    """

    partition: PartitionId
    epoch: Epoch
    incarnation: Incarnation
    end: Offset
    expect: Offset
    stream: int
    resync: bool
    needs_producers: bool = False
    is_full: bool = False
    is_held: bool = False
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Sealed:
    """DATA, follower to leader: this process has sealed the epoch, and acknowledges nothing more in it (rule 27)."""

    partition: PartitionId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Producers:
    """DATA, leader to follower: the producer state at offset `at`, for a log that jumped there (rule 16). It comes in
    consecutive pieces, as the table of 100,000 producers has 16 MB: this is number `piece` of `pieces`."""

    partition: PartitionId
    epoch: Epoch
    stream: int
    at: Offset
    piece: int
    pieces: int
    table: bytes


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Append:
    """DATA, leader to follower: consecutive stored values, exactly as in the leader's log. `commit` is the leader's
    known commit point: everything below it is committed (rule 24)."""

    partition: PartitionId
    epoch: Epoch
    stream: int
    commit: Offset
    values: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Commits:
    """DATA, leader to follower: commit points of partitions that the sender leads in these epochs (rule 24)."""

    points: tuple[tuple[PartitionId, Epoch, Offset], ...]


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """DATA, to another replica: send the batch that contains `offset`; the sender's copy is damaged."""

    partition: PartitionId
    request: int
    offset: Offset


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """DATA, the answer: the stored value, as in the replica's log; empty if it cannot serve the batch either. With
    `may_have` it is empty, too, but only for now: the replica has not found out, or may yet get the batch. `segment` is
    the digest of the compacted segment that the value is part of, zeros without one."""

    partition: PartitionId
    request: int
    may_have: bool
    value: Buffer
    segment: bytes = bytes(SEGMENT_DIGEST_BYTES)


class EndOutcome(enum.IntEnum):
    KNOWN = 0
    NOT_LEADER = 1  # this process does not lead the partition
    NOT_KNOWN = 2  # it leads, but does not know yet that everything before its epoch is committed
    NO_PARTITION = 3  # it is in no state that the node could have applied before the question


class End(NamedTuple):
    """A partition according to its leader. The numbers count only if the outcome is KNOWN."""

    partition: PartitionId
    outcome: EndOutcome
    epoch: Epoch = Epoch(0)
    log_start: Offset = Offset(0)
    lso: Offset = Offset(0)
    hwm: Offset = Offset(0)
    log_end: Offset = Offset(0)


@dataclass(frozen=True, slots=True)
class EndsQuery:
    """CONTROL, to the leader of these partitions: where do they end (rule 25)? The asker is a process of this
    incarnation, and waits for `wait_ms`."""

    request: int
    incarnation: Incarnation
    wait_ms: int
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True)
class EndsReport:
    """CONTROL, the answer: an outcome for each partition. Request and incarnation are the query's."""

    request: int
    incarnation: Incarnation
    ends: tuple[End, ...]


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """DATA: send the batches from `at` on of the segment [start, end) that has this digest; whatever lies there if the
    digest is zeros."""

    partition: PartitionId
    request: int
    start: Offset
    end: Offset
    digest: bytes
    at: Offset


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """DATA, the answer: consecutive stored values, as many as fit one message. Without any, the replica does not hold
    this segment, or `is_busy`: it does, but reads for too many others now."""

    partition: PartitionId
    request: int
    values: Sequence[Buffer]
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class StepQuery:
    """DATA, leader to follower: does your log hold all segments, whose digests together have this digest?"""

    partition: PartitionId
    request: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """DATA, the answer."""

    partition: PartitionId
    request: int
    is_in_step: bool


Message: TypeAlias = (
    Heartbeat
    | Birth
    | Propose
    | ReadIndex
    | Proposed
    | ElectionQuery
    | ElectionReport
    | Resign
    | Transfer
    | DescribeQuorum
    | QuorumDescribed
    | EndsQuery
    | EndsReport
    | Ping
    | Probe
    | Ack
    | Sealed
    | Append
    | Commits
    | Producers
    | FetchBatch
    | FoundBatch
    | SegmentQuery
    | SegmentPart
    | StepQuery
    | StepReport
)


# ------------------------------------------------------------------------------------------------------------ bytes
class _Quorum:
    """A description of Raft's quorum."""

    _HEAD: Final = Layout(INT32, INT64, INT64, UINT32, UINT32)  # leader, term, committed end; voters, observers
    _REPLICA: Final = Layout(INT32, FLAG, Fixed(DISK_ID_BYTES), INT64, INT64, INT64)  # the flag: its disk is known

    def parts(self, value: Quorum) -> Sequence[Buffer]:
        counts = (len(value.voters), len(value.observers))
        head = self._HEAD.pack(value.leader, value.term, value.committed_end, *counts)
        replicas = [
            self._REPLICA.pack(r.node, bool(r.disk), r.disk, r.end, r.heard_ms, r.caught_up_ms)
            for r in (*value.voters, *value.observers)
        ]
        return [head, *replicas]

    def read(self, reader: Reader) -> Quorum:
        leader, term, committed_end, voters, observers = self._HEAD.read(reader)
        return Quorum(
            leader=leader,
            term=term,
            committed_end=committed_end,
            voters=self._REPLICA.read_rows(reader, voters, _replica),
            observers=self._REPLICA.read_rows(reader, observers, _replica),
        )


def _replica(fields: Sequence[Any]) -> QuorumReplica:
    node, has_disk, disk, end, heard_ms, caught_up_ms = fields
    disk = DiskId(disk if has_disk else b"")
    return QuorumReplica(node=node, disk=disk, end=end, heard_ms=heard_ms, caught_up_ms=caught_up_ms)


def _check_heartbeat(m: Heartbeat) -> None:
    if not m.marks:
        raise CodecError("a heartbeat without its sender's mark")


def _check_piece(m: Producers) -> None:
    if not m.piece < m.pieces <= TABLE_PIECES_MAX:
        raise CodecError(f"piece {m.piece} of {m.pieces} of a table of producers")


def _check_ends(m: EndsReport) -> None:
    for end in m.ends:
        offsets = end[3:]
        if offsets[0] < 0 or list(offsets) != sorted(offsets):
            raise CodecError(f"no partition ends with outcome {end.outcome} and offsets {offsets}")


_SEGMENT_DIGEST: Final = Fixed(SEGMENT_DIGEST_BYTES)
_BIRTH: Final = ("birth", Fixed(BIRTH_ID_BYTES))
_DISKS: Final = Items(INT32, Fixed(DISK_ID_BYTES), count_max=NODES_MAX)
_REQUEST: Final = ("request", UINT64)
_QUERY: Final = ("query", UINT64)
_INCARNATION: Final = ("incarnation", INT64)
_PARTITION: Final = ("partition", PARTITION)
_EPOCH: Final = ("epoch", EPOCH)
_STREAM: Final = ("stream", UINT32)
_EPOCHS: Final = Items(PARTITION, EPOCH)  # of partitions
_LOGS: Final = Items(PARTITION, OFFSET, OFFSET, make=SealedLog._make)
_POINTS: Final = Items(PARTITION, EPOCH, OFFSET)
_PARTITIONS: Final = Items(PARTITION, count_max=ENDS_MAX)
_ENDS: Final = Items(
    PARTITION, Choice(EndOutcome), EPOCH, OFFSET, OFFSET, OFFSET, OFFSET, make=End._make, count_max=ENDS_MAX
)

_APPEND: Final = struct.Struct(">B20siIqI")  # tag, partition, epoch, stream, commit, count of values
_ACK: Final = struct.Struct(">B20siqqqI????I")  # tag, and the fields in order
_ACK_TAG: Final = 17
_APPEND_TAG: Final = 18
_SEVERAL_TAG: Final = 23  # a frame of several messages: see `joined`

_TABLE: Final = (
    TaggedLayout(
        1,
        Heartbeat,
        _INCARNATION,
        ("is_leaving", FLAG),
        ("disk", Choice(DiskCondition)),
        ("digest_index", INT64),
        ("digest", Fixed(DIGEST_BYTES)),
        _BIRTH,
        ("may_found", FLAG),
        rest=[("marks", MARKS)],
        check=_check_heartbeat,
    ),
    TaggedLayout(11, Birth, _BIRTH, ("forgotten", Fixed(DISK_ID_BYTES)), rest=[("disks", _DISKS)]),
    TaggedLayout(2, Propose, _REQUEST, rest=[("command", Bytes())]),
    TaggedLayout(3, Proposed, _REQUEST, ("outcome", BYTE), ("index", INT64), rest=[("reply", Bytes())]),
    TaggedLayout(4, ElectionQuery, _QUERY, ("term", INT64), rest=[("partitions", _EPOCHS)]),
    TaggedLayout(5, ElectionReport, _QUERY, _INCARNATION, rest=[("logs", _LOGS)]),
    TaggedLayout(6, Resign, rest=[("partitions", _EPOCHS)]),
    TaggedLayout(7, Transfer, _PARTITION, _EPOCH, ("target", INT32)),
    TaggedLayout(8, ReadIndex, _REQUEST),
    TaggedLayout(9, EndsQuery, _REQUEST, _INCARNATION, ("wait_ms", UINT32), rest=[("partitions", _PARTITIONS)]),
    TaggedLayout(10, EndsReport, _REQUEST, _INCARNATION, rest=[("ends", _ENDS)], check=_check_ends),
    TaggedLayout(14, DescribeQuorum, _REQUEST),
    TaggedLayout(15, QuorumDescribed, _REQUEST, rest=[("quorum", _Quorum())]),
    TaggedLayout(16, Probe, _PARTITION, _EPOCH, _STREAM),
    TaggedLayout(19, Ping, ("number", UINT64), ("is_answer", FLAG)),
    TaggedLayout(
        20,
        Producers,
        _PARTITION,
        _EPOCH,
        _STREAM,
        ("at", OFFSET),
        ("piece", UINT32),
        ("pieces", UINT32),
        rest=[("table", Bytes())],
        check=_check_piece,
    ),
    TaggedLayout(21, FetchBatch, _PARTITION, _REQUEST, ("offset", OFFSET)),
    TaggedLayout(
        22, FoundBatch, _PARTITION, _REQUEST, ("may_have", FLAG), ("segment", _SEGMENT_DIGEST), rest=[("value", View())]
    ),
    TaggedLayout(24, Sealed, _PARTITION, _EPOCH),
    TaggedLayout(25, Commits, rest=[("points", _POINTS)]),
    TaggedLayout(
        26,
        SegmentQuery,
        _PARTITION,
        _REQUEST,
        ("start", OFFSET),
        ("end", OFFSET),
        ("digest", _SEGMENT_DIGEST),
        ("at", OFFSET),
    ),
    TaggedLayout(27, SegmentPart, _PARTITION, _REQUEST, ("is_busy", FLAG), rest=[("values", Pieces())]),
    TaggedLayout(28, StepQuery, _PARTITION, _REQUEST, ("digest", _SEGMENT_DIGEST)),
    TaggedLayout(29, StepReport, _PARTITION, _REQUEST, ("is_in_step", FLAG)),
)
_OF_CLASS: Final = {layout.cls: layout for layout in _TABLE}


def encode(message: Message) -> list[Buffer]:
    """The message as a gather list; the values of an Append are passed on, not copied."""
    match message:
        case Append(pid, epoch, stream, commit, values):
            head = _APPEND.pack(_APPEND_TAG, pid, epoch, stream, commit, len(values))
            return [head + packed(map(len, values)), *values]
        case Ack(pid, epoch, incarnation, end, expect, stream, resync, needs_producers, is_full, is_held, tail):
            flags = (resync, needs_producers, is_full, is_held)
            return [_ACK.pack(_ACK_TAG, pid, epoch, incarnation, end, expect, stream, *flags, tail)]
    return _OF_CLASS[type(message)].encode(message)


def decode(payload: memoryview) -> Message:
    """The one message in `payload`, which is not empty and whose first byte is not RAFT. CodecError otherwise."""
    decoder = _DECODERS.get(payload[0])
    if decoder is None:
        raise CodecError(f"unknown message kind {payload[0]}")
    try:
        return decoder(payload)
    except struct.error as e:
        raise CodecError(f"message kind {payload[0]} of {len(payload)} bytes: {e}") from e


def _append(payload: memoryview) -> Append:
    _, pid, epoch, stream, commit, count = _APPEND.unpack_from(payload)
    return Append(PartitionId(pid), Epoch(epoch), stream, Offset(commit), cut(payload, _APPEND.size, count))


def _ack(payload: memoryview) -> Ack:
    return Ack(*_ACK.unpack(payload)[1:])


_DECODERS: Final[dict[int, Callable[[memoryview], Message]]] = {
    **{layout.tag: layout.decode for layout in _TABLE},
    _ACK_TAG: _ack,
    _APPEND_TAG: _append,
}


# ------------------------------------------------------------------------------------------------ several in a frame
_SEVERAL: Final = struct.Struct(">BI")  # tag, number; then the length of each message, and the messages


def joined(messages: Sequence[Sequence[Buffer]]) -> Sequence[Buffer]:
    """One frame's payload from encoded messages, in this order, as a gather list."""
    if len(messages) == 1:
        return messages[0]
    return [
        _SEVERAL.pack(_SEVERAL_TAG, len(messages)) + packed(sum(map(len, m)) for m in messages),
        *chain.from_iterable(messages),
    ]


def split(payload: memoryview) -> Sequence[memoryview]:
    """The encoded messages in a frame's payload. CodecError if they do not fill it, or if one is empty."""
    if not payload:
        raise CodecError("an empty message")
    if payload[0] != _SEVERAL_TAG:
        return (payload,)
    try:
        count = _SEVERAL.unpack_from(payload)[1]
    except struct.error as e:
        raise CodecError(f"a frame of several messages has {len(payload)} bytes") from e
    messages = cut(payload, _SEVERAL.size, count)
    if not all(messages):
        raise CodecError("an empty message among several")
    return messages
