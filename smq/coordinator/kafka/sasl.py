"""SASL on the Kafka port: SaslHandshake and SaslAuthenticate, SCRAM (RFC 5802, RFC 7677), PLAIN (RFC 4616) and
OAUTHBEARER (RFC 7628).

Owns the parsers of the tokens, the exchange of SCRAM, and the states of a connection that has to prove its user, which
is not served before. It must never tell a wrong password from an unknown user, log a token, or compare secrets in
variable time. `connection` imports it; `handlers` answers both requests by it on a listener that asks for no user.
"""

import binascii
import enum
import hmac
import json
import re
import secrets
from base64 import b64decode, b64encode
from typing import Final

from smq.clients import scram
from smq.coordinator.config.node_toml import BEARER
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import SASL_TOKEN_BYTES_MAX
from smq.coordinator.service.tokens import TokenRefused, Tokens, TokenUser
from smq.coordinator.service.users import Identity, Users
from smq.raft_state.errors import SmqError

_NONCE_BYTES: Final = 24

# What a message may hold is checked before it is taken apart. `saslname` is UTF-8, `nonce` printable, without commas.
_SASLNAME: Final = rb"(?:[^\x00=,]|=2C|=3D)+"
_EXTENSIONS: Final = rb"(?:,[A-Za-z]+=[^\x00,]+)*"  # such as Kafka's tokenauth=true, whose tokens are no users here
_CLIENT_FIRST: Final = re.compile(
    rb"(?P<gs2>[ny],(?:a=(?P<authzid>" + _SASLNAME + rb"))?,)"
    rb"(?P<bare>n=(?P<name>" + _SASLNAME + rb"),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)" + _EXTENSIONS + rb")"
)
_CLIENT_FINAL: Final = re.compile(
    rb"(?P<signed>c=(?P<binding>[A-Za-z0-9+/=]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)" + _EXTENSIONS + rb"),"
    rb"p=(?P<proof>[A-Za-z0-9+/=]+)"
)

_BEARER_HEADER: Final = re.compile(rb"[ny],(?:a=(?P<authzid>" + _SASLNAME + rb"))?,")
_BEARER_FIELD: Final = re.compile(rb"([A-Za-z]+)=([\x21-\x7e \t\r\n]*)")
_BEARER_TOKEN: Final = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)
_CHECK_PASSWORD: Final = "check the user's name and its password"


class LoginFailed(Exception):
    """The message is for the node's log. A client learns no more than that it failed."""


class SaslMisuse(Exception):
    """A request out of turn, or one that the node does not judge: the connection ends without an answer."""


# ------------------------------------------------------------------------------------------------- the mechanisms
class ScramExchange:
    """One run of SCRAM: a client's first message, then its final one. Nothing of it serves in another run, because each
    has a nonce of the node's own."""

    advice = _CHECK_PASSWORD
    refusal = ""

    def __init__(self, users: Users, mechanism: scram.Mechanism) -> None:
        self._users = users
        self._mechanism = mechanism
        self._identity: Identity | None = None
        self._gs2 = self._nonce = self._said = b""
        self.proven: Identity | None = None

    async def step(self, token: bytes) -> bytes:
        """The node's next message. LoginFailed."""
        return self._first(token) if self._identity is None else self._final(token, self._identity)

    def _first(self, token: bytes) -> bytes:
        found = _CLIENT_FIRST.fullmatch(token)
        if found is None:
            raise LoginFailed("a malformed first message")
        name = _unescaped(found["name"])
        if found["authzid"] is not None and _unescaped(found["authzid"]) != name:
            raise LoginFailed("it asks to act as another user")
        self._identity = self._users.find(name, self._mechanism.number)
        credential = self._identity.credential
        self._gs2 = found["gs2"]
        self._nonce = found["nonce"] + secrets.token_urlsafe(_NONCE_BYTES).encode()
        answer = b"r=%s,s=%s,i=%d" % (self._nonce, b64encode(credential.salt), credential.iterations)
        self._said = b"%s,%s," % (found["bare"], answer)
        return answer

    def _final(self, token: bytes, identity: Identity) -> bytes:
        found = _CLIENT_FINAL.fullmatch(token)
        if found is None:
            raise LoginFailed("a malformed final message")
        binding, proof = _decoded(found["binding"]), _decoded(found["proof"])
        if not hmac.compare_digest(found["nonce"], self._nonce) or not hmac.compare_digest(binding, self._gs2):
            raise LoginFailed("the nonce or the header is not that of its first message")
        mechanism, credential, said = self._mechanism, identity.credential, self._said + found["signed"]
        signature = scram.keyed(mechanism, credential.stored_key, said)
        if len(proof) != len(signature):
            raise LoginFailed("a proof of the wrong length")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        is_right = hmac.compare_digest(scram.hashed(mechanism, client_key), credential.stored_key)
        if not self._users.holds(identity) or not is_right:
            raise LoginFailed(f"there is no such user, or the password is wrong: {identity.user[:80]!r}")
        self.proven = identity
        return b"v=" + b64encode(scram.keyed(mechanism, credential.server_key, said))


class PlainExchange:
    """One run of PLAIN: one message, with the password in it."""

    advice = _CHECK_PASSWORD
    refusal = ""

    def __init__(self, users: Users) -> None:
        self._users = users
        self.proven: Identity | None = None

    async def step(self, token: bytes) -> bytes:
        """LoginFailed."""
        parts = token.split(b"\0")
        if len(parts) != 3 or not parts[1] or not parts[2]:
            raise LoginFailed("a malformed message")
        authzid, name = _text(parts[0]), _text(parts[1])
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
    return _unescaped(gs2["authzid"] or b""), bearer[1].decode()


def _unescaped(saslname: bytes) -> str:
    return _text(saslname.replace(b"=2C", b",").replace(b"=3D", b"="))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise LoginFailed("a name that is not UTF-8") from e


def _decoded(data: bytes) -> bytes:
    try:
        return b64decode(data, validate=True)
    except binascii.Error as e:
        raise LoginFailed("base64 that is none") from e


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
