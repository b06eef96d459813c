"""How far a group is behind in several partitions together: one sum for totals and members, at nodes and clients.

Owns the rule for totals: if one figure is unknown, so is the total, and the sum of the known ones is its lower bound.
Pure. Clients and the coordinator import it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_Place: TypeAlias = tuple[str, int]  # topic and partition


class LagFigures(NamedTuple):
    """Of one partition. Each is None if it is not known."""

    offsets: int | None
    records: int | None  # those that can still be read
    size_bytes: int | None  # stored size of the batches with them
    age_ms: int | None  # since the next of them was appended; 0 without one


@dataclass(frozen=True, slots=True)
class Total:
    """Of one figure. `at_least` is that of the partitions where it is known."""

    at_least: int
    is_known: bool

    @property
    def value(self) -> int | None:
        """None if a partition's part is not known."""
        return self.at_least if self.is_known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LagTotal:
    """Sums; `age_ms` is that of the oldest record which is not read."""

    offsets: Total
    records: Total
    size_bytes: Total
    age_ms: Total


def total_of(parts: Iterable[LagFigures], *, is_whole: bool = True) -> LagTotal:
    """`is_whole`: False if there are further partitions, of which nothing is known."""
    rows = list(parts)

    def known(values: list[int | None]) -> tuple[list[int], bool]:
        found = [value for value in values if value is not None]
        return found, is_whole and len(found) == len(values)

    def summed(values: list[int | None]) -> Total:
        found, is_known = known(values)
        return Total(sum(found), is_known)

    ages, are_known = known([row.age_ms for row in rows])
    return LagTotal(
        offsets=summed([row.offsets for row in rows]),
        records=summed([row.records for row in rows]),
        size_bytes=summed([row.size_bytes for row in rows]),
        age_ms=Total(max(ages, default=0), are_known),
    )


def lags_by_member(
    assigned: Mapping[str, Iterable[_Place]], figures: Mapping[_Place, LagFigures], *, is_whole: bool = True
) -> dict[str, LagTotal]:
    """By member id. A group's figures are of all its partitions that exist, so a partition without any is gone, unless
    they are not the whole."""
    return {
        member: total_of(
            [figures[place] for place in places if place in figures],
            is_whole=is_whole or all(place in figures for place in places),
        )
        for member, places in ((member, list(places)) for member, places in assigned.items())
    }
