"""The whole state as bytes, and back: exact, canonical, versioned.

Owns the snapshot's head and the order of its parts; `snapshot_parts` has the bytes of each. Canonical: maps without an
order are sorted, and those with one (replies and producers, which are dropped oldest first) keep it. So equal states
have equal bytes and one digest: what a feature level adds to the state is written only at that level, so that the
nodes agree during an upgrade, too. It must never leave out anything that a later command's outcome depends on. Only
`machine` and tests import it.
"""

import struct
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, Final, TypeAlias, TypeVar, cast

from smq.raft_state.binary import INT64, TEXT, Buffer, CodecError, Group, Kind, Reader, read_count, write_count
from smq.raft_state.command_codec import UpgradeNeeded
from smq.raft_state.fields import ACLS, QUOTAS
from smq.raft_state.ids import PartitionIndex
from smq.raft_state.snapshot_parts import (
    ASSIGNED,
    ASSIGNED_BEFORE,
    CLUSTER_CONFIG,
    COORDINATORS,
    NODES,
    PRODUCER,
    REPLY,
    read_assigned,
    read_commit,
    read_fields,
    read_group,
    read_partition,
    read_topic,
    read_transaction,
    write_app,
    write_assigned,
    write_commit,
    write_group,
    write_partition,
    write_producer,
    write_reply,
    write_topic,
    write_transaction,
)
from smq.raft_state.state import (
    APP,
    CLUSTER,
    USER,
    ClusterState,
    GroupState,
    TopicState,
    TransactionState,
    UserState,
    members_bytes,
)

__all__ = [
    "Buffer",
    "Steps",
    "decode_state",
    "decode_steps",
    "encode_state",
    "run_through",
    "state_pieces",
]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]  # work in steps: other work may run at each yield

PIECE_ITEMS: Final = 250  # partitions, commits, replies: half a millisecond of encoding, one of decoding
PIECE_BYTES: Final = 32 << 10  # a piece is not much smaller: each costs its consumer a turn
_ACL: Final = ACLS.kind
_QUOTA: Final = QUOTAS.kind
FORMAT_VERSION: Final = 2  # of these bytes; 1 was that of builds before the first release

_MAGIC: Final = b"smqS"
_HEAD: Final = struct.Struct(">4sBI")  # magic, format version, feature level


def encode_state(state: ClusterState) -> bytes:
    """The state's bytes."""
    return b"".join(_parts(state))


def state_pieces(state: ClusterState) -> Iterator[bytes]:
    """The state's bytes, one millisecond of work at a time. The state must not change before the last piece."""
    piece = bytearray()
    for part in _parts(state):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _parts(state: ClusterState) -> Iterator[bytes]:
    """Small parts: each has at most PIECE_ITEMS of anything."""
    out = bytearray(_HEAD.pack(_MAGIC, FORMAT_VERSION, state.feature_level))
    CLUSTER.write(out, state)
    CLUSTER_CONFIG.write(out, tuple(sorted(state.config.items())))
    NODES.write(out, tuple(state.nodes[node] for node in sorted(state.nodes)))
    COORDINATORS.write(out, tuple(state.coordinators))
    write_count(out, len(state.topics))
    yield bytes(out)
    for name in sorted(state.topics):
        topic = state.topics[name]
        yield write_topic(topic)
        yield from _list_parts(topic.partitions, write_partition)
    yield from _list_parts(state.producers.items(), write_producer)
    out = bytearray()
    write_count(out, len(state.groups))
    yield bytes(out)
    for name in sorted(state.groups):
        group = state.groups[name]
        yield write_group(group)
        yield from _list_parts(sorted(group.offsets.items()), write_commit)
    for cache in state.replies:
        out = bytearray()
        INT64.write(out, cache.counted)
        yield bytes(out)
        yield from _list_parts(cache.replies.items(), write_reply)
    yield from _list_parts(state.assigned.items(), write_assigned)
    out = bytearray()
    ASSIGNED_BEFORE.write(out, tuple(sorted(state.assigned_before.items())))
    write_count(out, len(state.transactions))
    yield bytes(out)
    for name in sorted(state.transactions):
        yield from _transaction_parts(state.transactions[name])
    yield from _list_parts(sorted(state.apps.items(), key=lambda item: item[0]), write_app)
    yield from _list_parts([state.users[name] for name in sorted(state.users)], USER.write)
    yield from _list_parts(state.acls, _ACL.write)
    yield from _list_parts(state.quotas, _QUOTA.write)


def _transaction_parts(transaction: TransactionState) -> Iterator[bytes]:
    yield write_transaction(transaction)
    for group in sorted(transaction.offsets):
        out = bytearray()
        TEXT.write(out, group)
        yield bytes(out)
        yield from _list_parts(sorted(transaction.offsets[group].items()), write_commit)


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


def decode_state(data: Buffer, known_level: int) -> ClusterState:
    """Inverse of `encode_state`; CodecError for any other bytes. The caller checks the invariants."""
    return run_through(decode_steps(data, known_level))


