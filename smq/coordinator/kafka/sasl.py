"""SASL on the Kafka port: SaslHandshake and SaslAuthenticate, PLAIN (RFC 4616), OAUTHBEARER (RFC 7628), and SCRAM by
the node's exchange.

Owns the parsers of both, and the states of a connection that has to prove its user, which is not served before. It must
never tell a wrong password from an unknown user, or log a token. `connection` imports it; `handlers` answers both
requests by it on a listener that asks for no user.
"""

import enum
import json
import re
from typing import Final

from smq.clients import scram
from smq.coordinator.config.node_toml import BEARER
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import SASL_TOKEN_BYTES_MAX
from smq.coordinator.service.scram_exchange import CHECK_PASSWORD, SASLNAME, LoginFailed, ScramExchange, text, unescaped
from smq.coordinator.service.tokens import TokenRefused, Tokens, TokenUser
from smq.coordinator.service.users import Identity, Users
from smq.raft_state.errors import SmqError

_BEARER_HEADER: Final = re.compile(rb"[ny],(?:a=(?P<authzid>" + SASLNAME + rb"))?,")
_BEARER_FIELD: Final = re.compile(rb"([A-Za-z]+)=([\x21-\x7e \t\r\n]*)")
_BEARER_TOKEN: Final = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)


class SaslMisuse(Exception):
    """A request out of turn, or one that the node does not judge: the connection ends without an answer."""


# ------------------------------------------------------------------------------------------------- the mechanisms
class PlainExchange:
    """One run of PLAIN: one message, with the password in it."""

    advice = CHECK_PASSWORD
    refusal = ""

    def __init__(self, users: Users) -> None:
        self._users = users
        self.proven: Identity | None = None

    async def step(self, token: bytes) -> bytes:
        """LoginFailed."""
        parts = token.split(b"\0")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            raise LoginFailed("a malformed message")
        authzid, name = text(parts[0]), text(parts[1])
        if authzid not in ("", name):
            raise LoginFailed("it asks to act as another user")
        try:
            self.proven = await self._users.check_password(name, parts[2])
        except SmqError as e:  # no verdict: a client that is cut off tries again, and one that is refused gives up
            raise SaslMisuse(str(e)) from e
        if self.proven is None:
            raise LoginFailed(f"there is no such user, or the password is wrong: {name[:80]!r}")
        return b""


