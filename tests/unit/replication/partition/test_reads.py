"""Fetches serve what is committed and right, wait for more or for the medium, and say "out of range" only once the
leader has said where the log ends."""

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest

from smq.raft_state.commands import DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset, TsNs
from smq.records import NewRecord, encode_batch
from smq.replication.api import Cancel, Fetched, TimeKind, TimeOffset
from smq.replication.commands.coalescing import Barriers
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import ENVELOPE_BYTES, BatchDamaged, StoredValue
from smq.replication.net import wire
from smq.replication.partition.exact_ends import ATTEMPT_MS, RETRY_MS, ExactEnds
from smq.replication.partition.reads import END_MS_MAX, READ_MS_MAX, REPAIRS_PER_POLL_MAX, Poll, Reads
from smq.replication.partition.repair import Outcome
from smq.replication.partition.replica import Replica
from smq.replication.ports import Table
from tests.unit.replication.support import ME, PEER_A, PEER_B, Host, batch

STORED_BYTES = ENVELOPE_BYTES + len(batch())


class HeldBarriers:
    """Read points that pass when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[LogIndex | SmqError], None]] = []
        self.timeouts: list[int] = []

    def wait(self, timeout_ms: int, done: Callable[[LogIndex | SmqError], None]) -> Cancel:
        self.timeouts.append(timeout_ms)
        self.waiting.append(done)
        return lambda: self.waiting.remove(done) if done in self.waiting else None

    def release(self, result: LogIndex | SmqError) -> None:
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done(result)


class Reader:
    def __init__(self) -> None:
        self.host = Host()
        self.host.create_partition()
        self.barriers = HeldBarriers()
        barriers = cast(Barriers, self.barriers)  # the part that ExactEnds uses
        self.ends = ExactEnds(self.host.node_host(), barriers, lambda _pid: self.host.replica)
        self.reads = Reads(self.host.node_host(), self.ends, self.host.repairs)
        self.results: list[Fetched | SmqError] = []

    def commit(self, *batches: bytes) -> None:
        for data in batches:
            self.host.produce(data)
        self.host.commit()
        self.reads.wake(self.host.live)
        self.host.settle(1)

    def fetch(self, offset: int, *, max_bytes: int = 1 << 20, max_wait_ms: int = 0) -> Poll:
        deadline_ns = self.host.clock.monotonic_ns() + max_wait_ms * 1_000_000
        poll = Poll(self.host.live, Offset(offset), max_bytes, deadline_ns, self.results.append)
        self.reads.fetch(poll)
        self.host.settle(1)
        return poll

    @property
    def questions(self) -> list[tuple[NodeId, wire.EndsQuery]]:
        """To other nodes."""
        return self.host.sent_of(wire.EndsQuery)

    def report(self, log_start: int, hwm: int, log_end: int) -> None:
        """The leader answers the last question."""
        peer, asked = self.questions[-1]
        numbers = Epoch(1), Offset(log_start), Offset(hwm), Offset(hwm), Offset(log_end)
        end = wire.End(self.host.part.pid, wire.EndOutcome.KNOWN, *numbers)
        self.ends.on_report(peer, wire.EndsReport(asked.request, asked.incarnation, (end,)))
        self.host.settle(1)

    @property
    def bases(self) -> list[int]:
        (result,) = self.results
        assert isinstance(result, Fetched), result
        return [b.base_offset for b in result.batches]

    @property
    def error(self) -> SmqError:
        (result,) = self.results
        assert isinstance(result, SmqError), result
        return result


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.mark.parametrize(
    ("counts", "offset", "max_bytes", "bases"),
    [
        ((5, 3), 3, 1 << 20, [0, 5]),  # the batch that holds the offset comes whole
        ((1, 1), 0, 1, [0]),  # the first batch always comes
        ((1, 1), 0, 2 * STORED_BYTES - 1, [0]),
        ((1, 1), 0, 2 * STORED_BYTES, [0, 1]),
    ],
)
def test_a_fetch_serves_committed_batches_from_the_offset_on_up_to_its_bytes(
    reader: Reader, counts: tuple[int, ...], offset: int, max_bytes: int, bases: list[int]
) -> None:
    reader.commit(*(batch(count=count) for count in counts))
    reader.host.produce(batch())
    reader.host.settle()
    reader.fetch(offset, max_bytes=max_bytes)
    assert reader.bases == bases


def test_at_the_mark_a_fetch_waits_and_is_woken_by_the_next_commit(reader: Reader) -> None:
    reader.commit(batch())
    reader.fetch(1, max_wait_ms=60_000)
    assert reader.results == []
    reader.commit(batch())
    assert reader.bases == [1]


def test_at_the_mark_a_fetch_is_empty_after_its_wait(reader: Reader) -> None:
    reader.commit(batch())
    reader.fetch(1, max_wait_ms=100)
    reader.host.settle(300)
    assert reader.bases == []


def test_a_cancelled_poll_is_never_answered(reader: Reader) -> None:
    poll = reader.fetch(0, max_wait_ms=60_000)
    reader.reads.cancel(poll)
    reader.commit(batch())
    assert reader.results == []


@pytest.mark.parametrize("offset", [-1, 3, 99])
def test_rule_13_out_of_range_is_said_only_after_a_barrier_and_names_the_range(reader: Reader, offset: int) -> None:
    reader.commit(batch(count=5))
    reader.host.move_log_start(4)
    reader.fetch(offset)
    assert reader.results == []
    reader.barriers.release(LogIndex(9))
    reader.host.settle(1)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert (reader.error.details.lo, reader.error.details.hi) == (4, 5)


def test_rule_13_a_follower_that_lags_asks_the_leader_and_waits_for_what_is_there(reader: Reader) -> None:
    reader.commit(batch(count=5))
    reader.host.elect(PEER_A)
    reader.fetch(7, max_wait_ms=60_000)
    ((leader, asked),) = reader.questions
    assert (leader, asked.partitions) == (PEER_A, (reader.host.part.pid,))
    reader.report(0, hwm=9, log_end=9)
    assert reader.results == [], "the record is there, and not here yet"
    reader.host.elect(ME)
    reader.commit(batch(count=5))
    assert reader.bases == [5]


def test_rule_13_a_follower_says_out_of_range_with_the_range_that_the_leader_reports(reader: Reader) -> None:
    reader.commit(batch(count=5))
    reader.host.elect(PEER_A)
    reader.fetch(12, max_wait_ms=60_000)
    reader.report(2, hwm=9, log_end=11)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert (reader.error.details.lo, reader.error.details.hi) == (2, 9)


@pytest.mark.parametrize("leader", [ME, PEER_A])
def test_rule_13_nothing_is_out_of_range_while_the_end_is_not_known(reader: Reader, leader: NodeId) -> None:
    reader.host.elect(leader)
    reader.fetch(7)
    reader.barriers.release(SmqError(ErrorCode.NO_QUORUM, "no Raft leader is known"))
    reader.host.settle(END_MS_MAX - 1_000)
    assert reader.results == []
    reader.host.settle(2_000)
    assert reader.error.code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert reader.error.code.is_retriable


def test_the_leader_is_not_asked_again_for_a_fetch_that_has_been_cancelled(reader: Reader) -> None:
    reader.host.elect(PEER_A)
    poll = reader.fetch(7, max_wait_ms=60_000)
    reader.reads.cancel(poll)
    reader.host.settle(ATTEMPT_MS + 20)
    reader.host.settle(RETRY_MS + 20)
    assert (len(reader.questions), reader.results) == (1, [])


def test_a_log_start_that_passes_a_parked_fetch_is_reported(reader: Reader) -> None:
    reader.commit(batch(count=5))
    reader.host.elect(PEER_A)
    reader.fetch(5, max_wait_ms=60_000)
    reader.host.advance(8)
    reader.host.move_log_start(8)
    reader.reads.wake(reader.host.live)
    reader.host.settle(1)
    reader.reads.wake(reader.host.live)
    reader.host.settle(1)
    assert len(reader.questions) == 1, "one poll asks once"
    reader.report(8, hwm=8, log_end=8)
    assert reader.error.details.lo == 8


@pytest.mark.parametrize("offset", [0, 7], ids=["waits for records", "waits for a read index"])
def test_deleting_the_topic_ends_its_polls(reader: Reader, offset: int) -> None:
    reader.fetch(offset, max_wait_ms=60_000)
    reader.reads.fail_all(reader.host.part.pid, SmqError(ErrorCode.UNKNOWN_TOPIC, "gone"))
    reader.host.settle(1)
    assert reader.error.code is ErrorCode.UNKNOWN_TOPIC


def test_a_look_up_by_create_time_is_exact_to_the_record(reader: Reader) -> None:
    records = [NewRecord(None, b"v", ms) for ms in (10, 30, 20, 40)]
    reader.commit(encode_batch(records[:2]), encode_batch(records[2:]))
    offsets = [reader.host.offset_at(TimeKind.TIMESTAMP_MS, ms) for ms in (0, 10, 11, 30, 31, 40, 41)]
    assert offsets == [0, 0, 1, 1, 3, 3, 4]
    assert reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0) == 3


@pytest.mark.parametrize(
    ("created_ms", "newest"),
    [
        ([(30, 10), (20,), (15,)], 2),
        ([(30, 10, 25), (20,)], 2),
        ([(30, 10), (20,), (30,)], 3),
        ([(30, 10), (5,)], 1),
        ([(30, 10)], 1),
        ([(30,), (20,)], 1),
    ],
)
def test_the_largest_create_time_is_that_of_a_record_that_is_left(
    reader: Reader, created_ms: list[tuple[int, ...]], newest: int
) -> None:
    """The first batch has a newer record than all others, or as new a one, but log_start is after it."""
    reader.commit(*(encode_batch([NewRecord(None, b"v", ms) for ms in batch]) for batch in created_ms))
    reader.host.move_log_start(1)
    assert reader.host.live.log.log_start == 1
    assert reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0) == newest


def test_a_look_up_by_append_time_finds_the_first_record_at_or_after_it(reader: Reader) -> None:
    reader.commit(batch(count=2), batch(count=3))
    first, second = reader.host.live.log.read(Offset(0), Offset(5), 1 << 20)
    times = (0, first.ts_ns, first.ts_ns + 1, first.ts_ns + 2, second.ts_ns, second.ts_ns + 1, second.ts_ns + 2)
    assert [reader.host.offset_at(TimeKind.TS_NS, ts) for ts in times] == [0, 0, 1, 2, 2, 3, 4]
    found = reader.host.find_time(TimeKind.TS_NS, second.ts_ns + 1)
    assert isinstance(found, TimeOffset)
    assert found.ts_ns == second.ts_ns + 1
    assert reader.host.find_time(TimeKind.TS_NS, second.ts_ns + 3) == TimeOffset(Offset(5), TsNs(-1), -1)


def test_append_times_increase_from_record_to_record_although_the_clock_is_behind(reader: Reader) -> None:
    reader.commit(batch(count=1_000), batch(count=2_000), batch())
    times = [(v.ts_ns, v.end - v.base) for v in reader.host.live.log.read(Offset(0), Offset(3_001), 1 << 20)]
    assert all(after == before + count for (before, count), (after, _) in pairwise(times))


def test_a_look_up_by_time_sees_nothing_beyond_the_mark(reader: Reader) -> None:
    reader.commit(batch())
    reader.host.produce(batch())
    reader.host.settle()
    first, second = reader.host.live.log.read(Offset(0), Offset(2), 1 << 20)
    assert reader.host.find_time(TimeKind.TS_NS, second.ts_ns) == TimeOffset(Offset(1), TsNs(-1), -1)
    assert first.ts_ns < second.ts_ns


def test_an_unforeseen_error_reaches_the_reader_and_not_the_node(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    reader.commit(batch())
    monkeypatch.setattr(type(reader.host.live.log), "read_memory", surprise)
    reader.fetch(0)
    assert reader.error.code is ErrorCode.INTERNAL


def cannot_be_read(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of the log finds its first batch damaged."""

    def read(*_: object, **__: object) -> list[StoredValue]:
        raise BatchDamaged(reader.host.part.pid, Offset(0), "it is missing")

    monkeypatch.setattr(reader.host.live.log, "read_memory", read)


