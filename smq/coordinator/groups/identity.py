"""Whether the sender of a request is the member that it says it is.

Owns the order of these checks, which is Kafka's: the instance, the member, the generation. Pure.
"""

from collections.abc import Collection, Mapping

from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import PendingJoin
from smq.coordinator.groups.types import Identity
from smq.raft_state.state import MemberState


def check_identity(
    who: Identity,
    generation: int | None,
    *,
    members: Mapping[str, MemberState],
    joiners: Mapping[str, PendingJoin],
    current: int | None,
) -> Outcome:
    """`generation` is None if the request names none; `current` is the group's. A member that waits for its first
    generation is known, too."""
    if who.instance_id:
        known = [m.member for m in members.values()] + [j.member for j in joiners.values()]
        ids = {m.member_id for m in known if m.instance_id == who.instance_id}
        if not ids:
            return Outcome.UNKNOWN_MEMBER
        if who.member_id not in ids:
            return Outcome.FENCED_INSTANCE
    if who.member_id not in members:
        if who.member_id not in joiners:
            return Outcome.UNKNOWN_MEMBER
        return Outcome.OK if generation is None else Outcome.REBALANCING
    return Outcome.OK if generation in (None, current) else Outcome.WRONG_GENERATION


def resolve_leaver(
    who: Identity,
    *,
    members: Mapping[str, MemberState],
    joiners: Mapping[str, PendingJoin],
    reserved_ids: Collection[str],
) -> tuple[Outcome, str]:
    """Whether the member may leave, and its id. An instance id alone names a static member."""
    if who.member_id in reserved_ids:
        return Outcome.OK, who.member_id
    if not who.member_id and who.instance_id:
        for member_id, member in members.items():
            if member.member.instance_id == who.instance_id:
                return Outcome.OK, member_id
    return check_identity(who, None, members=members, joiners=joiners, current=None), who.member_id
