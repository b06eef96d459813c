"""A leader that takes whatever bytes another replica has of a lost segment: all of them are of one version."""

from collections.abc import Iterator

import pytest

from smq.raft_state.ids import Offset
from smq.replication.log.compaction.segment_writer import Rewritten
from smq.replication.log.segments import NO_DIGEST, replaced
from smq.replication.log.stored_batch import StoredValue
from smq.replication.net.wire import SegmentPart, SegmentQuery
from smq.replication.partition.compaction import segment_catch_up
from smq.replication.partition.compaction.segment_catch_up import Segments
from tests.unit.replication.partition.compaction.test_damaged_segments import lose
from tests.unit.replication.partition.compaction.test_installing import rewritten_without
from tests.unit.replication.partition.compaction.test_passes import RESET_MS, Keeper, Leader
from tests.unit.replication.support import ME, PEER_A, PEER_B

START, END = Offset(0), Offset(3)


@pytest.fixture(autouse=True)
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
        assert isinstance(part, SegmentPart)
        return [bytes(value) for value in part.values]

    def install(self) -> None:
        """The new version, which it has fetched."""
        host = self.keeper.host
        old = replaced(host.live.log, START, END)
        assert host.live.install(START, END, self.new.digest, self.new.values, old, lambda: None)

    def restart(self) -> None:
        host = self.keeper.host
        host.reopen()
        replicas = {host.live.pid: host.live}
        self.segments = Segments(host.node_host(), host.look_ups(), replicas.get, lambda _: None)


@pytest.fixture
def peer() -> Peer:
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
