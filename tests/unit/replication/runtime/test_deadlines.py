"""Deadlines in buckets: what is due runs in order, what is cancelled is gone at once."""

from smq.replication.runtime.deadlines import Deadline, Deadlines

MS = 1_000_000


def test_what_is_due_runs_in_the_order_of_time_and_what_is_not_waits() -> None:
    deadlines, ran = Deadlines(), []
    for number, at_ms in enumerate((50, 10, 12, 300)):
        deadlines.add(at_ms * MS, lambda number=number: ran.append(number))  # type: ignore[misc] # a default binds it
    deadlines.run(9 * MS)
    assert ran == []
    deadlines.run(100 * MS)
    assert ran == [1, 2, 0]
    deadlines.run(400 * MS)
    assert ran == [1, 2, 0, 3]
    assert deadlines.is_empty


def test_a_deadline_may_cancel_another_of_its_own_time() -> None:
    deadlines, ran, others = Deadlines(), [], list[Deadline]()

    def first() -> None:
        ran.append("first")
        others[0].cancel()

    deadlines.add(MS, first)
    others.append(deadlines.add(MS, lambda: ran.append("second")))
    deadlines.run(100 * MS)
    assert ran == ["first"]


def test_a_cancelled_deadline_is_not_kept_until_its_time() -> None:
    deadlines = Deadlines()
    for _ in range(1_000):
        deadlines.add(60_000 * MS, lambda: None).cancel()
    assert not any(deadlines._buckets.values())
