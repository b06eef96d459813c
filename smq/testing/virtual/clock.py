"""Virtual time: one event queue for the whole world, processes that pause and die, and a clock for each.

Owns the order of all events. Ties are broken by the order of scheduling, so that a run depends on its seed alone. It
must never read real time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
WALL_EPOCH_NS = 1_700_000_000 * NS_PER_S  # an ordinary day, not 1970
CLOCK_READ_NS = 100  # a read takes time, so that loops that wait for the clock to move end (pysyncobj has some)
READY_MAX = 200_000  # callbacks in a row without time passing; with more, the code under test spins

Callback = Callable[[], None]
FN = 2  # place of the function in an Event


class SpinError(AssertionError):
    """A process keeps scheduling callbacks for the present moment."""


class Event(list[Any]):
    """A scheduled call: [when, tie-breaker, function, process]. Cancelling it removes the function.

    It is a list because the heap compares thousands of events per virtual second, and compares lists without calling
    Python code.
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
        """Runs `fn` at `time_ns`, or now if that is past; within `process` if one is given."""
        self._seq = seq = self._seq + 1
        event = Event((time_ns if time_ns > self.now_ns else self.now_ns, seq, fn, process))
        heappush(self._heap, event)
        return event

    def again(self, event: Event) -> None:
        """Runs an event now whose time has passed. It stays the same object, because its holder may still cancel it."""
        self._seq += 1
        event[0], event[1] = self.now_ns, self._seq
        heappush(self._heap, event)

    def after_ms(self, delay_ms: float, fn: Callback, process: "Process | None" = None) -> Event:
        return self.at(self.now_ns + int(delay_ms * NS_PER_MS), fn, process)

    def run_until(self, time_ns: int, *, stop: Callable[[], bool] | None = None) -> bool:
        """Runs everything up to `time_ns`; True as soon as `stop`, called after each event, returns True."""
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
    """One operating-system process: runs callbacks one at a time, may be paused, and never comes back once dead.

    An exception that leaves a callback kills the process and goes to `on_error`. If `on_step` is set, it is called
    after every callback and returns whether the process dies right there: crashes happen between any two callbacks, not
    only between two points in time.
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
        """Ends the process: queued callbacks never run."""
        self.alive = False
        self.ready.clear()
        self.held.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Goes on: events that came due during the pause run now, in their order."""
        if not self.paused:
            return
        self.paused = False
        held, self.held = self.held, deque()
        for event in held:
            self.scheduler.again(event)

    def soon(self, fn: Callback) -> None:
        """Runs `fn` at the present time, after the callbacks that are already queued."""
        self.ready.append(fn)
        if not self._running and len(self.ready) == 1:
            self.scheduler.at(self.scheduler.now_ns, _nothing, self)

    def execute(self, event: Event) -> None:
        """Runs the function of the event and everything that it schedules with `soon`."""
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
        except Exception as e:  # noqa: BLE001 - any exception that leaves a callback ends the process, as in production
            self.kill()
            self.on_error(e)
        finally:
            self._running = False


def _nothing() -> None:
    """Wakes a process, which then runs its ready queue."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """The part that survives a process: the hardware clock. With `rate` 1.001 it gains a millisecond per second."""

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
