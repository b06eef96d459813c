"""The storm: a schedule of strikes, from the scenario's randomness or from a list, and the heal that ends it.

Owns the schedule. Every run records its strikes. A run that is given such a list makes exactly these strikes, so that a
failing schedule can be cut down to the strikes that it takes.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

from chaos_tests.sim.faults import upgrades
from chaos_tests.sim.faults.catalogue import Arena, Fault, FaultSpec
from chaos_tests.sim.faults.kinds import STRIKES
from chaos_tests.sim.rpc import Actor, Script, Sleep

LEAD_MS_MAX: Final = 100.0  # clients speed up this long before a fault strikes, so that it meets work under way


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike of a schedule. Its randomness is named by `fault`, the index of the scenario's `[[fault]]`, and
    `number`, its number among the strikes of that fault."""

    at_ms: float  # since the storm began
    fault: int
    number: int
    stretch: float = 1.0  # of its duration

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self, faults: tuple[FaultSpec, ...]) -> str:
        spec = faults[self.fault]
        options = " ".join(f"{key}={value}" for key, value in sorted(spec.options.items()))
        shortened = "" if self.stretch == 1.0 else f", {self.stretch:g} as long"
        fault = f"{spec.what} {spec.target}{' ' if options else ''}{options}"
        return f"{self.at_ms / 1000:.2f} s {fault}{shortened}"


class Storm:
    """One per run. `schedule` holds the strikes to make; without it the scenario's faults strike at random."""

    def __init__(self, arena: Arena, faults: tuple[FaultSpec, ...], schedule: tuple[Strike, ...] | None) -> None:
        self._arena = arena
        self._faults = faults
        self._schedule = schedule
        self._began_ns = 0
        self.strikes: list[Strike] = []  # those made so far

    def begin(self) -> None:
        self._began_ns = self._arena.world.scheduler.now_ns
        if self._schedule is None:
            scripts = [self._strike_repeatedly(number) for number in range(len(self._faults))]
        else:
            scripts = [self._once(strike) for strike in self._schedule]
        for script in scripts:
            Actor(self._arena.clients, script)

    def _strike_repeatedly(self, fault: int) -> Script:
        spec, number = self._faults[fault], 0
        rng = self._arena.world.streams.stream(f"fault/{fault}")
        while True:
            yield Sleep(rng.uniform(*spec.every_ms))
            if self._is_over():
                return
            now_ms = (self._arena.world.scheduler.now_ns - self._began_ns) / 1e6
            yield from self._strike(Strike(now_ms, fault, number))
            number += 1

    def _once(self, strike: Strike) -> Script:
        yield Sleep(strike.at_ms)
        if not self._is_over():
            yield from self._strike(strike)

    def _is_over(self) -> bool:
        return self._arena.world.stopped

    def _strike(self, strike: Strike) -> Script:
        spec, world = self._faults[strike.fault], self._arena.world
        self.strikes.append(strike)
        rng = world.streams.stream(f"fault/{strike.fault}/{strike.number}")
        world.pace.rush()
        yield Sleep(rng.uniform(0, LEAD_MS_MAX))
        if self._is_over():
            return
        world.pace.rush()
        script = STRIKES[spec.what](Fault(self._arena, spec, rng, strike.stretch))
        result: Any = None
        while not self._is_over():
            try:
                result = yield script.send(result)
            except StopIteration:
                return
        script.close()  # the heal has undone its fault, and it must not strike any more


def heal(arena: Arena) -> None:
    """Undoes everything: links, pauses, dead nodes, slow clients, full and hung disks."""
    arena.world.recorder.note("heal")
    arena.cluster.network.heal_all()
    arena.clients.heal()
    for host in arena.cluster.hosts.values():
        host.limit(None)
        if host.disk is not None:
            host.disk.end_stall()
        host.latest_restart += 1
        if host.process is not None:
            host.process.on_step = None
        arena.cluster.resume(host.node)
        upgrades.finish(arena.cluster, host, arena.newest_level)
        arena.cluster.start(host.node)
