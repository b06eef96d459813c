"""SCRAM's keys (RFC 5802, RFC 7677): what a password becomes before it leaves its process.

Owns the mechanisms, under Kafka's names and numbers, the derivation of their keys, by hashlib and hmac, and a client's
side of a login. It must never show a password. Clients, the command line and the server's ports import it.
"""

import hashlib
import hmac
import re
import secrets
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Final

from smq.raft_state.errors import ErrorCode, SmqError

ITERATIONS_MIN: Final = 4_096  # RFC 7677's: a node that asks for fewer wants to guess
ITERATIONS: Final = 16_384  # as many as Kafka's clients and nodes take: a guess costs its maker as much
SALT_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Mechanism:
    name: str
    number: int  # Kafka's, in requests about users
    digest: str  # of hashlib
    key_bytes: int


MECHANISMS: Final = (Mechanism("SCRAM-SHA-256", 1, "sha256", 32), Mechanism("SCRAM-SHA-512", 2, "sha512", 64))
BY_NAME: Final = {mechanism.name: mechanism for mechanism in MECHANISMS}
BY_NUMBER: Final = {mechanism.number: mechanism for mechanism in MECHANISMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What a node keeps of a password. It is not the password, but helps to guess it: no text shows it."""

    mechanism: Mechanism
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


def salted(mechanism: Mechanism, password: bytes, salt: bytes, iterations: int) -> bytes:
    """SaltedPassword: milliseconds of work, so never on an event loop. It releases the GIL."""
    return hashlib.pbkdf2_hmac(mechanism.digest, password, salt, iterations)


def keyed(mechanism: Mechanism, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, mechanism.digest)


def hashed(mechanism: Mechanism, data: bytes) -> bytes:
    return hashlib.new(mechanism.digest, data).digest()


def client_key(mechanism: Mechanism, salted_password: bytes) -> bytes:
    """With it a client proves the password. A node never keeps it."""
    return keyed(mechanism, salted_password, b"Client Key")


def keys_of(mechanism: Mechanism, salted_password: bytes, salt: bytes, iterations: int) -> Keys:
    return Keys(
        mechanism=mechanism,
        iterations=iterations,
        salt=salt,
        stored_key=hashed(mechanism, client_key(mechanism, salted_password)),
        server_key=keyed(mechanism, salted_password, b"Server Key"),
    )


def new_keys(password: str) -> list[Keys]:
    """Of a new password: for each mechanism, under a salt of its own."""
    found = []
    for mechanism in MECHANISMS:
        salt = secrets.token_bytes(SALT_BYTES)
        found.append(keys_of(mechanism, salted(mechanism, password.encode(), salt, ITERATIONS), salt, ITERATIONS))
    return found


_SERVER_FIRST: Final = re.compile(rb"r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+),s=(?P<salt>[A-Za-z0-9+/=]+),i=(?P<i>\d{1,9})")
_NONCE_BYTES: Final = 24
_NO_BINDING: Final = b"n,,"


class ClientExchange:
    """A client's side of one login: it proves that it knows the password, and that the node knows its keys."""

    def __init__(self, mechanism: Mechanism, user: str, password: str, nonce: bytes = b"") -> None:
        self._mechanism = mechanism
        self._password = password.encode()
        self._nonce = nonce or secrets.token_urlsafe(_NONCE_BYTES).encode()
        name = user.replace("=", "=3D").replace(",", "=2C").encode()
        self._bare = b"n=%s,r=%s" % (name, self._nonce)
        self._signature = b""

    def first(self) -> bytes:
        return _NO_BINDING + self._bare

    def final(self, said: bytes) -> bytes:
        """The answer to the node's first message: milliseconds of work. AUTHENTICATION_FAILED for a node that makes
        guesses cheaper, or asks for more work than any node does."""
        found, mechanism = _SERVER_FIRST.fullmatch(said), self._mechanism
        iterations = int(found["i"]) if found is not None else 0
        is_own = found is not None and found["nonce"].startswith(self._nonce) and found["nonce"] != self._nonce
        if found is None or not is_own or not ITERATIONS_MIN <= iterations <= ITERATIONS:
            raise SmqError(ErrorCode.AUTHENTICATION_FAILED, "the node does not log users in as it should")
        unsigned = b"c=%s,r=%s" % (b64encode(_NO_BINDING), found["nonce"])
        message = b"%s,%s,%s" % (self._bare, said, unsigned)
        password = salted(mechanism, self._password, b64decode(found["salt"]), iterations)
        own_key = client_key(mechanism, password)
        stored = keyed(mechanism, hashed(mechanism, own_key), message)
        self._signature = keyed(mechanism, keyed(mechanism, password, b"Server Key"), message)
        proof = bytes(a ^ b for a, b in zip(own_key, stored, strict=True))
        return b"%s,p=%s" % (unsigned, b64encode(proof))

    def check(self, said: bytes) -> None:
        """AUTHENTICATION_FAILED if the node does not know the user's keys: it is none of the cluster."""
        expected = b"v=" + b64encode(self._signature)
        if not self._signature or not hmac.compare_digest(said, expected):
            raise SmqError(ErrorCode.AUTHENTICATION_FAILED, "the node does not know this user: is it of the cluster?")
