"""docs/reference/commands.md from what --help says: every command with its options."""

import re
from collections.abc import Iterator
from typing import Final

import click

from docs.generate import cell, escaped, table
from smq.coordinator.cli.commands.man import below, options, paragraphs, usage
from smq.coordinator.cli.connect import with_bootstrap_option
from smq.coordinator.cli.root import cli

_HEAD: Final = """\
# Commands

Generated from `smq/coordinator/cli` by `make docs`; do not edit.

What `smq COMMAND --help` says, for all commands. [cli.md](../cli.md) shows how they are used, with JSON and exit codes.
`smq man` writes the same as man pages.

## Options that lead to a cluster

Every command below whose usage is marked with `*` has these, too.

"""
_COLUMNS: Final = ("option", "meaning")
_EXAMPLE: Final = re.compile(r"(Examples?[^:]*: )(smq .+)")


def render() -> str:
    root = click.Context(cli, info_name="smq")
    shared = _rows(click.Context(with_bootstrap_option(click.Command(None, add_help_option=False)), parent=root))
    return "\n".join([_HEAD + table(_COLUMNS, shared), *_commands(root, "##", shared)])


def _commands(ctx: click.Context, mark: str, shared: list[tuple[str, str]]) -> Iterator[str]:
    for inner in below(ctx):
        yield f"{mark} {inner.command_path}\n"
        rows = _rows(inner)
        yield f"`{inner.command_path} {usage(inner)}`{' `*`' if set(shared) <= set(rows) else ''}\n"
        for text, is_verbatim in paragraphs(inner.command.help or ""):
            yield f"```text\n{text}\n```\n" if is_verbatim else f"{_paragraph(text)}\n"
        own = [row for row in rows if row not in shared]
        if own:
            yield table(_COLUMNS, own)
        yield from _commands(inner, f"{mark}#", shared)


def _rows(ctx: click.Context) -> list[tuple[str, str]]:
    """Arguments without a text, and --help, say nothing here."""
    return [(cell(f"`{names}`"), cell(text)) for names, text in options(ctx) if text and names != "--help"]


def _paragraph(text: str) -> str:
    example = _EXAMPLE.fullmatch(text)
    return f"{example[1]}`{example[2]}`" if example else escaped(text)
