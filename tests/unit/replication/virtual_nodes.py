"""Whole nodes of the production code in one virtual world: a test starts, crashes and wipes them."""

from collections.abc import Callable, Iterable

from smq.raft_state.commands import CreateTopic
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset, TopicId
from smq.raft_state.replies import Reply, TopicCreated
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.compute import LoopCompute
from smq.testing.virtual.disk import DiskImage, FakeDisk
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

ONE, TWO, THREE = ALL = NodeId(1), NodeId(2), NodeId(3)


class VirtualNodes:
    """Each by its number. A subclass may use ports, disks and clocks that count."""

    port_type: type[SimPort] = SimPort
    disk_type: type[FakeDisk] = FakeDisk
    clock_type: type[SimClock] = SimClock

    def __init__(self, numbers: tuple[NodeId, ...] = ALL, *, seed: int = 1, profile: LinkProfile | None = None) -> None:
        self.scheduler, self.streams = Scheduler(), Streams(seed)
        self.numbers = numbers
        self.network = SimNetwork(self.scheduler, self.streams, numbers, profile or LinkProfile())
        self.images = {number: DiskImage() for number in numbers}
        self.processes: dict[NodeId, Process] = {}
        self.clocks: dict[NodeId, SimClock] = {}
        self.disks: dict[NodeId, FakeDisk] = {}
        self.ports: dict[NodeId, SimPort] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.fatal: list[BaseException] = []

    def make(self, number: NodeId, peers: Iterable[NodeId] = ()) -> Node:
        """A process of the node, which does not run yet."""
        process = self.processes[number] = Process(self.scheduler, f"node {number}", self.fatal.append)
        clock = self.clocks[number] = self.clock_type(process, Machine())
        disk = self.disks[number] = self.disk_type(
            clock, self.streams.stream(f"disk/{number}"), image=self.images[number], on_fatal=self.fatal.append
        )
        port = self.ports[number] = self.port_type(self.network, number, process)
        node = self.nodes[number] = Node(
            NodeConfig(node_id=number, cluster_id="c", peers=dict.fromkeys(tuple(peers) or self.numbers, ("", 0))),
            clock=clock,
            rng=self.streams.stream(f"node/{number}"),
            network=port,
            disk=disk,
            compute=LoopCompute(clock),
            on_fatal=self.fatal.append,
        )
        return node

    def start(self, *numbers: NodeId, first_start: Iterable[NodeId] = (), peers: Iterable[NodeId] = ()) -> None:
        """These, or all."""
        for number in numbers or self.numbers:
            node = self.make(number, peers)
            self.processes[number].soon(node.start)
            if number in first_start:
                self.processes[number].soon(node.allow_first_start)

    def crash(self, *numbers: NodeId) -> None:
        for number in numbers:
            self.processes.pop(number).kill()
            self.images[number] = self.disks.pop(number).crash()
            self.network.detach(number, silently=True)
            del self.nodes[number]

    def wipe(self, *numbers: NodeId) -> None:
        """Their machines go, and come back with empty disks."""
        self.crash(*(number for number in numbers if number in self.nodes))
        for number in numbers:
            self.images[number] = DiskImage()

    def run(self, ms: float) -> None:
        self.scheduler.run_for_ms(ms)

    def wait(self, condition: Callable[[], bool], ms: float = 5_000) -> bool:
        """Whether it comes true in time. The default is that of several elections."""
        return self.scheduler.run_for_ms(ms, stop=condition)

    def are_ready(self, *numbers: NodeId) -> bool:
        return self.wait(lambda: all(self.nodes[number].is_ready for number in numbers or self.numbers))

    def create(self, name: str, partitions: int, *, start: int = 0) -> None:
        """A topic with replicas everywhere; its leaders lead."""
        first, replies = self.numbers[0], list[Reply | SmqError]()
        command = CreateTopic(
            name=name,
            topic_id=TopicId(b"t" * 16),
            partition_count=partitions,
            replication_factor=len(self.numbers),
            start_offset=Offset(start),
            created_ms=0,
        )
        self.processes[first].soon(lambda: self.nodes[first].propose(command, 5_000, replies.append))
        assert self.wait(lambda: bool(replies))
        assert isinstance(replies[0], TopicCreated)
        assert self.wait(lambda: sum(len(node.replicas.led()) for node in self.nodes.values()) == partitions)
