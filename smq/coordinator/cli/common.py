"""What the commands share: running a coroutine, printing tables and counts, and errors in one sentence.

Owns no command. The modules of commands import it.
"""

import asyncio
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import click

from smq import clients
from smq.clients.metadata import parse_bootstrap
from smq.clients.tls import tls_from_environment
from smq.coordinator.server.signals import handled
from smq.coordinator.user_errors import NoAnswer
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")

CONNECT_TIMEOUT_MS: Final = 3_000.0  # a person is waiting at a terminal
CALL_TIMEOUT_MS: Final = 8_000.0  # several elections; a cluster without a majority is named soon
NOTICE_S: Final = 3.0  # of silence, before a person may think that the command hangs


def open_admin(bootstrap: str, timeout_ms: float = CALL_TIMEOUT_MS) -> "clients.Admin":
    """The client of every command that asks about the cluster, or changes it. Only its first use imports it."""
    return clients.Admin(bootstrap, timeout_ms=timeout_ms, connect_timeout_ms=CONNECT_TIMEOUT_MS)


json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON, errors included (docs/cli.md).")
yes_option = click.option("--yes", "is_sure", is_flag=True, help="Do not ask, even on a terminal.")
_notice: Final[ContextVar[asyncio.TimerHandle | None]] = ContextVar("notice", default=None)
_NO_MAJORITY: Final = frozenset({ErrorCode.NO_QUORUM, ErrorCode.LEADER_UNAVAILABLE, ErrorCode.NODE_NOT_READY})


class _Ending:
    """What signals do to a command's coroutine: the first one cancels it."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None
        self._task: asyncio.Task[object] | None = None
        self._is_given_up = False

    def follow(self) -> None:
        """The task that calls this is what a signal cancels from now on."""
        self._task = asyncio.current_task()

    def in_order(self, number: signal.Signals) -> None:
        if self._task is None or self._task.done():
            self.now(number)
        else:
            self.by = number
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def now(self, number: signal.Signals) -> None:
        """Gives the terminal back, which needs an exception. If that is blocked, too, as the last flush to a pipe that
        is full, the next signal is the end of the process."""
        if self._is_given_up:
            os._exit(128 + number)
        self._is_given_up = True
        raise SystemExit(128 + number)


def run(
    work: Coroutine[Any, Any, T], bootstrap: str, ended_by: tuple[signal.Signals, ...] = (signal.Signals.SIGINT,)
) -> T:
    """Runs a command's coroutine. If no node answers, or there is no quorum, the error says what to look at next.

    The signals of `ended_by` let it end in order, and then SIGINT raises KeyboardInterrupt, and another one
    CancelledError. A signal that was ignored at the start, as a script's Ctrl-C is by its jobs, stays so."""
    ending = _Ending()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in ended_by if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    try:
        with handled(numbers, ending.in_order, ending.now):
            return asyncio.run(_with_notice(work, ending))
    except asyncio.CancelledError:
        if ending.by is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise
    except SmqError as e:
        if e.code is ErrorCode.UNREACHABLE:
            raise NoAnswer(_no_answer(bootstrap, e)) from e
        if e.code in _NO_MAJORITY:
            raise SmqError(e.code, f"{e.message} (`smq status` shows which nodes are up)", e.details) from e
        raise


async def _with_notice(work: Coroutine[Any, Any, T], ending: _Ending) -> T:
    """A person at the terminal learns after a while that the command waits for the cluster's first answers."""
    ending.follow()
    if not is_watched():
        return await work
    notice = "waiting for an answer: the cluster may lack a leader, or a majority of its nodes (`smq status`)"
    timer = asyncio.get_running_loop().call_later(NOTICE_S, lambda: click.echo(notice, err=True))
    _notice.set(timer)
    try:
        return await work
    finally:
        timer.cancel()


def answered() -> None:
    """For a command that goes on for longer than its first answers take: from here on it is not the cluster that it
    waits for, or it says so by itself."""
    if (timer := _notice.get()) is not None:
        timer.cancel()


def done(text: str, *, as_json: bool, **fields: object) -> None:
    """The last word of a command that has changed something: a sentence, or with --json the fields as one object."""
    click.echo(json.dumps(fields, ensure_ascii=False) if as_json else text)


def is_watched() -> bool:
    """Whether a person reads standard error. Scripts get errors there, and nothing else."""
    return sys.stderr.isatty()


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, is_sure: bool) -> None:
    """Asks before a deletion, if a person is at the terminal. Anything but "y" ends the command."""
    if not is_sure and is_terminal():
        click.confirm(question, abort=True, err=True)


def _no_answer(bootstrap: str, error: SmqError) -> str:
    silent = f"no node answers at {bootstrap}"
    tls = tls_from_environment()
    if tls is not None:
        hint = "is it the gRPC port of a node of the cluster that --tls-ca belongs to?"
        if tls.certificate is None:
            hint += " Nodes also ask for a client's certificate: pass --tls-certificate FILE and --tls-key FILE"
        return f"{silent} over TLS ({error.message}): {hint}"
    if any(map(_speaks_tls, parse_bootstrap(bootstrap))):
        options = "--cluster-dir D (or SMQ_CLUSTER_DIR=D) of `smq cluster --tls`, or --tls-ca FILE"
        return f"{silent} without TLS: pass {options}"
    for address in parse_bootstrap(bootstrap):
        if (found := _what_is_at(address)) is not None:
            return f"{silent}: {found}"
    return f"{silent}: start one with `smq dev`, or name the gRPC port of a running one with --bootstrap"


_GRPC_PORT: Final = "name a node's gRPC port with --bootstrap (7401, unless node.toml says otherwise)"
_API_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, 1, -1)  # of Kafka: every version of a broker answers it


def _what_is_at(address: str) -> str | None:
    """What is there instead of a node's gRPC port, and what to do; None if nothing is, or nothing that we know."""
    try:
        if _reply(address, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/"):
            return f"{address} is an HTTP port, such as that of the console: {_GRPC_PORT}"
        if _reply(address, _API_VERSIONS)[4:8] == struct.pack(">i", 1):
            return f"{address} is a Kafka port: {_GRPC_PORT}"
    except socket.gaierror as e:
        return f"the name {address.rpartition(':')[0]!r} cannot be resolved ({e.strerror}): correct it"
    except OSError:
        return None
    return None


def _reply(address: str, request: bytes) -> bytes:
    """The first bytes of the answer; none if the connection is closed or silent."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as sock:
        sock.sendall(request)
        try:
            return sock.recv(8)
        except OSError:
            return b""


def _speaks_tls(address: str) -> bool:
    """Whether the listener there answers a TLS greeting. Its identity does not matter: we send it nothing."""
    import ssl  # needed after a failure only

    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as sock, context.wrap_socket(sock):
            return True
    except OSError:
        return False


def end_text(hwm: int, *, is_known: bool) -> str:
    """A partition's end in a table. It is not known if the partition's leader has not answered."""
    return str(hwm) if is_known else f"{hwm} or more"


def counted(count: int, thing: str) -> str:
    """1 record, 2,000 records."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """("a=1", "b=2") as a dict."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{setting!r} is not a setting: write KEY=VALUE")
        parsed[key.strip()] = value.strip()
    return parsed
