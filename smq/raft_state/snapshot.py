"""The whole state as bytes, and back: exact, canonical, versioned.

Owns the snapshot format. Canonical: what has no order is sorted, what has one (replies and producers, which are
dropped oldest first) keeps it, so equal states have equal bytes and one digest. It must never leave out anything
that a later command's outcome depends on. Only `machine` and tests import it.
"""

import struct
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, Final, TypeAlias, TypeVar, cast

from smq.raft_state.binary import (
    FLAG,
    INT16,
    INT32,
    INT64,
    TEXT,
    U8,
    U16,
    U32,
    Blob,
    Bytes,
    CodecError,
    Fixed,
    Group,
    Many,
    Reader,
    Record,
    read_count,
    write_count,
)
from smq.raft_state.fields import GROUP_MEMBER
from smq.raft_state.ids import PartitionId, PartitionIndex, RequestId, TopicId
from smq.raft_state.limits import (
    DISK_ID_BYTES,
    GROUP_BYTES_MAX,
    PARTITION_ID_BYTES,
    REQUEST_ID_BYTES,
    TEXT_BYTES_MAX,
    TOPIC_ID_BYTES,
)
from smq.raft_state.state import (
    Assigned,
    ClusterState,
    CommittedOffset,
    CoordinatorSlot,
    EpochStart,
    GroupPhase,
    GroupState,
    MemberState,
    NodeState,
    PartitionState,
    TopicState,
    members_bytes,
)

__all__ = [
    "SCHEMA_VERSION",
    "Bytes",
    "Steps",
    "decode_state",
    "decode_steps",
    "encode_state",
    "run_through",
    "state_pieces",
]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # work that others may come between: its result, after some yields

PIECE_ITEMS: Final = 250  # partitions, commits, replies: half a millisecond of encoding, one of decoding
PIECE_BYTES: Final = 32 << 10  # a piece is not much smaller: each costs its taker a turn
FORMAT_VERSION: Final = 5  # of these bytes; 2 had no racks, 3 no floor of generations, 4 no count of replies
_FIRST_VERSION: Final = 1  # the oldest that is read: no drained nodes, no assigned offsets, no members of groups
SCHEMA_VERSION: Final = 1  # of the state: raised by a command, once every node understands the new one

_MAGIC: Final = b"smqS"
_HEAD: Final = struct.Struct(">4sBI")  # magic, format version, schema version
_PARTITION: Final = struct.Struct(">iqiqqqqBI")  # ..., number of replicas, length of the history
_COMMITTED: Final = struct.Struct(f">{PARTITION_ID_BYTES}sqqH")  # ..., length of the metadata
_EPOCH: Final = struct.Struct(">iq")
_REPLY_BYTES_MAX: Final = TEXT_BYTES_MAX + 64  # a Rejected with the longest message
_PAIR: Final = Group((TEXT, TEXT))

_CLUSTER: Final = Record(
    ClusterState,
    (
        ("cluster_id", TEXT),
        ("topics_max", INT64),
        ("partitions_max", INT64),
        ("groups_max", INT64),
        ("replies_max", INT64),
        ("next_producer_id", INT64),
    ),
)
_NODE_V1: Final = (
    ("node", INT32),
    ("incarnation", INT64),
    ("disk", Fixed(DISK_ID_BYTES)),
    ("grpc_address", TEXT),
    ("http_address", TEXT),
    ("kafka_address", TEXT),
    ("fenced", FLAG),
)
_NODE_V2: Final = (*_NODE_V1, ("drained", FLAG))
_NODE: Final = (*_NODE_V2, ("rack", TEXT))
_NODES: Final = {
    version: Many(Record(NodeState, fields))
    for version, fields in enumerate((_NODE_V1, _NODE_V2, _NODE, _NODE, _NODE), 1)
}
_TOPIC: Final = (
    ("name", TEXT),
    ("topic_id", Fixed(TOPIC_ID_BYTES)),
    ("replication_factor", INT32),
    ("created_ms", INT64),
)
_ASSIGNED: Final = struct.Struct(f">{REQUEST_ID_BYTES}s{PARTITION_ID_BYTES}sqq")  # request, partition, base, count
_ASSIGNED_BEFORE: Final = Many(Group((Fixed(PARTITION_ID_BYTES), INT64)))
_PRODUCER_PAIR: Final = Group((INT64, INT16))
_PRODUCER: Final = struct.Struct(">qh")
_REPLY: Final = struct.Struct(f">{REQUEST_ID_BYTES}sH")  # request, length of the reply
_REPLY_PAIR: Final = Group((Fixed(REQUEST_ID_BYTES), Blob(U16, _REPLY_BYTES_MAX)))
_GROUPS_V2: Final = (("offsets_retention_ms", INT64), ("expiry_clock_ms", INT64))
_GROUPS_AS_A_WHOLE: Final = (*_GROUPS_V2, ("generation_floor", INT32))
_FLOOR_VERSION: Final = 4  # the first with a floor of generations
_COORDINATORS: Final = Many(Record(CoordinatorSlot, (("node", INT32), ("incarnation", INT64), ("epoch", INT32))))
_GROUP: Final = (
    ("generation", INT32),
    ("protocol_type", TEXT),
    ("protocol", TEXT),
    ("leader", TEXT),
    ("emptied_ms", INT64),
)
_MEMBERS: Final = Many(Record(MemberState, (("member", GROUP_MEMBER), ("assignment", Blob(U32, GROUP_BYTES_MAX)))))


