"""The gRPC ports of a node: one server per way in, all with the same services.

Owns the servers, their options, and which clients each one's services speak to. What a node grants its clients (places,
budgets, sessions) it grants once, however many ports it has. Only the composition root makes one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from smq.clients.pb import smq_pb2_grpc
from smq.coordinator import limits
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.grpc.admin import AdminService
from smq.coordinator.grpc.agent import AgentService
from smq.coordinator.grpc.broker import BrokerService
from smq.coordinator.grpc.connection_limit import ConnectionLimit
from smq.coordinator.grpc.gate import Gate
from smq.coordinator.grpc.groups_service import GroupService
from smq.coordinator.grpc.login import LoginService
from smq.coordinator.grpc.request_admission import RequestAdmission
from smq.coordinator.grpc.transactions_service import ProducerService
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.bound_ports import port_taken
from smq.replication.api import NodeApi
from smq.replication.monitoring.measures import ProcessMeasures
from smq.replication.net.acceptor import AcceptLimits

_OPTIONS: Final = (
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
class GrpcPort:
    """Where to listen, for which listener's clients; without credentials there is no TLS. `gate` says which users may
    come."""

    listener: str
    address: Address
    credentials: grpc.ServerCredentials | None
    gate: Gate


class GrpcServer:
    """Binds its ports, without serving them yet: PortTaken if one is not available. `start` after `add`."""

    def __init__(
        self, ports: Sequence[GrpcPort], accept: AcceptLimits, measures: ProcessMeasures, *, request_bytes_max: int
    ) -> None:
        options = (
            *_OPTIONS,
            ("grpc.max_receive_message_length", request_bytes_max + limits.GRPC_RECEIVE_SLACK_BYTES),
            # In equal parts: strangers at the port for outside leave the connections of the inside alone.
            ("grpc.max_allowed_incoming_connections", max(1, accept.connections_max // len(ports))),
        )
        admission = RequestAdmission()
        self._measures = measures
        self._servers: dict[str, grpc.aio.Server] = {}
        self.gates = {port.listener: port.gate for port in ports}
        self._following: list[asyncio.Task[None]] = []
        self.bound: dict[str, Address] = {}
        for port in ports:
            server = grpc.aio.server(options=options, interceptors=[admission.for_one_server(port.gate)])
            self._servers[port.listener] = server
            self.bound[port.listener] = port.address[0], _bind(server, port)
        numbers = frozenset(number for _, number in self.bound.values())
        self.connections = ConnectionLimit(numbers, per_address_max=accept.per_address_max)

    def add(
        self,
        node: NodeApi,
        agent: AgentService,
        broker: BrokerService,
        groups: GroupService,
        producers: ProducerService,
        admin: AdminService,
        logins: LoginService,
    ) -> None:
        for listener, server in self._servers.items():
            clients = Audience(node=node, listener=listener), self._measures, self.gates[listener]
            smq_pb2_grpc.add_UsersServicer_to_server(logins.speaking_to(*clients), server)
            smq_pb2_grpc.add_AgentServicer_to_server(agent.speaking_to(*clients), server)
            smq_pb2_grpc.add_BrokerServicer_to_server(broker.speaking_to(*clients), server)
            smq_pb2_grpc.add_GroupsServicer_to_server(groups.speaking_to(*clients), server)
            smq_pb2_grpc.add_TransactionsServicer_to_server(producers.speaking_to(*clients), server)
            smq_pb2_grpc.add_AdminServicer_to_server(admin.speaking_to(*clients), server)

    async def start(self) -> None:
        for server in self._servers.values():
            await server.start()
        self.connections.start()
        self._following = [asyncio.create_task(gate.follow()) for gate in self.gates.values()]

    async def stop(self, grace_s: float) -> None:
        stopping = [server.stop(grace_s) for server in self._servers.values()]
        await asyncio.gather(*stopping)
        for task in self._following:
            task.cancel()
        self.connections.stop()


def _bind(server: grpc.aio.Server, port: GrpcPort) -> int:
    address = format_address(port.address)
    try:
        if port.credentials is not None:
            return server.add_secure_port(address, port.credentials)
        return server.add_insecure_port(address)
    except RuntimeError as e:
        reason = "it is in use, or is not an address of this machine"
        raise port_taken("gRPC", port.address, reason) from e
