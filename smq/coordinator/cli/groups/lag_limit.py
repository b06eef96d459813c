"""The option `--fail-above` of the commands that show lag: how a limit is written, and how it ends them.

Owns the notation (offsets, bytes or time), the comparison, the exit code, and what is said of the groups above their
limit. It must never ask a node. The commands that show lag import it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import click

from smq.clients.types import GroupDescription, GroupPosition
from smq.coordinator.user_errors import UserError

_WRITTEN: Final = re.compile(r"([0-9]{1,15})([A-Za-z]*)")
_BYTES: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
NOTATION: Final = "offsets (1000), bytes (10MiB, 500kB) or time (30s, 5m, 2h, 1d)"


@dataclass(frozen=True, slots=True)
class Threshold:
    """`value_of` gives a position's lag in the threshold's unit; None if it is not known."""

    text: str
    limit: int
    value_of: Callable[[GroupPosition], int | None]

    def above(self, positions: Sequence[GroupPosition]) -> list[GroupPosition]:
        """The partitions whose own lag is above the limit."""
        return [p for p in positions if (self.value_of(p) or 0) > self.limit]

    def unknown(self, positions: Sequence[GroupPosition]) -> list[GroupPosition]:
        """The partitions whose lag is not known: a script must not take it for 0."""
        return [p for p in positions if self.value_of(p) is None]


def parse_threshold(text: str) -> Threshold:
    """ValueError if it is written otherwise."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is not None:
        count, unit = int(written[1]), written[2]
        if not unit:
            return Threshold(text, count, lambda p: p.lag)
        if unit in _BYTES:
            return Threshold(text, count * _BYTES[unit], lambda p: p.lag_bytes)
        if unit in _MS:
            return Threshold(text, count * _MS[unit], lambda p: p.lag_ms)
    raise ValueError(f"{text!r} is no limit of lag: write {NOTATION}")


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
