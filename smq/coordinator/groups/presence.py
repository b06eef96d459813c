"""Actions on signs of life and on their absence: heartbeats, time-outs, and a node that could not hear.

Owns when a member is evicted. `live` imports its actions, and the other actions its check of a sender.
"""

from smq.coordinator.groups.identity import check_identity
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import Heartbeat
from smq.coordinator.groups.rebalancing import remove, settle_round
from smq.coordinator.groups.round import rebalance_timeout_ns
from smq.coordinator.groups.types import Identity


def check_sender(memory: GroupMemory, who: Identity, generation: int) -> Outcome:
    """A member whose removal is under way is no member any more: an answer that it is alive would be wrong a moment
    later."""
    if who.member_id in memory.removing:
        return Outcome.UNKNOWN_MEMBER
    group = memory.refresh()
    return check_identity(
        who,
        generation,
        members=memory.sessions.members,
        joiners=memory.joiners,
        current=group.generation if group is not None else None,
    )


def keep_alive(memory: GroupMemory, heartbeat: Heartbeat) -> None:
    heartbeat.outcome = check_sender(memory, heartbeat.who, heartbeat.generation)
    if heartbeat.outcome is Outcome.OK:
        memory.renew_session(heartbeat.who.member_id)
        if memory.round is not None:
            heartbeat.outcome = Outcome.REBALANCING


def grant_time(memory: GroupMemory, _event: None) -> None:
    """All members get a full session, and as long again to join or to ask for their assignment."""
    memory.refresh()
    members = memory.sessions.members
    for member_id in members:
        memory.renew_session(member_id)
    if not members:
        return
    until_ns = memory.host.now_ns() + rebalance_timeout_ns([m.member for m in members.values()])
    if memory.round is not None:
        memory.round.until_ns = until_ns
    memory.sessions.extend_syncs(until_ns)


# -------------------------------------------------------------------------------------------------------- by time
def expire_ids(memory: GroupMemory, now_ns: int) -> None:
    memory.sessions.expire_ids(now_ns)
    memory.compute_due()


def evict(memory: GroupMemory, now_ns: int) -> None:
    memory.sessions.expire_ids(now_ns)
    silent = memory.sessions.silent(memory.waiting, now_ns)
    memory.compute_due()
    if silent:
        remove(memory, silent)


def evict_or_end_round(memory: GroupMemory, now_ns: int) -> None:
    evict(memory, now_ns)
    settle_round(memory)
