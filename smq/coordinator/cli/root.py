"""The `smq` command: its groups of commands, and how errors end it.

Owns the table of commands and the one place where an error becomes a sentence and an exit code. Other layers add
commands by entry points of the group `smq.cli`, each under the entry point's name and loaded without the others. An
added command whose function takes `bootstrap` gets the options by which every command reaches a cluster.
"""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from smq import __version__, extra_advice

try:
    import click
except ImportError as e:  # smq without extras installs the script, but not what it needs
    raise SystemExit(f"smq: the command line needs the extra server (or spark): {extra_advice('server')}") from e

from smq.coordinator.cli.command_group import SUMMARY_CHARS_MAX, SuggestingGroup
from smq.coordinator.cli.failures import report_failure
from smq.coordinator.user_errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from smq.raft_state.errors import SmqError

# Command -> the module that defines it, under the command's own name. Each is imported when it is used: a server's
# imports would make every `smq produce` wait.
_MODULES: Final = {
    "acl": "smq.coordinator.cli.commands.acl",
    "cert": "smq.coordinator.cli.commands.cert",
    "cluster": "smq.coordinator.cli.commands.cluster",
    "completion": "smq.coordinator.cli.commands.completion",
    "config": "smq.coordinator.cli.commands.config",
    "consume": "smq.coordinator.cli.commands.consume",
    "dev": "smq.coordinator.cli.commands.serve",
    "disk": "smq.coordinator.cli.commands.disk",
    "doctor": "smq.coordinator.cli.commands.doctor",
    "first-start": "smq.coordinator.cli.commands.health",
    "group": "smq.coordinator.cli.commands.group",
    "health": "smq.coordinator.cli.commands.health",
    "login": "smq.coordinator.cli.commands.login",
    "logout": "smq.coordinator.cli.commands.login",
    "man": "smq.coordinator.cli.commands.man",
    "mirror": "smq.coordinator.cli.commands.mirror",
    "node": "smq.coordinator.cli.commands.node",
    "offsets": "smq.coordinator.cli.commands.offsets",
    "produce": "smq.coordinator.cli.commands.produce",
    "quota": "smq.coordinator.cli.commands.quota",
    "serve": "smq.coordinator.cli.commands.serve",
    "status": "smq.coordinator.cli.commands.status",
    "top": "smq.coordinator.cli.commands.top",
    "topic": "smq.coordinator.cli.commands.topic",
    "txn": "smq.coordinator.cli.commands.txn",
    "user": "smq.coordinator.cli.commands.user",
}
# The first sentence of each command's help (a test compares).
SUMMARIES: Final = {
    "acl": "Grants, revokes, lists and tests what users may do.",
    "cert": "Makes certificates for TLS, signed by an authority of its own.",
    "cluster": "Runs a cluster of several node processes on this machine, in the foreground.",
    "completion": "Prints a script that lets SHELL complete commands, options, topics and groups.",
    "config": "Shows and changes the settings of the whole cluster, which have Kafka's names.",
    "consume": "Writes the records of TOPIC, one per line: the value, with --json all fields, or what --output says.",
    "dev": "Runs one node in the foreground, for development.",
    "disk": "Works on a stopped node's data DIRECTORY: after a restore, to move it, or to save what it holds.",
    "doctor": "Examines nodes, quorum, partitions, disks, certificates, clocks, versions and elections.",
    "first-start": "Begins a new cluster.",
    "group": "Lists, watches, changes and deletes consumer groups.",
    "health": "Asks the node of this machine or container whether it runs.",
    "login": "Logs in as the user NAME, and keeps that for later commands, in a file of this account alone.",
    "logout": "Removes what the last login has kept.",
    "man": "Writes the man pages smq.1, smq-topic.1 and so on into DIRECTORY, such as ~/.local/share/man/man1.",
    "mirror": "Copies topics of another cluster with their offsets, compares them, and ends the copy.",
    "node": "Lists nodes; drains a node before maintenance, and undrains it.",
    "offsets": "Assigns offsets in topics with storage=external, whose records are stored elsewhere.",
    "produce": "Sends the records of FILE (default: standard input) to TOPIC.",
    "quota": "Sets, removes and lists how much of a node clients may use.",
    "serve": "Runs one node in the foreground from its node.toml.",
    "status": "Shows the nodes, the Raft leader, and the partitions without a leader.",
    "top": "Shows nodes, busy topics, the groups that are furthest behind and the newest events, again and again.",
    "topic": "Creates, lists, describes, changes, exports, trims and deletes topics.",
    "txn": "Lists, describes and aborts transactions.",
    "user": "Creates, lists and deletes the users of ports that ask for SASL, and changes passwords.",
}
_PLUGIN_GROUP: Final = "smq.cli"

