"""Damage in a log whose batches compaction has joined: what is left of it counts, and the others learn what it cost."""

import pytest

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.ids import Offset
from smq.raft_state.state import Segment
from smq.replication.log import partition_log
from smq.replication.log.compaction.segment_writer import SegmentWriter
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.segments import NO_DIGEST, digest_of, own_digest, replaced
from smq.replication.log.stored_batch import TIME_APPEND, BatchDamaged, base_of_key, batch_key, parse_value, times_range
from smq.replication.net.wire import FetchBatch, FoundBatch, Producers, SegmentPart, SegmentQuery
from smq.replication.partition.compaction.segment_catch_up import PAUSE_NS, lowest_behind
from smq.replication.partition.repair import Outcome
from smq.replication.partition.replicas import known_damage
from smq.replication.ports import Put, Table
from tests.unit.replication.partition.compaction.support import agree, segments_of
from tests.unit.replication.partition.test_intake import fill, free
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register
from tests.unit.replication.test_rules import append, follower, stored

FIRST = stored(batch(b"v"), 0, 1, ts_ns=10)
JOINED = range(3, 8)  # the records that compaction removes: a checkpoint lies inside the batch that is left


def lose(host: Host, number: int) -> None:
    """The batch of this number, and its index row."""
    log = host.live.log
    key, row = host.disk.scan(Table.TIMES, *times_range(log.pid, TIME_APPEND))[number]
    at = batch_key(log.pid, number)
    ((_, value),) = host.disk.scan(Table.BATCHES, at, batch_key(log.pid, number + 1))
    host.disk.submit([Put(Table.TIMES, key, row[:-1] + b"\x77"), Put(Table.BATCHES, at, value[:-1] + b"\x77")])
    host.settle()


def compact(host: Host) -> None:
    """The first eight batches become one segment."""
    log = host.live.log
    writer = SegmentWriter(log.pid, Offset(12))
    for value in log.read_segment(Offset(0), Offset(8), 1 << 20):
        writer.add(value, lambda records: [offset not in JOINED for offset, *_ in records])
    new = writer.finish().values
    assert log.install(Offset(0), Offset(8), digest_of(new), new, replaced(log, Offset(0), Offset(8)), lambda: None)
    host.settle()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A follower with twelve batches of a record each, the first eight compacted, and the first of all lost."""
    host = follower()
    values = [stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(12)]
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 3)
    append(host, *values[:4])
    host.settle()
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 10**6)
    append(host, *values[4:])
    host.settle()
    host.advance(10)
    compact(host)
    lose(host, 0)
    return host


def covered(log: PartitionLog) -> list[tuple[int, int]]:
    return [(run.start, run.end) for run in log.runs]


def test_a_log_that_grows_by_a_segment_keeps_what_it_acknowledges(host: Host) -> None:
    log = host.live.log
    more = [stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(8, 16)]
    values = [parse_value(log.pid, value) for value in more]
    old = replaced(log, Offset(8), Offset(16))
    assert host.live.install(Offset(8), Offset(16), digest_of(values), values, old, lambda: None)
    host.settle()
    assert host.live.durable_verified_end == 16
    assert covered(log) == [(0, 16)]
    host.advance(16)
    host.elect(PEER_B, end=16)
    host.settle()
    assert (log.appended_end, host.live.durable_verified_end) == (16, 16)


def test_a_log_that_is_cut_keeps_what_is_valid(host: Host) -> None:
    host.elect(PEER_B, end=10)
    host.settle()
    assert (host.live.log.appended_end, host.live.durable_verified_end) == (10, 10)
    assert covered(host.live.log) == [(0, 10)]


def test_a_cut_that_meets_damage_leaves_the_disk_alone_until_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 23: this replica has acknowledged what it no longer has, and the next process must know that, too."""
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 12)
    host = follower()
    append(host, *[stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(12)])
    host.settle()
    host.advance(10)
    lose(host, 4)
    host.live.log._forget_tail_before(Offset(12))  # as if it were older than what memory keeps
    host.elect(PEER_B, end=10)
    host.settle()
    for incarnation in (INCARNATION + 1, INCARNATION + 2):
        assert (host.live.log.appended_end, host.live.is_end_hidden) == (4, True)
        assert host.live.seal(host.part.epoch) is None
        host.reopen(incarnation)
    host.apply(register(ME, incarnation=INCARNATION + 2))
    host.mark_incomplete()
    assert not host.live.is_end_hidden
    again = [stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(4, 10)]
    append(host, *again, epoch=host.part.epoch, peer=PEER_B)
    host.settle()
    assert (host.live.log.appended_end, host.live.log.tail_damage) == (10, None)
    host.reopen(INCARNATION + 3)
    assert (host.live.log.appended_end, host.live.is_end_hidden) == (10, False)


