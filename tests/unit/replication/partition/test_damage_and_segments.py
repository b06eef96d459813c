"""Damage in a log whose batches compaction has joined: what is left of it counts, and the others learn what it cost."""

import pytest

from smq.raft_state.ids import Offset
from smq.replication.log import partition_log
from smq.replication.log.codec import TIME_APPEND, batch_key, parse_value, times_range
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.rewriting import SegmentWriter, digest_of
from smq.replication.log.segments import replaced
from smq.replication.ports import Put, Table
from tests.unit.replication.support import PEER_B, Host, batch
from tests.unit.replication.test_rules import append, follower, stored

JOINED = range(3, 8)  # the records that compaction removes: a checkpoint lies inside the batch that is left


def lose(host: Host, number: int) -> None:
    """The batch of this number, and its index row."""
    log = host.live.log
    key, row = host.disk.scan(Table.TIMES, *times_range(log.pid, TIME_APPEND))[number]
    at = batch_key(log.pid, number)
    ((_, value),) = host.disk.scan(Table.BATCHES, at, batch_key(log.pid, number + 1))
    host.disk.submit([Put(Table.TIMES, key, row[:-1] + b"\x77"), Put(Table.BATCHES, at, value[:-1] + b"\x77")])
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
    log = host.live.log
    writer = SegmentWriter(log.pid, Offset(12))
    for value in log.read_segment(Offset(0), Offset(8), 1 << 20):
        writer.add(value, lambda offset, _: offset not in JOINED)
    new = writer.finish().values
    assert log.install(Offset(0), Offset(8), digest_of(new), new, replaced(log, Offset(0), Offset(8)), lambda: None)
    host.settle()
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


def test_damage_that_costs_valid_batches_in_a_cut_is_reported_before_the_log_is_sealed() -> None:
    """Rule 23: this replica has acknowledged what it no longer has."""
    host = follower()
    append(host, *[stored(batch(b"v"), n, 1, ts_ns=10 + 5 * n) for n in range(12)])
    host.settle()
    host.advance(10)
    lose(host, 4)
    host.live.log._forget_tail_before(Offset(12))  # as if it were older than what memory keeps
    before = host.damage_reports
    host.elect(PEER_B, end=10)
    host.settle()
    assert host.live.log.appended_end == 4
    assert host.damage_reports > before
    assert host.live.seal(host.part.epoch) is None