def encode_state(state: ClusterState) -> bytes:
    """The state's bytes."""
    return b"".join(_parts(state))


def state_pieces(state: ClusterState) -> Iterator[bytes]:
    """The state's bytes, a millisecond's work at a time. It must not change before the last piece."""
    piece = bytearray()
    for part in _parts(state):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _parts(state: ClusterState) -> Iterator[bytes]:
    """Small ones: no more than PIECE_ITEMS of anything in each."""
    out = bytearray(_HEAD.pack(_MAGIC, FORMAT_VERSION, state.schema_version))
    _CLUSTER.write(out, state)
    _NODES[FORMAT_VERSION].write(out, tuple(state.nodes[node] for node in sorted(state.nodes)))
    write_count(out, len(state.topics))
    yield bytes(out)
    for name in sorted(state.topics):
        yield from _topic_parts(state.topics[name])
    yield from _list_parts(state.producers.items(), _write_producer)
    out = bytearray()
    write_count(out, len(state.groups))
    yield bytes(out)
    for name in sorted(state.groups):
        yield from _group_parts(state.groups[name])
    out = bytearray()
    for name, kind in _GROUPS_AS_A_WHOLE:
        kind.write(out, getattr(state, name))
    _COORDINATORS.write(out, tuple(state.coordinators))
    yield bytes(out)
    yield from _list_parts(state.replies.items(), _write_reply)
    yield from _list_parts(state.assigned.items(), _write_assigned)
    out = bytearray()
    _ASSIGNED_BEFORE.write(out, tuple(sorted(state.assigned_before.items())))
    INT64.write(out, state.replies_counted)
    yield bytes(out)


def _list_parts(items: Collection[T], write: Callable[[bytearray, T], None]) -> Iterator[bytes]:
    """A list: its length, then the items."""
    out = bytearray()
    write_count(out, len(items))
    for number, item in enumerate(items, 1):
        write(out, item)
        if number % PIECE_ITEMS == 0:
            yield bytes(out)
            out.clear()
    yield bytes(out)


def _topic_parts(topic: TopicState) -> Iterator[bytes]:
    out = bytearray()
    for name, kind in _TOPIC:
        kind.write(out, getattr(topic, name))
    write_count(out, len(topic.config))
    for pair in sorted(topic.config.items()):
        _PAIR.write(out, pair)
    yield bytes(out)
    yield from _list_parts(topic.partitions, _write_partition)


def _write_producer(out: bytearray, producer: tuple[int, int]) -> None:
    out += _PRODUCER.pack(*producer)


def _write_reply(out: bytearray, item: tuple[RequestId, bytes]) -> None:
    request_id, reply = item
    out += _REPLY.pack(request_id, len(reply))
    out += reply


def _write_assigned(out: bytearray, item: tuple[RequestId, Assigned]) -> None:
    request_id, assigned = item
    out += _ASSIGNED.pack(request_id, assigned.partition, assigned.base, assigned.count)


def decode_state(data: Bytes) -> ClusterState:
    """Inverse of `encode_state`; CodecError for bytes it has not written. Invariants are the caller's to check."""
    return run_through(decode_steps(data))


def run_through(steps: Steps[T]) -> T:
    """All steps at once, and what comes of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def decode_steps(data: Bytes) -> Steps[ClusterState]:
    """As `decode_state`, a millisecond's work between two yields."""
    reader = Reader(data)
    magic, version, schema_version = reader.unpack(_HEAD)
    if magic != _MAGIC:
        raise CodecError("this is no snapshot of smq")
    if not _FIRST_VERSION <= version <= FORMAT_VERSION or schema_version > SCHEMA_VERSION:
        raise CodecError(f"a snapshot of format {version}, schema {schema_version}, from another smq: upgrade this one")
    state = ClusterState(schema_version=schema_version, **{name: kind.read(reader) for name, kind in _CLUSTER.fields})
    state.nodes = {node.node: node for node in _NODES[version].read(reader)}
    for _ in range(read_count(reader)):
        topic = yield from _read_topic(reader)
        state.topics[topic.name] = topic
        state.topic_names[topic.topic_id] = topic.name
    yield from _read_list(reader, state.producers, _PRODUCER_PAIR)
    has_members = version > _FIRST_VERSION
    for _ in range(read_count(reader)):
        group = yield from _read_group(reader, has_members)
        state.groups[group.name] = group
        state.member_bytes += members_bytes(group.members)
    if has_members:
        for name, kind in _GROUPS_AS_A_WHOLE if version >= _FLOOR_VERSION else _GROUPS_V2:
            setattr(state, name, kind.read(reader))
        state.coordinators = list(_COORDINATORS.read(reader))
    yield from _read_list(reader, state.replies, _REPLY_PAIR)
    if version > _FIRST_VERSION:
        yield from _read_assigned(reader, state)
    if version > _FLOOR_VERSION:
        state.replies_counted = INT64.read(reader)
    reader.finish()
    if version == FORMAT_VERSION:
        yield from _compare(state, memoryview(data))
    return state


