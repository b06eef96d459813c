"""Actions around the one command under way: requests queue behind it, its reply releases them, its failure ends the
object.

Owns the order in which waiting requests are answered. Only `live` imports it.
"""

from collections import deque
from collections.abc import Callable

from smq.coordinator.groups.memory import Failure, GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import Heartbeat, Pending
from smq.coordinator.groups.rebalancing import settle_round
from smq.coordinator.limits import GROUP_QUEUE_MAX


def enqueue(memory: GroupMemory, pending: Pending) -> None:
    if len(memory.queue) < GROUP_QUEUE_MAX:
        memory.queue.append(pending)
    else:
        pending.refuse(Outcome.QUEUE_FULL)


def refuse_closed(memory: GroupMemory, request: Pending | Heartbeat) -> None:
    assert memory.closed_with is not None, "it is closed"
    request.refuse(memory.closed_with)


def refuse_unknown(_memory: GroupMemory, request: Pending | Heartbeat) -> None:
    request.refuse(Outcome.UNKNOWN_MEMBER)


def finish_change(memory: GroupMemory, then: Callable[[], None]) -> None:
    memory.is_changing = False
    memory.removing = frozenset()
    memory.refuse_change = None
    memory.refresh()
    then()
    while memory.queue and not memory.is_changing:
        pending = memory.queue.popleft()
        memory.handle(pending.event, pending)
    settle_round(memory)


def give_up(memory: GroupMemory, failure: Failure) -> None:
    """Whatever is true of the group now is for the next object to read."""
    if failure.error is not None:
        memory.host.log_failure(memory.name, failure.command, failure.error)
    memory.host.forget(memory.name, memory.epoch)
    close(memory, failure.outcome)


def close(memory: GroupMemory, outcome: Outcome) -> None:
    memory.closed_with = outcome
    memory.is_changing = False
    refuse_change, memory.refuse_change = memory.refuse_change, None
    if refuse_change is not None:
        refuse_change(outcome)
    joiners, memory.round = memory.joiners, None
    syncing, memory.syncing = memory.syncing, {}
    queue, memory.queue = memory.queue, deque()
    for pending in (*joiners.values(), *syncing.values(), *queue):
        pending.refuse(outcome)
