"""The HTTP listener of a node: /healthz, /readyz and /metrics, and the routes that it is given.

Owns status codes and bodies; `http.access` judges who gets them. It never changes anything. Only the composition root
imports it.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from prometheus_client import CollectorRegistry

from smq.coordinator.http.access import HttpAccess
from smq.coordinator.http.metrics import pieces
from smq.coordinator.http.people import set_cookie
from smq.coordinator.limits import HTTP_REQUEST_BYTES_MAX
from smq.coordinator.service.lag_monitor import Backlogs
from smq.replication.api import NodeApi, NodeStatus
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

HTTP_FIRST_REQUEST_S_MAX: Final = 10.0  # a browser or a scraper sends its few hundred bytes within milliseconds
_FRONT: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title></head><body>
<h1>{name}</h1>
<p>This is the node's HTTP port, for people and monitoring. Records travel over gRPC and Kafka's protocol.</p>
<ul>
<li><a href="/readyz">/readyz</a>: whether the node serves requests, and why not</li>
<li><a href="/healthz">/healthz</a>: whether its process runs</li>
<li><a href="/console/">/console/</a>: the cluster, its topics, records and groups, to look at</li>
<li><a href="/metrics">/metrics</a>: measurements, for Prometheus</li>
</ul>
<p>In a terminal: <code>smq status</code> shows the cluster and all its ports, <code>smq topic list</code> its topics,
<code>echo hello | smq produce TOPIC</code> sends a record, <code>smq consume TOPIC</code> reads.
<code>smq --help</code> has the rest.</p>
</body></html>
"""
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
        access: HttpAccess,
        backlogs: Callable[[], Backlogs],
        routes: Iterable[web.RouteDef],
        *,
        limits: AcceptLimits,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._node = node
        self._is_stopping = is_stopping
        self._registry = registry
        self._access = access
        self._backlogs = backlogs
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}  # bounded by the acceptor's connections
        app = web.Application(client_max_size=HTTP_REQUEST_BYTES_MAX, middlewares=[self._heard])
        app.on_response_prepare.append(set_cookie)
        app.router.add_get("/", self._front)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_routes([web.RouteDef(r.method, r.path, self._for_clients(r.handler), r.kwargs) for r in routes])
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
        inner = server()
        timer = asyncio.get_running_loop().call_later(HTTP_FIRST_REQUEST_S_MAX, self._give_up, inner)
        self._silent[inner] = timer
        return _Counted(inner, ticket, lambda: self._forget(inner))

    # A connection whose first request is not complete in time is closed; aiohttp itself waits for ever.
    def _give_up(self, inner: RequestHandler) -> None:
        self._silent.pop(inner, None)
        inner.force_close()
        if inner.transport is not None:
            inner.transport.abort()

    def _forget(self, inner: asyncio.BaseProtocol) -> None:
        timer = self._silent.pop(inner, None)
        if timer is not None:
            timer.cancel()

    @web.middleware
    async def _heard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self._forget(request.protocol)
        return await handler(request)

    def _for_clients(self, handler: Any) -> _Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._access.console(request, handler)

        return answer

    async def _front(self, request: web.Request) -> web.Response:
        """For a person who has found the port: what is here, and what to do next."""
        self._access.refuse_probe(request)
        name = f"smq, node {self._node.node_id}" if self._access.may_see_details(request) else "smq"
        return web.Response(text=_FRONT.format(name=name), content_type="text/html", charset="utf-8")

    async def _healthz(self, request: web.Request) -> web.Response:
        """The process runs and its loop turns: an answer can prove no more."""
        self._access.refuse_probe(request)
        details = {"node": self._node.node_id} if self._access.may_see_details(request) else {}
        return web.json_response({"status": "ok"} | details)

    async def _readyz(self, request: web.Request) -> web.Response:
        self._access.refuse_probe(request)
        status = self._node.status()
        ready = status.is_ready and not self._is_stopping()
        if not self._access.may_see_details(request):
            return web.json_response({"ready": ready}, status=200 if ready else 503)
        body = {
            "ready": ready,
            "node": status.node,
            "pid": os.getpid(),  # distinguishes a node from another process that took over its port
            "raft_leader": status.raft_leader,
            "raft_term": status.raft_term,
            "applied_index": status.applied_index,
            "birth": status.birth.hex() if not status.unborn else "",
            "reason": "" if ready else self._reason(status),
            "warnings": status.warnings,
        }
        return web.json_response(body, status=200 if ready else 503)

    def _reason(self, status: NodeStatus) -> str:
        if self._is_stopping():
            return "the node is stopping"
        if status.waiting:
            return f"the node waits for an upgrade: {status.waiting}"
        if status.unborn:
            return f"the node belongs to no cluster yet: {status.unborn}"
        if status.raft_leader is None:
            return "there is no Raft leader: a majority of the nodes must run and reach each other"
        return "the node is joining: it is not registered yet, or is fenced"

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """In pieces, and no faster than the client reads: 7 MB at 10,000 partitions."""
        await self._access.refuse_metrics(request)
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

    def __init__(self, inner: asyncio.Protocol, ticket: Ticket, on_lost: Callable[[], None]) -> None:
        self._ticket = ticket
        self._on_lost = on_lost
        self._lost = inner.connection_lost
        self.connection_made = inner.connection_made  # type: ignore[method-assign] # no call in between
        self.data_received = inner.data_received  # type: ignore[method-assign] # no call in between
        self.eof_received = inner.eof_received  # type: ignore[method-assign] # no call in between
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign] # no call in between
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign] # no call in between

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.close()
        self._on_lost()
        self._lost(exc)
