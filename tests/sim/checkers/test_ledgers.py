"""The judge of compacted ledgers: what compaction may remove is put back, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from chaos_tests.keyed import is_tombstone
from tests.sim.checkers.test_judge import Story, anomalies

Record = tuple[int, int]  # offset, value
KEYS = 1  # every record has the same key
PLAIN = [value for value in range(100) if not is_tombstone(value)]
TOMBSTONE = next(value for value in range(100) if is_tombstone(value))


def begin(s: Story, tombstone_ms: int = 0) -> None:
    s.note("compaction", keys=KEYS, tombstone_ms=tombstone_ms)


def transact(s: Story, value: int, at: int, *, kind: str = "ok", out: str = "commit", off: int | None = None) -> None:
    """One record in the ledger's only partition."""
    process = s.begin("txn", id="tx", v={"l/0": [value]}, off=off)
    known: dict[str, dict[str, Any]] = {
        "ok": {"out": out, "o": {"l/0": at}},
        "info": {"o": {"l/0": at}},
        "fail": {"err": "NOT_COMMITTED"},
    }
    s.recorder.add(process, kind, "txn", known[kind])


def poll(s: Story, start: int, following: int, *records: Record, node: int = 1, final: bool = False) -> None:
    process = s.begin("tpoll", k="l/0", o=start, n=node, final=final)
    s.recorder.ok(process, "tpoll", r=[list(record) for record in records], next=following, lso=following)


def finals(s: Story, *records: Record, off: int | None = None) -> None:
    for node in (1, 2, 3):
        poll(s, 0, 99, *records, node=node, final=True)
    s.recorder.ok(s.begin("toffset", id="tx"), "toffset", off=off)


def the_last_is_gone(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    transact(s, PLAIN[1], 2)
    finals(s, (0, PLAIN[0]))


def an_aborted_one_excuses_nothing(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    transact(s, PLAIN[1], 2, out="abort")
    finals(s)


def one_replica_has_lost_it(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    finals(s, (0, PLAIN[0]))
    poll(s, 0, 99, node=4, final=True)


def a_tombstone_is_gone_early(s: Story) -> None:
    begin(s, tombstone_ms=1_000)
    transact(s, TOMBSTONE, 0)
    finals(s)


def what_a_tombstone_deleted_is_back(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    transact(s, TOMBSTONE, 2)
    finals(s, (0, PLAIN[0]))


def an_aborted_one_was_read(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0, out="abort")
    poll(s, 0, 2, (0, PLAIN[0]))
    transact(s, PLAIN[1], 2)
    finals(s, (2, PLAIN[1]))


def an_aborted_one_is_visible(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0, kind="fail")
    transact(s, PLAIN[1], 2)
    finals(s, (0, PLAIN[0]), (2, PLAIN[1]))


def the_last_was_passed_over(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    poll(s, 0, 2)
    finals(s, (0, PLAIN[0]))


def an_offset_of_nobody(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0, off=5)
    finals(s, (0, PLAIN[0]), off=6)


def batch(s: Story, at: dict[int, int], kind: str = "ok", *, replay: bool = False) -> None:
    """An attempt at the same batch, with a task for each value, staged at these offsets."""
    tasks = [{"l/0": [value]} for value in at]
    process = s.begin("batch", app="app", id=0, v=list(at), tasks=tasks)
    offsets = [{"l/0": offset} for offset in at.values()]
    known: dict[str, dict[str, Any]] = {
        "ok": {"replay": replay, "o": offsets},
        "info": {"o": offsets},
        "fail": {"err": "NOT_COMMITTED"},
    }
    s.recorder.add(process, kind, "batch", known[kind])


def the_last_of_a_batch_is_gone(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0, PLAIN[1]: 2})
    finals(s, (0, PLAIN[0]))


def an_aborted_batch_is_visible(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0, PLAIN[1]: 2}, "fail")
    finals(s, (0, PLAIN[0]), (2, PLAIN[1]))


def an_uncommitted_attempt_was_read(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0}, "fail")
    batch(s, {PLAIN[0]: 2})
    poll(s, 0, 2, (0, PLAIN[0]))
    finals(s, (2, PLAIN[0]))


def a_batch_twice(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0})
    batch(s, {PLAIN[0]: 2}, replay=True)
    finals(s, (2, PLAIN[0]))


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (the_last_is_gone, "lost-key"),
        (an_aborted_one_excuses_nothing, "lost-key"),
        (one_replica_has_lost_it, "lost-key"),
        (a_tombstone_is_gone_early, "early-tombstone"),
        (what_a_tombstone_deleted_is_back, "resurrected"),
        (an_aborted_one_was_read, "dirty-read"),
        (an_aborted_one_is_visible, "aborted-read"),
        (the_last_was_passed_over, "skipped-record"),
        (an_offset_of_nobody, "torn-offsets"),
        (the_last_of_a_batch_is_gone, "lost-key"),
        (an_aborted_batch_is_visible, "aborted-read"),
        (an_uncommitted_attempt_was_read, "dirty-read"),
        (a_batch_twice, "repeated-batch"),
    ],
)
def test_anomaly_of_compacted_ledgers_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


