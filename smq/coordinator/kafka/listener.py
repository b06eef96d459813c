"""The Kafka ports of a node: makes a connection of each socket that the acceptor admits, and sweeps the dead ones.

Owns the set of connections. Only the composition root imports it.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from smq.coordinator.config.certificate_users import CertificateUsers
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.kafka.authorization import Access
from smq.coordinator.kafka.connection import Connection
from smq.coordinator.kafka.fetch_sessions import FetchSessions
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.sasl import Login
from smq.coordinator.limits import USERS_CHECK_S
from smq.coordinator.service.audit import Audit
from smq.coordinator.service.authorizer import Authorizer
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.quotas import Quotas
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.tokens import Tokens
from smq.coordinator.service.users import Users
from smq.replication.api import NodeApi
from smq.replication.monitoring.measures import ProcessMeasures
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket
from smq.replication.net.listening import open_closed

_SWEEP_S: Final = 1.0  # how late a dead connection may be noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaPort:
    """A bound socket for one listener's clients, closed until the start; without `tls` it speaks plain text. With
    mechanisms in `sasl` a client has to prove a user."""

    listener: str
    socket: socket.socket
    tls: Callable[[], ssl.SSLContext] | None = None
    sasl: tuple[str, ...] = ()
    session_ms_max: int = 0  # then the client has to prove its user again; 0 for never
    certificate_users: CertificateUsers | None = None  # then a client is the user of its certificate


class KafkaServer:
    """`start` once the node has the cluster's state; `stop` before it ends. `limits` are each port's own: strangers at
    the port for the outside take no slots of the inside. The bytes in flight are the node's."""

    def __init__(
        self,
        node: NodeApi,
        groups: GroupCoordinator,
        ports: Sequence[KafkaPort],
        *,
        settings: Settings,
        request_bytes_max: int,
        response_bytes_max: int,
        data_dir: str,
        limits: AcceptLimits,
        measures: ProcessMeasures,
        users: Users,
        authorizer: Authorizer,
        tokens: Tokens | None,
        quotas: Quotas,
        audit: Audit,
    ) -> None:
        inflight = InflightBytes()
        gateway = Gateway(
            calls=NodeCalls(node),
            groups=groups,
            settings=settings,
            request_bytes_max=request_bytes_max,
            response_bytes_max=response_bytes_max,
            data_dir=data_dir,
            inflight=inflight,
            super_users=authorizer.super_users,
            fetch_sessions=FetchSessions(inflight, measures.fetch_sessions),
            quotas=quotas,
            audit=audit,
            request_times=measures.kafka_request,
        )
        self._state = lambda: node.state
        self._users = users
        self._authorizer = authorizer
        self._tokens = tokens
        self._sockets = [port.socket for port in ports]
        self._connections: set[Connection] = set()
        self.acceptors = {
            port.listener: Acceptor(
                port.socket,
                partial(self._new_connection, replace(gateway, listener=port.listener), port),
                loop=asyncio.get_running_loop(),
                purpose=f"Kafka {port.listener}".rstrip(),
                limits=limits,
                tls=port.tls,
                wait_s_of=quotas.connection_wait_s,
            )
            for port in ports
        }
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Opens the ports; further calls do nothing."""
        if self._background:
            return
        for sock in self._sockets:
            open_closed(sock)
        for acceptor in self.acceptors.values():
            acceptor.start()
        self._background = [asyncio.create_task(work) for work in (self._sweep_forever(), self._follow_users())]

    async def stop(self) -> None:
        for task in self._background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for acceptor in self.acceptors.values():
            acceptor.close()
        for connection in list(self._connections):
            connection.close()

    def _new_connection(self, gateway: Gateway, port: KafkaPort, ticket: Ticket) -> Connection:
        def on_close(connection: Connection) -> None:
            self._connections.discard(connection)
            ticket.close()

        return Connection(
            gateway,
            on_open=self._connections.add,  # after the TLS handshake, not before
            on_close=on_close,
            login=Login(self._users, port.sasl, port.session_ms_max, self._tokens) if port.sasl else None,
            access_of=self._access_of,
            certificate_users=port.certificate_users,
        )

    def _access_of(self, user: str, host: str) -> Access:
        return Access(self._authorizer, user, host, self._state)

    async def _follow_users(self) -> None:
        """Ends the connections of users that have been deleted or have another password, idle ones included."""
        seen = self._users.marker()
        while True:
            await asyncio.sleep(USERS_CHECK_S)
            if (marker := self._users.marker()) is not seen:
                seen = marker
                for connection in list(self._connections):
                    connection.check_user()

    async def _sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in list(self._connections):
                connection.sweep(loop.time())
