"""A group of commands: summaries in its help are whole sentences, and a command's module may be loaded when it is used.

Owns that, and the command that is suggested for a mistyped one. Modules of commands import it.
"""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

SUMMARY_CHARS_MAX: Final = 200  # longer than any: summaries are not cut


class SuggestingGroup(click.Group):
    """Names the command that is nearly what was typed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            ctx.fail(f"{e.message.rstrip('.')}: did you mean {near[0]!r}?")


class CommandGroup(SuggestingGroup):
    """`lazy`: further commands by name, as "module:attribute"."""

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._lazy:
            module, _, name = self._lazy[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                rows.append((name, command.get_short_help_str(SUMMARY_CHARS_MAX)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