def agree_on_first(host: Host) -> None:
    part = host.part
    part.segments = [Segment(start=Offset(0), digest=host.live.log.segments.digest_at(Offset(0)))]
    part.compacted_end, part.compactions = Offset(8), 1


def test_a_cut_that_meets_damage_in_a_segment_fetches_it_again() -> None:
    host = follower()
    append(host, *WHOLE)
    host.settle()
    host.advance(10)
    compact(host)
    agree_on_first(host)
    lose(host, 1)
    host.elect(PEER_B, end=10)
    host.settle()
    assert (host.live.log.appended_end, host.live.is_end_hidden) == (1, True)
    host.mark_incomplete()
    assert not host.live.is_end_hidden
    assert lowest_behind(host.live) is not None


@pytest.fixture
def agreed(host: Host) -> Host:
    """The state has the segment."""
    agree_on_first(host)
    return host


@pytest.fixture
def trimmed(agreed: Host) -> Host:
    """Its log start has passed the lost batch: all of the segment stays."""
    agreed.move_log_start(1)
    agreed.settle()
    return agreed


@pytest.mark.parametrize("is_doubted_first", [True, False])
def test_a_batch_of_before_the_compaction_repairs_no_doubted_segment(agreed: Host, is_doubted_first: bool) -> None:
    """As the other has not installed the segment either, its digest is also none, and (epoch, offset) is the same."""
    log = agreed.live.log
    outcomes: list[Outcome] = []
    if is_doubted_first:
        log.segments.doubt(Offset(0))
    agreed.repairs.request(agreed.live, BatchDamaged(log.pid, Offset(2), "rotten"), outcomes.append)
    agreed.settle(10)
    log.segments.doubt(Offset(0))
    for peer in (PEER_A, PEER_B):
        fetch = agreed.messages(FetchBatch)[-1]
        agreed.repairs.on_found(peer, FoundBatch(log.pid, fetch.request, False, stored(batch(b"v"), 2, 1, ts_ns=20)))
    agreed.settle()
    assert outcomes == [Outcome.UNKNOWN]
    (joined,) = log.read_segment(Offset(2), Offset(8), 1 << 20)
    assert (joined.base, joined.end) == (2, 8)


def test_a_batch_that_comes_back_while_a_segment_is_installed_is_not_damaged_everywhere(agreed: Host) -> None:
    """The log takes no batch meanwhile. The reader tries again."""
    log = agreed.live.log
    outcomes: list[Outcome] = []
    agreed.repairs.request(agreed.live, BatchDamaged(log.pid, Offset(10), "rotten"), outcomes.append)
    agreed.settle(10)
    segment = [parse_value(log.pid, FIRST), *log.read_segment(Offset(1), Offset(8), 1 << 20)]
    old = replaced(log, Offset(0), Offset(8))
    assert log.install(Offset(0), Offset(8), digest_of(segment), segment, old, lambda: None)
    for peer in (PEER_A, PEER_B):
        fetch = agreed.messages(FetchBatch)[-1]
        assert log.is_installing
        agreed.repairs.on_found(peer, FoundBatch(log.pid, fetch.request, False, stored(batch(b"v"), 10, 1, ts_ns=60)))
    agreed.settle()
    assert outcomes == [Outcome.UNKNOWN]


def fetch_segment(host: Host) -> None:
    """As the leader sends it."""
    segments = segments_of(host)
    segments.visit(host.live, host.clock.monotonic_ns())
    host.settle()
    query = host.messages(SegmentQuery)[-1]
    values = [FIRST, *(v.value for v in host.live.log.read_segment(Offset(1), Offset(8), 1 << 20))]
    segments.on_part(PEER_A, SegmentPart(query.partition, query.request, [memoryview(value) for value in values]))
    host.settle()


