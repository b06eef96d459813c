"""docs/reference/commands.md from what --help says: every command with its options."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

import click

from docs.generate import escaped
from smq.coordinator.cli.commands.man import below, options, paragraphs
from smq.coordinator.cli.common import json_option
from smq.coordinator.cli.connect import with_bootstrap_option
from smq.coordinator.cli.root import cli

Row = tuple[str, str]  # an option's names and value, and its meaning

_HEAD: Final = """\
# Commands

Generated from `smq/coordinator/cli` by `make docs`; do not edit.

What `smq COMMAND --help` says, for all commands. [cli.md](../cli.md) shows how they are used, with JSON and exit codes.
`smq man` writes the same as man pages.

## Options of most commands
"""
_EXAMPLE: Final = re.compile(r"Example[^:]*: (smq .+)")
_REPEATED_MIN: Final = 3  # of an earlier command's options: fewer are listed again


def render() -> str:
    root = click.Context(cli, info_name="smq")
    commands = list(all_below(root))
    cluster, json = (
        _rows(click.Context(add(click.Command(None, add_help_option=False)), parent=root))
        for add in (with_bootstrap_option, json_option)
    )
    parts = [_HEAD]
    for shared in (cluster, json):
        without = (f"`{ctx.command_path}`" for ctx in commands if _is_leaf(ctx) and not set(shared) <= set(_rows(ctx)))
        parts += [f"Every command has these, except {', '.join(without)}:\n", _list(shared)]
    first: dict[Row, str] = {}
    for ctx in commands:
        parts += _command(ctx, {*cluster, *json}, first)
    return "\n".join(parts)


def all_below(ctx: click.Context) -> Iterator[click.Context]:
    for inner in below(ctx):
        yield inner
        yield from all_below(inner)


def _command(ctx: click.Context, shared: set[Row], first: dict[Row, str]) -> Iterator[str]:
    """`first` has the command that each option stands at already."""
    name = ctx.command_path
    arguments = [piece for piece in ctx.command.collect_usage_pieces(ctx) if piece != "[OPTIONS]"]
    yield f"{'#' * len(name.split())} {' '.join([name, *(arguments if _is_leaf(ctx) else ())])}\n"
    for text, is_verbatim in paragraphs(ctx.command.help or ""):
        example = _EXAMPLE.fullmatch(text)
        if example is None:
            yield f"```text\n{text}\n```\n" if is_verbatim else f"{escaped(text)}\n"
        elif example[1] != name:
            yield f"`{example[1]}`\n"
    own = [row for row in _rows(ctx) if row not in shared]
    for other in dict.fromkeys(first[row] for row in own if row in first):
        repeated = [row for row in own if first.get(row) == other]
        if len(repeated) >= _REPEATED_MIN:
            yield f"As for `{other}`: {', '.join(names for names, _ in repeated)}\n"
            own = [row for row in own if row not in repeated]
    if own:
        yield _list(own)
    for row in own:
        first.setdefault(row, name)


def _is_leaf(ctx: click.Context) -> bool:
    return not isinstance(ctx.command, click.Group)


def _rows(ctx: click.Context) -> list[Row]:
    """Arguments without a text, and --help, say nothing here."""
    return [(f"`{names}`", text) for names, text in options(ctx) if text and names != "--help"]


def _list(rows: Iterable[Row]) -> str:
    return "".join(f"- {names}: {escaped(text)}\n" for names, text in rows)
