"""Segments whose pieces come late, or not while their replica is busy: they are completed, and are of one version."""

from collections.abc import Callable, Iterator

import pytest

from smq.raft_state.ids import NodeId, Offset
from smq.replication.log.codec import StoredValue, parse_value
from smq.replication.log.rewriting import Rewritten
from smq.replication.log.segments import NO_DIGEST
from smq.replication.net.segment_messages import SegmentPart, SegmentQuery
from smq.replication.partition.compaction import segments
from smq.replication.partition.compaction.segments import LATE_NS_MAX, Segments
from tests.unit.replication.partition.compaction.test_adoption import Peer
from tests.unit.replication.partition.compaction.test_installing import is_as_agreed, rewritten_without
from tests.unit.replication.partition.compaction.test_passes import RESET_MS, Leader
from tests.unit.replication.partition.compaction.test_waits import waiting_replicas
from tests.unit.replication.support import INCARNATION, PEER_A, PEER_B

START, END = Offset(0), Offset(3)
STEP_MS = 500  # of `Leader.wait`

Answer = Callable[[NodeId, SegmentQuery], SegmentPart | None]


class Fetching:
    """A leader that lacks the bytes of a segment, and what it asks of the others."""

    def __init__(self) -> None:
        self.leader = Leader()
        self.host = self.leader.host
        self.new: Rewritten = rewritten_without(self.host.live.log, END, {0})
        assert len(self.new.values) > 2
        self.leader.agree(self.new.digest)

    @property
    def asked(self) -> list[tuple[NodeId, SegmentQuery]]:
        return [(node, m) for node, m in self.host.sent if isinstance(m, SegmentQuery)]

    def piece(self, query: SegmentQuery) -> SegmentPart:
        """One batch of the agreed bytes."""
        return piece_of(self.new.values, query)

    def serve(self, answer: Answer, delay_ms: int, ms: int) -> None:
        """The others answer so much later, until the segment is here. The last argument is the longest time."""
        seen, due = len(self.asked), list[tuple[int, NodeId, SegmentQuery]]()
        for now_ms in range(0, ms, STEP_MS):
            due += [(now_ms + delay_ms, *question) for question in self.asked[seen:]]
            seen = len(self.asked)
            for entry in [entry for entry in due if entry[0] <= now_ms]:
                due.remove(entry)
                part = answer(*entry[1:])
                if part is not None:
                    self.leader.segments.on_part(entry[1], part)
            self.leader.wait(STEP_MS)
            if is_as_agreed(self.host):
                return

    def wait_for_questions(self, count: int) -> list[tuple[NodeId, SegmentQuery]]:
        """That many more; none is answered."""
        seen = len(self.asked)
        while len(self.asked) < seen + count:
            self.leader.wait(STEP_MS)
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


# ------------------------------------------------------------------------------------------------ late answers
@pytest.mark.parametrize("delay_ms", [3_000, 10_000, 25_000])
@pytest.mark.parametrize("both_hold_it", [True, False])
def test_a_segment_is_fetched_however_late_each_piece_comes(
    fetching: Fetching, *, delay_ms: int, both_hold_it: bool
) -> None:
    def answer(node: NodeId, query: SegmentQuery) -> SegmentPart:
        return fetching.piece(query) if both_hold_it or node == PEER_A else refusal(query)

    fetching.serve(answer, delay_ms, 20 * delay_ms)
    assert is_as_agreed(fetching.host)
    assert fetching.leader.resets == []


def test_a_replica_that_may_still_answer_is_not_asked_again_and_again(fetching: Fetching) -> None:
    """Each answer takes its part of a slow link."""
    fetching.serve(lambda _node, query: fetching.piece(query), 25_000, 500_000)
    pieces = [(node, query.at) for node, query in fetching.asked]
    assert max(pieces.count(piece) for piece in pieces) <= 5
    assert max(pieces.count(piece) for piece in pieces if piece[1] > START) <= 2


