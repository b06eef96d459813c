"""Handlers of transactions: InitTransactions, AddToTransaction, EndTransaction, CompleteTransactions, and their expiry.

Owns the life of a transactional id and of its transactions. One entry decides a transaction over all of its partitions
and staged offsets, and nothing may change the decision. The leaders of the partitions then write it into their logs,
and say so; the id's next transaction begins only after the last of them, so that no batch of it comes before a marker
of the one before. `staged_offsets` owns what is staged. Only `command_table`, `batches`, `expiry` and `topics` import
it.
"""

from smq.raft_state.cluster_config import transaction_timeout_ms_max, transactional_id_expiration_ms
from smq.raft_state.commands import AddToTransaction, CompleteTransactions, EndTransaction, InitTransactions
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.producer_ids import fresh_producer_id
from smq.raft_state.handlers.staged_offsets import add_groups, check_room, commit_staged, forget_staged
from smq.raft_state.ids import NO_PRODUCER, PartitionId, ProducerEpoch, TopicId
from smq.raft_state.limits import (
    PRODUCER_EPOCH_RETIRED,
    TOPIC_ID_BYTES,
    TRANSACTION_PARTITIONS_MAX,
    TRANSACTIONAL_ID_BYTES_MAX,
    TRANSACTIONAL_IDS_MAX,
)
from smq.raft_state.refusal import Refused, fenced, find_partition, find_transaction, quoted, unknown_transactional_id
from smq.raft_state.replies import Applied, Done, ProducerIdAllocated
from smq.raft_state.state import ClusterState, TransactionOutcome, TransactionPhase, TransactionState

_DONE = Applied(reply=Done())
_NO_EPOCH = ProducerEpoch(-1)
_EPOCH_LAST = PRODUCER_EPOCH_RETIRED - 1  # given to a producer; an abort may still go beyond it, to fence


# ----------------------------------------------------------------------------------------------------- producers
def init_transactions(state: ClusterState, command: InitTransactions) -> Applied:
    """The id's next epoch, or a fresh producer id: for a new transactional id, or one that has run out of epochs."""
    _check_id(command.transactional_id)
    longest_ms = transaction_timeout_ms_max(state.config)
    if not 1 <= command.timeout_ms <= longest_ms:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
            f"a transaction's timeout must be from 1 to {longest_ms} ms, not {command.timeout_ms}",
        )
    transaction = state.transactions.get(command.transactional_id)
    if transaction is None:
        return _register(state, command)
    if command.producer_id != NO_PRODUCER:
        is_known = command.producer_id == transaction.producer_id
        if not is_known or command.producer_epoch not in (transaction.producer_epoch, transaction.last_epoch):
            raise fenced(transaction, command.producer_id, command.producer_epoch)
    if transaction.phase is not TransactionPhase.EMPTY:
        raise Refused(
            ErrorCode.TRANSACTION_ENDING,
            f"the last transaction of {quoted(transaction.transactional_id)} is {transaction.phase.name}",
        )
    transaction.timeout_ms, transaction.is_temporary = command.timeout_ms, command.is_temporary
    transaction.used_ms = state.expiry_clock_ms
    is_repetition = command.producer_id != NO_PRODUCER and command.producer_epoch != transaction.producer_epoch
    if not is_repetition or transaction.producer_epoch > _EPOCH_LAST:
        _next_epoch(state, transaction, is_named=command.producer_id != NO_PRODUCER)
        transaction.outcome = TransactionOutcome.NONE
    return _allocated(transaction)


def _register(state: ClusterState, command: InitTransactions) -> Applied:
    if command.producer_id != NO_PRODUCER:
        raise unknown_transactional_id(command.transactional_id, command.producer_id)
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
    return _allocated(transaction)


