"""The commands that change a group's members: a round's end forms a generation, a removal makes the others rebalance.

Owns what is answered once such a command has taken effect. `joining`, `leaving`, `presence` and `changing` import it.
"""

from collections.abc import Callable
from functools import partial

from smq.coordinator.groups.answers import joined
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.round import Round, RoundEnd, absent_members, generation_of, rebalance_timeout_ns, round_end
from smq.raft_state.commands import RemoveMembers


def _no_answer() -> None:
    """No request waits for it."""


def settle_round(memory: GroupMemory) -> None:
    """Ends the round if it is over."""
    round_ = memory.round
    if round_ is None or memory.is_changing:
        return
    memory.refresh()
    members = memory.sessions.members
    if not members and not round_.joiners:
        memory.round = None  # all members have gone
        return
    has_reserved_ids = bool(memory.sessions.reserved_ids)
    absent = absent_members(round_, members)
    match round_end(round_, members, has_reserved_ids=has_reserved_ids, now_ns=memory.host.now_ns()):
        case RoundEnd.WAIT_FOR_STATIC:
            round_.until_ns = memory.host.now_ns() + rebalance_timeout_ns(absent)
            memory.sessions.wake_at(round_.until_ns)
        case RoundEnd.REMOVE_ABSENT:
            memory.round = None
            remove(memory, [m.member_id for m in absent])
        case RoundEnd.FORM:
            command = generation_of(round_, memory.refresh(), memory.name, memory.epoch)
            memory.propose(command, partial(_on_formed, memory, round_))


def _on_formed(memory: GroupMemory, round_: Round) -> None:
    memory.round = None
    group = memory.refresh()
    assert group is not None, "its generation has just been applied"
    memory.await_syncs([name for name in group.members if name in round_.joiners])
    for name, pending in round_.joiners.items():
        memory.renew_session(name)
        pending.answer(joined(group, name))


def remove(
    memory: GroupMemory,
    member_ids: list[str],
    then: Callable[[], None] = _no_answer,
    refuse: Callable[[Outcome], None] | None = None,
) -> None:
    """Members that are gone for good; the others rebalance."""
    group = memory.refresh()
    assert group is not None, "it has members"
    command = RemoveMembers(
        group=memory.name,
        coordinator_epoch=memory.epoch,
        generation=group.generation,
        member_ids=tuple(member_ids),
        removed_ms=memory.host.wall_ms(),
    )
    memory.removing = frozenset(member_ids)
    memory.propose(command, partial(_on_removed, memory, member_ids, then), refuse)


def _on_removed(memory: GroupMemory, member_ids: list[str], then: Callable[[], None]) -> None:
    for member_id in member_ids:
        pending = memory.syncing.pop(member_id, None)
        if pending is not None:
            pending.refuse(Outcome.UNKNOWN_MEMBER)
    if memory.sessions.members and memory.round is None:
        memory.open_round()
    then()
