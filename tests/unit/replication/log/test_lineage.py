"""Rule 3: how much of a log is valid under the applied history, by case and compared with a check batch by batch."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import EpochStart
from smq.replication.log.lineage import EpochRun, extend_runs, runs_from, verified_end


def history(*entries: tuple[int, int]) -> list[EpochStart]:
    return [EpochStart(Epoch(epoch), Offset(start)) for epoch, start in entries]


def runs(*entries: tuple[int, int, int]) -> list[EpochRun]:
    return [EpochRun(Epoch(epoch), Offset(start), Offset(end)) for epoch, start, end in entries]


CASES = {
    "an empty log ends at its start": (runs(), 7, history((0, 0)), (7, None)),
    "one epoch, all right": (runs((1, 0, 9)), 0, history((1, 0)), (9, None)),
    "the tail of an older epoch is wrong from the next one's start": (
        runs((1, 0, 9)),
        0,
        history((1, 0), (2, 6)),
        (6, 6),
    ),
    "batches of the newer epoch after the right ones": (
        runs((1, 0, 6), (2, 6, 8)),
        0,
        history((1, 0), (2, 6)),
        (8, None),
    ),
    "batches newer than the applied state are not judged": (
        runs((1, 0, 6), (3, 6, 8)),
        0,
        history((1, 0), (2, 6)),
        (6, None),
    ),
    "after a wrong batch everything is wrong": (
        runs((1, 0, 9), (3, 9, 12)),
        0,
        history((1, 0), (2, 6), (3, 9)),
        (6, 6),
    ),
    "equal starts: the epochs between wrote nothing": (
        runs((5, 0, 4), (7, 4, 6)),
        0,
        history((5, 0), (6, 4), (7, 4)),
        (6, None),
    ),
    "an epoch that wrote nothing is stamped on a batch": (
        runs((5, 0, 4), (6, 4, 5)),
        0,
        history((5, 0), (6, 4), (7, 4)),
        (4, 4),
    ),
    "a batch before its epoch's start is wrong": (runs((2, 3, 9)), 3, history((1, 0), (2, 5)), (3, 3)),
    "a pruned epoch is right up to the first kept": (runs((2, 8, 12)), 10, history((5, 10)), (10, 10)),
    "a pruned epoch that ends there is right": (runs((2, 8, 10), (5, 10, 11)), 8, history((5, 10)), (11, None)),
    "an epoch the history passed over is wrong": (
        runs((1, 0, 4), (3, 4, 6)),
        0,
        history((1, 0), (2, 4), (4, 4)),
        (4, 4),
    ),
    "everything after a hole is wrong": (runs((1, 0, 4), (1, 6, 8)), 0, history((1, 0)), (4, 6)),
    "a log that begins after log_start is wrong": (runs((1, 5, 8)), 3, history((1, 0)), (3, 5)),
    "a first batch that contains log_start is right": (runs((1, 5, 8)), 7, history((1, 0)), (8, None)),
    "nothing right before log_start moves the end below it": (runs((2, 5, 8)), 7, history((1, 0), (3, 5)), (7, 5)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_verified_end(
    case: tuple[list[EpochRun], int, list[EpochStart], tuple[int, int | None]],
) -> None:
    log, log_start, applied, expected = case
    end = log[-1].end if log else Offset(log_start)
    assert verified_end(log, Offset(log_start), end, applied) == expected


def test_nothing_beyond_the_appended_end_is_valid() -> None:
    log = runs((1, 0, 9))
    assert verified_end(log, Offset(0), Offset(4), history((1, 0))) == (4, None)
    assert verified_end(log, Offset(0), Offset(4), history((1, 0), (2, 6))) == (4, 6)


class Batch(NamedTuple):
    epoch: int
    base: int
    end: int


def verified_end_by_batch(batches: list[Batch], log_start: int, applied: list[EpochStart]) -> tuple[int, int | None]:
    """Rule 3 word for word; no epoch is pruned, and no batch crosses the end of its epoch."""
    end = log_start
    for batch in batches:
        if batch.epoch > applied[-1].epoch:
            return end, None
        covers = [
            (entry.start, applied[i + 1].start if i + 1 < len(applied) else 1 << 62)
            for i, entry in enumerate(applied)
            if entry.epoch == batch.epoch
        ]
        if not covers or not covers[0][0] <= batch.base or batch.end > covers[0][1]:
            return end, batch.base
        end = batch.end
    return end, None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12),
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_runs_give_the_same_verdict_as_their_batches(
    steps: list[tuple[int, int]], starts: list[tuple[int, int]]
) -> None:
    applied: list[EpochStart] = []
    epoch, start = 0, 0
    for more, further in starts:
        epoch += more
        start += further
        applied.append(EpochStart(Epoch(epoch), Offset(start)))
    log_start = applied[0].start
    boundaries = {entry.start for entry in applied}
    batches: list[Batch] = []
    epoch, base = applied[0].epoch, int(log_start)
    for more, count in steps:
        epoch += more
        end = min([base + count, *(b for b in boundaries if b > base)])  # a high water mark is a batch's end
        batches.append(Batch(epoch, base, end))
        base = end
    log: list[EpochRun] = []
    for batch in batches:
        extend_runs(log, Epoch(batch.epoch), Offset(batch.base), Offset(batch.end))
    assert verified_end(log, log_start, Offset(base), applied) == verified_end_by_batch(batches, log_start, applied)


def test_adjacent_batches_of_an_epoch_are_one_run() -> None:
    log: list[EpochRun] = []
    for epoch, start, end in [(1, 0, 2), (1, 2, 5), (2, 5, 6), (2, 7, 8)]:
        extend_runs(log, Epoch(epoch), Offset(start), Offset(end))
    assert log == runs((1, 0, 5), (2, 5, 6), (2, 7, 8))


def test_runs_lose_everything_before_the_first_batch() -> None:
    log = runs((1, 0, 5), (2, 5, 8), (3, 8, 9))
    assert runs_from(log, Offset(6)) == runs((2, 6, 8), (3, 8, 9))
    assert runs_from(log, Offset(9)) == []
