"""SCRAM's keys (RFC 5802, RFC 7677): what a password becomes before it leaves its process.

Owns the mechanisms, under Kafka's names and numbers, and the derivation of their keys, by hashlib and hmac. It must
never keep or show a password. Clients, the command line and the server's ports import it.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

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
