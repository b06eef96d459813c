"""Transactions that compaction makes an end of: every mixture of old and new bytes has the same open ones, and Kafka's
readers of each version keep what was committed, and nothing else."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smq.raft_state.ids import Offset
from smq.records import marker_batch, parse_header
from smq.replication.api import Aborted
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.log_state import LogState
from smq.replication.log.stored_batch import BatchKind, StoredValue, info_of_stored
from tests.examples import examples
from tests.unit.replication.log.committed_readers import check_readers, of_fetch
from tests.unit.replication.log.compaction.test_segment_writer import in_transaction, stored, stored_batch
from tests.unit.replication.log.test_segments import rewritten

PRODUCERS = (70, 71)
STEPS = st.lists(
    st.tuples(st.sampled_from([70, 70, 71, -1]), st.sampled_from(["batch", "batch", "commit", "abort"])),
    min_size=1,
    max_size=16,
)


class Effect(NamedTuple):
    """What a log says of its producers: whose transaction is open, and which are known."""

    opened: dict[int, Offset]
    known: list[tuple[int, int, int]]  # producer, epoch, last sequence


def folded(values: list[StoredValue]) -> tuple[LogState, list[Aborted]]:
    state = LogState(Offset(0))
    found = state.found = []
    for value in values:
        state.add(info_of_stored(value))
    return state, found


def effect(values: list[StoredValue], producers_start: int) -> Effect:
    state, _ = folded(values)
    return Effect(
        {p: first for p in PRODUCERS if (first := state.producers.open_from(p)) is not None},
        sorted(entry[:3] for entry in state.producers.entries(Offset(producers_start))),
    )


def log_of(steps: list[tuple[int, str]], epochs: list[int]) -> list[StoredValue]:
    """A batch of one record per step. Sequences of a producer go on; a control batch may end nothing."""
    values, sequences = [], dict.fromkeys(PRODUCERS, 0)
    for base, ((producer, what), epoch) in enumerate(zip(steps, epochs, strict=True)):
        if producer < 0:
            values.append(stored(base, [b"k%d" % base], epoch=epoch))
        elif what == "batch":
            values.append(in_transaction(base, 1, producer=producer, sequence=sequences[producer], epoch=epoch))
            sequences[producer] += 1
        else:
            batch = marker_batch(producer_id=producer, producer_epoch=3, is_commit=what == "commit", timestamp_ms=base)
            values.append(stored_batch(batch, base, epoch))
    return values


def mixtures(one: list[StoredValue], other: list[StoredValue]) -> list[list[StoredValue]]:
    """The first batches of one version of a segment, and the last ones of another, at each border that both have."""
    borders = {value.base for value in one} & {value.base for value in other}
    return [[v for v in one if v.base < at] + [v for v in other if v.base >= at] for at in sorted(borders)]


@settings(max_examples=examples(300))
@given(before=STEPS, within=STEPS, after=STEPS, data=st.data())
def test_every_mixture_of_versions_has_one_effect(
    before: list[tuple[int, str]], within: list[tuple[int, str]], after: list[tuple[int, str]], data: st.DataObject
) -> None:
    """A checkpoint before or inside a segment, and a log that has grown in the middle of one, are mixtures of two
    versions. No reader gets one: see `test_a_mixture_can_end_a_transaction_by_a_later_marker`."""
    steps = [*before, *within, *after]
    epochs = sorted(data.draw(st.lists(st.integers(0, 1), min_size=len(steps), max_size=len(steps))))
    log = log_of(steps, epochs)
    first, stop = len(before), len(before) + len(within)
    aborted = AbortedTransactions(folded(log)[1])
    versions, producers_start = [log[first:stop]], 0
    for _ in range(2):
        producers_start = data.draw(st.one_of(st.just(len(log)), st.integers(producers_start, len(log))))
        removed = data.draw(st.sets(st.integers(first, stop - 1)))
        versions.append(rewritten(versions[-1], removed, producers_start, aborted))
    expected = effect(log, producers_start)
    for one in versions:
        for other in versions:
            for mixed in mixtures(one, other):
                assert effect([*log[:first], *mixed, *log[stop:]], producers_start) == expected
                # If a log begins with the segment: the log start has passed what was before it.
                opened = effect([*mixed, *log[stop:]], producers_start).opened
                assert set(opened) == set(effect(log[first:], producers_start).opened)
    stable = min(expected.opened.values(), default=Offset(len(log)))
    for version in versions:
        whole = [value for value in (*log[:first], *version, *log[stop:]) if value.end <= stable]
        # With the transactions that this version still has, and with those that there were before: until the batches
        # are on the disk, a reader may get either.
        for index in (aborted, AbortedTransactions(folded([*log[:first], *version, *log[stop:]])[1])):
            check_readers(whole, index, lambda base: began_in(log, base) in {a[1:3] for a in aborted})
    one, other = (data.draw(st.sampled_from(versions)) for _ in range(2))
    mixed = [*log[:first], *data.draw(st.sampled_from(mixtures(one, other))), *log[stop:]]
    if not ends_by_a_later_marker(log, mixed):
        whole = [value for value in mixed if value.end <= stable]
        index = AbortedTransactions(folded(mixed)[1])
        check_readers(whole, index, lambda base: began_in(log, base) in {a[1:3] for a in aborted})


def outcomes(values: list[StoredValue]) -> dict[Offset, int]:
    """How the transaction of each batch ends, if it does."""
    opened, found = dict[int, list[Offset]](), dict[Offset, int]()
    for info in map(info_of_stored, values):
        if info.kind == BatchKind.TRANSACTIONAL:
            opened.setdefault(info.producer_id, []).append(info.base)
        elif info.kind != BatchKind.PLAIN:
            found.update(dict.fromkeys(opened.pop(info.producer_id, []), info.kind))
    return found


def ends_by_a_later_marker(log: list[StoredValue], mixed: list[StoredValue]) -> bool:
    """The known bad case: a transaction is in the older part, its own marker was removed from the newer part, and the
    next one that is left says the opposite."""
    true = outcomes(log)
    return any(true[base] != kind for base, kind in outcomes(mixed).items())


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_mixture_can_end_a_transaction_by_a_later_marker(*, is_committed: bool) -> None:
    """So a segment is never put together from two versions (`Segments._end_of_version`)."""
    own, later = ("commit", "abort") if is_committed else ("abort", "commit")
    steps = [(70, "commit"), (70, "batch"), (-1, "batch"), (70, own), (70, "batch"), (70, later)]
    log = log_of(steps, [0] * len(steps))
    aborted = AbortedTransactions(folded(log)[1])
    new = rewritten(log, set(), len(log), aborted)
    bad = [mixed for mixed in mixtures(log, new) if ends_by_a_later_marker(log, mixed)]
    assert bad
    for mixed in bad:
        index = AbortedTransactions(folded(mixed)[1])
        with pytest.raises(AssertionError):
            check_readers(mixed, index, lambda base: began_in(log, base) in {a[1:3] for a in aborted})


def began_in(log: list[StoredValue], base: int) -> tuple[int, int] | None:
    """First offset and producer of the transaction that the batch at `base` belongs to."""
    opened: dict[int, int] = {}
    for value in log[: base + 1]:
        info = info_of_stored(value)
        if info.kind == BatchKind.TRANSACTIONAL:
            opened.setdefault(info.producer_id, info.base)
        elif info.kind != BatchKind.PLAIN:
            opened.pop(info.producer_id, None)
    info = info_of_stored(log[base])
    return (opened[info.producer_id], info.producer_id) if info.kind == BatchKind.TRANSACTIONAL else None


def test_a_reader_of_new_bytes_with_an_older_index_keeps_what_was_committed_later() -> None:
    """An entry whose control batch is gone would hide everything that its producer committed from then on."""
    log = log_of([(70, what) for what in ("commit", "batch", "abort", "commit", "batch", "commit")], [0] * 6)
    aborted = AbortedTransactions(folded(log)[1])
    new = [*rewritten(log[:4], set(), len(log), aborted), *log[4:]]
    assert [info_of_stored(value).kind for value in new[:2]] == [BatchKind.PLAIN, BatchKind.COMMIT]
    assert aborted.within(Offset(0), Offset(6))
    assert not of_fetch(new, aborted)
    check_readers(new, aborted, lambda base: base == 1)


def test_what_stays_does_not_grow_with_the_transactions() -> None:
    steps = [(70, what) for _ in range(500) for what in ("batch", "commit")]
    log = log_of(steps, [0] * len(steps))
    left = rewritten(log, set(range(998)), len(log), AbortedTransactions([]))
    assert [parse_header(value.batch).is_control for value in left] == [False, False, True]


def test_nor_with_the_aborted_ones() -> None:
    steps = [(70, what) for n in range(500) for what in ("batch", "abort" if n % 3 else "commit")]
    log = log_of(steps, [0] * len(steps))
    aborted = AbortedTransactions(folded(log)[1])
    assert len(aborted) == 333
    left = rewritten(log, set(range(999)), len(log), aborted)
    assert [parse_header(value.batch).is_control for value in left] == [False, True, False, True]
    assert folded(left)[1] == [], "none of them is left in the log"
