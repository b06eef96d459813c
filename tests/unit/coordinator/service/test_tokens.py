"""Tokens: which are accepted, and every kind that an intruder may try; keys that change while the node runs."""

import asyncio
import base64
import hmac
import json
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from smq.coordinator.config.node_toml import OAuthConfig
from smq.coordinator.limits import JWKS_BYTES_MAX
from smq.coordinator.service.tokens import TokenRefused, Tokens, TokenUser, read_keys
from smq.coordinator.user_errors import StartError
from tests.unit.coordinator.tls.authorities import Authorities, authorities

__all__ = ("authorities",)  # a fixture
NOW = 1_700_000_000
ISSUER, AUDIENCE = "https://login.example.org", "smq-of-a-test"


class Issuer:
    """Signs tokens with keys of its own, one of each kind."""

    def __init__(self) -> None:
        self.private: dict[str, Any] = {
            "rsa": rsa.generate_private_key(65_537, 2_048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
            "ed": ed25519.Ed25519PrivateKey.generate(),
        }

    def jwks(self, **changes: Any) -> dict[str, Any]:
        """Its public keys; `changes` are made in each row."""
        kinds: dict[str, Any] = {"rsa": RSAAlgorithm, "ec": ECAlgorithm, "ed": OKPAlgorithm}
        rows = {kid: kinds[kid].to_jwk(key.public_key(), as_dict=True) for kid, key in self.private.items()}
        return {"keys": [{"kid": kid} | row | changes for kid, row in rows.items()]}

    def write(self, path: Path, **changes: Any) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.jwks(**changes)))
        temporary.replace(path)

    def token(self, kid: str | None = "rsa", alg: str = "RS256", now: float = NOW, **claims: Any) -> str:
        """For alice, valid from now on for five minutes; a claim that is None is left out."""
        key = self.private[kid or "rsa"]
        usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 300, "scope": "read write"}
        given = {name: value for name, value in (usual | claims).items() if value is not None}
        return signed(given, {"alg": alg} | ({"kid": kid} if kid is not None else {}), _signer(alg, key))


