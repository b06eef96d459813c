"""Actions on JOIN: members get an id, come back as static members, or enter the round.

Owns what each verdict of `admission` does. Only `live` imports it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from smq.coordinator.groups.admission import Admission, Present, Verdict, admission
from smq.coordinator.groups.answers import joined, joined_as_former
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import PendingJoin
from smq.coordinator.groups.rebalancing import remove, settle_round
from smq.coordinator.groups.sessions import NS_PER_MS
from smq.coordinator.limits import GROUP_ID_GIVEN_MS_MAX
from smq.raft_state.commands import GroupMember, ReplaceMember


def admit(memory: GroupMemory, pending: PendingJoin) -> None:
    _admit(memory, pending, may_repeat=False)


def admit_or_repeat(memory: GroupMemory, pending: PendingJoin) -> None:
    _admit(memory, pending, may_repeat=True)


def _admit(memory: GroupMemory, pending: PendingJoin, *, may_repeat: bool) -> None:
    if not pending.is_waiting:
        return  # withdrawn while it was in the queue
    present = Present(
        group=memory.refresh(),
        members=memory.sessions.members,
        joiners=memory.joiners,
        reserved_ids=memory.sessions.reserved_ids.keys(),
        member_bytes=memory.host.member_bytes,
    )
    decision = admission(pending.request, present, may_repeat=may_repeat)
    _VERDICTS[decision.verdict](memory, pending, decision)


def drop_join(memory: GroupMemory, pending: PendingJoin) -> None:
    member_id = pending.member.member_id
    if memory.joiners.get(member_id) is pending:
        del memory.joiners[member_id]
        memory.renew_session(member_id)
        settle_round(memory)


# ------------------------------------------------------------------------------------------------------- verdicts
def _refuse(_memory: GroupMemory, pending: PendingJoin, decision: Admission) -> None:
    pending.refuse(decision.outcome)


def _reserve_id(memory: GroupMemory, pending: PendingJoin, _decision: Admission) -> None:
    member_id = memory.host.new_member_id(pending.member.client_id)
    wait_ms = min(pending.member.session_timeout_ms, GROUP_ID_GIVEN_MS_MAX)
    memory.sessions.reserve_id(member_id, memory.host.now_ns() + wait_ms * NS_PER_MS)
    pending.refuse(Outcome.ID_RESERVED, member_id)


def _enter_as_new(memory: GroupMemory, pending: PendingJoin, _decision: Admission) -> None:
    member = pending.member
    member_id = memory.host.new_member_id(member.instance_id or member.client_id)
    joiners = memory.joiners
    for other in [j for j in joiners.values() if member.instance_id and j.member.instance_id == member.instance_id]:
        del joiners[other.member.member_id]
        other.refuse(Outcome.FENCED_INSTANCE)
    pending.member = replace(member, member_id=member_id)
    enter_round(memory, pending)


def _enter(memory: GroupMemory, pending: PendingJoin, _decision: Admission) -> None:
    member_id = pending.member.member_id
    memory.sessions.reserved_ids.pop(member_id, None)
    memory.renew_session(member_id)
    enter_round(memory, pending)


def _repeat(memory: GroupMemory, pending: PendingJoin, _decision: Admission) -> None:
    group = memory.refresh()
    assert group is not None, "its member asks again"
    memory.renew_session(pending.member.member_id)
    pending.answer(joined(group, pending.member.member_id))


def enter_round(memory: GroupMemory, pending: PendingJoin) -> None:
    """The member waits for the next generation; its first one opens the round."""
    round_ = memory.round or memory.open_round(pending.member.rebalance_timeout_ms)
    now_ns = memory.host.now_ns()
    before = round_.joiners.pop(pending.member.member_id, None)
    if before is not None:
        before.refuse(Outcome.REBALANCING)  # the same member has asked again
    elif round_.is_first and round_.joiners:
        round_.wait_longer(now_ns, memory.host.initial_delay_ms * NS_PER_MS)
    round_.joiners[pending.member.member_id] = pending
    settle_round(memory)


# ------------------------------------------------------------------------------------------------- static members
def _replace(memory: GroupMemory, pending: PendingJoin, decision: Admission) -> None:
    """A static member is back without its id. The process that had the id is fenced, whatever comes next."""
    assert decision.former is not None
    former = decision.former.member
    member_id = memory.host.new_member_id(pending.member.instance_id)
    pending.member = replace(pending.member, member_id=member_id)
    command = ReplaceMember(
        group=memory.name, coordinator_epoch=memory.epoch, old_member_id=former.member_id, member=pending.member
    )
    memory.propose(command, partial(_on_replaced, memory, pending, former), pending.refuse)


def _on_replaced(memory: GroupMemory, pending: PendingJoin, former: GroupMember) -> None:
    for request in (memory.joiners.pop(former.member_id, None), memory.syncing.pop(former.member_id, None)):
        if request is not None:
            request.refuse(Outcome.FENCED_INSTANCE)
    group = memory.refresh()
    answer = None
    if group is not None and memory.round is None:
        answer = joined_as_former(
            group,
            pending.member,
            former,
            can_skip=pending.request.can_skip_assignment,
            partition_count=memory.host.partition_count,
        )
    if answer is not None:
        pending.answer(answer)
    else:
        enter_round(memory, pending)


def _remove_former(memory: GroupMemory, pending: PendingJoin, decision: Admission) -> None:
    """The static member no longer knows the generation's protocol: it joins as a new one."""
    assert decision.former is not None
    remove(memory, [decision.former.member.member_id], partial(admit, memory, pending), pending.refuse)


_Verdict: TypeAlias = Callable[[GroupMemory, PendingJoin, Admission], None]
_VERDICTS: Final[Mapping[Verdict, _Verdict]] = {
    Verdict.REFUSE: _refuse,
    Verdict.RESERVE_ID: _reserve_id,
    Verdict.ENTER_AS_NEW: _enter_as_new,
    Verdict.ENTER: _enter,
    Verdict.REPEAT: _repeat,
    Verdict.REPLACE: _replace,
    Verdict.REMOVE_FORMER: _remove_former,
}
