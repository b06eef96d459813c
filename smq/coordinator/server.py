"""The composition root: one node with its real ports and its gRPC, HTTP and Kafka services.

Owns the order of starting and stopping, and the reaction to signals and to a fatal error. It decides nothing about
data. Only the CLI imports it.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, NoReturn

import grpc
import structlog
import uvloop

from smq.clients.pb import smq_pb2_grpc
from smq.coordinator import limits
from smq.coordinator.config import Address, ServerConfig, format_address
from smq.coordinator.file_descriptors import ConnectionCaps, take_descriptors
from smq.coordinator.garbage_collection import HeapKeeper
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.lag_monitor import LagMonitor
from smq.coordinator.grpc.admin import AdminService
from smq.coordinator.grpc.agent import AgentService
from smq.coordinator.grpc.broker import BrokerService
from smq.coordinator.grpc.connection_limit import ConnectionLimit
from smq.coordinator.grpc.request_admission import RequestAdmission
from smq.coordinator.http.connection_metrics import ConnectionCollector, PortConnections
from smq.coordinator.http.console.site import Console
from smq.coordinator.http.endpoints import HttpServer
from smq.coordinator.http.instruments import InstrumentCollector
from smq.coordinator.http.metrics import make_registry
from smq.coordinator.kafka.listener import KafkaServer
from smq.coordinator.listeners import listener, port_taken
from smq.coordinator.loop_lag import LoopLag
from smq.coordinator.process_log import configure_logs
from smq.coordinator.service.settings import Settings
from smq.coordinator.tls.contexts import load_tls
from smq.coordinator.user_errors import EXIT_FAILED, EXIT_FATAL, StartError
from smq.replication.config import NodeConfig
from smq.replication.measures import ProcessMeasures
from smq.replication.membership.identity import StartRefused
from smq.replication.net.acceptor import AcceptLimits
from smq.replication.net.tcp import TcpNetwork
from smq.replication.node import Node
from smq.replication.ports import DataDamaged
from smq.replication.raft.view import EngineTiming
from smq.replication.runtime.asyncio_runtime import AsyncioClock, SystemRng
from smq.replication.storage.directory import DiskOpenError, is_used
from smq.replication.storage.disk_lmdb import SWITCH_INTERVAL_S, LmdbDisk
from smq.replication.storage.hang import DiskHung

log = structlog.get_logger(__name__)

_GRPC_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.GRPC_SEND_BYTES_MAX),
    ("grpc.max_concurrent_streams", limits.GRPC_STREAMS_PER_CONNECTION_MAX),
    ("grpc.server_handshake_timeout_ms", limits.GRPC_HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", limits.GRPC_IDLE_MS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", limits.GRPC_WINDOW_BYTES),
    ("grpc.keepalive_time_ms", limits.GRPC_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", limits.GRPC_KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", limits.GRPC_CLIENT_PING_INTERVAL_MS_MIN),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # two processes on one port must be an error, not a lottery
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """What a start has before it opens the data directory."""

    caps: ConnectionCaps
    peers: socket.socket
    http: socket.socket
    kafka: socket.socket | None
    node_config: NodeConfig


class Server:
    """One node's process. `start` raises StartError; `stop` hands over, answers and closes."""

    def __init__(self, config: ServerConfig, measures: ProcessMeasures | None = None) -> None:
        self._config = config
        self._measures = measures if measures is not None else ProcessMeasures()
        self._loop_lag = LoopLag(self._measures.loop_lag)
        self._settings = Settings(config.settings)
        self._is_stopping = False
        self._is_serving = False
        self._stopping_kafka: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens a used directory first: a node that is started twice should report that, and not a port in use. A new
        one is made last, so that a refused start leaves nothing behind."""
        clock = AsyncioClock(asyncio.get_running_loop(), on_error=die)
        disk = self._open_disk(clock) if is_used(self._config.data_dir) else None
        try:
            ports = self._open_ports()
            disk = disk or self._open_disk(clock)
            await self._start(clock, disk, ports)
        except StartError:
            if disk is not None:
                disk.close()
            raise

    def _open_disk(self, clock: AsyncioClock) -> LmdbDisk:
        try:
            return LmdbDisk(self._config.data_dir, call_soon_threadsafe=clock.call_soon_threadsafe, on_fatal=die)
        except DiskOpenError as e:
            raise StartError(str(e)) from e

    def _open_ports(self) -> "_Ports":
        """Checks what can be checked without the directory, and binds all ports, without serving them yet."""
        config = self._config
        caps = take_descriptors()
        self._tls = load_tls(config.tls, cluster_id=config.cluster_id, node_id=config.node_id)
        peers = listener("other nodes", config.peers[config.node_id])
        http = listener("HTTP", config.http_address)
        self.http_address: Address = (config.http_address[0], http.getsockname()[1])
        kafka = listener("Kafka", config.kafka_address) if config.kafka_address is not None else None
        self.kafka_address = _bound(config.kafka_address, kafka)
        self.grpc_address = self._open_grpc(caps)
        node_config = config.node_config(
            grpc_address=self.grpc_address, http_address=self.http_address, kafka_address=self.kafka_address
        )
        try:
            EngineTiming.of(node_config)
        except ValueError as e:
            raise StartError(f"the settings under [tuning] contradict each other: {e}") from e
        return _Ports(caps=caps, peers=peers, http=http, kafka=kafka, node_config=node_config)

    async def _start(self, clock: AsyncioClock, disk: LmdbDisk, ports: "_Ports") -> None:
        config, caps, kafka_listener = self._config, ports.caps, ports.kafka
        self._disk = disk
        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=config.node_id,
            cluster_id=config.cluster_id,
            peers=config.peers,
            listener=ports.peers,
            tls=self._tls,
            on_error=die,
        )
        self.node = Node(
            ports.node_config,
            clock=clock,
            rng=SystemRng(),
            network=network,
            disk=disk,
            on_fatal=die,
            on_waiting=self._on_waiting,
        )
        self._groups = self._group_coordinator(clock)
        self._lags = LagMonitor(self.node)
        self._console = Console(self.node, self._settings, config)
        self._add_services()
        context = self._tls.clients if self._tls is not None else None
        self._kafka = self._kafka_server(kafka_listener, caps.kafka_limits, context)
        connections: dict[str, PortConnections] = {"nodes": network.acceptor, "grpc": self._grpc_connections}
        if self._kafka is not None:
            connections["kafka"] = self._kafka.acceptor
        self._http = HttpServer(
            self.node,
            ports.http,
            lambda: self._is_stopping,
            make_registry(
                self.node,
                ConnectionCollector(connections, network.damaged_frames, self._tls),
                InstrumentCollector((self.node.measures, disk.measures, self._groups.measures, self._measures)),
            ),
            lambda: self._lags.figures,
            self._console.routes(),
            limits=caps.http_limits,
            tls=context,
        )
        connections["http"] = self._http.acceptor
        try:
            self.node.start()
        except (StartRefused, DataDamaged) as e:
            raise StartError(str(e)) from e
        await self._serve()

    async def _serve(self) -> None:
        """The node has begun; clients may come."""
        config = self._config
        await self._grpc.start()
        self._grpc_connections.start()
        await self._http.start()
        self._groups.start()
        if self._kafka is not None:
            await self._kafka.start()
        self._loop_lag.start()
        self._lags.start()
        self._console.start()
        self._is_serving = True
        if self.node.waiting:
            await self._stop_kafka()
        if self._tls is not None:
            self._tls.start()
        log.info(
            "serving",
            grpc=format_address(self.grpc_address),
            http=format_address(self.http_address),
            kafka=format_address(self.kafka_address) if self.kafka_address is not None else "",
            tls=self._tls is not None,
            data_dir=str(config.data_dir),
            pid=os.getpid(),
        )

    def _open_grpc(self, caps: ConnectionCaps) -> Address:
        """Binds the port, without serving it yet."""
        config = self._config
        options = (
            *_GRPC_OPTIONS,
            ("grpc.max_receive_message_length", config.request_bytes_max + limits.GRPC_RECEIVE_SLACK_BYTES),
            ("grpc.max_allowed_incoming_connections", caps.grpc),
        )
        self._grpc = grpc.aio.server(options=options, interceptors=[RequestAdmission()])
        port = self._bind_grpc()
        self._grpc_connections = ConnectionLimit(port, per_address_max=caps.grpc_per_address)
        return config.grpc_address[0], port

    def _bind_grpc(self) -> int:
        address = format_address(self._config.grpc_address)
        try:
            if self._tls is not None:
                return self._grpc.add_secure_port(address, self._tls.grpc_credentials())
            return self._grpc.add_insecure_port(address)
        except RuntimeError as e:
            reason = "it is in use, or is not an address of this machine"
            raise port_taken("gRPC", self._config.grpc_address, reason) from e

    def _add_services(self) -> None:
        agent = AgentService(self.node, request_bytes_max=self._config.request_bytes_max)
        broker = BrokerService(self.node, self._groups, response_bytes_max=self._config.request_bytes_max)
        smq_pb2_grpc.add_AgentServicer_to_server(agent, self._grpc)
        smq_pb2_grpc.add_BrokerServicer_to_server(broker, self._grpc)
        admin = AdminService(self.node, self._groups, self._settings, self._tls)
        smq_pb2_grpc.add_AdminServicer_to_server(admin, self._grpc)

    def _group_coordinator(self, clock: AsyncioClock) -> GroupCoordinator:
        def delay_ms() -> int:
            return self._settings.group_initial_delay_ms(self.node.state)

        return GroupCoordinator(self.node, clock, SystemRng(), initial_delay_ms=delay_ms)

    def _kafka_server(
        self, listener: socket.socket | None, accept: AcceptLimits, tls: Callable[[], ssl.SSLContext] | None
    ) -> KafkaServer | None:
        if listener is None:
            return None
        return KafkaServer(
            self.node,
            self._groups,
            listener,
            settings=self._settings,
            request_bytes_max=self._config.request_bytes_max,
            response_bytes_max=self._config.request_bytes_max,
            data_dir=str(self._config.data_dir.absolute()),
            limits=accept,
            measures=self._measures,
            tls=tls,
        )

    def _on_waiting(self) -> None:
        """The node waits for an upgrade. gRPC answers so, and HTTP says so; Kafka's protocol has no such answer."""
        if self._is_serving:
            self._stopping_kafka = asyncio.create_task(self._stop_kafka())

    async def _stop_kafka(self) -> None:
        self._groups.stop()
        if self._kafka is not None:
            await self._kafka.stop()

    @property
    def tls_ends_s(self) -> float | None:
        """Unix time at which the node's certificate expires; None without TLS."""
        return self._tls.ends_s if self._tls is not None else None

    def reload(self) -> None:
        """Reads the certificates again now, without waiting for the watch to see a change."""
        if self._tls is not None:
            self._tls.reload()

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
        self._groups.stop()
        self._loop_lag.stop()
        await self._lags.stop()
        await self._console.stop()
        self.node.stop()
        await self._grpc.stop(limits.GRPC_SHUTDOWN_GRACE_S)
        self._grpc_connections.stop()
        await self._stop_kafka()
        await self._http.stop()
        if self._tls is not None:
            self._tls.stop()
        self._disk.close()
        log.info("stopped")