def test_a_late_answer_counts_while_another_replica_is_asked(fetching: Fetching) -> None:
    (first, query), (second, _) = fetching.wait_for_questions(2)
    assert {first, second} == {PEER_A, PEER_B}
    fetching.take(first, fetching.piece(query))
    assert (fetching.asked[-1][0], fetching.asked[-1][1].at) == (first, fetching.new.values[1].base)


def test_late_copies_of_pieces_change_nothing(fetching: Fetching) -> None:
    """Also if they come while the complete segment is about to be installed."""
    (first, query), (second, same) = fetching.wait_for_questions(2)
    node, queries = fetching.leader.segments, [query]
    for _ in fetching.new.values:
        node.on_part(first, fetching.piece(queries[-1]))
        queries.append(fetching.asked[-1][1])
    assert not is_as_agreed(fetching.host)
    node.on_part(second, fetching.piece(same))
    for old in queries:
        node.on_part(first, fetching.piece(old))
    fetching.host.settle(100)
    assert is_as_agreed(fetching.host)
    assert node.fetched == 1


def test_a_second_copy_of_the_last_piece_does_not_disturb_the_installation(fetching: Fetching) -> None:
    """It is the newest question that it answers, and it comes while the disk is read for the installation."""
    node = fetching.leader.segments
    (first, query), _ = fetching.wait_for_questions(2)
    for _ in fetching.new.values[1:]:
        fetching.take(first, fetching.piece(query))
        query = fetching.asked[-1][1]
    asked = [question for question in fetching.wait_for_questions(2) if question[1].at == query.at]
    (second, same) = next(question for question in asked if question[0] != first)
    node.on_part(first, fetching.piece(query))
    assert fetching.asked[-1][1] is same
    seen = len(fetching.asked)
    node.on_part(second, fetching.piece(same))
    fetching.host.settle(100)
    assert is_as_agreed(fetching.host)
    assert len(fetching.asked) == seen


def test_a_late_piece_that_comes_while_the_own_bytes_are_read_leads_to_one_question(fetching: Fetching) -> None:
    (first, query), _ = fetching.wait_for_questions(2)
    host, node = fetching.host, fetching.leader.segments
    while node.is_fetching(host.live.pid):
        host.settle(10)
    host.settle(1_100)
    node.visit(host.live, host.clock.monotonic_ns())
    assert node.is_fetching(host.live.pid)
    seen = len(fetching.asked)
    node.on_part(first, fetching.piece(query))
    assert len(fetching.asked) == seen, "the disk is being read"
    host.settle(100)
    assert [query.at for _, query in fetching.asked[seen:]] == [fetching.new.values[1].base]


def test_a_late_answer_of_another_version_of_the_segment_is_not_taken(fetching: Fetching) -> None:
    (first, query), (second, same) = fetching.wait_for_questions(2)
    former = fetching.new
    fetching.take(second, fetching.piece(same))
    fetching.new = rewritten_without(fetching.host.live.log, END, {1, 2})
    assert former.digest != fetching.new.digest
    fetching.leader.agree(fetching.new.digest)
    late = fetching.asked[-1]
    fetching.take(late[0], piece_of(former.values, late[1]))
    fetching.take(first, piece_of(former.values, query))
    fetching.serve(lambda _node, query: fetching.piece(query), 0, 60_000)
    assert is_as_agreed(fetching.host)
    assert next(q.at for _, q in fetching.asked if q.digest == fetching.new.digest) == START


def test_pieces_of_a_wrong_copy_are_dropped_and_all_come_again(fetching: Fetching) -> None:
    """A replica says that it has the segment, and has other bytes of the same borders."""
    wrong = fetching.host.live.log.read_segment(START, END, 1 << 20)
    assert [v.base for v in wrong] == [v.base for v in fetching.new.values]
    sent = list[Offset]()

    def answer(_node: NodeId, query: SegmentQuery) -> SegmentPart:
        sent.append(query.at)
        return piece_of(wrong, query) if len(sent) == 1 else fetching.piece(query)

    fetching.serve(answer, 3_000, 200_000)
    assert is_as_agreed(fetching.host)
    assert fetching.leader.segments.fetched == 1


