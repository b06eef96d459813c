"""The systems of the comparison as running processes: three nodes on loopback, each with its own directory.

Owns how each is started, and what it flushes before it acknowledges. It must never send load. Everything is signalled
by process id.
"""

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.other_commits import started_from
from benchmarks.peers.programs import Jars, go_program, kafka_jars
from benchmarks.usage import Usage, usage_of
from smq.testing.cluster import Cluster

NODES: Final = (1, 2, 3)
READY_S: Final = 60.0
STOP_S: Final = 20.0


class System(ABC):
    """Three nodes. `driver` is the protocol that the load speaks to them."""

    name: str
    flushes: str  # before it acknowledges
    driver: str

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start_s = 0.0
        self.watch: Callable[[], AbstractContextManager[object]] = nullcontext  # around what a line measures

    @abstractmethod
    def _launch(self) -> None: ...

    @property
    @abstractmethod
    def servers(self) -> list[str]: ...

    @property
    @abstractmethod
    def pids(self) -> list[int]: ...

    @abstractmethod
    def stop(self) -> None: ...

    def start(self) -> None:
        """Returns when all nodes take requests."""
        began = time.monotonic()
        self._launch()
        self.start_s = time.monotonic() - began

    def kill(self, place: int) -> None:
        """SIGKILL to the node of that place in `servers`."""
        os.kill(self.pids[place], signal.SIGKILL)

    def usage(self) -> Usage:
        return usage_of(self.pids)


SomeSystem = TypeVar("SomeSystem", bound=System)


class Smq(System):
    name = "smq"
    flushes = "a majority's disks"
    driver = "kafka"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._started = ExitStack()  # nothing, if it did not start

    def _launch(self) -> None:
        self._take(Cluster(self.root).start())

    def _take(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._started.callback(cluster.stop)

    @property
    def servers(self) -> list[str]:
        return [node.kafka for node in self._cluster.nodes.values()]

    @property
    def grpc_servers(self) -> list[str]:
        return [node.grpc for node in self._cluster.nodes.values()]

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self._cluster.nodes.values()]

    def stop(self) -> None:
        self._started.close()


def smq_at(version: str) -> type[System]:
    """smq as another commit has it."""

    class Other(Smq):
        name = f"smq, {version}"

        def _launch(self) -> None:
            self._take(started_from(version, self.root))

    return Other


class _Started(System):
    """Nodes that are children of this process."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._ports: dict[str, list[int]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def _take_ports(self, *purposes: str) -> None:
        """Free ports of loopback, one per purpose and node. All are held until all are known."""
        held = []
        for purpose in purposes:
            self._ports[purpose] = []
            for _ in NODES:
                taken = socket.socket()
                taken.bind(("127.0.0.1", 0))
                held.append(taken)
                self._ports[purpose].append(taken.getsockname()[1])
        for taken in held:
            taken.close()

    def _address(self, purpose: str, place: int) -> str:
        return f"127.0.0.1:{self._ports[purpose][place]}"

    def _directory(self, node: int) -> Path:
        directory = self.root / f"node-{node}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _spawn(self, node: int, command: list[str]) -> None:
        with (self.root / f"node-{node}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def _wait_ports(self, purpose: str) -> None:
        deadline = time.monotonic() + READY_S
        for place in range(len(NODES)):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", self._ports[purpose][place]), 1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"{self.name} does not listen; its logs are in {self.root}") from None
                    time.sleep(0.02)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Kafka(_Started):
    """Combined brokers and controllers (KRaft). As it is by default it flushes nothing before it acknowledges."""

    name = "Kafka"
    flushes = "nothing (page cache)"
    driver = "kafka"
    settings: tuple[str, ...] = ()

    def _launch(self) -> None:
        self._jars: Jars = kafka_jars()
        self._take_ports("client", "controller")
        voters = ",".join(f"{node}@{self._address('controller', node - 1)}" for node in NODES)
        for node in NODES:
            config = self._directory(node) / "server.properties"
            config.write_text("\n".join(self._config(node, voters)) + "\n")
            storage = ("format", "--cluster-id", "c21xLWJlbmNobWFya3MtMQ", "--config", str(config))
            subprocess.run(
                self._jars.command("kafka.tools.StorageTool", *storage, heap="256m"), check=True, capture_output=True
            )
        for node in NODES:
            self._spawn(node, self._jars.command("kafka.Kafka", str(self.root / f"node-{node}" / "server.properties")))
        self._wait_ports("client")

    def _config(self, node: int, voters: str) -> list[str]:
        client, controller = self._address("client", node - 1), self._address("controller", node - 1)
        return [
            "process.roles=broker,controller",
            f"node.id={node}",
            f"controller.quorum.voters={voters}",
            f"listeners=PLAINTEXT://{client},CONTROLLER://{controller}",
            f"advertised.listeners=PLAINTEXT://{client}",
            "controller.listener.names=CONTROLLER",
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            f"log.dirs={self.root / f'node-{node}' / 'log'}",
            "min.insync.replicas=2",
            "default.replication.factor=3",
            "offsets.topic.replication.factor=3",
            "offsets.topic.num.partitions=3",
            "transaction.state.log.replication.factor=3",
            "transaction.state.log.min.isr=2",
            "group.initial.rebalance.delay.ms=0",
            *self.settings,
        ]

    @property
    def servers(self) -> list[str]:
        return [self._address("client", place) for place in range(len(NODES))]


class FlushingKafka(Kafka):
    name = "Kafka, fsync"
    flushes = "every replica's disk (log.flush.interval.messages=1)"
    settings = ("log.flush.interval.messages=1",)


class Etcd(_Started):
    name = "etcd"
    flushes = "a majority's disks"
    driver = "etcd"

    def _launch(self) -> None:
        program = go_program("etcd")
        self._take_ports("client", "peer")
        members = ",".join(f"node-{node}=http://{self._address('peer', node - 1)}" for node in NODES)
        for node in NODES:
            client, peer = f"http://{self._address('client', node - 1)}", f"http://{self._address('peer', node - 1)}"
            command = [str(program), "--name", f"node-{node}", "--data-dir", str(self._directory(node))]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", members, "--log-level", "warn", "--quota-backend-bytes", str(8 << 30)]
            self._spawn(node, command)
        self._wait_ports("client")

    @property
    def servers(self) -> list[str]:
        return [self._address("client", place) for place in range(len(NODES))]


class Nats(_Started):
    name = "NATS"
    flushes = "a majority's disks (sync_interval: always)"
    driver = "nats"

    def _launch(self) -> None:
        program = go_program("nats-server")
        self._take_ports("client", "route")
        routes = ",".join(f'"nats://{self._address("route", node - 1)}"' for node in NODES)
        for node in NODES:
            config = self._directory(node) / "nats.conf"
            config.write_text(
                f"server_name: node-{node}\nlisten: {self._address('client', node - 1)}\n"
                f'jetstream {{ store_dir: "{self._directory(node)}", sync_interval: always }}\n'
                f"cluster {{ name: peers, listen: {self._address('route', node - 1)}, routes: [{routes}] }}\n"
            )
            self._spawn(node, [str(program), "-c", str(config)])
        self._wait_ports("client")

    @property
    def servers(self) -> list[str]:
        return [self._address("client", place) for place in range(len(NODES))]


SYSTEMS: Final[tuple[type[System], ...]] = (Smq, Kafka, FlushingKafka, Etcd, Nats)


@contextmanager
def running(kind: type[SomeSystem], root: Path) -> Iterator[SomeSystem]:
    system = kind(root)
    try:
        system.start()
        yield system
    finally:
        system.stop()