def die(error: BaseException) -> NoReturn:
    """The node's state, or the content of its disk, is no longer known: nothing may be sent after this.

    An error that the operator must fix is logged as its message; a fault of ours is logged with its traceback.
    """
    if isinstance(error, DataDamaged | StartRefused | DiskHung):
        log.critical("fatal", error=str(error))
    else:
        log.critical("fatal", error=repr(error), exc_info=error)
    sys.stderr.flush()
    os._exit(EXIT_FATAL)


def run_server(
    config: ServerConfig,
    *,
    on_started: Callable[[Server], Coroutine[None, None, None]] | None = None,
    is_child: bool = False,
    log_level: int = logging.INFO,
) -> int:
    """Runs one node until SIGTERM, SIGINT or, for a child, the end of its parent; the process's exit code."""
    configure_logs(config.node_id, log_level)
    # A signal that ends the process (LMDB's map over a failing disk) leaves a stack in the log. The descriptor is given
    # by number, because a replaced sys.stderr may have none.
    faulthandler.enable(2)
    # With Python's default of 5 ms a busy loop would delay the disk's writer thread (see disk_lmdb).
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    measures = ProcessMeasures()
    HeapKeeper(measures.gc_pause).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, measures, on_started, is_child))


async def _run(
    config: ServerConfig,
    measures: ProcessMeasures,
    on_started: Callable[[Server], Coroutine[None, None, None]] | None,
    is_child: bool,
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FAILED)  # the second signal: end immediately
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if is_child:
        # The parent holds the other end of stdin, which ends with the parent, however it dies.
        loop.add_reader(sys.stdin.fileno(), stop.set)
    server = Server(config, measures)
    await server.start()
    has_terminal = sys.stdin is not None and sys.stdin.isatty()  # None if it was closed before the start
    if config.tls is not None and not has_terminal:  # from a terminal it means that the user is gone
        loop.add_signal_handler(signal.SIGHUP, server.reload)
    started = asyncio.create_task(on_started(server)) if on_started is not None else None
    await stop.wait()
    if is_child:
        loop.remove_reader(sys.stdin.fileno())
    if started is not None:
        started.cancel()
    await server.stop()
    return 0


def _bound(address: Address | None, listener: socket.socket | None) -> Address | None:
    """The address with the port that was actually bound."""
    return (address[0], listener.getsockname()[1]) if address is not None and listener is not None else None
