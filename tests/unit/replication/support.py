"""A node's parts, and one replica under a microscope: a real machine, a real log store on a simulated disk, a recorded
network."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from smq.raft_state.commands import (
    AdvanceHwms,
    AdvanceLogStart,
    AlterTopicConfig,
    Command,
    CreateTopic,
    ElectLeader,
    HwmAdvance,
    MarkIncomplete,
    RegisterNode,
)
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import BirthId, DiskId, Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionId, TopicId, TsNs
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, Rejected, Reply
from smq.raft_state.state import ClusterState, PartitionState
from smq.raft_state.topic_config import BatchRules
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks, DoneFn, Produced, ProduceRequest, TimeKind, TimeOffset
from smq.replication.commands.coalescing import Barriers
from smq.replication.commands.proposer import rejection
from smq.replication.host import Host as NodeHost
from smq.replication.host import Identity
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.monitoring.anomalies import Anomalies
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.net import wire
from smq.replication.net.links import Links
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import birth_row
from smq.replication.partition.admission import PreparedBatch, SendOrder
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.intake import Intake, SpaceGuard
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.repair import Outcome, Repairs
from smq.replication.partition.replica import Noted, Outputs, Replica, Shared
from smq.replication.ports import Buffer, Channel, NetworkHandler
from smq.replication.runtime.deadlines import Deadlines
from smq.replication.storage.hang import HangGuard
from smq.testing.virtual.clock import Machine as Hardware
from smq.testing.virtual.clock import Process, Scheduler, SimClock
from smq.testing.virtual.disk import DiskImage, FakeDisk

ME, PEER_A, PEER_B = NodeId(1), NodeId(2), NodeId(3)
INCARNATION = Incarnation(100)
TOPIC = TopicId(b"t" * 16)
MessageT = TypeVar("MessageT", bound=wire.Message)


def raise_it(error: BaseException) -> None:
    """What a process in a test does with an error that ends it."""
    raise error


def process_clock(scheduler: Scheduler) -> SimClock:
    """Of a process whose failure is the test's."""
    return SimClock(Process(scheduler, "n", raise_it), Hardware())


BIRTH = wire.Birth(BirthId(b"b" * 16), tuple((node, DiskId(bytes([node]) * 16)) for node in (ME, PEER_A, PEER_B)))


def born(image: DiskImage) -> DiskImage:
    """The same disk, of a cluster that has begun."""
    row = birth_row(BIRTH)
    image.tables[row.table][row.key] = row.value
    return image