def _next_epoch(state: ClusterState, transaction: TransactionState, *, is_named: bool) -> None:
    if transaction.producer_epoch < _EPOCH_LAST:
        transaction.last_epoch = transaction.producer_epoch if is_named else _NO_EPOCH
        transaction.producer_epoch = ProducerEpoch(transaction.producer_epoch + 1)
        return
    del state.transactional_ids[transaction.producer_id]
    transaction.producer_id, transaction.producer_epoch = fresh_producer_id(state), ProducerEpoch(0)
    transaction.last_epoch = _NO_EPOCH
    state.transactional_ids[transaction.producer_id] = transaction.transactional_id


def _allocated(transaction: TransactionState) -> Applied:
    return Applied(
        reply=ProducerIdAllocated(producer_id=transaction.producer_id, producer_epoch=transaction.producer_epoch)
    )


def _check_id(transactional_id: str) -> None:
    if not 1 <= len(transactional_id.encode()) <= TRANSACTIONAL_ID_BYTES_MAX:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"a transactional id must have 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes"
        )


# -------------------------------------------------------------------------------------------------- transactions
def add_to_transaction(state: ClusterState, command: AddToTransaction) -> Applied:
    """All partitions and groups, or none."""
    transaction = find_transaction(state, command.transactional_id, command.producer_id, command.producer_epoch)
    if transaction.is_ending:
        raise Refused(
            ErrorCode.TRANSACTION_ENDING,
            f"{len(transaction.partitions)} partitions still lack the end of the last transaction of"
            f" {quoted(transaction.transactional_id)}",
        )
    new = sorted(set(command.partitions) - transaction.partitions)
    for pid in new:
        if find_partition(state, pid).is_external:
            raise Refused(ErrorCode.WRONG_STORAGE, "a transaction has no part in a topic of storage=external")
    if len(transaction.partitions) + len(new) > TRANSACTION_PARTITIONS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a transaction has at most {TRANSACTION_PARTITIONS_MAX} partitions")
    check_room(state, len(new) + len(command.groups))
    state.transaction_items += add_groups(transaction, command.groups) + len(new)
    transaction.partitions.update(new)
    transaction.used_ms = state.expiry_clock_ms
    if transaction.phase is TransactionPhase.EMPTY:
        transaction.phase, transaction.started_ms = TransactionPhase.ONGOING, 0
    return _DONE


def end_transaction(state: ClusterState, command: EndTransaction) -> Applied:
    """The decision. LIMIT_EXCEEDED, and the transaction stays open, if a group of a staged offset has no room."""
    transaction = find_transaction(state, command.transactional_id, command.producer_id, command.producer_epoch)
    if command.is_commit and command.is_fencing:
        raise Refused(ErrorCode.INVALID_REQUEST, "only an abort may fence the producer")
    if command.is_replacing and not command.is_fencing:
        raise Refused(ErrorCode.INVALID_REQUEST, "a producer that is replaced must be fenced")
    outcome = TransactionOutcome.COMMITTED if command.is_commit else TransactionOutcome.ABORTED
    if transaction.phase is not TransactionPhase.ONGOING:
        if transaction.outcome is outcome:
            return _DONE
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"{quoted(transaction.transactional_id)} has no open transaction; its last one is"
            f" {transaction.outcome.name}",
        )
    if command.is_commit:
        commit_staged(state, transaction)
    elif command.is_fencing:
        fence(transaction, is_replaced=command.is_replacing)
    return Applied(reply=Done(), touched=decide(state, transaction, outcome))


def fence(transaction: TransactionState, *, is_replaced: bool) -> None:
    """The producer can do nothing more in its epoch. Unless it `is_replaced`, it may ask for the next one."""
    transaction.last_epoch = _NO_EPOCH if is_replaced else transaction.producer_epoch
    transaction.producer_epoch = ProducerEpoch(transaction.producer_epoch + 1)


