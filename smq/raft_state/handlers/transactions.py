"""Handlers of transactions: AddToTransaction, JoinTransactions, EndTransaction, CompleteTransactions, their expiry.

Owns the life of transactions. One entry decides a transaction over all of its partitions and staged offsets, and
nothing may change the decision. The leaders of the partitions then write it into their logs, and say so; the id's next
transaction begins only after the last of them, so that no batch of it comes before a marker of the one before.
`transaction_producers` owns who may act, `staged_offsets` what is staged. Only `command_table`, `batches`, `expiry` and
`topics` import it.
"""

from collections.abc import Collection

from smq.raft_state.cluster_config import transactional_id_expiration_ms
from smq.raft_state.commands import AddToTransaction, CompleteTransactions, EndTransaction, Joining, JoinTransactions
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.staged_offsets import (
    add_groups,
    check_may_grow,
    check_may_join,
    check_room,
    commit_staged,
    forget_staged,
    grow,
)
from smq.raft_state.handlers.transaction_producers import allocated, fence, note_end
from smq.raft_state.ids import PartitionId, TopicId
from smq.raft_state.limits import TOPIC_ID_BYTES, TRANSACTION_PARTITIONS_MAX
from smq.raft_state.refusal import Refused, find_partition, find_transaction, quoted
from smq.raft_state.replies import Applied, Done, ProducerIdAllocated, Rejected, Results
from smq.raft_state.state import ClusterState, TransactionOutcome, TransactionPhase, TransactionState

_DONE = Applied(reply=Done())


# -------------------------------------------------------------------------------------------------- transactions
def add_to_transaction(state: ClusterState, command: AddToTransaction) -> Applied:
    """All partitions and groups, or none."""
    transaction = find_transaction(state, command.transactional_id, command.producer_id, command.producer_epoch)
    check_may_grow(transaction)
    new = sorted(set(command.partitions) - transaction.partitions)
    _check_partitions(state, transaction, new)
    check_room(state, len(new) + len(command.groups))
    state.transaction_items += add_groups(transaction, command.groups) + len(new)
    transaction.partitions.update(new)
    grow(state, transaction)
    return _DONE


def _check_partitions(state: ClusterState, transaction: TransactionState, new: Collection[PartitionId]) -> None:
    for pid in new:
        if find_partition(state, pid).is_external:
            raise Refused(ErrorCode.WRONG_STORAGE, "a transaction has no part in a topic of storage=external")
    if len(transaction.partitions) + len(new) > TRANSACTION_PARTITIONS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a transaction has at most {TRANSACTION_PARTITIONS_MAX} partitions")


def join_transactions(state: ClusterState, command: JoinTransactions) -> Applied:
    """Item by item: one producer's mistake costs the others nothing."""
    results: list[Done | Rejected] = []
    for item in command.items:
        try:
            _join(state, item)
        except Refused as refused:
            results.append(refused.rejected)
        else:
            results.append(Done())
    return Applied(reply=Results(items=tuple(results)))


def _join(state: ClusterState, item: Joining) -> None:
    found = state.transaction_of(item.producer_id)
    if found is None:
        raise Refused(
            ErrorCode.UNKNOWN_TRANSACTIONAL_ID, f"producer {item.producer_id} has no transactional id, or no longer"
        )
    transaction = find_transaction(state, found.transactional_id, item.producer_id, item.producer_epoch)
    check_may_join(transaction)
    if item.partition in transaction.partitions:
        return
    _check_partitions(state, transaction, (item.partition,))
    check_room(state, 1)
    state.transaction_items += 1
    transaction.partitions.add(item.partition)
    grow(state, transaction)


