"""The judge of retention finds what was deleted too early and too late, and accepts what was due."""

from collections.abc import Callable

import pytest

from chaos_tests.checkers.retention import CREATED_0_MS, LATE_RECORDS_MAX
from tests.sim.checkers.test_judge import LOG, Story, anomalies, batch


def _retained(s: Story, *, lo: int, hwm: int, records: int = 0, ms: int = 0, clock: int = 0) -> None:
    s.recorder.note("retention", records=records, ms=ms)
    s.recorder.note("local", n=1, inc=1, i=9, k="t/0", hwm=hwm, lo=lo, epoch=0, clock=clock)


def deleted_although_few(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=2)
    s.final(LOG[1:], hwm=3, lo=2)


def deleted_although_young(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, ms=60_000, clock=CREATED_0_MS + 50_000)
    s.final(LOG[1:], hwm=3, lo=2)


def never_deleted(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=0, hwm=3 + LATE_RECORDS_MAX, records=1)
    s.final(LOG, hwm=3)


def _aged(s: Story, clock: int) -> None:
    """The clock is noted, and four seconds later the log still begins at 0."""
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=0, hwm=3, ms=60_000, clock=clock)
    s.now += 4_000_000_000
    s.recorder.note("local", n=1, inc=1, i=10, k="t/0", hwm=3, lo=0, epoch=0, clock=clock + 5_000)
    s.final(LOG, hwm=3)


def kept_although_old(s: Story) -> None:
    _aged(s, CREATED_0_MS + 60_001)


def kept_as_long_as_asked_for(s: Story) -> None:
    _aged(s, CREATED_0_MS + 59_000)


def written_when_already_too_old(s: Story) -> None:
    """The clock is a minute and more ahead."""
    _retained(s, lo=0, hwm=0, ms=60_000, clock=CREATED_0_MS + 70_000)
    s.now += 4_000_000_000
    s.send([10, 11], 0)
    s.send([12], 2)
    s.recorder.note("local", n=1, inc=1, i=10, k="t/0", hwm=3, lo=0, epoch=0, clock=CREATED_0_MS + 70_000)
    s.final(LOG, hwm=3)


def kept_by_a_younger_batch_before_it(s: Story) -> None:
    sending = s.begin("send", k="t/0", v=[12], acks=-1, idem=False)
    s.now += 5_000_000_000
    s.send([10, 11], 0)
    s.end_send(sending, 2)
    _retained(s, lo=0, hwm=3, ms=60_000, clock=CREATED_0_MS + 61_000)
    s.now += 4_000_000_000
    s.recorder.note("local", n=1, inc=1, i=10, k="t/0", hwm=3, lo=2, epoch=0, clock=CREATED_0_MS + 66_000)
    s.final(LOG[1:], hwm=3, lo=2)


def deleted_when_due(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=1)
    s.recorder.fail(s.begin("poll", k="t/0", o=0, n=1), "poll", err="OFFSET_OUT_OF_RANGE", lo=2, hi=3)
    s.final(LOG[1:], hwm=3, lo=2)


def _consumer_refused(s: Story, offset: int, *, lo: int, hwm: int) -> None:
    s.recorder.fail(s.begin("kpoll", c="c", k="t/0", o=offset), "kpoll", err="OFFSET_OUT_OF_RANGE", lo=lo, hi=hwm)


def consumer_passed_by(s: Story) -> None:
    s.send([10, 11], 0)
    s.consume(0, (0, 10), (1, 11), hwm=2)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=1)
    _consumer_refused(s, 1, lo=2, hwm=3)
    s.consume(2, (2, 12), hwm=3)
    s.final(LOG[1:], hwm=3, lo=2)


def consumer_refused_what_is_there(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=1)
    _consumer_refused(s, 2, lo=2, hwm=3)
    s.final(LOG[1:], hwm=3, lo=2)


def consumer_passed_over_records(s: Story) -> None:
    """Without a word: it was never told that its place is out of range."""
    s.send([10, 11], 0)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=1)
    s.consume(0, (2, 12), hwm=3)
    s.final(LOG[1:], hwm=3, lo=2)


def consumer_given_another_record_than_was_deleted(s: Story) -> None:
    s.send([10, 11], 0)
    s.consume(0, (0, 11), hwm=2)
    s.send([12], 2)
    _retained(s, lo=2, hwm=3, records=1)
    s.final(LOG[1:], hwm=3, lo=2)


def _trimmed(s: Story, offset: int) -> None:
    """Offset 1 has the last record of its key, offset 2 has not."""
    s.note("compaction", keys=2, tombstone_ms=0)
    s.send([10, 11], 0)
    s.send([12], 2)
    s.send([15], 3)
    s.recorder.ok(s.begin("trim", k="t/0", o=offset), "trim")
    _retained(s, lo=3, hwm=4, records=3)
    s.final([batch(3, [15])], hwm=4, lo=3)


def deleted_after_a_trim_into_its_batch(s: Story) -> None:
    _trimmed(s, 1)


def emptied_after_a_trim(s: Story) -> None:
    """By compaction: what a client has deleted before it is no longer to be kept."""
    _trimmed(s, 2)


def _measured(s: Story, size: int) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.recorder.note("retention", records=0, ms=0, bytes=500)
    s.recorder.note("kept", n=1, k="t/0", lo=2, hwm=3, size=size, least=500)


def _held(s: Story, *, lo: int) -> None:
    s.recorder.note("retention", records=1, ms=0)
    s.recorder.ok(s.begin("hold", k="held/0"), "hold", o=4, lo=lo)


def deleted_although_few_bytes_are_left(s: Story) -> None:
    _measured(s, 499)


def deleted_in_an_open_transaction(s: Story) -> None:
    _held(s, lo=5)


def deleted_up_to_its_limit(s: Story) -> None:
    _measured(s, 500)


def deleted_up_to_an_open_transaction(s: Story) -> None:
    _held(s, lo=4)


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (consumer_refused_what_is_there, "false-out-of-range"),
        (consumer_passed_over_records, "poll-skip"),
        (consumer_given_another_record_than_was_deleted, "inconsistent-offsets"),
        (deleted_although_few, "early-deletion"),
        (deleted_although_young, "early-deletion"),
        (deleted_after_a_trim_into_its_batch, "early-deletion"),
        (deleted_although_few_bytes_are_left, "early-deletion"),
        (deleted_in_an_open_transaction, "early-deletion"),
        (never_deleted, "late-deletion"),
        (kept_although_old, "late-deletion"),
    ],
)
def test_anomaly_of_retention_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


@pytest.mark.parametrize(
    "tell",
    [
        deleted_when_due,
        kept_as_long_as_asked_for,
        written_when_already_too_old,
        kept_by_a_younger_batch_before_it,
        consumer_passed_by,
        deleted_up_to_its_limit,
        deleted_up_to_an_open_transaction,
        emptied_after_a_trim,
    ],
)
def test_what_was_due_may_be_gone(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()