def decide(state: ClusterState, transaction: TransactionState, outcome: TransactionOutcome) -> tuple[PartitionId, ...]:
    """The open transaction has ended. Returns its partitions, whose leaders write that into their logs."""
    is_commit = outcome is TransactionOutcome.COMMITTED
    state.transaction_items -= transaction.items - len(transaction.partitions)
    transaction.offsets.clear()
    transaction.outcome, transaction.used_ms = outcome, state.expiry_clock_ms
    transaction.phase = TransactionPhase.COMMITTING if is_commit else TransactionPhase.ABORTING
    for pid in transaction.partitions:
        state.endings.setdefault(pid, set()).add(transaction.producer_id)
    touched = tuple(sorted(transaction.partitions))
    _finish(state, transaction)
    return touched


def _finish(state: ClusterState, transaction: TransactionState) -> None:
    if not transaction.is_ending or transaction.partitions:
        return
    transaction.phase = TransactionPhase.EMPTY
    if transaction.is_temporary:
        _forget(state, transaction)


def _forget(state: ClusterState, transaction: TransactionState) -> None:
    """No command that was meant for it fits a new id of its name."""
    state.transaction_changes_floor = max(state.transaction_changes_floor, transaction.changes + 1)
    del state.transactional_ids[transaction.producer_id], state.transactions[transaction.transactional_id]


def complete_transactions(state: ClusterState, command: CompleteTransactions) -> Applied:
    """Item by item: one of another epoch, of another transaction, or of a deleted partition, changes nothing."""
    for item in command.items:
        partition = state.partition(item.partition)
        transaction = state.transaction_of(item.producer_id)
        if partition is None or partition.epoch != item.epoch or transaction is None:
            continue
        is_current = transaction.is_ending and transaction.changes == item.changes
        if is_current:
            _remove(state, transaction, item.partition)
    return _DONE


def _remove(state: ClusterState, transaction: TransactionState, pid: PartitionId) -> None:
    if pid not in transaction.partitions:
        return
    transaction.partitions.discard(pid)
    state.transaction_items -= 1
    lacking = state.endings.get(pid)
    if lacking is not None:
        lacking.discard(transaction.producer_id)
        if not lacking:
            del state.endings[pid]
    _finish(state, transaction)


def forget_transactions(state: ClusterState, topic_id: TopicId) -> None:
    """A topic is deleted: what a transaction wrote to it is gone, and the rest of the transaction goes on."""
    for transaction in list(state.transactions.values()):
        for pid in sorted(pid for pid in transaction.partitions if pid[:TOPIC_ID_BYTES] == topic_id):
            _remove(state, transaction, pid)
        forget_staged(state, transaction, topic_id)


# -------------------------------------------------------------------------------------------------------- expiry
def start_transaction_clock(state: ClusterState) -> None:
    """The clock has begun, at a time that nothing bounds: nothing is older than it."""
    for transaction in state.transactions.values():
        transaction.used_ms = state.expiry_clock_ms


def expire_transactions(state: ClusterState) -> tuple[PartitionId, ...]:
    """Aborts the transactions whose time is over, and fences their producers. The time begins with the first step of
    the clock after the transaction's start: the clock may have stood for minutes before it. Ids without a transaction
    for long are forgotten. Returns the partitions that are touched."""
    now_ms = state.expiry_clock_ms
    horizon_ms = now_ms - transactional_id_expiration_ms(state.config)
    touched: dict[PartitionId, None] = {}
    for name in sorted(state.transactions):
        transaction = state.transactions[name]
        if transaction.phase is TransactionPhase.EMPTY and transaction.used_ms <= horizon_ms:
            _forget(state, transaction)
        elif transaction.phase is TransactionPhase.ONGOING and not transaction.started_ms:
            transaction.started_ms = now_ms
        elif transaction.phase is TransactionPhase.ONGOING and (
            now_ms - transaction.started_ms >= transaction.timeout_ms
        ):
            transaction.changes += 1
            fence(transaction, is_replaced=False)
            touched.update(dict.fromkeys(decide(state, transaction, TransactionOutcome.ABORTED)))
    return tuple(touched)