def batch(
    value: bytes = b"v",
    count: int = 1,
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytes:
    return encode_batch(
        [NewRecord(None, value, 1_000 + i) for i in range(count)],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


class RecordedNetwork:
    """Every session is open, and every message goes to the test."""

    def __init__(self, on_sent: Callable[[NodeId, wire.Message], None]) -> None:
        self._on_sent = on_sent
        self.backlog = 0  # bytes queued for every peer
        self.disconnected: set[NodeId] = set()

    def start(self, handler: NetworkHandler) -> None: ...

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        for message in wire.split(memoryview(b"".join(parts))):
            self._on_sent(peer, wire.decode(message))
        return True

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return peer not in self.disconnected

    def is_at_address(self, peer: NodeId) -> bool:
        return peer not in self.disconnected

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return self.backlog

    def close(self) -> None: ...


def immediate_links(network: RecordedNetwork) -> Links:
    """Every message is a frame of its own and leaves within the call."""
    return Links(network, lambda fn: fn())


class NotedOutputs(Outputs):
    """Reports each note immediately."""

    def __init__(self, on_note: Callable[[str], None]) -> None:
        super().__init__(lambda _drain: None, lambda: None)
        self._on_note = on_note

    def note(self, kind: Noted, pid: PartitionId) -> None:
        (name,) = (name for name, noted in vars(self).items() if noted is kind)
        self._on_note(name)


class NodeParts:
    """The parts of one node in a cluster of three, without any work: a test gives them to what it tests. Every outgoing
    message and every proposal is kept, and Raft is applied by the test itself."""

    def __init__(self, node: NodeId = ME, incarnation: Incarnation = INCARNATION, *, known_level: int = 1) -> None:
        self.scheduler = Scheduler()
        self.process = Process(self.scheduler, "node", raise_it)
        self.hardware = Hardware()
        self.clock = SimClock(self.process, self.hardware)
        self.disk = FakeDisk(self.clock, random.Random(1), on_fatal=raise_it)
        self.identity = Identity(incarnation, DiskId(b""))
        self.config = NodeConfig(node_id=node, cluster_id="c", peers={})
        self.deadlines = Deadlines()
        self.sent: list[tuple[NodeId, wire.Message]] = []
        self.network = RecordedNetwork(self.on_sent)
        self.links = immediate_links(self.network)
        self.machine = Machine(known_level=known_level)
        self.measures = NodeMeasures()
        self.anomalies = Anomalies(self.clock, self.measures, lambda: self.state)
        self.engine: Any = None  # what stands for Raft
        self.proposed: list[Command] = []
        self.answers: list[DoneFn[Reply]] = []  # for the proposals; the test gives them
        self.index = 0

    def register_all(self) -> None:
        self.apply(default_init("c"))
        for node in (ME, PEER_A, PEER_B):
            self.apply(register(node))

    def node_host(self) -> NodeHost:
        """Of the present process."""
        return NodeHost(
            config=self.config,
            identity=self.identity,
            applied=self,
            clock=self.clock,
            deadlines=self.deadlines,
            disk=self.disk,
            links=self.links,
            engine=self.engine,
            propose=self.propose,
            anomalies=self.anomalies,
            deliver=self.clock.call_soon,
            measures=self.measures,
        )

    @property
    def state(self) -> ClusterState:
        return self.machine.state

    def on_sent(self, peer: NodeId, message: wire.Message) -> None:
        self.sent.append((peer, message))

    def propose(self, command: Command, _timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.proposed.append(command)
        self.answers.append(done)

    def apply(self, command: Command) -> Reply:
        """Raises what the machine refuses."""
        self.index += 1
        applied = self.machine.apply(LogIndex(self.index), command)
        self.on_applied(applied)
        if isinstance(applied.reply, Rejected):
            raise rejection(applied.reply)
        return applied.reply

    def on_applied(self, applied: Applied) -> None:
        """For what the test does with it."""

    def create_topic(self, partitions: int = 1, **fields: Any) -> None:
        """It is named t."""
        topic = {"topic_id": TOPIC, "partition_count": partitions, "replication_factor": 3, "created_ms": 0}
        self.apply(CreateTopic(name="t", **{**topic, **fields}))

    def sent_of(self, kind: type[MessageT]) -> list[tuple[NodeId, MessageT]]:
        return [(peer, m) for peer, m in self.sent if isinstance(m, kind)]

    def messages(self, kind: type[MessageT]) -> list[MessageT]:
        return [m for _, m in self.sent_of(kind)]

    def run(self, ms: int, step_ms: int = 10) -> None:
        """Deadlines that have passed fire."""
        for _ in range(max(1, ms // step_ms)):
            self.scheduler.run_for_ms(min(ms, step_ms))
            self.deadlines.run(self.clock.monotonic_ns())


class Host(NodeParts):
    """The owner of one replica."""

    def __init__(self, node: NodeId = ME, incarnation: Incarnation = INCARNATION) -> None:
        super().__init__(node, incarnation)
        self.rules = BatchRules()  # of what is produced
        self.store = LogStore(self.disk)
        self.send_order = SendOrder(self.clock)
        self.hang = HangGuard(self.disk, self.config.disk_hang_ms)
        self.noted = Counter[str]()  # the outputs of the replica's steps, by kind
        self.shared = Shared(
            outputs=NotedOutputs(self.on_output),
            space=SpaceGuard(self.disk, 0),
            hang=self.hang,
            intake=Intake(self.disk, self.config.append_inflight_bytes_max),
            send_order=self.send_order,
            producers_held=lambda: self.producers_held,
            is_candidate=self.is_candidate,
            registered=self.registered,
            resign=lambda pid, epoch: self.resigned.append((pid, epoch)),
            repair=self.repair,
        )
        self.repairs = Repairs(self.node_host(), self.intake, lambda _pid: self.on_output("durable"))
        self.candidates = {PEER_A, PEER_B}
        self.resigned: list[tuple[PartitionId, Epoch]] = []
        self.replica: Replica | None = None
        self.register_all()

    # ---- what the replica gets from its node
    @property
    def producers_held(self) -> int:
        return self.store.budget.producers

    def is_candidate(self, node: NodeId) -> bool:
        return node in self.candidates

    def registered(self, node: NodeId) -> Incarnation | None:
        known = self.state.nodes.get(node)
        return known.incarnation if known is not None else None

    @property
    def intake(self) -> Intake:
        return self.shared.intake

    @intake.setter
    def intake(self, intake: Intake) -> None:
        self.shared.intake = intake

    @property
    def space(self) -> SpaceGuard:
        return self.shared.space

    @space.setter
    def space(self, space: SpaceGuard) -> None:
        self.shared.space = space

    def on_output(self, kind: str) -> None:
        if kind == "unsent":
            self.live.pump()
        elif kind == "durable" and self.replica is not None:
            self.clock.call_soon(self.replica.after_durable)
        self.noted[kind] += 1

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        self.repairs.request(self.live, damage, lambda outcome: done(outcome is Outcome.REPAIRED))

    # ---- the test's hands
    @property
    def live(self) -> Replica:
        assert self.replica is not None
        return self.replica

    def on_applied(self, applied: Applied) -> None:
        if self.replica is not None and self.replica.pid in applied.touched:
            self.replica.on_applied()

    def look_ups(self, barriers: Barriers | None = None) -> LookUps:
        """Of this replica. A read index is passed immediately, unless the test holds it back."""
        passed = SimpleNamespace(wait=lambda _timeout_ms, done: done(LogIndex(self.index)))
        barriers = barriers if barriers is not None else cast(Barriers, passed)
        ends = ExactEnds(self.node_host(), barriers, {self.live.pid: self.live}.get)
        return LookUps(self.node_host(), ends, self.repairs)

    def find_time(self, kind: TimeKind, value: int) -> TimeOffset | SmqError:
        """A look-up by time in this replica."""
        found: list[TimeOffset | SmqError] = []
        self.look_ups().time(self.live, kind, value, 5_000, found.append)
        self.settle(100)
        (answer,) = found
        return answer

    def offset_at(self, kind: TimeKind, value: int) -> int:
        found = self.find_time(kind, value)
        assert isinstance(found, TimeOffset), found
        return found.offset

    def settle(self, ms: float = 1_000) -> None:
        """Lets the disk commit and callbacks run; deadlines that have passed fire."""
        self.scheduler.run_for_ms(ms)
        self.deadlines.run(self.clock.monotonic_ns())
        self.scheduler.run_for_ms(1)

    def create_partition(self, start: int = 0, replication: int = 3) -> Replica:
        self.create_topic(replication_factor=replication, start_offset=Offset(start))
        log = self.store.create(self.part.pid, self.part.log_start)
        self.replica = Replica(self.node_host(), self.shared, self.part, log)
        self.replica.on_applied()
        return self.replica

    def reopen(self, incarnation: int = INCARNATION + 1, image: DiskImage | None = None) -> Replica:
        """The process died and came back, with its disk or another; the applied state is this host's own."""
        crashed = self.disk.crash()
        image = image if image is not None else crashed
        self.disk = FakeDisk(self.clock, random.Random(2), image=image, on_fatal=raise_it)
        self.identity = Identity(Incarnation(incarnation), DiskId(b""))
        self.store = LogStore(self.disk)
        self.intake = Intake(self.disk, self.config.append_inflight_bytes_max)
        log = self.store.open_all()[self.part.pid]
        self.replica = Replica(self.node_host(), self.shared, self.part, log)
        self.replica.on_applied()
        return self.replica

    @property
    def part(self) -> PartitionState:
        return self.state.topics["t"].partitions[0]

    def configure(self, **config: object) -> None:
        """The topic. A setting has underscores for its dots; None resets it."""
        named = {name.replace("_", "."): value for name, value in sorted(config.items())}
        set_ = tuple((name, str(value)) for name, value in named.items() if value is not None)
        unset = tuple(name for name, value in named.items() if value is None)
        self.apply(AlterTopicConfig(name="t", set_=set_, unset=unset))

    def move_log_start(self, offset: int) -> None:
        self.apply(AdvanceLogStart(partition=self.part.pid, offset=Offset(offset)))

    def mark_incomplete(self, incarnation: Incarnation | None = None) -> None:
        """By the present process, or another."""
        by = incarnation if incarnation is not None else self.identity.incarnation
        self.apply(MarkIncomplete(node=ME, incarnation=by, partitions=(self.part.pid,)))

    def elect(self, node: NodeId, incarnation: Incarnation = INCARNATION, end: int | None = None) -> None:
        """Its epoch starts at the end, or at the high water mark. It needs no seals: the leader itself asks for it."""
        self.apply(
            ElectLeader(
                partition=self.part.pid,
                expected_epoch=self.part.epoch,
                candidate=node,
                incarnation=incarnation,
                end=Offset(self.part.hwm if end is None else end),
                by_leader=True,
            )
        )

    def advance(self, hwm: int, epoch: int | None = None, next_offset: int | None = None, ts_ns: int = 0) -> Reply:
        item = HwmAdvance(
            partition=self.part.pid,
            epoch=Epoch(self.part.epoch if epoch is None else epoch),
            hwm=Offset(hwm),
            next_offset=Offset(hwm if next_offset is None else next_offset),
            ts_ns=TsNs(ts_ns),
        )
        return self.apply(AdvanceHwms(items=(item,)))

    def produce(
        self,
        data: bytes | None = None,
        acks: Acks = Acks.ALL,
        timeout_ms: int = 30_000,
        *,
        named: str | None = None,
        is_timed: bool = False,
    ) -> "Answer":
        answer = Answer()
        prepared = PreparedBatch(data if data is not None else batch(), self.rules)
        self.give(prepared, acks, answer, timeout_ms, named=named, is_timed=is_timed)
        return answer

    def commit(self, *batches: bytes) -> None:
        """All batches with these are durable here, and committed."""
        for data in batches:
            self.produce(data)
        self.settle()
        self.advance(self.live.log.appended_end)

    def give(
        self,
        prepared: PreparedBatch,
        acks: Acks,
        answer: "Answer",
        timeout_ms: int = 30_000,
        *,
        named: str | None = None,
        is_timed: bool = False,
    ) -> None:
        """To the replica, after the steps before it."""
        trace = self.measures.stage if is_timed else None
        request = ProduceRequest("t", 0, prepared.data, acks, timeout_ms, answer, named, trace=trace)
        self.live.produce(request, prepared)

    def ack(self, peer: NodeId, end: int, *, epoch: int | None = None, incarnation: int = INCARNATION) -> None:
        """A follower says how far its durable verified log reaches. Its first report answers the probe."""
        stream = self.live.stream_to(peer)
        probes = [m.stream for p, m in self.sent_of(wire.Probe) if p == peer]
        is_answer = stream is not None and not stream.is_placed and bool(probes)
        ack = wire.Ack(
            self.part.pid,
            Epoch(self.part.epoch if epoch is None else epoch),
            Incarnation(incarnation),
            Offset(end),
            Offset(end),
            probes[-1] if is_answer else 0,
            is_answer,
        )
        self.live.on_ack(peer, ack)

    def appends_to(self, peer: NodeId) -> list[wire.Append]:
        return [m for p, m in self.sent_of(wire.Append) if p == peer]

    def last_probe(self, peer: NodeId) -> wire.Probe:
        return [m for p, m in self.sent_of(wire.Probe) if p == peer][-1]

    def answer_probe(
        self, peer: NodeId, end: int, *, stream: int = 0, is_full: bool = False, is_held: bool = False
    ) -> None:
        """A follower says where its log ends, to the last probe or in this stream, and perhaps that it has no room."""
        at, stream = Offset(end), stream or self.last_probe(peer).stream
        ack = wire.Ack(
            self.part.pid, self.part.epoch, INCARNATION, at, at, stream, True, is_full=is_full, is_held=is_held
        )
        self.live.on_ack(peer, ack)

    @contextmanager
    def cut_off(self) -> Iterator[Replica]:
        """The replica learns of what is applied meanwhile all at once, as from a snapshot."""
        replica, self.replica = self.live, None
        yield replica
        self.replica = replica
        replica.on_applied()


class Answer:
    """The `done` of one call."""

    def __init__(self) -> None:
        self.result: Produced | SmqError | None = None

    def __call__(self, result: Produced | SmqError) -> None:
        assert self.result is None, "answered twice"
        self.result = result

    @property
    def offsets(self) -> tuple[int, int]:
        assert isinstance(self.result, Produced), self.result
        return self.result.base_offset, self.result.last_offset

    @property
    def is_duplicate(self) -> bool:
        assert isinstance(self.result, Produced), self.result
        return self.result.duplicate

    @property
    def error(self) -> str:
        assert isinstance(self.result, SmqError), self.result
        return self.result.code.name


def register(node: NodeId, incarnation: int = INCARNATION, level: int = 1) -> RegisterNode:
    return RegisterNode(
        node=node,
        incarnation=Incarnation(incarnation),
        disk=DiskId(bytes([node]) * 16),
        grpc_address=f"n{node}:1",
        http_address="",
        kafka_address=f"n{node}:2",
        feature_level=level,
    )


def leader_of_one_record() -> Host:
    """It leads epoch 1 of three replicas; the record is committed."""
    host = Host()
    host.create_partition()
    host.elect(ME)
    host.produce()
    host.settle()
    for peer in (PEER_A, PEER_B):
        host.ack(peer, 1)
    host.advance(1)
    return host