def _signer(alg: str, key: Any) -> Callable[[bytes], bytes]:
    algorithm: Any = jwt.get_algorithm_by_name(alg)
    return lambda data: algorithm.sign(data, algorithm.prepare_key(key))


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def signed(claims: object, header: Mapping[str, Any], sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    """By hand, as PyJWT refuses to make most of what is tried here."""
    text = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    said = b64(json.dumps(header).encode()) + b"." + b64(text)
    return (said + b"." + b64(sign(said))).decode()


ISSUER_KEYS, STRANGER = Issuer(), Issuer()
PEM = ISSUER_KEYS.private["rsa"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
GOOD = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": NOW, "exp": NOW + 300, "scope": "read"}


def hs256(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda data: hmac.digest(secret, data, "sha256")


def own(claims: object, **header: Any) -> str:
    return signed(claims, {"alg": "RS256", "kid": "rsa"} | header, _signer("RS256", ISSUER_KEYS.private["rsa"]))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    path = tmp_path / "jwks.json"
    ISSUER_KEYS.write(path)
    return Tokens(config(str(path)), now=lambda: NOW)


def config(jwks: str, **fields: Any) -> OAuthConfig:
    return OAuthConfig(
        **({"jwks": jwks, "issuer": ISSUER, "audience": ("other", AUDIENCE), "scopes": ("read",)} | fields)
    )


def check(tokens: Tokens, token: str) -> TokenUser:
    return asyncio.run(tokens.check(token))


@pytest.mark.parametrize(
    ("token", "lifetime_s"),
    [
        (ISSUER_KEYS.token(), 300),
        (ISSUER_KEYS.token(alg="PS384"), 300),
        (ISSUER_KEYS.token("ec", "ES256"), 300),
        (ISSUER_KEYS.token("ed", "EdDSA"), 300),
        (ISSUER_KEYS.token(None, "RS512"), 300),  # without a name the only key of its kind is meant
        (ISSUER_KEYS.token(aud=["x", AUDIENCE], scope=None, scp=["read"]), 300),
        (ISSUER_KEYS.token(exp=NOW - 29), -29),  # within the skew of the clocks
        (ISSUER_KEYS.token(nbf=NOW + 29, iat=NOW + 29, exp=NOW + 60.5), 60.5),
        (ISSUER_KEYS.token(exp=NOW + 10**11, iat=None), 366 * 86_400),
    ],
)
def test_a_token_names_its_user_until_it_ends(tokens: Tokens, token: str, lifetime_s: float) -> None:
    assert check(tokens, token) == TokenUser(user="alice", lifetime_s=lifetime_s, grace_s=30)


REFUSED = {
    "none": (signed(GOOD, {"alg": "none", "kid": "rsa"}), "not signed in a way"),
    "None": (signed(GOOD, {"alg": "NonE"}), "not signed in a way"),
    "no alg": (signed(GOOD, {"kid": "rsa"}), "not signed in a way|malformed"),
    "HS256 by the public key": (signed(GOOD, {"alg": "HS256", "kid": "rsa"}, hs256(PEM)), "not signed in a way"),
    "alg of another kind": (signed(GOOD, {"alg": "ES256", "kid": "rsa"}, hs256(PEM)), "not known"),
    "alg a list": (signed(GOOD, {"alg": ["RS256"], "kid": "rsa"}), "not signed in a way"),
    "unsigned": (signed(GOOD, {"alg": "RS256", "kid": "rsa"}), "signature is wrong"),
    "a stranger's key": (STRANGER.token(), "signature is wrong"),
    "an ECDSA signature of zeros": (
        signed(GOOD, {"alg": "ES256", "kid": "ec"}, lambda _: bytes(64)),
        "signature is wrong",
    ),
    "its own key": (
        signed(GOOD, {"alg": "RS256", "jwk": STRANGER.jwks()["keys"][0]}, _signer("RS256", STRANGER.private["rsa"])),
        "signature is wrong",
    ),
    "unknown kid": (signed(GOOD, {"alg": "RS256", "kid": "../../dev/null"}), "not known"),
    "kid a number": (signed(GOOD, {"alg": "RS256", "kid": 1}), "malformed"),
    "critical extension": (own(GOOD, crit=["exp"], exp=1), "malformed"),
    "detached": (own(GOOD, b64=False, crit=["b64"]), "malformed"),
    "foreign issuer": (ISSUER_KEYS.token(iss="https://evil.example.org"), "issuer"),
    "issuer with a tail": (ISSUER_KEYS.token(iss=ISSUER + "/"), "issuer"),
    "no issuer": (ISSUER_KEYS.token(iss=None), "lacks one of the claims"),
    "foreign audience": (ISSUER_KEYS.token(aud="mail"), "audience"),
    "no audience": (ISSUER_KEYS.token(aud=None), "lacks one of the claims"),
    "expired": (ISSUER_KEYS.token(exp=NOW - 30), "expired"),
    "no end": (ISSUER_KEYS.token(exp=None), "lacks one of the claims"),
    "an end as text": (ISSUER_KEYS.token(exp="soon"), "malformed"),
    "an end that is true": (ISSUER_KEYS.token(exp=True), "malformed"),
    "an endless end": (own(json.dumps(GOOD).replace(str(NOW + 300), "1e999").encode()), "malformed"),
    "not yet valid": (ISSUER_KEYS.token(nbf=NOW + 31), "not valid yet"),
    "issued later": (ISSUER_KEYS.token(iat=NOW + 31), "not valid yet"),
    "no scope": (ISSUER_KEYS.token(scope=None), "lacks a scope"),
    "part of a scope": (ISSUER_KEYS.token(scope="reader write"), "lacks a scope"),
    "no user": (ISSUER_KEYS.token(sub=None), "names no user"),
    "a user as a number": (ISSUER_KEYS.token(sub=1), "names no user|malformed"),
    "everyone": (ISSUER_KEYS.token(sub="*"), "is not allowed"),
    "a user with a line break": (ISSUER_KEYS.token(sub="a\nb"), "is not allowed"),
    "a user without a name": (ISSUER_KEYS.token(sub=""), "is not allowed"),
    "no claims": (own([]), "malformed"),
    "no JSON": (own(b"\xff"), "malformed"),
    "nested": (own(b"[" * 6_000), "malformed"),
    "a nested header": (b64(b"[" * 6_000).decode() + ".e30.", "malformed"),
    "two parts": ("e30.e30", "malformed"),
    "five parts": ("e30.e30.e30.e30.e30", "malformed"),
    "empty": ("", "malformed"),
}


@pytest.mark.parametrize(("token", "reason"), REFUSED.values(), ids=REFUSED)
def test_any_other_token_is_refused_with_a_reason_and_without_a_secret(tokens: Tokens, token: str, reason: str) -> None:
    with pytest.raises(TokenRefused, match=reason) as refused:
        check(tokens, token)
    said, logged = str(refused.value), refused.value.detail
    assert (refused.value.status == "insufficient_scope") == ("scope" in said)
    assert not any(secret in said for secret in (ISSUER, AUDIENCE, "alice"))
    assert len(logged) < 600
    assert not any(part in logged for part in token.split(".") if len(part) > 20)


@pytest.mark.parametrize(
    ("jwks", "reason"),
    [
        (b"", "no set of keys"),
        (b"[" * 100_000, "no set of keys"),
        (b'{"keys": 1}', "a list"),
        (b'{"keys": []}', "no public key"),
        (b" " * (JWKS_BYTES_MAX + 1), "at most"),
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}).encode(), "a private key or a secret"),
        (json.dumps(ISSUER_KEYS.jwks(d="AQAB")).encode(), "a private key or a secret"),
        (json.dumps(ISSUER_KEYS.jwks(use="enc")).encode(), "no public key"),
        (json.dumps(ISSUER_KEYS.jwks(alg="HS256")).encode(), "no public key"),
        (
            json.dumps({"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}, {"kty": "EC", "crv": "P-256"}]}).encode(),
            "no public",
        ),
        (json.dumps({"keys": [{"kty": ["RSA"], "crv": {}}, 1, None]}).encode(), "no public key"),
    ],
)
def test_a_set_without_a_public_key_that_can_be_used_is_refused(tmp_path: Path, jwks: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_keys(jwks)
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks)
    with pytest.raises(StartError, match=reason):
        Tokens(config(str(path)))


def test_a_new_key_serves_at_once_and_an_unusable_file_leaves_the_old_ones(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smq.coordinator.service.tokens.JWKS_FETCH_S_MIN", 0)
    path, rotated = tmp_path / "jwks.json", Issuer()
    rotated.private["next"] = rotated.private.pop("rsa")

    async def scenario() -> None:
        new = signed(GOOD, {"alg": "RS256", "kid": "next"}, _signer("RS256", rotated.private["next"]))
        with pytest.raises(TokenRefused, match="not known"):
            await tokens.check(new)
        both = {
            "keys": [
                *ISSUER_KEYS.jwks()["keys"],
                RSAAlgorithm.to_jwk(rotated.private["next"].public_key(), True) | {"kid": "next"},
            ]
        }
        path.write_text(json.dumps(both))
        for token in (new, ISSUER_KEYS.token()):
            assert (await tokens.check(token)).user == "alice"
        assert not tokens.warnings()
        path.write_text("half a fi")
        with pytest.raises(TokenRefused, match="not known"):
            await tokens.check(signed(GOOD, {"alg": "RS256", "kid": "third"}))
        assert (await tokens.check(new)).user == "alice"
        assert "no set of keys" in tokens.warnings()[0]
        STRANGER.write(path)
        tokens.reload()
        await tokens._wait_for_fetch()
        with pytest.raises(TokenRefused):
            await tokens.check(ISSUER_KEYS.token())

    asyncio.run(scenario())


def test_keys_come_by_https_from_the_issuer_alone(authorities: Authorities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    identity = authorities.node(1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    answers: dict[str, Any] = {"body": b"[]", "asked": 0}

    async def jwks(_: web.Request) -> web.Response:
        answers["asked"] += 1
        return web.Response(body=answers["body"])

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/jwks")

    async def scenario() -> None:
        app = web.Application()
        app.add_routes([web.get("/jwks", jwks), web.get("/moved", elsewhere)])
        server = TestServer(app, scheme="https")
        await server.start_server(ssl=context)
        url = f"https://127.0.0.1:{server.port}"
        try:
            ca = authorities.ours / "ca" / "ca.crt"
            tokens = Tokens(config(f"{url}/jwks", ca=ca), now=lambda: NOW)
            assert "have not been fetched" in tokens.warnings()[0]
            for body, reason in ((b"[]", "no set of keys"), (b" " * (JWKS_BYTES_MAX + 1), "at most")):
                answers["body"] = body
                await tokens._wait_for_fetch()
                assert reason in tokens.warnings()[0]
            for other in (Tokens(config(f"{url}/moved", ca=ca)), Tokens(config(f"{url}/jwks"))):  # no authority of ours
                await other._wait_for_fetch()
                assert other.warnings()
            answers.update(body=json.dumps(ISSUER_KEYS.jwks()).encode(), asked=0)
            for _ in range(20):
                with pytest.raises(TokenRefused, match="not known"):
                    await tokens.check(ISSUER_KEYS.token())
            assert answers["asked"] == 0  # it asked a moment ago, and tokens of strangers make it ask no more often
            tokens._fetched_at = float("-inf")  # long ago: the first asks, and the others wait for that answer
            found = await asyncio.gather(*(tokens.check(ISSUER_KEYS.token()) for _ in range(20)))
            assert {user.user for user in found} == {"alice"}
            assert answers["asked"] == 1
            assert not tokens.warnings()
        finally:
            await server.close()

    asyncio.run(scenario())
