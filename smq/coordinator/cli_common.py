"""What the data commands share: the bootstrap option, running a coroutine, and errors in one sentence.

Owns no command. cli_data, cli_produce and cli_consume import it.
"""

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from smq.clients.metadata import parse_bootstrap
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, tls_from_environment
from smq.coordinator.cluster_dir import GRPC_PORT_DEFAULT, reach_of
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

BOOTSTRAP_DEFAULT: Final = f"127.0.0.1:{GRPC_PORT_DEFAULT}"
BOOTSTRAP_VARIABLE: Final = "SMQ_BOOTSTRAP"
CONNECT_TIMEOUT_MS: Final = 3_000.0  # somebody is waiting at a terminal
CALL_TIMEOUT_MS: Final = 15_000.0  # an election, and a little more


def _use_cluster_dir(ctx: click.Context, param: click.Parameter, directory: Path | None) -> None:
    """Fills in what was not said. On the command line it wins over the environment, as any option does."""
    if directory is None:
        return
    reach = reach_of(directory)
    found = {BOOTSTRAP_VARIABLE: reach.bootstrap}
    if reach.identity is not None:
        files = (reach.identity.ca, reach.identity.certificate, reach.identity.key)
        found |= dict(zip((CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE), map(str, files), strict=True))
    is_typed = param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    for variable, value in found.items():
        if is_typed or variable not in os.environ:
            os.environ[variable] = value


def _put_variable(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Clients take their TLS files from the environment, and so does what a command starts (Spark's workers)."""
    if value is not None and isinstance(param.envvar, str):
        os.environ[param.envvar] = value


def _file_option(name: str, variable: str, text: str) -> Callable[[F], F]:
    """Of a PEM file, told by the environment."""
    return click.option(
        name,
        type=click.Path(exists=True, dir_okay=False),
        envvar=variable,
        show_envvar=True,
        expose_value=False,
        callback=_put_variable,
        help=text,
    )


def bootstrap_option(command: F) -> F:
    """How to reach the cluster: the command gets `bootstrap`; clients find the TLS files by themselves."""
    options = (
        click.option(
            "--bootstrap",
            metavar="HOST:PORT[,...]",
            default=BOOTSTRAP_DEFAULT,
            envvar=BOOTSTRAP_VARIABLE,
            show_default=True,
            show_envvar=True,
            help="gRPC addresses of one or more nodes.",
        ),
        click.option(
            "--cluster-dir",
            type=click.Path(file_okay=False, path_type=Path),
            envvar="SMQ_CLUSTER_DIR",
            show_envvar=True,
            is_eager=True,  # before the others take their values from the environment
            expose_value=False,
            callback=_use_cluster_dir,
            help="The --data-dir of a cluster of this machine: tells addresses and certificates.",
        ),
        _file_option("--tls-ca", CA_VARIABLE, "Certificates that sign the nodes' (PEM); turns TLS on."),
        _file_option("--tls-certificate", CERTIFICATE_VARIABLE, "This client's certificate (PEM)."),
        _file_option("--tls-key", KEY_VARIABLE, "The key of this client's certificate (PEM)."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def print_table(table: Table) -> None:
    """As wide as it must be where nobody looks at it: scripts read whole lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def run(work: Coroutine[Any, Any, T], bootstrap: str) -> T:
    """Runs a command's coroutine. UserError where no node answers; other SmqErrors go on to `cli`."""
    try:
        return asyncio.run(work)
    except SmqError as e:
        if e.code is ErrorCode.TIMED_OUT and "no node answers" in e.message:
            raise UserError(_no_answer(bootstrap, e)) from e
        raise
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _no_answer(bootstrap: str, error: SmqError) -> str:
    told = f"no node answers at {bootstrap}"
    if tls_from_environment() is not None:
        return f"{told} over TLS ({error.message}): is it a node of the cluster that --tls-ca belongs to?"
    if any(map(_speaks_tls, parse_bootstrap(bootstrap))):
        return (
            f"{told} without TLS: say --cluster-dir D (or SMQ_CLUSTER_DIR=D) of `smq cluster --tls`, or --tls-ca FILE"
        )
    return f"{told}: start one with `smq dev`, or name a running one with --bootstrap"


def _speaks_tls(address: str) -> bool:
    """Whether what listens there answers a TLS greeting. Whom it is does not matter: nothing is told to it."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0) as sock, context.wrap_socket(sock):
            return True
    except OSError:
        return False


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """("a=1", "b=2") as a dict."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{setting!r} is no setting: write KEY=VALUE")
        parsed[key.strip()] = value.strip()
    return parsed
