"""Leaderships go back to the preferred replicas, and off a drained node or one whose disk hangs; so does Raft's."""

import pytest

from smq.raft_state.commands import SetNodeDrained
from smq.raft_state.ids import NodeId
from smq.replication.net import wire
from smq.replication.nodes.balancer import RAFT_RETRY_NS
from tests.unit.replication.nodes.test_controller import World
from tests.unit.replication.support import ME, PEER_A, PEER_B


@pytest.fixture
def world() -> World:
    world = World()
    world.create_topic(3)
    world.run(300)
    return world


def test_leadership_returns_to_the_preferred_replica_by_a_hand_over(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    world.silent.add(PEER_A)
    world.run(3_000)
    world.silent.clear()
    world.run(world.config.rebalance_interval_ms + 1_000)
    requested = [m.target for _, m in world.sent if isinstance(m, wire.Transfer)] + world.transferred
    assert world.part(led).replicas[0] == PEER_A
    assert set(requested) == {PEER_A}


def test_leaderships_leave_a_drained_node_immediately_and_come_back_when_it_is_undrained(world: World) -> None:
    world.run(world.config.rebalance_interval_ms + 500)
    world.apply(SetNodeDrained(node=PEER_A, drained=True))
    world.controller.rebalance_soon()
    world.run(200)
    requested = [(to, m.partition, m.target) for to, m in world.sent if isinstance(m, wire.Transfer)]
    led = [world.part(i) for i in range(3) if world.part(i).leader == PEER_A]
    assert [(to, pid) for to, pid, _ in requested] == [(PEER_A, part.pid) for part in led]
    assert all(target != PEER_A for _, _, target in requested)
    for part in led:
        part.leader = requested[0][2]
    world.apply(SetNodeDrained(node=PEER_A, drained=False))
    world.run(world.config.rebalance_interval_ms + 500)
    back = [m.target for _, m in world.sent if isinstance(m, wire.Transfer)][len(requested) :] + world.transferred
    assert set(back) == {PEER_A}


def test_a_drained_node_hands_raft_over(world: World) -> None:
    world.run(world.config.rebalance_interval_ms + 500)
    world.apply(SetNodeDrained(node=ME, drained=True))
    world.controller.rebalance_soon()
    world.run(200)
    assert world.engine.handed_to in (PEER_A, PEER_B)


def test_each_attempt_to_hand_raft_over_asks_another_node(world: World) -> None:
    world.run(world.config.rebalance_interval_ms + 500)
    world.apply(SetNodeDrained(node=ME, drained=True))
    world.controller.rebalance_soon()
    asked: list[NodeId | None] = []
    for _ in range(3):
        world.engine.handed_to = None
        world.run(RAFT_RETRY_NS // 1_000_000)
        asked.append(world.engine.handed_to)
    assert asked == [PEER_A, PEER_B, PEER_A]


def test_a_node_whose_disk_hangs_hands_raft_over_to_one_whose_disk_does_not(world: World) -> None:
    world.run(500)
    world.disks[PEER_A] = wire.DiskCondition.HANGS
    world.run(200)
    assert world.engine.handed_to is None
    world.disks[ME] = wire.DiskCondition.HANGS
    world.run(200)
    assert world.engine.handed_to == PEER_B


def test_leaderships_do_not_return_to_a_node_whose_disk_hangs(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).replicas[0] == PEER_A)
    world.disks[PEER_A] = wire.DiskCondition.HANGS
    world.part(led).leader = PEER_B
    world.run(3 * world.config.rebalance_interval_ms)
    assert not [m for _, m in world.sent if isinstance(m, wire.Transfer)]
    world.disks[PEER_A] = wire.DiskCondition.FINE
    world.run(3 * world.config.rebalance_interval_ms)
    assert [m.target for _, m in world.sent if isinstance(m, wire.Transfer)][:1] == [PEER_A]


def test_a_node_that_keeps_coming_and_going_gets_its_leaderships_back_later_each_time(world: World) -> None:
    interval_ms = world.config.rebalance_interval_ms

    def waited_ms() -> int:
        """From its return until it is asked for again."""
        world.silent.add(PEER_A)
        world.run(3_000)
        world.silent.clear()
        before = len([m for _, m in world.sent if isinstance(m, wire.Transfer)]) + len(world.transferred)
        for waited in range(0, 20 * interval_ms, 500):
            world.run(500)
            if len([m for _, m in world.sent if isinstance(m, wire.Transfer)]) + len(world.transferred) > before:
                return waited
        raise AssertionError("never")

    first, second, third = waited_ms(), waited_ms(), waited_ms()
    assert first < second < third
