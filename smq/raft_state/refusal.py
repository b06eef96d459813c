"""How a handler refuses a command, and how it finds the objects that a command names.

Owns the one way to refuse a bad request: raise Refused before any change; the machine turns it into a Rejected reply.
It must never change the state. Messages are part of the outcome (the reply cache is replicated), so a changed text is a
changed state machine. Handlers, `topic_config`, `topic_rules` and the server import it.
"""

from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Incarnation, NodeId, Offset, PartitionId, ProducerEpoch, ProducerId, split_partition_id
from smq.raft_state.limits import PARTITION_ID_BYTES, PRODUCER_EPOCH_RETIRED, QUOTED_CHARS_MAX
from smq.raft_state.replies import Rejected
from smq.raft_state.state import ClusterState, NodeState, PartitionState, TopicState, TransactionState


class Refused(Exception):
    """The command is refused, and nothing has been changed."""

    def __init__(self, code: ErrorCode, message: str, *, lo: Offset = Offset(-1), hi: Offset = Offset(-1)) -> None:
        super().__init__(message)
        self.rejected = Rejected(code=code, message=message, lo=lo, hi=hi)


def quoted(text: str) -> str:
    """A user's text inside a message: one bounded line of ASCII, the same on every Python."""
    return ascii(text if len(text) <= QUOTED_CHARS_MAX else text[:QUOTED_CHARS_MAX] + "...")


def find_topic(state: ClusterState, name: str) -> TopicState:
    """UNKNOWN_TOPIC if no topic has this name."""
    topic = state.topics.get(name)
    if topic is None:
        raise Refused(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {quoted(name)}")
    return topic


def find_partition(state: ClusterState, pid: PartitionId) -> PartitionState:
    """UNKNOWN_PARTITION if there is none, or it has been deleted."""
    partition = state.partition(pid) if len(pid) == PARTITION_ID_BYTES else None
    if partition is None:
        raise Refused(ErrorCode.UNKNOWN_PARTITION, f"there is no partition {_shown(state, pid)}")
    return partition


def find_external(state: ClusterState, pid: PartitionId) -> PartitionState:
    """As `find_partition`; WRONG_STORAGE if smq stores its records."""
    partition = find_partition(state, pid)
    if not partition.is_external:
        raise Refused(
            ErrorCode.WRONG_STORAGE,
            f"smq stores the records of partition {_shown(state, pid)} and assigns their offsets itself",
        )
    return partition


def find_node(state: ClusterState, node: NodeId, incarnation: Incarnation) -> NodeState:
    """The node, if this is its registered incarnation; otherwise UNKNOWN_NODE or STALE_INCARNATION."""
    found = state.nodes.get(node)
    if found is None:
        raise Refused(ErrorCode.UNKNOWN_NODE, f"node {node} has not registered")
    if found.incarnation != incarnation:
        raise Refused(
            ErrorCode.STALE_INCARNATION,
            f"node {node} is registered with incarnation {found.incarnation}, not {incarnation}",
        )
    return found


def find_transaction(
    state: ClusterState, transactional_id: str, producer_id: ProducerId, producer_epoch: ProducerEpoch
) -> TransactionState:
    """UNKNOWN_TRANSACTIONAL_ID, or PRODUCER_FENCED unless this is the id's present producer and epoch. The retired
    epoch, which only fences, belongs to no producer."""
    transaction = state.transactions.get(transactional_id)
    if transaction is None or producer_id < 0 or producer_id not in (transaction.producer_id, transaction.ended_id):
        raise Refused(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
            f"there is no transactional id {quoted(transactional_id)} of producer {producer_id}",
        )
    if transaction.producer_id != producer_id:  # it has gone on under a fresh id
        raise fenced(transaction, producer_id, producer_epoch)
    if transaction.producer_epoch != producer_epoch or producer_epoch == PRODUCER_EPOCH_RETIRED:
        raise fenced(transaction, producer_id, producer_epoch)
    return transaction


def fenced(transaction: TransactionState, producer_id: ProducerId, producer_epoch: ProducerEpoch) -> Refused:
    if transaction.producer_epoch == PRODUCER_EPOCH_RETIRED:
        message = f"producer {transaction.producer_id} of {quoted(transaction.transactional_id)} has run out of epochs"
    else:
        message = (
            f"{quoted(transaction.transactional_id)} is producer {transaction.producer_id} in epoch"
            f" {transaction.producer_epoch}, not {producer_id} in {producer_epoch}"
        )
    return Refused(ErrorCode.PRODUCER_FENCED, message)


def _shown(state: ClusterState, pid: PartitionId) -> str:
    """A partition id in readable form."""
    if len(pid) != PARTITION_ID_BYTES:
        return f"with an id of {len(pid)} bytes"
    topic_id, index = split_partition_id(pid)
    name = state.topic_names.get(topic_id)
    return f"{index} of topic {quoted(name) if name is not None else topic_id.hex()}"
