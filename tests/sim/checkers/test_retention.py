"""The judge of retention finds what was deleted too early and too late, and accepts what was due."""

from typing import Self

import pytest

from chaos_tests.checkers.retention import CREATED_0_MS, LATE_RECORDS_MAX
from tests.sim.checkers.support import LOG, Story, anomaly_of, batch


class Retained(Story):
    """A partition that keeps some of its records."""

    def retain(self, *, lo: int, hwm: int, records: int = 0, ms: int = 0, clock: int = 0) -> Self:
        """The limits, and how far a node that has them in force has deleted."""
        return self.note("retention", records=records, ms=ms).local(hwm=hwm, lo=lo, clock=clock)

    def refuse_consumer(self, offset: int) -> Self:
        return self.op("kpoll", {"c": "c", "k": "t/0", "o": offset}, "fail", err="OFFSET_OUT_OF_RANGE", lo=2, hi=3)

    def shows_the_last(self) -> Self:
        return self.final(LOG[1:], hwm=3, lo=2)


def one_kept() -> Retained:
    """Of the three records."""
    return Retained().send_log().retain(lo=2, hwm=3, records=1)


def aged(clock: int) -> Retained:
    """The clock is noted, and four seconds later the log still begins at 0."""
    story = Retained().send_log().retain(lo=0, hwm=3, ms=60_000, clock=clock).wait(4_000)
    return story.local(hwm=3, i=10, clock=clock + 5_000).final(LOG, hwm=3)


def trimmed(offset: int) -> Retained:
    """Offset 1 has the last record of its key, offset 2 has not."""
    story = Retained().note("compaction", keys=2, tombstone_ms=0).send_log().send([15], 3).trim(offset)
    return story.retain(lo=3, hwm=4, records=3).final([batch(3, [15])], hwm=4, lo=3)


def measured(size: int) -> Retained:
    story = Retained().send_log().note("retention", records=0, ms=0, bytes=500)
    return story.note("kept", n=1, k="t/0", lo=2, hwm=3, size=size, least=500)


def held(lo: int) -> Retained:
    """In a transaction that is open from offset 4 on."""
    return Retained().note("retention", records=1, ms=0).op("hold", {"k": "held/0"}, "ok", o=4, lo=lo)


FOUND = {
    "false-out-of-range: a consumer is refused what is there": one_kept().refuse_consumer(2).shows_the_last(),
    # Without a word: it was never told that its place is out of range.
    "poll-skip: a consumer passes over records": one_kept().consume(0, (2, 12), hwm=3).shows_the_last(),
    "inconsistent-offsets: a consumer was given another record than was deleted": Retained()
    .send([10, 11], 0)
    .consume(0, (0, 11), hwm=2)
    .send([12], 2)
    .retain(lo=2, hwm=3, records=1)
    .shows_the_last(),
    "early-deletion: few records": Retained().send_log().retain(lo=2, hwm=3, records=2).shows_the_last(),
    "early-deletion: young records": Retained()
    .send_log()
    .retain(lo=2, hwm=3, ms=60_000, clock=CREATED_0_MS + 50_000)
    .shows_the_last(),
    "early-deletion: after a trim into its batch": trimmed(1),
    "early-deletion: few bytes": measured(499),
    "early-deletion: in an open transaction": held(5),
    "late-deletion: never": Retained().send_log().retain(lo=0, hwm=3 + LATE_RECORDS_MAX, records=1).final(LOG, hwm=3),
    "late-deletion: old records": aged(CREATED_0_MS + 60_001),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_retention_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


def written_when_already_too_old() -> Retained:
    """The clock is a minute and more ahead."""
    clock = CREATED_0_MS + 70_000
    story = Retained().retain(lo=0, hwm=0, ms=60_000, clock=clock).wait(4_000).send_log()
    return story.local(hwm=3, i=10, clock=clock).final(LOG, hwm=3)


def kept_by_a_younger_batch_before_it() -> Retained:
    story = Retained().begin("older", "send", k="t/0", v=[12], acks=-1, idem=False).wait(5_000)
    story.send([10, 11], 0).end("older", o=2, ts=1, dup=False)
    story.retain(lo=0, hwm=3, ms=60_000, clock=CREATED_0_MS + 61_000).wait(4_000)
    return story.local(hwm=3, i=10, lo=2, clock=CREATED_0_MS + 66_000).shows_the_last()


def consumer_passed_by() -> Retained:
    story = Retained().send([10, 11], 0).consume(0, (0, 10), (1, 11), hwm=2).send([12], 2)
    story.retain(lo=2, hwm=3, records=1).refuse_consumer(1).consume(2, (2, 12), hwm=3)
    return story.shows_the_last()


ALLOWED = {
    "deleted when due": one_kept().refuse(0, "OFFSET_OUT_OF_RANGE", lo=2, hi=3).shows_the_last(),
    "kept as long as asked for": aged(CREATED_0_MS + 59_000),
    "written when already too old": written_when_already_too_old(),
    "kept by a younger batch before it": kept_by_a_younger_batch_before_it(),
    "a consumer is passed by": consumer_passed_by(),
    "deleted up to its limit of bytes": measured(500),
    "deleted up to an open transaction": held(4),
    # By compaction: what a client has deleted before it is no longer to be kept.
    "emptied after a trim": trimmed(2),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_was_due_may_be_gone(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()
