"""Threads for reads: the queue is bounded, and a job leaves it when its caller gives it up."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from smq.replication.storage.workers import RESULTS_PER_THREAD, Workers

QUEUED_MAX = 5


class Loop:
    """Workers of one thread, whose first job waits until the test lets it end."""

    def __init__(self) -> None:
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.errors: list[BaseException] = []
        self.ran: list[int] = []
        self.go_on = threading.Event()
        self.workers = Workers(
            "test", threads=1, queued_max=QUEUED_MAX, post=self.posted.put, on_error=self.errors.append
        )
        has_begun = threading.Event()

        def first() -> Callable[[], None]:
            has_begun.set()
            assert self.go_on.wait(30)
            return lambda: None

        assert self.workers.submit(first) is not None
        assert has_begun.wait(30)

    def job(self, number: int) -> Callable[[], Callable[[], None]]:
        def run() -> Callable[[], None]:
            self.ran.append(number)
            return lambda: None

        return run

    def take_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.posted.get(timeout=30)()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_what_waits_is_bounded_and_what_is_given_up_makes_room(loop: Loop) -> None:
    give_up = [loop.workers.submit(loop.job(n)) for n in range(QUEUED_MAX)]
    assert None not in give_up
    assert loop.workers.submit(loop.job(100)) is None
    for drop in give_up[1:4]:
        assert drop is not None
        drop()
        drop()  # again: it changes nothing
    assert loop.workers.waiting == 2
    assert loop.workers.submit(loop.job(200)) is not None
    loop.go_on.set()
    loop.take_until(lambda: 200 in loop.ran)
    assert loop.ran == [0, 4, 200]
    give_up[0]()  # type: ignore[misc]  # checked above: it has run, and nothing happens
    assert loop.workers.close(30)


def test_results_that_the_loop_has_yet_to_take_are_bounded_and_jobs_can_still_be_given_up(loop: Loop) -> None:
    drops = [loop.workers.submit(loop.job(n)) for n in range(4)]
    loop.go_on.set()
    while len(loop.ran) < RESULTS_PER_THREAD - 1:
        time.sleep(0.001)
    time.sleep(0.05)  # were there no bound, the rest would run now
    assert len(loop.ran) == RESULTS_PER_THREAD - 1, "the first job's result counts, too"
    last = drops[-1]
    assert last is not None
    last()
    loop.take_until(lambda: len(loop.ran) == 3)
    assert loop.ran == [0, 1, 2]
    assert loop.workers.close(30)


def test_jobs_that_have_not_begun_are_dropped_at_close(loop: Loop) -> None:
    loop.workers.submit(loop.job(1))
    threading.Timer(0.05, loop.go_on.set).start()
    assert loop.workers.close(30)
    assert (loop.ran, loop.workers.waiting) == ([], 0)


def test_a_job_that_does_not_end_does_not_hold_up_the_close_for_ever(loop: Loop) -> None:
    assert not loop.workers.close(0.05)
    loop.go_on.set()
    assert loop.workers.close(30)
