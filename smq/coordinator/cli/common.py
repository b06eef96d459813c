"""What the commands share: running a coroutine, printing tables and counts, and errors in one sentence.

Owns no command. The modules of commands import it.
"""

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

from smq import clients
from smq.clients.metadata import parse_bootstrap
from smq.clients.tls import tls_from_environment
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")

CONNECT_TIMEOUT_MS: Final = 3_000.0  # a person is waiting at a terminal
CALL_TIMEOUT_MS: Final = 15_000.0  # an election, and some slack


def open_admin(bootstrap: str, timeout_ms: float = CALL_TIMEOUT_MS) -> "clients.Admin":
    """The client of every command that asks about the cluster, or changes it. Only its first use imports it."""
    return clients.Admin(bootstrap, timeout_ms=timeout_ms, connect_timeout_ms=CONNECT_TIMEOUT_MS)


def print_table(table: Table) -> None:
    """Not wrapped if the output is no terminal: scripts read whole lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def run(work: Coroutine[Any, Any, T], bootstrap: str) -> T:
    """Runs a command's coroutine. UserError if no node answers; `main` reports any other SmqError."""
    try:
        return asyncio.run(work)
    except SmqError as e:
        if e.code is ErrorCode.UNREACHABLE:
            raise UserError(_no_answer(bootstrap, e)) from e
        raise
    except BrokenPipeError:
        # The reader of our output has closed it. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


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
    return f"{silent}: start one with `smq dev`, or name the gRPC port of a running one with --bootstrap"


def _speaks_tls(address: str) -> bool:
    """Whether the listener there answers a TLS greeting. Its identity does not matter: we send it nothing."""
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
