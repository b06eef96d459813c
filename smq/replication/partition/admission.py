"""Whether a producer's batch may be appended, in which form, and the errors that say why not.

Owns the checks of the batch itself, of its times, of space, of the number of producers, and of its transaction. The
last is KIP-890's: a batch is taken into a transaction only if the replicated state has that transaction open, with this
partition. So no late batch opens one that never ends. The leader judges by the state that it has applied, which may be
behind: that there is no transaction is certain only after a read barrier, or after it has had the partition join
(`transaction_joins`), for which the node's requests wait. That the state is past a transaction is certain. It must
never append, or judge who leads: the replica does. The replica and the requests use it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId, ProducerId
from smq.raft_state.refusal import quoted
from smq.raft_state.state import ClusterState, PartitionState, TransactionPhase
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
from smq.replication.log.producers import ProducerTable
from smq.replication.partition.step import Shared
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


class NotYetKnown(SmqError):
    """Certain only after a barrier, or a join: the state is then as of now."""


def check_transaction(
    state: ClusterState, pid: PartitionId, table: ProducerTable, header: BatchHeader, named: str | None
) -> None:
    """INVALID_TRANSACTION_STATE, UNKNOWN_TRANSACTIONAL_ID, PRODUCER_FENCED: NotYetKnown if the state may be behind.
    `named` is the transactional id of the request, if it has one. A producer id never moves to another."""
    if header.producer_id < 0:
        return
    transaction = state.transaction_of(ProducerId(header.producer_id))
    if not header.is_transactional:
        if table.open_from(header.producer_id) is not None:
            raise SmqError(
                ErrorCode.INVALID_TRANSACTION_STATE,
                f"producer {header.producer_id} has an open transaction here: the batch must be part of it",
            )
        return
    if transaction is None:
        raise NotYetKnown(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID, f"producer {header.producer_id} has no transactional id, or no longer"
        )
    if named is not None and named != transaction.transactional_id:
        raise SmqError(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
            f"there is no transactional id {quoted(named)} of producer {header.producer_id}",
        )
    if header.producer_id != transaction.producer_id:
        raise SmqError(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} has used up its epochs, and goes on as {transaction.producer_id}",
        )
    if header.producer_epoch < transaction.producer_epoch:
        raise SmqError(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} is in epoch {transaction.producer_epoch}, the batch has the older"
            f" {header.producer_epoch}",
        )
    if header.producer_epoch > transaction.producer_epoch:
        raise NotYetKnown(
            ErrorCode.PRODUCER_FENCED,
            f"producer {header.producer_id} is in epoch {transaction.producer_epoch}: the {header.producer_epoch} of"
            " the batch has not been given to any producer",
        )
    if transaction.phase is not TransactionPhase.ONGOING or pid not in transaction.partitions:
        raise NotYetKnown(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"producer {header.producer_id} has no open transaction that includes this partition",
        )
