"""The judge of compacted partitions: what may be gone is put back, nothing else is, and only in topics that compact."""

from collections.abc import Callable
from copy import deepcopy

import pytest

from chaos_tests.checkers.judge import judge
from chaos_tests.checkers.retention import CREATED_0_MS, LATE_RECORDS_MAX
from chaos_tests.keyed import GONE, is_tombstone, key_of
from tests.sim.checkers.test_judge import Story, anomalies, batch

PLAIN = [value for value in range(100) if not is_tombstone(value)]
TOMBSTONE = next(value for value in range(100) if is_tombstone(value))
OF_TWO = [[value for value in PLAIN if key_of(value, 2) == key] for key in (0, 1)]


def begin(s: Story, *, topic: str = "t", tombstone_ms: int = 0) -> None:
    s.note("compaction", keys=1, tombstone_ms=tombstone_ms, topics=[topic])


def versions(s: Story, *values: int) -> None:
    for offset, value in enumerate(values):
        s.send([value], offset)


def older_ones_are_gone(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.poll(0, [batch(0, PLAIN[:1])], hwm=1)
    s.final([batch(0, [GONE, GONE]), batch(2, PLAIN[2:3])], hwm=3)


def a_tombstone_is_gone_in_time(s: Story) -> None:
    begin(s)
    versions(s, PLAIN[0], TOMBSTONE)
    s.final([batch(0, [GONE, GONE])], hwm=2)


def deleted_while_a_replica_lags(s: Story, later_us: int) -> None:
    """The tombstone is gone so long after the deleted record was read."""
    begin(s, tombstone_ms=1_000)
    versions(s, PLAIN[0], TOMBSTONE)
    s.now += 2_000_000_000
    s.poll(0, [batch(0, [PLAIN[0], TOMBSTONE])], hwm=2, node=3)
    s.now += later_us * 1_000
    s.final([batch(0, [GONE, GONE])], hwm=2)


def a_tombstone_is_gone_just_after_a_replica_served_what_it_deletes(s: Story) -> None:
    deleted_while_a_replica_lags(s, 500_000)


def a_tombstone_is_gone_long_after_a_replica_served_what_it_deletes(s: Story) -> None:
    deleted_while_a_replica_lags(s, 1_500_000)


def a_record_in_doubt_may_have_superseded_one_that_was_deleted(s: Story) -> None:
    """It was at 1, and compaction has taken it, a tombstone, away before any client read it."""
    begin(s)
    s.note("retention", records=2, most=2, ms=0)
    s.send(PLAIN[:1], 0)
    s.send([TOMBSTONE], None, kind="info")
    s.note("start", k="t/0", lo=1, hwm=2, clock=0)
    s.final([batch(1, [GONE])], hwm=2, lo=1)


def a_record_in_doubt_that_no_read_reached_may_have_superseded_one(s: Story) -> None:
    """It is at 1. The only read ends before it, and then the topic is deleted."""
    begin(s)
    s.send(PLAIN[:1], 0)
    s.send(PLAIN[1:2], None, kind="info")
    s.poll(0, [batch(0, [GONE])], hwm=2)


def a_record_in_doubt_that_was_never_read_may_have_superseded_one_that_was_deleted(s: Story) -> None:
    """It is at 1, and only a node says that it is committed."""
    begin(s)
    s.note("retention", records=2, most=2, ms=60_000)
    s.send(PLAIN[:1], 0)
    s.send(PLAIN[1:2], None, kind="info")
    s.note("local", n=1, inc=1, i=9, k="t/0", hwm=2, lo=1, epoch=0, clock=CREATED_0_MS)


def a_consumer_passes_over_what_was_superseded(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.consume(0, (0, PLAIN[0]), (1, PLAIN[1]), hwm=2)
    s.consume(0, (2, PLAIN[2]), hwm=3)
    s.consume(1, (2, PLAIN[2]), hwm=3)
    s.final([batch(0, [GONE, GONE]), batch(2, PLAIN[2:3])], hwm=3)


def an_emptied_batch_goes_with_the_one_before_it(s: Story) -> None:
    """The first goes by number: two are after it. The second was removed, and so does not stay alone."""
    s.note("compaction", keys=2, tombstone_ms=0)
    s.note("retention", records=2, most=2, ms=60_000)
    first, other = PLAIN[0], next(value for value in PLAIN if key_of(value, 2) != key_of(PLAIN[0], 2))
    later = next(value for value in PLAIN if value != other and key_of(value, 2) == key_of(other, 2))
    versions(s, first, other, later)
    s.note("local", n=1, inc=1, i=9, k="t/0", hwm=3, lo=2, epoch=0, clock=CREATED_0_MS)
    s.final([batch(2, [later])], hwm=3, lo=2)


def _with_one_offset_unknown(s: Story, doubtful: list[int]) -> None:
    """Of two keys. Nothing says what is at 1. The last of the other key is at 3."""
    s.note("compaction", keys=2, tombstone_ms=0)
    s.send(OF_TWO[0][:1], 0)
    s.send(doubtful, None, kind="info")
    s.send(OF_TWO[1][:2], 2)


def a_batch_in_doubt_fits(s: Story) -> None:
    _with_one_offset_unknown(s, OF_TWO[0][1:2])
    s.final([batch(0, [GONE, GONE, GONE]), batch(3, OF_TWO[1][1:2])], hwm=4)


@pytest.mark.parametrize(
    "tell",
    [
        a_batch_in_doubt_fits,
        an_emptied_batch_goes_with_the_one_before_it,
        older_ones_are_gone,
        a_tombstone_is_gone_in_time,
        a_tombstone_is_gone_long_after_a_replica_served_what_it_deletes,
        a_record_in_doubt_may_have_superseded_one_that_was_deleted,
        a_record_in_doubt_that_no_read_reached_may_have_superseded_one,
        a_record_in_doubt_that_was_never_read_may_have_superseded_one_that_was_deleted,
        a_consumer_passes_over_what_was_superseded,
    ],
)
def test_what_was_superseded_may_be_gone(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()


def test_a_judged_history_stays_as_it_was_recorded() -> None:
    story = Story()
    older_ones_are_gone(story)
    recorded = deepcopy(story.recorder.events)
    assert judge(story.recorder.events) == []
    assert story.recorder.events == recorded


def the_last_is_gone(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.final([batch(0, PLAIN[:1]), batch(1, [GONE, GONE])], hwm=3)


def another_topic_compacts(s: Story) -> None:
    begin(s, topic="u")
    versions(s, *PLAIN[:3])
    s.final([batch(0, [GONE, GONE]), batch(2, PLAIN[2:3])], hwm=3)


def a_tombstone_is_gone_early(s: Story) -> None:
    begin(s, tombstone_ms=1_000)
    versions(s, PLAIN[0], TOMBSTONE)
    s.final([batch(0, [GONE, GONE])], hwm=2)


def what_a_tombstone_deleted_is_back(s: Story) -> None:
    begin(s)
    versions(s, PLAIN[0], TOMBSTONE)
    s.poll(0, [batch(0, [GONE, GONE])], hwm=2)
    s.final([batch(0, [PLAIN[0], GONE])], hwm=2)


def an_offset_holds_another_record(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.final([batch(0, [GONE, PLAIN[0]]), batch(2, PLAIN[2:3])], hwm=3)


def the_last_is_gone_before_one_in_doubt_is_committed(s: Story) -> None:
    begin(s)
    s.send(PLAIN[:1], 0)
    s.send(PLAIN[1:2], None, kind="info")
    s.poll(0, [batch(0, [GONE])], hwm=1)


def the_last_is_gone_and_no_batch_in_doubt_fits(s: Story) -> None:
    _with_one_offset_unknown(s, OF_TWO[0][1:3])
    s.final([batch(0, [GONE, GONE, GONE]), batch(3, OF_TWO[1][1:2])], hwm=4)


def the_last_is_gone_that_a_read_shows_the_rest_of(s: Story) -> None:
    """The batch in doubt lies at 0 and 1, and its first record is the last of its key."""
    s.note("compaction", keys=2, tombstone_ms=0)
    s.send([OF_TWO[0][0], OF_TWO[1][0]], None, kind="info")
    s.final([batch(0, [GONE, OF_TWO[1][0]])], hwm=2)


def only_a_consumer_misses_the_last(s: Story) -> None:
    s.note("compaction", keys=2, tombstone_ms=0, topics=["t"])
    other = next(value for value in PLAIN if key_of(value, 2) != key_of(PLAIN[0], 2))
    versions(s, PLAIN[0], other)
    s.consume(0, (1, other), hwm=2)
    s.final([batch(0, [PLAIN[0], other])], hwm=2)


def a_consumer_misses_a_young_tombstone(s: Story) -> None:
    s.note("compaction", keys=2, tombstone_ms=1_000, topics=["t"])
    other = next(value for value in PLAIN if key_of(value, 2) != key_of(TOMBSTONE, 2))
    versions(s, TOMBSTONE, other)
    s.consume(0, (1, other), hwm=2)
    s.final([batch(0, [TOMBSTONE, other])], hwm=2)


def a_consumer_is_given_what_a_tombstone_deleted(s: Story) -> None:
    begin(s)
    versions(s, PLAIN[0], TOMBSTONE)
    s.poll(0, [batch(0, [GONE, GONE])], hwm=2)
    s.consume(0, (0, PLAIN[0]), hwm=2)
    s.final([batch(0, [GONE, GONE])], hwm=2)


def a_consumer_is_given_another_record_than_was_superseded(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.consume(0, (0, PLAIN[1]), (2, PLAIN[2]), hwm=3)
    s.final([batch(0, [GONE, GONE]), batch(2, PLAIN[2:3])], hwm=3)


def a_consumer_is_given_what_is_before_its_place(s: Story) -> None:
    begin(s)
    versions(s, *PLAIN[:3])
    s.consume(1, (0, PLAIN[0]), hwm=3)
    s.final([batch(0, PLAIN[:3])], hwm=3)


def replicas_hold_other_bytes(s: Story) -> None:
    older_ones_are_gone(s)
    for node, digest in ((1, "a"), (2, "b")):
        s.note("log-digest", n=node, k="t/0", d=digest)


def a_key_is_there_twice(s: Story) -> None:
    older_ones_are_gone(s)
    s.note("compacted", n=1, k="t/0", twice=1, left=0)


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (the_last_is_gone, "lost-key"),
        (the_last_is_gone_before_one_in_doubt_is_committed, "lost-key"),
        (another_topic_compacts, "lost-write"),
        (a_tombstone_is_gone_early, "early-tombstone"),
        (a_tombstone_is_gone_just_after_a_replica_served_what_it_deletes, "early-tombstone"),
        (what_a_tombstone_deleted_is_back, "resurrected"),
        (an_offset_holds_another_record, "offset-reuse"),
        (the_last_is_gone_and_no_batch_in_doubt_fits, "lost-key"),
        (the_last_is_gone_that_a_read_shows_the_rest_of, "lost-key"),
        (only_a_consumer_misses_the_last, "lost-key"),
        (a_consumer_misses_a_young_tombstone, "early-tombstone"),
        (a_consumer_is_given_what_a_tombstone_deleted, "resurrected"),
        (a_consumer_is_given_another_record_than_was_superseded, "inconsistent-offsets"),
        (a_consumer_is_given_what_is_before_its_place, "nonmonotonic-poll"),
        (replicas_hold_other_bytes, "divergent-bytes"),
        (a_key_is_there_twice, "late-compaction"),
    ],
)
def test_anomaly_of_compaction_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


def retained(s: Story, *, lo: int, hwm: int, topic: str = "t", clock: int = 0, **limits: int) -> None:
    """As a live run notes it: the log starts that clients learned."""
    s.note("retention", topics=[topic], created_0_ms=CREATED_0_MS, **{"records": 0, "most": 0, "ms": 0, **limits})
    s.note("start", k="t/0", lo=lo, hwm=hwm, clock=clock)


@pytest.mark.parametrize(
    ("limits", "lo", "expected"),
    [
        ({"records": 1, "most": 1}, 2, set()),
        ({"records": 2, "most": 2}, 2, {"early-deletion"}),
        ({"records": 1, "most": 1}, 0, {"late-deletion"}),
        ({"ms": 60_000, "clock": CREATED_0_MS + 62_000}, 2, set()),
        ({"ms": 60_000, "clock": CREATED_0_MS + 50_000}, 2, {"early-deletion"}),
        ({"records": 2, "most": 2, "topic": "u"}, 0, set()),
    ],
)
def test_log_starts_that_clients_learned_are_judged_by_the_limits_of_the_topic(
    limits: dict[str, int], lo: int, expected: set[str]
) -> None:
    def tell(s: Story) -> None:
        s.send(PLAIN[:2], 0)
        s.send(PLAIN[2:3], 2)
        hwm = 3 if lo else 3 + LATE_RECORDS_MAX
        retained(s, lo=lo, hwm=hwm, **limits)  # type: ignore[arg-type]  # `topic` is the only text
        s.final([batch(0, PLAIN[:2]), batch(2, PLAIN[2:3])][lo // 2 :], hwm=3, lo=lo)

    assert anomalies(tell) == expected
