"""Which user an HTTP request is of: by name and password (Basic), or by the cookie that the answer to them sets.

Owns both, and what a user must be allowed to see for the console and /metrics. The cookie spares the node the
derivation of keys for each page, and no other site's page can send it (SameSite=Strict), so changes need it. TLS is
there: without it, the configuration is refused. It must never log a password or a cookie. `http.access` imports it.
"""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from aiohttp import web

from smq.coordinator.limits import LOGIN_FAILED_DELAY_S, LOGIN_TOKEN_MS, SASL_TOKEN_BYTES_MAX, USERS_CHECK_S
from smq.coordinator.service.audit import Audit, Sender
from smq.coordinator.service.authorizer import Authorizer
from smq.coordinator.service.sessions import Sessions
from smq.coordinator.service.users import FAILED_LOGINS, Users
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource
from smq.replication.net.listening import plain_host

COOKIE: Final = "__Host-smq"  # browsers take this prefix over TLS alone, and for this host alone
USER: Final = web.RequestKey("user", str)  # the one that a request is of
_NEW: Final = web.RequestKey("cookie", str)  # for the answer to a request
_SCHEME: Final = "basic "
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SEEN: Final = (Resource.TOPIC, Resource.GROUP, Resource.TRANSACTIONAL_ID)


class People:
    def __init__(self, users: Users, authorizer: Authorizer, audit: Audit) -> None:
        self._audit = audit
        self._users = users
        self._authorizer = authorizer
        self._sessions = Sessions(users, LOGIN_TOKEN_MS)

    async def require_all(self, request: web.Request) -> str:
        """The user, which may see everything in the cluster: pages and figures of everything name it. HTTPForbidden,
        and what `user` raises."""
        user = request[USER] = await self.user(request)
        if not self._sees_all(user, plain_host(request.remote or "")):
            need = "describe the cluster, its settings, and every topic, group and transactional id"
            raise self._forbidden(request, f"user {user[:80]!r} has no right to this: it must be allowed to {need}\n")
        return user

    async def require_console(self, request: web.Request) -> None:
        """As `require_all`; records need the right to read them, and changes a super user."""
        user = await self.require_all(request)
        topic, host = request.match_info.get("topic"), plain_host(request.remote or "")
        is_read = request.path.rstrip("/").endswith("/messages")
        if topic and is_read and not self._authorizer.may(user, host, Operation.READ, Resource.TOPIC, topic):
            raise self._forbidden(request, f"user {user[:80]!r} has no right to read this topic\n")
        is_change = request.method != "GET" or "name" in request.match_info
        if is_change and not self._authorizer.is_super(user):
            raise self._forbidden(request, "changes through the console are for super users: use the command line\n")
        if request.method != "GET" and not request.cookies.get(COOKIE):
            raise self._forbidden(request, "a change must come from a page of this console\n")

    async def while_allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer; the connection ends if the user may no longer have it, as may be of a page that follows
        a topic."""
        answer = asyncio.ensure_future(handler(request))
        try:
            while not (await asyncio.wait({answer}, timeout=USERS_CHECK_S))[0]:
                try:
                    await self.require_console(request)
                except web.HTTPException:
                    if request.transport is not None:
                        request.transport.abort()
                    break
            return await answer
        finally:
            answer.cancel()  # if the node stops meanwhile

    async def user(self, request: web.Request) -> str:
        """HTTPUnauthorized without a user's name and password, or for wrong ones; HTTPServiceUnavailable if too many
        are being checked."""
        if (user := self._by_cookie(request)) is not None:
            return user
        name, password = _given(request.headers.get("Authorization", ""))
        if not name:
            raise _refusal("log in with a user's name and password\n")
        try:
            identity = await self._users.check_password(name, password)
        except SmqError as e:
            raise web.HTTPServiceUnavailable(text=f"{e}\n") from e
        if identity is None:
            reason = f"there is no such user, or the password is wrong: {name[:80]!r}"
            FAILED_LOGINS.warn("login_failed", purpose="HTTP", address=request.remote, reason=reason)
            self._audit.refused(_sender(request), "Login", reason)
            await asyncio.sleep(LOGIN_FAILED_DELAY_S)
            raise _refusal("the user or the password is wrong\n")
        self._sessions.drop_ended()
        request[_NEW] = self._sessions.open(identity)
        return identity.user

    def _by_cookie(self, request: web.Request) -> str | None:
        session = self._sessions.find(request.get(_NEW) or request.cookies.get(COOKIE, ""))
        return session.user if session is not None else None

    def _forbidden(self, request: web.Request, text: str) -> web.HTTPForbidden:
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""  # without the names in it
        self._audit.refused(_sender(request), f"{request.method} {path}", text.strip())
        return web.HTTPForbidden(text=text)

    def _sees_all(self, user: str, host: str) -> bool:
        asked = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
        if not all(self._authorizer.may(user, host, each, Resource.CLUSTER, CLUSTER_NAME) for each in asked):
            return False
        return all(self._authorizer.may_every(user, host, Operation.DESCRIBE, resource) for resource in _SEEN)


async def set_cookie(request: web.Request, response: web.StreamResponse) -> None:
    """A signal of aiohttp, before the headers are sent."""
    token = request.get(_NEW)
    if token is not None:
        response.headers.add("Set-Cookie", f"{COOKIE}={token}; HttpOnly; Path=/; SameSite=Strict; Secure")


def _sender(request: web.Request) -> Sender:
    return Sender(user=request.get(USER, ""), address=plain_host(request.remote or ""), port="http", listener="")


def _refusal(text: str) -> web.HTTPUnauthorized:
    return web.HTTPUnauthorized(text=text, headers={"WWW-Authenticate": 'Basic realm="smq", charset="UTF-8"'})


def _given(header: str) -> tuple[str, bytes]:
    """Name and password; empty ones for anything else."""
    if header[: len(_SCHEME)].lower() != _SCHEME or len(header) > SASL_TOKEN_BYTES_MAX:
        return "", b""
    try:
        name, _, password = b64decode(header[len(_SCHEME) :].strip(), validate=True).partition(b":")
        return name.decode(), password
    except (binascii.Error, ValueError):
        return "", b""
