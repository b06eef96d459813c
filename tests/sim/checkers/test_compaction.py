"""The judge of compacted partitions: what may be gone is put back, nothing else is, and only in topics that compact."""

from copy import deepcopy
from typing import Any, Self

import pytest

from chaos_tests.checkers.judge import judge
from chaos_tests.checkers.retention import CREATED_0_MS, LATE_RECORDS_MAX
from chaos_tests.keyed import GONE, is_tombstone, key_of
from tests.sim.checkers.support import Story, anomaly_of, batch

PLAIN = [value for value in range(100) if not is_tombstone(value)]
V0, V1, V2 = PLAIN[:3]
TOMBSTONE = next(value for value in range(100) if is_tombstone(value))
OF_TWO = [[value for value in PLAIN if key_of(value, 2) == key] for key in (0, 1)]


class Compacted(Story):
    """A partition whose records have one of `keys` keys. Without a topic, all topics are compacted."""

    def __init__(self, *, keys: int = 1, tombstone_ms: int = 0, topic: str = "t") -> None:
        super().__init__()
        self.note("compaction", keys=keys, tombstone_ms=tombstone_ms, **({"topics": [topic]} if topic else {}))

    def versions(self, *values: int) -> Self:
        for offset, value in enumerate(values):
            self.send([value], offset)
        return self

    def in_doubt(self, *values: int) -> Self:
        return self.send(list(values), None, kind="info")

    def read(self, *values: int, node: int = 1) -> Self:
        """Of the first batch."""
        return self.poll(0, [batch(0, list(values))], hwm=len(values), node=node)

    def shows(self, *values: int) -> Self:
        return self.final([batch(0, list(values))], hwm=len(values))

    def shows_the_last(self) -> Self:
        """Of three versions."""
        return self.final([batch(0, [GONE, GONE]), batch(2, [V2])], hwm=3)


def other_than(value: int) -> int:
    """A value with another of two keys."""
    return next(other for other in PLAIN if key_of(other, 2) != key_of(value, 2))


def superseded() -> Compacted:
    return Compacted().versions(V0, V1, V2).read(V0).shows_the_last()


def deleted_while_a_replica_lags(later_ms: int) -> Compacted:
    """The tombstone is gone so long after the deleted record was read."""
    story = Compacted(tombstone_ms=1_000).versions(V0, TOMBSTONE).wait(2_000)
    return story.read(V0, TOMBSTONE, node=3).wait(later_ms).shows(GONE, GONE)


def tombstone_in_doubt_superseded_one_that_was_deleted() -> Compacted:
    """It was at 1, and compaction has taken it, a tombstone, away before any client read it."""
    story = Compacted().note("retention", records=2, most=2, ms=0).send([V0], 0).in_doubt(TOMBSTONE)
    return story.note("start", k="t/0", lo=1, hwm=2, clock=0).final([batch(1, [GONE])], hwm=2, lo=1)


def record_in_doubt_that_was_never_read_superseded_one_that_was_deleted() -> Compacted:
    """It is at 1, and only a node says that it is committed."""
    story = Compacted().note("retention", records=2, most=2, ms=60_000).send([V0], 0).in_doubt(V1)
    return story.local(hwm=2, lo=1, clock=CREATED_0_MS)


def consumer_passes_over_what_was_superseded() -> Compacted:
    story = Compacted().versions(V0, V1, V2).consume(0, (0, V0), (1, V1), hwm=2)
    return story.consume(0, (2, V2), hwm=3).consume(1, (2, V2), hwm=3).shows_the_last()


def an_emptied_batch_goes_with_the_one_before_it() -> Compacted:
    """The first goes by number: two are after it. The second was removed, and so does not stay alone."""
    other = other_than(V0)
    later = next(value for value in PLAIN if value != other and key_of(value, 2) == key_of(other, 2))
    story = Compacted(keys=2, topic="").note("retention", records=2, most=2, ms=60_000).versions(V0, other, later)
    return story.local(hwm=3, lo=2, clock=CREATED_0_MS).final([batch(2, [later])], hwm=3, lo=2)


def with_one_offset_unknown(*doubtful: int) -> Compacted:
    """Of two keys. Nothing says what is at 1. The last of the other key is at 3."""
    story = Compacted(keys=2, topic="").send(OF_TWO[0][:1], 0).in_doubt(*doubtful).send(OF_TWO[1][:2], 2)
    return story.final([batch(0, [GONE, GONE, GONE]), batch(3, OF_TWO[1][1:2])], hwm=4)


