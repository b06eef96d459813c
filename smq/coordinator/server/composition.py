"""The composition root: one node with its real ports and its gRPC, HTTP and Kafka services.

Owns the order of starting and stopping, and the reaction to signals. It decides nothing about data. Only the CLI
imports it.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog
import uvloop

from smq.clients import Admin, Tls
from smq.coordinator import limits
from smq.coordinator.config.addresses import Address, format_address, is_wildcard
from smq.coordinator.config.node_toml import ServerConfig, told
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.grpc.admin import AdminService
from smq.coordinator.grpc.agent import AgentService
from smq.coordinator.grpc.broker import BrokerService
from smq.coordinator.grpc.gate import Gate
from smq.coordinator.grpc.groups_service import GroupService
from smq.coordinator.grpc.listener import GrpcPort, GrpcServer
from smq.coordinator.grpc.login import LoginService
from smq.coordinator.grpc.transactions_service import ProducerService
from smq.coordinator.http.access import HttpAccess
from smq.coordinator.http.collectors import ConnectionCollector, InstrumentCollector, PortConnections
from smq.coordinator.http.console.site import Console
from smq.coordinator.http.endpoints import HttpServer
from smq.coordinator.http.metrics import make_registry
from smq.coordinator.http.people import People
from smq.coordinator.kafka.listener import KafkaPort, KafkaServer
from smq.coordinator.server import signals
from smq.coordinator.server.pauses import HeapKeeper, LoopLag
from smq.coordinator.server.process import ConnectionCaps, configure_logs, die, keep_freed_memory, take_descriptors
from smq.coordinator.server.self_check import ClockCheck, Reach, SelfCheck
from smq.coordinator.service.audience import OWN
from smq.coordinator.service.audit import FILE_NAME, Audit
from smq.coordinator.service.authorizer import Authorizer
from smq.coordinator.service.bound_ports import listener
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.lag_monitor import LagMonitor
from smq.coordinator.service.quotas import Quotas
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.tokens import Tokens
from smq.coordinator.service.tracing import traced
from smq.coordinator.service.users import Users, set_left_user
from smq.coordinator.tls.port_tls import PortTls
from smq.coordinator.user_errors import EXIT_FAILED, StartError
from smq.raft_state.commands import Listener
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.monitoring.measures import ProcessMeasures
from smq.replication.net.acceptor import AcceptLimits
from smq.replication.net.tcp import TcpNetwork
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import StartRefused
from smq.replication.ports import DataDamaged
from smq.replication.raft.timing import RaftTiming
from smq.replication.runtime.asyncio_runtime import AsyncioClock, SystemRng, ThreadCompute
from smq.replication.storage.directory import FIRST_START_FILE, DiskOpenError, is_used
from smq.replication.storage.disk import SWITCH_INTERVAL_S, NodeLogDisk

log = structlog.get_logger(__name__)

_TOPICS_NAMED_MAX: Final = 10  # in a line of the log


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """What a start has before it opens the data directory."""

    caps: ConnectionCaps
    peers: socket.socket
    http: socket.socket
    http_access: HttpAccess
    kafka: Sequence[KafkaPort]
    node_config: NodeConfig


class Server:
    """One node's process. `start` raises StartError; `stop` hands over, answers and closes."""

    def __init__(
        self, config: ServerConfig, measures: ProcessMeasures | None = None, *, first_start: bool = False
    ) -> None:
        """`first_start`: a new cluster is to begin if all nodes are there, and have empty directories."""
        self._config = config
        self._first_start = first_start
        self._measures = measures if measures is not None else ProcessMeasures()
        self._loop_lag = LoopLag(self._measures.loop_lag)
        self._settings = Settings(config.settings, config.request_bytes_max - limits.REQUEST_OVERHEAD_BYTES)
        self._users = Users(lambda: self.node.state)
        self._authorizer = Authorizer(lambda: self.node.state, config.super_users)
        kept = config.audit
        path = kept.file or config.data_dir / FILE_NAME
        self._audit = Audit(path, file_bytes_max=kept.file_bytes_max, files=kept.files)
        self._is_stopping = False
        self._is_serving = False
        self._is_registered = False
        self._kafka_notice: asyncio.TimerHandle | None = None
        self._stopping_kafka: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens a used directory first: a node that is started twice should report that, and not a port in use. A new
        one is made last, so that a refused start leaves nothing behind."""
        clock = AsyncioClock(asyncio.get_running_loop(), on_error=die)
        disk = self._open_disk(clock) if is_used(self._config.data_dir) else None
        try:
            ports = self._open_ports()
            network = self._network(ports)
            await self._refuse_second_process(network)
            disk = disk or self._open_disk(clock)
            await self._start(clock, disk, ports, network)
        except StartError:
            if disk is not None:
                disk.close()
            raise

    async def _refuse_second_process(self, network: TcpNetwork) -> None:
        """StartError if the peers' address of this node leads to another process of it. A lone node has no peers."""
        config = self._config
        if len(config.peers) == 1:
            return
        address = config.peers[config.node_id]
        found = await network.ask_own_address(address)
        shown = format_address(address)
        if found.process and not network.is_me(found.process):
            network.close()
            raise StartError(
                f"another process runs as node {config.node_id} of this cluster, at {shown}: stop it, or give this one "
                "its own node_id and peers entry"
            )
        if not found.process:
            log.warning(
                "own_address_unreachable",
                key=f"peers.{config.node_id}",
                address=shown,
                reason=found.reason,
                advice="if the other nodes cannot reach it either, correct the address, the name or the firewall",
            )

    def _reach(self, ports: "_Ports") -> Reach:
        """The advertised addresses that differ from those listened to: only they may lead elsewhere."""
        config = self._config
        reach: dict[str, tuple[Address, ssl.SSLContext | None]] = {}
        http = self.http_address, config.http_advertised, config.http_tls
        found = [("http_advertised", *http)]
        sockets = {port.listener: port.socket for port in ports.kafka}
        for way in config.ways_in:
            kafka = _bound(way.kafka_address, sockets.get(way.name))
            for kind, bound, advertised in (
                ("grpc", self._grpc.bound.get(way.name), way.grpc_advertised),
                ("kafka", kafka, way.kafka_advertised),
            ):
                if bound is not None:
                    found.append((way.setting(f"{kind}_advertised"), bound, advertised, config.tls_of(way)))
        for key, bound, advertised, tls in found:
            if advertised is not None:
                context = self._tls.node.dialling if self._tls.node is not None and tls is not None else None
                reach[key] = told(bound, advertised), context
        return reach

    def _open_disk(self, clock: AsyncioClock) -> NodeLogDisk:
        try:
            disk = NodeLogDisk(
                self._config.data_dir,
                call_soon_threadsafe=clock.call_soon_threadsafe,
                on_fatal=die,
                call_soon=clock.call_soon,
            )
            if disk.remark:
                log.error("the disk was repaired", path=str(self._config.data_dir), what=disk.remark)
            return disk
        except DiskOpenError as e:
            raise StartError(str(e)) from e

    def _open_ports(self) -> "_Ports":
        """Checks what can be checked without the directory, and binds all ports, without serving them yet."""
        config = self._config
        caps = take_descriptors()
        self._tls = PortTls(config)
        self._tokens = Tokens(config.oauth) if config.oauth is not None else None
        peers = listener("other nodes", config.nodes_listen)
        http_access = HttpAccess(config, People(self._users, self._authorizer, self._audit))
        http = listener("HTTP", config.http_address)
        self.http_address: Address = (config.http_address[0], http.getsockname()[1])
        kafka = tuple(self._kafka_ports())
        own = next((port.socket for port in kafka if port.listener == OWN), None)
        self.kafka_address = _bound(config.kafka_address, own)
        bytes_max = min(config.request_bytes_max, limits.ANSWER_BYTES_MAX)
        self._grpc = GrpcServer(
            tuple(self._grpc_ports()), caps.grpc_limits, self._measures, request_bytes_max=bytes_max
        )
        self.grpc_address = self._grpc.bound[OWN]
        node_config = config.node_config(
            grpc_address=self.grpc_address,
            http_address=self.http_address,
            kafka_address=self.kafka_address,
            listeners=self._listeners(kafka),
        )
        try:
            RaftTiming.of(node_config)
        except ValueError as e:
            raise StartError(f"the settings under [tuning] contradict each other: {e}") from e
        return _Ports(caps=caps, peers=peers, http=http, http_access=http_access, kafka=kafka, node_config=node_config)

    def _network(self, ports: "_Ports") -> TcpNetwork:
        config = self._config
        self._clock_check = ClockCheck(len(config.peers), lambda why: die(StartRefused(why)))
        return TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=config.node_id,
            cluster_id=config.cluster_id,
            peers=config.peers,
            listener=ports.peers,
            tls=self._tls.node,
            on_error=die,
            on_clock=self._clock_check.note,
            on_refused=lambda why: die(StartRefused(why)),
        )

    async def _start(self, clock: AsyncioClock, disk: NodeLogDisk, ports: "_Ports", network: TcpNetwork) -> None:
        config, caps = self._config, ports.caps
        self._disk, self._peers = disk, network
        self._compute = ThreadCompute(clock)
        self.node = Node(
            ports.node_config,
            clock=clock,
            rng=SystemRng(),
            network=network,
            disk=disk,
            on_fatal=die,
            on_waiting=self._on_waiting,
            on_registered=self._on_registered,
            compute=self._compute,
        )
        self._served, self._end_tracing = traced(self.node, config.cluster_id)
        self._groups = self._group_coordinator(clock)
        self._self_check = SelfCheck(self.node, config.peers, self._reach(ports), lambda why: die(StartRefused(why)))
        self._lags = LagMonitor(self.node)
        self._console = Console(self.node, self._settings, config, self._open_admin)
        self._add_services()
        self._kafka = self._kafka_server(ports.kafka, caps.kafka_limits(len(ports.kafka)))
        connections: dict[str, PortConnections] = {"nodes": network.acceptor, "grpc": self._grpc.connections}
        if self._kafka is not None:
            connections |= {f"kafka {name}".rstrip(): a for name, a in self._kafka.acceptors.items()}
        self._http = HttpServer(
            self.node,
            ports.http,
            lambda: self._is_stopping,
            make_registry(
                self.node,
                ConnectionCollector(connections, network.damaged_frames, self._tls),
                InstrumentCollector((self.node.measures, disk.measures, self._groups.measures, self._measures)),
            ),
            ports.http_access,
            lambda: self._lags.backlogs,
            self._console.routes(),
            limits=caps.http_limits,
            tls=self._tls.http(ports.http_access.verify_mode),
        )
        connections["http"] = self._http.acceptor
        try:
            self.node.start()
        except (StartRefused, DataDamaged) as e:
            raise StartError(str(e)) from e
        self._awaiting_birth = asyncio.create_task(self._await_birth())
        await self._serve()

    async def _await_birth(self) -> None:
        """Until the directory belongs to a cluster: passes on what `smq first-start` has left in it."""
        wanted = self._config.data_dir / FIRST_START_FILE
        while not self.node.is_born:
            if self._first_start or wanted.exists():
                self.node.allow_first_start()
            await asyncio.sleep(limits.FIRST_START_POLL_S)
        wanted.unlink(missing_ok=True)

    async def _serve(self) -> None:
        """The node has begun; clients may come."""
        config = self._config
        await self._grpc.start()
        await self._http.start()
        self._groups.start()
        self._is_serving = True
        if self._kafka is not None:
            loop = asyncio.get_running_loop()
            self._kafka_notice = loop.call_later(limits.KAFKA_NOTICE_S, self._say_why_kafka_is_closed)
            self._open_kafka()
        self._loop_lag.start()
        self._lags.start()
        self._console.start()
        self._self_check.start()
        if self.node.waiting:
            await self._stop_kafka()
        self._tls.start()
        if self._tokens is not None:
            self._tokens.start()
        self._setting_user = asyncio.create_task(set_left_user(config.data_dir, NodeCalls(self.node)))
        log.info(
            "serving",
            grpc=format_address(self.grpc_address),
            http=format_address(self.http_address),
            kafka=format_address(self.kafka_address) if self.kafka_address is not None else "",
            listeners=list(config.listeners),
            tls=self._tls.node is not None,
            data_dir=str(config.data_dir),
            pid=os.getpid(),
        )

    def _grpc_ports(self) -> Iterator[GrpcPort]:
        for way in self._config.ways_in:
            if way.grpc_address is not None:
                credentials = self._tls.credentials(way)
                gate = Gate(
                    self._users,
                    self._authorizer,
                    way.sasl,
                    way.sasl_session_ms or 0,
                    self._tls.users(way),
                    self._audit,
                )
                yield GrpcPort(listener=way.name, address=way.grpc_address, credentials=credentials, gate=gate)

    def _kafka_ports(self) -> Iterator[KafkaPort]:
        for way in self._config.ways_in:
            if way.kafka_address is not None:
                bound = listener("Kafka", way.kafka_address, is_closed=True)
                yield KafkaPort(
                    listener=way.name,
                    socket=bound,
                    tls=self._tls.contexts(way),
                    sasl=way.sasl,
                    session_ms_max=way.sasl_session_ms or 0,
                    certificate_users=self._tls.users(way),
                )

    def _listeners(self, kafka: Sequence[KafkaPort]) -> tuple[Listener, ...]:
        """What the named listeners advertise, with the ports that were bound."""
        sockets = {port.listener: port.socket for port in kafka}
        return tuple(
            Listener(
                name=way.name,
                grpc_address=_told(self._grpc.bound.get(way.name), way.grpc_advertised),
                kafka_address=_told(_bound(way.kafka_address, sockets.get(way.name)), way.kafka_advertised),
            )
            for way in self._config.listeners.values()
        )

    def _add_services(self) -> None:
        bytes_max = min(self._config.request_bytes_max, limits.ANSWER_BYTES_MAX)
        self._grpc.add(
            self.node,
            AgentService(self._served, request_bytes_max=bytes_max),
            BrokerService(self._served, self._groups, response_bytes_max=bytes_max),
            GroupService(self.node, self._groups),
            ProducerService(self.node, self._groups),
            AdminService(
                self.node,
                self._groups,
                self._settings,
                self._tls.node,
                self._warnings,
                lambda: self._console.events.events,
                self._authorizer,
            ),
            LoginService(self.node, self._users),
        )

    def _warnings(self) -> list[str]:
        of_tokens = self._tokens.warnings() if self._tokens is not None else []
        return [*self._self_check.warnings(), *self._clock_check.warnings(), *self._peers.warnings(), *of_tokens]

    def _group_coordinator(self, clock: AsyncioClock) -> GroupCoordinator:
        def delay_ms() -> int:
            return self._settings.group_initial_delay_ms(self.node.state)

        return GroupCoordinator(self.node, clock, SystemRng(), initial_delay_ms=delay_ms)

    def _kafka_server(self, ports: Sequence[KafkaPort], accept: AcceptLimits) -> KafkaServer | None:
        if not ports:
            return None
        return KafkaServer(
            self._served,
            self._groups,
            ports,
            settings=self._settings,
            request_bytes_max=self._config.request_bytes_max,
            response_bytes_max=min(self._config.request_bytes_max, limits.ANSWER_BYTES_MAX),
            data_dir=str(self._config.data_dir.absolute()),
            limits=accept,
            measures=self._measures,
            users=self._users,
            authorizer=self._authorizer,
            tokens=self._tokens,
            quotas=Quotas(lambda: self.node.state),
            audit=self._audit,
        )

    @asynccontextmanager
    async def _open_admin(self) -> AsyncIterator[Admin]:
        """A client of this node's own gRPC port, as the command line is one. It shows the node's own certificate, and
        so takes a port that asks for no user. INVALID_REQUEST if there is none."""
        way = next((way for way in self._config.ways_in if way.grpc_address is not None and not way.sasl), None)
        if way is None:
            message = "each gRPC port of this node asks for users: give one listener no sasl, for the node's console"
            raise SmqError(ErrorCode.INVALID_REQUEST, message)
        host, port = bound = self._grpc.bound[way.name]
        if is_wildcard(host):
            host = "::1" if ":" in host else "127.0.0.1"
        addresses = [format_address((host, port)), _told(bound, way.grpc_advertised)]
        tls = self._config.tls if self._config.tls_of(way) is not None else None
        files = Tls(ca=tls.ca, certificate=tls.certificate, key=tls.key) if tls is not None else None
        admin = Admin(dict.fromkeys(addresses), timeout_ms=limits.CONSOLE_CHANGE_MS_MAX, tls=files)
        try:
            yield admin
        finally:
            await admin.close()

    def _on_registered(self) -> None:
        self._is_registered = True
        self._open_kafka()
        if found := self._settings.topics_beyond(self.node.state):
            log.warning(
                "request_bytes_max_too_small",
                topics=found[:_TOPICS_NAMED_MAX],
                count=len(found),
                reason="their max.message.bytes is larger than what fits into a request to this node",
                advice="raise request_bytes_max in its node.toml, or lower max.message.bytes of these topics",
            )

    def _open_kafka(self) -> None:
        """Only once the node has registered: before, its state may be that of its last process. Kafka's clients would
        lose topics and partitions that it lacks. A port that refuses them sends them to another node."""
        may_open = self._is_registered and self._is_serving and not self._is_stopping and not self.node.waiting
        if self._kafka is not None and may_open:
            self._end_kafka_notice()
            self._kafka.start()

    def _say_why_kafka_is_closed(self) -> None:
        log.warning(
            "kafka_closed",
            reason="the node is not registered yet, and may lack the cluster's latest state",
            advice="a majority of the nodes must run and reach each other; /readyz says what is missing",
        )

    def _end_kafka_notice(self) -> None:
        if self._kafka_notice is not None:
            self._kafka_notice.cancel()

    def _on_waiting(self) -> None:
        """The node waits for an upgrade. gRPC answers so, and HTTP says so; Kafka's protocol has no such answer."""
        if self._is_serving:
            self._stopping_kafka = asyncio.create_task(self._stop_kafka())

    async def _stop_kafka(self) -> None:
        self._groups.stop()
        self._end_kafka_notice()
        if self._kafka is not None:
            await self._kafka.stop()

    def reload(self) -> None:
        """Reads certificates and keys of tokens again now, without waiting for the watch to see a change."""
        self._tls.reload()
        if self._tokens is not None:
            self._tokens.reload()

    async def stop(self) -> None:
        """Hands leaderships over, ends the streams with typed errors, then closes everything. Runs once."""
        if self._is_stopping:
            return
        self._is_stopping = True
        log.info("stopping")
        drained = asyncio.Event()
        self.node.drain(limits.DRAIN_MS, drained.set)
        try:
            async with asyncio.timeout(limits.DRAIN_MS / 1000 + limits.GRPC_SHUTDOWN_GRACE_S):
                await drained.wait()
        except TimeoutError:
            log.warning("drain_timed_out")
        self._awaiting_birth.cancel()
        self._setting_user.cancel()
        self._self_check.stop()
        self._groups.stop()
        self._loop_lag.stop()
        await self._lags.stop()
        await self._console.stop()
        self.node.stop()
        await self._grpc.stop(limits.GRPC_SHUTDOWN_GRACE_S)
        await self._stop_kafka()
        await self._http.stop()
        self._tls.stop()
        self._users.close()
        if self._tokens is not None:
            self._tokens.stop()
        await asyncio.to_thread(self._audit.close)
        await asyncio.to_thread(self._end_tracing)
        self._compute.close()
        self._disk.close()
        log.info("stopped")


