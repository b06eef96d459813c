"""Deadlines in buckets: due ones run in order, cancelled ones are freed immediately."""

from smq.replication.runtime.deadlines import Deadline, Deadlines

MS = 1_000_000


def test_due_deadlines_run_in_order_of_time_and_others_wait() -> None:
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


def test_a_deadline_may_cancel_another_of_the_same_time() -> None:
    deadlines, ran, others = Deadlines(), [], list[Deadline]()

    def first() -> None:
        ran.append("first")
        others[0].cancel()

    deadlines.add(MS, first)
    others.append(deadlines.add(MS, lambda: ran.append("second")))
    deadlines.run(100 * MS)
    assert ran == ["first"]


def test_a_cancelled_deadline_is_freed_immediately() -> None:
    deadlines = Deadlines()
    for _ in range(1_000):
        deadlines.add(60_000 * MS, lambda: None).cancel()
    assert not any(deadlines._buckets.values())