def everything_in_order(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0, off=5)
    poll(s, 0, 2, (0, PLAIN[0]))
    transact(s, PLAIN[1], 2, out="abort")
    transact(s, PLAIN[2], 4, kind="info")  # it was committed: a client has seen it
    poll(s, 0, 6, (4, PLAIN[2]))  # and the first was gone
    transact(s, PLAIN[3], 6)
    transact(s, PLAIN[4], 8, kind="info", off=9)  # it was committed, and gone before any client saw it
    transact(s, PLAIN[5], 10)
    finals(s, (10, PLAIN[5]), off=9)


def tombstone_in_doubt(s: Story) -> None:
    begin(s)
    transact(s, PLAIN[0], 0)
    transact(s, TOMBSTONE, 2, kind="info")  # it was committed, and has gone with what it deleted
    finals(s)


def tombstone_that_goes_between_two_final_reads(s: Story) -> None:
    begin(s)
    transact(s, TOMBSTONE, 0)
    transact(s, PLAIN[0], 2)
    transact(s, TOMBSTONE, 4)
    finals(s, (4, TOMBSTONE))
    poll(s, 0, 99, node=4, final=True)  # the last to be read


def a_batch_of_which_a_part_is_left(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0, PLAIN[1]: 2, PLAIN[2]: 4})
    finals(s, (4, PLAIN[2]))


def a_batch_of_which_nothing_is_left(s: Story) -> None:
    """Its first attempt was the one, and no client ever saw it."""
    begin(s)
    batch(s, {PLAIN[0]: 0, PLAIN[1]: 2}, "info")
    batch(s, {PLAIN[0]: 4, PLAIN[1]: 6}, replay=True)
    transact(s, PLAIN[2], 8)
    finals(s, (8, PLAIN[2]))


def a_batch_whose_second_attempt_was_seen(s: Story) -> None:
    begin(s)
    batch(s, {PLAIN[0]: 0, PLAIN[1]: 2}, "info")
    batch(s, {PLAIN[0]: 4, PLAIN[1]: 6}, "info")
    poll(s, 0, 8, (4, PLAIN[0]), (6, PLAIN[1]))
    transact(s, PLAIN[2], 8)
    finals(s, (8, PLAIN[2]))


@pytest.mark.parametrize(
    "tell",
    [
        everything_in_order,
        tombstone_in_doubt,
        tombstone_that_goes_between_two_final_reads,
        a_batch_of_which_a_part_is_left,
        a_batch_of_which_nothing_is_left,
        a_batch_whose_second_attempt_was_seen,
    ],
)
def test_what_compaction_may_do_is_accepted(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()