def run_server(
    config: ServerConfig,
    *,
    on_started: Callable[[Server], Coroutine[None, None, None]] | None = None,
    is_child: bool = False,
    first_start: bool = False,
    log_level: int = logging.INFO,
    strangers: Mapping[str, str] | None = None,
) -> int:
    """Runs one node until SIGTERM, SIGINT or, for a child, the end of its parent; the process's exit code.
    `first_start`: as for Server. `strangers` are variables of the environment that have no effect, with advice for the
    log."""
    configure_logs(config.node_id, log_level)
    for variable, advice in (strangers or {}).items():
        log.warning("unknown_variable", variable=variable, advice=advice)
    # A signal that ends the process (LMDB's map over a failing disk) leaves a stack in the log. The descriptor is given
    # by number, because a replaced sys.stderr may have none.
    faulthandler.enable(2)
    # With Python's default of 5 ms a busy loop would delay the disk's writer thread (see storage.disk).
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    measures = ProcessMeasures()
    keep_freed_memory()
    HeapKeeper(measures.gc_pause).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Server(config, measures, first_start=first_start)
        return runner.run(_run(server, config, on_started, is_child))


async def _run(
    server: Server,
    config: ServerConfig,
    on_started: Callable[[Server], Coroutine[None, None, None]] | None,
    is_child: bool,
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def end_in_order(_: signal.Signals) -> None:
        loop.call_soon_threadsafe(stop.set)

    def end_now(_: signal.Signals) -> None:
        os._exit(EXIT_FAILED)

    with signals.handled((signal.SIGTERM, signal.SIGINT), end_in_order, end_now):
        await _serve(server, config, on_started, is_child, stop)
    return 0


async def _serve(
    server: Server,
    config: ServerConfig,
    on_started: Callable[[Server], Coroutine[None, None, None]] | None,
    is_child: bool,
    stop: asyncio.Event,
) -> None:
    loop = asyncio.get_running_loop()
    if is_child:
        # The parent holds the other end of stdin, which ends with the parent, however it dies.
        loop.add_reader(sys.stdin.fileno(), stop.set)
    await server.start()
    has_terminal = sys.stdin is not None and sys.stdin.isatty()  # None if it was closed before the start
    if (
        config.tls is not None or config.oauth is not None
    ) and not has_terminal:  # from a terminal it means that the user is gone
        loop.add_signal_handler(signal.SIGHUP, server.reload)
    started = asyncio.create_task(on_started(server)) if on_started is not None else None
    await stop.wait()
    if is_child:
        loop.remove_reader(sys.stdin.fileno())
    if started is not None:
        started.cancel()
    await server.stop()


def _told(bound: Address | None, advertised: Address | None) -> str:
    return format_address(told(bound, advertised)) if bound is not None else ""


def _bound(address: Address | None, listener: socket.socket | None) -> Address | None:
    """The address with the port that was actually bound."""
    return (address[0], listener.getsockname()[1]) if address is not None and listener is not None else None
