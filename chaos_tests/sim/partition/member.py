"""A node of the group: production replicas, log store and links over a simulated disk, and a Raft that is given to it.

Owns the life of one process after another on one disk. What it sends is kept by the group until a schedule delivers it,
what it proposes until a schedule commits it, and it applies an entry when a schedule says so. It must never decide any
of that itself. `group` makes it.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

from smq.raft_state.commands import Command
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import DiskId, Epoch, Incarnation, LogIndex, NodeId, PartitionId, Term
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Rejected, Reply
from smq.raft_state.state import ClusterState
from smq.replication.api import Cancel, DoneFn
from smq.replication.commands.coalescing import Barriers
from smq.replication.commands.proposer import rejection
from smq.replication.dispatch import Dispatcher
from smq.replication.host import Host, Identity
from smq.replication.monitoring.anomalies import Anomalies
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.net.links import Links
from smq.replication.node_config import NodeConfig
from smq.replication.partition.intake import SpaceGuard
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Buffer, Channel, NetworkHandler
from smq.replication.raft.raft import Raft
from smq.replication.runtime.deadlines import Deadlines
from smq.replication.runtime.slices import Slices
from smq.replication.storage.hang import HangGuard
from smq.testing.virtual.clock import Machine as Hardware
from smq.testing.virtual.clock import Process, Scheduler, SimClock
from smq.testing.virtual.disk import DiskImage, FakeDisk

TERM: Final = Term(1)  # questions of older terms of Raft are not part of this
DISK_MS: Final = (0.1, 0.4)


class World(Protocol):
    """What a member needs of its group."""

    scheduler: Scheduler
    rng: random.Random
    pid: PartitionId
    log: list[Command]

    @property
    def nodes(self) -> tuple[NodeId, ...]: ...

    def send(self, source: NodeId, target: NodeId, channel: Channel, payload: bytes) -> bool: ...

    def is_open(self, source: NodeId, target: NodeId) -> bool: ...

    def proposed(self, proposal: "Proposal") -> None: ...

    def on_resigned(self, node: NodeId) -> None: ...

    def on_error(self, error: BaseException) -> None: ...


@dataclass(eq=False, slots=True)
class Proposal:
    """It may be committed whenever and as often as a schedule likes, also long after its proposer has given it up."""

    command: Command
    node: NodeId
    process: int
    done: DoneFn[Reply] | None  # None once it has been called

    def answer(self, result: Reply | SmqError) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(rejection(result) if isinstance(result, Rejected) else result)


class _Port:
    """The Network port of one process."""

    def __init__(self, world: World, node: NodeId) -> None:
        self._world = world
        self._node = node

    def start(self, handler: NetworkHandler) -> None: ...

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        return self._world.send(self._node, peer, channel, b"".join(parts))

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return self._world.is_open(self._node, peer)

    def is_at_address(self, peer: NodeId) -> bool:
        return self._world.is_open(self._node, peer)

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return 0

    def close(self) -> None: ...


class Member:
    def __init__(self, world: World, node: NodeId) -> None:
        self._world = world
        self.node = node
        self.hardware = Hardware()
        self.image = DiskImage()
        self.disk_number = int(node)
        self.processes = 0
        self.applied = 0  # entries of Raft's log
        self.is_up = False
        self.watches: list[Anomalies] = []  # of each process so far
        self.has_lost = False  # its disk may hold less than it has acknowledged, and the others do not know it yet
        self.has_lost_log = False  # only a state that has the partition says so
        self._barriers: list[tuple[int, DoneFn[LogIndex]]] = []
        self._waiting: list[tuple[int, Proposal, Reply]] = []

    # ------------------------------------------------------------------------------------------ the process
    def start(self, applied: int) -> None:
        """On its disk as it is. Its Raft has kept the first `applied` entries."""
        world = self._world
        self.processes += 1
        self.is_up = True
        self._barriers, self._waiting = [], []
        self.incarnation = Incarnation(self.processes)
        self.disk_id = DiskId(bytes([int(self.node)]) * 8 + self.disk_number.to_bytes(8, "big"))
        self.process = Process(world.scheduler, f"{self.node}.{self.processes}", world.on_error)
        self.clock = SimClock(self.process, self.hardware)
        disk = FakeDisk(self.clock, world.rng, image=self.image, latency_ms=DISK_MS, on_fatal=world.on_error)
        self.disk = disk
        self.machine = Machine()
        self.applied = 0
        self.deadlines = Deadlines()
        self.hang = HangGuard(disk, 2_000)
        self.watches.append(Anomalies(self.clock, NodeMeasures(), lambda: self.state))
        self.replicas = self._make_replicas(disk)
        for _ in self.replicas.open_logs():
            pass
        self.jump(applied, is_own_disk=True)

    def _make_replicas(self, disk: FakeDisk) -> Replicas:
        world, slices = self._world, Slices(self.clock)
        self.links = Links(_Port(world, self.node), self.clock.call_soon)
        engine = SimpleNamespace(term=TERM, is_leader=False, leader=None)
        host = Host(
            config=NodeConfig(
                node_id=self.node,
                cluster_id="group",
                peers={},
                disk_reserve_bytes=0,
                compaction_check_ms=500,
                compaction_segment_bytes=2_000,
                compaction_reset_ms=3_000,
            ),
            identity=Identity(self.incarnation, self.disk_id),
            applied=self,
            clock=self.clock,
            deadlines=self.deadlines,
            disk=disk,
            links=self.links,
            engine=cast(Raft, engine),
            propose=self._propose,
            anomalies=self.watches[-1],
            deliver=self.clock.call_soon,
        )
        replicas = Replicas(
            host,
            space=SpaceGuard(disk, 0),
            hang=self.hang,
            barriers=cast(Barriers, SimpleNamespace(wait=self._barrier)),
            slices=slices,
            reachable=lambda: frozenset(n for n in world.nodes if world.is_open(self.node, n)),
            is_candidate=lambda _node: True,
            resign=lambda _pid, _epoch: world.on_resigned(self.node),
        )
        unused = cast(Any, SimpleNamespace(on_resign=lambda *_: None, on_report=lambda *_: None, shut=()))
        self.dispatcher = Dispatcher(
            host, births=unused, heartbeats=unused, proposer=unused, controller=unused, quorum=unused, replicas=replicas
        )
        return replicas

    def crash(self) -> None:
        """Loses power: what was not on disk may be lost."""
        self.is_up = False
        self.process.kill()
        self.image = self.disk.crash()
        self._barriers, self._waiting = [], []

    def tick(self) -> None:
        now_ns = self.clock.monotonic_ns()
        self.deadlines.run(now_ns)
        self.hang.observe(now_ns)
        self.replicas.on_beat()
        self.replicas.visit(now_ns)

    # ------------------------------------------------------------------------------------------ Raft
    @property
    def state(self) -> ClusterState:
        return self.machine.state

    def _propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        proposal = Proposal(command, self.node, self.processes, done)
        self._world.proposed(proposal)
        late = SmqError(ErrorCode.TIMED_OUT, "no answer from Raft")
        self.clock.call_later(timeout_ms, lambda: proposal.answer(late))

    def _barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> Cancel:
        """A read index: everything that was committed when it was asked for."""
        self._barriers.append((len(self._world.log), done))
        self.clock.call_soon(self._pass_barriers)
        return lambda: None

    def _pass_barriers(self) -> None:
        passed = [done for index, done in self._barriers if index <= self.applied]
        self._barriers = [b for b in self._barriers if b[0] > self.applied]
        for done in passed:
            done(LogIndex(self.applied))

    def expect_reply(self, index: int, proposal: Proposal, reply: Reply) -> None:
        """The proposal is entry `index`: its proposer has the reply once it has applied that."""
        if proposal.process == self.processes and self.is_up:
            self._waiting.append((index, proposal, reply))

    def apply_to(self, end: int) -> None:
        """Entry by entry, each followed by the replicas."""
        while self.applied < end:
            self._apply_next(self.replicas.touch)
            self._follow()
        self._after_apply()

    def jump(self, end: int, *, is_own_disk: bool = False) -> None:
        """As with a snapshot: the state is replaced as a whole, and the replicas follow afterwards."""
        while self.applied < end:
            self._apply_next(lambda _pids: None)
        self.replicas.touch_all(is_own_disk=is_own_disk)
        self._follow()
        self._after_apply()

    def _apply_next(self, touch: Callable[[Iterable[PartitionId]], None]) -> None:
        command = self._world.log[self.applied]
        self.applied += 1
        touch(self.machine.apply(LogIndex(self.applied), command).touched)

    def _follow(self) -> None:
        while not self.replicas.follow():
            pass

    def _after_apply(self) -> None:
        due = [w for w in self._waiting if w[0] <= self.applied]
        self._waiting = [w for w in self._waiting if w[0] > self.applied]
        for _, proposal, reply in due:
            proposal.answer(reply)
        self._pass_barriers()

    # ------------------------------------------------------------------------------------------ its replica
    @property
    def replica(self) -> Replica | None:
        return self.replicas.get(self._world.pid) if self.is_up else None

    @property
    def leads(self) -> Epoch | None:
        """The epoch that it leads, as far as it knows."""
        replica = self.replica
        return replica.leading if replica is not None and replica.leading == replica.part.epoch else None
