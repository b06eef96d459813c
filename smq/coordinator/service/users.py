"""Which user a name and a proof belong to: the credentials of the replicated state, and what stands in for those of an
unknown name.

Owns the look-up, the check of a password, and whether a user may stay. An unknown user costs a node the same work as a
known one, and sees the same kind of salt each time, on every node. It must never keep a password, nor derive keys on
the event loop. The ports that ask for users import it; and the server and `smq user bootstrap`, for a password that is
set without a login.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from smq.clients import scram
from smq.coordinator.limits import LOGIN_WARNINGS_PER_S_MAX, PASSWORD_CHECKS_WAITING_MAX, TIMEOUT_MS_DEFAULT
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.command_codec import decode_command, encode_command
from smq.raft_state.commands import AlterUser, ScramCredential
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import RequestId
from smq.raft_state.limits import COMMAND_BYTES_MAX, DECOY_SECRET_BYTES, REQUEST_ID_BYTES
from smq.raft_state.state import ClusterState, UserState
from smq.replication.net.rare_warnings import RareWarnings
from smq.replication.storage.directory import FILE_MODE, USER_FILE

log = structlog.get_logger(__name__)

FAILED_LOGINS: Final = RareWarnings(LOGIN_WARNINGS_PER_S_MAX)  # at all ports of the process
_RETRY_S: Final = 1.0  # until a majority of the nodes runs
ANY: Final = 0  # mechanism: a user's strongest
_FRACTION_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """A user, and the credential by which it came in. It may stay while it has that credential."""

    user: str
    credential: ScramCredential


class _Shape(NamedTuple):
    """What a stranger sees of a credential."""

    mechanism: int
    iterations: int
    salt_bytes: int


_USUAL: Final = _Shape(mechanism=2, iterations=scram.ITERATIONS, salt_bytes=scram.SALT_BYTES)


class Users:
    """`state` gives the node's present state."""

    def __init__(self, state: Callable[[], ClusterState]) -> None:
        self._state = state
        self._shaped: Mapping[str, UserState] | None = None
        self._shapes: dict[int, list[_Shape]] = {}
        # One: a flood of wrong passwords takes one core at most.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="passwords")
        self._waiting = 0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def find(self, name: str, mechanism: int) -> Identity:
        """The user with its credential of this mechanism, or of its strongest one. If there is none, an identity that
        nothing proves, and that `holds` refuses. It takes the same time in both cases."""
        found, decoy = _of(self._state().users.get(name), mechanism), self._decoy(name, mechanism)
        return Identity(name, decoy if found is None else found)

    def holds(self, identity: Identity) -> bool:
        """Whether the user still has the credential."""
        user = self._state().users.get(identity.user)
        return user is not None and any(identity.credential == credential for credential in user.credentials)

    def marker(self) -> object:
        """Another object after each change of any user."""
        return self._state().users

    async def check_password(self, name: str, password: bytes) -> Identity | None:
        """None if it is wrong, or there is no such user. OVERLOADED if too many are being checked."""
        identity = self.find(name, ANY)
        if self._waiting >= PASSWORD_CHECKS_WAITING_MAX:
            raise SmqError(ErrorCode.OVERLOADED, "too many passwords are being checked")
        self._waiting += 1
        try:
            derive = asyncio.get_running_loop().run_in_executor(self._thread, _derived, identity.credential, password)
            derived = await derive
        finally:
            self._waiting -= 1
        is_right = hmac.compare_digest(derived, identity.credential.stored_key)
        return identity if self.holds(identity) and is_right else None

    def _decoy(self, name: str, mechanism: int) -> ScramCredential:
        """The credential of an unknown user: its look is one that real users have, as often as they have it, and its
        keys are random."""
        mark = hmac.digest(self._state().decoy_secret, f"{mechanism} {name}".encode(), "sha256")
        shapes = self._shapes_of(mechanism)
        at = int.from_bytes(mark[:4], "big") * len(shapes) >> _FRACTION_BITS
        shape = shapes[at]
        key_bytes = scram.BY_NUMBER[shape.mechanism].key_bytes
        return ScramCredential(
            mechanism=shape.mechanism,
            iterations=shape.iterations,
            salt=hashlib.shake_256(mark).digest(shape.salt_bytes),
            stored_key=secrets.token_bytes(key_bytes),
            server_key=secrets.token_bytes(key_bytes),
        )

    def _shapes_of(self, mechanism: int) -> list[_Shape]:
        """Those of all users, in order, so that a new user changes the look of few unknown ones."""
        users = self._state().users
        if users is not self._shaped:
            self._shaped, self._shapes = users, {}
        shapes = self._shapes.get(mechanism)
        if shapes is None:
            found = [credential for user in users.values() if (credential := _of(user, mechanism)) is not None]
            shapes = sorted(_Shape(c.mechanism, c.iterations, len(c.salt)) for c in found)
            shapes = shapes or [_USUAL._replace(mechanism=mechanism or _USUAL.mechanism)]
            self._shapes[mechanism] = shapes
        return shapes


def _of(user: UserState | None, mechanism: int) -> ScramCredential | None:
    for credential in reversed(user.credentials if user is not None else ()):
        if mechanism in (ANY, credential.mechanism):
            return credential
    return None


def _derived(credential: ScramCredential, password: bytes) -> bytes:
    """The stored key that this password has under the credential's salt."""
    mechanism = scram.BY_NUMBER[credential.mechanism]
    salted = scram.salted(mechanism, password, credential.salt, credential.iterations)
    return scram.hashed(mechanism, scram.client_key(mechanism, salted))


# ------------------------------------------------------------------------------------------------ without a login
def leave_user(directory: Path, name: str, password: str) -> None:
    """For the node of this data directory: it sets the user's password when it next starts. OSError."""
    credentials = tuple(
        ScramCredential(
            mechanism=keys.mechanism.number,
            iterations=keys.iterations,
            salt=keys.salt,
            stored_key=keys.stored_key,
            server_key=keys.server_key,
        )
        for keys in scram.new_keys(password)
    )
    command = AlterUser(
        request_id=RequestId(secrets.token_bytes(REQUEST_ID_BYTES)),
        name=name,
        set_=credentials,
        decoy_secret=secrets.token_bytes(DECOY_SECRET_BYTES),
    )
    temporary = directory / f".{USER_FILE}.new"
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(encode_command(command))
    temporary.replace(directory / USER_FILE)


async def set_left_user(directory: Path, calls: NodeCalls) -> None:
    """Until the cluster has done what `leave_user` left here, or refused it."""
    path = directory / USER_FILE
    try:
        data = await asyncio.to_thread(path.read_bytes)
        command = decode_command(data[:COMMAND_BYTES_MAX])
    except FileNotFoundError:
        return
    except (OSError, ValueError) as e:
        log.error("user_not_set", path=str(path), reason=str(e), advice="run `smq user bootstrap` again")
        return
    if not isinstance(command, AlterUser):
        log.error("user_not_set", path=str(path), reason="it is another command")
        return
    while True:
        try:
            await calls.propose(command, TIMEOUT_MS_DEFAULT)
        except SmqError as e:
            if e.code.is_definite and not e.code.is_retriable:
                log.error("user_not_set", user=command.name, reason=str(e))
                break
            await asyncio.sleep(_RETRY_S)
        else:
            log.warning("user_set", user=command.name, by="smq user bootstrap, without a login")
            break
    path.unlink(missing_ok=True)
