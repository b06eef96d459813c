"""The console's addresses: which page answers which, with what headers, and how errors are shown.

Owns the routes and what protects them. Every answer forbids scripts and frames. A request that names another host than
an address of this machine is refused: a stranger's page could otherwise reach a console on loopback through a name that
it controls, and read records. It changes nothing itself: `changes` does, if that is switched on. The composition root
makes one.
"""

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.http.access import names_this_node
from smq.coordinator.http.console.asking import Ask, parse
from smq.coordinator.http.console.changes.group_changes import group_forms
from smq.coordinator.http.console.changes.node_changes import node_links, transaction_links
from smq.coordinator.http.console.changes.pages import ACTIONS, SWITCHED_OFF, ChangePages
from smq.coordinator.http.console.changes.plan import Action
from smq.coordinator.http.console.changes.topic_changes import topic_forms
from smq.coordinator.http.console.event_page import OpenAdmin, events_page
from smq.coordinator.http.console.events import EventLog
from smq.coordinator.http.console.following import Followers
from smq.coordinator.http.console.group_pages import group_page, groups_page
from smq.coordinator.http.console.history import History
from smq.coordinator.http.console.markup import POLICY, STYLE, Content, frame, link, page, tag
from smq.coordinator.http.console.overview import cluster_page, settings_page, topic_page, topics_page
from smq.coordinator.http.console.record_pages import messages_page
from smq.coordinator.http.console.refusals import BadRequest, Busy, Forbidden, NotThere, Refused
from smq.coordinator.http.console.transaction_pages import transaction_page, transactions_page
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings
from smq.raft_state.errors import SmqError
from smq.raft_state.state import TopicState, TransactionPhase
from smq.replication.api import NodeApi

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with less, a browser hides from a form's answer that the form is ours
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFRESH_S: Final = 30  # of the first page, for those that ask for it
NAME_CHARS_MAX: Final = 300  # of a topic or group in an address

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Console:
    def __init__(self, node: NodeApi, settings: Settings, config: ServerConfig, open_admin: OpenAdmin) -> None:
        self._node = node
        self._calls = NodeCalls(node)
        self._settings = settings
        self._config = config
        self.events = EventLog(node, config.data_dir)
        self.history = History(node)
        self.followers = Followers(self._calls)
        self._open_admin = open_admin
        self._has_changes = config.http.console_changes
        self._changes = ChangePages(open_admin, lambda text: self.events.add("change", text))

    def start(self) -> None:
        self.events.start()
        self.history.start()

    async def stop(self) -> None:
        self.followers.stop()
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
        return [web.get("/console", _home), web.get("/console/style.css", style), *guarded, *self._change_routes()]

    def _change_routes(self) -> list[web.RouteDef]:
        """Without `console_changes` their addresses allow no method at all."""
        if not self._has_changes:
            return [web.route("*", action.path, self._guarded(_switched_off)) for action in ACTIONS]
        made = [web.post(action.path, self._guarded(self._making(action))) for action in ACTIONS]
        return [*made, *(web.get(action.path, self._guarded(self._showing(action))) for action in ACTIONS)]

    def _showing(self, action: Action) -> Handler:
        async def show(request: web.Request) -> web.StreamResponse:
            name = _name(request, "name")
            content = await self._changes.shown(action, name, request.query)
            return self._page(f"{action.title}: {name}", action.section, content)

        return show

    def _making(self, action: Action) -> Handler:
        async def make(request: web.Request) -> web.StreamResponse:
            return await self._changes.make(action, _name(request, "name"), request)

        return make

    # ------------------------------------------------------------------------------------------------- guards
    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            if not names_this_node(self._config, request.host):
                text = "this console answers to its address, not to this name: use the address, or localhost"
                return _finished(web.Response(status=421, text=text))
            try:
                return _finished(await handler(request))
            except BadRequest as e:
                return _finished(self._failed(400, "This cannot be shown", str(e)))
            except NotThere as e:
                return _finished(self._failed(404, "Not there", str(e)))
            except Forbidden as e:
                return _finished(self._failed(403, "Not from this console", str(e)))
            except Refused as e:
                return _finished(self._failed(409, "Refused", str(e)))
            except web.HTTPSeeOther as e:
                _finished(e)
                raise
            except Busy as e:
                return _finished(self._failed(503, "Too many readers", str(e)))
            except SmqError as e:
                is_sure = e.code.is_definite or request.method == "GET"
                after = "" if is_sure else ". It may have been done all the same: look before you try again"
                return _finished(self._failed(503, "No answer", f"{e}{after}"))

        return answer

    def _failed(self, status: int, title: str, text: str) -> web.Response:
        content = tag("p", text, class_="bad", role="alert")
        back = tag("p", link("To the cluster"))
        return web.Response(
            status=status, body=page(title, "-", content, back, note=self._note()), content_type="text/html"
        )

    def _page(self, title: str, here: str, content: Sequence[Content], *, refresh_s: int = 0) -> web.Response:
        body = page(title, here, *content, note=self._note(), refresh_s=refresh_s)
        return web.Response(body=body, content_type="text/html", charset="utf-8")

    @property
    def _mode(self) -> str:
        return "Changes are switched on." if self._has_changes else "Read-only."

    def _note(self) -> str:
        status = self._node.status()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return f"As node {status.node} has applied it, Raft entry {status.applied_index:,}, at {at} UTC. {self._mode}"

    # -------------------------------------------------------------------------------------------------- pages
    async def _cluster(self, request: web.Request) -> web.Response:
        """It is loaded again only if that is asked for: a reader keeps the place, and the focus."""
        is_updated = request.query.get("update") == "on"
        if is_updated:
            switch = tag("p", f"Updated every {REFRESH_S} seconds. ", link("Stop updating"))
        else:
            switch = tag("p", link(f"Update this page every {REFRESH_S} seconds", update="on"))
        changes = node_links(self._node.state.nodes.values()) if self._has_changes else []
        content = [*await cluster_page(self._node, self.events), *changes, switch]
        return self._page("Cluster", "", content, refresh_s=REFRESH_S if is_updated else 0)

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
        shown = await topic_page(self._node, self.history, topic, int(first))
        changes = topic_forms(name) if self._has_changes else []
        return self._page(f"Topic {name}", "topics", [*shown, *changes])

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        name = _name(request, "topic")
        ask = parse(request.query)
        topic = self._node.state.topics.get(name)
        if topic is None:
            raise NotThere(f"there is no topic {name!r}: the page of topics lists them")
        if ask.is_tail and not topic.partitions[0].is_external:
            return await self._follow(request, topic, ask)
        return self._page(f"Records of {name}", "topics", await messages_page(self._calls, topic, ask))

    async def _follow(self, request: web.Request, topic: TopicState, ask: Ask) -> web.StreamResponse:
        """Errors before the first piece are pages of their own."""
        before, after = frame(f"Records of {topic.name}", "topics", note=self._note())
        response = web.StreamResponse(headers={"Content-Type": "text/html; charset=utf-8"})
        async with contextlib.aclosing(self.followers.pieces(topic, ask)) as pieces:
            first = await anext(pieces)
            _finished(response)
            try:
                await response.prepare(request)
                await response.write(before + first.encode())
                async for piece in pieces:
                    if request.transport is None or request.transport.is_closing():
                        break
                    if piece:
                        await response.write(piece.encode())
                else:
                    await response.write_eof(after)
            except ConnectionError:
                pass  # the reader has gone
        return response

    async def _groups(self, request: web.Request) -> web.Response:
        return self._page("Groups", "groups", await groups_page(self._calls, self.history, _after(request)))

    async def _group(self, request: web.Request) -> web.Response:
        name = _name(request, "group")
        group = self._node.state.groups.get(name)
        if group is None:
            raise NotThere(f"there is no group {name!r}: the page of groups lists them")
        changes = group_forms(name) if self._has_changes else []
        return self._page(f"Group {name}", "groups", [*await group_page(self._calls, self.history, group), *changes])

    async def _transactions(self, request: web.Request) -> web.Response:
        content = await transactions_page(self._node.state, _after(request))
        return self._page("Transactions", "transactions", content)

    async def _transaction(self, request: web.Request) -> web.Response:
        name = _name(request, "id")
        transaction = self._node.state.transactions.get(name)
        if transaction is None:
            raise NotThere(f"there is no transactional id {name!r}: the page of transactions lists them")
        is_open = transaction.phase is TransactionPhase.ONGOING
        changes = transaction_links(name, is_open=is_open) if self._has_changes else []
        content = [*await transaction_page(self._node.state, transaction), *changes]
        return self._page(f"Transaction {name}", "transactions", content)

    async def _settings_page(self, _request: web.Request) -> web.Response:
        return self._page("Settings", "settings", settings_page(self._node, self._settings, self._config))

    async def _events_page(self, _request: web.Request) -> web.Response:
        return self._page("Events", "events", await events_page(self._node, self.events, self._open_admin))


async def _style(_request: web.Request) -> web.Response:
    return web.Response(text=STYLE, content_type="text/css")


async def _home(_request: web.Request) -> web.Response:
    raise web.HTTPFound("/console/")


async def _switched_off(request: web.Request) -> web.StreamResponse:
    return web.Response(status=405, text=SWITCHED_OFF, headers={"Allow": ""})


def _name(request: web.Request, what: str) -> str:
    name = request.match_info[what]
    if len(name) > NAME_CHARS_MAX:
        raise BadRequest(f"no {what} has such a name: it may have {NAME_CHARS_MAX} characters")
    return name


def _after(request: web.Request) -> str:
    return request.query.get("after", "")[:NAME_CHARS_MAX]


def _finished(response: web.StreamResponse) -> web.StreamResponse:
    response.headers.update(_HEADERS)
    return response
