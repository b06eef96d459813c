"""Messages between nodes, other than Raft's own: shapes and bytes.

Owns the first byte of every message on both channels; `several` has 23, `segment_messages` 26 to 29. Parsing is
bounded: for any input, `decode` returns a message or raises WireError, and only the session that it came from suffers.
No pickle, ever.
"""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from smq.raft_state.ids import DiskId, Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionId, Term
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.replication.anomalies import DIGEST_BYTES
from smq.replication.marks import Mark, pack_marks, unpack_marks
from smq.replication.net import segment_messages as segments
from smq.replication.net.pieces import ITEMS_MAX, cut, lengths_of
from smq.replication.net.pieces import WireError as WireError
from smq.replication.net.segment_messages import SegmentMessage, SegmentPart, SegmentQuery, StepQuery, StepReport
from smq.replication.ports import Buffer, Quorum, QuorumReplica

RAFT: Final = 0  # the rest of the message belongs to the engine
_PID_BYTES: Final = 20
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
    whose `disk` is not fine leads only if no other node can. `mark` is the mark of its own disk, `known` are the
    marks of other nodes' disks. `digest` is that of the replicated state after the entry `digest_index`, the newest
    that this process has computed; zeros before the first. The first message of every session."""

    incarnation: Incarnation
    mark: Mark
    known: tuple[Mark, ...]
    is_leaving: bool = False
    disk: DiskCondition = DiskCondition.FINE
    digest_index: LogIndex = LogIndex(0)
    digest: bytes = bytes(DIGEST_BYTES)


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


Message: TypeAlias = (
    Heartbeat
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
    | SegmentMessage
)

_HEARTBEAT: Final = struct.Struct(f">Bq?Bq{DIGEST_BYTES}s")
_REQUEST: Final = struct.Struct(">BQ")
_PROPOSED: Final = struct.Struct(">BQBq")
_REQUEST_ITEMS: Final = struct.Struct(">BQqI")  # then the items
_ITEMS: Final = struct.Struct(">BI")  # likewise
_PID_EPOCH: Final = struct.Struct(">20si")
_SEALED_LOG: Final = struct.Struct(">20sqq")
_TRANSFER: Final = struct.Struct(">B20sii")
_QUORUM: Final = struct.Struct(">BQiqqII")  # then the voters, then the observers
_QUORUM_REPLICA: Final = struct.Struct(">i?16sqqq")
_ENDS_QUERY: Final = struct.Struct(">BQqII")
_PID: Final = struct.Struct(">20s")
_END: Final = struct.Struct(">20sBiqqqq")
_END_OUTCOMES: Final = frozenset(EndOutcome)
_PING: Final = struct.Struct(">BQ?")
_PROBE: Final = struct.Struct(">B20siI")
_ACK: Final = struct.Struct(">B20siqqqI????I")
_SEALED: Final = struct.Struct(">B20si")
_PRODUCERS: Final = struct.Struct(">B20siIqII")
_FETCH_BATCH: Final = struct.Struct(">B20sQq")
_FOUND_BATCH: Final = struct.Struct(f">B20sQ?{SEGMENT_DIGEST_BYTES}s")
_APPEND: Final = struct.Struct(">B20siIqI")
_COMMIT: Final = struct.Struct(">20siq")


def encode(message: Message) -> list[Buffer]:
    """The message as a gather list; the values of an Append are passed on, not copied."""
    match message:
        case Append(pid, epoch, stream, commit, values):
            return [_APPEND.pack(18, pid, epoch, stream, commit, len(values)) + lengths_of(values), *values]
        case Commits(points):
            return [_ITEMS.pack(25, len(points)), b"".join(_COMMIT.pack(*point) for point in points)]
        case Ack(pid, epoch, incarnation, end, expect, stream, resync, needs_producers, is_full, is_held, tail):
            flags = (resync, needs_producers, is_full, is_held)
            return [_ACK.pack(17, pid, epoch, incarnation, end, expect, stream, *flags, tail)]
        case Sealed(pid, epoch):
            return [_SEALED.pack(24, pid, epoch)]
        case Producers(pid, epoch, stream, at, piece, pieces, table):
            return [_PRODUCERS.pack(20, pid, epoch, stream, at, piece, pieces), table]
        case FetchBatch(pid, request, offset):
            return [_FETCH_BATCH.pack(21, pid, request, offset)]
        case FoundBatch(pid, request, may_have, value, segment):
            return [_FOUND_BATCH.pack(22, pid, request, may_have, segment), value]
        case SegmentQuery() | SegmentPart() | StepQuery() | StepReport():
            return segments.encode(message)
        case Probe(pid, epoch, stream):
            return [_PROBE.pack(16, pid, epoch, stream)]
        case Ping(number, is_answer):
            return [_PING.pack(19, number, is_answer)]
        case Heartbeat(incarnation, mark, known, is_leaving, disk, index, digest):
            return [_HEARTBEAT.pack(1, incarnation, is_leaving, disk, index, digest), pack_marks((mark, *known))]
        case Propose(request, command):
            return [_REQUEST.pack(2, request), command]
        case ReadIndex(request):
            return [_REQUEST.pack(8, request)]
        case Proposed(request, outcome, index, reply):
            return [_PROPOSED.pack(3, request, outcome, index), reply]
        case ElectionQuery(query, term, partitions):
            items = b"".join(_PID_EPOCH.pack(*item) for item in partitions)
            return [_REQUEST_ITEMS.pack(4, query, term, len(partitions)), items]
        case ElectionReport(query, incarnation, logs):
            items = b"".join(_SEALED_LOG.pack(*item) for item in logs)
            return [_REQUEST_ITEMS.pack(5, query, incarnation, len(logs)), items]
        case Resign(partitions):
            return [_ITEMS.pack(6, len(partitions)), b"".join(_PID_EPOCH.pack(*item) for item in partitions)]
        case Transfer(pid, epoch, target):
            return [_TRANSFER.pack(7, pid, epoch, target)]
        case DescribeQuorum(request):
            return [_REQUEST.pack(14, request)]
        case QuorumDescribed(request, quorum):
            counts = (len(quorum.voters), len(quorum.observers))
            head = _QUORUM.pack(15, request, quorum.leader, quorum.term, quorum.committed_end, *counts)
            return [head, *map(_pack_replica, (*quorum.voters, *quorum.observers))]
        case EndsQuery(request, incarnation, wait_ms, partitions):
            return [_ENDS_QUERY.pack(9, request, incarnation, wait_ms, len(partitions)), b"".join(partitions)]
        case EndsReport(request, incarnation, ends):
            return [_REQUEST_ITEMS.pack(10, request, incarnation, len(ends)), b"".join(_END.pack(*end) for end in ends)]


def _pack_replica(replica: QuorumReplica) -> bytes:
    times = (replica.heard_ms, replica.caught_up_ms)
    return _QUORUM_REPLICA.pack(replica.node, bool(replica.disk), replica.disk, replica.end, *times)


def decode(payload: memoryview) -> Message:
    """The one message in `payload`, which is not empty and whose first byte is not RAFT. WireError otherwise."""
    decoder = _DECODERS.get(payload[0])
    if decoder is None:
        raise WireError(f"unknown message kind {payload[0]}")
    try:
        return decoder(payload)
    except struct.error as e:
        raise WireError(f"message kind {payload[0]} of {len(payload)} bytes: {e}") from e


def _items(payload: memoryview, offset: int, count: int, item: struct.Struct) -> list[tuple[Any, ...]]:
    if count > ITEMS_MAX or len(payload) - offset != count * item.size:
        raise WireError(f"{count} items do not fit {len(payload) - offset} bytes")
    return list(item.iter_unpack(payload[offset:]))


def _pid_epochs(payload: memoryview, offset: int, count: int) -> tuple[tuple[PartitionId, Epoch], ...]:
    return tuple((PartitionId(p), Epoch(e)) for p, e in _items(payload, offset, count, _PID_EPOCH))


def _heartbeat(payload: memoryview) -> Message:
    _, incarnation, is_leaving, disk, index, digest = _HEARTBEAT.unpack_from(payload)
    try:
        mark, *known = unpack_marks(payload[_HEARTBEAT.size :])
        condition = DiskCondition(disk)
    except ValueError as e:
        raise WireError(f"a heartbeat: {e}") from e
    return Heartbeat(Incarnation(incarnation), mark, tuple(known), is_leaving, condition, LogIndex(index), digest)


def _propose(payload: memoryview) -> Message:
    return Propose(_REQUEST.unpack_from(payload)[1], bytes(payload[_REQUEST.size :]))


def _read_index(payload: memoryview) -> Message:
    return ReadIndex(_REQUEST.unpack(payload)[1])


def _proposed(payload: memoryview) -> Message:
    _, request, outcome, index = _PROPOSED.unpack_from(payload)
    return Proposed(request, outcome, LogIndex(index), bytes(payload[_PROPOSED.size :]))


def _query(payload: memoryview) -> Message:
    _, query, term, count = _REQUEST_ITEMS.unpack_from(payload)
    return ElectionQuery(query, Term(term), _pid_epochs(payload, _REQUEST_ITEMS.size, count))


def _report(payload: memoryview) -> Message:
    _, query, incarnation, count = _REQUEST_ITEMS.unpack_from(payload)
    logs = _items(payload, _REQUEST_ITEMS.size, count, _SEALED_LOG)
    return ElectionReport(query, Incarnation(incarnation), tuple(SealedLog(*log) for log in logs))


def _resign(payload: memoryview) -> Message:
    _, count = _ITEMS.unpack_from(payload)
    return Resign(_pid_epochs(payload, _ITEMS.size, count))


def _transfer(payload: memoryview) -> Message:
    _, pid, epoch, target = _TRANSFER.unpack(payload)
    return Transfer(PartitionId(pid), Epoch(epoch), NodeId(target))


def _describe_quorum(payload: memoryview) -> Message:
    return DescribeQuorum(_REQUEST.unpack(payload)[1])


def _quorum_described(payload: memoryview) -> Message:
    _, request, leader, term, committed_end, voter_count, observer_count = _QUORUM.unpack_from(payload)
    if len(payload) - _QUORUM.size != (voter_count + observer_count) * _QUORUM_REPLICA.size:
        raise WireError(f"{voter_count} voters and {observer_count} observers do not fit {len(payload)} bytes")
    replicas = tuple(
        QuorumReplica(
            node=NodeId(node),
            disk=DiskId(disk if has_disk else b""),
            end=end,
            heard_ms=heard_ms,
            caught_up_ms=caught_up_ms,
        )
        for node, has_disk, disk, end, heard_ms, caught_up_ms in _QUORUM_REPLICA.iter_unpack(payload[_QUORUM.size :])
    )
    quorum = Quorum(
        leader=NodeId(leader),
        term=Term(term),
        committed_end=committed_end,
        voters=replicas[:voter_count],
        observers=replicas[voter_count:],
    )
    return QuorumDescribed(request, quorum)


def _ends_query(payload: memoryview) -> Message:
    _, request, incarnation, wait_ms, count = _ENDS_QUERY.unpack_from(payload)
    if count > ENDS_MAX:
        raise WireError(f"a question about {count} partitions, at most {ENDS_MAX} are allowed")
    pids = _items(payload, _ENDS_QUERY.size, count, _PID)
    return EndsQuery(request, Incarnation(incarnation), wait_ms, tuple(PartitionId(pid) for (pid,) in pids))


def _ends_report(payload: memoryview) -> Message:
    _, request, incarnation, count = _REQUEST_ITEMS.unpack_from(payload)
    if count > ENDS_MAX:
        raise WireError(f"an answer about {count} partitions, at most {ENDS_MAX} are allowed")
    ends = _items(payload, _REQUEST_ITEMS.size, count, _END)
    return EndsReport(request, Incarnation(incarnation), tuple(_end(*item) for item in ends))


def _end(pid: bytes, outcome: int, epoch: int, *offsets: int) -> End:
    if outcome not in _END_OUTCOMES or offsets[0] < 0 or list(offsets) != sorted(offsets):
        raise WireError(f"no partition ends with outcome {outcome} and offsets {offsets}")
    return End(PartitionId(pid), EndOutcome(outcome), Epoch(epoch), *map(Offset, offsets))


def _ping(payload: memoryview) -> Message:
    _, number, is_answer = _PING.unpack(payload)
    return Ping(number, is_answer)


def _probe(payload: memoryview) -> Message:
    _, pid, epoch, stream = _PROBE.unpack(payload)
    return Probe(PartitionId(pid), Epoch(epoch), stream)


def _ack(payload: memoryview) -> Message:
    _, pid, epoch, incarnation, end, expect, stream, *rest = _ACK.unpack(payload)
    return Ack(
        PartitionId(pid),
        Epoch(epoch),
        Incarnation(incarnation),
        Offset(end),
        Offset(expect),
        stream,
        *rest,
    )


def _sealed(payload: memoryview) -> Message:
    _, pid, epoch = _SEALED.unpack(payload)
    return Sealed(PartitionId(pid), Epoch(epoch))


def _producers(payload: memoryview) -> Message:
    _, pid, epoch, stream, at, piece, pieces = _PRODUCERS.unpack_from(payload)
    if not piece < pieces <= TABLE_PIECES_MAX:
        raise WireError(f"piece {piece} of {pieces} of a table of producers")
    table = bytes(payload[_PRODUCERS.size :])
    return Producers(PartitionId(pid), Epoch(epoch), stream, Offset(at), piece, pieces, table)


def _fetch_batch(payload: memoryview) -> Message:
    _, pid, request, offset = _FETCH_BATCH.unpack(payload)
    return FetchBatch(PartitionId(pid), request, Offset(offset))


def _found_batch(payload: memoryview) -> Message:
    _, pid, request, may_have, segment = _FOUND_BATCH.unpack_from(payload)
    return FoundBatch(PartitionId(pid), request, may_have, payload[_FOUND_BATCH.size :], segment)


def _append(payload: memoryview) -> Message:
    _, pid, epoch, stream, commit, count = _APPEND.unpack_from(payload)
    return Append(PartitionId(pid), Epoch(epoch), stream, Offset(commit), cut(payload, _APPEND.size, count))


def _commits(payload: memoryview) -> Message:
    _, count = _ITEMS.unpack_from(payload)
    points = _items(payload, _ITEMS.size, count, _COMMIT)
    return Commits(tuple((PartitionId(pid), Epoch(epoch), Offset(commit)) for pid, epoch, commit in points))


_DECODERS: Final = {
    1: _heartbeat,
    2: _propose,
    3: _proposed,
    4: _query,
    5: _report,
    6: _resign,
    7: _transfer,
    8: _read_index,
    9: _ends_query,
    10: _ends_report,
    14: _describe_quorum,
    15: _quorum_described,
    16: _probe,
    17: _ack,
    18: _append,
    19: _ping,
    20: _producers,
    21: _fetch_batch,
    22: _found_batch,
    24: _sealed,
    25: _commits,
    26: segments.segment_query,
    27: segments.segment_part,
    28: segments.step_query,
    29: segments.step_report,
}
