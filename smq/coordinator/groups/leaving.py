"""The action on LEAVE: members that say goodbye.

Owns which of them can leave, and their answers. Only `live` imports it.
"""

from functools import partial

from smq.coordinator.groups.identity import resolve_leaver
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import PendingLeave
from smq.coordinator.groups.rebalancing import remove, settle_round
from smq.coordinator.groups.types import Identity


def remove_leaving(memory: GroupMemory, pending: PendingLeave) -> None:
    memory.refresh()
    outcomes, removed = [], []
    for who in pending.leaving:
        outcome, member_id = _leave(memory, who)
        outcomes.append(outcome)
        if outcome is Outcome.OK and member_id in memory.sessions.members:
            removed.append(member_id)
    if removed:
        remove(memory, removed, partial(pending.answer, outcomes), pending.refuse)
    else:
        pending.answer(outcomes)
        settle_round(memory)


def _leave(memory: GroupMemory, who: Identity) -> tuple[Outcome, str]:
    """The answer to one of them and its id. What only memory holds of it is gone; the generation is still to change."""
    outcome, member_id = resolve_leaver(
        who,
        members=memory.sessions.members,
        joiners=memory.joiners,
        reserved_ids=memory.sessions.reserved_ids.keys(),
    )
    if outcome is Outcome.OK:
        memory.sessions.reserved_ids.pop(member_id, None)
        waiting = memory.joiners.pop(member_id, None)
        if waiting is not None:
            waiting.refuse(Outcome.UNKNOWN_MEMBER)
    return outcome, member_id
