"""Threads for reads that may wait for the medium, so that the loop does not.

Owns the threads, their queue, and the bounds: how many jobs wait, how many results the loop has yet to take, and how
many threads one place may have, as one sector that the medium is slow to give must not take them all. It must never
know what a job reads. Only the real disk imports it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from smq.replication.ports import GiveUp

Job: TypeAlias = Callable[[], Callable[[], None]]  # runs on a thread; what it returns runs on the loop
RESULTS_PER_THREAD: Final = 2  # not taken by the loop yet; a result may hold some megabytes
SLOW_NS: Final = 1_000_000_000  # far above what a healthy disk needs for one job


@dataclass(slots=True, eq=False)
class _Place:
    """The jobs of one place, by where they begin to read. Those that begin at the same key run one after another."""

    ready: OrderedDict[bytes, dict[int, Job]] = field(default_factory=OrderedDict)  # none of these runs
    began_ns: dict[bytes, int] = field(default_factory=dict)  # of those that run, the oldest first
    behind: dict[bytes, dict[int, Job]] = field(default_factory=dict)  # those that wait for one that runs

    def waiting(self, first: bytes) -> dict[int, Job]:
        """Those that begin there, by their number: any can leave in constant time."""
        return (self.behind if first in self.began_ns else self.ready).setdefault(first, {})

    def may_begin(self, running_max: int) -> bool:
        """Whether one more may run. If one is slow, others that begin elsewhere may get to the same sector."""
        if not self.began_ns:
            return True
        oldest_ns = next(iter(self.began_ns.values()))
        return len(self.began_ns) < running_max and time.monotonic_ns() - oldest_ns < SLOW_NS

    def begin(self) -> tuple[bytes, Job]:
        """The next one, and where it begins."""
        first, jobs = self.ready.popitem(last=False)
        job = jobs.pop(next(iter(jobs)))
        self.began_ns[first] = time.monotonic_ns()
        if jobs:
            self.behind[first] = jobs
        return first, job

    def end(self, first: bytes) -> None:
        del self.began_ns[first]
        if jobs := self.behind.pop(first, None):
            self.ready[first] = jobs

    def drop(self, first: bytes, number: int) -> bool:
        """False if it does not wait."""
        lanes = self.behind if first in self.began_ns else self.ready
        if (jobs := lanes.get(first)) is None or jobs.pop(number, None) is None:
            return False
        if not jobs:
            del lanes[first]
        return True


class Workers:
    """Started with the first job. Places take turns, and so do the keys in a place at which jobs begin. With several
    threads, jobs may end in any order. One place has at most two fewer than all, so that reads and look-ups of one
    partition, two places, leave a thread. A place gets no further one while a job of it is slow."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        queued_max: int,
        post: Callable[[Callable[[], None]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`post` runs a function on the loop. `on_error` runs there if a job raises; its thread has ended then."""
        self._name = name
        self._count = threads
        self._queued_max = queued_max
        self._post = post
        self._on_error = on_error
        self._place_running_max = max(1, threads - 2)
        self._places: dict[Hashable, _Place] = {}  # of all jobs that wait or run
        self._turns: OrderedDict[Hashable, _Place] = OrderedDict()  # of the places in which a job may begin
        self._waiting = 0
        self._number = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._results = threading.Semaphore(RESULTS_PER_THREAD * threads)

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return self._waiting

    def submit(self, job: Job, place: Hashable, first: bytes) -> GiveUp | None:
        """`first`: where in the place it begins to read. None, and nothing is done, if too many jobs wait. A job that
        is given up before it begins never does."""
        with self._changed:
            if self._waiting >= self._queued_max:
                return None
            self._number += 1
            self._waiting += 1
            found = self._places.setdefault(place, _Place())
            found.waiting(first)[self._number] = job
            self._take_turn(place, found)
            drop = partial(self._drop, place, first, self._number)
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        return drop

    def _take_turn(self, place: Hashable, found: _Place) -> None:
        if found.ready and found.may_begin(self._place_running_max):
            self._turns.setdefault(place, found)
            self._changed.notify()

    def _drop(self, place: Hashable, first: bytes, number: int) -> None:
        with self._changed:
            found = self._places.get(place)
            if found is not None and found.drop(first, number):
                self._waiting -= 1
                if not found.ready:
                    self._turns.pop(place, None)
                    self._forget_idle(place, found)

    def _forget_idle(self, place: Hashable, found: _Place) -> None:
        if not found.ready and not found.began_ns:
            del self._places[place]

    def _next(self) -> tuple[Job, Hashable, bytes] | None:
        """Waits for a job, but not in a job's name: what has not begun can be given up. None at close."""
        self._results.acquire()
        with self._changed:
            while not self._is_closed:
                while self._turns:
                    place, found = self._turns.popitem(last=False)
                    if found.may_begin(self._place_running_max):  # otherwise one that ends gives the place a turn
                        first, job = found.begin()
                        self._waiting -= 1
                        self._take_turn(place, found)
                        return job, place, first
                self._changed.wait()
            return None

    def _end(self, place: Hashable, first: bytes) -> None:
        with self._changed:
            found = self._places[place]
            found.end(first)
            self._take_turn(place, found)
            self._forget_idle(place, found)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            job, place, first = taken
            try:
                result = job()
            except BaseException as e:  # noqa: BLE001  # the job's owner decides what it means
                self._post(partial(self._on_error, e))
                return
            self._end(place, first)
            self._post(partial(self._take, result))
            del taken, job, result  # a thread that waits holds no rows

    def _take(self, result: Callable[[], None]) -> None:
        self._results.release()
        result()

    def close(self, timeout_s: float) -> bool:
        """Waits for the jobs under way; jobs that have not begun are dropped. False if one has not ended in time: it
        may go on, and uses what it uses."""
        with self._changed:
            self._is_closed = True
            for found in self._places.values():
                found.ready.clear()
                found.behind.clear()
            self._waiting = 0
            self._changed.notify_all()
        for _ in self._threads:
            self._results.release()  # the loop may take no more results
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
