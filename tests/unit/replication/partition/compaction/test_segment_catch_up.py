"""Segments that a replica lacks: they are fetched from others, installed beside passes, adopted, or given up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import CompactSegment
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.replication.host import Host as NodeHost
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction import cleaner as cleaning
from smq.replication.log.compaction.cleaner import Cleaner
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter
from smq.replication.log.segments import NO_DIGEST, HeldSegments, own_digest, replaced
from smq.replication.log.stored_batch import StoredValue
from smq.replication.net.wire import SegmentPart, SegmentQuery
from smq.replication.partition.compaction import segment_catch_up
from smq.replication.partition.compaction.passes import IN_STEP_MS, Compactor
from smq.replication.partition.compaction.segment_catch_up import ANSWER_NS_MAX, ANSWER_NS_MIN, RECENT_NS, Segments
from smq.replication.partition.replica import Replica
from smq.replication.ports import DataDamaged
from tests.unit.replication.partition.compaction.support import (
    RESET_MS,
    START,
    Keeper,
    Leader,
    agree,
    rewritten_without,
    segments_of,
)
from tests.unit.replication.partition.compaction.test_damaged_segments import lose
from tests.unit.replication.partition.test_intake import fill, free
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch

# ---------------------------------------------------------------------------------------------------------- installing
# A pass of compaction beside a segment that is fetched or installed: what is agreed is what the log then has.
SLOW_MS = 2_000


def agree_on(host: Host, end: int, new: Rewritten) -> None:
    agree(host, end, new.digest, host.state.expiry_clock_ms if new.has_tombstones else 0)


def begin_to_install(host: Host, end: int, new: Rewritten) -> None:
    """On a slow disk."""
    log = host.live.log
    old = replaced(log, START, Offset(end))
    host.disk.latency_ms = (SLOW_MS, SLOW_MS)
    assert host.live.install(START, Offset(end), new.digest, new.values, old, lambda: None)
    host.settle(0)
    assert log.is_installing


def is_as_agreed(host: Host) -> bool:
    """Whether the first segment's bytes are those of its digest, and the log says so."""
    segment, end = host.part.segments[0], host.part.segment_end(0)
    is_held = host.live.log.segments.holds(segment.start, end, segment.digest)
    return is_held and own_digest(host.live.log, segment.start, end) == segment.digest


@pytest.fixture
def keeper() -> Keeper:
    """With a deleted key, whose tombstone stays for a while."""
    made = Keeper()
    made.host.configure(delete_retention_ms="20000")
    made.wait(200)  # the replicated clock has a time
    made.put(b"k", b"old")
    made.put(b"a", b"0")
    made.put(b"k", None)
    made.put(b"a", b"1")
    return made


def test_a_pass_begins_after_a_segment_is_on_the_disk(keeper: Keeper) -> None:
    """It was fetched; what is on the disk until then has a record that its tombstone would no longer delete."""
    host = keeper.host
    new = rewritten_without(host.live.log, 3, {0})
    agree_on(host, 3, new)
    begin_to_install(host, 3, new)
    assert not keeper.begins()
    keeper.wait(10_000)
    host.disk.latency_ms = (0, 1)
    keeper.wait(10_000)
    assert keeper.compactor.passes > 0
    assert (b"k", b"old") not in keeper.records
    keeper.wait(60_000)
    assert keeper.records == [(b"a", b"1")]
    assert is_as_agreed(host)