def end_transaction(state: ClusterState, command: EndTransaction) -> Applied:
    """The decision. LIMIT_EXCEEDED, and the transaction stays open, if a group of a staged offset has no room."""
    _check_flags(command)
    outcome = TransactionOutcome.COMMITTED if command.is_commit else TransactionOutcome.ABORTED
    transaction = state.transactions.get(command.transactional_id)
    is_repetition = transaction is not None and _is_repetition(transaction, command)
    if transaction is None or not is_repetition:
        transaction = find_transaction(state, command.transactional_id, command.producer_id, command.producer_epoch)
    if transaction.phase is not TransactionPhase.ONGOING:
        if is_repetition and transaction.outcome is outcome:
            return Applied(reply=_answer(transaction, command))
        _check_may_end_nothing(transaction, command, is_repetition=is_repetition)
    if command.is_commit:
        _check_is_kept(transaction)
        commit_staged(state, transaction)
    if command.is_fencing:
        fence(transaction, is_replaced=command.is_replacing)
    else:
        note_end(state, transaction, is_bumping=command.is_bumping)
    touched = decide(state, transaction, outcome)
    return Applied(reply=_answer(transaction, command), touched=touched)


def _check_flags(command: EndTransaction) -> None:
    if command.is_fencing and (command.is_commit or command.is_bumping):
        raise Refused(ErrorCode.INVALID_REQUEST, "only an abort may fence the producer, which then gets no epoch by it")
    if command.is_replacing and not command.is_fencing:
        raise Refused(ErrorCode.INVALID_REQUEST, "a producer that is replaced must be fenced")


def _is_repetition(transaction: TransactionState, command: EndTransaction) -> bool:
    """The last transaction was ended under these very names, by the same protocol, and no other has begun since."""
    if transaction.phase is TransactionPhase.ONGOING or command.is_bumping == transaction.has_outlived_one:
        return False
    return (command.producer_id, command.producer_epoch) == (transaction.ended_id, transaction.ended_epoch)


def _check_may_end_nothing(transaction: TransactionState, command: EndTransaction, *, is_repetition: bool) -> None:
    """No transaction is open. Only an abort of the second protocol may come then: the client cannot know whether a
    batch of its own has begun one, and the next epoch keeps that batch from doing so later."""
    if is_repetition or command.is_commit or not command.is_bumping:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"{quoted(transaction.transactional_id)} has no open transaction; its last one is"
            f" {transaction.outcome.name}",
        )
    check_may_grow(transaction)


def _check_is_kept(transaction: TransactionState) -> None:
    """A temporary id is forgotten after the commit, and then nothing could answer a repetition as the first. Of a
    CommitBatch the reply is remembered."""
    if transaction.is_temporary:
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"{quoted(transaction.transactional_id)} is temporary: commit its transaction with CommitBatch",
        )


def _answer(transaction: TransactionState, command: EndTransaction) -> Done | ProducerIdAllocated:
    return allocated(transaction) if command.is_bumping else Done()


def decide(state: ClusterState, transaction: TransactionState, outcome: TransactionOutcome) -> tuple[PartitionId, ...]:
    """The open transaction has ended. Returns its partitions, whose leaders write that into their logs."""
    is_commit = outcome is TransactionOutcome.COMMITTED
    state.transaction_items -= transaction.items - len(transaction.partitions)
    transaction.offsets.clear()
    transaction.outcome, transaction.used_ms = outcome, state.expiry_clock_ms
    transaction.phase = TransactionPhase.COMMITTING if is_commit else TransactionPhase.ABORTING
    for pid in transaction.partitions:
        state.endings.setdefault(pid, set()).add(transaction.marked_as[0])
    touched = tuple(sorted(transaction.partitions))
    _finish(state, transaction)
    return touched


def _finish(state: ClusterState, transaction: TransactionState) -> None:
    """Once the logs of all its partitions say how the transaction has ended. A producer id that has run out of epochs
    has led to it until now."""
    if not transaction.is_ending or transaction.partitions:
        return
    transaction.phase = TransactionPhase.EMPTY
    if transaction.ended_id != transaction.producer_id:
        state.transactional_ids.pop(transaction.ended_id, None)
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
        lacking.discard(transaction.marked_as[0])
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
    the clock after the transaction's start: the clock may have stood for minutes before it. An id that has
    had no transaction for `transactional.id.expiration.ms` is forgotten. Returns the partitions that are touched."""
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
