"""Work on thousands of items is done in slices: each callback of the loop does a bounded amount."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from smq.raft_state.command_codec import encode_command
from smq.raft_state.commands import Command, CreateTopic, OffsetCommit, RegisterNode
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import DiskId, Incarnation, LogIndex, NodeId, Offset, PartitionId, RequestId, TopicId
from smq.raft_state.limits import default_init
from smq.replication.commands import applied_state
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.net import wire
from smq.replication.ports import Buffer, Channel
from smq.replication.runtime import slices
from smq.testing.virtual.clock import SimClock
from smq.testing.virtual.disk import DiskImage
from smq.testing.virtual.network import SimPort
from tests.unit.raft_state.support import commit, proposed
from tests.unit.replication.support import BIRTH, born
from tests.unit.replication.virtual_nodes import ALL, ONE, TWO, VirtualNodes

PARTITIONS = 900  # a third of them led by each node
TOPIC = TopicId(b"t" * 16)


class Probes(SimPort):
    """It only counts the probes that it is to send to node 2."""

    count = 0
    is_up = False

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        if channel is Channel.DATA and peer == TWO and self.is_up:
            messages = map(wire.decode, wire.split(memoryview(b"".join(parts))))
            self.count += sum(isinstance(message, wire.Probe) for message in messages)
        return self.is_up

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return self.is_up


class World(VirtualNodes):
    """Node 1 of three. The tests play the engine: they apply."""

    port_type = Probes

    def __init__(self, image: DiskImage | None = None, clock_type: type[SimClock] = SimClock) -> None:
        super().__init__()
        self.clock_type = clock_type
        self.images[ONE] = born(image or DiskImage())
        self.node = self.make(ONE)
        self.process, self.disk = self.processes[ONE], self.disks[ONE]
        self.network: Any = self.ports[ONE]
        self.index = 1

    def started(self) -> "World":
        self.node.start()
        self.run(50)
        return self

    def apply(self, command: Command) -> None:
        self.index += 1
        self.node.applied.apply(LogIndex(self.index), encode_command(command))

    def settle(self) -> None:
        while not self.node.applied.settle():
            pass

    def populate(self) -> None:
        """All three nodes, and a topic."""
        self.apply(default_init("c", BIRTH.birth))
        for node in ALL:
            incarnation = self.node.incarnation if node == ONE else Incarnation(1)
            disk = DiskId(bytes([node]) * 16)
            addresses: dict[str, Any] = {"grpc_address": "h:1", "http_address": "h:2", "kafka_address": "h:3"}
            self.apply(RegisterNode(node=node, incarnation=incarnation, disk=disk, **addresses))
        topic = CreateTopic(name="t", topic_id=TOPIC, partition_count=PARTITIONS, replication_factor=3, created_ms=0)
        self.apply(topic)
        self.settle()

    def commit(self, number: int) -> None:
        part = self.node.state.topics["t"].partitions[number]
        item = OffsetCommit(partition=part.pid, offset=Offset(0))
        request = RequestId(number.to_bytes(16, "big"))
        self.apply(proposed(self.node.state, replace(commit("g", request=request), items=(item,))))

    def most_per_callback(self, counter: Callable[[], int], run_ms: float) -> int:
        """The most that the counter grew within one callback."""
        most, before = 0, counter()

        def on_step() -> bool:
            nonlocal most, before
            most, before = max(most, counter() - before), counter()
            return False

        self.process.on_step = on_step
        self.scheduler.run_for_ms(run_ms)
        self.process.on_step = None
        return most


def test_the_streams_to_a_peer_that_has_come_are_probed_some_at_a_time() -> None:
    world = World().started()
    world.populate()
    world.network.is_up = True
    world.process.soon(lambda: world.node.dispatcher.on_session_open(TWO, Channel.DATA))
    assert 0 < world.most_per_callback(lambda: world.network.count, 10) <= slices.PARTS_MAX
    assert world.network.count == PARTITIONS // 3


def test_a_peer_that_goes_again_is_probed_no_further() -> None:
    world = World().started()
    world.populate()
    world.network.is_up = True
    world.node.dispatcher.on_session_open(TWO, Channel.DATA)
    world.node.dispatcher.on_session_close(TWO, Channel.DATA)
    world.network.is_up = False
    before = world.network.count
    world.scheduler.run_for_ms(10)
    assert world.network.count == before < PARTITIONS // 3


# --------------------------------------------------------------------------------------------------- digest
class Asked:
    def __init__(self, world: World) -> None:
        self.answers = list[tuple[LogIndex, str] | SmqError]()
        world.node.digest(self.answers.append)


def of_now(world: World) -> tuple[LogIndex, str]:
    return LogIndex(world.index), sha256(b"".join(world.node.applied.snapshot())).hexdigest()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.raft_state.snapshot.PIECE_BYTES", 1 << 10)


@pytest.mark.usefixtures("small_pieces")
def test_a_digest_is_that_of_the_state_and_takes_a_few_pieces_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().started()
    world.populate()
    read = 0
    pieces = world.node.applied.snapshot

    def counted() -> Iterator[bytes]:
        nonlocal read
        for piece in pieces():
            read += 1
            yield piece

    monkeypatch.setattr(world.node.applied.digests, "_make_pieces", counted)
    requested = Asked(world)
    assert world.most_per_callback(lambda: read, 10) == applied_state.PIECES_PER_STEP < read
    assert requested.answers == [of_now(world)]
    assert world.node.applied.settle()


@pytest.mark.usefixtures("small_pieces")
def test_an_entry_that_moves_the_state_restarts_its_digest_and_the_next_entry_waits() -> None:
    world = World().started()
    world.populate()
    first = Asked(world)
    world.process.soon(lambda: world.commit(1))  # after the digest's first step
    is_settled = list[bool]()

    def engine() -> None:
        """As it does: it asks until the entry is settled."""
        is_settled.append(world.node.applied.settle())
        if not is_settled[-1]:
            world.process.soon(engine)

    world.process.soon(engine)
    world.scheduler.run_for_ms(10)
    assert first.answers == [of_now(world)]
    assert is_settled[0] is False
    assert is_settled[-1] is True
    assert of_now(world)[0] == world.index


@pytest.mark.usefixtures("small_pieces")
def test_a_node_that_stops_answers_the_callers_of_a_digest() -> None:
    world = World().started()
    world.populate()
    requested = Asked(world)
    world.node.stop()
    world.scheduler.run_for_ms(10)
    assert isinstance(requested.answers[0], SmqError)
    assert len(requested.answers) == 1


# --------------------------------------------------------------------------------------------------- start
class SlowClock(SimClock):
    """Each look at it takes a millisecond."""

    def monotonic_ns(self) -> int:
        self._reads_ns += 1_000_000
        return super().monotonic_ns()


def filled_disk() -> DiskImage:
    world = World().started()
    world.populate()
    world.scheduler.run_for_ms(2_000)
    return world.disk.crash()


def test_a_node_opens_its_logs_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    image, opened = filled_disk(), 0
    open_one = LogStore.open

    def counted(self: LogStore, pid: PartitionId) -> PartitionLog:
        nonlocal opened
        opened += 1
        return open_one(self, pid)

    monkeypatch.setattr(LogStore, "open", counted)
    world = World(image, SlowClock)
    world.node.start()
    assert world.most_per_callback(lambda: opened, 50) <= slices.SLICE_NS_MAX // 1_000_000
    assert opened == PARTITIONS


def test_a_node_that_is_stopped_while_it_starts_touches_its_disk_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(filled_disk(), SlowClock)
    world.node.start()
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            world.node.stop()
            world.disk.close()
        return False

    world.process.on_step = stop
    world.scheduler.run_for_ms(50)
    assert looks > 5
    assert world.node.engine.term == 0
    assert not world.node.is_running
