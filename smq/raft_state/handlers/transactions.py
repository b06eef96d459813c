"""Handlers of transactions: their producers, what they hold, and how they end. InitTransactions, AddToTransaction,
JoinTransactions, StageOffsets, EndTransaction, CompleteTransactions, and their expiry.

Owns the life of transactions. One entry decides a transaction over all of its partitions and staged offsets, and
nothing may change the decision. The leaders of the partitions then write it into their logs, and say so; the id's next
transaction begins only after the last of them, so that no batch of it comes before a marker of the one before. Owns
each step of a producer from one epoch to the next: a start, the fence of an abort, the end of a transaction in Kafka's
second protocol; an epoch is never given twice. Staged offsets are no commits before the decision: no reader of the
group sees them, and they keep no group alive. Only `command_table`, `batches`, `expiry` and `topics` import it.
"""

from collections.abc import Collection, Iterable

from smq.raft_state.cluster_config import transaction_timeout_ms_max, transactional_id_expiration_ms
from smq.raft_state.commands import (
    AddToTransaction,
    CompleteTransactions,
    EndTransaction,
    InitTransactions,
    Joining,
    JoinTransactions,
    StageOffsets,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import (
    check_committer,
    check_group_name,
    checked_items,
    make_group,
    newest,
    too_many_groups,
)
from smq.raft_state.handlers.producer_ids import fresh_producer_id
from smq.raft_state.ids import NO_PRODUCER, PartitionId, ProducerEpoch, ProducerId, TopicId
from smq.raft_state.limits import (
    PRODUCER_EPOCH_RETIRED,
    TOPIC_ID_BYTES,
    TRANSACTION_ITEMS_CLUSTER_MAX,
    TRANSACTION_PARTITIONS_MAX,
    TRANSACTIONAL_ID_BYTES_MAX,
    TRANSACTIONAL_IDS_MAX,
)
from smq.raft_state.refusal import Refused, fenced, find_partition, find_transaction, quoted
from smq.raft_state.replies import Applied, Done, ProducerIdAllocated, Rejected, Results
from smq.raft_state.state import ClusterState, TransactionOutcome, TransactionPhase, TransactionState
from smq.raft_state.topic_config import is_mirrored

_NO_EPOCH = ProducerEpoch(-1)
_EPOCH_LAST = PRODUCER_EPOCH_RETIRED - 1  # given to a producer; an abort may still go beyond it, to fence


# --------------------------------------------------------------------------------------------------- producers
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
        return _register_id(state, command)
    if is_named and (command.producer_id, command.producer_epoch) not in _known_producers(transaction):
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


def _known_producers(transaction: TransactionState) -> tuple[tuple[ProducerId, ProducerEpoch], ...]:
    """The ids and epochs under which a producer may go on: the present, or those before an answer that it lacks."""
    return (
        (transaction.producer_id, transaction.producer_epoch),
        (transaction.producer_id, transaction.last_epoch),
        (transaction.ended_id, transaction.ended_epoch),
    )


def _register_id(state: ClusterState, command: InitTransactions) -> Applied:
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
        _give_fresh_id(state, transaction)
    transaction.ended_id, transaction.ended_epoch = NO_PRODUCER, _NO_EPOCH


def _give_fresh_id(state: ClusterState, transaction: TransactionState) -> None:
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
        _give_fresh_id(state, transaction)


def allocated(transaction: TransactionState) -> ProducerIdAllocated:
    """The reply with the id and epoch that a producer goes on with."""
    return ProducerIdAllocated(producer_id=transaction.producer_id, producer_epoch=transaction.producer_epoch)


def _check_id(transactional_id: str) -> None:
    if not 1 <= len(transactional_id.encode()) <= TRANSACTIONAL_ID_BYTES_MAX:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"a transactional id must have 1 to {TRANSACTIONAL_ID_BYTES_MAX} bytes"
        )


# ------------------------------------------------------------------------------ what they hold, and how they end
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
        partition = find_partition(state, pid)
        if partition.is_external:
            raise Refused(ErrorCode.WRONG_STORAGE, "a transaction has no part in a topic of storage=external")
        if is_mirrored(state.topics[state.topic_names[partition.topic_id]].config):
            # The end of a transaction of the same id there must not come from here.
            raise Refused(ErrorCode.WRONG_WRITER, "a transaction has no part in a copy of another cluster's topic")
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


