"""A static member that comes back while a partition has no member: the group rebalances, once."""

import pytest

from smq.clients.groups.assignors import ASSIGNORS, Candidate
from smq.clients.groups.protocol import (
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from smq.clients.types import TopicPartition
from smq.coordinator.groups.member_requests import Outcome
from smq.raft_state.commands import AddPartitions
from tests.unit.coordinator.groups.world import Client, World, client, converge

OK = Outcome.OK


@pytest.fixture
def world() -> World:
    return World()


def subscription(*owned: TopicPartition, generation: int = -1, topic: str = "t") -> bytes:
    mine = Subscription(topics=(topic,), owned=frozenset(owned), generation=generation)
    return encode_subscription(mine, is_cooperative=True)


def consumer(world: World, name: str, *, instance: str = "", assignor: str = "range", topic: str = "t") -> Client:
    return client(world, name, instance=instance, protocols=(assignor,), metadata=subscription(topic=topic))


def share_out(world: World, *clients: Client, leave_out: tuple[TopicPartition, ...] = ()) -> dict[str, set[int]]:
    """The members ask for their assignments, which the leader computes: what each then has of the topic `t`."""
    leader = next(c for c in clients if c.joined[-1].leader == c.member_id)
    joined = leader.joined[-1]
    candidates = [
        Candidate(member_id=member_id, instance_id=instance, subscription=decode_subscription(data))
        for member_id, instance, data in joined.members
    ]
    counts = {topic: len(known.partitions) for topic, known in world.machine.state.topics.items()}
    shares = {
        member_id: encode_assignment(tp for tp in share if tp not in leave_out)
        for member_id, share in ASSIGNORS[joined.protocol].assign(counts, candidates).items()
    }
    for c in clients:
        c.sync(**(shares if c is leader else {}))
    world.run()
    return {c.name: {index for _, index in decode_assignment(c.synced[-1].assignment)} for c in clients}


def restart(c: Client) -> Client:
    """The next process of a static member asks to join. It owns nothing."""
    again = consumer(c.world, c.name, instance=c.instance, assignor=c.protocols[0])
    again.ask()
    c.world.run()
    return again


def grow(world: World, count: int) -> None:
    world.apply(AddPartitions(name="t", partition_count=count))


def test_cooperative_member_that_restarts_before_it_gives_a_partition_up_leaves_none_without_a_member(
    world: World,
) -> None:
    m = consumer(world, "m", instance="i", assignor="cooperative-sticky")
    n = consumer(world, "n", assignor="cooperative-sticky")
    converge(world, m)
    assert share_out(world, m) == {"m": {0, 1}}
    n.join()
    m.metadata = subscription(("t", 0), ("t", 1), generation=m.generation)
    converge(world, m, n)
    assert share_out(world, m, n) == {"m": {0}, "n": set()}, "m is to give t/1 up and to join again"
    again = restart(m)
    assert n.beat() is Outcome.REBALANCING
    converge(world, again, n)
    shares = share_out(world, again, n)
    assert sorted(map(len, shares.values())) == [1, 1]
    assert set.union(*shares.values()) == {0, 1}


@pytest.mark.parametrize("is_leader", [True, False])
def test_static_member_that_restarts_after_a_topic_has_grown_starts_one_rebalance(
    world: World, is_leader: bool
) -> None:
    m, n = consumer(world, "m", instance="i"), consumer(world, "n")
    converge(world, *((m, n) if is_leader else (n, m)))
    share_out(world, m, n)
    assert (world.group.leader == m.member_id) is is_leader
    grow(world, 4)
    again = restart(m)
    assert n.beat() is Outcome.REBALANCING
    converge(world, again, n)
    assert set.union(*share_out(world, again, n).values()) == {0, 1, 2, 3}
    generation = world.group.generation
    last = restart(again)
    assert (last.outcome, last.generation, last.joined[-1].skip_assignment) == (OK, generation, is_leader)
    assert n.beat() is OK


def test_partition_that_the_leader_leaves_out_costs_one_rebalance_per_restart(world: World) -> None:
    m, n = consumer(world, "m", instance="i"), consumer(world, "n")
    converge(world, m, n)
    share_out(world, m, n, leave_out=(("t", 1),))
    for _ in range(2):
        generation = world.group.generation
        m = restart(m)
        assert n.beat() is Outcome.REBALANCING
        converge(world, m, n)
        share_out(world, m, n, leave_out=(("t", 1),))
        for _ in range(10):
            world.run(1_000)
            assert (m.beat(), n.beat()) == (OK, OK)
        assert world.group.generation == generation + 1


def test_topic_that_no_member_subscribes_to_or_that_does_not_exist_starts_no_rebalance(world: World) -> None:
    m = consumer(world, "m", instance="i", topic="none")
    converge(world, m)
    assert share_out(world, m) == {"m": set()}
    again = consumer(world, "m", instance="i", topic="none").ask()
    world.run()
    assert (again.outcome, again.generation) == (OK, m.generation)
