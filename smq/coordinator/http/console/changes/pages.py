"""The pages of changes: the dry run with its confirmation, and what becomes of it.

Owns the order of checks: origin, token, typed name; and that each change is an event and a line in the log. A change is
made by the client of the command line, at this node's own gRPC port: there is no second way. Without
`[http] console_changes` every request is refused. `console.site` imports it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog
from aiohttp import web

from smq.coordinator.http.console.changes.group_changes import FORGET, RESET
from smq.coordinator.http.console.changes.guard import Tokens, refuse_foreign
from smq.coordinator.http.console.changes.node_changes import ABORT, DRAIN, UNDRAIN
from smq.coordinator.http.console.changes.plan import Action, Plan
from smq.coordinator.http.console.changes.topic_changes import DELETE, TRIM
from smq.coordinator.http.console.event_page import OpenAdmin
from smq.coordinator.http.console.markup import Content, address, link, tag, void
from smq.coordinator.http.console.refusals import BadRequest, Refused
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import SmqError

ACTIONS: Final = (RESET, FORGET, TRIM, DELETE, ABORT, DRAIN, UNDRAIN)
SWITCHED_OFF: Final = (
    "changes through the console are switched off: `console_changes = true` under [http] turns them on\n"
)

log = structlog.get_logger(__name__)


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
    """The name in the client's certificate, if it shows one, and its address."""
    certificate: dict[str, Any] = (request.transport and request.transport.get_extra_info("peercert")) or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return " at ".join([*names[:1], request.remote or "an address that is not known"])
