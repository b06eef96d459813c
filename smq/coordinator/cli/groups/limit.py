"""The option `--fail-above` of the commands that show lag: how it ends them.

Owns the exit code and what is said of the groups above their limit. The commands that show lag import it.
"""

from collections.abc import Iterable
from typing import Final

import click

from smq.clients.types import GroupDescription
from smq.coordinator.cli.groups.thresholds import NOTATION, Threshold, parse_threshold
from smq.coordinator.user_errors import UserError

EXIT_ABOVE: Final = 3  # a group's lag is above --fail-above: unlike 1, the command itself has not failed


def _threshold(_ctx: click.Context, _option: click.Parameter, text: str | None) -> Threshold | None:
    try:
        return parse_threshold(text) if text is not None else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


fail_above_option = click.option(
    "--fail-above",
    "limit",
    metavar="LIMIT",
    callback=_threshold,
    help=f"End with exit code {EXIT_ABOVE} if a partition's lag is above LIMIT: {NOTATION}.",
)


def check(found: Iterable[GroupDescription], limit: Threshold | None) -> None:
    """Ends the command if a group is above its limit, after it has named all that are; or if it cannot say."""
    groups = list(found)
    check_above(groups, limit)
    if limit is None:
        return
    for group in groups:
        if unknown := limit.unknown(group.positions):
            p = unknown[0]
            why = (
                "no replica has measured it, or its records are stored elsewhere"
                if p.is_end_known
                else "its leader does not answer: `smq status` shows the partitions without a leader"
            )
            raise UserError(f"the lag of group {group.summary.name} in {p.topic}/{p.partition} is not known: {why}")


def check_above(groups: Iterable[GroupDescription], limit: Threshold | None) -> None:
    """Ends the command if a group is above its limit."""
    if limit is None:
        return
    is_above = False
    for group in groups:
        if above := limit.above(group.positions):
            places = ", ".join(f"{p.topic}/{p.partition}" for p in above[:5])
            more = f" and {len(above) - 5} more" if len(above) > 5 else ""
            click.echo(f"smq: group {group.summary.name} is more than {limit.text} behind in {places}{more}", err=True)
            is_above = True
    if is_above:
        raise SystemExit(EXIT_ABOVE)
