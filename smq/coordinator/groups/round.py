"""One round of joining: who has come for the next generation, and until when others are waited for.

Owns the rule of when a round is over. It holds no timer and changes nothing: `live` asks it.
"""

from dataclasses import dataclass, field

from smq.coordinator.groups.types import Join, Joined, OnJoined
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import GroupMember


@dataclass(slots=True, eq=False)
class Joiner:
    """A member that waits for the generation to come."""

    request: Join
    member: GroupMember
    done: OnJoined | None  # None once it was answered, or does not listen any more

    @property
    def is_waiting(self) -> bool:
        return self.done is not None

    def answer(self, joined: Joined) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(joined)

    def refuse(self, code: KafkaError, member_id: str = "") -> None:
        self.answer(Joined(code=code, member_id=member_id or self.member.member_id))


@dataclass(slots=True, kw_only=True)
class Round:
    """The first round of an empty group waits a moment for more members, and a moment more for each that comes, within
    the members' own rebalance time-out. Any other ends as soon as all members are back."""

    until_ns: int
    limit_ns: int  # no further moment beyond this
    is_first: bool
    joiners: dict[str, Joiner] = field(default_factory=dict)  # by member id, in the order in which they came

    def wait_longer(self, now_ns: int, delay_ns: int) -> None:
        """Another member has come to the first round."""
        self.until_ns = max(self.until_ns, min(now_ns + delay_ns, self.limit_ns))

    def is_over(self, now_ns: int, *, all_are_back: bool) -> bool:
        return now_ns >= self.until_ns or (all_are_back and not self.is_first)
