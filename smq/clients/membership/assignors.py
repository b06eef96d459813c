"""The assignors, under Kafka's names: which member has which partitions.

Owns the rules of `range`, `roundrobin` and `cooperative-sticky`. The group's leader runs one of them for all members,
whichever client each of them is: the result must be one that any of Kafka's clients may get. Each partition of a
subscribed topic has exactly one member. (A cooperative partition that changes its member has none for one generation:
its former member gives it up first.) Pure: the same members and topics give the same assignment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from smq.clients.membership.protocol import Subscription
from smq.clients.types import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member, as the leader knows it. Static members are sorted by their own names, so they keep their places."""

    member_id: str
    instance_id: str = ""
    subscription: Subscription

    @property
    def rank(self) -> tuple[bool, str]:
        return not self.instance_id, self.instance_id or self.member_id


Counts: TypeAlias = Mapping[str, int]  # partitions of each topic that exists
Shares: TypeAlias = dict[str, list[TopicPartition]]  # by member id
Assign: TypeAlias = Callable[[Counts, Sequence[Candidate]], Shares]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignor:
    name: str
    is_cooperative: bool  # members keep what they own while they join
    assign: Assign


# ------------------------------------------------------------------------------------------------ range, roundrobin
def assign_ranges(counts: Counts, members: Sequence[Candidate]) -> Shares:
    """Of each topic, every subscriber gets neighbouring partitions; the first ones get one more if it does not divide
    evenly. So topics with the same number of partitions are joined by partition."""
    shares: Shares = {m.member_id: [] for m in members}
    for topic, subscribers in _subscribers(counts, members).items():
        size, longer = divmod(counts[topic], len(subscribers))
        at = 0
        for place, member_id in enumerate(subscribers):
            end = at + size + (place < longer)
            shares[member_id] += [(topic, index) for index in range(at, end)]
            at = end
    return shares


def assign_in_turn(counts: Counts, members: Sequence[Candidate]) -> Shares:
    """All partitions of all topics, one after the other, to the next member that subscribes to the topic."""
    shares: Shares = {m.member_id: [] for m in members}
    order = [m.member_id for m in sorted(members, key=lambda m: m.rank)]
    turn = 0
    for topic, subscribers in sorted(_subscribers(counts, members).items()):
        for index in range(counts[topic]):
            while order[turn % len(order)] not in subscribers:
                turn += 1
            shares[order[turn % len(order)]].append((topic, index))
            turn += 1
    return shares


def _subscribers(counts: Counts, members: Sequence[Candidate]) -> dict[str, dict[str, None]]:
    """The members of each topic that exists and has any, in their order."""
    found: dict[str, dict[str, None]] = {}
    for member in sorted(members, key=lambda m: m.rank):
        for topic in member.subscription.topics:
            if counts.get(topic):
                found.setdefault(topic, {})[member.member_id] = None
    return found


# ------------------------------------------------------------------------------------------------ cooperative-sticky
def assign_sticky(counts: Counts, members: Sequence[Candidate]) -> Shares:
    """As evenly as the subscriptions allow, and otherwise as it was. What another member still owns is left out: it
    gives that up, joins again, and the next generation has it."""
    plan = _Plan(subscribers=_subscribers(counts, members), shares={m.member_id: set() for m in members})
    for tp, member_id in _rightful(members).items():
        if tp[1] < counts.get(tp[0], 0) and member_id in plan.subscribers.get(tp[0], {}):
            plan.shares[member_id].add(tp)
    kept = frozenset[TopicPartition]().union(*plan.shares.values())
    for topic, subscribers in sorted(plan.subscribers.items(), key=lambda found: (len(found[1]), found[0])):
        for index in range(counts[topic]):
            if (topic, index) not in kept:
                plan.shares[min(subscribers, key=lambda m: len(plan.shares[m]))].add((topic, index))
    # First what no member has, then the rest. So the generation after one in which partitions were given up finds the
    # same places for them, and takes nothing more away.
    for fixed in (kept, frozenset[TopicPartition]()):
        while plan.move_one(fixed):
            pass
    owners = _owners(members)
    return {
        member_id: sorted(tp for tp in share if not owners.get(tp, set()) - {member_id})
        for member_id, share in plan.shares.items()
    }


def _owners(members: Sequence[Candidate]) -> dict[TopicPartition, set[str]]:
    """The members that say they own a partition. One that has missed a generation may do so wrongly."""
    owners: dict[TopicPartition, set[str]] = {}
    for member in members:
        for tp in member.subscription.owned:
            owners.setdefault(tp, set()).add(member.member_id)
    return owners


def _rightful(members: Sequence[Candidate]) -> dict[TopicPartition, str]:
    """The owner of each partition: of several, the one of the newest generation; of equals, none."""
    claims: dict[TopicPartition, list[tuple[int, str]]] = {}
    for member in members:
        for tp in member.subscription.owned:
            claims.setdefault(tp, []).append((member.subscription.generation, member.member_id))
    found = {}
    for tp, claimed in sorted(claims.items()):
        newest = max(generation for generation, _ in claimed)
        owners = [member_id for generation, member_id in claimed if generation == newest]
        if len(owners) == 1:
            found[tp] = owners[0]
    return found


@dataclass(slots=True, kw_only=True)
class _Plan:
    subscribers: dict[str, dict[str, None]]
    shares: dict[str, set[TopicPartition]]
    _given: dict[str, tuple[str, str]] = field(default_factory=dict)  # of a search: member -> the giver, and the topic

    def move_one(self, fixed: frozenset[TopicPartition]) -> bool:
        """Makes one member's share smaller and another's larger, if the two differ by more than one. Between them, a
        partition each may pass through members that subscribe to both sides' topics. Without such a pair, the shares
        are as even as they can be (a theorem about semi-matchings: no better one is out of reach of such steps)."""
        for giver in sorted(self.shares, key=lambda m: (-len(self.shares[m]), m)):
            taker = self._find_taker(giver, fixed)
            if taker is not None:
                self._move(giver, taker, fixed)
                return True
        return False

    def _find_taker(self, giver: str, fixed: frozenset[TopicPartition]) -> str | None:
        """The smallest of the members that have at least two partitions less, by a search in breadth."""
        self._given = {}
        seen_topics: set[str] = set()
        waiting = [giver]
        for member_id in waiting:
            for topic in sorted({tp[0] for tp in self.shares[member_id] - fixed} - seen_topics):
                seen_topics.add(topic)
                for other in self.subscribers[topic]:
                    if other != giver and other not in self._given:
                        self._given[other] = member_id, topic
                        waiting.append(other)
        takers = [m for m in waiting[1:] if len(self.shares[m]) <= len(self.shares[giver]) - 2]
        return min(takers, key=lambda m: len(self.shares[m]), default=None)

    def _move(self, giver: str, taker: str, fixed: frozenset[TopicPartition]) -> None:
        while taker != giver:
            before, topic = self._given[taker]
            moved = max(tp for tp in self.shares[before] - fixed if tp[0] == topic)
            self.shares[before].remove(moved)
            self.shares[taker].add(moved)
            taker = before


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    "range": Assignor(name="range", is_cooperative=False, assign=assign_ranges),
    "roundrobin": Assignor(name="roundrobin", is_cooperative=False, assign=assign_in_turn),
    "cooperative-sticky": Assignor(name="cooperative-sticky", is_cooperative=True, assign=assign_sticky),
}
