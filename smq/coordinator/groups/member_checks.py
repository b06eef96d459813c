"""What becomes of a member that asks to join, and whether the sender of a request is the member that it says it is.

Owns the decision on a join, taken before the member could spoil a generation for the others: what it must share with
them, how large a group may get, and whose place it takes. Owns the order of the checks of a sender, which is Kafka's:
the instance, the member, the generation. Pure; `live` acts on both.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.member_requests import Identity, Join, Outcome
from smq.coordinator.groups.protocols import known_to_all
from smq.coordinator.groups.waiting import PendingJoin
from smq.coordinator.limits import MEMBER_ID_CHARS_MAX
from smq.raft_state.commands import GroupMember
from smq.raft_state.limits import GROUP_BYTES_MAX, GROUP_MEMBERS_MAX, MEMBER_BYTES_CLUSTER_MAX
from smq.raft_state.state import GroupPhase, GroupState, MemberState, members_bytes

_RESERVED_ID_BYTES: Final = 4 * MEMBER_ID_CHARS_MAX  # of the id that a new member will get


class Verdict(enum.Enum):
    REFUSE = enum.auto()
    RESERVE_ID = enum.auto()  # KIP-394
    ENTER_AS_NEW = enum.auto()
    ENTER = enum.auto()
    REPEAT = enum.auto()
    REPLACE = enum.auto()
    REMOVE_FORMER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`outcome` belongs to REFUSE. `former` belongs to REPLACE and REMOVE_FORMER: the static member that is back."""

    verdict: Verdict
    outcome: Outcome = Outcome.OK
    former: MemberState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The group that a member wants to join. `member_bytes` are those of the members of all groups."""

    group: GroupState | None
    members: dict[str, MemberState]
    joiners: Mapping[str, PendingJoin]
    reserved_ids: Collection[str]
    member_bytes: int


def admission(request: Join, present: Present, *, may_repeat: bool) -> Admission:
    """`may_repeat`: no round is open, so an unchanged member can have its current generation again."""
    if not is_compatible(request, present):
        return _refusal(Outcome.PROTOCOL_MISMATCH)
    if not has_capacity(request.member, present):
        return _refusal(Outcome.GROUP_FULL)
    if request.member.member_id:
        return _admission_under_id(request, present, may_repeat=may_repeat)
    group, instance_id = present.group, request.member.instance_id
    former = group.static_member(instance_id) if group is not None and instance_id else None
    if group is not None and former is not None:
        knows_protocol = any(name == group.protocol for name, _ in request.member.protocols)
        return Admission(verdict=Verdict.REPLACE if knows_protocol else Verdict.REMOVE_FORMER, former=former)
    return _admission_of_new(request, present)


def _refusal(outcome: Outcome) -> Admission:
    return Admission(verdict=Verdict.REFUSE, outcome=outcome)


def _admission_under_id(request: Join, present: Present, *, may_repeat: bool) -> Admission:
    """The id was reserved for the member, is its own since an earlier generation, or waits in this round already."""
    member = request.member
    if member.member_id in present.reserved_ids:
        return Admission(verdict=Verdict.ENTER)
    who = Identity(member_id=member.member_id, instance_id=member.instance_id)
    outcome = check_identity(who, None, members=present.members, joiners=present.joiners, current=None)
    if outcome is not Outcome.OK:
        return _refusal(outcome)
    can_repeat = may_repeat and present.group is not None and is_unchanged(member, present.group)
    return Admission(verdict=Verdict.REPEAT if can_repeat else Verdict.ENTER)


def is_unchanged(member: GroupMember, group: GroupState) -> bool:
    """Whether the member can go on as it is. The leader of a stable group that asks again wants a new assignment."""
    known = group.members.get(member.member_id)
    if known is None or known.member.protocols != member.protocols:
        return False
    return not (group.phase is GroupPhase.STABLE and group.leader == member.member_id)


def _admission_of_new(request: Join, present: Present) -> Admission:
    if len(present.members.keys() | present.joiners.keys()) + len(present.reserved_ids) >= GROUP_MEMBERS_MAX:
        return _refusal(Outcome.GROUP_FULL)
    takes_id = request.takes_id_first and not request.member.instance_id
    return Admission(verdict=Verdict.RESERVE_ID if takes_id else Verdict.ENTER_AS_NEW)


def is_compatible(request: Join, present: Present) -> bool:
    """Whether the member shares the type and at least one protocol with all others, waiting ones included."""
    member, joiners = request.member, present.joiners
    if not request.protocol_type or not member.protocols:
        return False
    others = [j.member for name, j in joiners.items() if name != member.member_id]
    others += [m.member for name, m in present.members.items() if name not in joiners and name != member.member_id]
    others = [m for m in others if not member.instance_id or m.instance_id != member.instance_id]
    if not others:
        return True
    types = {j.request.protocol_type for name, j in joiners.items() if name != member.member_id}
    if present.group is not None and present.group.members:
        types.add(present.group.protocol_type)
    return types == {request.protocol_type} and bool(known_to_all([member, *others]))


def has_capacity(member: GroupMember, present: Present) -> bool:
    """Whether the generation would keep its limits with this member. The state machine refuses a generation that is too
    large as a whole, so that one member would cost all others theirs."""
    others = {name: m.member for name, m in present.members.items()}
    others |= {name: j.member for name, j in present.joiners.items()}
    others.pop(member.member_id, None)
    mine = MemberState(member=member).metadata_bytes
    if not member.member_id:
        mine += _RESERVED_ID_BYTES
    group = mine + sum(MemberState(member=m).metadata_bytes for m in others.values())
    elsewhere = present.member_bytes - members_bytes(present.members)
    return group <= GROUP_BYTES_MAX and elsewhere + group <= MEMBER_BYTES_CLUSTER_MAX


# --------------------------------------------------------------------------------------------------------- senders
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