def run_through(steps: Steps[T]) -> T:
    """Runs all steps, and returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def decode_steps(data: Buffer, known_level: int) -> Steps[ClusterState]:
    """As `decode_state`, with one millisecond of work between two yields. UpgradeNeeded above the known level."""
    reader = Reader(data)
    state = _read_head(reader, known_level)
    for _ in range(read_count(reader)):
        topic = yield from _read_topic(reader)
        state.topics[topic.name] = topic
        state.topic_names[topic.topic_id] = topic.name
    yield from _read_list(reader, state.producers, PRODUCER)
    for _ in range(read_count(reader)):
        group = yield from _read_group(reader)
        state.groups[group.name] = group
        state.member_bytes += members_bytes(group.members)
    for cache in state.replies:
        cache.counted = INT64.read(reader)
        yield from _read_list(reader, cache.replies, REPLY)
    yield from _read_assigned(reader, state)
    for _ in range(read_count(reader)):
        yield from _read_transaction(reader, state)
    yield from _read_apps(reader, state)
    yield from _read_users(reader, state)
    state.acls = yield from _read_rows(reader, _ACL)
    state.quotas = yield from _read_rows(reader, _QUOTA)
    reader.finish()
    yield from _compare(state, memoryview(data))
    return state


def _read_head(reader: Reader, known_level: int) -> ClusterState:
    """The state with everything but topics, producers, groups, replies, assignments, transactions, apps, users,
    rules and quotas."""
    magic, version, level = reader.unpack(_HEAD)
    if magic != _MAGIC:
        raise CodecError("this is no snapshot of smq")
    if version > FORMAT_VERSION or level > known_level:
        what = f"a snapshot of format {version} and feature level {level}"
        raise UpgradeNeeded(what, level=level, known=known_level)
    if version < FORMAT_VERSION:
        raise CodecError(
            f"a snapshot of format {version}, of a build before the first release, and this smq reads {FORMAT_VERSION}:"
            " move the data directory away and start with an empty one"
        )
    if level < 1:
        raise CodecError(f"a snapshot of feature level {level}: there is none below 1")
    state = ClusterState(feature_level=level, **read_fields(reader, CLUSTER))
    state.config = dict(CLUSTER_CONFIG.read(reader))
    state.nodes = {node.node: node for node in NODES.read(reader)}
    state.coordinators = list(COORDINATORS.read(reader))
    return state


def _read_list(reader: Reader, into: dict[Any, Any], pair: Group) -> Steps[None]:
    for number in range(read_count(reader)):
        key, value = pair.read(reader)
        into[key] = value
        if number % PIECE_ITEMS == 0:
            yield


def _read_topic(reader: Reader) -> Steps[TopicState]:
    topic = read_topic(reader)
    for index in range(read_count(reader)):
        topic.partitions.append(read_partition(reader, topic.topic_id, PartitionIndex(index)))
        if index % PIECE_ITEMS == 0:
            yield
    return topic


def _read_group(reader: Reader) -> Steps[GroupState]:
    group = read_group(reader)
    for number in range(read_count(reader)):
        pid, committed = read_commit(reader)
        group.offsets[pid] = committed
        if number % PIECE_ITEMS == 0:
            yield
    return group


def _read_assigned(reader: Reader, state: ClusterState) -> Steps[None]:
    rows = reader.take(read_count(reader) * ASSIGNED.size)
    for number, row in enumerate(ASSIGNED.iter_unpack(rows)):
        request_id, assigned = read_assigned(row)
        state.assigned[request_id] = assigned
        if number % PIECE_ITEMS == 0:
            yield
    state.assigned_before = dict(ASSIGNED_BEFORE.read(reader))


def _read_transaction(reader: Reader, state: ClusterState) -> Steps[None]:
    """With what is derived from it."""
    transaction, groups = read_transaction(reader)
    for _ in range(groups):
        staged = transaction.offsets[TEXT.read(reader)] = {}
        for number in range(read_count(reader)):
            pid, committed = read_commit(reader)
            staged[pid] = committed
            if number % PIECE_ITEMS == 0:
                yield
    state.transactions[transaction.transactional_id] = transaction
    for producer_id in transaction.producer_ids:
        state.transactional_ids[producer_id] = transaction.transactional_id
    state.transaction_items += transaction.items
    if transaction.is_ending:
        for pid in transaction.partitions:
            state.endings.setdefault(pid, set()).add(transaction.marked_as[0])
    yield


def _read_apps(reader: Reader, state: ClusterState) -> Steps[None]:
    for number in range(read_count(reader)):
        name = TEXT.read(reader)
        state.apps[name] = APP.read(reader)
        if number % PIECE_ITEMS == 0:
            yield


def _read_users(reader: Reader, state: ClusterState) -> Steps[None]:
    users: dict[str, UserState] = {}
    for number in range(read_count(reader)):
        user = USER.read(reader)
        users[user.name] = user
        if number % PIECE_ITEMS == 0:
            yield
    state.users = users


def _read_rows(reader: Reader, kind: Kind) -> Steps[tuple[Any, ...]]:
    rows = []
    for number in range(read_count(reader)):
        rows.append(kind.read(reader))
        if number % PIECE_ITEMS == 0:
            yield
    return tuple(rows)


def _compare(state: ClusterState, data: memoryview) -> Steps[None]:
    """Only what `encode_state` writes is a snapshot: equal states have equal bytes."""
    at = 0
    for piece in state_pieces(state):
        if data[at : at + len(piece)] != piece:
            raise CodecError("the snapshot is not in canonical form: something is in it twice, or out of order")
        at += len(piece)
        yield
    if at != len(data):
        raise CodecError("the snapshot is not in canonical form: something is in it twice")
