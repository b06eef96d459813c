"""Requests that a live group has not answered yet, and the round that gathers those to join.

Owns how each is answered or refused, exactly once; when a round is over, and the generation that it ends in. It holds
no timer. `live` acts on it; `member_checks` looks at who waits.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from smq.coordinator.groups.member_requests import (
    Identity,
    Join,
    Joined,
    OnJoined,
    OnLeft,
    OnSynced,
    Outcome,
    Sync,
    Synced,
)
from smq.coordinator.groups.protocols import chosen
from smq.coordinator.groups.transitions import Event
from smq.raft_state.commands import FormGeneration, GroupMember
from smq.raft_state.ids import Epoch, Generation
from smq.raft_state.state import GroupState, MemberState


@dataclass(slots=True, eq=False)
class PendingJoin:
    """`member` has the id that this member will have in the generation, once it has one."""

    event: ClassVar = Event.JOIN
    request: Join
    member: GroupMember
    done: OnJoined | None  # None once it was answered or withdrawn

    @property
    def is_waiting(self) -> bool:
        return self.done is not None

    def answer(self, joined: Joined) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(joined)

    def refuse(self, outcome: Outcome, member_id: str = "") -> None:
        self.answer(Joined(outcome=outcome, member_id=member_id or self.member.member_id))


@dataclass(frozen=True, slots=True, eq=False)
class PendingSync:
    event: ClassVar = Event.SYNC
    request: Sync
    answer: OnSynced

    @property
    def member_id(self) -> str:
        return self.request.who.member_id

    def refuse(self, outcome: Outcome) -> None:
        self.answer(Synced(outcome=outcome))


@dataclass(frozen=True, slots=True, eq=False)
class PendingLeave:
    event: ClassVar = Event.LEAVE
    leaving: Sequence[Identity]
    answer: OnLeft

    def refuse(self, outcome: Outcome) -> None:
        self.answer([outcome] * len(self.leaving))


@dataclass(slots=True, eq=False)
class Heartbeat:
    """Answered immediately: `outcome` is the answer."""

    who: Identity
    generation: int
    outcome: Outcome = Outcome.OK

    def refuse(self, outcome: Outcome) -> None:
        self.outcome = outcome


Pending: TypeAlias = PendingJoin | PendingSync | PendingLeave


# --------------------------------------------------------------------------------------------------------- rounds
class RoundEnd(enum.Enum):
    WAIT = enum.auto()
    WAIT_FOR_STATIC = enum.auto()  # they may be away for their whole session, and no member is here that could lead
    REMOVE_ABSENT = enum.auto()
    FORM = enum.auto()


@dataclass(slots=True, kw_only=True)
class Round:
    """The first round of an empty group waits a moment for more members, and a moment more for each that comes, within
    the members' own rebalance time-out. Any other round ends as soon as all members are back."""

    until_ns: int
    limit_ns: int  # `wait_longer` never goes beyond this
    is_first: bool
    joiners: dict[str, PendingJoin] = field(default_factory=dict)  # by member id, in the order in which they came

    def wait_longer(self, now_ns: int, delay_ns: int) -> None:
        """Another member has come to the first round."""
        self.until_ns = max(self.until_ns, min(now_ns + delay_ns, self.limit_ns))


def new_round(
    members: Mapping[str, MemberState], *, now_ns: int, initial_delay_ns: int, newcomer_timeout_ns: int
) -> Round:
    """`newcomer_timeout_ns` bounds the first round, which has no members yet."""
    timeout_ns = rebalance_timeout_ns([m.member for m in members.values()]) if members else newcomer_timeout_ns
    limit_ns = now_ns + timeout_ns
    until_ns = limit_ns if members else min(now_ns + initial_delay_ns, limit_ns)
    return Round(until_ns=until_ns, limit_ns=limit_ns, is_first=not members)


def rebalance_timeout_ns(members: list[GroupMember]) -> int:
    """The longest of the members' own; 0 if there are none."""
    return max((m.rebalance_timeout_ms for m in members), default=0) * 1_000_000


def absent_members(round_: Round, members: Mapping[str, MemberState]) -> list[GroupMember]:
    return [m.member for member_id, m in members.items() if member_id not in round_.joiners]


def round_end(round_: Round, members: Mapping[str, MemberState], *, has_reserved_ids: bool, now_ns: int) -> RoundEnd:
    """What is due now, of a round that has joiners or members. A reserved id stands for a member about to join."""
    are_all_back = not has_reserved_ids and members.keys() <= round_.joiners.keys()
    if now_ns < round_.until_ns and (round_.is_first or not are_all_back):
        return RoundEnd.WAIT
    if round_.joiners:
        return RoundEnd.FORM
    has_static = any(m.instance_id for m in absent_members(round_, members))
    return RoundEnd.WAIT_FOR_STATIC if has_static else RoundEnd.REMOVE_ABSENT


def generation_of(round_: Round, group: GroupState | None, name: str, epoch: Epoch) -> FormGeneration:
    """The joiners, and the static members that are away. The leader stays the same if it is back."""
    absent = absent_members(round_, group.members) if group is not None else []
    members = [j.member for j in round_.joiners.values()] + [m for m in absent if m.instance_id]
    is_leader_back = group is not None and group.leader in round_.joiners
    return FormGeneration(
        group=name,
        coordinator_epoch=epoch,
        expected_generation=group.generation if group is not None else Generation(0),
        protocol_type=next(iter(round_.joiners.values())).request.protocol_type,
        protocol=chosen(members),
        leader=group.leader if group is not None and is_leader_back else members[0].member_id,
        members=tuple(members),
    )
