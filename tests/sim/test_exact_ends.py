"""Where partitions end, asked of three whole nodes: what one question costs, and what it says without a leader."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from smq.raft_state.commands import CreateTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, TopicId
from smq.raft_state.replies import TopicCreated
from smq.replication.api import PartitionRange
from smq.replication.net import wire
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Buffer, Channel
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.compute import LoopCompute
from smq.testing.virtual.disk import DiskImage, FakeDisk
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

pytestmark = pytest.mark.sim

NODES = [NodeId(n) for n in (1, 2, 3)]
PARTITIONS = 100
NAMES = [("t", i) for i in range(PARTITIONS)]
DEADLINE_MS = 5_000


class CountedPort(SimPort):
    """Counts the messages between nodes by their kind."""

    sent: Counter[str]

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        for message in wire.split(memoryview(b"".join(parts))):
            is_raft = channel is Channel.CONTROL and message[0] == wire.RAFT
            self.sent["raft" if is_raft else type(wire.decode(message)).__name__] += 1
        return super().send(peer, channel, parts)


class World:
    def __init__(self) -> None:
        self.scheduler, streams = Scheduler(), Streams(seed=7)
        network = SimNetwork(self.scheduler, streams, NODES, LinkProfile())
        self.sent: Counter[str] = Counter()
        self.processes: dict[NodeId, Process] = {}
        self.nodes: dict[NodeId, Node] = {}
        for number in NODES:
            process = self.processes[number] = Process(self.scheduler, f"node {number}", self.fail)
            clock = SimClock(process, Machine())
            disk = FakeDisk(clock, streams.stream(f"disk {number}"), image=DiskImage(), on_fatal=self.fail)
            config = NodeConfig(node_id=number, cluster_id="c", peers=dict.fromkeys(NODES, ("", 0)))
            port = CountedPort(network, number, process)
            port.sent = self.sent
            rng = streams.stream(f"node {number}")
            node = Node(
                config, clock=clock, rng=rng, network=port, disk=disk, compute=LoopCompute(clock), on_fatal=self.fail
            )
            self.nodes[number] = node
            node.allow_first_start()
            process.soon(node.start)
        self.until(lambda: all(node.is_ready for node in self.nodes.values()))
        replies: list[Any] = []
        command = CreateTopic(
            name="t",
            topic_id=TopicId(b"t" * 16),
            partition_count=PARTITIONS,
            replication_factor=3,
            start_offset=Offset(40),
            created_ms=0,
        )
        self.nodes[NODES[0]].propose(command, DEADLINE_MS, replies.append)
        self.until(lambda: bool(replies))
        assert isinstance(replies[0], TopicCreated)
        self.until(lambda: sum(len(node.replicas.led()) for node in self.nodes.values()) == PARTITIONS)

    def fail(self, error: BaseException) -> None:
        raise error

    def until(self, is_so: Any) -> None:
        assert self.scheduler.run_for_ms(20_000, stop=is_so)

    def ranges(self, at: NodeId) -> list[PartitionRange | SmqError]:
        found: list[Any] = []
        self.nodes[at].partition_ranges(NAMES, DEADLINE_MS, found.append)
        self.until(lambda: bool(found))
        answer: list[PartitionRange | SmqError] = found[0]
        return answer


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("at", NODES)
def test_the_ends_of_100_partitions_cost_one_question_per_leader(world: World, at: NodeId) -> None:
    world.scheduler.run_for_ms(1_000)
    world.sent.clear()
    found = world.ranges(at)
    assert {(r.hwm, r.next_offset) for r in found if isinstance(r, PartitionRange)} == {(40, 40)}
    leaders = {r.leader for r in found if isinstance(r, PartitionRange)}
    assert leaders == set(NODES)
    costs = {kind: world.sent[kind] for kind in ("EndsQuery", "EndsReport", "ReadIndex", "Proposed")}
    # Both other leaders are asked, and each of the three takes one read index, one of them without a message.
    assert costs == {"EndsQuery": 2, "EndsReport": 2, "ReadIndex": 2, "Proposed": 2}


def test_with_a_leader_gone_the_rest_is_known_and_its_own_once_another_leads(world: World) -> None:
    gone = NODES[2]
    world.processes[gone].kill()
    node = world.nodes[NODES[0]]
    found: list[Any] = []
    node.partition_ranges(NAMES, 400, found.append)
    world.until(lambda: bool(found))
    late = [r for r in found[0] if isinstance(r, SmqError)]
    assert 0 < len(late) < PARTITIONS
    assert {e.code for e in late} == {ErrorCode.OFFSET_NOT_AVAILABLE}
    assert {e.details.leader for e in late} == {gone}
    again = world.ranges(NODES[1])  # its time suffices for the elections
    assert {r.leader for r in again if isinstance(r, PartitionRange)} == {NODES[0], NODES[1]}
    assert not [r for r in again if isinstance(r, SmqError)]


def test_without_a_majority_no_end_is_known(world: World) -> None:
    for number in NODES[1:]:
        world.processes[number].kill()
    codes = {r.code for r in world.ranges(NODES[0]) if isinstance(r, SmqError)}
    assert codes == {ErrorCode.OFFSET_NOT_AVAILABLE}
