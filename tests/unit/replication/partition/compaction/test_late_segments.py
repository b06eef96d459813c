"""Segments whose pieces come late, or not while their replica is busy: they are fetched, and are of one version."""

from collections.abc import Callable

import pytest

from smq.raft_state.ids import NodeId, Offset
from smq.replication.log.compaction.segment_writer import Rewritten
from smq.replication.log.segments import NO_DIGEST
from smq.replication.log.stored_batch import StoredValue
from smq.replication.net.wire import SegmentPart, SegmentQuery
from smq.replication.partition.compaction import segment_catch_up
from smq.replication.partition.compaction.segment_catch_up import ANSWER_NS_MAX, ANSWER_NS_MIN, RECENT_NS, Segments
from smq.replication.ports import DataDamaged
from tests.unit.replication.partition.compaction.test_adoption import Peer
from tests.unit.replication.partition.compaction.test_installing import is_as_agreed, rewritten_without
from tests.unit.replication.partition.compaction.test_passes import RESET_MS, Leader, agree
from tests.unit.replication.support import INCARNATION, PEER_A, PEER_B, batch

START, END = Offset(0), Offset(3)
STEP_MS = 500  # of `Leader.wait`
LONG = ANSWER_NS_MAX, 1 << 62  # how long a slow replica has, and when that was seen

Answer = Callable[[NodeId, SegmentQuery], SegmentPart | None]


