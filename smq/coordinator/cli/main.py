"""The `smq` command: its groups of commands, and how errors end it.

Owns the table of commands and the one place where an error becomes a sentence and an exit code. Other layers add
commands by entry points of the group `smq.cli`, each under the entry point's name and loaded without the others. An
added command whose function takes `bootstrap` gets the options by which every command reaches a cluster.
"""

import importlib
import inspect
import os
from importlib.metadata import entry_points, version
from types import ModuleType
from typing import Any, Final, NoReturn

from smq import extra_advice

try:
    import click
except ImportError as e:  # smq without extras installs the script, but not what it needs
    raise SystemExit(f"smq: the command line needs the extra server (or spark): {extra_advice('server')}") from e

from smq.coordinator.user_errors import EXIT_FAILED, UserError
from smq.raft_state.errors import SmqError

# Command -> the module that defines it, under the command's own name. Each is imported when it is used: a server's
# imports would make every `smq produce` wait.
_MODULES: Final = {
    "cert": "smq.coordinator.cli.cert",
    "cluster": "smq.coordinator.cli.cluster",
    "config": "smq.coordinator.cli.config",
    "consume": "smq.coordinator.cli.consume",
    "dev": "smq.coordinator.cli.cluster",
    "disk": "smq.coordinator.cli.disk",
    "group": "smq.coordinator.cli.group",
    "node": "smq.coordinator.cli.node",
    "offsets": "smq.coordinator.cli.offsets",
    "produce": "smq.coordinator.cli.produce",
    "serve": "smq.coordinator.cli.cluster",
    "status": "smq.coordinator.cli.status",
    "top": "smq.coordinator.cli.top",
    "topic": "smq.coordinator.cli.topic",
}
_PLUGIN_GROUP: Final = "smq.cli"

# gRPC logs a line for every handshake that fails, so strangers could fill a node's disk. It reads this variable when it
# is imported, which no command has done yet. The processes that `smq cluster` starts inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class SmqGroup(click.Group):
    """Loads commands when they are used, and reports every user error in one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = [entry.name for entry in entry_points(group=_PLUGIN_GROUP)]
        return sorted({*_MODULES, *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _MODULES:
            command: click.Command = getattr(_load(_MODULES[cmd_name]), cmd_name)
            return command
        for entry in entry_points(group=_PLUGIN_GROUP, name=cmd_name):
            return _added(entry.load())
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as e:
            _end(ctx, str(e), e.code)
        except (SmqError, ConnectionError) as e:
            _end(ctx, str(e), EXIT_FAILED)


def _added(command: click.Command) -> click.Command:
    """The command of another layer, with the options that its parameters ask for."""
    if command.callback is None or "bootstrap" not in inspect.signature(command.callback).parameters:
        return command
    from smq.coordinator.cli.connect import with_bootstrap_option

    return with_bootstrap_option(command)


def _load(module: str) -> ModuleType:
    """The module. A one-sentence error if it needs an extra that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package == "smq":
            raise
        raise click.ClickException(f"this needs the package {package}: {extra_advice('server')}") from e


def _end(ctx: click.Context, message: str, code: int) -> NoReturn:
    click.echo(f"smq: {message}", err=True)
    ctx.exit(code)


@click.group(cls=SmqGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("smq"), prog_name="smq")
def cli() -> None:
    """A replicated, partitioned log whose offsets are exact.

    Start with `smq dev`, or with `smq cluster --data-dir D`.
    """


def main() -> None:
    """The console script."""
    cli(prog_name="smq")


if __name__ == "__main__":
    main()
