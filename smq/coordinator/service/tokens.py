"""Which user a bearer token names: JSON Web Tokens (RFC 7519), by the public keys of their issuer (JWKS, RFC 7517).

Owns the keys, read again without a restart, and every check of a token. It must never log a token, accept one without
a signature or by a shared secret, or tell a client what would be accepted. The ports that ask for users import it.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog

from smq.coordinator.config.node_toml import HTTPS, OAuthConfig
from smq.coordinator.config.secret_files import refuse_exposed
from smq.coordinator.limits import (
    JWKS_BYTES_MAX,
    JWKS_FETCH_S_MAX,
    JWKS_FETCH_S_MIN,
    JWKS_KEYS_MAX,
    JWKS_REFRESH_S,
)
from smq.coordinator.user_errors import StartError
from smq.raft_state.handlers.users import name_fault

log = structlog.get_logger(__name__)

_POLL_S: Final = 5.0  # between two looks at the file's stamp
_LIFETIME_S_MAX: Final = 366 * 86_400.0  # of a session: of a token that ends later, it has to be shown again by then
_TIME_S_MAX: Final = 1e12  # of a claim: what is larger is no time, and may be infinite
_SHOWN_CHARS_MAX: Final = 80  # of what a token says, in the log
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# By kty and crv. A key that is not here verifies nothing: in particular no oct, which is a shared secret.
_ALGORITHMS: Final = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_RSA_BITS_MIN: Final = 2_048
_RSA_BITS_MAX: Final = 8_192  # a larger one takes milliseconds for each token


class TokenRefused(Exception):
    """`status` is RFC 7628's, and the message is for the client: it has nothing of the token, and nothing of what the
    node expects. `detail` is for the log."""

    def __init__(self, message: str, detail: str = "", *, status: str = "invalid_token") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUser:
    """The user of a token. `lifetime_s`: until its end. `grace_s`: how long after it the node accepts it."""

    user: str
    lifetime_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    kid: str | None
    algorithms: Sequence[str]
    public: Any  # of `cryptography`, of the kind that the algorithms need


class Tokens:
    """`start` begins to follow changes of the keys. `now` is Unix time. StartError for a file of keys that is
    unusable; a URL need not answer yet."""

    def __init__(self, config: OAuthConfig, *, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self._now = now
        self._skew_s = config.clock_skew_ms / 1000
        self._path = None if config.jwks.startswith(HTTPS) else Path(config.jwks)
        self._keys: Sequence[_Key] = ()
        self._stamp: tuple[int, ...] = ()
        self._failure = "the keys have not been fetched yet"
        self._fetched_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        if self._path is not None:
            try:
                self._take(self._read(self._path))
            except (OSError, ValueError) as e:
                raise StartError(f"oauth.jwks {self._path}: {e}") from e

    def start(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._watch_for_ever())

    def stop(self) -> None:
        for task in (self._watch, self._fetching):
            if task is not None:
                task.cancel()

    def warnings(self) -> list[str]:
        """For operators."""
        return [f"oauth.jwks {self._config.jwks}: {self._failure}"] if self._failure else []

    # ---------------------------------------------------------------------------------------------- the keys
    def reload(self) -> None:
        """Reads the keys again soon, changed or not."""
        self._stamp = ()
        self._fetch()

    async def _watch_for_ever(self) -> None:
        while True:
            if self._path is None or self._stamp_of(self._path) != self._stamp:
                await self._wait_for_fetch()
            await asyncio.sleep(JWKS_REFRESH_S if self._path is None and not self._failure else _POLL_S)

    def _fetch(self) -> "asyncio.Task[None]":
        """One at a time."""
        if self._fetching is None or self._fetching.done():
            self._fetched_at = time.monotonic()
            self._fetching = asyncio.get_running_loop().create_task(self._refresh())
        return self._fetching

    async def _wait_for_fetch(self) -> None:
        await asyncio.shield(self._fetch())  # others may wait for it, too

    async def _refresh(self) -> None:
        """What is unusable changes nothing, and is logged once."""
        try:
            if self._path is not None:
                data = await asyncio.to_thread(self._read, self._path)
            else:
                async with asyncio.timeout(JWKS_FETCH_S_MAX):
                    data = await _download(self._config.jwks, self._config.ca)
            before = {key.kid for key in self._keys}
            self._take(data)
        except (OSError, ValueError, aiohttp.ClientError) as e:  # TimeoutError is an OSError
            failure = str(e) or type(e).__name__
            if failure != self._failure:
                log.error("jwks_reload_failed", jwks=self._config.jwks, error=failure, keys_in_force=len(self._keys))
            self._failure = failure
            return
        now = {key.kid for key in self._keys}
        if now != before:
            log.info("jwks_reloaded", jwks=self._config.jwks, new=sorted(map(str, now - before)), keys=len(now))

    def _take(self, data: bytes) -> None:
        self._keys = read_keys(data)
        self._failure = ""

    def _read(self, path: Path) -> bytes:
        """The stamp is taken first: a change in between is seen by the next look."""
        stamp = self._stamp_of(path)
        refuse_exposed(path, is_secret=False)
        with path.open("rb") as file:
            data = file.read(JWKS_BYTES_MAX + 1)
        self._stamp = stamp
        return data

    @staticmethod
    def _stamp_of(path: Path) -> tuple[int, ...]:
        try:
            found = path.stat()
        except OSError:
            return (0,)
        return found.st_ino, found.st_mtime_ns, found.st_size

    async def _key_of(self, kid: str | None, algorithm: str) -> _Key:
        """TokenRefused. A key that is not known may be new: its issuer is asked now and then."""
        found = self._find(kid, algorithm)
        is_fetching = self._fetching is not None and not self._fetching.done()
        if found is None and (is_fetching or time.monotonic() - self._fetched_at >= JWKS_FETCH_S_MIN):
            await self._wait_for_fetch()
            found = self._find(kid, algorithm)
        if found is None:
            names = f"kid {_shown(kid)}, alg {_shown(algorithm)}; {len(self._keys)} keys are known"
            raise TokenRefused("the token is signed by a key that is not known here", names)
        return found

    def _find(self, kid: str | None, algorithm: str) -> _Key | None:
        """Without a name, the only key is meant."""
        if kid is None:
            fitting = [key for key in self._keys if algorithm in key.algorithms]
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in self._keys if key.kid == kid and algorithm in key.algorithms), None)

    # -------------------------------------------------------------------------------------------- the tokens
    async def check(self, token: str) -> TokenUser:
        """TokenRefused, unless the token is right in everything."""
        import jwt  # it brings `cryptography`, which is slow to import, and a node without tokens needs none of it

        try:
            header = jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
            if not isinstance(algorithm, str) or not any(algorithm in known for known in _ALGORITHMS.values()):
                raise TokenRefused("the token is not signed in a way that is accepted", f"alg {_shown(algorithm)}")
            key = await self._key_of(kid, algorithm)
            claims = jwt.decode(
                token,
                key.public,
                algorithms=[algorithm],
                audience=self._config.audience,
                issuer=self._config.issuer,
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError as e:
            raise TokenRefused(_reason(e), f"{e}; {_claims_shown(token)}"[:500]) from e
        except (ValueError, TypeError, RecursionError, OverflowError) as e:
            raise TokenRefused("the token is malformed", type(e).__name__) from e
        return self._user(claims)

    def _user(self, claims: Mapping[str, Any]) -> TokenUser:
        """Of a token whose signature, issuer and audience are right."""
        now = self._now()
        ends = _time(claims, "exp")
        if ends is None or now >= ends + self._skew_s:
            raise TokenRefused(
                "the token has expired", f"exp {_shown(claims['exp'])}, and the node's clock says {now:.0f}"
            )
        for name in ("nbf", "iat"):
            begins = _time(claims, name)
            if begins is not None and begins > now + self._skew_s:
                detail = f"{name} {_shown(claims[name])}, and the node's clock says {now:.0f}"
                raise TokenRefused("the token is not valid yet: check the clocks", detail)
        if missing := sorted(set(self._config.scopes) - _scopes(claims)):
            raise TokenRefused("the token lacks a scope", f"scopes {missing}", status="insufficient_scope")
        claim = self._config.principal_claim
        user = claims.get(claim)
        if not isinstance(user, str):
            raise TokenRefused("the token names no user", f"claim {claim}: {_shown(user)}")
        if (fault := name_fault(user)) is not None:
            raise TokenRefused("the name of the token's user is not allowed", fault)
        return TokenUser(user=user, lifetime_s=min(ends - now, _LIFETIME_S_MAX), grace_s=self._skew_s)


def read_keys(data: bytes) -> Sequence[_Key]:
    """The keys by which tokens can be verified; the others are left out, as RFC 7517 wants. ValueError if there are
    none, or if the set has what must not be published."""
    import jwt
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    found = []
    for row in _rows(data):
        if "d" in row or "k" in row:
            raise ValueError("it has a private key or a secret: replace that one, and give the node public keys only")
        known = _ALGORITHMS.get((str(row.get("kty")), row.get("crv")), ())
        algorithms = tuple(name for name in known if row.get("alg") in (None, name))
        if not algorithms or row.get("use", "sig") != "sig":
            continue
        try:
            public = jwt.PyJWK(row, algorithms[0]).key
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
            continue
        if isinstance(public, RSAPublicKey) and not _RSA_BITS_MIN <= public.key_size <= _RSA_BITS_MAX:
            continue
        kid = row.get("kid")
        found.append(_Key(kid=kid if isinstance(kid, str) else None, algorithms=algorithms, public=public))
    if not found:
        raise ValueError("it has no public key that can be used (RSA of 2048 bits or more, EC or Ed25519, to sign)")
    return found


def _rows(data: bytes) -> list[dict[str, Any]]:
    """ValueError."""
    if len(data) > JWKS_BYTES_MAX:
        raise ValueError(f"a set of keys has at most {JWKS_BYTES_MAX} bytes")
    try:
        rows = json.loads(data)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError('it is no set of keys: JSON with "keys"') from e
    if not isinstance(rows, list) or len(rows) > JWKS_KEYS_MAX:
        raise ValueError(f"a set of keys is a list of at most {JWKS_KEYS_MAX}")
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("crv"), str | None)]


async def _download(url: str, ca: Path | None) -> bytes:
    """OSError, ValueError or ClientError. It follows no redirection, which might lead to another's keys."""
    trusted = await asyncio.to_thread(ssl.create_default_context, cafile=ca)
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.get(url, ssl=trusted, allow_redirects=False) as answer,
    ):
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"the server answers {answer.status}")
        data = bytearray()
        async for chunk in answer.content.iter_any():
            data += chunk
            if len(data) > JWKS_BYTES_MAX:
                break  # `_rows` refuses it
        return bytes(data)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    """TokenRefused if it is no time."""
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TIME_S_MAX:
        raise TokenRefused("the token is malformed", f"{name} {_shown(value)}")
    return float(value)


def _scopes(claims: Mapping[str, Any]) -> set[str]:
    """A list, or a text with spaces between."""
    value = claims.get("scope", claims.get("scp", ()))
    words = value.split(" ") if isinstance(value, str) else value
    return {word for word in words if isinstance(word, str)} if isinstance(words, list) else set()


def _reason(error: Exception) -> str:
    """For the client."""
    import jwt

    reasons = {
        jwt.MissingRequiredClaimError: "the token lacks one of the claims exp, iss and aud",
        jwt.InvalidIssuerError: "the token is of an issuer that is not trusted here",
        jwt.InvalidAudienceError: "the token is for another audience",
        jwt.InvalidSignatureError: "the token's signature is wrong",
        jwt.InvalidKeyError: "the token's signature is wrong",
    }
    return reasons.get(type(error), "the token is malformed")


def _claims_shown(token: str) -> str:
    """What an operator needs to see of a token that is refused."""
    import jwt

    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError):
        return "it cannot be read"
    return f"iss {_shown(claims.get('iss'))}, aud {_shown(claims.get('aud'))}"


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS_MAX]