class BearerExchange:
    """One run of OAUTHBEARER: one message, with the token in it. A client of a token that is refused hears why, and
    has to acknowledge that before the run fails."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.proven: TokenUser | None = None
        self.advice = f"the message has to have a token, and {SASL_TOKEN_BYTES_MAX} bytes at most"
        self.refusal = ""  # for the log

    async def step(self, token: bytes) -> bytes:
        """LoginFailed."""
        if self.refusal:
            raise LoginFailed("")  # it is in the log already
        name, bearer = _bearer_parts(token)
        try:
            found = await self._tokens.check(bearer)
            if name not in ("", found.user):
                raise TokenRefused("the token is another user's than the one to act as", f"users {name[:80]!r}")
        except TokenRefused as e:
            self.advice = str(e)
            self.refusal = f"{e} ({e.detail})" if e.detail else str(e)
            return json.dumps({"status": e.status, "error_description": str(e)}).encode()
        self.proven = found
        return b""


def _bearer_parts(message: bytes) -> tuple[str, str]:
    """The user to act as, if one is named, and the token. LoginFailed."""
    header, *fields = message.split(b"\x01")
    gs2 = _BEARER_HEADER.fullmatch(header)
    found = [_BEARER_FIELD.fullmatch(field) for field in fields[:-2]]
    values = [field[2] for field in found if field is not None and field[1] == b"auth"]
    if gs2 is None or fields[-2:] != [b"", b""] or None in found or len(values) != 1:
        raise LoginFailed("a malformed message")
    bearer = _BEARER_TOKEN.fullmatch(values[0].strip())
    if bearer is None:
        raise LoginFailed("a malformed message: no bearer token")
    return unescaped(gs2["authzid"] or b""), bearer[1].decode()


# ------------------------------------------------------------------------------------------------- the connection
class _State(enum.Enum):
    NEW = enum.auto()  # ApiVersions and SaslHandshake
    TOKENS = enum.auto()  # SaslAuthenticate only, also while a user proves itself again
    OPEN = enum.auto()  # everything, and SaslHandshake, which begins again (KIP-368)
    FAILED = enum.auto()  # nothing


class Login:
    """The user of one connection. `mechanisms` are those of its listener; `session_ms_max`: after it the user must have
    proven itself again, 0 for never. `tokens` are for OAUTHBEARER."""

    def __init__(
        self, users: Users, mechanisms: tuple[str, ...], session_ms_max: int, tokens: Tokens | None = None
    ) -> None:
        self._users = users
        self._tokens = tokens
        self._mechanisms = mechanisms
        self._session_ms_max = session_ms_max
        self._state = _State.NEW
        self._mechanism = ""
        self._exchange: ScramExchange | PlainExchange | BearerExchange | None = None
        self._marker: object = None  # of the users among which `identity` was last found
        self._ends_s = float("inf")
        self.identity: Identity | TokenUser | None = None
        self._failure = ""

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def is_new(self) -> bool:
        return self._state is _State.NEW

    @property
    def has_failed(self) -> bool:
        return self._state is _State.FAILED

    def is_valid(self) -> bool:
        """Unless the user is gone, or its password is another one. True for a connection that has no user yet, and for
        one of a token, until its session ends."""
        if not isinstance(self.identity, Identity):
            return True
        marker = self._users.marker()
        if marker is not self._marker:
            if not self._users.holds(self.identity):
                return False
            self._marker = marker
        return True

    def check_session(self, now_s: float) -> None:
        """SaslMisuse for a request, other than one that begins again, after the session's end."""
        if now_s >= self._ends_s:
            raise SaslMisuse("the session has ended: the client did not prove its user again in time")

    def handshake(self, request: Struct) -> Struct:
        """SaslHandshake."""
        if self._state not in (_State.NEW, _State.OPEN):
            raise SaslMisuse("a handshake inside another one")
        mechanism = request["mechanism"]
        answer = {"error_code": KafkaError.NONE, "mechanisms": list(self._mechanisms)}
        if mechanism not in self._mechanisms or self._mechanism not in ("", mechanism):
            self._fail(f"the mechanism {mechanism[:80]!r} is not served here, or not that of the first time")
            return answer | {"error_code": KafkaError.UNSUPPORTED_SASL_MECHANISM}
        self._mechanism = mechanism
        self._exchange = self._exchange_of(mechanism)
        self._state = _State.TOKENS
        return answer

    def _exchange_of(self, mechanism: str) -> ScramExchange | PlainExchange | BearerExchange:
        if mechanism == BEARER:
            assert self._tokens is not None, "node.toml is refused if it names the mechanism and no [oauth]"
            return BearerExchange(self._tokens)
        known = scram.BY_NAME.get(mechanism)
        return ScramExchange(self._users, known) if known is not None else PlainExchange(self._users)

    def take_failure(self) -> str:
        """Why the client is refused, for the log; once."""
        failure, self._failure = self._failure, ""
        return failure

    async def authenticate(self, request: Struct, now_s: float) -> Struct:
        """SaslAuthenticate. After a failure the connection must be closed."""
        exchange, token = self._exchange, bytes(request["auth_bytes"])
        if self._state is not _State.TOKENS or exchange is None:
            raise SaslMisuse("a SASL token before a handshake")
        try:
            if len(token) > SASL_TOKEN_BYTES_MAX:
                raise LoginFailed(f"a token of {len(token)} bytes")
            said = await exchange.step(token)
            if exchange.proven is not None and self.identity is not None:
                _check_same(self.identity.user, exchange.proven.user)
        except LoginFailed as e:
            self._fail(str(e))
            message = f"authentication with {self._mechanism} failed: {exchange.advice}"
            return {
                "error_code": KafkaError.SASL_AUTHENTICATION_FAILED,
                "error_message": message,
                "auth_bytes": b"",
                "session_lifetime_ms": 0,
            }
        self._failure = exchange.refusal
        lifetime_ms = 0
        if exchange.proven is not None:
            self.identity, self._marker = exchange.proven, None
            self._exchange, self._state = None, _State.OPEN
            lifetime_ms = self._begin_session(exchange.proven, now_s)
        return {
            "error_code": KafkaError.NONE,
            "error_message": None,
            "auth_bytes": said,
            "session_lifetime_ms": lifetime_ms,
        }

    def _begin_session(self, proven: Identity | TokenUser, now_s: float) -> int:
        """The milliseconds after which a client has to prove its user again; 0 for never."""
        lifetime_s = self._session_ms_max / 1000 or float("inf")
        self._ends_s = now_s + lifetime_s
        if isinstance(proven, TokenUser):
            self._ends_s = min(self._ends_s, now_s + proven.lifetime_s + proven.grace_s)
            lifetime_s = min(lifetime_s, max(proven.lifetime_s, 0.001))  # 0 would be for never
        return int(lifetime_s * 1000) if lifetime_s < float("inf") else 0

    def _fail(self, why: str) -> None:
        self._state, self._exchange, self._failure = _State.FAILED, None, why


def _check_same(before: str, now: str) -> None:
    """Another password of the same user is allowed."""
    if now != before:
        raise LoginFailed(f"the user may not change from {before[:80]!r} to {now[:80]!r}")


# ------------------------------------------------------------------------------ on a listener that asks for no user
async def refuse_handshake(_gateway: Gateway, _version: int, _request: Struct) -> Struct:
    """As Kafka does on a listener without SASL."""
    return {"error_code": KafkaError.ILLEGAL_SASL_STATE, "mechanisms": []}


async def refuse_authenticate(_gateway: Gateway, _version: int, _request: Struct) -> Struct:
    return {
        "error_code": KafkaError.ILLEGAL_SASL_STATE,
        "error_message": "this listener asks for no user: set security.protocol to PLAINTEXT or SSL",
        "auth_bytes": b"",
        "session_lifetime_ms": 0,
    }
