"""The bytes of what a snapshot is made of: nodes, topics, partitions, groups, commits, users, replies, assignments.

Owns the writer and the reader of what has more than the fields of one record, or is so frequent that it is written by
hand. `state` has the records. It must never skip an entry or choose an order: `snapshot` does that. Only `snapshot`
imports it.
"""

import struct
from typing import Any, Final

from smq.raft_state.binary import (
    INT16,
    INT64,
    TEXT,
    U16,
    Blob,
    CodecError,
    Fixed,
    Group,
    Many,
    Reader,
    Record,
    read_count,
    write_count,
)
from smq.raft_state.fields import CONFIG
from smq.raft_state.ids import PartitionId, PartitionIndex, RequestId, TopicId
from smq.raft_state.limits import (
    PARTITION_ID_BYTES,
    REQUEST_ID_BYTES,
    SEGMENT_DIGEST_BYTES,
    TEXT_BYTES_MAX,
)
from smq.raft_state.state import (
    APP,
    GROUP,
    MEMBER,
    NODE,
    SLOT,
    TOPIC,
    TRANSACTION,
    AppState,
    Assigned,
    CommittedOffset,
    EpochStart,
    GroupKind,
    GroupPhase,
    GroupState,
    PartitionState,
    ProducerMark,
    Segment,
    TopicState,
    TransactionOutcome,
    TransactionPhase,
    TransactionState,
    held,
)

CLUSTER_CONFIG: Final = CONFIG
NODES: Final = Many(NODE)
COORDINATORS: Final = Many(SLOT)


def read_fields(reader: Reader, record: Record) -> dict[str, Any]:
    """Those of a record whose class has others beside them."""
    return {name: kind.read(reader) for name, kind in record.fields}


# ---------------------------------------------------------------------------------------- topics, partitions
_CONFIG_PAIR: Final = Group((TEXT, TEXT))
# ..., number of replicas, of incomplete ones, of marks, of segments, length of the history
_PARTITION: Final = struct.Struct(">iqiqqqqq?qqBBBII")
_EPOCH: Final = struct.Struct(">iq")
_MARK: Final = struct.Struct(">qq")
_SEGMENT: Final = struct.Struct(f">q{SEGMENT_DIGEST_BYTES}sq?")


def write_topic(topic: TopicState) -> bytes:
    """Without its partitions."""
    out = bytearray()
    TOPIC.write(out, topic)
    write_count(out, len(topic.config))
    for pair in sorted(topic.config.items()):
        _CONFIG_PAIR.write(out, pair)
    return bytes(out)


def read_topic(reader: Reader) -> TopicState:
    """Inverse of `write_topic`."""
    fields = read_fields(reader, TOPIC)
    config = dict(_CONFIG_PAIR.read(reader) for _ in range(read_count(reader)))
    return TopicState(config=config, partitions=[], **fields)


def write_partition(out: bytearray, p: PartitionState) -> None:
    """By hand, since there may be 100,000 of them: one struct, then replicas, incomplete, marks, segments, history."""
    history = p.history
    out += _PARTITION.pack(
        p.leader,
        p.leader_incarnation,
        p.epoch,
        p.next_offset,
        p.hwm,
        p.log_start,
        p.ts_ns,
        p.producers_start,
        p.is_opening,
        p.compacted_end,
        p.compactions,
        len(p.replicas),
        len(p.incomplete),
        len(p.producer_marks),
        len(p.segments),
        len(history),
    )
    out += struct.pack(f">{len(p.replicas)}i", *p.replicas)
    if p.incomplete:
        out += struct.pack(f">{len(p.incomplete)}i", *sorted(p.incomplete))
    for mark in p.producer_marks:
        out += _MARK.pack(mark.clock_ms, mark.hwm)
    if p.segments:
        out += b"".join(_SEGMENT.pack(*segment) for segment in p.segments)
    if len(history) == 1:
        out += _EPOCH.pack(history[0].epoch, history[0].start)
    else:
        out += b"".join(_EPOCH.pack(entry.epoch, entry.start) for entry in history)


def read_partition(reader: Reader, topic_id: TopicId, index: PartitionIndex) -> PartitionState:
    """Inverse of `write_partition`."""
    row = reader.unpack(_PARTITION)
    leader, incarnation, epoch, next_offset, hwm, log_start, ts_ns, producers_start, *more = row
    is_opening, compacted_end, compactions, replicas, incomplete, marks, segments, epochs = more
    return PartitionState(
        topic_id=topic_id,
        index=index,
        leader=leader,
        leader_incarnation=incarnation,
        epoch=epoch,
        next_offset=next_offset,
        hwm=hwm,
        log_start=log_start,
        ts_ns=ts_ns,
        producers_start=producers_start,
        is_opening=is_opening,
        compacted_end=compacted_end,
        compactions=compactions,
        replicas=struct.unpack(f">{replicas}i", reader.take(4 * replicas)),
        incomplete=frozenset(struct.unpack(f">{incomplete}i", reader.take(4 * incomplete))),
        producer_marks=[
            ProducerMark(at_ms, mark) for at_ms, mark in _MARK.iter_unpack(reader.take(_MARK.size * marks))
        ],
        segments=[Segment(*row) for row in _SEGMENT.iter_unpack(reader.take(_SEGMENT.size * segments))],
        history=[EpochStart(e, start) for e, start in _EPOCH.iter_unpack(reader.take(_EPOCH.size * epochs))],
    )


