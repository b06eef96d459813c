"""Groups as plain values, for the tests of pure rules."""

from dataclasses import replace

from smq.coordinator.groups.member_checks import Present
from smq.coordinator.groups.member_requests import Join
from smq.coordinator.groups.waiting import PendingJoin
from smq.raft_state.commands import GroupMember
from smq.raft_state.ids import Generation
from smq.raft_state.state import GroupPhase, GroupState, MemberState

GROUP = "g"


def request(asking: GroupMember, *, protocol_type: str = "consumer", takes_id_first: bool = True) -> Join:
    return Join(
        group=GROUP, member=asking, protocol_type=protocol_type, takes_id_first=takes_id_first, can_skip_assignment=True
    )


def waiting(*members: GroupMember) -> dict[str, PendingJoin]:
    return {m.member_id: PendingJoin(request(m), m, lambda _: None) for m in members}


def states(*members: GroupMember) -> dict[str, MemberState]:
    return {m.member_id: MemberState(member=m) for m in members}


def group(*members: GroupMember, phase: GroupPhase = GroupPhase.STABLE, leader: str = "a") -> GroupState:
    """Of generation 3, under protocol `range`."""
    return GroupState(
        name=GROUP,
        generation=Generation(3),
        phase=phase,
        protocol_type="consumer",
        protocol="range",
        leader=leader,
        members=states(*members),
    )


def present(known: GroupState | None = None, *joiners: GroupMember, reserved: tuple[str, ...] = ()) -> Present:
    return Present(
        group=known,
        members=known.members if known is not None else {},
        joiners=waiting(*joiners),
        reserved_ids=reserved,
        member_bytes=0,
    )


def patient(asking: GroupMember, rebalance_ms: int) -> GroupMember:
    return replace(asking, rebalance_timeout_ms=rebalance_ms)
