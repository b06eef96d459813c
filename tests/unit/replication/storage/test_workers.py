"""Threads for reads: the queue is bounded, a job leaves it when its caller gives it up, and one place never has all."""

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from smq.replication.ports import GiveUp
from smq.replication.storage import workers
from smq.replication.storage.workers import RESULTS_PER_THREAD, Workers

QUEUED_MAX = 5
PLACE = b"place"


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

        assert self.workers.submit(first, PLACE, b"") is not None
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
    give_up = [loop.workers.submit(loop.job(n), PLACE, b"") for n in range(QUEUED_MAX)]
    assert None not in give_up
    assert loop.workers.submit(loop.job(100), PLACE, b"") is None
    for drop in give_up[1:4]:
        assert drop is not None
        drop()
        drop()  # again: it changes nothing
    assert loop.workers.waiting == 2
    assert loop.workers.submit(loop.job(200), PLACE, b"") is not None
    loop.go_on.set()
    loop.take_until(lambda: 200 in loop.ran)
    assert loop.ran == [0, 4, 200]
    give_up[0]()  # type: ignore[misc]  # checked above: it has run, and nothing happens
    assert loop.workers.close(30)


def test_results_that_the_loop_has_yet_to_take_are_bounded_and_jobs_can_still_be_given_up(loop: Loop) -> None:
    drops = [loop.workers.submit(loop.job(n), PLACE, b"") for n in range(4)]
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
    loop.workers.submit(loop.job(1), PLACE, b"")
    threading.Timer(0.05, loop.go_on.set).start()
    assert loop.workers.close(30)
    assert (loop.ran, loop.workers.waiting) == ([], 0)


def test_a_job_that_does_not_end_does_not_hold_up_the_close_for_ever(loop: Loop) -> None:
    assert not loop.workers.close(0.05)
    loop.go_on.set()
    assert loop.workers.close(30)


class Medium:
    """Workers of several threads. A job says that it has begun, and ends when the test lets it."""

    def __init__(self, threads: int) -> None:
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.go_on: dict[str, threading.Event] = {}
        self.workers = Workers(
            "test", threads=threads, queued_max=10_000, post=self.posted.put, on_error=lambda error: None
        )

    def submit(self, name: str, place: bytes, first: bytes) -> GiveUp:
        go_on = self.go_on[name] = threading.Event()

        def run() -> Callable[[], None]:
            self.begun.put(name)
            assert go_on.wait(60)
            return lambda: None

        give_up = self.workers.submit(run, place, first)
        assert give_up is not None
        return give_up

    def begin(self, count: int) -> set[str]:
        """The next ones that begin, whichever is first."""
        return {self.begun.get(timeout=30) for _ in range(count)}

    def end(self, name: str) -> None:
        self.go_on[name].set()
        self.posted.get(timeout=30)()

    def close(self) -> None:
        for go_on in self.go_on.values():
            go_on.set()
        assert self.workers.close(60)


@pytest.fixture
def medium() -> Iterator[Medium]:
    made = Medium(5)
    yield made
    made.close()


def test_jobs_that_begin_at_the_same_key_have_one_thread_and_run_in_order(medium: Medium) -> None:
    for n in range(10):
        medium.submit(f"same {n}", b"place", b"key")
    for n in range(3):
        medium.submit(f"other {n}", b"other", b"%d" % n)
    assert medium.begin(4) == {"same 0", "other 0", "other 1", "other 2"}
    for n in range(3):
        medium.end(f"other {n}")
    medium.end("same 0")
    assert medium.begin(1) == {"same 1"}
    medium.end("same 1")
    assert medium.begin(1) == {"same 2"}


def test_a_job_that_is_given_up_behind_another_never_begins(medium: Medium) -> None:
    medium.submit("first", b"place", b"key")
    assert medium.begin(1) == {"first"}
    drops = [medium.submit(f"behind {n}", b"place", b"key") for n in range(3)]
    for drop in drops[:2]:
        drop()
        drop()  # again: it changes nothing
    assert medium.workers.waiting == 1
    medium.end("first")
    assert medium.begin(1) == {"behind 2"}
    medium.submit("last", b"place", b"key")()
    medium.end("behind 2")
    assert (medium.workers.waiting, medium.workers._places) == (0, {})


def test_one_place_has_several_threads_but_never_all(medium: Medium) -> None:
    for n in range(6):
        medium.submit(f"place {n}", b"place", b"%d" % n)
    assert medium.begin(3) == {"place 0", "place 1", "place 2"}
    for other in ("reads", "look-ups"):
        medium.submit(other, other.encode(), b"0")
    assert medium.begin(2) == {"reads", "look-ups"}
    medium.end("reads")
    medium.end("place 1")
    assert medium.begin(1) == {"place 3"}


def test_a_place_gets_no_further_thread_while_a_job_of_it_is_slow(
    medium: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SLOW_NS", 0)  # every job is slow
    for n in range(6):
        medium.submit(f"slow {n}", b"slow", b"%d" % n)
    others = {f"other {n}" for n in range(3)}
    for name in sorted(others):
        medium.submit(name, name.encode(), b"")
    assert medium.begin(4) == {"slow 0", *others}
    medium.end("slow 0")
    assert medium.begin(1) == {"slow 1"}
    for name in others:
        medium.end(name)
    monkeypatch.setattr(workers, "SLOW_NS", 1 << 62)
    medium.end("slow 1")
    assert medium.begin(3) == {"slow 2", "slow 3", "slow 4"}, "no job is slow any more, so several begin together"


def test_places_take_turns() -> None:
    medium = Medium(1)
    for n in range(3):
        for place in (b"one", b"two"):
            medium.submit(f"{place.decode()} {n}", place, b"%d" % n)
    for name in ("one 0", "two 0", "one 1", "two 1", "one 2", "two 2"):
        assert medium.begin(1) == {name}
        medium.end(name)
    medium.close()