def test_nothing_is_agreed_while_a_segment_is_on_its_way_to_the_disk(keeper: Keeper) -> None:
    host = keeper.host
    assert keeper.begins()
    new = rewritten_without(host.live.log, 3, {0})
    agree_on(host, 3, new)
    begin_to_install(host, 3, new)
    proposed = len(host.proposed)
    host.settle(SLOW_MS // 2)
    assert host.live.log.is_installing
    assert not keeper.compactor.is_at_work
    assert not [c for c in host.proposed[proposed:] if isinstance(c, CompactSegment)]
    host.settle(SLOW_MS)
    assert is_as_agreed(host)


def test_no_batch_is_written_twice_if_batches_are_joined_between_two_steps(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "STEP_BYTES", 1)
    log = keeper.host.live.log
    cleaner = Cleaner(
        KeyTable(START, 0),
        SegmentWriter(log.pid, START),
        AbortedTransactions([]),
        START,
        Offset(3),
        drops_tombstones=False,
        bytes_max=None,
    )
    assert cleaner.step(log)
    assert (cleaner.at, cleaner.is_done) == (1, False)
    new = rewritten_without(log, 3, {1})
    assert [(stored.base, stored.end) for stored in new.values] == [(0, 2), (2, 3)]
    begin_to_install(keeper.host, 3, new)
    keeper.host.settle(2 * SLOW_MS)
    assert not cleaner.step(log)


def asked_by(leader: Leader) -> SegmentQuery:
    """A replica has just been asked for the lost segment."""
    host = leader.host
    asked = len(host.messages(SegmentQuery))
    while len(host.messages(SegmentQuery)) == asked:
        leader.look_for_segments()
        host.settle(10)
    query = host.messages(SegmentQuery)[-1]
    return query


def answer(leader: Leader, query: SegmentQuery, new: Rewritten) -> None:
    (peer,) = [peer for peer, message in leader.host.sent if message is query]
    leader.segments.on_part(peer, SegmentPart(query.partition, query.request, [v.value for v in new.values]))


@pytest.fixture
def leader() -> Leader:
    """One that has been without its segment for almost as long as it waits."""
    made = Leader()
    made.agree(rewritten_without(made.host.live.log, 3, {0}).digest)
    made.wait(RESET_MS - 5_000)
    return made


def test_a_lost_segment_is_not_given_up_while_it_is_fetched(leader: Leader) -> None:
    host = leader.host
    new = rewritten_without(host.live.log, 3, {0})
    for _ in range(40):  # the compaction is at work elsewhere
        leader.look_for_segments()
        host.settle(250)
    query = asked_by(leader)
    assert not leader.begins(), "there is nothing to do yet"
    answer(leader, query, new)
    leader.wait(5_000)
    assert leader.resets == []
    assert is_as_agreed(host)


def test_nothing_is_installed_beside_a_pass(leader: Leader) -> None:
    """Its own bytes are."""
    host = leader.host
    new = rewritten_without(host.live.log, 3, {0})
    query = asked_by(leader)
    leader.segments.exclude(host.live.pid)
    answer(leader, query, new)
    host.settle(5_000)
    assert not is_as_agreed(host)
    leader.segments.include(host.live.pid)
    answer(leader, asked_by(leader), new)
    host.settle(5_000)
    assert is_as_agreed(host)


@pytest.mark.parametrize("fails_late", [False, True])
def test_a_segment_is_given_up_only_if_replicas_were_asked_again(*, fails_late: bool) -> None:
    """They could not be asked for a moment, and then other partitions' segments came first."""
    leader = Leader()
    host = leader.host
    host.network.disconnected = {PEER_A, PEER_B}
    leader.look_for_segments()
    host.settle(500)
    if fails_late:
        host.settle(RESET_MS - 10_000)
        leader.look_for_segments()
        host.settle(500)
    host.network.disconnected = set()
    host.settle(10_000 if fails_late else RESET_MS)
    assert not leader.begins()
    assert leader.resets == []
    leader.wait(10_000)
    assert [(c.start, c.end) for c in leader.resets[:1]] == [(0, 3)]


def test_a_replica_that_had_the_segment_since_then_counts(leader: Leader) -> None:
    """It could not be installed, as the disk was full. The peers are gone for a moment only."""
    host = leader.host
    new = rewritten_without(host.live.log, 3, {0})
    host.settle(10_000)
    fill(host)
    answer(leader, asked_by(leader), new)
    host.settle(1_000)
    assert not is_as_agreed(host)
    host.network.disconnected = {PEER_A, PEER_B}
    leader.wait(2_000)
    free(host)
    leader.wait(2_000)
    assert leader.resets == []


def test_a_segment_that_is_fetched_as_its_turn_comes_keeps_its_turn(leader: Leader) -> None:
    """Silent replicas are asked for most of the time, and the passes of the other partitions are long."""
    host, compactor = leader.host, leader.compactor
    for _ in range(40):
        leader.look_for_segments()
        host.settle(250)
    asked_by(leader)
    compactor._is_next_due = True  # a pass has just ended
    host.live.compaction_due_ns = 0
    for replica in (host.live, *waiting_replicas().values()):
        compactor.visit(replica, host.clock.monotonic_ns())
    compactor._go_on()
    assert next(iter(compactor._due)) is host.live
    while leader.segments.is_fetching(host.live.pid):
        host.settle(10)
    compactor._go_on()
    host.settle(1_000)
    leader.compactor.visit(host.live, host.clock.monotonic_ns())
    assert [(c.start, c.end) for c in leader.resets] == [(0, 3)]


# ------------------------------------------------------------------------------------------------------------ adoption
# A leader that takes whatever bytes another replica has of a lost segment: all of them are of one version.
END = Offset(3)


@pytest.fixture
def of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece."""
    monkeypatch.setattr(segment_catch_up, "PART_BYTES_MAX", 1)


class Peer:
    """A replica that answers, and has the older bytes of [0, 3) at first."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        for key in (b"a", b"b", b"a", b"c"):
            self.keeper.put(key, b"older")
        self.segments = self.keeper.segments
        log = self.keeper.host.live.log
        self.new: Rewritten = rewritten_without(log, END, {0, 1})
        self.older = log.read_segment(START, END, 1 << 20)
        assert Offset(1) not in {v.base for v in self.new.values}
        assert Offset(2) in {v.base for v in self.new.values}, "both versions have a border there"

    def ask(self, at: int) -> None:
        query = SegmentQuery(self.keeper.host.part.pid, 1, START, END, NO_DIGEST, Offset(at))
        self.segments.on_query(PEER_A, query)

    def answer(self, at: int) -> list[bytes]:
        """The piece that begins there."""
        self.ask(at)
        return self.settle()

    def settle(self) -> list[bytes]:
        self.keeper.host.settle()
        part = self.keeper.host.messages(SegmentPart)[-1]
        return [bytes(value) for value in part.values]

    def install(self) -> None:
        """The new version, which it has fetched."""
        host = self.keeper.host
        old = replaced(host.live.log, START, END)
        assert host.live.install(START, END, self.new.digest, self.new.values, old, lambda: None)

    def restart(self) -> None:
        host = self.keeper.host
        host.reopen()
        self.segments = segments_of(host)


@pytest.fixture
def peer(of_one_batch: None) -> Peer:  # it changes what each piece holds
    return Peer()


def values_of(stored: list[StoredValue]) -> list[bytes]:
    return [v.value for v in stored]


def test_pieces_of_one_version_are_sent(peer: Peer) -> None:
    assert [peer.answer(at) for at in range(3)] == [[value] for value in values_of(peer.older)]


def test_no_piece_follows_if_a_segment_was_installed_after_the_one_before(peer: Peer) -> None:
    for at in (0, 1):
        assert peer.answer(at) != []
    peer.install()
    peer.keeper.host.settle()
    assert peer.answer(2) == []
    assert [peer.answer(v.base) for v in peer.new.values] == [[value] for value in values_of(peer.new.values)]


def test_nor_if_it_is_installed_while_the_next_is_read(peer: Peer) -> None:
    for at in (0, 1):
        assert peer.answer(at) != []
    peer.ask(2)
    peer.install()
    assert peer.settle() == []


def test_nor_if_the_replica_has_started_meanwhile(peer: Peer) -> None:
    """It cannot know what the process before it has sent."""
    for at in (0, 1):
        assert peer.answer(at) != []
    peer.install()
    peer.keeper.host.settle()
    peer.restart()
    assert peer.answer(2) == []
    assert peer.answer(0) != []


def queries(leader: Leader) -> Iterator[SegmentQuery]:
    """Each that it sends for an adoption; the next step of time comes after the answer."""
    seen = 0
    while True:
        for query in leader.host.messages(SegmentQuery)[seen:]:
            seen += 1
            assert isinstance(query, SegmentQuery)
            if query.digest == NO_DIGEST:
                yield query
        leader.wait(500)


def test_a_leader_whose_peer_installs_between_two_pieces_begins_again_elsewhere(peer: Peer) -> None:
    leader, found = Leader(), list[list[StoredValue]]()
    leader.segments.adopt(leader.host.live, START, END, found.append)
    asked = list[int]()
    for query in queries(leader):
        asked.append(query.at)
        if asked == [0, 1, 2]:
            peer.install()
            peer.keeper.host.settle()
        peer.segments.on_query(ME, query)
        reply(leader, query, peer.settle())
        leader.host.settle(1)
        if found:
            break
    assert asked == [0, 1, 2, *(v.base for v in peer.new.values)]
    assert [values_of(values) for values in found] == [values_of(peer.new.values)]


def reply(leader: Leader, query: SegmentQuery, values: list[bytes]) -> None:
    (node,) = [node for node, message in leader.host.sent if message is query]
    leader.segments.on_part(node, SegmentPart(query.partition, query.request, [memoryview(v) for v in values]))


def test_a_leader_whose_peers_both_refuse_a_later_piece_tries_again(peer: Peer) -> None:
    leader = Leader()
    lose(leader.host, 0)
    leader.wait(RESET_MS - 5_000)
    asked = list[tuple[int, int]]()
    for query in queries(leader):
        (node,) = [node for node, message in leader.host.sent if message is query]
        asked.append((node, query.at))
        is_refused = query.at == 2 and len(asked) <= 6
        reply(leader, query, [] if is_refused else [peer.older[query.at].value])
        if len(asked) == 9:
            break
    leader.host.settle()
    assert {node for node, _ in asked[:3]} | {node for node, _ in asked[3:6]} == {PEER_A, PEER_B}
    assert [at for _, at in asked] == [0, 1, 2] * 3
    assert [(c.start, c.end) for c in leader.resets] == [(START, END)]


# ------------------------------------------------------------------------------------------------------- late segments
# Segments whose pieces come late, or not while their replica is busy: they are fetched, and are of one version.

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
        return self.host.sent_of(SegmentQuery)

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
    later = segments_of(host)
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


# --------------------------------------------------------------------------------------------------------------- waits
# Many partitions that wait for compaction on one node, and replicas that do not answer.
WAITING = 400  # a recursion into each of them would end the process


class _Waiting(SimpleNamespace):
    """What compaction sees of a replica that lacks the bytes of a segment."""

    def __hash__(self) -> int:  # type: ignore[override]  # the base has none
        return id(self)


def waiting_replicas() -> dict[PartitionId, Replica]:
    part = Leader().host.part
    made = {}
    for number in range(WAITING):
        pid = PartitionId(number.to_bytes(20, "big"))
        log = SimpleNamespace(
            segments=HeldSegments(),
            log_start=Offset(0),
            appended_end=Offset(0),
            is_installing=False,
            holds=lambda _offset: False,
        )
        made[pid] = cast(
            Replica,
            _Waiting(
                pid=pid,
                part=part,
                log=log,
                leading=part.epoch,
                segments_checked=(-1, -1),
                segments_due_ns=0,
                compaction_due_ns=0,
                may_install=lambda _end: True,
            ),
        )
    return made


def counting(host: Host, count: Callable[[], int]) -> tuple[NodeHost, list[int]]:
    """A node, and by how much each call that it delivers changes the count."""
    changes: list[int] = []

    def deliver(fn: Callable[[], None]) -> None:
        def run() -> None:
            before = count()
            fn()
            changes.append(count() - before)

        host.clock.call_soon(run)

    return replace(host.node_host(), deliver=deliver), changes


def test_partitions_that_find_no_link_open_are_given_up_one_at_a_time() -> None:
    host, replicas = Leader().host, waiting_replicas()

    def given_up() -> int:
        return sum(replica.segments_due_ns > 0 for replica in replicas.values())

    node, changes = counting(host, given_up)
    segments = Segments(node, host.look_ups(), replicas.get, lambda _: None)
    for replica in replicas.values():
        segments.visit(replica, host.clock.monotonic_ns())  # the first one asks, the others wait for it
    assert given_up() == 0
    host.network.disconnected = {PEER_A, PEER_B}
    host.settle(3_000)
    assert given_up() == WAITING
    assert max(changes) == 1


def test_passes_that_end_as_they_begin_do_so_one_at_a_time() -> None:
    keeper, replicas = Keeper(), waiting_replicas()
    host = keeper.host
    for value in (b"1", b"2"):
        keeper.put(b"k", value)
    node, changes = counting(host, lambda: compactor.passes)
    compactor = Compactor(node, host.look_ups(), keeper.segments)
    for replica in (host.live, *replicas.values()):
        compactor.visit(replica, host.clock.monotonic_ns())
    assert (compactor.is_at_work, compactor.passes) == (True, 0)
    host.settle(10_000)  # the agreement of the first one has no answer
    keeper.apply_proposed()
    host.settle(10_000)
    assert compactor.passes == WAITING + 1
    assert max(changes) == 1


@pytest.mark.parametrize("is_down", [True, False])
def test_a_pass_does_not_ask_whether_a_node_that_is_down_is_in_step(is_down: bool) -> None:
    """The node's other partitions would wait for each such pass."""
    leader = Leader()
    host, log = leader.host, leader.host.live.log
    agree(host, 3, own_digest(log, Offset(0), Offset(3)), tombstones_ms=1)
    log.note_held(Offset(0), Offset(3), host.part.segments[0].digest)
    host.configure(min_cleanable_dirty_ratio="1", delete_retention_ms="0")
    host.state.expiry_clock_ms = 1_000
    if is_down:
        host.network.disconnected = {PEER_B}
    leader.compactor.visit(host.live, host.clock.monotonic_ns())
    assert leader.compactor.is_at_work
    host.settle(IN_STEP_MS // 2)
    assert leader.compactor.is_at_work is not is_down
    host.settle(IN_STEP_MS)
    assert not leader.compactor.is_at_work
