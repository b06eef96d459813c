"""Requests that a live group has not answered yet.

Owns how each is answered or refused, exactly once. `round` and `memory` hold them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.transitions import Event
from smq.coordinator.groups.types import Identity, Join, Joined, OnJoined, OnLeft, OnSynced, Sync, Synced
from smq.raft_state.commands import GroupMember


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
