"""Machines and the node processes on them: start, crash, power loss, pause, restart under a supervisor.

Owns the rules of survival: a disk's image and a machine's clock outlive every process; everything else of a process
dies with it. A process that dies by itself is a violation, and goes into the history.
"""

import errno
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

from chaos_tests.history import Recorder
from smq.raft_state.commands import Listener
from smq.raft_state.ids import NodeId
from smq.replication.api import NodeApi
from smq.replication.log.deletion import DroppedPartitions
from smq.replication.log.partition_log import PartitionLog
from smq.replication.node_config import NodeConfig
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.compute import SimCompute
from smq.testing.virtual.disk import DiskImage, FakeDisk
from smq.testing.virtual.network import SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

CLUSTER_ID = "simulated-cluster"
SUPERVISOR_MS = (50.0, 800.0)  # a process that died by itself restarts after this


class SimulatedNode(NodeApi, Protocol):
    """A NodeApi that can be started."""

    def start(self) -> None: ...

    def allow_first_start(self) -> None: ...


@dataclass(slots=True)
class SimHost:
    """One machine."""

    node: NodeId
    machine: Machine
    image: DiskImage
    latency_ms: tuple[float, float]
    process: Process | None = None
    api: Any = None  # a SimulatedNode while it runs
    disk: FakeDisk | None = None
    has_power: bool = True
    starts: int = 0
    capacity: int | None = None  # bytes, of its disk; None: unlimited
    is_destroyed: bool = False
    has_known: int = 1  # the highest feature level that any of its processes knew
    is_founding: bool = True  # its processes are asked for a first start, as by an option that is never removed
    latest_restart: int = 0  # number of the latest scheduled start; earlier ones do nothing

    def limit(self, capacity: int | None) -> None:
        """Limits its disk, for this process and later ones."""
        self.capacity = capacity
        if self.disk is not None:
            self.disk.capacity = capacity

    @property
    def is_up(self) -> bool:
        return self.process is not None


