"""A disk that is behind: records wait within a bound, led and followed partitions share it, and streams take turns."""

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.replication.api import Acks
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.net import wire
from smq.replication.partition.intake import Intake
from smq.replication.partition.repair import Outcome
from tests.unit.replication.support import ME, PEER_A, Host, batch
from tests.unit.replication.test_rules import acks, append, follower, stored

PIDS = [PartitionId(bytes([n]) * 20) for n in range(4)]


class FakeQueue:
    """The part of a Disk that an intake uses."""

    def __init__(self) -> None:
        self.queued_bytes = self.submitted_seq = self.durable_seq = 0


class FakeLog:
    """A log whose appends only wait for the disk."""

    def __init__(self, disk: FakeQueue) -> None:
        self._disk = disk

    def append_stored(self, size: int, _done: object) -> None:
        self._disk.queued_bytes += size
        self._disk.submitted_seq += 1


def intake(bytes_max: int = 200) -> tuple[Intake, FakeQueue]:
    disk = FakeQueue()
    return Intake(disk, bytes_max), disk  # type: ignore[arg-type]  # the part of a Disk that it uses


def follow(made: Intake, disk: FakeQueue, size: int) -> None:
    made.append(FakeLog(disk), size, lambda: None)  # type: ignore[arg-type]  # the part of a log that it uses


def commit(disk: FakeQueue, size: int) -> None:
    disk.queued_bytes -= size
    disk.durable_seq += 1


def test_each_half_is_bounded_by_itself() -> None:
    made, disk = intake()
    follow(made, disk, 150)
    assert not made.admits(PIDS[0], 1), "the followed half is full"
    rooms = [made.has_room]
    disk.queued_bytes += 500
    disk.submitted_seq += 1
    rooms.append(made.has_room)
    made.took(100)
    rooms.append(made.has_room)
    commit(disk, 150)
    assert made.followed_bytes == 0
    rooms.append(made.has_room)
    assert rooms == [True, True, False, False], "the led half has its own room, is lent none, and Raft takes none of it"


def test_who_was_refused_waits_for_its_turn_although_there_is_room_again() -> None:
    made, disk = intake()
    follow(made, disk, 100)
    assert not made.admits(PIDS[0], 10)
    commit(disk, 100)
    assert not made.admits(PIDS[0], 10), "its earlier append has to come first"
    assert made.admits(PIDS[1], 10)
    assert made.next_turns() == [PIDS[0]]
    assert made.admits(PIDS[0], 10)


def test_turns_begin_when_half_is_free_go_by_waiting_time_and_fill_the_room() -> None:
    made, disk = intake()
    for size in (51, 49):
        follow(made, disk, size)
    for pid, size in zip(PIDS, (30, 60, 1, 1), strict=True):
        assert not made.admits(pid, size)
    assert made.next_turns() == []
    commit(disk, 51)
    assert made.next_turns() == PIDS[:2], "the room is 51 bytes"
    commit(disk, 49)
    assert made.next_turns() == PIDS[2:]
    assert made.next_turns() == []


# ---------------------------------------------------------------------------------------------- one replica
def test_a_follower_at_its_bound_drops_reports_it_once_and_resumes_at_its_turn() -> None:
    host = follower()
    host.intake = Intake(host.disk, 400)
    host.disk.stall(1_000)
    values = [stored(batch(), i, 1, ts_ns=10 + i) for i in range(6)]
    append(host, *values[:3])
    sent = len(acks(host))
    append(host, values[3])
    append(host, values[4])
    host.settle(500)
    assert host.live.log.appended_end == 3
    (held,) = acks(host)[sent:]
    assert (held.is_held, held.resync, held.expect, held.end) == (True, True, 3, 0)
    assert host.intake.next_turns() == []
    host.settle(1_000)
    assert acks(host)[-1].is_held, "it still waits"
    append(host, values[5])
    assert host.live.log.appended_end == 3, "a late append must not leave a gap"
    assert host.intake.next_turns() == [host.part.pid]
    host.live.on_turn()
    assert (acks(host)[-1].is_held, acks(host)[-1].expect) == (False, 3)
    append(host, *values[3:], stream=2)
    host.settle()
    assert (host.live.durable_verified_end, acks(host)[-1].end) == (6, 6)


def test_a_turn_that_comes_to_a_leader_sends_nothing(host: Host) -> None:
    host.elect(ME)
    sent = len(host.sent)
    host.live.on_turn()
    assert len(host.sent) == sent


def test_a_held_follower_is_sent_nothing_until_its_turn_and_then_everything_again(host: Host) -> None:
    host.answer_probe(PEER_A, 0)
    host.produce()
    (sent,) = host.appends_to(PEER_A)
    host.answer_probe(PEER_A, 0, stream=sent.stream, is_held=True)
    host.produce()
    host.settle()
    assert len(host.appends_to(PEER_A)) == 1
    host.answer_probe(PEER_A, 0, stream=sent.stream)
    assert len(host.appends_to(PEER_A)[-1].values) == 2, "from the log, where they have been all the time"


def test_a_held_follower_is_asked_again_after_a_while(host: Host) -> None:
    before = host.last_probe(PEER_A).stream
    host.answer_probe(PEER_A, 0, is_held=True)
    host.settle(1_500)
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.last_probe(PEER_A).stream > before


def test_what_a_node_follows_does_not_stop_its_producers() -> None:
    host = follower()
    host.intake = Intake(host.disk, 2_000)
    host.disk.stall(10_000)
    append(host, *[stored(batch(), i, 1, ts_ns=10 + i) for i in range(20)])
    host.elect(ME, end=0)
    assert host.disk.queued_bytes > 2_000
    host.produce(acks=Acks.LEADER)
    while host.intake.has_room:
        host.produce(acks=Acks.LEADER)
    with pytest.raises(SmqError) as refused:
        host.produce(acks=Acks.LEADER)
    assert refused.value.code is ErrorCode.OVERLOADED


def test_a_repair_waits_for_room(host: Host) -> None:
    host.intake = Intake(host.disk, 0)
    host.repairs._intake = host.intake
    outcomes: list[Outcome] = []
    host.repairs.request(host.live, BatchDamaged(host.part.pid, Offset(0), "test"), outcomes.append)
    host.settle()
    assert outcomes == [Outcome.UNKNOWN], "its reader asks again"
    assert host.messages(wire.FetchBatch) == []
