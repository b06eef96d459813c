"""Virtual time: one event queue for the whole world, processes that live, pause and die, and a clock for each.

Owns the order in which everything happens. Ties are broken by the order of scheduling, so that a run depends on
its seed alone. It must never read real time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
WALL_EPOCH_NS = 1_700_000_000 * NS_PER_S  # an ordinary day: the simulation has no business with 1970
CLOCK_READ_NS = 100  # a read costs time: loops that wait for the clock to move must end (pysyncobj has some)
READY_MAX = 200_000  # callbacks run in a row without time passing: beyond it the code under test spins

Callback = Callable[[], None]
FN = 2  # place of the function in an Event


class SpinError(AssertionError):
    """A process schedules callbacks for "now" without end."""


class Event(list[Any]):
    """One thing to come: [when, tie-breaker, function, process]. Cancelling is forgetting its function.

    A list, because the heap compares thousands of them a virtual second, and compares lists without calling anybody.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[FN] = None


class Scheduler:
    """The heap of events and the true time, in nanoseconds since the start of the run."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.executed = 0
        self._seq = 0
        self._heap: list[Event] = []

    def at(self, time_ns: int, fn: Callback, process: "Process | None" = None) -> Event:
        """Runs `fn` at `time_ns` (now, where that is past), within `process` where one is given."""
        self._seq = seq = self._seq + 1
        event = Event((time_ns if time_ns > self.now_ns else self.now_ns, seq, fn, process))
        heappush(self._heap, event)
        return event

    def again(self, event: Event) -> None:
        """Runs an event now whose time has passed: the same object, for whoever holds it may still cancel it."""
        self._seq += 1
        event[0], event[1] = self.now_ns, self._seq
        heappush(self._heap, event)

    def after_ms(self, delay_ms: float, fn: Callback, process: "Process | None" = None) -> Event:
        return self.at(self.now_ns + int(delay_ms * NS_PER_MS), fn, process)

    def run_until(self, time_ns: int, *, stop: Callable[[], bool] | None = None) -> bool:
        """Runs everything up to `time_ns`; True as soon as `stop` says so (asked after each event)."""
        heap = self._heap
        while heap and heap[0][0] <= time_ns:
            event = heappop(heap)
            self.now_ns, _, fn, process = event
            if fn is None:
                continue
            self.executed += 1
            if process is not None:
                process.execute(event)
            else:
                event[FN] = None
                fn()
            if stop is not None and stop():
                return True
        self.now_ns = max(self.now_ns, time_ns)
        return False

    def run_for_ms(self, duration_ms: float, *, stop: Callable[[], bool] | None = None) -> bool:
        return self.run_until(self.now_ns + int(duration_ms * NS_PER_MS), stop=stop)


class Process:
    """One operating-system process: runs callbacks one at a time, may be paused, and is dead for ever once dead.

    An exception that leaves a callback kills it, and `on_error` is told. `on_step` (when set) is asked after every
    callback whether the process dies right there: crashes fall between any two callbacks, not only between times.
    """

    __slots__ = ("_running", "alive", "held", "name", "on_error", "on_step", "paused", "ready", "scheduler")

    def __init__(self, scheduler: Scheduler, name: str, on_error: Callable[[Exception], None]) -> None:
        self.scheduler = scheduler
        self.name = name
        self.on_error = on_error
        self.on_step: Callable[[], bool] | None = None
        self.alive = True
        self.paused = False
        self.ready: deque[Callback] = deque()
        self.held: deque[Event] = deque()
        self._running = False

    def kill(self) -> None:
        """Nothing of it runs any more; what was queued is gone."""
        self.alive = False
        self.ready.clear()
        self.held.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """What came due meanwhile runs now, in its order."""
        if not self.paused:
            return
        self.paused = False
        held, self.held = self.held, deque()
        for event in held:
            self.scheduler.again(event)

    def soon(self, fn: Callback) -> None:
        self.ready.append(fn)
        if not self._running and len(self.ready) == 1:
            self.scheduler.at(self.scheduler.now_ns, _nothing, self)

    def execute(self, event: Event) -> None:
        """Runs its function and everything that this asks to run soon."""
        if not self.alive:
            return
        if self.paused:
            self.held.append(event)
            return
        fn, event[FN] = event[FN], None
        ready, left = self.ready, READY_MAX
        self._running = True
        try:
            while fn is not None:
                fn()
                if self.on_step is not None and self.alive and self.on_step():
                    break
                fn = ready.popleft() if ready else None
                left -= 1
                if not left:
                    raise SpinError(f"{self.name}: {READY_MAX} callbacks in a row without time passing")
        except Exception as e:  # noqa: BLE001 - whatever leaves a callback ends the process, as in production
            self.kill()
            self.on_error(e)
        finally:
            self._running = False


def _nothing() -> None:
    """Wakes a process for what lies in its ready queue."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """What survives a process: the hardware's clock. `rate` 1.001 gains a millisecond a second."""

    rate: float = 1.0
    wall_offset_ns: int = 0


class SimClock:
    """The Clock port of one process on one machine. Dies with the process."""

    def __init__(self, process: Process, machine: Machine) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._machine = machine
        self._reads_ns = NS_PER_S
        self.call_soon = process.soon

    def monotonic_ns(self) -> int:
        self._reads_ns += CLOCK_READ_NS
        return int(self._scheduler.now_ns * self._machine.rate) + self._reads_ns

    def wall_ns(self) -> int:
        self._reads_ns += CLOCK_READ_NS
        machine = self._machine
        return (
            WALL_EPOCH_NS
            - NS_PER_S
            + machine.wall_offset_ns
            + int(self._scheduler.now_ns * machine.rate)
            + self._reads_ns
        )

    def call_later(self, delay_ms: float, fn: Callback) -> Event:
        due = self._scheduler.now_ns + int(delay_ms * NS_PER_MS / self._machine.rate)
        return self._scheduler.at(due, fn, self._process)
