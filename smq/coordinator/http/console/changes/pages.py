"""The pages of changes: the dry run with its confirmation, and what becomes of it.

Owns the order of checks: origin, token, typed name; and that each change is an event and a line in the log. A token is
for one change exactly, works once, and for ten minutes: a stranger's page can neither read one nor make one. A change
is made by the client of the command line, at this node's own gRPC port: there is no second way. Without
`[http] console_changes` every request is refused. `console.site` imports it.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from smq.coordinator.http.console.changes.group_changes import FORGET, RESET
from smq.coordinator.http.console.changes.node_changes import ABORT, DRAIN, UNDRAIN
from smq.coordinator.http.console.changes.plan import Action, Plan
from smq.coordinator.http.console.changes.topic_changes import DELETE, TRIM
from smq.coordinator.http.console.event_page import OpenAdmin
from smq.coordinator.http.console.markup import Content, address, link, tag, void
from smq.coordinator.http.console.refusals import BadRequest, Forbidden, Refused
from smq.coordinator.http.people import USER
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import SmqError

ACTIONS: Final = (RESET, FORGET, TRIM, DELETE, ABORT, DRAIN, UNDRAIN)
SWITCHED_OFF: Final = (
    "changes through the console are switched off: `console_changes = true` under [http] turns them on\n"
)
VALID_S: Final = 600  # for a person to read what would change
USED_MAX: Final = 10_000  # made within that time; beyond it a change has to wait

log = structlog.get_logger(__name__)


class Tokens:
    """Of this process: a restart makes all of them invalid."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._now_s = now_s
        self._used: dict[str, int] = {}  # with the second in which it is no longer valid

    def issue(self, change: str) -> str:
        until = int(self._now_s()) + VALID_S
        return f"{until}.{self._sign(until, change)}"

    def take(self, token: str, change: str) -> None:
        """Forbidden for any token but one that was issued for this change, and not taken yet."""
        written, _, signature = token.partition(".")
        until = int(written) if written.isascii() and written.isdigit() and len(written) < 12 else 0
        if not hmac.compare_digest(signature.encode(), self._sign(until, change).encode()):
            raise Forbidden("This is not a change that this console has shown, or the node has restarted since then")
        now = self._now_s()
        if until < now:
            raise Forbidden(f"The change was shown more than {VALID_S // 60} minutes ago")
        self._used = {used: end for used, end in self._used.items() if end >= now}
        if token in self._used:
            raise Forbidden("This has been sent already: the events show its outcome")
        if len(self._used) >= USED_MAX:
            raise Forbidden("There have been too many changes within ten minutes: wait, or use the command line")
        self._used[token] = until

    def _sign(self, until: int, change: str) -> str:
        return hmac.new(self._key, f"{until}\n{change}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def refuse_foreign(request: web.Request) -> None:
    """Forbidden unless the request comes from a page of this console: browsers name the page's origin."""
    origin = request.headers.get("Origin", "")
    if not origin or urlsplit(origin).netloc.lower() != request.host.lower():
        shown = origin or "nowhere that it names"
        raise Forbidden(f"A change must come from a page of this console. This one comes from {shown}")


class ChangePages:
    """`note` takes what has happened into the time line."""

    def __init__(self, open_admin: OpenAdmin, note: Callable[[str], None]) -> None:
        self._open_admin = open_admin
        self._note = note
        self._tokens = Tokens()

    async def shown(self, action: Action, name: str, query: Mapping[str, str]) -> list[Content]:
        """The dry run, and the form that confirms it."""
        try:
            async with self._open_admin() as admin:
                plan = await action.plan(admin, name, query)
        except UserError as e:
            raise Refused(str(e)) from e
        except SmqError as e:
            if e.code.is_retriable:
                raise
            raise Refused(str(e)) from e  # nothing has such a name, for example
        where = action.back(name) if action.back is not None else None
        back = link("Back, and change nothing", *((action.section, name) if where is None else (where,)))
        confirmation = self._form(action, name, plan) if plan.change is not None else tag("p", "Nothing would change.")
        return [*plan.content, confirmation, tag("p", back)]

    def _form(self, action: Action, name: str, plan: Plan) -> Content:
        change = json.dumps(plan.change, separators=(",", ":"))
        hidden = [
            void("input", type="hidden", name="change", value=change),
            void("input", type="hidden", name="token", value=self._tokens.issue(_signed(action, name, change))),
        ]
        typed = [tag("label", f"Type {name} to confirm", void("input", type="text", name="name", autocomplete="off"))]
        button = tag("button", plan.button, type="submit", class_="danger")
        target = address(action.section, name, action.verb)
        fields = [*hidden, *(typed if action.is_typed else []), button]
        return tag("form", *fields, method="post", action=target, aria_label=action.title)

    async def make(self, action: Action, name: str, request: web.Request) -> web.Response:
        """Makes what was shown, and leads to the events, which say so."""
        refuse_foreign(request)
        form = await request.post()
        change, token, typed = (str(form.get(key, "")) for key in ("change", "token", "name"))
        if action.is_typed and typed != name:
            raise BadRequest(f"the name does not match: type {name} to confirm")
        self._tokens.take(token, _signed(action, name, change))
        by = caller(request)
        try:
            async with self._open_admin() as admin:
                done = await action.make(admin, name, json.loads(change))
        except UserError as e:
            raise Refused(f"{e}. Nothing was changed") from e
        except SmqError as e:
            if e.code.is_definite:
                raise Refused(f"{e}. Nothing was changed") from e
            self._note(f"{action.title}, {name}: no answer, it may have been made; by {by}")
            log.warning("console_change_unknown", action=action.verb, name=name, by=by, error=str(e))
            raise
        self._note(f"{done}; by {by}")
        log.info("console_change", change=done, by=by)
        raise web.HTTPSeeOther(address("events"))


def _signed(action: Action, name: str, change: str) -> str:
    return json.dumps([action.section, name, action.verb, change])


def caller(request: web.Request) -> str:
    """The user, or the name in the client's certificate if it shows one, and its address."""
    if request.get(USER):
        return f"{request[USER]} at {request.remote}"
    certificate: dict[str, Any] = (request.transport and request.transport.get_extra_info("peercert")) or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return " at ".join([*names[:1], request.remote or "an address that is not known"])
