"""Handler of InitTransactions, and the producer ids and epochs that may act under a transactional id.

Owns each step from one epoch to the next: a start, the fence of an abort, the end of a transaction in Kafka's second
protocol. An epoch is never given twice. It must never open or decide a transaction: `transactions` does. Only
`command_table`, `batches` and `transactions` import it.
"""

from smq.raft_state.cluster_config import transaction_timeout_ms_max
from smq.raft_state.commands import InitTransactions
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.producer_ids import fresh_producer_id
from smq.raft_state.ids import NO_PRODUCER, ProducerEpoch, ProducerId
from smq.raft_state.limits import PRODUCER_EPOCH_RETIRED, TRANSACTIONAL_ID_BYTES_MAX, TRANSACTIONAL_IDS_MAX
from smq.raft_state.refusal import Refused, fenced, quoted
from smq.raft_state.replies import Applied, ProducerIdAllocated
from smq.raft_state.state import ClusterState, TransactionOutcome, TransactionPhase, TransactionState

_NO_EPOCH = ProducerEpoch(-1)
_EPOCH_LAST = PRODUCER_EPOCH_RETIRED - 1  # given to a producer; an abort may still go beyond it, to fence


def init_transactions(state: ClusterState, command: InitTransactions) -> Applied:
    """The id's next epoch, or a fresh producer id: for a new transactional id, or one that has run out of epochs."""
    _check_id(command.transactional_id)
    longest_ms = transaction_timeout_ms_max(state.config)
    if not 1 <= command.timeout_ms <= longest_ms:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
            f"a transaction's timeout must be from 1 to {longest_ms} ms, not {command.timeout_ms}",
        )
    is_named = command.producer_id != NO_PRODUCER
    if is_named != (command.producer_epoch != _NO_EPOCH):
        raise Refused(ErrorCode.INVALID_REQUEST, "a producer names both its producer id and its epoch, or neither")
    transaction = state.transactions.get(command.transactional_id)
    if transaction is None:
        return _register(state, command)
    if is_named and (command.producer_id, command.producer_epoch) not in _known(transaction):
        raise fenced(transaction, command.producer_id, command.producer_epoch)
    if transaction.phase is not TransactionPhase.EMPTY:
        raise Refused(
            ErrorCode.TRANSACTION_ENDING,
            f"the last transaction of {quoted(transaction.transactional_id)} is {transaction.phase.name}",
        )
    transaction.timeout_ms, transaction.is_temporary = command.timeout_ms, command.is_temporary
    transaction.used_ms = state.expiry_clock_ms
    is_repetition = is_named and command.producer_epoch != transaction.producer_epoch
    if not is_repetition or transaction.producer_epoch > _EPOCH_LAST:
        _next_epoch(state, transaction, is_named=is_named)
        transaction.outcome = TransactionOutcome.NONE
    return Applied(reply=allocated(transaction))


def _known(transaction: TransactionState) -> tuple[tuple[ProducerId, ProducerEpoch], ...]:
    """The ids and epochs under which a producer may go on: the present, or those before an answer that it lacks."""
    return (
        (transaction.producer_id, transaction.producer_epoch),
        (transaction.producer_id, transaction.last_epoch),
        (transaction.ended_id, transaction.ended_epoch),
    )


def _register(state: ClusterState, command: InitTransactions) -> Applied:
    """A producer that names itself under an id that has been forgotten begins again, too: Kafka's clients do so after
    INVALID_PRODUCER_ID_MAPPING, and take no other answer."""
    if len(state.transactions) >= TRANSACTIONAL_IDS_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"there are {TRANSACTIONAL_IDS_MAX} transactional ids, which is the limit: those without a transaction for"
            " transactional.id.expiration.ms go by themselves",
        )
    transaction = TransactionState(
        transactional_id=command.transactional_id,
        producer_id=fresh_producer_id(state),
        producer_epoch=ProducerEpoch(0),
        timeout_ms=command.timeout_ms,
        is_temporary=command.is_temporary,
        changes=state.transaction_changes_floor,
        used_ms=state.expiry_clock_ms,
    )
    state.transactions[transaction.transactional_id] = transaction
    state.transactional_ids[transaction.producer_id] = transaction.transactional_id
    return Applied(reply=allocated(transaction))


def _next_epoch(state: ClusterState, transaction: TransactionState, *, is_named: bool) -> None:
    """Of a producer that starts now: what the one before has ended is no concern of its own."""
    if transaction.producer_epoch < _EPOCH_LAST:
        transaction.last_epoch = transaction.producer_epoch if is_named else _NO_EPOCH
        transaction.producer_epoch = ProducerEpoch(transaction.producer_epoch + 1)
    else:
        del state.transactional_ids[transaction.producer_id]
        _replace(state, transaction)
    transaction.ended_id, transaction.ended_epoch = NO_PRODUCER, _NO_EPOCH


def _replace(state: ClusterState, transaction: TransactionState) -> None:
    """A fresh producer id, in place of one that has run out of epochs."""
    transaction.producer_id, transaction.producer_epoch = fresh_producer_id(state), ProducerEpoch(0)
    transaction.last_epoch = _NO_EPOCH
    state.transactional_ids[transaction.producer_id] = transaction.transactional_id


def fence(transaction: TransactionState, *, is_replaced: bool) -> None:
    """The producer can do nothing more in its epoch. Unless it `is_replaced`, it may ask for the next one."""
    transaction.last_epoch = _NO_EPOCH if is_replaced else transaction.producer_epoch
    transaction.producer_epoch = ProducerEpoch(transaction.producer_epoch + 1)
    transaction.ended_id, transaction.ended_epoch = NO_PRODUCER, _NO_EPOCH


def note_end(state: ClusterState, transaction: TransactionState, *, is_bumping: bool) -> None:
    """The producer ends its transaction, and goes on: with the next epoch if the end `is_bumping`. Beyond the last
    epoch that is a fresh id. The former one leads to the transactional id until its markers are written."""
    transaction.ended_id, transaction.ended_epoch = transaction.producer_id, transaction.producer_epoch
    if not is_bumping:
        return
    if transaction.producer_epoch < _EPOCH_LAST:
        transaction.last_epoch = transaction.producer_epoch
        transaction.producer_epoch = ProducerEpoch(transaction.producer_epoch + 1)
    else:
        _replace(state, transaction)


def allocated(transaction: TransactionState) -> ProducerIdAllocated:
    """The reply with the id and epoch that a producer goes on with."""
    return ProducerIdAllocated(producer_id=transaction.producer_id, producer_epoch=transaction.producer_epoch)


def _check_id(transactional_id: str) -> None:
    if not 1 <= len(transactional_id.encode()) <= TRANSACTIONAL_ID_BYTES_MAX:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"a transactional id must have 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes"
        )
