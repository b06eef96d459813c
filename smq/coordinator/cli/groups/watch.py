"""`smq group watch`: how far a group is behind, again and again, through an incident as well.

Owns what a look shows, and that a look without an answer does not end the command. `commands.group` imports it.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, TypeAlias

import click

from smq.clients import Admin
from smq.clients.types import GroupDescription
from smq.coordinator.cli.common import answered, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.failures import error_json
from smq.coordinator.cli.groups.describe import describe
from smq.coordinator.cli.groups.figures import document, lag_table, member_table, total_text
from smq.coordinator.cli.groups.lag_limit import Threshold, check, check_above, fail_above_option
from smq.coordinator.cli.parameters import GROUP
from smq.raft_state.errors import SmqError

_ANSWER_MS: Final = 4_000.0  # an election takes less; a look that takes longer is shown as not known

Show: TypeAlias = Callable[[str, list[str]], None]


@click.command("watch")
@click.argument("name", type=GROUP)
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this number of refreshes. Default: until Ctrl-C.")
@fail_above_option
@json_option
@bootstrap_option
def group_watch(
    name: str, interval: float, count: int | None, limit: Threshold | None, as_json: bool, bootstrap: str
) -> None:
    """Shows the lag of the group NAME, of its members and partitions again and again, and how fast it changes.

    It goes on while the cluster does not answer. With --fail-above it ends when the limit is passed; a lag that is not
    known is an error in the last look only. With --json each look is one line.

    Example: smq group watch readers --interval 5
    """

    async def work() -> None:
        looks, speed = 0, _Speed()
        async with open_admin(bootstrap, _ANSWER_MS) as admin:
            with _screen(is_wanted=not as_json) as show:
                while True:
                    found = await _found(admin, name)
                    answered()
                    if as_json:
                        click.echo(_json(found))
                    else:
                        show(look_line(name, found, speed.of(found, time.monotonic())), look_tables(found))
                    if isinstance(found, GroupDescription):
                        check_above([found], limit)
                    looks += 1
                    if looks == count:
                        return _check_last(found, limit)
                    await asyncio.sleep(interval)

    try:
        run(work(), bootstrap)
    except KeyboardInterrupt:
        return


async def _found(admin: Admin, name: str) -> GroupDescription | SmqError:
    """The error if asking again may help."""
    try:
        return await describe(admin, name)
    except SmqError as e:
        if not e.code.is_retriable:
            raise
        return e


def _check_last(found: GroupDescription | SmqError, limit: Threshold | None) -> None:
    """A script that has asked for a number of looks must not take an unknown lag for a small one."""
    if limit is None:
        return
    if isinstance(found, SmqError):
        raise found
    check([found], limit)


class _Speed:
    """How fast the lag changes: needs two looks with an answer, one after the other."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None

    def of(self, found: GroupDescription | SmqError, now_s: float) -> float | None:
        """In offsets per second."""
        before, lag = self._before, found.lag if isinstance(found, GroupDescription) else None
        self._before = (now_s, lag) if lag is not None else None
        if lag is None or before is None or now_s <= before[0]:
            return None
        return (lag - before[1]) / (now_s - before[0])


def look_line(name: str, found: GroupDescription | SmqError, speed: float | None) -> str:
    moment = datetime.now(UTC).strftime("%H:%M:%S")
    if isinstance(found, SmqError):
        return f"{moment} {name}: not known ({found.code.name}: {found.message})"
    change = f", {speed:+,.0f} offsets/s" if speed is not None else ""
    return f"{moment} {name}: {found.summary.state}, lag {total_text(found.lag_total)}{change}"


def look_tables(found: GroupDescription | SmqError) -> list[str]:
    """What a terminal shows below the line."""
    if isinstance(found, SmqError):
        return []
    members = [*member_table(found).lines(), ""] if found.members else []
    return [*members, *lag_table(found).lines()]


def _json(found: GroupDescription | SmqError) -> str:
    if isinstance(found, SmqError):
        return json.dumps({"error": error_json(found)}, ensure_ascii=False)
    return document(found)


@contextmanager
def _screen(*, is_wanted: bool) -> Iterator[Show]:
    """On a terminal each look replaces the one before; elsewhere it is a line of text."""
    from rich.console import Console  # slow to import, and only this needs it
    from rich.live import Live

    console = Console(markup=False, highlight=False)
    if not is_wanted or not console.is_terminal:
        yield lambda line, tables: click.echo(line)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda line, tables: live.update("\n".join((line, *tables)), refresh=True)
