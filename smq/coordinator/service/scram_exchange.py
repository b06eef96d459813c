"""A node's side of SCRAM (RFC 5802, RFC 7677): what a client's messages prove.

Owns the parsers of the messages and the exchange. It must never tell a wrong password from an unknown user, log a
message, or compare secrets in variable time. The ports that ask for users import it.
"""

import binascii
import hmac
import re
import secrets
from base64 import b64decode, b64encode
from typing import Final

from smq.clients import scram
from smq.coordinator.service.users import Identity, Users

CHECK_PASSWORD: Final = "check the user's name and its password"
_NONCE_BYTES: Final = 24

# What a message may hold is checked before it is taken apart. `saslname` is UTF-8, `nonce` printable, without commas.
SASLNAME: Final = rb"(?:[^\x00=,]|=2C|=3D)+"
_EXTENSIONS: Final = rb"(?:,[A-Za-z]+=[^\x00,]+)*"  # such as Kafka's tokenauth=true, whose tokens are no users here
_CLIENT_FIRST: Final = re.compile(
    rb"(?P<gs2>[ny],(?:a=(?P<authzid>" + SASLNAME + rb"))?,)"
    rb"(?P<bare>n=(?P<name>" + SASLNAME + rb"),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)" + _EXTENSIONS + rb")"
)
_CLIENT_FINAL: Final = re.compile(
    rb"(?P<signed>c=(?P<binding>[A-Za-z0-9+/=]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)" + _EXTENSIONS + rb"),"
    rb"p=(?P<proof>[A-Za-z0-9+/=]+)"
)


class LoginFailed(Exception):
    """The message is for the node's log. A client learns no more than that it failed."""


class ScramExchange:
    """One run of SCRAM: a client's first message, then its final one. Nothing of it serves in another run, because each
    has a nonce of the node's own."""

    advice = CHECK_PASSWORD
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
        name = unescaped(found["name"])
        if found["authzid"] is not None and unescaped(found["authzid"]) != name:
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


def unescaped(saslname: bytes) -> str:
    return text(saslname.replace(b"=2C", b",").replace(b"=3D", b"="))


def text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise LoginFailed("a name that is not UTF-8") from e


def _decoded(data: bytes) -> bytes:
    try:
        return b64decode(data, validate=True)
    except binascii.Error as e:
        raise LoginFailed("base64 that is none") from e
