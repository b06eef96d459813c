"""Handler of AllocateProducerId: ids and epochs of idempotent producers.

Owns which producer ids exist, and the current epochs of those without a transactional id; sequences live with each
partition's log. It keeps only ids with a bumped epoch, since most are never bumped, and of those the last
PRODUCERS_MAX. A dropped id counts as epoch 0 again, so its producer gets PRODUCER_FENCED and starts a new session. Only
`command_table` and `transactions` import it.
"""

from smq.raft_state.commands import AllocateProducerId
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import NO_PRODUCER, ProducerEpoch, ProducerId
from smq.raft_state.limits import PRODUCER_EPOCH_RETIRED, PRODUCERS_MAX
from smq.raft_state.refusal import Refused
from smq.raft_state.replies import Applied, ProducerIdAllocated
from smq.raft_state.state import ClusterState

_NO_EPOCH = ProducerEpoch(-1)


def allocate_producer_id(state: ClusterState, command: AllocateProducerId) -> Applied:
    """A fresh id, or the next epoch of the given id. A fresh id replaces an id that has run out of epochs."""
    if command.producer_id == NO_PRODUCER:
        if command.producer_epoch != _NO_EPOCH:
            raise Refused(ErrorCode.INVALID_REQUEST, "producer_epoch must be -1 if producer_id is -1")
        return _fresh(state)
    epoch = _checked_epoch(state, command)
    bumped = ProducerEpoch(epoch + 1)
    # Removed first, so that this id becomes the last to be dropped.
    state.producers.pop(command.producer_id, None)
    state.producers[command.producer_id] = bumped
    if len(state.producers) > PRODUCERS_MAX:
        del state.producers[next(iter(state.producers))]
    if bumped == PRODUCER_EPOCH_RETIRED:
        return _fresh(state)
    return Applied(reply=ProducerIdAllocated(producer_id=command.producer_id, producer_epoch=bumped))


def fresh_producer_id(state: ClusterState) -> ProducerId:
    """An id that no producer has had, in epoch 0."""
    producer_id = state.next_producer_id
    state.next_producer_id = ProducerId(producer_id + 1)
    return producer_id


def _fresh(state: ClusterState) -> Applied:
    return Applied(reply=ProducerIdAllocated(producer_id=fresh_producer_id(state), producer_epoch=ProducerEpoch(0)))


def _checked_epoch(state: ClusterState, command: AllocateProducerId) -> ProducerEpoch:
    if not 0 <= command.producer_id < state.next_producer_id:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"producer_id {command.producer_id} was never allocated: ask for a fresh one with producer_id -1",
        )
    if command.producer_id in state.transactional_ids:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"producer_id {command.producer_id} has a transactional id, which must be named"
        )
    epoch = state.producers.get(command.producer_id, ProducerEpoch(0))
    if command.producer_epoch != epoch or epoch == PRODUCER_EPOCH_RETIRED:
        raise Refused(
            ErrorCode.PRODUCER_FENCED,
            f"producer {command.producer_id} is in epoch {epoch}, not {command.producer_epoch}"
            if epoch != PRODUCER_EPOCH_RETIRED
            else f"producer {command.producer_id} has run out of epochs",
        )
    return epoch
