"""What --help says about a command, in parts, for pages that say the same in another form.

Owns the walk from a command to those below it, and how a help text falls into paragraphs. It must never know a form of
pages, or a command. `commands.man` and docs/generate import it.
"""

import inspect
import re
from collections.abc import Iterator

import click


def below(ctx: click.Context) -> Iterator[click.Context]:
    """The commands of a group, each in a context of its own. None for a command that is no group."""
    group = ctx.command
    if isinstance(group, click.Group):
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield click.Context(command, info_name=name, parent=ctx)


def usage(ctx: click.Context) -> str:
    """What follows the command's name."""
    return " ".join(ctx.command.collect_usage_pieces(ctx))


def options(ctx: click.Context) -> list[tuple[str, str]]:
    """(names and value, meaning) of each that is not hidden."""
    records = (parameter.get_help_record(ctx) for parameter in ctx.command.get_params(ctx))
    return [(names, " ".join(text.split())) for names, text in filter(None, records)]


def paragraphs(text: str) -> Iterator[tuple[str, bool]]:
    """Each on one line, or, if the second is true, lines that are to stay as they are."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):  # click's mark
            yield paragraph.removeprefix("\b").strip("\n"), True
        elif paragraph:
            yield " ".join(paragraph.split()), False
