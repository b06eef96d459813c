"""Reads that wait for the medium: nothing else waits for them, and no reader waits for ever."""

import pytest

from smq.raft_state.commands import AdvanceLogStart, DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.replication.api import Fetched, TimeKind, TimeOffset
from smq.replication.log.store import LogStore
from smq.replication.net import wire
from smq.replication.partition.reads import READ_MS_MAX
from smq.replication.ports import Table
from tests.unit.replication.partition.test_reads import Reader
from tests.unit.replication.support import ME, PEER_A, Host, batch

LONG_MS = 4 * READ_MS_MAX


def cold(host: Host) -> None:
    """Durable batches leave memory."""
    host.store = LogStore(host.disk, tail_bytes_kept=0)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    create = Host.create_partition

    def create_cold(host: Host, start: int = 0) -> object:
        cold(host)
        return create(host, start)

    monkeypatch.setattr(Host, "create_partition", create_cold)
    return Reader()


def test_a_fetch_from_the_disk_is_answered_when_its_read_ends_however_short_its_wait(reader: Reader) -> None:
    reader.commit(batch(), batch())
    reader.host.disk.stall_reads(400)
    reader.fetch(0, max_wait_ms=0)
    reader.host.settle(300)
    assert reader.results == []
    reader.host.settle(300)
    assert reader.bases == [0, 1]


def test_what_is_in_memory_is_served_while_the_disk_does_not_answer(reader: Reader) -> None:
    reader.commit(batch())
    reader.host.disk.stall_reads(LONG_MS)
    reader.host.disk.stall(LONG_MS)
    reader.host.produce()
    reader.host.advance(2)
    reader.fetch(1)
    assert reader.bases == [1]


def test_a_log_start_that_passes_a_read_is_out_of_range_and_no_damage(reader: Reader) -> None:
    reader.commit(batch(), batch())
    reader.host.disk.stall_reads(200)
    reader.fetch(0)
    reader.host.apply(AdvanceLogStart(partition=reader.host.part.pid, offset=Offset(1)))
    reader.host.settle(400)
    reader.barriers.release(1)  # type: ignore[arg-type]  # any index
    reader.host.settle(1)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert reader.host.repairs.counts.found == 0


def test_no_look_up_holds_up_the_loop(reader: Reader) -> None:
    host = reader.host
    reader.commit(batch(), batch())
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


def test_a_look_up_whose_caller_has_gone_or_whose_time_is_over_leaves_the_queue(reader: Reader) -> None:
    host = reader.host
    reader.commit(batch())
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


def test_a_look_up_during_which_the_topic_goes_or_its_start_moves_finds_no_damage(reader: Reader) -> None:
    host = reader.host
    reader.commit(batch(), batch())
    host.disk.stall_reads(200)
    look_ups, found = host.look_ups(), list[object]()
    look_ups.time(host.live, TimeKind.TS_NS, 0, 5_000, found.append)
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(1)))
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


def test_a_topic_that_is_deleted_during_a_read_is_unknown_and_no_damage(reader: Reader) -> None:
    reader.commit(batch())
    host = reader.host
    host.disk.stall_reads(200)
    reader.fetch(0)
    gone = SmqError(ErrorCode.UNKNOWN_TOPIC, "gone")
    host.live.close(gone)
    reader.reads.fail_all(host.part.pid, gone)
    host.repairs.forget(host.part.pid)
    host.store.drop(host.live.log)
    host.settle(1_000)
    assert reader.error.code is ErrorCode.UNKNOWN_TOPIC
    assert (host.repairs.counts.found, host.messages(wire.FetchBatch), host.disk.reads) == (0, [], {})


def test_a_read_that_has_begun_when_its_log_is_dropped_finds_no_damage(reader: Reader) -> None:
    reader.commit(batch())
    host = reader.host
    log = host.live.log
    host.store.drop(log)
    host.settle(1_000)
    found: list[object] = []
    assert log.read_later(Offset(0), Offset(1), 1, found.append) is not None
    host.settle(1_000)
    assert found == [None]


def test_a_reader_does_not_wait_for_ever_and_one_that_has_gone_leaves_the_queue(reader: Reader) -> None:
    reader.commit(batch())
    reader.host.disk.stall_reads(LONG_MS)
    gone = [reader.fetch(0) for _ in range(5)]
    kept = reader.fetch(0)
    assert len(reader.host.disk.reads) == 6
    for poll in gone:
        reader.reads.cancel(poll)
    assert len(reader.host.disk.reads) == 1
    reader.host.settle(READ_MS_MAX + 100)
    assert (kept.finished, reader.host.disk.reads) == (True, {})
    reader.host.settle(LONG_MS)
    assert (reader.error.code, reader.error.code.is_retriable) == (ErrorCode.NODE_NOT_READY, True), (
        "it is answered once"
    )


def test_more_reads_than_may_wait_are_refused_and_abandoned_ones_make_room(reader: Reader) -> None:
    reader.commit(batch())
    reader.host.disk.stall_reads(400)
    reader.host.disk.reads_max = 2
    first, _ = reader.fetch(0), reader.fetch(0)
    reader.fetch(0)
    assert reader.error.code is ErrorCode.OVERLOADED
    reader.results.clear()
    reader.reads.cancel(first)
    reader.fetch(0)
    reader.host.settle(600)
    assert len(reader.results) == 2
    assert all(isinstance(result, Fetched) for result in reader.results)


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


def test_a_batch_that_the_medium_cannot_give_is_fetched_again_from_another_replica(reader: Reader) -> None:
    reader.commit(batch(b"rotten"))
    rows = reader.host.disk.image.tables[Table.BATCHES]
    whole, rows[rows.keys()[0]] = rows.values()[0], b""
    reader.fetch(0)
    reader.host.settle(100)
    (asked,) = {p: m for p, m in reader.host.sent if isinstance(m, wire.FetchBatch)}.items()
    found = wire.FoundBatch(reader.host.part.pid, asked[1].request, False, memoryview(whole))
    reader.host.repairs.on_found(asked[0], found)
    reader.host.settle(100)
    assert reader.bases == [0]


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
