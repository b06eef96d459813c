"""The handler of AdvanceClock: the replicated clock of expiry, and what expires by it.

Owns the speed of that clock, and when the producers of a partition are forgotten. `groups` owns the expiry of committed
offsets, `transactions` that of transactions, `batches` that of apps. It must never take a node's clock at its word.
Only `command_table` imports it.
"""

from smq.raft_state.cluster_config import producer_expiration_ms
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.handlers import groups
from smq.raft_state.handlers.batches import expire_apps, start_app_clock
from smq.raft_state.handlers.transactions import expire_transactions, start_transaction_clock
from smq.raft_state.ids import PartitionId
from smq.raft_state.limits import (
    CLOCK_ELAPSED_MS_MAX,
    PRODUCER_MARKS_MAX,
    PRODUCER_MARKS_PER_EXPIRATION,
)
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, PartitionState, ProducerMark


def advance_clock(state: ClusterState, command: AdvanceClock) -> Applied:
    """Moves the clock, then lets offsets, producers and transactions expire. Does nothing if another node has moved the
    clock since the proposer measured, so that two proposers cannot make it run twice as fast."""
    before = state.expiry_clock_ms
    if not before:
        state.expiry_clock_ms = max(command.now_ms, 1)
        groups.start_clock(state)
        start_transaction_clock(state)
        start_app_clock(state)
    elif command.seen_ms == before:
        state.expiry_clock_ms = _advanced(before, command)
        groups.expire_offsets(state)
        expire_apps(state)
    else:
        return Applied(reply=Done())
    groups.drop_unused(state)
    touched = (*_expire_producers(state), *expire_transactions(state))
    return Applied(reply=Done(), touched=tuple(dict.fromkeys(touched)))


def _advanced(before_ms: int, command: AdvanceClock) -> int:
    """The clock follows the proposers' wall clocks, but at half to twice the speed of their monotonic clocks. So a
    wall clock that is wrong by years neither makes everything expire, nor stops expiry, in whichever direction it is
    wrong, even if it was the first."""
    elapsed_ms = min(max(command.elapsed_ms, 0), CLOCK_ELAPSED_MS_MAX)
    return before_ms + min(max(command.now_ms - before_ms, elapsed_ms // 2), 2 * elapsed_ms)


def _expire_producers(state: ClusterState) -> tuple[PartitionId, ...]:
    """The partitions in which producers have expired.

    A mark says which records were there when the clock showed a time, by the high water mark, which never goes back.
    One expiration later, whatever producers wrote below it is forgotten. No time of any record is looked at.
    """
    now_ms = state.expiry_clock_ms
    expiration_ms = producer_expiration_ms(state.config)
    horizon_ms = now_ms - expiration_ms
    newest_ms = now_ms - expiration_ms // PRODUCER_MARKS_PER_EXPIRATION
    return tuple(
        part.pid
        for topic in state.topics.values()
        for part in topic.partitions
        if not part.is_external and _move_marks(part, now_ms, horizon_ms, newest_ms)
    )


def _move_marks(part: PartitionState, now_ms: int, horizon_ms: int, newest_ms: int) -> bool:
    """Adds the mark that is due, and takes those whose time is over; true if it took one."""
    marks, start = part.producer_marks, part.producers_start
    marked = marks[-1].hwm if marks else start
    is_due = not marks or marks[-1].clock_ms <= newest_ms
    if part.hwm > marked and is_due and len(marks) < PRODUCER_MARKS_MAX:
        marks.append(ProducerMark(now_ms, part.hwm))
    while marks and marks[0].clock_ms <= horizon_ms:
        part.producers_start = marks.pop(0).hwm
    return part.producers_start != start