# ------------------------------------------------------------------------------------------------ staged offsets
def stage_offsets(state: ClusterState, command: StageOffsets) -> Applied:
    """All items or none. A request without a member's ids is not compared with the group's members, as in Kafka: old
    clients do not name them."""
    check_group_name(command.group)
    transaction = find_transaction(state, command.transactional_id, command.producer_id, command.producer_epoch)
    if transaction.changes != command.transaction_changes_seen:
        raise Refused(
            ErrorCode.TRANSACTION_ENDING,
            f"{quoted(command.transactional_id)} has changed {transaction.changes} times,"
            f" not {command.transaction_changes_seen}",
        )
    if command.is_joining:
        check_may_join(transaction)
    elif transaction.phase is not TransactionPhase.ONGOING or command.group not in transaction.offsets:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"group {quoted(command.group)} is not part of an open transaction of {quoted(command.transactional_id)}",
        )
    if command.generation >= 0 or command.member_id:
        check_committer(state.groups.get(command.group), command)
    checked_items(state, command.items)
    known = transaction.offsets.get(command.group, {})
    new = sum(item.partition not in known for item in command.items)
    check_room(state, new + (command.group not in transaction.offsets))
    state.transaction_items += new
    if command.is_joining:
        state.transaction_items += add_groups(transaction, (command.group,))
        grow(state, transaction)
    transaction.offsets[command.group].update(newest(state, command.items, command.committed_ms))
    transaction.changes += 1
    return Applied(reply=Done())


def check_may_grow(transaction: TransactionState) -> None:
    """TRANSACTION_ENDING while markers of the transaction before are being written."""
    if transaction.is_ending:
        raise Refused(
            ErrorCode.TRANSACTION_ENDING,
            f"{len(transaction.partitions)} partitions still lack the end of the last transaction of"
            f" {quoted(transaction.transactional_id)}",
        )


def check_may_join(transaction: TransactionState) -> None:
    """As `check_may_grow`, for what joins by itself. INVALID_TRANSACTION_STATE in an epoch that has outlived a
    transaction: it may be a late part of that one."""
    check_may_grow(transaction)
    if transaction.has_outlived_one:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"a transaction of {quoted(transaction.transactional_id)} has ended in epoch {transaction.producer_epoch}:"
            " what belongs to the next one must be added first, or come in the next epoch",
        )


def grow(state: ClusterState, transaction: TransactionState) -> None:
    """Something has become part of the transaction: if it is the first, the transaction has begun."""
    transaction.used_ms = state.expiry_clock_ms
    if transaction.phase is TransactionPhase.EMPTY:
        transaction.phase, transaction.started_ms = TransactionPhase.ONGOING, 0


def check_room(state: ClusterState, items: int) -> None:
    """LIMIT_EXCEEDED if the open transactions would hold too many partitions and offsets."""
    if state.transaction_items + items > TRANSACTION_ITEMS_CLUSTER_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"the open transactions have {state.transaction_items} partitions and offsets, the limit is"
            f" {TRANSACTION_ITEMS_CLUSTER_MAX}: end some",
        )


def add_groups(transaction: TransactionState, groups: Iterable[str]) -> int:
    """The groups whose offsets may be staged; returns how many are new. INVALID_REQUEST, before any change, for what
    cannot be a group's name."""
    for group in groups:
        check_group_name(group)
    before = len(transaction.offsets)
    for group in groups:
        transaction.offsets.setdefault(group, {})
    return len(transaction.offsets) - before


def commit_staged(state: ClusterState, transaction: TransactionState) -> None:
    """The staged offsets become the groups' committed ones, except where a newer one was committed since they were
    staged: as in Kafka, the newest stays. It counts as a change of each group, so that an older commit that arrives
    late does not undo it."""
    groups = sorted(name for name, staged in transaction.offsets.items() if staged)
    missing = [name for name in groups if name not in state.groups]
    unused = sum(group.is_unused for name, group in state.groups.items() if name not in transaction.offsets)
    if len(missing) > state.groups_max - len(state.groups) + unused:
        raise too_many_groups(state)
    # The existing ones first: with offsets they are not dropped for the others' room.
    for name in sorted(groups, key=lambda name: (name not in state.groups, name)):
        group = state.groups.get(name)
        if group is None:
            group = make_group(state, name)
        for pid, staged in sorted(transaction.offsets[name].items()):
            committed = group.offsets.get(pid)
            if committed is None or committed.order < staged.order:
                staged.committed_ms = max(staged.committed_ms, state.expiry_clock_ms)
                group.offsets[pid] = staged
        group.was_unused = False
        group.changes += 1


def forget_staged(state: ClusterState, transaction: TransactionState, topic_id: TopicId) -> None:
    """Drops the offsets staged for a deleted topic."""
    for staged in transaction.offsets.values():
        for pid in [pid for pid in staged if pid[:TOPIC_ID_BYTES] == topic_id]:
            del staged[pid]
            state.transaction_items -= 1
