"""Whether a producer's batch fits the transactions that the leader knows of.

Owns the check of KIP-890: a batch is taken into a transaction only if the replicated state has that transaction open,
with this partition. So no late batch opens one that never ends. The leader judges by the state that it has applied,
which may be behind: that there is no transaction is certain only after a read barrier, or after it has had the
partition join (`joins`), for which the node's requests wait. That the state is past a transaction is certain. It must
never append. `admission` uses it.
"""

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId, ProducerId
from smq.raft_state.refusal import quoted
from smq.raft_state.state import ClusterState, TransactionPhase
from smq.records import BatchHeader
from smq.replication.log.producers import ProducerTable


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
