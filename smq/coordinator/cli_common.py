"""What the data commands share: the bootstrap option, running a coroutine, and errors in one sentence.

Owns no command. cli_data, cli_produce and cli_consume import it.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import click

from smq.coordinator.cluster_dir import GRPC_PORT_DEFAULT
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

BOOTSTRAP_DEFAULT: Final = f"127.0.0.1:{GRPC_PORT_DEFAULT}"
CONNECT_TIMEOUT_MS: Final = 3_000.0  # somebody is waiting at a terminal
CALL_TIMEOUT_MS: Final = 15_000.0  # an election, and a little more

bootstrap_option = click.option(
    "--bootstrap",
    metavar="HOST:PORT[,...]",
    default=BOOTSTRAP_DEFAULT,
    envvar="SMQ_BOOTSTRAP",
    show_default=True,
    show_envvar=True,
    help="gRPC addresses of one or more nodes.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def run(work: Coroutine[Any, Any, T], bootstrap: str) -> T:
    """Runs a command's coroutine. UserError where no node answers; other SmqErrors go on to `cli`."""
    try:
        return asyncio.run(work)
    except SmqError as e:
        if e.code is ErrorCode.TIMED_OUT and "no node answers" in e.message:
            told = f"no node answers at {bootstrap}: start one with `smq dev`, or name a running one with --bootstrap"
            raise UserError(told) from e
        raise
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """("a=1", "b=2") as a dict."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{setting!r} is no setting: write KEY=VALUE")
        parsed[key.strip()] = value.strip()
    return parsed