@dataclass(slots=True)
class Cluster:
    """All hosts of a run."""

    scheduler: Scheduler
    streams: Streams
    network: SimNetwork
    recorder: Recorder
    factory: Callable[..., SimulatedNode]  # of the arguments of Node
    configs: dict[NodeId, NodeConfig]
    hosts: dict[NodeId, SimHost] = field(default_factory=dict)
    on_started: list[Callable[[SimHost], None]] = field(default_factory=list)

    # ------------------------------------------------------------------------------------------ starting
    def start(self, node: NodeId) -> None:
        """Boots a new process of the node on its machine's disk. Does nothing if one runs."""
        host = self.hosts[node]
        if host.is_up or host.is_destroyed:
            return
        host.starts += 1
        host.has_known = max(host.has_known, self.configs[node].feature_level_known)
        host.has_power = True
        name = f"{node}.{host.starts}"
        process = Process(self.scheduler, name, partial(self._died, host, host.starts))
        clock = SimClock(process, host.machine)
        on_fatal = partial(self._fatal, host, host.starts)
        disk = FakeDisk(
            clock,
            self.streams.stream(f"disk/{node}"),
            image=host.image,
            latency_ms=host.latency_ms,
            on_fatal=on_fatal,
        )
        disk.capacity = host.capacity
        disk.on_blocking_read = partial(self._blocked, node)
        for hook in self.on_started:
            hook(host)
        host.process, host.disk = process, disk
        self.recorder.note("fault", what="start", n=node, start=host.starts)

        def boot() -> None:
            rng = self.streams.stream(f"node/{node}/{host.starts}")
            port = SimPort(self.network, node, process)
            host.api = self.factory(
                self._advertise(node, host.starts),
                clock=clock,
                rng=rng,
                network=port,
                disk=disk,
                compute=SimCompute(clock, self.streams.stream(f"compute/{node}/{host.starts}")),
                on_fatal=on_fatal,
            )
            host.api.start()
            if host.is_founding:
                host.api.allow_first_start()

        self.scheduler.at(self.scheduler.now_ns, boot, process)

    def _advertise(self, node: NodeId, start: int) -> NodeConfig:
        """Each process has another address for the outside, like a machine that comes back elsewhere."""
        address = f"{node}.{start}.example.org:9092"
        self.recorder.note("advertise", n=node, address=address)
        outside = Listener(name="outside", grpc_address="", kafka_address=address)
        return replace(self.configs[node], listeners=(outside,))

    def start_later(self, node: NodeId, delay_ms: float) -> None:
        host = self.hosts[node]
        host.latest_restart += 1
        self.scheduler.after_ms(delay_ms, partial(self._start_if_latest, node, host.latest_restart))

    def _start_if_latest(self, node: NodeId, number: int) -> None:
        if self.hosts[node].latest_restart == number:
            self.start(node)

    # ------------------------------------------------------------------------------------------ stopping
    def crash(self, node: NodeId, *, power: bool, why: str) -> None:
        """kill -9, or loss of power: nothing runs any more; the disk decides which unsynced writes are lost."""
        host = self.hosts[node]
        if host.process is None or host.disk is None:
            return
        self.recorder.note("fault", what="power-loss" if power else "crash", n=node, why=why)
        host.process.kill()
        host.disk.crash()
        host.process = host.api = host.disk = None
        host.has_power = not power
        self.network.detach(node, silently=power)

    def install(self, node: NodeId, level: int) -> None:
        """Installs the smq that knows this feature level on the machine. The next start runs it."""
        if self.configs[node].feature_level_known != level:
            self.recorder.note("fault", what="install", n=node, level=level)
            self.configs[node] = replace(self.configs[node], feature_level_known=level)

    def destroy(self, node: NodeId) -> None:
        """Destroys the machine and its disk for good."""
        self.hosts[node].is_destroyed = True

    def pause(self, node: NodeId) -> None:
        host = self.hosts[node]
        if host.process is not None and not host.process.paused:
            self.recorder.note("fault", what="pause", n=node)
            host.process.pause()

    def resume(self, node: NodeId) -> None:
        host = self.hosts[node]
        if host.process is not None and host.process.paused:
            self.recorder.note("fault", what="resume", n=node)
            host.process.resume()
            self.network.resumed(node)

    def _blocked(self, node: NodeId, ms: float) -> None:
        """The process reads on its loop while its disk does not answer: everything in it waits. A start may do so until
        the node listens, which is when Raft begins."""
        if not self.network.listens(node, self.hosts[node].process) or _is_known():
            return
        self.recorder.note("progress", ok=False, why=f"the loop of node {node} waited {ms:.0f} ms for its disk")
        self.pause(node)
        self.scheduler.after_ms(ms, partial(self.resume, node))

    def _died(self, host: SimHost, start: int, error: Exception) -> None:
        """An exception left a callback: production would exit non-zero."""
        if host.starts == start:
            self._end(host, error)

    def _fatal(self, host: SimHost, start: int, error: BaseException) -> None:
        """The process ends itself, as it must after a failed commit. It calls this from its own callbacks, so the end
        is the next event."""
        self.scheduler.at(self.scheduler.now_ns, lambda: self._end(host, error) if host.starts == start else None)

    def _end(self, host: SimHost, error: BaseException) -> None:
        if not host.is_up:
            return
        if host.disk is None or not host.disk.has_failed or _has_used_its_reserve(host, error):  # otherwise it had to
            self.recorder.note("died", n=host.node, err=_describe(error))
        self.crash(host.node, power=False, why=f"ended itself: {type(error).__name__}")
        low, high = SUPERVISOR_MS
        self.start_later(host.node, self.streams.stream("supervisor").uniform(low, high))

    # ------------------------------------------------------------------------------------------ looking
    def up(self) -> list[SimHost]:
        return [host for host in self.hosts.values() if host.is_up]


_STILL_ON_THE_LOOP = frozenset(
    fn.__code__ for fn in (PartitionLog.trim, PartitionLog.truncate, PartitionLog.producers_at, DroppedPartitions._work)
)


def _is_known() -> bool:
    """Whether the read on the loop is one that docs/decisions/reads-that-may-wait-leave-the-loop.md names: deletions
    look up what they delete (of a log's start, of its end and of a dropped log), and a leader the producers for a
    follower that lacks them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _STILL_ON_THE_LOOP:
            return True
        frame = frame.f_back
    return False


def _has_used_its_reserve(host: SimHost, error: BaseException) -> bool:
    """A commit failed on a disk that was full down to the reserve, not to zero: the node should have stopped before."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and bool(host.capacity)


def _describe(error: BaseException) -> str:
    """Type, message and the innermost frames: enough to recognise the bug without a log."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {error} [{' < '.join(reversed(frames[-4:]))}]"