# gRPC logs a line for every handshake that fails, so strangers could fill a node's disk. It reads this variable when it
# is imported, which no command has done yet. The processes that `smq cluster` starts inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class SmqGroup(SuggestingGroup):
    """Loads commands when they are used, and reports every user error in one sentence, or as JSON with --json."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_MODULES, *_added_names()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _MODULES:
            command: click.Command = getattr(_load(_MODULES[cmd_name]), cmd_name.replace("-", "_"))
            return command
        if cmd_name in _added_names():
            return _with_options(_added(cmd_name))
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Loads the command's modules. From here on garbage is collected, and the modules are never searched for it."""
        found = super().resolve_command(ctx, args)
        if not gc.isenabled():  # `main` has disabled it
            gc.freeze()
            gc.enable()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By the table: `smq --help` imports none of smq's own commands, which would take a second."""
        added = {name: _added(name).get_short_help_str(SUMMARY_CHARS_MAX) for name in _added_names()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES.get(name) or added[name]) for name in self.list_commands(ctx)])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """In place of click's, which prints errors in two styles, ends with 1 after Ctrl-C or a closed pipe, and knows
        no JSON."""
        words = list(sys.argv[1:] if args is None else args)
        is_json = "--json" in words
        name = prog_name or "smq"
        self._main_shell_completion(extra, name, complete_var)
        try:
            with self.make_context(name, words, **extra) as ctx:
                self.invoke(ctx)
                code = 0
        except click.exceptions.Exit as e:
            code = e.exit_code
        except BrokenPipeError:
            raise  # `main` ends quietly
        except (UserError, SmqError, ConnectionError, click.ClickException) as e:
            code = report_failure(e, as_json=is_json)
        except OSError as e:  # of a file that no command looked after
            if e.filename is None:
                raise  # the output's: `main` reports it
            code = report_failure(UserError(f"{os.fsdecode(e.filename)}: {e.strerror}"), as_json=is_json)
        except click.Abort as e:  # "no" to a question, the end of its input, or Ctrl-C there
            click.echo("smq: nothing was done", err=True)
            code = EXIT_INTERRUPTED if isinstance(e.__context__, KeyboardInterrupt) else EXIT_FAILED
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        sys.exit(code)


def _added_names() -> list[str]:
    from importlib.metadata import entry_points  # reading the installed packages takes a while

    return [entry.name for entry in entry_points(group=_PLUGIN_GROUP)]


def _added(name: str) -> click.Command:
    """The command of another layer, as it is there."""
    from importlib.metadata import entry_points

    entry, *_ = entry_points(group=_PLUGIN_GROUP, name=name)
    command: click.Command = entry.load()
    return command


def _with_options(command: click.Command) -> click.Command:
    """The same command with the options that its parameters ask for."""
    import inspect  # slow to import, and only this needs it

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


@click.group(cls=SmqGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="smq")
def cli() -> None:
    """A replicated, partitioned log whose offsets are exact.

    Start with `smq dev`, or with `smq cluster --data-dir D`. Then, for example:

    \b
      smq topic create greetings --partitions 3
      echo hello | smq produce greetings
      smq consume greetings --since 1h --json
      smq status
    """
