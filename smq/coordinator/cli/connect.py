"""The options by which a command reaches a cluster: addresses, a directory of this machine, TLS files.

Owns no command, and needs nothing of the server's extra: commands of other layers get the same options from
`cli.root`.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import click
from click.core import ParameterSource

from smq.clients.login import PASSWORD_FILE_VARIABLE, USER_VARIABLE
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE
from smq.coordinator.cli.profile import BOOTSTRAP_VARIABLE, use_profile

GRPC_PORT_DEFAULT: Final = 7401
HTTP_PORT_DEFAULT: Final = 7402
KAFKA_PORT_DEFAULT: Final = 9092  # where Kafka clients look first


F = TypeVar("F", bound=Callable[..., object])

BOOTSTRAP_DEFAULT: Final = f"127.0.0.1:{GRPC_PORT_DEFAULT}"


def _use_cluster_dir(ctx: click.Context, param: click.Parameter, directory: Path | None) -> None:
    """Fills in what was not given. On the command line it wins over the environment, as any option does. Without a
    directory, the last login does so."""
    if directory is None:
        use_profile()
        return
    from smq.coordinator.cli.cluster_dir import reach_of  # most commands need no directory, and it loads the server

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
    """Clients take their TLS files from the environment, and so do the processes that a command starts."""
    if value is not None and isinstance(param.envvar, str):
        os.environ[param.envvar] = value


def _file_option(name: str, variable: str, text: str) -> Callable[[F], F]:
    """The option of a PEM file, which clients find in the environment."""
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
    """How to reach the cluster: the command gets `bootstrap`, and clients find the TLS files by themselves."""
    options = (
        click.option(
            "--bootstrap",
            "--servers",
            "bootstrap",
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
            help="The --data-dir of a cluster on this machine, for its addresses and certificates.",
        ),
        _file_option("--tls-ca", CA_VARIABLE, "CA certificates that sign the nodes' (PEM); turns TLS on."),
        _file_option("--tls-certificate", CERTIFICATE_VARIABLE, "This client's certificate (PEM)."),
        _file_option("--tls-key", KEY_VARIABLE, "The key of this client's certificate (PEM)."),
        click.option(
            "--as-user",
            envvar=USER_VARIABLE,
            show_envvar=True,
            expose_value=False,
            callback=_put_variable,
            help="The user, for ports that ask for one; `smq login` keeps it.",
        ),
        _file_option("--password-file", PASSWORD_FILE_VARIABLE, "A file of this account alone: its first line."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def with_bootstrap_option(command: click.Command) -> click.Command:
    """A copy of the command with the same options, before its own."""
    made = copy.copy(command)
    made.params = [*reversed(bootstrap_option(click.Command(None)).params), *command.params]
    return made
