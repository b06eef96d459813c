"""What smq's figures are to reach beside the other systems, and whether they do.

Owns the aims: each names a line, the figure and the limit that the other system's median of the same run gives. It must
never measure, and never round before it judges.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.peers.lines import JAVA_PRODUCES, LINES, MANY_CLIENTS, SINGLE, TAIL

SMQ: Final = "smq"
KAFKA: Final = "Kafka"
FLUSHING: Final = "Kafka, fsync"
Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # the medians, by line and system


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """`factor` and `plus` times and added to the other's figure give the limit; without `other`, `plus` is it."""

    line: str
    figure: str
    other: str | None = None
    factor: float = 1.0
    plus: float = 0.0
    at_least: bool = False

    def limit(self, rows: Rows) -> float | None:
        """None if the other system was not measured."""
        if self.other is None:
            return self.plus
        value = rows.get((self.line, self.other), {}).get(self.figure)
        return None if value is None else float(value) * self.factor + self.plus


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    aim: Aim
    value: float
    limit: float

    @property
    def is_reached(self) -> bool:
        return self.value >= self.limit if self.aim.at_least else self.value <= self.limit

    @property
    def of_limit(self) -> float:
        return self.value / self.limit


def _all() -> Iterator[Aim]:
    yield Aim(line=SINGLE, figure="p50_ms", other="etcd", plus=0.2)
    yield Aim(line=SINGLE, figure="p99_ms", other="etcd", factor=2)
    yield Aim(line=TAIL, figure="p50_ms", other=KAFKA, factor=1.5)
    yield Aim(line=MANY_CLIENTS, figure="records_per_s", plus=8_000, at_least=True)
    for line in LINES:
        if not line.lower_is_better:
            yield Aim(line=line.name, figure=line.judged, other=KAFKA, factor=1.2, at_least=True)
            if "consumes" not in line.name:
                yield Aim(line=line.name, figure=line.judged, other=FLUSHING, factor=2, at_least=True)
    for line in LINES:
        yield Aim(line=line.name, figure="nodes_cpu_s_per_million", other=KAFKA, factor=0.5)
    yield Aim(line=SINGLE, figure="written_per_byte", plus=300)
    yield Aim(line=JAVA_PRODUCES, figure="written_per_byte", plus=6)


AIMS: Final = tuple(_all())


def verdicts(rows: Rows) -> list[Verdict]:
    """Of the aims that this run can judge, in their order."""
    found = []
    for aim in AIMS:
        value, limit = rows.get((aim.line, SMQ), {}).get(aim.figure), aim.limit(rows)
        if value is not None and limit is not None:
            found.append(Verdict(aim=aim, value=float(value), limit=limit))
    return found
