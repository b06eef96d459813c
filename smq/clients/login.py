"""A client's user: its name and its password, and the token that a node gives for them.

Owns where both come from, the login at a node, by SCRAM, and the token's renewal. It must never send or keep either
without TLS, nor show the password. Users, every client and the Spark connector import it.
"""

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from smq.clients.pb import smq_pb2 as pb
from smq.clients.scram import BY_NAME, ClientExchange
from smq.raft_state.errors import ErrorCode, SmqError

if TYPE_CHECKING:
    from smq.clients.pb.smq_pb2_grpc import UsersAsyncStub, UsersStub

USER_VARIABLE: Final = "SMQ_USER"
PASSWORD_FILE_VARIABLE: Final = "SMQ_PASSWORD_FILE"
MECHANISM: Final = "SCRAM-SHA-512"
TOKEN_KEY: Final = "authorization"  # in a call's metadata
TOKEN_SCHEME: Final = "Bearer "
LOGIN_S_MAX: Final = 10.0
_RENEW_SHARE: Final = 0.8  # of a token's time, after which a new one is asked for
_PASSWORD_BYTES_MAX: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user of ports that ask for one, with `password`, or the first line of `password_file`, which no other account
    may read. It needs TLS. INVALID_REQUEST for anything else."""

    user: str
    password: str | None = field(default=None, repr=False)
    password_file: str | Path | None = None
    mechanism: str = MECHANISM

    def __post_init__(self) -> None:
        if not self.user or (self.password is None) == (self.password_file is None):
            raise SmqError(ErrorCode.INVALID_REQUEST, "a login has a user, and a password or a password_file")
        if self.mechanism not in BY_NAME:
            known = ", ".join(BY_NAME)
            raise SmqError(ErrorCode.INVALID_REQUEST, f"login: the mechanism {self.mechanism!r} is none of {known}")

    def exchange(self) -> ClientExchange:
        """A new login. INVALID_REQUEST if the password's file is unusable."""
        password = self.password if self.password is not None else read_password(Path(self.password_file or ""))
        return ClientExchange(BY_NAME[self.mechanism], self.user, password)


def read_password(path: Path) -> str:
    """INVALID_REQUEST if it cannot be read, is empty, or may be read by others."""
    try:
        with path.open("rb") as file:
            others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            line = file.readline(_PASSWORD_BYTES_MAX)
        password = line.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"login: cannot read the password file {path}: {e}") from e
    if others:
        message = f"login: others may read the password file {path}: run `chmod 600` on it, and change the password"
        raise SmqError(ErrorCode.INVALID_REQUEST, message)
    if not password:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"login: the first line of the password file {path} is empty")
    return password


def login_from_environment() -> Login | None:
    """The user of SMQ_USER with the password in the file SMQ_PASSWORD_FILE: the default of a client without a login.
    A variable has no password: other processes can read it."""
    user, path = os.environ.get(USER_VARIABLE), os.environ.get(PASSWORD_FILE_VARIABLE)
    return Login(user=user, password_file=path) if user and path else None


class Token:
    """Of one login at one node: `metadata` has it once `renew` has got it."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._renew_s = 0.0
        self._lock = asyncio.Lock()
        self.metadata: tuple[tuple[str, str], ...] = ()

    @property
    def is_due(self) -> bool:
        return not self.metadata or time.monotonic() >= self._renew_s

    def forget(self) -> None:
        """The node does not take it any more."""
        self.metadata = ()

    def take(self, answer: pb.LoginResponse) -> None:
        self.metadata = ((TOKEN_KEY, TOKEN_SCHEME + answer.token),)
        self._renew_s = time.monotonic() + answer.lifetime_ms / 1000 * _RENEW_SHARE

    async def renew(self, users: "UsersAsyncStub") -> None:
        """Logs in if that is due. AUTHENTICATION_FAILED, and gRPC's errors."""
        async with self._lock:
            if not self.is_due:
                return
            exchange = self._login.exchange()
            call: Any = users.Login(None, timeout=LOGIN_S_MAX)
            try:
                await call.write(pb.LoginRequest(mechanism=self._login.mechanism, message=exchange.first()))
                said = await _message(call)
                final = await asyncio.to_thread(exchange.final, said.message)
                await call.write(pb.LoginRequest(message=final))
                answer = await _message(call)
                exchange.check(answer.message)
                self.take(answer)
            except asyncio.InvalidStateError:  # the call has ended: reading says why
                await _message(call)
            finally:
                call.cancel()

    def renew_blocking(self, users: "UsersStub") -> None:
        """As `renew`, from a thread without an event loop."""
        exchange, due = self._login.exchange(), SimpleQueue[pb.LoginRequest | None]()
        due.put(pb.LoginRequest(mechanism=self._login.mechanism, message=exchange.first()))
        call: Any = users.Login(iter(due.get, None), timeout=LOGIN_S_MAX)
        answers: Iterator[pb.LoginResponse] = iter(call)
        try:
            due.put(pb.LoginRequest(message=exchange.final(next(answers).message)))
            answer = next(answers)
            exchange.check(answer.message)
            self.take(answer)
        finally:
            due.put(None)
            call.cancel()


async def _message(call: AsyncIterator[pb.LoginResponse]) -> pb.LoginResponse:
    async for answer in call:
        return answer
    raise SmqError(ErrorCode.AUTHENTICATION_FAILED, "the node ended the login")