def test_pieces_after_which_no_replica_has_more_are_dropped(fetching: Fetching) -> None:
    """A wrong copy had a border where the agreed bytes have none."""
    fetching.new = rewritten_without(fetching.host.live.log, END, {0, 1})
    fetching.leader.agree(fetching.new.digest)
    wrong = fetching.host.live.log.read_segment(START, Offset(1), 1 << 20)
    assert Offset(1) not in {v.base for v in fetching.new.values}
    sent = list[Offset]()

    def answer(_node: NodeId, query: SegmentQuery) -> SegmentPart:
        sent.append(query.at)
        if len(sent) == 1:
            return piece_of(wrong, query)
        return refusal(query) if query.at == 1 else fetching.piece(query)

    fetching.serve(answer, 0, 20_000)
    assert Offset(1) in sent
    assert is_as_agreed(fetching.host)


def test_an_answer_of_another_replica_than_the_one_that_was_asked_is_not_taken(fetching: Fetching) -> None:
    (first, query), (second, _) = fetching.wait_for_questions(2)
    fetching.take(second, fetching.piece(query))
    assert fetching.asked[-1][1].at == START
    fetching.take(first, fetching.piece(query))
    assert fetching.asked[-1][1].at > START


def test_an_answer_to_an_earlier_process_is_none_to_this_one(fetching: Fetching) -> None:
    """The other replica was still reading when this node started again."""
    fetching.wait_for_questions(2)
    host, before = fetching.host, {query.request for _, query in fetching.asked}
    host.reopen(INCARNATION + 1_000)
    later = Segments(host.node_host(), host.look_ups(), {host.live.pid: host.live}.get, lambda _: None)
    later.adopt(host.live, START, END, lambda _: None)
    for _ in range(5):
        host.settle(LATE_NS_MAX // 1_000_000)
    after = {query.request for _, query in fetching.asked} - before
    assert len(after) == 2
    assert min(after) > INCARNATION + 1_000 > max(before)


# ------------------------------------------------------------------------------------------------ adoption
def adoption(fetching: Fetching, found: list[list[StoredValue]]) -> Iterator[tuple[NodeId, SegmentQuery]]:
    """The questions of an adoption, as they are sent."""
    seen = len(fetching.asked)
    fetching.leader.segments.adopt(fetching.host.live, START, END, found.append)
    while True:
        while len(fetching.asked) == seen and not found:
            fetching.host.settle(STEP_MS)
        if found:
            return
        seen += 1
        yield fetching.asked[seen - 1]


@pytest.mark.parametrize("delay_ms", [3_000, 20_000])
def test_an_adoption_takes_late_pieces(fetching: Fetching, delay_ms: int) -> None:
    found, own = list[list[StoredValue]](), fetching.host.live.log.read_segment(START, END, 1 << 20)
    nodes = set[NodeId]()
    for node, query in adoption(fetching, found):
        nodes.add(node)
        fetching.host.settle(delay_ms)
        fetching.take(node, piece_of(own, query))
    assert [v.value for v in found[0]] == [v.value for v in own]
    assert len(nodes) == 1


def test_an_adoption_joins_no_late_piece_to_those_of_another_replica(fetching: Fetching) -> None:
    """Without a digest no node would see that they are of two versions."""
    found, own = list[list[StoredValue]](), fetching.host.live.log.read_segment(START, END, 1 << 20)
    asked = list[tuple[NodeId, SegmentQuery]]()
    for node, query in adoption(fetching, found):
        asked.append((node, query))
        if node == asked[0][0]:
            continue  # it does not answer in its time
        late_node, late = asked[0]
        fetching.take(late_node, piece_of(fetching.new.values, late))
        fetching.take(node, piece_of(own, query))
    assert [node for node, _ in asked] == [asked[0][0]] + [asked[1][0]] * len(own)
    assert [v.value for v in found[0]] == [v.value for v in own]


def test_the_first_piece_of_an_adoption_is_none_of_the_next_one(fetching: Fetching) -> None:
    """Its replica has noted another version since then, for the new question."""
    found, again = list[list[StoredValue]](), list[list[StoredValue]]()
    before = list(adoption(fetching, found))
    assert found == [[]]
    for node, query in adoption(fetching, again):
        assert query.at == START
        for old_node, old in before:
            if old_node == node:
                fetching.take(node, fetching.piece(old))
        fetching.take(node, refusal(query))
    assert again == [[]]


# ------------------------------------------------------------------------------------------------ busy
def test_a_replica_that_serves_many_says_that_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    monkeypatch.setattr(segments, "SERVED_MAX", 1)
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

    fetching.serve(answer, 0, 2 * RESET_MS)
    assert fetching.leader.resets == []
    fetching.serve(lambda _node, query: fetching.piece(query), 0, 10_000)
    assert is_as_agreed(fetching.host)


def test_pieces_stay_while_the_replica_with_the_next_one_is_busy(fetching: Fetching) -> None:
    (node, query) = fetching.wait_for_questions(1)[0]
    fetching.take(node, fetching.piece(query))
    seen = len(fetching.asked)
    fetching.serve(lambda _node, query: busy(query), 0, 5_000)
    assert len(fetching.asked) > seen
    assert {query.at for _, query in fetching.asked[seen:]} == {fetching.new.values[1].base}


# ------------------------------------------------------------------------------------------------ lacking
def test_a_new_piece_starts_the_time_of_a_lost_segment_again(fetching: Fetching) -> None:
    is_first = [True]

    def one_piece(_node: NodeId, query: SegmentQuery) -> SegmentPart | None:
        return fetching.piece(query) if is_first and is_first.pop() else None

    fetching.leader.wait(RESET_MS - 10_000)
    fetching.serve(one_piece, 0, RESET_MS - 10_000)
    assert not is_first
    assert fetching.leader.resets == []
    fetching.leader.wait(2 * RESET_MS)
    assert fetching.leader.resets != []


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_segment_of_which_the_same_piece_comes_again_and_again_is_lost(
    fetching: Fetching, *, is_refused: bool
) -> None:
    """Its only replica cannot read the rest."""

    def answer(_node: NodeId, query: SegmentQuery) -> SegmentPart | None:
        if query.at == START:
            return fetching.piece(query)
        return refusal(query) if is_refused else None

    fetching.serve(answer, 0, RESET_MS + 20_000)
    assert fetching.leader.resets != []


# ------------------------------------------------------------------------------------------------ memory
def test_pieces_are_kept_up_to_a_limit_and_those_of_one_segment_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Fetching()
    host, pid = made.host, made.host.live.pid
    replicas = dict(list(waiting_replicas().items())[:3])
    for replica in replicas.values():
        replica.part = host.part
    monkeypatch.setattr(segments, "KEPT_BYTES_MAX", 1)
    monkeypatch.setattr(segments, "parse_value", lambda _pid, raw: parse_value(pid, raw))
    node = Segments(host.node_host(), host.look_ups(), replicas.get, lambda _: None)

    def wait(ms: int) -> None:
        for _ in range(0, ms, STEP_MS):
            for replica in replicas.values():
                node.visit(replica, host.clock.monotonic_ns())
            host.settle(STEP_MS)

    while {query.partition for _, query in made.asked} != set(replicas):
        wait(STEP_MS)
    first = {query.partition: (peer, query) for peer, query in reversed(made.asked)}
    host.network.disconnected = {PEER_A, PEER_B}
    wait(5_000)
    for one in replicas:
        peer, query = first[one]
        node.on_part(peer, made.piece(query))
    host.network.disconnected = set()
    seen = len(made.asked)
    wait(40_000)
    kept = {query.partition: query.at for _, query in made.asked[seen:]}
    assert list(kept.values()).count(START) == 2
    assert kept[next(iter(replicas))] == made.new.values[1].base
    node.forget(next(iter(replicas)))
    assert not [work for work in node._works.values() if work.values]
