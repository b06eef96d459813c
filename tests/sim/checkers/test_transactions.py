"""The judge of transactions finds each anomaly in the shortest story of it, and accepts what may happen."""

from collections.abc import Callable

import pytest

from tests.sim.checkers.test_judge import Story, anomalies

Record = tuple[int, int]  # offset, value


def transact(s: Story, values: list[int], kind: str = "ok", out: str = "commit", off: int | None = None) -> None:
    """`values` alternate between the two partitions."""
    request = {"l/0": values[::2], "l/1": values[1::2]}
    process = s.begin("txn", id="tx", v={k: v for k, v in request.items() if v}, off=off)
    s.recorder.add(process, kind, "txn", {"out": out} if kind == "ok" else {"err": "NOT_COMMITTED"})


def poll(s: Story, key: str, start: int, following: int, *records: Record, node: int = 1, final: bool = False) -> None:
    process = s.begin("tpoll", k=key, o=start, n=node, final=final)
    s.recorder.ok(process, "tpoll", r=[list(record) for record in records], next=following, lso=following)


def final(s: Story, first: list[Record], second: list[Record], *, off: int | None = None) -> None:
    for node in (1, 2, 3):
        poll(s, "l/0", 0, 9, *first, node=node, final=True)
        poll(s, "l/1", 0, 9, *second, node=node, final=True)
    s.recorder.ok(s.begin("toffset", id="tx"), "toffset", off=off)


def stable(s: Story, lso: int) -> None:
    s.recorder.ok(s.begin("tstable", k="l/0"), "tstable", lso=lso)


def half_visible(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [(0, 1)], [])


def replicas_differ(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [(0, 1)], [(0, 2)])
    poll(s, "l/0", 0, 9, node=4, final=True)


def unreadable_in_the_end(s: Story) -> None:
    transact(s, [1, 2])
    for key in ("l/0", "l/1"):
        s.recorder.fail(s.begin("tpoll", k=key, o=0, n=1, final=True), "tpoll", err="OFFSET_OUT_OF_RANGE", lo=9, hi=9)


def one_replica_unreadable(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [(0, 1)], [(0, 2)])
    s.recorder.fail(s.begin("tpoll", k="l/0", o=0, n=4, final=True), "tpoll", err="DATA_DAMAGED")


def read_that_stops_before_the_end(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [(0, 1)], [(0, 2)])
    s.recorder.ok(s.begin("tpoll", k="l/1", o=0, n=3, final=True), "tpoll", r=[], next=0, lso=9)


def read_again_after_a_failure(s: Story) -> None:
    transact(s, [1, 2])
    s.recorder.fail(s.begin("tpoll", k="l/0", o=0, n=1, final=True), "tpoll", err="NODE_NOT_READY")
    final(s, [(0, 1)], [(0, 2)])


def offset_unknown_in_the_end(s: Story) -> None:
    s.note("settled", ok=True, why="", took_ms=5)
    s.recorder.fail(s.begin("toffset", id="tx"), "toffset", err="NODE_NOT_READY")


def committed_and_gone(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [], [])


def aborted_and_visible(s: Story) -> None:
    transact(s, [1, 2], out="abort")
    final(s, [(0, 1)], [(0, 2)])


def visible_twice(s: Story) -> None:
    transact(s, [1, 2])
    final(s, [(0, 1), (4, 1)], [(0, 2)])


def never_committed_and_visible(s: Story) -> None:
    transact(s, [1, 2], kind="fail")
    final(s, [(0, 1)], [(0, 2)])


def read_and_gone(s: Story) -> None:
    transact(s, [1, 2], kind="info")
    poll(s, "l/0", 0, 1, (0, 1))
    final(s, [], [])


def passed_over(s: Story) -> None:
    transact(s, [1, 2])
    poll(s, "l/0", 0, 2)
    final(s, [(0, 1)], [(0, 2)])


def offset_without_its_transaction(s: Story) -> None:
    transact(s, [1, 2], out="abort", off=7)
    final(s, [], [], off=7)


def transaction_without_its_offset(s: Story) -> None:
    transact(s, [1, 2], off=7)
    final(s, [(0, 1)], [(0, 2)])


def older_offset(s: Story) -> None:
    transact(s, [1, 2], off=7)
    transact(s, [3, 4], off=8)
    final(s, [(0, 1), (2, 3)], [(0, 2), (2, 4)], off=7)


def stable_end_falls(s: Story) -> None:
    stable(s, 5)
    stable(s, 4)


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (half_visible, "torn-transaction"),
        (replicas_differ, "torn-transaction"),
        (committed_and_gone, "lost-transaction"),
        (aborted_and_visible, "aborted-read"),
        (never_committed_and_visible, "aborted-read"),
        (visible_twice, "doubled-record"),
        (read_and_gone, "dirty-read"),
        (passed_over, "skipped-record"),
        (offset_without_its_transaction, "torn-offsets"),
        (transaction_without_its_offset, "torn-offsets"),
        (older_offset, "torn-offsets"),
        (stable_end_falls, "lso-back"),
        (offset_unknown_in_the_end, "no-progress"),
        (unreadable_in_the_end, "lost-transaction"),
        (one_replica_unreadable, "lost-transaction"),
        (read_that_stops_before_the_end, "lost-transaction"),
    ],
)
def test_anomaly_of_transactions_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


def everything_in_order(s: Story) -> None:
    stable(s, 0)
    transact(s, [1, 2], off=7)
    poll(s, "l/0", 0, 2, (0, 1))
    transact(s, [3, 4], out="abort", off=8)
    transact(s, [5, 6], kind="info", off=9)  # it was committed
    transact(s, [7, 8], kind="info", off=10)  # it was not
    transact(s, [9], kind="fail")
    poll(s, "l/0", 2, 6, (4, 5))
    stable(s, 6)
    final(s, [(0, 1), (4, 5)], [(0, 2), (4, 6)], off=9)


@pytest.mark.parametrize("tell", [everything_in_order, read_again_after_a_failure])
def test_what_may_happen_is_accepted(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()