class Fetching:
    """A leader that lacks the bytes of a segment, and what it asks of the others."""

    def __init__(self, pieces: int = END) -> None:
        self.leader = Leader()
        self.host = self.leader.host
        for _ in range(pieces - END):
            self.host.produce(batch())
        self.host.settle()
        self.host.advance(pieces + 1)
        self.own = self.host.live.log.read_segment(START, END, 1 << 20)
        self.new: Rewritten = rewritten_without(self.host.live.log, pieces, {0})
        assert len(self.new.values) == pieces
        agree(self.host, pieces, self.new.digest)

    @property
    def asked(self) -> list[tuple[NodeId, SegmentQuery]]:
        return [(node, m) for node, m in self.host.sent if isinstance(m, SegmentQuery)]

    def piece(self, query: SegmentQuery) -> SegmentPart:
        """One batch of the agreed bytes."""
        return piece_of(self.new.values, query)

    def serve(
        self,
        answer: Answer,
        delay_ms: int,
        ms: int,
        until: Callable[[], bool],
        is_late: Callable[[SegmentQuery], bool] = lambda _: True,
    ) -> None:
        """The others answer the late ones so much later. `ms` is the longest time."""
        seen, due = len(self.asked), list[tuple[int, NodeId, SegmentQuery]]()
        for now_ms in range(0, ms, STEP_MS):
            for node, query in self.asked[seen:]:
                due.append((now_ms + (delay_ms if is_late(query) else 0), node, query))
            seen = len(self.asked)
            for entry in [entry for entry in due if entry[0] <= now_ms]:
                due.remove(entry)
                part = answer(*entry[1:])
                if part is not None:
                    self.leader.segments.on_part(entry[1], part)
            self.leader.wait(STEP_MS)
            if until():
                return

    def is_fetched(self) -> bool:
        return is_as_agreed(self.host)

    def wait_for_questions(self, count: int) -> list[tuple[NodeId, SegmentQuery]]:
        """That many more; none is answered."""
        seen = len(self.asked)
        for _ in range(60_000 // STEP_MS * count):
            if len(self.asked) >= seen + count:
                break
            self.leader.wait(STEP_MS)
        assert len(self.asked) >= seen + count
        return self.asked[seen : seen + count]

    def take(self, node: NodeId, part: SegmentPart) -> None:
        self.leader.segments.on_part(node, part)
        self.host.settle(10)


@pytest.fixture
def fetching() -> Fetching:
    return Fetching()


def piece_of(values: list[StoredValue], query: SegmentQuery) -> SegmentPart:
    (value,) = [v.value for v in values if v.base == query.at]
    return SegmentPart(query.partition, query.request, [memoryview(value)])


def refusal(query: SegmentQuery) -> SegmentPart:
    return SegmentPart(query.partition, query.request, [])


def busy(query: SegmentQuery) -> SegmentPart:
    return SegmentPart(query.partition, query.request, [], is_busy=True)


@pytest.mark.parametrize("delay_ms", [3_000, 10_000, 25_000])
@pytest.mark.parametrize("both_hold_it", [True, False])
def test_a_segment_is_fetched_although_each_piece_comes_late(
    fetching: Fetching, *, delay_ms: int, both_hold_it: bool
) -> None:
    def answer(node: NodeId, query: SegmentQuery) -> SegmentPart:
        return fetching.piece(query) if both_hold_it or node == PEER_A else refusal(query)

    fetching.serve(answer, delay_ms, 20 * delay_ms, fetching.is_fetched)
    assert fetching.is_fetched()
    assert fetching.leader.resets == []


@pytest.mark.parametrize(("late", "delay_ms"), [(1, 5_000), (2, 10_000), (6, 3_000), (11, 10_000)])
def test_a_replica_that_is_slow_with_one_of_many_pieces_is_waited_for(late: int, delay_ms: int) -> None:
    """Each time, however fast the others come."""
    fetching = Fetching(pieces=12)
    at = fetching.new.values[late].base

    def answer(node: NodeId, query: SegmentQuery) -> SegmentPart:
        return fetching.piece(query) if node == PEER_A else refusal(query)

    fetching.serve(answer, delay_ms, RESET_MS, fetching.is_fetched, lambda query: query.at == at)
    assert fetching.is_fetched()
    assert fetching.leader.resets == []


def test_a_damaged_piece_is_asked_of_the_next_replica_without_delay(fetching: Fetching) -> None:
    ((node, query),) = fetching.wait_for_questions(1)
    seen = len(fetching.asked)
    damaged = bytearray(fetching.new.values[0].value)
    damaged[-1] ^= 1
    with pytest.raises(DataDamaged):
        fetching.leader.segments.on_part(node, SegmentPart(query.partition, query.request, [memoryview(damaged)]))
    assert len(fetching.asked) == seen + 1


def test_a_late_piece_is_not_joined_to_those_of_another_replica(fetching: Fetching) -> None:
    (first, query), (second, same) = fetching.wait_for_questions(2)
    seen = len(fetching.asked)
    fetching.take(first, fetching.piece(query))
    assert len(fetching.asked) == seen
    fetching.take(second, fetching.piece(same))
    assert [(node, q.at) for node, q in fetching.asked[seen:]] == [(second, fetching.new.values[1].base)]


def test_a_replica_that_has_gone_is_not_waited_for_as_when_it_was_slow(fetching: Fetching) -> None:
    def answer(node: NodeId, query: SegmentQuery) -> SegmentPart:
        return fetching.piece(query) if node == PEER_A else refusal(query)

    patience = fetching.leader.segments._patience
    fetching.serve(answer, 4_000, 60_000, lambda: PEER_A in patience)
    assert patience[PEER_A][0] > ANSWER_NS_MIN
    fetching.wait_for_questions(6)
    began_ns = fetching.host.clock.monotonic_ns()
    fetching.wait_for_questions(4)
    assert fetching.host.clock.monotonic_ns() - began_ns < 12_000_000_000


@pytest.mark.parametrize("delay_ms", [3_000, 20_000])
def test_an_adoption_finds_late_pieces_when_it_is_tried_again(fetching: Fetching, delay_ms: int) -> None:
    """Otherwise the leader would give bytes up that another replica has."""
    found = list[list[StoredValue]]()

    def adopt(values: list[StoredValue]) -> None:
        found.append(values)
        if not values:
            fetching.leader.segments.adopt(fetching.host.live, START, END, adopt)

    def answer(_node: NodeId, query: SegmentQuery) -> SegmentPart:
        return piece_of(fetching.own, query) if query.digest == NO_DIGEST else refusal(query)

    adopt([])
    fetching.serve(answer, delay_ms, 30 * delay_ms, lambda: bool(found[-1]))
    assert [v.value for v in found[-1]] == [v.value for v in fetching.own]


def test_what_no_replica_had_before_a_long_adoption_counts_after_it(fetching: Fetching) -> None:
    """Nothing was looked for meanwhile: the bytes would never have been lacking for long enough to be given up."""
    fetching.wait_for_questions(2)
    host, node = fetching.host, fetching.leader.segments
    place = START, END, fetching.new.digest
    while node.lacked_ns(host.live.pid, place) is None:
        host.settle(STEP_MS)
    found, seen = list[list[StoredValue]](), len(fetching.asked)
    node._patience.update({PEER_A: LONG, PEER_B: LONG})
    began_ns = host.clock.monotonic_ns()
    node.adopt(host.live, START, END, found.append)
    while not found:
        host.settle(20_000)
        for peer, query in fetching.asked[seen:]:
            node.on_part(peer, piece_of(fetching.own, query))
        seen = len(fetching.asked)
        host.settle(0)
    assert host.clock.monotonic_ns() - began_ns >= RECENT_NS
    assert node.lacked_ns(host.live.pid, place) == 0


def test_a_process_uses_no_request_number_of_the_one_before_it(fetching: Fetching) -> None:
    """The other replica may still be reading for that one. Incarnations may be neighbours."""
    fetching.wait_for_questions(2)
    host, before = fetching.host, max(query.request for _, query in fetching.asked)
    host.reopen(INCARNATION + 1)
    later = Segments(host.node_host(), host.look_ups(), {host.live.pid: host.live}.get, lambda _: None)
    later.adopt(host.live, START, END, lambda _: None)
    host.settle()
    assert abs(fetching.asked[-1][1].request - before) > 1 << 40


def test_a_replica_that_serves_many_says_that_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    monkeypatch.setattr(segment_catch_up, "SERVED_MAX", 1)
    host, log = peer.keeper.host, peer.keeper.host.live.log
    log.note_held(START, END, peer.new.digest)
    for digest in (peer.new.digest, peer.new.digest, NO_DIGEST, b"bytes of no node"):
        peer.segments.on_query(PEER_A, SegmentQuery(host.part.pid, 1, START, END, digest, START))
    host.settle()
    parts = [part for part in host.messages(SegmentPart) if isinstance(part, SegmentPart)]
    assert [(part.is_busy, bool(part.values)) for part in parts] == [
        (True, False),
        (True, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize("is_refused_by_the_other", [True, False])
def test_a_segment_of_a_busy_replica_is_not_given_up(fetching: Fetching, *, is_refused_by_the_other: bool) -> None:
    def answer(node: NodeId, query: SegmentQuery) -> SegmentPart | None:
        if node == PEER_A:
            return busy(query)
        return refusal(query) if is_refused_by_the_other else None

    fetching.serve(answer, 0, 2 * RESET_MS, fetching.is_fetched)
    assert fetching.leader.resets == []
    fetching.serve(lambda _node, query: fetching.piece(query), 0, 10_000, fetching.is_fetched)
    assert fetching.is_fetched()
