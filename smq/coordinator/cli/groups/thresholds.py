"""How a limit of lag is written: offsets (1000), bytes (10MiB) or time (5m); and whether a group is above it.

Owns the notation and the comparison. Pure.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from smq.clients.types import GroupPosition

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
