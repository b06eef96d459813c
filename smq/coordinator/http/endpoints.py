"""The HTTP listener of a node: /healthz, /readyz and /metrics, and the routes that it is given.

Owns status codes and bodies. It never changes anything. Only the composition root imports it.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry

from smq.coordinator.http.metrics import pieces
from smq.coordinator.http.partition_metrics import Backlogs
from smq.coordinator.limits import HTTP_REQUEST_BYTES_MAX
from smq.replication.api import NodeApi, NodeStatus
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _is_ours(record: logging.LogRecord) -> bool:
    """False for errors that strangers cause, by not speaking HTTP or not staying to read: they could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_log = logging.getLogger("smq.http")
_log.addFilter(_is_ours)


class HttpServer:
    """`is_stopping` makes /readyz say no while the node hands over, so that no new client is sent here."""

    def __init__(
        self,
        node: NodeApi,
        listener: socket.socket,
        is_stopping: Callable[[], bool],
        registry: CollectorRegistry,
        backlogs: Callable[[], Backlogs],
        routes: Iterable[web.RouteDef],
        *,
        limits: AcceptLimits,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._node = node
        self._is_stopping = is_stopping
        self._registry = registry
        self._backlogs = backlogs
        app = web.Application(client_max_size=HTTP_REQUEST_BYTES_MAX)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None, logger=_log, handle_signals=False)
        self.acceptor = Acceptor(
            listener,
            self._make_protocol,
            loop=asyncio.get_running_loop(),
            purpose="HTTP",
            limits=limits,
            tls=tls,
        )

    async def start(self) -> None:
        await self._runner.setup()
        self.acceptor.start()

    async def stop(self) -> None:
        self.acceptor.close()
        await self._runner.cleanup()

    def _make_protocol(self, ticket: Ticket) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None  # set up before the first connection
        return _Counted(server(), ticket)

    async def _healthz(self, _request: web.Request) -> web.Response:
        """The process runs and its loop turns: an answer can prove no more."""
        return web.json_response({"status": "ok", "node": self._node.node_id})

    async def _readyz(self, _request: web.Request) -> web.Response:
        status = self._node.status()
        ready = status.is_ready and not self._is_stopping()
        body = {
            "ready": ready,
            "node": status.node,
            "pid": os.getpid(),  # distinguishes a node from another process that took over its port
            "raft_leader": status.raft_leader,
            "raft_term": status.raft_term,
            "applied_index": status.applied_index,
            "reason": "" if ready else self._reason(status),
        }
        return web.json_response(body, status=200 if ready else 503)

    def _reason(self, status: NodeStatus) -> str:
        if self._is_stopping():
            return "the node is stopping"
        if status.waiting:
            return f"the node waits for an upgrade: {status.waiting}"
        if status.raft_leader is None:
            return "there is no Raft leader: a majority of the nodes must run and reach each other"
        return "the node is joining: it is not registered yet, or is fenced"

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """In pieces, and no faster than the client reads: 7 MB at 10,000 partitions."""
        response = web.StreamResponse(headers={"Content-Type": _METRICS_TYPE})
        await response.prepare(request)
        for piece in pieces(self._node, self._registry, self._backlogs()):
            if piece:
                await response.write(piece)
            await asyncio.sleep(0)  # other tasks run
        await response.write_eof()
        return response


class _Counted(asyncio.Protocol):
    """aiohttp's protocol, which also reports the end of its connection to the acceptor."""

    def __init__(self, inner: asyncio.Protocol, ticket: Ticket) -> None:
        self._ticket = ticket
        self._lost = inner.connection_lost
        self.connection_made = inner.connection_made  # type: ignore[method-assign] # no call in between
        self.data_received = inner.data_received  # type: ignore[method-assign] # no call in between
        self.eof_received = inner.eof_received  # type: ignore[method-assign] # no call in between
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign] # no call in between
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign] # no call in between

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.close()
        self._lost(exc)
