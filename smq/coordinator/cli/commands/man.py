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
    assert isinstance(root.command, click.Group)
    made = {"smq": page(root, root.command, "smq")}
    for name in root.command.list_commands(root):
        command = root.command.get_command(root, name)
        if command is not None and not command.hidden:
            made[f"smq-{name}"] = page(_context(command, name, root), command, f"smq-{name}")
    for name, text in made.items():
        (directory / f"{name}.1").write_text(text)
    click.echo(f"{len(made)} pages in {directory}")


def page(ctx: click.Context, command: click.Command, name: str) -> str:
    """One page in roff."""
    lines = [
        f'.TH "{_escaped(name).upper()}" "1" "" "smq {__version__}" "smq"',
        ".SH NAME",
        f"{_escaped(name)} \\- {_escaped(command.get_short_help_str(200))}",
        ".SH SYNOPSIS",
        *_synopsis(ctx, command),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        *_options(ctx, command),
    ]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_commands(ctx, command)]
    return "\n".join(lines) + "\n"


def _context(command: click.Command, name: str, parent: click.Context) -> click.Context:
    return click.Context(command, info_name=name, parent=parent)


def _synopsis(ctx: click.Context, command: click.Command) -> list[str]:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    return [f"\\fB{_escaped(ctx.command_path)}\\fR {_escaped(pieces)}"]


def _options(ctx: click.Context, command: click.Command) -> Iterator[str]:
    records = [record for p in command.get_params(ctx) if (record := p.get_help_record(ctx)) is not None]
    if records:
        yield ".SH OPTIONS"
    for names, text in records:
        shown = _escaped(names).replace("|", " | ")  # a long list of choices may be broken there
        yield from (".TP", f"\\fB{shown}\\fR", _escaped(" ".join(text.split())) or "\\&")


def _commands(ctx: click.Context, group: click.Group) -> Iterator[str]:
    """The commands of `smq` have pages of their own; those of a group are described in full on its page."""
    is_root = ctx.parent is None
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is None or command.hidden:
            continue
        if is_root:
            yield from (".TP", f"\\fBsmq\\-{_escaped(name)}\\fR(1)", _escaped(command.get_short_help_str(200)))
            continue
        inner = _context(command, name, ctx)
        yield from (".SS " + _escaped(f"{ctx.command_path} {name}"), *_synopsis(inner, command))
        yield from (".PP", *_paragraphs(command.help or ""))
        for line in _options(inner, command):
            yield ".PP" if line == ".SH OPTIONS" else line


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(text))):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):  # click's mark for lines that stay as they are
            yield from (".nf", _escaped(paragraph.removeprefix("\b").strip("\n")), ".fi")
        else:
            yield _escaped(" ".join(paragraph.split()))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return _LEADING_DOT.sub(r"\\&\1", text)
