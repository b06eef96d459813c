"""A leader whose disk hangs without an error: what it serves, and to which follower it hands over."""

import pytest

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.replication.api import SizedRun, TimeKind, TimeOffset
from smq.replication.net import wire
from smq.replication.partition.intake import Intake
from smq.replication.storage.hang import HangGuard
from tests.unit.replication.support import PEER_A, PEER_B, Host, batch, leader_of_one_record

HANG_MS = Host().config.disk_hang_ms
TICK_MS = 100


def leader() -> Host:
    host = leader_of_one_record()
    host.disk.stall(600_000)
    return host


def wait(host: Host, ms: int) -> None:
    """As the node does: a tick, and a visit of the replica."""
    for _ in range(ms // TICK_MS):
        host.settle(TICK_MS)
        host.hang.observe(host.clock.monotonic_ns())
        if host.live.leading is not None:
            host.live.on_tick(host.clock.monotonic_ns())


def successors(host: Host) -> list[NodeId | None]:
    return [getattr(command, "candidate", None) for command in host.proposed]


# ------------------------------------------------------------------------------------------- the guard
def test_a_disk_hangs_once_nothing_that_waits_has_become_durable_for_a_while() -> None:
    host = leader()
    wait(host, 2 * HANG_MS)
    assert not host.hang.hangs, "nothing waits"
    host.produce()
    wait(host, HANG_MS - TICK_MS)
    assert not host.hang.hangs
    wait(host, 2 * TICK_MS)
    assert (host.hang.hangs, host.hang.hangs_on) == (True, False)
    wait(host, HANG_MS)
    assert host.hang.hangs_on
    host.disk.end_stall()
    wait(host, 2 * TICK_MS)
    assert not host.hang.hangs


def test_a_slow_disk_that_makes_progress_does_not_hang() -> None:
    host = leader()
    host.disk.end_stall()
    guard = HangGuard(host.disk, HANG_MS)
    for _ in range(10):
        host.produce()
        host.produce()
        host.disk.stall(HANG_MS // 2)
        for _ in range(HANG_MS // TICK_MS):
            host.settle(TICK_MS)
            guard.observe(host.clock.monotonic_ns())
            assert not guard.hangs


def test_a_loop_that_stood_still_does_not_blame_the_disk() -> None:
    host = leader()
    host.produce()
    host.hang.observe(host.clock.monotonic_ns())
    host.hang.observe(host.clock.monotonic_ns() + 60 * 10**9)
    assert not host.hang.hangs


# ----------------------------------------------------------------------------------------- what is served
def test_a_leader_serves_what_the_followers_have_committed_although_its_own_disk_hangs() -> None:
    host = leader()
    host.produce()
    host.ack(PEER_A, 2)
    host.ack(PEER_B, 2)
    host.advance(2)
    live = host.live
    assert (live.readable_end, live.durable_verified_end) == (2, 1)
    assert [value.base for value in live.log.read(Offset(1), live.readable_end, 1 << 20)] == [1]
    runs: list[object] = []
    host.look_ups().sized_run(live, Offset(0), 1 << 20, 5_000, runs.append)
    host.settle(100)
    (run,) = runs
    assert isinstance(run, SizedRun)
    assert run.end == 2
    found = host.find_time(TimeKind.TS_NS, live.log.last_ts_ns)
    assert isinstance(found, TimeOffset)
    assert (found.offset, found.ts_ns) == (1, live.log.last_ts_ns)


def test_reports_acknowledgements_and_elections_count_what_is_on_disk() -> None:
    host = leader()
    host.produce()
    host.ack(PEER_A, 2)
    host.advance(2)
    assert host.live.seal(host.part.epoch) == (host.part.pid, 1, 1)
    host.elect(PEER_A, end=2)
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, host.part.epoch, 1))
    assert [m.end for _, m in host.sent if isinstance(m, wire.Ack)][-1:] == [1]


# ------------------------------------------------------------------------------------------ who leads next
def test_a_leader_whose_disk_hangs_hands_over_to_the_follower_that_stored_most() -> None:
    host = leader()
    host.produce()
    host.ack(PEER_B, 2)
    host.advance(2)
    wait(host, HANG_MS - TICK_MS)
    assert successors(host) == []
    wait(host, 2 * TICK_MS)
    assert successors(host) == [PEER_B]


def test_a_leader_goes_on_while_no_follower_stores_more_than_its_own_hung_disk() -> None:
    host = leader()
    host.produce()
    wait(host, 3 * HANG_MS)
    assert (successors(host), host.resigned, host.live.leading) == ([], [], host.part.epoch)


def test_a_leader_that_refuses_batches_because_others_fill_the_room_resigns() -> None:
    host = leader()
    host.produce()
    host.intake = Intake(host.disk, 0)  # another partition's batches have filled it
    wait(host, 2 * HANG_MS - TICK_MS)
    with pytest.raises(SmqError, match="too much is waiting for the disk"):
        host.produce()
    assert host.resigned == []
    host.candidates.clear()
    wait(host, HANG_MS)
    assert host.resigned == [], "every disk hangs: no other node would do better"
    host.candidates.add(PEER_B)
    wait(host, TICK_MS)
    assert host.resigned == [(host.part.pid, host.part.epoch)]


def test_a_refusal_before_the_disk_hung_does_not_count() -> None:
    host = leader()
    usual, host.intake = host.intake, Intake(host.disk, 0)
    with pytest.raises(SmqError):
        host.produce()
    host.intake = usual
    wait(host, TICK_MS)
    host.disk.submit([])
    wait(host, 3 * HANG_MS)
    assert host.hang.hangs_on
    assert host.resigned == []


def test_a_leader_whose_handover_does_not_succeed_resigns() -> None:
    host = leader()
    for _ in range(2):
        host.produce(batch(b"x"))
    host.ack(PEER_A, 2)  # of three: the handover waits for the third
    host.advance(2)
    wait(host, 2 * HANG_MS - TICK_MS)
    assert host.resigned == []
    wait(host, 2 * TICK_MS)
    assert host.resigned == [(host.part.pid, host.part.epoch)]
