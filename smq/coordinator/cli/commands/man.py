"""`smq man`: the commands as man pages, one for `smq` and one for each command, from their own help.

Owns the form of a page (roff's man macros). It knows no command: what a page says is what --help says. `cli.root` loads
it when it is used.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from smq import __version__


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


_LEADING_DOT: Final = re.compile(r"^([.'])", re.MULTILINE)  # roff would take the line for a request


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.pass_context
def man(ctx: click.Context, directory: Path) -> None:
    """Writes the man pages smq.1, smq-topic.1 and so on into DIRECTORY, such as ~/.local/share/man/man1.

    Example: smq man ~/.local/share/man/man1
    """
    directory.mkdir(parents=True, exist_ok=True)
    root = ctx.find_root()
    made = {"smq": page(root, "smq")} | {f"smq-{c.info_name}": page(c, f"smq-{c.info_name}") for c in below(root)}
    for name, text in made.items():
        (directory / f"{name}.1").write_text(text)
    click.echo(f"{len(made)} pages in {directory}")


def page(ctx: click.Context, name: str) -> str:
    """One page in roff."""
    lines = [
        f'.TH "{_escaped(name).upper()}" "1" "" "smq {__version__}" "smq"',
        ".SH NAME",
        f"{_escaped(name)} \\- {_escaped(ctx.command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        _synopsis(ctx),
        ".SH DESCRIPTION",
        *_paragraphs(ctx.command.help or ""),
        *_options(ctx),
    ]
    if isinstance(ctx.command, click.Group):
        lines += [".SH COMMANDS", *_commands(ctx)]
    return "\n".join(lines) + "\n"


def _synopsis(ctx: click.Context) -> str:
    return f"\\fB{_escaped(ctx.command_path)}\\fR {_escaped(usage(ctx))}"


def _options(ctx: click.Context) -> Iterator[str]:
    found = options(ctx)
    if found:
        yield ".SH OPTIONS"
    for names, text in found:
        shown = _escaped(names).replace("|", " | ")  # a long list of choices may be broken there
        yield from (".TP", f"\\fB{shown}\\fR", _escaped(text) or "\\&")


def _commands(ctx: click.Context) -> Iterator[str]:
    """The commands of `smq` have pages of their own; those of a group are described in full on its page."""
    for inner in below(ctx):
        if ctx.parent is None:
            short = inner.command.get_short_help_str(200)
            yield from (".TP", f"\\fBsmq\\-{_escaped(inner.info_name or '')}\\fR(1)", _escaped(short))
            continue
        yield from (".SS " + _escaped(inner.command_path), _synopsis(inner))
        yield from (".PP", *_paragraphs(inner.command.help or ""))
        for line in _options(inner):
            yield ".PP" if line == ".SH OPTIONS" else line


def _paragraphs(text: str) -> Iterator[str]:
    for number, (paragraph, is_verbatim) in enumerate(paragraphs(text)):
        if number:
            yield ".PP"
        yield from (".nf", _escaped(paragraph), ".fi") if is_verbatim else (_escaped(paragraph),)


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return _LEADING_DOT.sub(r"\\&\1", text)
