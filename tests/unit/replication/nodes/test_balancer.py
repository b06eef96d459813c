"""Leaderships go back to the preferred replicas, and off a drained node or one whose disk hangs; so does Raft's."""

from typing import cast

import pytest

from smq.raft_state.commands import FenceNode, SetNodeDrained
from smq.raft_state.ids import Epoch, NodeId, PartitionId
from smq.raft_state.state import PartitionState
from smq.replication.net import wire
from smq.replication.net.wire import DiskCondition
from smq.replication.nodes.balancer import RAFT_RETRY_NS, request_preferred_leader
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replicas import Replicas
from tests.unit.replication.nodes.test_controller import World
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, NodeParts


@pytest.fixture
def world() -> World:
    world = World()
    world.create_topic(3)
    world.run(300)
    return world


def test_leadership_returns_to_the_preferred_replica_by_a_hand_over(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    world.silent.add(PEER_A)
    world.run(2 * world.config.session_timeout_ms)
    world.silent.clear()
    world.run(world.config.rebalance_interval_ms + 1_000)
    requested = [m.target for m in world.messages(wire.Transfer)] + world.transferred
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
    back = [m.target for m in world.messages(wire.Transfer)][len(requested) :] + world.transferred
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
    assert not world.messages(wire.Transfer)
    world.disks[PEER_A] = wire.DiskCondition.FINE
    world.run(3 * world.config.rebalance_interval_ms)
    assert [m.target for m in world.messages(wire.Transfer)][:1] == [PEER_A]


def test_a_node_that_keeps_coming_and_going_gets_its_leaderships_back_later_each_time(world: World) -> None:
    interval_ms = world.config.rebalance_interval_ms

    def waited_ms() -> int:
        """From its return until it is asked for again."""
        world.silent.add(PEER_A)
        world.run(2 * world.config.session_timeout_ms)
        world.silent.clear()
        before = len(world.messages(wire.Transfer)) + len(world.transferred)
        for waited in range(0, 20 * interval_ms, 500):
            world.run(500)
            if len(world.messages(wire.Transfer)) + len(world.transferred) > before:
                return waited
        raise AssertionError("never")

    first, second, third = waited_ms(), waited_ms(), waited_ms()
    assert first < second < third


# ---------------------------------------------------------------------------------------------------- preferred leader
# An operator's request for the preferred leader at any node: the leader that gets it, and which replica is not fit.
class Requests(NodeParts):
    """Node 1. Both peers are heard, and all disks have room. One partition, led by its second replica."""

    def __init__(self) -> None:
        super().__init__()
        self.own_disk = DiskCondition.FINE
        self.transferred: list[tuple[Epoch, NodeId]] = []
        self.liveness = Liveness(
            self.config,
            clock=self.clock,
            applied=self,
            engine=self.engine,
            own_disk=lambda: self.own_disk,
            is_connected=lambda _peer: True,
        )
        self.register_all()
        self.hear(PEER_A)
        self.hear(PEER_B)
        self.create_topic(3)

    def hear(self, peer: NodeId, *, is_leaving: bool = False, disk: DiskCondition = DiskCondition.FINE) -> None:
        self.liveness.on_heartbeat(peer, INCARNATION, is_leaving=is_leaving, disk=disk)

    def transfer(self, _pid: PartitionId, epoch: Epoch, target: NodeId) -> None:
        self.transferred.append((epoch, target))

    def part(self, preferred: NodeId, leader: NodeId) -> PartitionState:
        """A partition with these."""
        part = next(part for part in self.state.topics["t"].partitions if part.replicas[0] == preferred)
        part.leader = leader
        return part

    def request(self, part: PartitionState | PartitionId) -> bool:
        pid = part.pid if isinstance(part, PartitionState) else part
        return request_preferred_leader(self.node_host(), cast(Replicas, self), self.liveness, pid)


@pytest.fixture
def requests() -> Requests:
    return Requests()


def test_a_leader_elsewhere_is_asked_by_a_message(requests: Requests) -> None:
    part = requests.part(preferred=PEER_A, leader=PEER_B)
    assert requests.request(part)
    assert requests.sent == [(PEER_B, wire.Transfer(part.pid, part.epoch, PEER_A))]
    assert requests.transferred == []


def test_this_node_gets_its_own_leadership_back(requests: Requests) -> None:
    """It never hears itself, and is fit nevertheless."""
    part = requests.part(preferred=ME, leader=PEER_B)
    assert requests.request(part)
    assert requests.sent == [(PEER_B, wire.Transfer(part.pid, part.epoch, ME))]


def test_this_node_hands_over_what_it_leads(requests: Requests) -> None:
    part = requests.part(preferred=PEER_A, leader=ME)
    assert requests.request(part)
    assert requests.transferred == [(part.epoch, PEER_A)]
    assert requests.sent == []


def test_nothing_is_requested_of_the_preferred_leader_itself(requests: Requests) -> None:
    assert requests.request(requests.part(preferred=PEER_A, leader=PEER_A))
    assert requests.sent == []


def test_a_dead_leader_is_not_asked(requests: Requests) -> None:
    part = requests.part(preferred=PEER_A, leader=PEER_B)
    requests.apply(FenceNode(node=PEER_B, incarnation=INCARNATION))
    part.leader = PEER_B
    assert requests.request(part), "an election is due, and a later request may find a leader"
    assert requests.sent == []


@pytest.mark.parametrize("why", ["fenced", "drained", "leaving", "full", "hangs"])
@pytest.mark.parametrize("preferred", [ME, PEER_A])
def test_a_replica_that_is_not_fit_is_not_requested(requests: Requests, preferred: NodeId, why: str) -> None:
    disk = {"full": DiskCondition.FULL, "hangs": DiskCondition.HANGS}.get(why, DiskCondition.FINE)
    if why == "fenced":
        requests.apply(FenceNode(node=preferred, incarnation=INCARNATION))
    elif why == "drained":
        requests.apply(SetNodeDrained(node=preferred, drained=True))
    elif preferred == ME:
        requests.liveness.is_self_leaving, requests.own_disk = why == "leaving", disk
    else:
        requests.hear(preferred, is_leaving=why == "leaving", disk=disk)
    assert not requests.request(requests.part(preferred=preferred, leader=PEER_B))
    assert requests.sent == []


def test_a_partition_that_is_gone_is_not_requested(requests: Requests) -> None:
    assert not requests.request(PartitionId(b"x" * 20))
