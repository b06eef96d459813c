"""Handler of StageOffsets, and what becomes of the staged offsets: a group's commits, with a transaction or never.

Owns the offsets inside transactions, and their bound. They are no commits before the transaction's decision: no reader
of the group sees them, and they keep no group alive. `transactions` decides. Only `command_table` and `transactions`
import it.
"""

from collections.abc import Iterable

from smq.raft_state.commands import StageOffsets
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import (
    check_committer,
    check_group_name,
    checked_items,
    make_group,
    too_many_groups,
)
from smq.raft_state.ids import TopicId
from smq.raft_state.limits import TOPIC_ID_BYTES, TRANSACTION_ITEMS_CLUSTER_MAX
from smq.raft_state.refusal import Refused, find_transaction, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, CommittedOffset, TransactionPhase, TransactionState


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
    staged = transaction.offsets[command.group]
    for item in command.items:
        staged[item.partition] = CommittedOffset(
            offset=item.offset,
            metadata=item.metadata,
            leader_epoch=item.leader_epoch,
            committed_ms=command.committed_ms,
        )
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
    """The staged offsets become the groups' committed ones. It counts as a change of each group, so that an older
    commit that arrives late does not undo it."""
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
