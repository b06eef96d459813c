"""The assignors of consumer groups (KIP-848): which member a partition is to have, `uniform` and `range`.

Owns the two under Kafka's names. Pure: the same members, former targets and topics give the same targets, and the
targets that an assignor has given stay as they are as long as members and topics do. So a coordinator that takes over
changes nothing. Each is a generator that gives the loop its turn: a group may have 10,000 partitions. `consumers`
imports it. (`clients.groups.assignors` has those of the classic protocol, which members run.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Final, TypeAlias

from smq.raft_state.commands import Partitions
from smq.raft_state.ids import TopicId

_STEP: Final = 500  # partitions between two yields: a millisecond at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A member, the topics that it wants, and what its target was."""

    member_id: str
    instance_id: str = ""
    topics: frozenset[TopicId]
    target: Partitions = ()


Counts: TypeAlias = Mapping[TopicId, int]  # partitions of each topic that a member wants and that exists
Targets: TypeAlias = list[set[tuple[TopicId, int]]]  # of each candidate, in their order
Assignor: TypeAlias = Callable[[Sequence[Candidate], Counts, Targets], Iterator[None]]  # fills the targets


@dataclass(slots=True, eq=False)
class _Pool:
    """The topics that the same candidates want. `owned` are their partitions, by candidate."""

    candidates: list[int]
    topics: list[TopicId]
    owned: dict[int, list[tuple[TopicId, int]]] = field(default_factory=dict)


def uniform(candidates: Sequence[Candidate], counts: Counts, targets: Targets) -> Iterator[None]:
    """Each member has as many partitions as any other, or one more, as far as their subscriptions allow. As many as
    possible stay where they are."""
    pools = _pools(candidates, counts)
    pool_of = {topic: pool for pool in pools for topic in pool.topics}
    taken = set[tuple[TopicId, int]]()
    for number, candidate in enumerate(candidates):
        for topic, indexes in candidate.target:
            if topic in candidate.topics and topic in counts:
                kept = [p for i in indexes if i < counts[topic] and (p := (topic, i)) not in taken]
                taken.update(kept)
                targets[number].update(kept)
                pool_of[topic].owned.setdefault(number, []).extend(kept)
        if number % _STEP == 0:
            yield
    for pool in pools:  # those that few want come first: the others can make up for it
        yield from _give(pool, [(t, i) for t in pool.topics for i in range(counts[t]) if (t, i) not in taken], targets)
    is_level = False
    while not is_level:  # each move makes the loads more equal, so it ends
        is_level = True
        for pool in pools:
            for _ in _level(pool, targets):
                is_level = False
                yield


def _pools(candidates: Sequence[Candidate], counts: Counts) -> list[_Pool]:
    alike: dict[frozenset[TopicId], list[int]] = {}
    for number, candidate in enumerate(candidates):
        alike.setdefault(candidate.topics, []).append(number)
    sets = list(alike)
    by_sets: dict[tuple[int, ...], list[TopicId]] = {}
    for topic in sorted(counts):
        by_sets.setdefault(tuple(n for n, topics in enumerate(sets) if topic in topics), []).append(topic)
    pools = [
        _Pool(sorted(number for n in numbers for number in alike[sets[n]]), topics)
        for numbers, topics in by_sets.items()
        if numbers
    ]
    return sorted(pools, key=lambda pool: (len(pool.candidates), pool.topics))


def _give(pool: _Pool, free: list[tuple[TopicId, int]], targets: Targets) -> Iterator[None]:
    """Each to the candidate that has least."""
    heap = [(len(targets[n]), n) for n in pool.candidates]
    heapify(heap)
    for number, partition in enumerate(free):
        load, least = heap[0]
        heapreplace(heap, (load + 1, least))
        targets[least].add(partition)
        pool.owned.setdefault(least, []).append(partition)
        if number % _STEP == 0:
            yield


def _level(pool: _Pool, targets: Targets) -> Iterator[None]:
    """Moves partitions of the pool from those that have most to those that have least. Yields if any was moved."""
    least = [(len(targets[n]), n) for n in pool.candidates]
    most = [(-len(targets[n]), n) for n in pool.candidates if pool.owned.get(n)]
    heapify(least)
    heapify(most)
    moved = 0
    while most:
        (low, to), (high, giver) = least[0], most[0]
        if low != len(targets[to]):
            heapreplace(least, (len(targets[to]), to))
        elif not pool.owned[giver]:
            heappop(most)
        elif -high != len(targets[giver]):
            heapreplace(most, (-len(targets[giver]), giver))
        elif -high - low < 2:
            break
        else:
            partition = pool.owned[giver].pop()
            targets[giver].remove(partition)
            targets[to].add(partition)
            pool.owned.setdefault(to, []).append(partition)
            moved += 1
            if moved % _STEP == 0:
                yield
    if moved:
        yield


def by_range(candidates: Sequence[Candidate], counts: Counts, targets: Targets) -> Iterator[None]:
    """Of each topic, neighbouring partitions to each member that wants it. Members that want the same topics have the
    same indexes of each. Static members are sorted by their own names, so they keep their places."""
    ranked = sorted(
        range(len(candidates)),
        key=lambda n: (not candidates[n].instance_id, candidates[n].instance_id or candidates[n].member_id),
    )
    for topic in sorted(counts):
        wanting = [n for n in ranked if topic in candidates[n].topics]
        if not wanting:
            continue
        size, more = divmod(counts[topic], len(wanting))
        start = 0
        for place, number in enumerate(wanting):
            end = start + size + (place < more)
            targets[number].update((topic, i) for i in range(start, end))
            start = end
        yield


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": uniform, "range": by_range}  # the first is the default