class HeldRepairs:
    """What was asked for. The test says what becomes of it."""

    def __init__(self, reader: Reader) -> None:
        self.waiting: list[Callable[[Outcome], None]] = []
        reader.reads = Reads(reader.host.node_host(), reader.ends, self)  # type: ignore[arg-type]  # what Reads uses

    def request(self, _replica: Replica, _damage: BatchDamaged, done: Callable[[Outcome], None]) -> None:
        self.waiting.append(done)


def test_a_batch_deleted_during_its_repair_is_out_of_range(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.commit(batch(), batch(), batch())
    repairs = HeldRepairs(reader)
    cannot_be_read(reader, monkeypatch)
    reader.fetch(0)
    reader.host.move_log_start(2)
    repairs.waiting.pop()(Outcome.DELETED)
    reader.host.settle(1)
    reader.barriers.release(LogIndex(9))
    reader.host.settle(1)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_batch_that_is_missing_after_repairs_is_reported_as_damaged_and_not_sought_for_ever(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.commit(batch())
    repairs, asked = HeldRepairs(reader), 0
    cannot_be_read(reader, monkeypatch)
    reader.fetch(0)
    while repairs.waiting:
        asked += 1
        repairs.waiting.pop()(Outcome.REPAIRED)  # as far as it knows
        reader.host.settle(1)
    assert reader.error.code is ErrorCode.DATA_DAMAGED
    assert "empty it" in str(reader.error)
    assert asked == REPAIRS_PER_POLL_MAX + 1


def test_a_waiting_fetch_that_is_woken_repeatedly_waits_for_one_repair(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake-up counted as a repair, and a fetch that counts too many says that repairs have no effect."""
    repairs = HeldRepairs(reader)
    reader.fetch(0, max_wait_ms=60_000)
    with monkeypatch.context() as rotten:
        cannot_be_read(reader, rotten)
        for _ in range(REPAIRS_PER_POLL_MAX + 2):
            reader.commit(batch())
        assert len(repairs.waiting) == 1
    repairs.waiting[0](Outcome.REPAIRED)
    reader.host.settle(1)
    assert reader.bases == list(range(REPAIRS_PER_POLL_MAX + 2))


# ------------------------------------------------------- answers that were right when they were given, and come late
def test_a_reader_that_was_in_range_once_gets_out_of_range_only_after_an_answer_of_its_own(reader: Reader) -> None:
    reader.host.elect(PEER_A)
    reader.host.advance(2, next_offset=10)
    reader.fetch(7, max_wait_ms=1_000)
    assert reader.questions == []
    reader.host.elect(PEER_B, end=2)  # the log end falls to the mark; this node may not know the newest yet
    reader.host.settle(1_500)
    assert reader.results == []
    reader.report(0, hwm=8, log_end=8)
    assert reader.bases == []


def test_what_the_leader_has_said_to_one_fetch_says_nothing_to_the_next(reader: Reader) -> None:
    reader.host.elect(PEER_A)
    reader.fetch(7, max_wait_ms=1_000)
    reader.report(0, hwm=2, log_end=10)  # in range after all: the poll waits
    reader.host.elect(PEER_B, end=2)
    reader.host.settle(1_500)
    assert reader.bases == []
    reader.results.clear()
    reader.fetch(7, max_wait_ms=1_000)
    assert reader.results == []
    reader.report(0, hwm=2, log_end=2)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_topic_deleted_while_a_reader_waits_for_confirmation_is_unknown_and_not_out_of_range(reader: Reader) -> None:
    reader.host.elect(PEER_A)
    reader.fetch(7, max_wait_ms=1_000)
    reader.host.replica = None  # as the node forgets it
    reader.host.apply(DeleteTopic(name="t"))
    reader.host.settle(ATTEMPT_MS + RETRY_MS + 20)  # the former leader does not answer: this node asks itself
    reader.host.settle(RETRY_MS + 20)
    reader.barriers.release(LogIndex(1))
    reader.host.settle(1)
    assert reader.error.code is ErrorCode.UNKNOWN_TOPIC


# ---------------------------------------------------------------------------------------------------------- slow reads
# Reads that wait for the medium: nothing else waits for them, and no reader waits for ever.
LONG_MS = 4 * READ_MS_MAX


def cold(host: Host) -> None:
    """Durable batches leave memory."""
    host.store = LogStore(host.disk, tail_bytes_kept=0)


@pytest.fixture
def cold_reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    create = Host.create_partition

    def create_cold(host: Host, start: int = 0) -> object:
        cold(host)
        return create(host, start)

    monkeypatch.setattr(Host, "create_partition", create_cold)
    return Reader()


def test_a_fetch_from_the_disk_is_answered_when_its_read_ends_however_short_its_wait(cold_reader: Reader) -> None:
    cold_reader.commit(batch(), batch())
    cold_reader.host.disk.stall_reads(400)
    cold_reader.fetch(0, max_wait_ms=0)
    cold_reader.host.settle(300)
    assert cold_reader.results == []
    cold_reader.host.settle(300)
    assert cold_reader.bases == [0, 1]


def test_what_is_in_memory_is_served_while_the_disk_does_not_answer(cold_reader: Reader) -> None:
    cold_reader.commit(batch())
    cold_reader.host.disk.stall_reads(LONG_MS)
    cold_reader.host.disk.stall(LONG_MS)
    cold_reader.host.produce()
    cold_reader.host.advance(2)
    cold_reader.fetch(1)
    assert cold_reader.bases == [1]


def test_a_log_start_that_passes_a_read_is_out_of_range_and_no_damage(cold_reader: Reader) -> None:
    cold_reader.commit(batch(), batch())
    cold_reader.host.disk.stall_reads(200)
    cold_reader.fetch(0)
    cold_reader.host.move_log_start(1)
    cold_reader.host.settle(400)
    cold_reader.barriers.release(1)  # type: ignore[arg-type]  # any index
    cold_reader.host.settle(1)
    assert cold_reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert cold_reader.host.repairs.counts.found == 0


def test_no_look_up_holds_up_the_loop(cold_reader: Reader) -> None:
    host = cold_reader.host
    cold_reader.commit(batch(), batch())
    host.disk.stall_reads(400)
    blocked: list[float] = []
    host.disk.on_blocking_read = blocked.append
    look_ups, found = host.look_ups(), list[object]()
    for kind in TimeKind:
        look_ups.time(host.live, kind, 0, 5_000, found.append)
    look_ups.sized_run(host.live, Offset(0), 1 << 20, 5_000, found.append)
    host.settle(300)
    assert (found, blocked) == ([], [])
    host.settle(300)
    assert (len(found), blocked) == (len(TimeKind) + 1, [])
    assert not any(isinstance(answer, SmqError) for answer in found)


def test_a_look_up_whose_caller_has_gone_or_whose_time_is_over_leaves_the_queue(cold_reader: Reader) -> None:
    host = cold_reader.host
    cold_reader.commit(batch())
    host.disk.stall_reads(LONG_MS)
    look_ups, found = host.look_ups(), list[object]()
    cancel = look_ups.time(host.live, TimeKind.TS_NS, 0, 100, found.append)
    look_ups.time(host.live, TimeKind.TS_NS, 0, 100, found.append)
    cancel()
    assert len(host.disk.reads) == 1
    host.settle(READ_MS_MAX + 100)
    (error,) = found
    assert isinstance(error, SmqError)
    assert (error.code, host.disk.reads) == (ErrorCode.NODE_NOT_READY, {})


def test_a_look_up_during_which_the_topic_goes_or_its_start_moves_finds_no_damage(cold_reader: Reader) -> None:
    host = cold_reader.host
    cold_reader.commit(batch(), batch())
    host.disk.stall_reads(200)
    look_ups, found = host.look_ups(), list[object]()
    look_ups.time(host.live, TimeKind.TS_NS, 0, 5_000, found.append)
    host.move_log_start(1)
    host.settle(400)
    (answer,) = found
    assert isinstance(answer, TimeOffset)
    assert answer.offset == 1
    host.disk.stall_reads(200)
    look_ups.time(host.live, TimeKind.TS_NS, 0, 5_000, found.append)
    host.apply(DeleteTopic(name="t"))
    host.store.drop(host.live.log)
    host.settle(1_000)
    gone = found[1]
    assert isinstance(gone, SmqError)
    assert (gone.code, host.repairs.counts.found) == (ErrorCode.UNKNOWN_TOPIC, 0)


def test_a_topic_that_is_deleted_during_a_read_is_unknown_and_no_damage(cold_reader: Reader) -> None:
    cold_reader.commit(batch())
    host = cold_reader.host
    host.disk.stall_reads(200)
    cold_reader.fetch(0)
    gone = SmqError(ErrorCode.UNKNOWN_TOPIC, "gone")
    host.live.close(gone)
    cold_reader.reads.fail_all(host.part.pid, gone)
    host.repairs.forget(host.part.pid)
    host.store.drop(host.live.log)
    host.settle(1_000)
    assert cold_reader.error.code is ErrorCode.UNKNOWN_TOPIC
    assert (host.repairs.counts.found, host.messages(wire.FetchBatch), host.disk.reads) == (0, [], {})


def test_a_read_that_has_begun_when_its_log_is_dropped_finds_no_damage(cold_reader: Reader) -> None:
    cold_reader.commit(batch())
    host = cold_reader.host
    log = host.live.log
    host.store.drop(log)
    host.settle(1_000)
    found: list[object] = []
    assert log.read_later(Offset(0), Offset(1), 1, found.append) is not None
    host.settle(1_000)
    assert found == [None]


def test_a_reader_does_not_wait_for_ever_and_one_that_has_gone_leaves_the_queue(cold_reader: Reader) -> None:
    cold_reader.commit(batch())
    cold_reader.host.disk.stall_reads(LONG_MS)
    gone = [cold_reader.fetch(0) for _ in range(5)]
    kept = cold_reader.fetch(0)
    assert len(cold_reader.host.disk.reads) == 6
    for poll in gone:
        cold_reader.reads.cancel(poll)
    assert len(cold_reader.host.disk.reads) == 1
    cold_reader.host.settle(READ_MS_MAX + 100)
    assert (kept.finished, cold_reader.host.disk.reads) == (True, {})
    cold_reader.host.settle(LONG_MS)
    assert (cold_reader.error.code, cold_reader.error.code.is_retriable) == (ErrorCode.NODE_NOT_READY, True), (
        "it is answered once"
    )


def test_more_reads_than_may_wait_are_refused_and_abandoned_ones_make_room(cold_reader: Reader) -> None:
    cold_reader.commit(batch())
    cold_reader.host.disk.stall_reads(400)
    cold_reader.host.disk.reads_max = 2
    first, _ = cold_reader.fetch(0), cold_reader.fetch(0)
    cold_reader.fetch(0)
    assert cold_reader.error.code is ErrorCode.OVERLOADED
    cold_reader.results.clear()
    cold_reader.reads.cancel(first)
    cold_reader.fetch(0)
    cold_reader.host.settle(600)
    assert len(cold_reader.results) == 2
    assert all(isinstance(result, Fetched) for result in cold_reader.results)


def test_a_stream_that_has_ended_reads_no_more() -> None:
    host = Host()
    cold(host)
    host.create_partition()
    host.elect(ME)
    host.produce()
    host.settle()
    host.disk.stall_reads(1_000)
    host.ack(PEER_A, 0)
    assert len(host.disk.reads) == 1
    host.live.resign()
    assert host.disk.reads == {}


def test_a_batch_that_the_medium_cannot_give_is_fetched_again_from_another_replica(cold_reader: Reader) -> None:
    cold_reader.commit(batch(b"rotten"))
    rows = cold_reader.host.disk.image.tables[Table.BATCHES]
    whole, rows[rows.keys()[0]] = rows.values()[0], b""
    cold_reader.fetch(0)
    cold_reader.host.settle(100)
    (asked,) = {p: m for p, m in cold_reader.host.sent if isinstance(m, wire.FetchBatch)}.items()
    found = wire.FoundBatch(cold_reader.host.part.pid, asked[1].request, False, memoryview(whole))
    cold_reader.host.repairs.on_found(asked[0], found)
    cold_reader.host.settle(100)
    assert cold_reader.bases == [0]


def test_producers_and_other_followers_do_not_wait_for_a_follower_that_is_behind() -> None:
    host = Host()
    cold(host)
    host.create_partition()
    host.elect(ME)
    for _ in range(3):
        host.produce()
    host.settle()
    host.disk.stall_reads(1_000)
    host.ack(PEER_A, 0)  # it needs what is on the disk only
    sent = len(host.messages(wire.Append))
    answer = host.produce()
    host.settle(500)
    assert (len(host.messages(wire.Append)), answer.result) == (sent, None)
    host.settle(1_000)
    host.ack(PEER_A, 3)  # the batch of the meantime goes with this answer
    host.settle(1_000)
    appended = [m for p, m in host.sent if p == PEER_A and isinstance(m, wire.Append)]
    assert sum(len(m.values) for m in appended) == 4
