"""Whether a member may join: what it must share with the others, and the room there must be.

Owns what is asked of the one who comes, before it can spoil a generation for all. Pure. Only `live` imports it.
"""

from smq.coordinator.groups.protocols import known_to_all
from smq.coordinator.groups.round import Joiner
from smq.coordinator.limits import MEMBER_ID_CHARS_MAX
from smq.raft_state.commands import GroupMember
from smq.raft_state.limits import GROUP_BYTES_MAX, MEMBER_BYTES_CLUSTER_MAX
from smq.raft_state.state import GroupState, MemberState, members_bytes


def fits(joiner: Joiner, group: GroupState | None, members: dict[str, MemberState], waiting: dict[str, Joiner]) -> bool:
    """Whether the member shares the type and at least one protocol with all others, those who wait included."""
    request, member = joiner.request, joiner.member
    if not request.protocol_type or not member.protocols:
        return False
    others = [j.member for name, j in waiting.items() if name != member.member_id]
    others += [m.member for name, m in members.items() if name not in waiting and name != member.member_id]
    others = [m for m in others if not member.instance_id or m.instance_id != member.instance_id]
    if not others:
        return True
    types = {j.request.protocol_type for name, j in waiting.items() if name != member.member_id}
    if group is not None and group.members:
        types.add(group.protocol_type)
    return types == {request.protocol_type} and bool(known_to_all([member, *others]))


def has_room(
    member: GroupMember, members: dict[str, MemberState], waiting: dict[str, Joiner], member_bytes: int
) -> bool:
    """Whether the generation would be within its limits with this member, too: one that is refused for its size is
    refused to all. `member_bytes` is what the members of all groups have now."""
    others = {name: m.member for name, m in members.items()} | {name: j.member for name, j in waiting.items()}
    others.pop(member.member_id, None)
    mine = MemberState(member=member).metadata_bytes
    if not member.member_id:
        mine += 4 * MEMBER_ID_CHARS_MAX  # of the id that it will be given
    group = mine + sum(MemberState(member=m).metadata_bytes for m in others.values())
    elsewhere = member_bytes - members_bytes(members)
    return group <= GROUP_BYTES_MAX and elsewhere + group <= MEMBER_BYTES_CLUSTER_MAX
