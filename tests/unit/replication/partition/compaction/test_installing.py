"""A pass of compaction beside a segment that is fetched or installed: what is agreed is what the log then has."""

import pytest

from smq.raft_state.commands import CompactSegment
from smq.raft_state.ids import Offset
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction import cleaner as cleaning
from smq.replication.log.compaction.cleaner import Cleaner
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.segments import own_digest, replaced
from smq.replication.net.wire import SegmentPart, SegmentQuery
from tests.unit.replication.partition.compaction.test_passes import RESET_MS, Keeper, Leader, agree
from tests.unit.replication.partition.compaction.test_waits import waiting_replicas
from tests.unit.replication.partition.test_full_disk import fill, free
from tests.unit.replication.support import PEER_A, PEER_B, Host

SLOW_MS = 2_000
START = Offset(0)


def rewritten_without(log: PartitionLog, end: int, gone: set[int]) -> Rewritten:
    """The bytes of [0, end) without these offsets, as another leader may have agreed on them."""
    writer = SegmentWriter(log.pid, START)
    for stored in log.read_segment(START, Offset(end), 1 << 20):
        writer.add(stored, lambda records: [offset not in gone for offset, _, _ in records])
    return writer.finish()


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


def begins(keeper: Keeper | Leader) -> bool:
    """Whether a pass is under way after a look."""
    keeper.host.live.compaction_due_ns = 0
    keeper.compactor.visit(keeper.host.live, keeper.host.clock.monotonic_ns())
    return keeper.compactor.is_at_work


def is_as_agreed(host: Host) -> bool:
    """Whether the first segment's bytes are those of its digest, and the log says so."""
    segment, end = host.part.segments[0], host.part.segment_end(0)
    is_held = host.live.log.segments.holds(segment.start, end, segment.digest)
    return is_held and own_digest(host.live.log, segment.start, end) == segment.digest


@pytest.fixture
def keeper() -> Keeper:
    """With a deleted key, whose tombstone stays for a while."""
    made = Keeper()
    made.configure(delete_retention_ms="20000")
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
    assert not begins(keeper)
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
    assert begins(keeper)
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


def fetching(leader: Leader) -> SegmentQuery:
    """A replica has just been asked for the lost segment."""
    host = leader.host
    asked = len(host.messages(SegmentQuery))
    while len(host.messages(SegmentQuery)) == asked:
        leader.segments.visit(host.live, host.clock.monotonic_ns())
        host.settle(10)
    query = host.messages(SegmentQuery)[-1]
    assert isinstance(query, SegmentQuery)
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
        leader.segments.visit(host.live, host.clock.monotonic_ns())
        host.settle(250)
    query = fetching(leader)
    assert not begins(leader), "there is nothing to do yet"
    answer(leader, query, new)
    leader.wait(5_000)
    assert leader.resets == []
    assert is_as_agreed(host)


def test_nothing_is_installed_beside_a_pass(leader: Leader) -> None:
    """Its own bytes are."""
    host = leader.host
    new = rewritten_without(host.live.log, 3, {0})
    query = fetching(leader)
    leader.segments.exclude(host.live.pid)
    answer(leader, query, new)
    host.settle(5_000)
    assert not is_as_agreed(host)
    leader.segments.include(host.live.pid)
    answer(leader, fetching(leader), new)
    host.settle(5_000)
    assert is_as_agreed(host)


@pytest.mark.parametrize("fails_late", [False, True])
def test_a_segment_is_given_up_only_if_replicas_were_asked_again(*, fails_late: bool) -> None:
    """They could not be asked for a moment, and then other partitions' segments came first."""
    leader = Leader()
    host = leader.host
    host.network.disconnected = {PEER_A, PEER_B}
    leader.segments.visit(host.live, host.clock.monotonic_ns())
    host.settle(500)
    if fails_late:
        host.settle(RESET_MS - 10_000)
        leader.segments.visit(host.live, host.clock.monotonic_ns())
        host.settle(500)
    host.network.disconnected = set()
    host.settle(10_000 if fails_late else RESET_MS)
    assert not begins(leader)
    assert leader.resets == []
    leader.wait(10_000)
    assert [(c.start, c.end) for c in leader.resets[:1]] == [(0, 3)]


def test_a_replica_that_had_the_segment_since_then_counts(leader: Leader) -> None:
    """It could not be installed, as the disk was full. The peers are gone for a moment only."""
    host = leader.host
    new = rewritten_without(host.live.log, 3, {0})
    host.settle(10_000)
    fill(host)
    answer(leader, fetching(leader), new)
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
        leader.segments.visit(host.live, host.clock.monotonic_ns())
        host.settle(250)
    fetching(leader)
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
