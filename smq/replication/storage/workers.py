"""Threads for reads that may wait for the medium, so that the loop does not.

Owns the threads, their queue, and the bounds: how many jobs wait, and how many results the loop has yet to take. It
must never know what a job reads. Only the real disk imports it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

from smq.replication.ports import GiveUp

Job: TypeAlias = Callable[[], Callable[[], None]]  # runs on a thread; what it returns runs on the loop
RESULTS_PER_THREAD: Final = 2  # not taken by the loop yet; a result may hold some megabytes


class Workers:
    """Started with the first job. Jobs begin in order; with several threads they may end in any."""

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
        self._jobs: OrderedDict[int, Job] = OrderedDict()  # by their number: any can leave in constant time
        self._number = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._results = threading.Semaphore(RESULTS_PER_THREAD * threads)

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._jobs)

    def submit(self, job: Job) -> GiveUp | None:
        """None, and nothing is done, if too many jobs wait. A job that is given up before it begins never does."""
        with self._changed:
            if len(self._jobs) >= self._queued_max:
                return None
            self._number += 1
            self._jobs[self._number] = job
            self._changed.notify()
            drop = partial(self._drop, self._number)
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        return drop

    def _drop(self, number: int) -> None:
        with self._changed:
            self._jobs.pop(number, None)

    def _next(self) -> Job | None:
        """Waits for a job, but not in a job's name: what has not begun can be given up. None at close."""
        self._results.acquire()
        with self._changed:
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            return self._jobs.popitem(last=False)[1] if self._jobs else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                result = job()
            except BaseException as e:  # noqa: BLE001  # the job's owner decides what it means
                self._post(partial(self._on_error, e))
                return
            self._post(partial(self._take, result))
            del job, result  # a thread that waits holds no rows

    def _take(self, result: Callable[[], None]) -> None:
        self._results.release()
        result()

    def close(self, timeout_s: float) -> bool:
        """Waits for the jobs under way; jobs that have not begun are dropped. False if one has not ended in time: it
        may go on, and uses what it uses."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        for _ in self._threads:
            self._results.release()  # the loop may take no more results
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class Gate:
    """Many may pass together, or one alone: reads of the map, and its move."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_shut = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            while self._is_shut:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._is_shut = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_shut = False
                self._changed.notify_all()
