"""The Kafka port of a node: accepts connections, bounds their number, sweeps the dead ones.

Owns the listening socket and the set of connections. Only the composition root imports it.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from typing import Final

import structlog

from smq.coordinator.calls import NodeCalls
from smq.coordinator.kafka.cluster import Gateway
from smq.coordinator.kafka.connection import Connection
from smq.coordinator.kafka.inflight import InflightBytes
from smq.coordinator.limits import KAFKA_CONNECTIONS_MAX, KAFKA_CONNECTIONS_PER_ADDRESS_MAX
from smq.replication.api import NodeApi

log = structlog.get_logger(__name__)

_SWEEP_S: Final = 1.0  # how late a dead connection may be found


class KafkaServer:
    """`start` once the node runs; `stop` before it ends."""

    def __init__(
        self,
        node: NodeApi,
        listener: socket.socket,
        *,
        auto_create: bool,
        request_bytes_max: int,
        response_bytes_max: int,
    ) -> None:
        self._inflight = InflightBytes()
        self._gateway = Gateway(
            calls=NodeCalls(node),
            auto_create=auto_create,
            response_bytes_max=response_bytes_max,
            inflight=self._inflight,
        )
        self._listener = listener
        self._request_bytes_max = request_bytes_max
        self._connections: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_connection, sock=self._listener)
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def _new_connection(self) -> Connection:
        return Connection(
            self._gateway,
            inflight=self._inflight,
            request_bytes_max=self._request_bytes_max,
            on_open=self._on_open,
            on_close=self._on_close,
        )

    def _on_open(self, connection: Connection) -> bool:
        """False where there are too many already."""
        address = connection.address
        is_full = len(self._connections) >= KAFKA_CONNECTIONS_MAX
        if is_full or self._per_address[address] >= KAFKA_CONNECTIONS_PER_ADDRESS_MAX:
            log.warning("kafka_connection_refused", address=address, connections=len(self._connections))
            return False
        self._connections.add(connection)
        self._per_address[address] += 1
        return True

    def _on_close(self, connection: Connection) -> None:
        if connection not in self._connections:
            return  # it was refused
        self._connections.remove(connection)
        self._per_address[connection.address] -= 1
        if not self._per_address[connection.address]:
            del self._per_address[connection.address]

    async def _sweep_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in list(self._connections):
                connection.sweep(loop.time())