ALLOWED = {
    "older ones are gone": superseded(),
    "a tombstone is gone in time": Compacted().versions(V0, TOMBSTONE).shows(GONE, GONE),
    "a tombstone is gone long after a replica served what it deletes": deleted_while_a_replica_lags(1_500),
    "a tombstone in doubt": tombstone_in_doubt_superseded_one_that_was_deleted(),
    # It is at 1. The only read ends before it, and then the topic is deleted.
    "a record in doubt that no read reached": Compacted().send([V0], 0).in_doubt(V1).poll(0, [batch(0, [GONE])], hwm=2),
    "a record in doubt that was never read": record_in_doubt_that_was_never_read_superseded_one_that_was_deleted(),
    "a batch in doubt that fits": with_one_offset_unknown(OF_TWO[0][1]),
    "a consumer passes over it": consumer_passes_over_what_was_superseded(),
    "an emptied batch goes with the one before it": an_emptied_batch_goes_with_the_one_before_it(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_was_superseded_may_be_gone(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()


def test_a_judged_history_stays_as_it_was_recorded() -> None:
    events = superseded().recorder.events
    recorded = deepcopy(events)
    assert judge(events) == []
    assert events == recorded


FOUND = {
    "lost-key: the last": Compacted().versions(V0, V1, V2).final([batch(0, [V0]), batch(1, [GONE, GONE])], hwm=3),
    "lost-key: before one in doubt is committed": Compacted().send([V0], 0).in_doubt(V1).read(GONE),
    "lost-key: no batch in doubt fits": with_one_offset_unknown(*OF_TWO[0][1:3]),
    # The batch in doubt lies at 0 and 1, and its first record is the last of its key.
    "lost-key: a read shows the rest of its batch": Compacted(keys=2, topic="")
    .in_doubt(OF_TWO[0][0], OF_TWO[1][0])
    .shows(GONE, OF_TWO[1][0]),
    "lost-key: only a consumer misses it": Compacted(keys=2)
    .versions(V0, other_than(V0))
    .consume(0, (1, other_than(V0)), hwm=2)
    .shows(V0, other_than(V0)),
    "lost-write: another topic compacts": Compacted(topic="u").versions(V0, V1, V2).shows_the_last(),
    "early-tombstone: gone": Compacted(tombstone_ms=1_000).versions(V0, TOMBSTONE).shows(GONE, GONE),
    "early-tombstone: a replica has just served what it deletes": deleted_while_a_replica_lags(500),
    "early-tombstone: a consumer misses a young one": Compacted(keys=2, tombstone_ms=1_000)
    .versions(TOMBSTONE, other_than(TOMBSTONE))
    .consume(0, (1, other_than(TOMBSTONE)), hwm=2)
    .shows(TOMBSTONE, other_than(TOMBSTONE)),
    "resurrected: what a tombstone deleted": Compacted().versions(V0, TOMBSTONE).read(GONE, GONE).shows(V0, GONE),
    "resurrected: for a consumer": Compacted()
    .versions(V0, TOMBSTONE)
    .read(GONE, GONE)
    .consume(0, (0, V0), hwm=2)
    .shows(GONE, GONE),
    "offset-reuse: another record": Compacted()
    .versions(V0, V1, V2)
    .final([batch(0, [GONE, V0]), batch(2, [V2])], hwm=3),
    "inconsistent-offsets: a consumer is given another record than was superseded": Compacted()
    .versions(V0, V1, V2)
    .consume(0, (0, V1), (2, V2), hwm=3)
    .shows_the_last(),
    "nonmonotonic-poll: a consumer is given what is before its place": Compacted()
    .versions(V0, V1, V2)
    .consume(1, (0, V0), hwm=3)
    .shows(V0, V1, V2),
    "divergent-bytes: replicas hold other ones": superseded()
    .note("log-digest", n=1, k="t/0", d="a")
    .note("log-digest", n=2, k="t/0", d="b"),
    "late-compaction: a key is there twice": superseded().note("compacted", n=1, k="t/0", twice=1, left=0),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_compaction_is_found(name: str) -> None:
    assert anomaly_of(name) in FOUND[name].anomalies()


@pytest.mark.parametrize(
    ("limits", "lo", "expected"),
    [
        ({"records": 1, "most": 1}, 2, set()),
        ({"records": 2, "most": 2}, 2, {"early-deletion"}),
        ({"records": 1, "most": 1}, 0, {"late-deletion"}),
        ({"ms": 60_000, "clock": CREATED_0_MS + 62_000}, 2, set()),
        ({"ms": 60_000, "clock": CREATED_0_MS + 50_000}, 2, {"early-deletion"}),
        ({"records": 2, "most": 2, "topics": ["u"]}, 0, set()),
    ],
)
def test_log_starts_that_clients_learned_are_judged_by_the_limits_of_the_topic(
    limits: dict[str, Any], lo: int, expected: set[str]
) -> None:
    """As a live run notes them."""
    noted = {"topics": ["t"], "records": 0, "most": 0, "ms": 0, "clock": 0, **limits}
    clock = noted.pop("clock")
    story = Story().send([V0, V1], 0).send([V2], 2).note("retention", created_0_ms=CREATED_0_MS, **noted)
    story.note("start", k="t/0", lo=lo, hwm=3 if lo else 3 + LATE_RECORDS_MAX, clock=clock)
    story.final([batch(0, [V0, V1]), batch(2, [V2])][lo // 2 :], hwm=3, lo=lo)
    assert story.anomalies() == expected
