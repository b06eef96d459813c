"""The `smq` command: its groups of commands, and how errors end it.

Owns the list of commands and the one place where an error becomes a sentence and an exit code. Commands live in
cli_cluster (nodes) and cli_data (topics and records); other layers add theirs by entry points of the group
`smq.cli`, each a function that takes the click group.
"""

import importlib
import importlib.util
from importlib.metadata import entry_points, version
from typing import Any, Final, NoReturn

import click

from smq.coordinator.user_errors import EXIT_FAILED, UserError
from smq.raft_state.errors import SmqError

# Loaded when they are used: a server's imports would make every `smq produce` wait.
_NODE_COMMANDS: Final = dict.fromkeys(("dev", "cluster", "serve"), "smq.coordinator.cli_cluster")
_DATA_MODULE: Final = "smq.coordinator.cli_data"
_PLUGIN_GROUP: Final = "smq.cli"


class SmqGroup(click.Group):
    """Finds commands lazily, and tells every user error in one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load_rest()
        return sorted({*super().list_commands(ctx), *_NODE_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _NODE_COMMANDS:
            command: click.Command = getattr(importlib.import_module(_NODE_COMMANDS[cmd_name]), cmd_name)
            return command
        self._load_rest()
        return super().get_command(ctx, cmd_name)

    def _load_rest(self) -> None:
        if self.commands:
            return
        if importlib.util.find_spec(_DATA_MODULE) is not None:
            importlib.import_module(_DATA_MODULE).register(self)
        for entry in entry_points(group=_PLUGIN_GROUP):
            entry.load()(self)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as e:
            _end(ctx, str(e), e.code)
        except (SmqError, ConnectionError) as e:
            _end(ctx, str(e), EXIT_FAILED)


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