def _compare(state: ClusterState, data: memoryview) -> Steps[None]:
    at = 0
    for piece in state_pieces(state):
        if data[at : at + len(piece)] != piece:
            raise CodecError("the snapshot is not in canonical form: something is in it twice, or out of order")
        at += len(piece)
        yield
    if at != len(data):
        raise CodecError("the snapshot is not in canonical form: something is in it twice")


def _read_list(reader: Reader, into: dict[Any, Any], pair: Group) -> Steps[None]:
    for number in range(read_count(reader)):
        key, value = pair.read(reader)
        into[key] = value
        if number % PIECE_ITEMS == 0:
            yield


def _read_assigned(reader: Reader, state: ClusterState) -> Steps[None]:
    assigned = reader.take(read_count(reader) * _ASSIGNED.size)
    for number, (request_id, pid, base, count) in enumerate(_ASSIGNED.iter_unpack(assigned)):
        state.assigned[request_id] = Assigned(pid, base, count)
        if number % PIECE_ITEMS == 0:
            yield
    state.assigned_before = dict(_ASSIGNED_BEFORE.read(reader))


def _read_topic(reader: Reader) -> Steps[TopicState]:
    fields: dict[str, Any] = {name: kind.read(reader) for name, kind in _TOPIC}
    config = dict(_PAIR.read(reader) for _ in range(read_count(reader)))
    topic = TopicState(config=config, partitions=[], **fields)
    for index in range(read_count(reader)):
        topic.partitions.append(_read_partition(reader, topic.topic_id, PartitionIndex(index)))
        if index % PIECE_ITEMS == 0:
            yield
    return topic


def _write_partition(out: bytearray, p: PartitionState) -> None:
    """By hand, since there may be 100,000 of them: one struct, then the replicas, then the history."""
    history = p.history
    out += _PARTITION.pack(
        p.leader,
        p.leader_incarnation,
        p.epoch,
        p.next_offset,
        p.hwm,
        p.log_start,
        p.ts_ns,
        len(p.replicas),
        len(history),
    )
    out += struct.pack(f">{len(p.replicas)}i", *p.replicas)
    if len(history) == 1:
        out += _EPOCH.pack(history[0].epoch, history[0].start)
    else:
        out += b"".join(_EPOCH.pack(entry.epoch, entry.start) for entry in history)


def _read_partition(reader: Reader, topic_id: TopicId, index: PartitionIndex) -> PartitionState:
    leader, incarnation, epoch, next_offset, hwm, log_start, ts_ns, replicas, epochs = reader.unpack(_PARTITION)
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
        replicas=struct.unpack(f">{replicas}i", reader.take(4 * replicas)),
        history=[EpochStart(e, start) for e, start in _EPOCH.iter_unpack(reader.take(_EPOCH.size * epochs))],
    )


def _group_parts(group: GroupState) -> Iterator[bytes]:
    out = bytearray()
    TEXT.write(out, group.name)
    out.append(group.phase)
    for name, kind in _GROUP:
        kind.write(out, getattr(group, name))
    _MEMBERS.write(out, tuple(group.members.values()))

    def write(out: bytearray, pid: PartitionId) -> None:
        committed = group.offsets[pid]
        metadata = committed.metadata.encode()
        out += _COMMITTED.pack(pid, committed.offset, committed.committed_ms, len(metadata))
        out += metadata

    yield bytes(out)
    yield from _list_parts(sorted(group.offsets), write)


def _read_group(reader: Reader, has_members: bool) -> Steps[GroupState]:
    group = GroupState(name=TEXT.read(reader))
    if has_members:
        _read_members(reader, group)
    for number in range(read_count(reader)):
        pid, offset, committed_ms, size = reader.unpack(_COMMITTED)
        try:
            metadata = str(reader.take(size), "utf-8")
        except UnicodeDecodeError as e:
            raise CodecError(f"the metadata of a commit is not UTF-8: {e}") from e
        group.offsets[PartitionId(pid)] = CommittedOffset(offset=offset, metadata=metadata, committed_ms=committed_ms)
        if number % PIECE_ITEMS == 0:
            yield
    return group


def _read_members(reader: Reader, group: GroupState) -> None:
    number = reader.unpack(U8)[0]
    try:
        group.phase = GroupPhase(number)
    except ValueError as e:
        raise CodecError(f"a group in phase {number}") from e
    for name, kind in _GROUP:
        setattr(group, name, kind.read(reader))
    group.members = {m.member.member_id: m for m in _MEMBERS.read(reader)}
