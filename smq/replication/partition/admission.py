"""Whether a producer's batch may be appended, in which form, and the errors that say why not.

Owns the checks of the batch itself, of its times, of space and of the number of producers. It must never append, or
judge who leads: the replica does. The replica and the requests use it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.state import ClusterState, PartitionState
from smq.raft_state.topic_config import TIMESTAMP_AFTER_MAX_MS, TIMESTAMP_BEFORE_MAX_MS, BatchRules
from smq.records import (
    TIMESTAMP_TYPE_MASK,
    BatchCorrupt,
    BatchError,
    BatchHeader,
    validate_produced,
    with_append_time,
)
from smq.replication.host import Host
from smq.replication.log.partition_log import PartitionLog
from smq.replication.partition.step import Shared
from smq.replication.partition.transactional import check_transaction
from smq.replication.ports import Buffer
from smq.replication.storage.space import SpaceGuard

NEW_PRODUCER_RETRY_MS: Final = 1_000  # producers expire in steps of a second and more


class PreparedBatch(NamedTuple):
    """A producer's batch, as the replica is to append it, and what its topic asks of it. If the topic has the records
    looked at (`preparation`), `data` may be converted, `refusal` says why the batch cannot be taken, and `times` are
    the oldest and the newest timestamp of a record (None: no record has one)."""

    data: Buffer
    rules: BatchRules
    refusal: SmqError | None = None
    times: tuple[int, int] | None = None


# Refusals for what the log does not have: a leader that has been deposed without knowing it may be wrong.
JUDGED_BY_THE_LOG: Final = (ErrorCode.OUT_OF_ORDER_SEQUENCE, ErrorCode.INVALID_TIMESTAMP)


def admitted(
    host: Host,
    shared: Shared,
    part: PartitionState,
    log: PartitionLog,
    full: Sequence[NodeId],
    prepared: PreparedBatch,
    transactional_id: str | None,
    header: BatchHeader,
    ts_ns: int,
) -> tuple[Buffer, BatchHeader]:
    """The bytes to append at a time of the leader's, and their header; or the error that says why not. `full` are the
    followers whose disks take no records. A batch that the log already holds is not judged again: its first attempt was
    taken, whatever the clock says now."""
    check_space(shared.space, host.node_id, part, full, len(prepared.data))
    check_producer(host, shared.producers_held(), log, header, transactional_id)
    if prepared.refusal is not None:
        raise prepared.refusal
    if prepared.rules.is_append_time:
        return with_append_time(prepared.data, header, ts_ns // 1_000_000)
    if header.attributes & TIMESTAMP_TYPE_MASK:
        raise SmqError(ErrorCode.INVALID_TIMESTAMP, "the batch says LogAppendTime, and the topic has CreateTime")
    if prepared.times is not None:
        _check_times(*prepared.times, ts_ns // 1_000_000, prepared.rules)
    return prepared.data, header


def _check_times(oldest_ms: int, newest_ms: int, now_ms: int, rules: BatchRules) -> None:
    if now_ms - oldest_ms > rules.before_ms:
        timestamp, direction, limit = oldest_ms, "behind", f"{TIMESTAMP_BEFORE_MAX_MS}={rules.before_ms}"
    elif newest_ms - now_ms > rules.after_ms:
        timestamp, direction, limit = newest_ms, "ahead of", f"{TIMESTAMP_AFTER_MAX_MS}={rules.after_ms}"
    else:
        return
    message = f"timestamp {timestamp} is {abs(now_ms - timestamp)} ms {direction} the leader's clock: {limit}"
    raise SmqError(ErrorCode.INVALID_TIMESTAMP, message)


def leader_error(asked_node: NodeId, state: ClusterState, part: PartitionState) -> SmqError:
    """NOT_LEADER with the leader, or LEADER_UNAVAILABLE if the epoch's leader cannot lead."""
    leader = state.nodes.get(part.leader)
    if leader is None or leader.fenced or leader.incarnation != part.leader_incarnation or leader.node == asked_node:
        details = ErrorDetails(retry_after_ms=100)
        return SmqError(ErrorCode.LEADER_UNAVAILABLE, "the partition has no leader at present", details)
    details = ErrorDetails(leader=leader.node, leader_address=leader.grpc_address)
    return SmqError(ErrorCode.NOT_LEADER, f"node {leader.node} leads the partition", details)


def full_elsewhere(node: NodeId) -> SmqError:
    message = (
        f"node {node} has no space for records, and too few replicas are left for a majority: free space on its disk"
    )
    return SmqError(ErrorCode.STORAGE_FULL, message)


def check_space(space: SpaceGuard, me: NodeId, part: PartitionState, full: Sequence[NodeId], size: int) -> None:
    """STORAGE_FULL if this disk takes no records, or if too few followers' disks do for a majority. `full` are the
    followers whose disks take none."""
    if not space.admits(size):
        raise space.refusal(me)
    if len(part.replicas) - len(full) <= len(part.replicas) // 2:
        raise full_elsewhere(full[0])


def check_producer(host: Host, held: int, log: PartitionLog, header: BatchHeader, named: str | None) -> None:
    """TOO_MANY_PRODUCERS if this would be one more than this node may remember: it remembers `held`. Followers take
    what their leader has taken. The refusals of `check_transaction`."""
    check_transaction(host.state, log.pid, log.producers, header, named)
    limit = host.config.producers_max
    if header.producer_id < 0 or held < limit or log.producers.knows(header.producer_id, Offset(-1)):
        return
    raise SmqError(
        ErrorCode.TOO_MANY_PRODUCERS,
        f"node {host.node_id} remembers {held} producers, its limit is {limit} (producers_max): idempotent"
        " producers that are new to the partition have to wait until others have expired",
        ErrorDetails(retry_after_ms=NEW_PRODUCER_RETRY_MS),
    )


def validated(prepared: PreparedBatch) -> BatchHeader:
    """The header of a batch that is right in itself, and not larger than its topic allows."""
    batch, limit = prepared.data, prepared.rules.bytes_max
    if len(batch) > limit:
        raise SmqError(ErrorCode.BATCH_TOO_LARGE, f"the batch has {len(batch)} bytes, the limit is {limit}")
    try:
        return validate_produced(batch)
    except BatchCorrupt as e:
        raise SmqError(ErrorCode.CORRUPT_BATCH, str(e)) from e
    except BatchError as e:
        raise SmqError(ErrorCode.INVALID_BATCH, str(e)) from e
