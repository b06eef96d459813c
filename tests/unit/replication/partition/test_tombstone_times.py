"""When tombstones go: their time begins once no replica has what they delete."""

from smq.raft_state.commands import AdvanceClock
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.state import Segment
from smq.raft_state.topic_config import compaction
from smq.replication.net.segment_messages import StepQuery, StepReport
from smq.replication.partition.compaction.tombstones import QUESTIONS_PER_TIME, InStepTimes
from tests.unit.replication.partition.test_compaction import Keeper
from tests.unit.replication.support import ME, PEER_A, PEER_B

LOOK_MS, KEPT_MS, STEP_MS = 500, 20_000, 2_000  # STEP_MS: until the next question, and more
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


def test_a_tombstone_stays_for_its_time_after_the_last_replica_has_lost_what_it_deletes() -> None:
    """Until then that replica serves it, and a consumer that reads it there needs time to reach the tombstone."""
    keeper = Replicated()
    keeper.wait(2 * KEPT_MS)
    keeper.lagging.clear()
    keeper.wait(KEPT_MS - STEP_MS)
    assert keeper.records == DELETED
    keeper.wait(4 * STEP_MS)
    assert keeper.records == GONE


def test_a_tombstone_stays_while_a_replica_lags_when_its_time_has_passed() -> None:
    keeper = Replicated()
    keeper.lagging.clear()
    keeper.wait(2 * STEP_MS)
    keeper.lagging.add(PEER_A)
    keeper.wait(2 * KEPT_MS)
    assert keeper.records == DELETED
    keeper.lagging.clear()
    keeper.wait(STEP_MS)
    assert keeper.records == GONE


def test_a_younger_tombstone_is_not_taken_for_one_of_which_all_replicas_were_in_step() -> None:
    keeper = Replicated()
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


def test_a_new_leader_finds_out_again_whether_all_replicas_are_in_step() -> None:
    keeper = Replicated()
    keeper.lagging.clear()
    keeper.wait(KEPT_MS - 2 * STEP_MS)
    keeper.host.elect(ME)
    keeper.wait(KEPT_MS - STEP_MS)
    assert keeper.records == DELETED
    keeper.wait(4 * STEP_MS)
    assert keeper.records == GONE


def test_the_replicas_are_seldom_asked_and_no_longer_once_nothing_depends_on_it() -> None:
    keeper = Replicated()
    before = len(keeper.questions)
    keeper.wait(KEPT_MS)
    assert 2 * (QUESTIONS_PER_TIME - 2) <= len(keeper.questions) - before <= 2 * (QUESTIONS_PER_TIME + 1)
    keeper.lagging.clear()
    keeper.wait(STEP_MS + LOOK_MS)
    before = len(keeper.questions)
    keeper.wait(KEPT_MS - 2 * STEP_MS)
    assert len(keeper.questions) == before
    keeper.wait(4 * STEP_MS)
    assert keeper.records == GONE
    before = len(keeper.questions)
    keeper.wait(2 * KEPT_MS)
    assert len(keeper.questions) == before


def test_a_stamp_is_later_than_the_times_of_a_clock_that_jumped_back() -> None:
    keeper = Replicated()
    host, topic = keeper.host, keeper.host.state.topics["t"]
    limits = compaction(topic.config)
    assert limits is not None
    times = InStepTimes(host.node_host(), host.part.epoch)
    host.hardware.wall_offset_ns += 60_000_000_000
    times.note_in_step(limits)
    host.hardware.wall_offset_ns -= 60_000_000_000
    stamp_ms = times.stamp_ms()
    for _ in range(10):
        seen_ms, kept_ms = host.state.expiry_clock_ms, KEPT_MS
        host.apply(AdvanceClock(seen_ms=seen_ms, elapsed_ms=kept_ms, now_ms=seen_ms + kept_ms))
    assert 0 < times.expired_ms(limits) < stamp_ms
    assert times.asks([Segment(Offset(0), b"d", stamp_ms)], limits)
