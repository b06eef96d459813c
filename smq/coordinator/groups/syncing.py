"""Actions on SYNC: members wait for the assignment, the leader brings it.

Owns which syncs wait, and what they are answered. Only `live` imports it.
"""

from functools import partial

from smq.coordinator.groups.answers import synced
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import PendingSync
from smq.coordinator.groups.presence import check_sender
from smq.coordinator.groups.types import Sync
from smq.raft_state.commands import AssignMembers
from smq.raft_state.state import GroupState


def sync_refusal(request: Sync, group: GroupState) -> Outcome:
    """A request that names a protocol means the generation of that one."""
    names_type = request.protocol_type in (None, group.protocol_type)
    names_protocol = request.protocol in (None, group.protocol)
    return Outcome.OK if names_type and names_protocol else Outcome.PROTOCOL_MISMATCH


def refuse_rebalancing(memory: GroupMemory, pending: PendingSync) -> None:
    outcome = check_sender(memory, pending.request.who, pending.request.generation)
    pending.refuse(outcome if outcome is not Outcome.OK else Outcome.REBALANCING)


def _check(memory: GroupMemory, pending: PendingSync) -> GroupState | None:
    """The group, if the request is one of its members'; it is refused otherwise."""
    group = memory.refresh()
    outcome = check_sender(memory, pending.request.who, pending.request.generation)
    if outcome is Outcome.OK and group is not None:
        outcome = sync_refusal(pending.request, group)
    if outcome is not Outcome.OK:
        pending.refuse(outcome)
        return None
    memory.renew_session(pending.member_id)
    memory.sessions.on_sync(pending.member_id)
    return group


def give_assignment(memory: GroupMemory, pending: PendingSync) -> None:
    group = _check(memory, pending)
    if group is not None:
        pending.answer(synced(group, pending.member_id))


def hold_sync(memory: GroupMemory, pending: PendingSync) -> None:
    group = _check(memory, pending)
    if group is None:
        return
    if pending.request.assignments and pending.member_id != group.leader:
        pending.refuse(Outcome.BAD_MEMBER)  # nothing reads them, and they would be in memory while it waits
        return
    before = memory.syncing.get(pending.member_id)
    memory.syncing[pending.member_id] = pending
    if before is not None:
        before.refuse(Outcome.REBALANCING)  # the same member has asked again
    if pending.member_id == group.leader:
        command = AssignMembers(
            group=memory.name,
            coordinator_epoch=memory.epoch,
            generation=group.generation,
            assignments=tuple((name, data) for name, data in pending.request.assignments if name in group.members),
        )
        memory.propose(command, partial(_on_assigned, memory))


def _on_assigned(memory: GroupMemory) -> None:
    group = memory.refresh()
    assert group is not None, "its assignment has just been applied"
    memory.answer_syncs(group)


def drop_sync(memory: GroupMemory, pending: PendingSync) -> None:
    if memory.syncing.get(pending.member_id) is pending:
        del memory.syncing[pending.member_id]
        memory.renew_session(pending.member_id)
