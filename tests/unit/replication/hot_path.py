"""Three whole nodes in one virtual world, with everything counted that a batch costs them.

Network and disk take the same time for every message and every commit, so that a run is the same each time.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType

from smq.raft_state.commands import CommitOffsets, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.replies import Done, Reply
from smq.replication.api import Acks, Produced, ProduceRequest
from smq.replication.net import wire
from smq.replication.node import Node
from smq.replication.ports import Buffer, Channel, Op
from smq.testing.virtual.clock import Machine, Process, SimClock
from smq.testing.virtual.disk import FakeDisk
from smq.testing.virtual.network import LinkProfile, SimPort
from tests.unit.replication.virtual_nodes import ALL, VirtualNodes

NODES = ALL
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


class HotPath(VirtualNodes):
    """The cluster, with one topic whose partitions are led evenly."""

    port_type, disk_type, clock_type = CountedPort, CountedDisk, CountedClock
    ports: dict[NodeId, CountedPort]  # type: ignore[assignment]  # of the port type above

    def __init__(self, partitions: int) -> None:
        super().__init__(seed=7, profile=LinkProfile(delay_ms_min=0.1, delay_ms_mean=0.0, tail_probability=0.0))
        self.counts: dict[NodeId, Counter[str]] = {}
        self.start(first_start=NODES)
        self._until(lambda: all(node.is_ready for node in self.nodes.values()))
        self.create(TOPIC, partitions)
        self.run(1_000)

    def make(self, number: NodeId, peers: Iterable[NodeId] = ()) -> Node:
        node = super().make(number, peers)
        counts = self.counts[number] = Counter()
        for part in (self.ports[number], self.disks[number], self.clocks[number]):
            vars(part)["counts"] = counts
        self.ports[number].large = []
        self.disks[number].latency_ms = (DISK_MS, DISK_MS)
        return node

    def _until(self, condition: Callable[[], bool]) -> None:
        assert self.wait(condition, 20_000), "not within 20 virtual seconds"
        assert not self.fatal

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
