"""The console's addresses: which page answers which, with what headers, and how errors are shown.

Owns the routes and what protects them. Every answer forbids scripts and frames. A request that names another host than
an address of this machine is refused: a stranger's page could otherwise reach a console on loopback through a name that
it controls, and read records. No address changes anything. The composition root makes one.
"""

import ipaddress
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from smq.coordinator.config import ServerConfig
from smq.coordinator.http.console.events import EventLog
from smq.coordinator.http.console.groups import group_page, groups_page
from smq.coordinator.http.console.history import History
from smq.coordinator.http.console.markup import POLICY, STYLE, Markup, link, page, tag
from smq.coordinator.http.console.messages import TAIL_S, BadRequest, messages_page, parse
from smq.coordinator.http.console.overview import cluster_page, events_page, settings_page, topic_page, topics_page
from smq.coordinator.http.console.transactions import transaction_page, transactions_page
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings
from smq.raft_state.errors import SmqError
from smq.replication.api import NodeApi

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFRESH_S: Final = 10  # of the first page
NAME_CHARS_MAX: Final = 300  # of a topic or group in an address

Handler = Callable[[web.Request], Awaitable[web.Response]]


class NotThere(Exception):
    """The message says where to look instead."""


class Console:
    """Browsers may call it by any address, by localhost, and by the name that `config` has as the HTTP address. With
    TLS by any name: a stranger's name has no certificate of ours."""

    def __init__(self, node: NodeApi, settings: Settings, config: ServerConfig) -> None:
        self._node = node
        self._calls = NodeCalls(node)
        self._settings = settings
        self._config = config
        self._hosts = {"localhost", config.http_address[0].lower()}
        self.events = EventLog(node)
        self.history = History(node)

    def start(self) -> None:
        self.events.start()
        self.history.start()

    async def stop(self) -> None:
        await self.events.stop()
        await self.history.stop()

    def routes(self) -> list[web.RouteDef]:
        pages: dict[str, Handler] = {
            "/console/": self._cluster,
            "/console/topics": self._topics,
            "/console/topics/{topic}": self._topic,
            "/console/topics/{topic}/messages": self._messages,
            "/console/groups": self._groups,
            "/console/groups/{group}": self._group,
            "/console/transactions": self._transactions,
            "/console/transactions/{id}": self._transaction,
            "/console/settings": self._settings_page,
            "/console/events": self._events_page,
        }
        guarded = [web.get(path, self._guarded(handler)) for path, handler in pages.items()]
        style = self._guarded(_style)
        return [web.get("/console", _home), web.get("/console/style.css", style), *guarded]

    # ------------------------------------------------------------------------------------------------- guards
    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            if not self._is_own_host(request.host):
                text = "this console answers to its address, not to this name: use the address, or localhost"
                return _finished(web.Response(status=421, text=text))
            try:
                return _finished(await handler(request))
            except BadRequest as e:
                return _finished(self._failed(400, "This cannot be shown", str(e)))
            except NotThere as e:
                return _finished(self._failed(404, "Not there", str(e)))
            except SmqError as e:
                return _finished(self._failed(503, "No answer", str(e)))

        return answer

    def _is_own_host(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if host.count(":") == 1 or (host.startswith("[") and "]:" in host) else host
        if self._config.tls is not None or name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _failed(self, status: int, title: str, text: str) -> web.Response:
        content = tag("p", text, class_="bad", role="alert")
        back = tag("p", link("To the cluster"))
        return web.Response(
            status=status, body=page(title, "-", content, back, note=self._note()), content_type="text/html"
        )

    def _page(self, title: str, here: str, content: list[Markup], *, refresh_s: int = 0) -> web.Response:
        body = page(title, here, *content, note=self._note(), refresh_s=refresh_s)
        return web.Response(body=body, content_type="text/html", charset="utf-8")

    def _note(self) -> str:
        status = self._node.status()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return f"As node {status.node} has applied it, Raft entry {status.applied_index:,}, at {at} UTC. Read-only."

    # -------------------------------------------------------------------------------------------------- pages
    async def _cluster(self, _request: web.Request) -> web.Response:
        return self._page("Cluster", "", await cluster_page(self._node, self.events), refresh_s=REFRESH_S)

    async def _topics(self, request: web.Request) -> web.Response:
        return self._page("Topics", "topics", await topics_page(self._node, self.history, _after(request)))

    async def _topic(self, request: web.Request) -> web.Response:
        name = _name(request, "topic")
        topic = self._node.state.topics.get(name)
        if topic is None:
            raise NotThere(f"there is no topic {name!r}: the page of topics lists them")
        first = request.query.get("first", "0")
        if not (first.isascii() and first.isdigit() and len(first) < 8):
            raise BadRequest("first must be the number of a partition")
        return self._page(f"Topic {name}", "topics", topic_page(self._node, topic, int(first)))

    async def _messages(self, request: web.Request) -> web.Response:
        name = _name(request, "topic")
        ask = parse(request.query)
        topic = self._node.state.topics.get(name)
        if topic is None:
            raise NotThere(f"there is no topic {name!r}: the page of topics lists them")
        content = await messages_page(self._calls, topic, ask)
        return self._page(f"Records of {name}", "topics", content, refresh_s=TAIL_S if ask.is_tail else 0)

    async def _groups(self, request: web.Request) -> web.Response:
        return self._page("Groups", "groups", groups_page(self._calls, self.history, _after(request)))

    async def _group(self, request: web.Request) -> web.Response:
        name = _name(request, "group")
        group = self._node.state.groups.get(name)
        if group is None:
            raise NotThere(f"there is no group {name!r}: the page of groups lists them")
        return self._page(f"Group {name}", "groups", await group_page(self._calls, self.history, group))

    async def _transactions(self, request: web.Request) -> web.Response:
        content = await transactions_page(self._node.state, _after(request))
        return self._page("Transactions", "transactions", content)

    async def _transaction(self, request: web.Request) -> web.Response:
        name = _name(request, "id")
        transaction = self._node.state.transactions.get(name)
        if transaction is None:
            raise NotThere(f"there is no transactional id {name!r}: the page of transactions lists them")
        return self._page(f"Transaction {name}", "transactions", transaction_page(self._node.state, transaction))

    async def _settings_page(self, _request: web.Request) -> web.Response:
        return self._page("Settings", "settings", settings_page(self._node, self._settings, self._config))

    async def _events_page(self, _request: web.Request) -> web.Response:
        return self._page("Events", "events", events_page(self.events))


async def _style(_request: web.Request) -> web.Response:
    return web.Response(text=STYLE, content_type="text/css")


async def _home(_request: web.Request) -> web.Response:
    raise web.HTTPFound("/console/")


def _name(request: web.Request, what: str) -> str:
    name = request.match_info[what]
    if len(name) > NAME_CHARS_MAX:
        raise BadRequest(f"no {what} has such a name: it may have {NAME_CHARS_MAX} characters")
    return name


def _after(request: web.Request) -> str:
    return request.query.get("after", "")[:NAME_CHARS_MAX]


def _finished(response: web.Response) -> web.Response:
    response.headers.update(_HEADERS)
    return response