# --------------------------------------------------------------------------------------------------- groups
_PHASE: Final = struct.Struct(">BB")  # kind and phase
_MEMBERS: Final = Many(MEMBER)
_COMMIT: Final = struct.Struct(f">{PARTITION_ID_BYTES}sqqiqH")  # ..., length of the metadata


def write_group(group: GroupState) -> bytes:
    """Without what it has committed."""
    out = bytearray()
    TEXT.write(out, group.name)
    out += _PHASE.pack(group.kind, group.phase)
    GROUP.write(out, group)
    _MEMBERS.write(out, tuple(group.members.values()))
    return bytes(out)


def read_group(reader: Reader) -> GroupState:
    """Inverse of `write_group`."""
    name, (kind_number, number) = TEXT.read(reader), reader.unpack(_PHASE)
    try:
        kind, phase = GroupKind(kind_number), GroupPhase(number)
    except ValueError as e:
        raise CodecError(f"a group of kind {kind_number} in phase {number}") from e
    fields = read_fields(reader, GROUP)
    members = {m.member.member_id: m for m in _MEMBERS.read(reader)}
    owners = {partition: name for name, m in members.items() for partition in held(m)}
    return GroupState(name=name, kind=kind, phase=phase, members=members, owners=owners, **fields)


def write_commit(out: bytearray, commit: tuple[PartitionId, CommittedOffset]) -> None:
    pid, committed = commit
    metadata = committed.metadata.encode()
    out += _COMMIT.pack(
        pid, committed.offset, committed.committed_ms, committed.leader_epoch, committed.order, len(metadata)
    )
    out += metadata


def read_commit(reader: Reader) -> tuple[PartitionId, CommittedOffset]:
    """Inverse of `write_commit`."""
    pid, offset, committed_ms, leader_epoch, order, size = reader.unpack(_COMMIT)
    try:
        metadata = str(reader.take(size), "utf-8")
    except UnicodeDecodeError as e:
        raise CodecError(f"the metadata of a commit is not UTF-8: {e}") from e
    return PartitionId(pid), CommittedOffset(
        offset=offset, metadata=metadata, committed_ms=committed_ms, leader_epoch=leader_epoch, order=order
    )


# --------------------------------------------------------------------------------------------- transactions
_PARTITIONS: Final = Many(Fixed(PARTITION_ID_BYTES))


def write_transaction(transaction: TransactionState) -> bytes:
    """Without its staged offsets, but with the number of groups that have some."""
    out = bytearray()
    TRANSACTION.write(out, transaction)
    out += bytes((transaction.phase, transaction.outcome))
    _PARTITIONS.write(out, tuple(sorted(transaction.partitions)))
    write_count(out, len(transaction.offsets))
    return bytes(out)


def read_transaction(reader: Reader) -> tuple[TransactionState, int]:
    """Inverse of `write_transaction`; also the number of groups."""
    fields = read_fields(reader, TRANSACTION)
    phase, outcome = reader.take(2)
    try:
        transaction = TransactionState(phase=TransactionPhase(phase), outcome=TransactionOutcome(outcome), **fields)
    except ValueError as e:
        raise CodecError(f"a transaction in phase {phase}, of outcome {outcome}") from e
    transaction.partitions = set(_PARTITIONS.read(reader))
    return transaction, read_count(reader)


# -------------------------------------------------------------------------------------------------- apps
def write_app(out: bytearray, item: tuple[str, AppState]) -> None:
    name, app = item
    TEXT.write(out, name)
    APP.write(out, app)


# ------------------------------------------------------------------------- producers, replies, assignments
PRODUCER: Final = Group((INT64, INT16))
_PRODUCER: Final = struct.Struct(">qh")
_REPLY_BYTES_MAX: Final = TEXT_BYTES_MAX + 64  # a Rejected with the longest message
REPLY: Final = Group((Fixed(REQUEST_ID_BYTES), Blob(U16, _REPLY_BYTES_MAX)))
_REPLY: Final = struct.Struct(f">{REQUEST_ID_BYTES}sH")  # request, length of the reply
ASSIGNED: Final = struct.Struct(f">{REQUEST_ID_BYTES}s{PARTITION_ID_BYTES}sqq")  # request, partition, base, count
ASSIGNED_BEFORE: Final = Many(Group((Fixed(PARTITION_ID_BYTES), INT64)))


def write_producer(out: bytearray, producer: tuple[int, int]) -> None:
    out += _PRODUCER.pack(*producer)


def write_reply(out: bytearray, item: tuple[RequestId, bytes]) -> None:
    request_id, reply = item
    out += _REPLY.pack(request_id, len(reply))
    out += reply


def write_assigned(out: bytearray, item: tuple[RequestId, Assigned]) -> None:
    request_id, assigned = item
    out += ASSIGNED.pack(request_id, assigned.partition, assigned.base, assigned.count)


def read_assigned(row: tuple[Any, ...]) -> tuple[RequestId, Assigned]:
    """Inverse of `write_assigned`, of an unpacked row."""
    request_id, pid, base, count = row
    return RequestId(request_id), Assigned(pid, base, count)
