"""The plan of a run: a scenario's faults, drawn and timed from a seed.

Owns the scenarios and the drawing. A plan does not name nodes: the leader is known only when a fault strikes.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chaos_tests.live.faults.catalogue import CATALOGUE, NEEDS
from chaos_tests.live.faults.kinds import Fault

FAULTS_MIN: Final = 5  # a history with fewer is not counted
CALM_S: Final = (0.2, 0.8)  # after the cluster has recovered


@dataclass(frozen=True, slots=True)
class Step:
    """One fault, its duration, and the pause after it."""

    fault: Fault
    hold_s: float
    calm_s: float


SCENARIOS: Final[dict[str, tuple[str, ...]]] = {
    "all": tuple(CATALOGUE),
    "failover": ("kill-leader", "isolate-leader", "pause-leader"),
    "short": ("kill-leader", "pause-leader"),  # possible on any machine, in half a minute
    **{
        name: tuple(fault.name for fault in CATALOGUE.values() if fault.family in families)
        for name, families in {
            "kills": ("kill", "restart"),
            "pauses": ("pause",),
            "partitions": ("isolate", "network"),
            "disks": ("disk",),
            "clocks": ("clock",),
            "pressure": ("pressure", "hostile"),
        }.items()
    },
}


class PlanError(ValueError):
    """The scenario is impossible; the message names the known ones, or the missing requirement."""


def unavailable(can: frozenset[str]) -> dict[str, str]:
    """Faults that this machine does not allow: name -> the missing requirements."""
    return {
        fault.name: ", ".join(sorted(NEEDS[need] for need in fault.needs - can))
        for fault in CATALOGUE.values()
        if not fault.needs <= can
    }


def draw(scenario: str, seed: int, can: frozenset[str], count: int = FAULTS_MIN) -> list[Step]:
    """`count` faults of a scenario (or only the fault of that name), different ones first."""
    names: Iterable[str] = SCENARIOS.get(scenario, (scenario,) if scenario in CATALOGUE else ())
    if not names:
        raise PlanError(
            f"there is no scenario or fault {scenario!r}; scenarios are {', '.join(SCENARIOS)}; faults are "
            f"{', '.join(CATALOGUE)}"
        )
    missing = unavailable(can)
    faults = [CATALOGUE[name] for name in names if name not in missing]
    if not faults:
        raise PlanError(f"no fault of {scenario!r} is possible here: {missing}")
    return draw_from(faults, f"{scenario}/{seed}", count)


def draw_from(faults: list[Fault], seed: str, count: int) -> list[Step]:
    """`count` steps; none if there are no faults."""
    rng = random.Random(seed)
    drawn: list[Fault] = []
    while faults and len(drawn) < count:
        rng.shuffle(faults)
        drawn += faults[: count - len(drawn)]
    return [Step(fault, rng.uniform(*fault.hold_s), rng.uniform(*CALM_S)) for fault in drawn]
