"""When tombstones go: their time begins once no replica has what they delete."""

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.net.wire import StepQuery, StepReport
from tests.unit.replication.partition.compaction.test_passes import Keeper
from tests.unit.replication.support import ME, PEER_A, PEER_B

LOOK_MS, KEPT_MS, STEP_MS = 500, 20_000, 2_000  # STEP_MS: a few looks
DELETED = [(b"k", None), (b"other", b"v")]
GONE = [(b"other", b"v")]


class Replicated(Keeper):
    """A leader with two followers, of which one or both may lag. A key has been deleted, and its record removed."""

    def __init__(self) -> None:
        super().__init__(replication=3, compaction_check_ms=LOOK_MS)
        self.configure(delete_retention_ms=str(KEPT_MS))
        self.lagging: set[NodeId] = {PEER_B}
        self._seen = 0
        for key, value in ((b"k", b"v"), (b"k", None), (b"other", b"v")):
            self.put(key, value)
        self.wait(STEP_MS)
        assert self.records == DELETED

    @property
    def questions(self) -> list[StepQuery]:
        return [message for message in self.host.messages(StepQuery) if isinstance(message, StepQuery)]

    def settle(self, ms: int = 0) -> None:
        self.host.settle(max(ms, 20))  # no longer, so that the replicated clock keeps up
        self.host.advance(self.host.live.log.appended_end)
        asked = self.questions
        for query in asked[self._seen :]:
            for peer in (PEER_A, PEER_B):
                report = StepReport(query.partition, query.request, peer not in self.lagging)
                self.compactor.on_step_report(peer, report)
        self._seen = len(asked)


@pytest.fixture
def keeper() -> Replicated:
    return Replicated()


def test_a_tombstone_stays_for_its_time_after_the_last_replica_has_lost_what_it_deletes(keeper: Replicated) -> None:
    """Until then that replica serves it, and a consumer that reads it there needs time to reach the tombstone."""
    keeper.wait(2 * KEPT_MS)
    keeper.lagging.clear()
    keeper.wait(KEPT_MS - STEP_MS)
    assert keeper.records == DELETED
    keeper.wait(4 * STEP_MS)
    assert keeper.records == GONE


def test_a_tombstone_stays_while_a_replica_lags_when_its_time_has_passed(keeper: Replicated) -> None:
    keeper.lagging.clear()
    keeper.wait(2 * STEP_MS)
    keeper.lagging.add(PEER_A)
    keeper.wait(2 * KEPT_MS)
    assert keeper.records == DELETED
    keeper.lagging.clear()
    keeper.wait(STEP_MS)
    assert keeper.records == GONE


def test_a_younger_tombstone_is_not_taken_for_one_of_which_all_replicas_were_in_step(keeper: Replicated) -> None:
    keeper.lagging.clear()
    keeper.wait(2 * STEP_MS)
    keeper.lagging.add(PEER_B)
    keeper.put(b"other", None)
    keeper.put(b"last", b"v")
    keeper.wait(2 * KEPT_MS)
    keeper.lagging.clear()
    keeper.wait(STEP_MS)
    assert keeper.records == [(b"other", None), (b"last", b"v")]
    keeper.wait(KEPT_MS + 2 * STEP_MS)
    assert keeper.records == [(b"last", b"v")]


def test_the_time_goes_on_with_other_leaders(keeper: Replicated) -> None:
    """Otherwise no tombstone would ever go where leaders change every night."""
    keeper.lagging.clear()
    for _ in range(5):
        keeper.wait(KEPT_MS // 5)
        keeper.host.elect(ME)
    keeper.wait(2 * STEP_MS)
    assert keeper.records == GONE


def test_the_replicas_are_seldom_asked_and_not_if_nothing_depends_on_it(keeper: Replicated) -> None:
    before = len(keeper.questions)
    keeper.wait(KEPT_MS)
    assert 0 < len(keeper.questions) - before <= 2 * 10  # of each of the two
    keeper.lagging.clear()
    keeper.wait(2 * STEP_MS)
    before = len(keeper.questions)
    keeper.wait(KEPT_MS - 2 * STEP_MS)
    assert len(keeper.questions) == before
    keeper.wait(4 * STEP_MS)
    assert keeper.records == GONE
    before = len(keeper.questions)
    keeper.wait(2 * KEPT_MS)
    assert len(keeper.questions) == before
