"""Whose a gRPC call is: the tokens of users that have logged in, and the end of calls of users that may not stay.

Owns the tokens of one listener, and the calls that wait there. A user logs in by SCRAM and gets a token, which each
call has in its metadata. So no password crosses the wire, the derivation of keys costs the client and not the node, and
a call costs one look-up. The node keeps tokens, and signs none: there is no key to keep secret, and a token ends with
its process, its listener, or its user's password. Other nodes have their own. It must never log a token. The services
and the admission of requests ask it; `listener` makes one for each port.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc

from smq.clients import scram
from smq.clients.login import TOKEN_KEY, TOKEN_SCHEME
from smq.coordinator.config.certificate_users import CertificateUsers, NoUser
from smq.coordinator.limits import LOGIN_TOKEN_MS, USERS_CHECK_S
from smq.coordinator.service.audit import OFF, Audit
from smq.coordinator.service.authorizer import Authorizer
from smq.coordinator.service.sessions import Session, Sessions
from smq.coordinator.service.users import FAILED_LOGINS, Identity, Users
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

LOGIN_METHOD: Final = "Login"


class Caller:
    """The sender of a call, and what it may do. Without a session it is any client that the port admits, which may do
    everything."""

    __slots__ = ("_authorizer", "_session", "host", "may_all", "user")

    def __init__(self, authorizer: Authorizer | None = None, session: Session | None = None, host: str = "") -> None:
        self._authorizer = authorizer
        self._session = session
        self.host = host
        self.user = session.user if session is not None else ""
        self.may_all = authorizer is None or authorizer.is_super(self.user)

    @property
    def session(self) -> Session | None:
        return self._session

    @property
    def rules(self) -> object:
        """Another object after each change of any rule."""
        return self._authorizer.rules if self._authorizer is not None else None

    def may(self, operation: Operation, resource: Resource, name: str) -> bool:
        if self.may_all or self._authorizer is None:
            return True
        return self._authorizer.may(self.user, self.host, operation, resource, name)

    def may_cluster(self, operation: Operation) -> bool:
        return self.may(operation, Resource.CLUSTER, CLUSTER_NAME)

    def require(self, operation: Operation, resource: Resource, name: str) -> None:
        """NOT_AUTHORIZED, which does not say whether there is such a thing."""
        if not self.may(operation, resource, name):
            kind, act = resource.name.lower().replace("_", " "), operation.name.lower().replace("_", "-")
            what = kind if resource is Resource.CLUSTER else f"{kind} {name[:80]!r}"
            raise SmqError(ErrorCode.NOT_AUTHORIZED, f"user {self.user[:80]!r} has no right to {act} the {what}")


ANYONE: Final = Caller()


@dataclass(eq=False, slots=True)
class _Open:
    """A call that may wait."""

    caller: Caller
    task: "asyncio.Task[Any]"
    check: Callable[[], None] | None  # SmqError if the user has no longer the right to it
    rules: object  # under which it was last checked
    error: SmqError | None = None

    def end(self, error: SmqError) -> None:
        if self.error is None:
            self.error = error
            self.task.cancel()


class Gate:
    """Of one listener. Without mechanisms it asks for no user; with `certificate_users` a client is the user of its
    certificate. `follow` runs while the port is served."""

    def __init__(
        self,
        users: Users | None = None,
        authorizer: Authorizer | None = None,
        mechanisms: tuple[str, ...] = (),
        session_ms_max: int = 0,
        certificate_users: CertificateUsers | None = None,
        audit: Audit = OFF,
    ) -> None:
        self.audit = audit
        self.mechanisms = tuple(name for name in mechanisms if name in scram.BY_NAME)
        self._certificate_users = certificate_users
        self._authorizer = authorizer
        self._session_ms_max = session_ms_max
        lifetime_ms = min(session_ms_max or LOGIN_TOKEN_MS, LOGIN_TOKEN_MS)
        self._sessions = Sessions(users, lifetime_ms) if users is not None else None
        self._open: set[_Open] = set()

    @property
    def asks(self) -> bool:
        """Whether a caller is a user, with that user's rights."""
        knows = bool(self.mechanisms) or self._certificate_users is not None
        return self._sessions is not None and self._authorizer is not None and knows

    # ------------------------------------------------------------------------------------------------- callers
    def caller(self, context: Context) -> Caller:
        """LOGIN_NEEDED without the token of a session, AUTHENTICATION_FAILED for a certificate without a user."""
        if not self.asks:
            return ANYONE
        session = self._session(context)
        return Caller(self._authorizer, session, host_of(context.peer()))

    def admit(self, context: Context) -> None:
        """As `caller`, before anything of the call has been read."""
        if self.asks:
            self._session(context)

    def _session(self, context: Context) -> Session:
        if self._certificate_users is not None:
            return Session(_user_of(self._certificate_users, context), None, float("inf"), None)
        shown: Any = next((value for key, value in context.invocation_metadata() or () if key == TOKEN_KEY), "")
        assert self._sessions is not None
        session = self._sessions.find(shown.removeprefix(TOKEN_SCHEME)) if isinstance(shown, str) else None
        if session is None:
            what = "the token is unknown here, or has ended" if shown else "this port asks for a user"
            raise SmqError(ErrorCode.LOGIN_NEEDED, what)
        return session

    def open(self, identity: Identity) -> tuple[str, int]:
        """A new token, and how long it serves, in ms."""
        assert self._sessions is not None
        return self._sessions.open(identity), self._sessions.lifetime_ms

    # ------------------------------------------------------------------------------------------- calls that wait
    @contextmanager
    def watched(self, caller: Caller, check: Callable[[], None] | None = None, *, is_sure: bool) -> Iterator[None]:
        """Ends the call, within a second, if its user is gone, or if `check` fails after a change of the rules. Unless
        `is_sure`, what the call has begun may be done: the error then says so."""
        task = asyncio.current_task()
        if caller.session is None or task is None:
            yield
            return
        call = _Open(caller, task, check, caller.rules)
        self._open.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.error is None:
                raise
            task.uncancel()
            raise call.error if is_sure else SmqError(ErrorCode.TIMED_OUT, call.error.message) from None
        finally:
            self._open.discard(call)

    async def follow(self) -> None:
        """Ends the calls of users that are gone or have another password, or lost the right to what they wait for."""
        if not self.asks:
            return
        sessions = self._sessions
        assert sessions is not None
        while True:
            await asyncio.sleep(USERS_CHECK_S)
            sessions.drop_revoked()
            sessions.drop_ended()
            for call in list(self._open):
                self._judge(sessions, call)

    def _judge(self, sessions: Sessions, call: _Open) -> None:
        session, rules = call.caller.session, call.caller.rules
        assert session is not None
        if not sessions.is_held(session):
            call.end(SmqError(ErrorCode.LOGIN_NEEDED, "the user was deleted, or has another password"))
        elif self._session_ms_max and asyncio.get_running_loop().time() >= session.ends_s:
            call.end(SmqError(ErrorCode.LOGIN_NEEDED, "the session has ended: its user has to be proven again"))
        elif rules is not call.rules and call.check is not None:
            call.rules = rules
            try:
                call.check()
            except SmqError as e:
                call.end(e)


OPEN: Final = Gate()


def _user_of(rules: CertificateUsers, context: Context) -> str:
    """AUTHENTICATION_FAILED for a certificate that names no user."""
    shown: Any = context.auth_context().get("x509_pem_cert") or (b"",)
    try:
        return rules.user_of(ssl.PEM_cert_to_DER_cert(shown[0].decode()))
    except (NoUser, ValueError) as e:
        FAILED_LOGINS.warn("login_failed", purpose="gRPC", address=host_of(context.peer()), reason=str(e))
        raise SmqError(ErrorCode.AUTHENTICATION_FAILED, "the certificate names no user of this cluster") from None


def host_of(peer: str) -> str:
    """The address in gRPC's name of a peer: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
