"""The assignors, under Kafka's names: which member has which partitions.

Owns the rules of `range`, `roundrobin` and `cooperative-sticky`. The group's leader runs one of them for all members,
whichever client each of them is: the result must be one that any of Kafka's clients may get. Each partition of a
subscribed topic has exactly one member. (A cooperative partition that changes its member has none for one generation:
its former member gives it up first.) Pure: the same members and topics give the same assignment.
"""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, TypeAlias

from smq.clients.groups.protocol import Subscription
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
    plan = _Plan(subscribers=_subscribers(counts, members), members=[m.member_id for m in members])
    kept = {
        tp: member_id
        for tp, member_id in _rightful(members).items()
        if tp[1] < counts.get(tp[0], 0) and member_id in plan.subscribers.get(tp[0], {})
    }
    for member_id in kept.values():
        plan.grow(member_id, 1)
    for topic in sorted(plan.subscribers, key=lambda topic: (len(plan.subscribers[topic]), topic)):
        plan.place(topic, [index for index in range(counts[topic]) if (topic, index) not in kept])
    # First what no member has, then the rest. So the generation after one in which partitions were given up finds the
    # same places for them, and takes nothing more away.
    plan.even_out()
    for (topic, index), member_id in kept.items():
        insort(plan.movable[member_id].setdefault(topic, []), index)
    plan.even_out()
    owners = _owners(members)
    return {
        member_id: [
            (topic, index)
            for topic, indexes in sorted(share.items())
            for index in indexes
            if not owners.get((topic, index), set()) - {member_id}
        ]
        for member_id, share in plan.movable.items()
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


class _Plan:
    """How much each member has, and what of it may move. A move that the whole group needs (from a member with the most
    to one with the least) needs no look at the others, if the one subscribes to a topic of the other."""

    def __init__(self, *, subscribers: dict[str, dict[str, None]], members: Sequence[str]) -> None:
        self.subscribers = subscribers
        self.movable: dict[str, dict[str, list[int]]] = {m: {} for m in members}  # in order, by topic; none is empty
        self._sizes = dict.fromkeys(members, 0)
        self._least = [(0, m) for m in sorted(members)]  # two heaps, with entries that are out of date
        self._most = list(self._least)
        self._given: dict[str, tuple[str, str]] = {}  # of a search: member -> the giver, and the topic

    def grow(self, member_id: str, by: int) -> None:
        self._sizes[member_id] += by
        heappush(self._least, (self._sizes[member_id], member_id))
        heappush(self._most, (-self._sizes[member_id], member_id))

    def place(self, topic: str, indexes: Sequence[int]) -> None:
        """Each at the smallest of the subscribers."""
        smallest = [(self._sizes[m], place, m) for place, m in enumerate(self.subscribers[topic])]
        heapify(smallest)
        for index in indexes:
            size, place, member_id = smallest[0]
            heapreplace(smallest, (size + 1, place, member_id))
            self.movable[member_id].setdefault(topic, []).append(index)
            self.grow(member_id, 1)

    def even_out(self) -> None:
        while self._move_one():
            pass

    def _move_one(self) -> bool:
        """Makes one member's share smaller and another's larger, if the two differ by more than one. Between them, a
        partition each may pass through members that subscribe to both sides' topics. Without such a pair, the shares
        are as even as they can be (a theorem about semi-matchings: no better one is out of reach of such steps)."""
        most, least = self._current(self._most, -1), self._current(self._least, 1)
        if self._sizes[most] - self._sizes[least] <= 1:
            return False
        for topic in self.movable[most]:
            if least in self.subscribers[topic]:
                self._hand_over(most, least, topic)
                return True
        for giver in sorted(self._sizes, key=lambda m: (-self._sizes[m], m)):
            taker = self._find_taker(giver)
            if taker is not None:
                self._move(giver, taker)
                return True
        return False

    def _current(self, heap: list[tuple[int, str]], sign: int) -> str:
        while heap[0][0] != sign * self._sizes[heap[0][1]]:
            heappop(heap)
        return heap[0][1]

    def _find_taker(self, giver: str) -> str | None:
        """The smallest of the members that have at least two partitions less, by a search in breadth."""
        self._given = {}
        seen_topics: set[str] = set()
        waiting = [giver]
        for member_id in waiting:
            for topic in sorted(self.movable[member_id].keys() - seen_topics):
                seen_topics.add(topic)
                for other in self.subscribers[topic]:
                    if other != giver and other not in self._given:
                        self._given[other] = member_id, topic
                        waiting.append(other)
        takers = [m for m in waiting[1:] if self._sizes[m] <= self._sizes[giver] - 2]
        return min(takers, key=lambda m: self._sizes[m], default=None)

    def _move(self, giver: str, taker: str) -> None:
        while taker != giver:
            before, topic = self._given[taker]
            self._hand_over(before, taker, topic)
            taker = before

    def _hand_over(self, giver: str, taker: str, topic: str) -> None:
        indexes = self.movable[giver][topic]
        insort(self.movable[taker].setdefault(topic, []), indexes.pop())
        if not indexes:
            del self.movable[giver][topic]
        self.grow(giver, -1)
        self.grow(taker, 1)


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    "range": Assignor(name="range", is_cooperative=False, assign=assign_ranges),
    "roundrobin": Assignor(name="roundrobin", is_cooperative=False, assign=assign_in_turn),
    "cooperative-sticky": Assignor(name="cooperative-sticky", is_cooperative=True, assign=assign_sticky),
}