def test_a_batch_below_the_log_start_comes_back_with_its_segment(trimmed: Host) -> None:
    log = trimmed.live.log
    outcomes: list[Outcome] = []
    for _ in range(2):
        trimmed.repairs.request(trimmed.live, BatchDamaged(log.pid, Offset(0), "rotten"), outcomes.append)
        trimmed.settle()
    assert outcomes == [Outcome.UNKNOWN] * 2
    assert trimmed.messages(FetchBatch) == [], "another batch would come, and repair nothing"
    fetch_segment(trimmed)
    assert log.segments.digest_at(Offset(0)) == trimmed.part.segments[0].digest
    assert [v.value for v in log.read_segment(Offset(0), Offset(1), 1)] == [FIRST]


def test_a_follower_without_space_installs_no_segment_and_asks_again_once_it_has_some(trimmed: Host) -> None:
    log = trimmed.live.log
    log.segments.doubt(Offset(0))
    fill(trimmed)
    fetch_segment(trimmed)
    assert log.segments.digest_at(Offset(0)) == NO_DIGEST
    with pytest.raises(BatchDamaged):
        log.read_segment(Offset(0), Offset(1), 1)
    assert (log.appended_end, trimmed.live.durable_verified_end) == (12, 12)
    free(trimmed)
    trimmed.settle(PAUSE_NS // 1_000_000)
    fetch_segment(trimmed)
    assert log.segments.digest_at(Offset(0)) == trimmed.part.segments[0].digest
    assert [v.value for v in log.read_segment(Offset(0), Offset(1), 1)] == [FIRST]


def test_what_is_aborted_is_known_again_once_its_segment_is_back(trimmed: Host) -> None:
    log = trimmed.live.log
    log.aborted_damage = BatchDamaged(log.pid, Offset(0), "what the log aborts there is not known")
    log.load_aborted()
    damage = known_damage(trimmed.live)
    assert damage is not None
    trimmed.repairs.request(trimmed.live, damage, lambda _outcome: None)
    fetch_segment(trimmed)
    assert known_damage(trimmed.live) is None


WHOLE = [stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(12)]


@pytest.fixture
def shortened() -> Host:
    """A follower whose log ends before damage, as the others know, and whose state has one segment of all of it."""
    host = follower()
    append(host, *WHOLE)
    host.settle()
    host.advance(12)
    lose(host, 4)
    host.reopen(INCARNATION + 1)
    log = host.live.log
    assert (log.appended_end, log.tail_damage is None) == (4, False)
    host.apply(register(ME, incarnation=INCARNATION + 1))
    host.mark_incomplete()
    host.part.segments = [Segment(start=Offset(0), digest=digest_of([parse_value(log.pid, value) for value in WHOLE]))]
    host.part.compacted_end, host.part.compactions = Offset(12), 1
    return host


def answer_query(host: Host, values: list[bytes]) -> None:
    """All replicas that are asked for the segment answer with this."""
    segments = segments_of(host)
    segments.visit(host.live, host.clock.monotonic_ns())
    host.settle(10)
    for peer in (PEER_A, PEER_B):
        query = host.messages(SegmentQuery)[-1]
        segments.on_part(peer, SegmentPart(query.partition, query.request, [memoryview(value) for value in values]))
        host.settle(10)
    host.settle()


def test_a_log_that_ends_before_damage_grows_by_the_segments_of_the_state(shortened: Host) -> None:
    """Its leader sends no appends below them, and damage at a log's end goes with the next append."""
    answer_query(shortened, WHOLE)
    log = shortened.live.log
    assert (log.appended_end, log.tail_damage, lowest_behind(shortened.live)) == (12, None, None)
    assert [v.value for v in log.read_segment(Offset(0), Offset(12), 1 << 20)] == WHOLE


def test_a_log_emptied_below_damage_keeps_a_whole_segment_that_contains_its_start(shortened: Host) -> None:
    """keep_from was never called: a replica does not while there is damage at the end of its log."""
    shortened.move_log_start(6)
    live, log = shortened.live, shortened.live.log
    assert (log.log_start, log.appended_end, log.tail_damage) == (6, 6, None)
    live.on_producers(PEER_A, Producers(log.pid, shortened.part.epoch, 1, Offset(6), 0, 1, b""))
    shortened.settle()
    answer_query(shortened, WHOLE)
    assert (log.appended_end, lowest_behind(live)) == (12, None)
    assert [v.value for v in log.read_segment(Offset(0), Offset(12), 1 << 20)] == WHOLE
    append(shortened, stored(batch(b"v"), 12, 1, ts_ns=70))
    shortened.settle()
    shortened.advance(13)
    shortened.apply(AdvanceLogStart(partition=log.pid, offset=Offset(12)))
    shortened.settle()
    left = shortened.disk.scan_keys(Table.TIMES, *times_range(log.pid, TIME_APPEND))
    assert (log.log_start, list(map(base_of_key, left))) == (12, [12]), "and then it goes as a whole"


OTHER = [stored(batch(b"w"), n, 1, ts_ns=10 + 5 * n) for n in range(12)]


@pytest.mark.parametrize(
    ("answer", "is_full"),
    [([], False), (OTHER, False), (WHOLE, True)],
    ids=["no replica has it", "another digest", "no space"],
)
def test_what_is_behind_damage_stays_until_a_segment_takes_its_place(
    shortened: Host, answer: list[bytes], is_full: bool
) -> None:
    """It may be the only copy."""
    if is_full:
        fill(shortened)
    answer_query(shortened, answer)
    log = shortened.live.log
    assert (log.appended_end, log.tail_damage is None) == (4, False)
    rows = shortened.disk.scan(Table.BATCHES, batch_key(log.pid, 5), batch_key(log.pid, 12))
    assert [value for _, value in rows] == WHOLE[5:]


# --------------------------------------------------------------------------------------------------------- older bytes
# A log that has not installed an agreed segment keeps its older bytes of it in whole: they may be the last ones.
LOST = b"d" * 16  # digest of other bytes of [0, 6), which no replica holds


def grown() -> Host:
    """A follower with four batches of two records each, all of them committed."""
    host = follower()
    append(host, *[stored(batch(b"v", 2), base, 1, ts_ns=10 + base) for base in range(0, 8, 2)])
    host.settle()
    host.advance(8)
    return host


def move(host: Host, log_start: int) -> None:
    host.move_log_start(log_start)
    host.settle()


def holds_whole(host: Host) -> bool:
    """Whether it has whole bytes of [0, 6), as a leader needs them to give the agreed ones up."""
    host.settle()
    return own_digest(host.live.log, Offset(0), Offset(6)) != NO_DIGEST


def test_a_restart_deletes_nothing_of_a_segment_that_the_log_never_had() -> None:
    """The row of the segments has none of them."""
    host = grown()
    agree(host, 6, LOST)
    move(host, 4)
    assert holds_whole(host)
    host.reopen()
    assert holds_whole(host)
    move(host, 6)
    assert not holds_whole(host), "and then it goes as a whole"


def test_a_log_opened_before_its_state_deletes_nothing() -> None:
    """The node's Raft log is behind its log: the state is that of before the segment, when the log started inside a
    batch."""
    host = grown()
    move(host, 1)
    agree(host, 6, LOST)
    move(host, 4)
    part = host.part
    newer = part.log_start, part.segments, part.compacted_end, part.compactions
    part.log_start, part.segments, part.compacted_end, part.compactions = Offset(1), [], Offset(0), 0
    host.reopen()
    assert holds_whole(host)
    part.log_start, part.segments, part.compacted_end, part.compactions = newer
    host.live.on_applied()
    assert holds_whole(host)


def test_a_restart_goes_on_with_a_deletion_once_the_state_has_the_log_start() -> None:
    host = grown()
    host.live.log.keep_from(Offset(0))  # the process dies before it deletes anything
    host.live.log.advance_log_start(Offset(4))
    host.settle()
    host.reopen()
    assert holds_whole(host)
    move(host, 4)
    assert not holds_whole(host)
    assert host.live.log.size_bytes > 0
