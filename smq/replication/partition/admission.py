"""Whether a producer's batch may be appended, and the errors that say why not.

Owns the checks of the batch itself, of space and of the number of producers. It must never append, or judge who leads:
the replica does. The replica and the requests use it.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.state import ClusterState, PartitionState
from smq.records import BatchCorrupt, BatchError, BatchHeader, validate_produced
from smq.replication.host import Host
from smq.replication.log.decoding import plain_records
from smq.replication.log.rewriting import spans
from smq.replication.log.store import PartitionLog
from smq.replication.partition.transactional import check_transaction
from smq.replication.ports import Buffer

KEYED_BYTES_MAX: Final = 16 << 20  # of a batch whose keys are checked: some 10 ms of the node's loop
NEW_PRODUCER_RETRY_MS: Final = 1_000  # producers expire in steps of a second and more


class RecordSpace(Protocol):
    """The space for records on this node's disk."""

    @property
    def is_full(self) -> bool:
        """The disk is down to its reserve."""

    def admits(self, size: int) -> bool:
        """Whether this many bytes of records may be appended."""

    def refusal(self, node: int) -> SmqError: ...


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


def check_space(space: RecordSpace, me: NodeId, part: PartitionState, full: Sequence[NodeId], size: int) -> None:
    """STORAGE_FULL if this disk takes no records, or if too few followers' disks do for a majority. `full` are the
    followers whose disks take none."""
    if not space.admits(size):
        raise space.refusal(me)
    if len(part.replicas) - len(full) <= len(part.replicas) // 2:
        raise full_elsewhere(full[0])


def check_producer(host: Host, held: int, log: PartitionLog, header: BatchHeader) -> None:
    """TOO_MANY_PRODUCERS if this would be one more than this node may remember: it remembers `held`. Followers take
    what their leader has taken. The refusals of `check_transaction`."""
    check_transaction(host.state, log.pid, log.producers, header)
    limit = host.config.producers_max
    if header.producer_id < 0 or held < limit or log.producers.knows(header.producer_id, Offset(-1)):
        return
    raise SmqError(
        ErrorCode.TOO_MANY_PRODUCERS,
        f"node {host.node_id} remembers {held} producers, its limit is {limit} (producers_max): idempotent"
        " producers that are new to the partition have to wait until others have expired",
        ErrorDetails(retry_after_ms=NEW_PRODUCER_RETRY_MS),
    )


def check_keys(batch: Buffer, limit: int) -> None:
    """INVALID_BATCH unless every record has a key: a compacted topic keeps the last record of each."""
    header = validated(batch, limit)
    try:
        records = plain_records(header, memoryview(batch), KEYED_BYTES_MAX)
        first = next((span.offset_delta for span in spans(records, header.count) if span.key is None), None)
    except BatchCorrupt as e:
        raise SmqError(ErrorCode.INVALID_BATCH, f"the keys cannot be read: {e}") from e
    except SmqError as e:
        message = f"a batch of a compacted topic has at most {KEYED_BYTES_MAX} bytes uncompressed: send smaller ones"
        raise SmqError(ErrorCode.BATCH_TOO_LARGE, message) from e
    if first is not None:
        message = f"record {first} of the batch has no key: a compacted topic keeps the last record of each key"
        raise SmqError(ErrorCode.INVALID_BATCH, message)


def validated(batch: Buffer, limit: int) -> BatchHeader:
    """The header of a batch that is right in itself, and not larger than `limit`."""
    if len(batch) > limit:
        raise SmqError(ErrorCode.BATCH_TOO_LARGE, f"the batch has {len(batch)} bytes, the limit is {limit}")
    try:
        return validate_produced(batch)
    except BatchCorrupt as e:
        raise SmqError(ErrorCode.CORRUPT_BATCH, str(e)) from e
    except BatchError as e:
        raise SmqError(ErrorCode.INVALID_BATCH, str(e)) from e
