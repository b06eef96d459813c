"""An operator's request for the preferred leader at any node: the leader that gets it, and which replica is not fit."""

from typing import cast

import pytest

from smq.raft_state.commands import FenceNode, SetNodeDrained
from smq.raft_state.ids import Epoch, NodeId, PartitionId
from smq.raft_state.state import PartitionState
from smq.replication.net import wire
from smq.replication.net.wire import DiskCondition
from smq.replication.nodes.balancer import request_preferred_leader
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replicas import Replicas
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, NodeParts


class World(NodeParts):
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
def world() -> World:
    return World()


def test_a_leader_elsewhere_is_asked_by_a_message(world: World) -> None:
    part = world.part(preferred=PEER_A, leader=PEER_B)
    assert world.request(part)
    assert world.sent == [(PEER_B, wire.Transfer(part.pid, part.epoch, PEER_A))]
    assert world.transferred == []


def test_this_node_gets_its_own_leadership_back(world: World) -> None:
    """It never hears itself, and is fit nevertheless."""
    part = world.part(preferred=ME, leader=PEER_B)
    assert world.request(part)
    assert world.sent == [(PEER_B, wire.Transfer(part.pid, part.epoch, ME))]


def test_this_node_hands_over_what_it_leads(world: World) -> None:
    part = world.part(preferred=PEER_A, leader=ME)
    assert world.request(part)
    assert world.transferred == [(part.epoch, PEER_A)]
    assert world.sent == []


def test_nothing_is_requested_of_the_preferred_leader_itself(world: World) -> None:
    assert world.request(world.part(preferred=PEER_A, leader=PEER_A))
    assert world.sent == []


def test_a_dead_leader_is_not_asked(world: World) -> None:
    part = world.part(preferred=PEER_A, leader=PEER_B)
    world.apply(FenceNode(node=PEER_B, incarnation=INCARNATION))
    part.leader = PEER_B
    assert world.request(part), "an election is due, and a later request may find a leader"
    assert world.sent == []


@pytest.mark.parametrize("why", ["fenced", "drained", "leaving", "full", "hangs"])
@pytest.mark.parametrize("preferred", [ME, PEER_A])
def test_a_replica_that_is_not_fit_is_not_requested(world: World, preferred: NodeId, why: str) -> None:
    disk = {"full": DiskCondition.FULL, "hangs": DiskCondition.HANGS}.get(why, DiskCondition.FINE)
    if why == "fenced":
        world.apply(FenceNode(node=preferred, incarnation=INCARNATION))
    elif why == "drained":
        world.apply(SetNodeDrained(node=preferred, drained=True))
    elif preferred == ME:
        world.liveness.is_self_leaving, world.own_disk = why == "leaving", disk
    else:
        world.hear(preferred, is_leaving=why == "leaving", disk=disk)
    assert not world.request(world.part(preferred=preferred, leader=PEER_B))
    assert world.sent == []


def test_a_partition_that_is_gone_is_not_requested(world: World) -> None:
    assert not world.request(PartitionId(b"x" * 20))
