"""Three whole nodes in one virtual world, with everything counted that a batch costs them.

Network and disk take the same time for every message and every commit, so that a run is the same each time.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

from smq.raft_state.commands import CommitOffsets, CreateTopic, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset, TopicId
from smq.raft_state.replies import Done, Reply, TopicCreated
from smq.replication.api import Acks, Produced, ProduceRequest
from smq.replication.net import wire
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Buffer, Channel, Op
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.compute import LoopCompute
from smq.testing.virtual.disk import FakeDisk
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

NODES = (NodeId(1), NodeId(2), NodeId(3))
TOPIC = "t"
DISK_MS = 1.0
TICK_MS = 20  # the default of NodeConfig
LARGE_BYTES = 10_000  # of a part that only a batch has


def is_of_smq(code: CodeType) -> bool:
    """The virtual world is not."""
    return "/smq/" in code.co_filename and "/smq/testing/" not in code.co_filename


class CountedPort(SimPort):
    """Counts frames and messages by their type, and keeps the large parts that it was given."""

    counts: Counter[str]
    large: list[Buffer]

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        self.counts[f"{channel.name} frames"] += 1
        self.large += [part for part in parts if len(part) >= LARGE_BYTES]
        if channel is Channel.DATA:
            for message in map(wire.decode, wire.split(memoryview(b"".join(parts)))):
                self.counts[type(message).__name__] += 1
        return super().send(peer, channel, parts)


class CountedDisk(FakeDisk):
    """Counts submissions. Commits are counted by the disk itself."""

    counts: Counter[str]

    def submit(self, ops: Sequence[Op], done: Callable[[], None] | None = None) -> int:
        self.counts["submissions"] += 1
        self.counts["rows"] += len(ops)
        return super().submit(ops, done)


class CountedClock(SimClock):
    """Counts callbacks of the loop."""

    counts: Counter[str]

    def __init__(self, process: Process, machine: Machine) -> None:
        super().__init__(process, machine)
        soon = self.call_soon

        def call_soon(fn: Callable[[], None]) -> None:
            self.counts["callbacks"] += 1
            soon(fn)

        self.call_soon = call_soon


class HotPath:
    """The cluster, with one topic whose partitions are led evenly."""

    def __init__(self, partitions: int) -> None:
        self.scheduler, streams = Scheduler(), Streams(seed=5)
        profile = LinkProfile(delay_ms_min=0.1, delay_ms_mean=0.0, tail_probability=0.0)
        network = SimNetwork(self.scheduler, streams, NODES, profile)
        self.nodes: dict[NodeId, Node] = {}
        self.processes: dict[NodeId, Process] = {}
        self.disks: dict[NodeId, CountedDisk] = {}
        self.ports: dict[NodeId, CountedPort] = {}
        self.counts: dict[NodeId, Counter[str]] = {}
        for node_id in NODES:
            self._boot(node_id, streams, network)
        self._until(lambda: all(node.is_ready for node in self.nodes.values()))
        self._create(partitions)

    def _boot(self, node_id: NodeId, streams: Streams, network: SimNetwork) -> None:
        counts = self.counts[node_id] = Counter()
        process = self.processes[node_id] = Process(self.scheduler, f"node {node_id}", self._fail)
        clock = CountedClock(process, Machine())
        rng = random.Random(node_id)
        disk = self.disks[node_id] = CountedDisk(clock, rng, latency_ms=(DISK_MS, DISK_MS), on_fatal=self._fail)
        port = CountedPort(network, node_id, process)
        clock.counts = disk.counts = port.counts = counts
        self.ports[node_id] = port
        port.large = []
        config = NodeConfig(node_id=node_id, cluster_id="c", peers=dict.fromkeys(NODES, ("", 0)))
        node = Node(
            config,
            clock=clock,
            rng=streams.stream(f"{node_id}"),
            network=port,
            disk=disk,
            compute=LoopCompute(clock),
            on_fatal=self._fail,
        )
        self.nodes[node_id] = node
        node.allow_first_start()
        process.soon(node.start)

    def _fail(self, error: BaseException) -> None:
        raise error

    def _until(self, condition: Callable[[], bool]) -> None:
        assert self.scheduler.run_for_ms(20_000, stop=condition), "not within 20 virtual seconds"

    def _create(self, partitions: int) -> None:
        replies: list[Reply | SmqError] = []
        command = CreateTopic(
            name=TOPIC,
            topic_id=TopicId(b"t" * 16),
            partition_count=partitions,
            replication_factor=len(NODES),
            created_ms=0,
        )
        self.processes[NODES[0]].soon(lambda: self.nodes[NODES[0]].propose(command, 5_000, replies.append))
        self._until(lambda: bool(replies))
        assert isinstance(replies[0], TopicCreated)
        self.scheduler.run_for_ms(1_000)

    def rest(self) -> None:
        """Half a second, and on until all nodes, which start at zero, have just ticked: no tick comes into the next
        callbacks."""
        after_tick_ms = 5
        self.scheduler.run_for_ms(500 + (after_tick_ms - self.scheduler.now_ns / 1_000_000) % TICK_MS)

    def led_by(self, node_id: NodeId) -> list[int]:
        parts = self.nodes[node_id].state.topics[TOPIC].partitions
        return [index for index, part in enumerate(parts) if part.leader == node_id]

    def produce(self, node_id: NodeId, batches: Sequence[tuple[int, bytes]]) -> None:
        """Hands all of them to the node in one turn of its loop, and waits for the answers."""
        self.produce_in_turns(node_id, [batches], 0)

    def produce_in_turns(
        self, node_id: NodeId, turns: Sequence[Sequence[tuple[int, bytes]]], distance_ms: float
    ) -> None:
        """As `produce`, each turn at this distance from the one before it."""
        answers: list[Produced | SmqError] = []

        def hand_over(batches: Sequence[tuple[int, bytes]]) -> None:
            for partition, batch in batches:
                self.nodes[node_id].produce(ProduceRequest(TOPIC, partition, batch, Acks.ALL, 5_000, answers.append))

        for number, batches in enumerate(turns):
            if number:
                self.scheduler.run_for_ms(distance_ms)
            self.processes[node_id].soon(partial(hand_over, batches))
        self._until(lambda: len(answers) == sum(map(len, turns)))
        assert all(isinstance(answer, Produced) for answer in answers), answers

    @property
    def raft_leader(self) -> NodeId:
        (leader,) = [node_id for node_id, node in self.nodes.items() if node.engine.is_leader]
        return leader

    def commit_offsets(self, node_id: NodeId, count: int) -> None:
        """Of `count` groups that the node coordinates, in one turn of its loop; waits for the answers."""
        node, replies = self.nodes[node_id], list[Reply | SmqError]()
        item = OffsetCommit(partition=node.state.topics[TOPIC].partitions[0].pid, offset=Offset(0))
        slots = ((name, coordinator_of(node.state, name)) for name in map(str, range(10 * count)))
        owned = [(name, slot.epoch) for name, slot in slots if slot.node == node_id][:count]
        groups = node.state.groups
        commands = [
            CommitOffsets(
                group=name,
                coordinator_epoch=epoch,
                changes_seen=groups[name].changes if name in groups else 0,
                items=(item,),
                committed_ms=1,
            )
            for name, epoch in owned
        ]

        def hand_over() -> None:
            for command in commands:
                node.propose(command, 5_000, replies.append)

        self.processes[node_id].soon(hand_over)
        self._until(lambda: len(replies) == count)
        assert all(isinstance(reply, Done) for reply in replies), replies

    @contextmanager
    def counted(self) -> Iterator[dict[NodeId, Counter[str]]]:
        """What happens in the block, by node, and under node 0 what cannot be told apart: calls of functions of smq, by
        name, and their sum."""
        for node_id, counts in self.counts.items():
            counts.clear()
            counts["commits"] = -self.disks[node_id].commits
        calls: Counter[str] = Counter()

        def on_event(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call":
                code = frame.f_code
                if is_of_smq(code):
                    calls[code.co_qualname] += 1
                    calls["all calls"] += 1

        found = {**self.counts, NodeId(0): calls}
        sys.setprofile(on_event)
        try:
            yield found
        finally:
            sys.setprofile(None)
            for node_id, counts in self.counts.items():
                counts["commits"] += self.disks[node_id].commits
