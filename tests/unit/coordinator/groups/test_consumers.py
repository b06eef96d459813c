"""Consumer groups (KIP-848) at their coordinator: heartbeats in, epochs and partitions out, and what each costs."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from smq.coordinator.groups.assignors import ASSIGNORS, Candidate, Targets
from smq.coordinator.groups.member_requests import LEAVING, Beat, Beaten, Outcome
from smq.coordinator.limits import GROUP_PATTERNS_MAX
from smq.raft_state.commands import Partitions
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.consumers import gathered, is_settled, spread
from smq.raft_state.ids import TopicId
from smq.raft_state.limits import GROUP_BYTES_MAX
from smq.raft_state.state import AWAY_EPOCH
from tests.unit.coordinator.groups.world import GROUP, Client, World
from tests.unit.raft_state.support import assign_consumers, indexes, tid, topic

SESSION_MS = 45_000


@dataclass
class Consumer:
    """One member as its client sees it. `owned` is what it reads at this moment."""

    world: World
    name: str
    topics: tuple[str, ...] | None = ("t",)
    pattern: str | None = None
    instance: str = ""
    assignor: str | None = None
    epoch: int = 0
    owned: Partitions = ()
    granted: Partitions = ()  # by the last answer
    answers: list[Beaten] = field(default_factory=list)
    is_slow: bool = False  # to revoke
    asked: int = 0

    def beat(self, *, at: int | None = None, is_full: bool = False, **changes: Any) -> "Consumer":
        is_full = is_full or self.epoch == 0
        said = Beat(
            group=GROUP,
            member_id=self.name,
            epoch=self.epoch,
            instance_id=self.instance,
            rebalance_timeout_ms=20_000 if is_full else -1,
            topics=self.topics if is_full else None,
            pattern=self.pattern if is_full else None,
            assignor=self.assignor if is_full else None,
            owned=self.owned,
        )
        self.asked += 1
        self.world.coordinators[at or self.world.owner].beat(replace(said, **changes), self._hear)
        return self

    def _hear(self, answer: Beaten) -> None:
        self.answers.append(answer)
        if answer.outcome is Outcome.OK and answer.epoch >= 0:
            self.epoch = answer.epoch
            if answer.assignment is not None:
                self.granted = answer.assignment
                self.owned = gathered(spread(self.granted) | (spread(self.owned) if self.is_slow else set()))
        elif answer.outcome in (Outcome.FENCED_EPOCH, Outcome.UNKNOWN_MEMBER):
            self.epoch, self.owned, self.granted = 0, (), ()

    def leave(self, epoch: int = LEAVING) -> "Consumer":
        self.owned = ()
        return self.beat(epoch=epoch)

    @property
    def outcome(self) -> Outcome:
        return self.answers[-1].outcome

    @property
    def indexes(self) -> list[int]:
        return [i for _, found in self.owned for i in found]


def settle(world: World, *consumers: Consumer) -> None:
    """Until each member has its target."""
    for _ in range(10):
        for consumer in consumers:
            consumer.beat()
        world.run()
    assert all(is_settled(world.group, m) for m in world.group.members.values())


def proposed(world: World) -> Counter[str]:
    return Counter(type(command).__name__ for node in world.nodes.values() for command in node.proposed)


@pytest.fixture
def world() -> World:
    return World()


def test_members_join_share_leave_and_die_and_a_heartbeat_that_changes_nothing_costs_no_entry(world: World) -> None:
    one, two = Consumer(world, "one"), Consumer(world, "two")
    one.beat()
    world.run()
    assert (one.epoch, one.indexes) == (1, [0, 1]), one.answers
    two.beat()
    world.run()
    assert (two.epoch, two.indexes) == (2, [])  # `one` has not given anything up
    settle(world, one, two)
    assert sorted((one.indexes, two.indexes)) == [[0], [1]]
    before = proposed(world)
    for _ in range(100):
        one.beat()
        two.beat()
        world.run(5_000)
    assert proposed(world) == before
    assert one.answers[-1].assignment is None
    one.leave()
    world.run()
    assert one.answers[-1] == Beaten(outcome=Outcome.OK, member_id="one", epoch=LEAVING)
    settle(world, two)
    assert two.indexes == [0, 1]
    world.run(SESSION_MS + 1_000)
    assert not world.group.members
    two.beat()
    assert two.outcome is Outcome.UNKNOWN_MEMBER


def test_a_new_coordinator_goes_on_without_a_rebalance(world: World) -> None:
    consumers = [Consumer(world, name) for name in ("one", "two")]
    settle(world, *consumers)
    before, members, epochs = proposed(world), world.group.members, [c.epoch for c in consumers]
    world.fence_owner()
    world.run(200)
    for consumer in consumers:
        consumer.beat()
    world.run()
    assert [(c.outcome, c.epoch) for c in consumers] == [(Outcome.OK, epoch) for epoch in epochs]
    assert world.group.members is members
    assert proposed(world) == before
    assert consumers[0].beat(at=1).outcome is Outcome.NOT_COORDINATOR


def test_a_member_that_does_not_give_up_in_time_is_removed(world: World) -> None:
    slow, other = Consumer(world, "slow", is_slow=True), Consumer(world, "other")
    slow.beat()
    world.run()
    for _ in range(25):
        slow.beat()
        other.beat()
        world.run(1_000)
        assert slow.outcome is Outcome.UNKNOWN_MEMBER or other.indexes == []
        if slow.outcome is Outcome.UNKNOWN_MEMBER:
            break
    settle(world, other)
    assert other.indexes == [0, 1]


def test_a_static_member_that_comes_back_has_what_it_had(world: World) -> None:
    one, two = Consumer(world, "one", instance="i"), Consumer(world, "two")
    settle(world, one, two)
    had, generation = one.indexes, world.group.generation
    thief = Consumer(world, "thief", instance="i").beat()
    world.run()
    assert thief.outcome is Outcome.UNRELEASED_INSTANCE
    one.leave(AWAY_EPOCH)
    world.run()
    assert one.answers[-1].epoch == AWAY_EPOCH
    again = Consumer(world, "again", instance="i").beat()
    world.run()
    assert (again.epoch, again.indexes, world.group.generation) == (generation, had, generation)
    one.epoch = generation
    assert one.beat().outcome is Outcome.FENCED_INSTANCE


def test_an_answer_that_was_lost_does_not_cost_the_member_its_place(world: World) -> None:
    one, two = Consumer(world, "one"), Consumer(world, "two")
    settle(world, one)
    two.beat()
    world.run()
    before = one.epoch
    for _ in range(2):
        one.beat()
        world.run()
    assert one.epoch == before + 1
    lost = replace(one, epoch=before, answers=[])
    assert lost.beat(is_full=True).answers[-1].epoch == one.epoch
    assert lost.answers[-1].assignment == one.owned
    for wrong in (one.epoch + 1, before - 1):
        assert replace(one, epoch=wrong, answers=[]).beat(is_full=True).outcome is Outcome.FENCED_EPOCH


def test_patterns_find_what_they_may_see_and_topics_that_come_later(world: World) -> None:
    world.apply(topic(2, "secret", partitions=1))
    one = Consumer(world, "one", topics=None, pattern="(t|u|secret)")
    one.beat(may_see=lambda name: name != "secret")
    world.run()
    assert one.indexes == [0, 1]
    world.apply(topic(3, "u", partitions=1))
    for _ in range(3):
        world.run(1_100)
        one.beat(may_see=lambda name: name != "secret")
    world.run()
    assert one.owned == ((tid(1), (0, 1)), (tid(3), (0,)))


def test_ever_new_patterns_take_bounded_memory(world: World) -> None:
    one = Consumer(world, "one")
    settle(world, one)
    live: Any = world.coordinators[world.owner]._live[GROUP]
    for number in range(100):  # refused for another reason: it is no member
        Consumer(world, "other").beat(epoch=3, pattern=f"{number}")
        Consumer(world, "other").beat(epoch=3, pattern=f"[{'a' * 9_000}]{number}")
    assert 0 < len(live._matches) <= GROUP_PATTERNS_MAX
    assert max(map(len, live._matches)) < 10


REFUSALS = [
    ("unknown", {"epoch": 3}, Outcome.UNKNOWN_MEMBER),
    ("assignor", {"assignor": "sticky"}, Outcome.UNKNOWN_ASSIGNOR),
    ("pattern", {"pattern": "(a"}, Outcome.BAD_PATTERN),
    ("exploding pattern", {"pattern": "((a{1,100}){1,100}){1,100}"}, Outcome.BAD_PATTERN),
    ("long pattern", {"pattern": "a" * 9_000}, Outcome.BAD_MEMBER),
    ("long name", {"topics": ("x" * 300,)}, Outcome.BAD_MEMBER),
]


@pytest.mark.parametrize(("changes", "outcome"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_what_is_wrong_costs_its_sender_alone(world: World, changes: dict[str, Any], outcome: Outcome) -> None:
    one = Consumer(world, "one")
    settle(world, one)
    before = proposed(world)
    other = Consumer(world, "other").beat(**changes)
    world.run()
    assert other.outcome is outcome
    assert proposed(world) == before


def test_the_two_protocols_do_not_mix_but_an_empty_group_may_change(world: World) -> None:
    classic = Client(world, "classic").join()
    world.run()
    one = Consumer(world, "one").beat()
    assert one.outcome is Outcome.NO_CONSUMER_GROUP
    classic.leave()
    world.run()
    settle(world, one)
    assert classic.join().outcome is Outcome.PROTOCOL_MISMATCH
    one.leave()
    world.run()
    replace(classic, member_id="", joined=[], requested=0).join()
    world.run()
    assert len(world.group.members) == 1


def test_a_command_without_an_answer_ends_the_wait_and_the_state_shows(world: World) -> None:
    one = Consumer(world, "one")
    node = world.nodes[world.owner]
    node.fail_next, node.is_applied = SmqError(ErrorCode.TIMED_OUT, "no answer"), True
    one.beat()
    world.run()
    assert one.outcome is Outcome.UNCERTAIN
    settle(world, one)
    assert one.indexes == [0, 1]


def test_an_assignment_that_is_too_large_changes_nothing(world: World) -> None:
    settle(world, Consumer(world, "one"))
    before, size = replace(world.group), world.machine.state.member_bytes
    targets = indexes(1, *range(GROUP_BYTES_MAX // 4))
    command = assign_consumers(GROUP, before.generation, one=targets)
    epoch = world.coordinator.epoch_of(GROUP)
    world.driver.refused(replace(command, coordinator_epoch=epoch), ErrorCode.LIMIT_EXCEEDED)
    assert (world.group, world.machine.state.member_bytes) == (replace(before, changes=world.group.changes), size)


def test_many_members_share_commands_and_no_slice_is_long(world: World) -> None:
    """Entries count, not time: members that come at the same moment share one, and so do their first partitions."""
    world.apply(topic(2, "u", partitions=5_000))
    consumers = [Consumer(world, f"m{n}", topics=("u",)) for n in range(300)]
    for consumer in consumers:
        consumer.beat()
    world.run(500)
    found = proposed(world)
    assert found["UpdateConsumers"] <= 3
    assert found["AssignConsumers"] <= 3
    assert found["ReconcileConsumers"] <= 3
    settle(world, *consumers)
    assert {len(c.indexes) for c in consumers} == {16, 17}


# ------------------------------------------------------------------------------------------------------- assignors
def targets_of(name: str, candidates: list[Candidate], counts: dict[TopicId, int]) -> list[Partitions]:
    targets: Targets = [set() for _ in candidates]
    for _ in ASSIGNORS[name](candidates, counts, targets):
        pass
    return [gathered(target) for target in targets]


@pytest.mark.parametrize("name", ASSIGNORS)
def test_an_assignor_gives_each_partition_once_and_leaves_its_own_targets_as_they_are(name: str) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        topics = [tid(n) for n in range(1, rng.randint(2, 7))]
        counts = {t: rng.randint(1, 9) for t in topics}
        candidates = [
            Candidate(member_id=f"m{n}", topics=frozenset(rng.sample(topics, rng.randint(0, len(topics)))))
            for n in range(rng.randint(1, 7))
        ]
        given = targets_of(name, candidates, counts)
        expected = [(t, i) for t in topics for i in range(counts[t]) if any(t in c.topics for c in candidates)]
        assert sorted(p for target in given for p in spread(target)) == sorted(expected)
        assert all(t in c.topics for c, target in zip(candidates, given, strict=True) for t, _ in target)
        again = [replace(c, target=target) for c, target in zip(candidates, given, strict=True)]
        assert targets_of(name, again, counts) == given


def test_uniform_moves_no_more_than_it_must_and_range_gives_neighbours() -> None:
    counts = {tid(1): 10, tid(2): 10}
    two = [Candidate(member_id=name, topics=frozenset(counts)) for name in ("a", "b")]
    had = targets_of("uniform", two, counts)
    three = [replace(c, target=t) for c, t in zip(two, had, strict=True)]
    three.append(Candidate(member_id="c", topics=frozenset(counts)))
    got = targets_of("uniform", three, counts)
    assert [len(spread(t)) for t in got] == [7, 7, 6]
    assert all(spread(after) < spread(before) for before, after in zip(had, got, strict=False))
    assert targets_of("range", two, counts)[0] == ((tid(1), tuple(range(5))), (tid(2), tuple(range(5))))
