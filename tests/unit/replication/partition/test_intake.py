"""A disk that is behind, full or hangs: records wait within a bound or are refused, and all other work continues."""

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.replication.api import Acks, SizedRun, TimeKind, TimeOffset
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.net import wire
from smq.replication.partition.intake import REFRESHES_PER_RESERVE, Intake, SpaceGuard
from smq.replication.partition.repair import Outcome
from smq.replication.ports import Space
from smq.replication.storage.hang import HangGuard
from tests.unit.replication.support import ME, PEER_A, PEER_B, Host, batch, leader_of_one_record
from tests.unit.replication.test_rules import acks, append, follower, stored

# -------------------------------------------------------------------------------------------------------------- intake
# A disk that is behind: records wait within a bound, led and followed partitions share it, and streams take turns.
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


# ----------------------------------------------------------------------------------------------------------- full disk
# A full disk: records are refused or wait, all other work continues, and records resume once there is space.
RESERVE = 1_000_000
MIB = 1 << 20


class FakeSpace:
    """The one method of a Disk that the guard uses."""

    def __init__(self, free: int, reusable: int = 0) -> None:
        self.free, self.reusable = free, reusable
        self.looks = self.queued_bytes = 0

    def space(self) -> Space:
        self.looks += 1
        return Space(free_bytes=self.free, reusable_bytes=self.reusable, total_bytes=1 << 40)


def guard(free: int, reusable: int = 0, *, reserve: int = RESERVE) -> tuple[SpaceGuard, FakeSpace]:
    disk = FakeSpace(free, reusable)
    made = SpaceGuard(disk, reserve)  # type: ignore[arg-type]  # the part of a Disk that it uses
    made.refresh()
    return made, disk


@pytest.mark.parametrize(
    ("free", "reusable", "is_full"),
    [
        (RESERVE, 0, False),
        (RESERVE - 1, 0, True),
        (RESERVE - 1, 1, False),  # what was deleted makes room
        (RESERVE // 2, RESERVE // 2, False),
        (RESERVE // 2, RESERVE // 2 - 1, True),
        (RESERVE // 2 - 1, 100 * RESERVE, True),  # a large batch may need pages that lie together
    ],
)
def test_the_disk_is_full_below_the_reserve(free: int, reusable: int, is_full: bool) -> None:
    assert guard(free, reusable)[0].is_full is is_full


def test_writes_in_flight_count_as_written() -> None:
    made, disk = guard(RESERVE)
    disk.queued_bytes = 1
    made.refresh()
    assert made.is_full


def test_a_full_disk_has_room_again_an_eighth_above_the_reserve() -> None:
    made, disk = guard(0)
    for free, is_full in ((RESERVE, True), (RESERVE + RESERVE // 8, False), (RESERVE, False), (RESERVE - 1, True)):
        disk.free = free
        made.refresh()
        assert made.is_full is is_full


def test_much_that_is_appended_between_two_looks_is_a_look_of_its_own() -> None:
    made, disk = guard(1 << 40)
    assert made.admits(RESERVE // REFRESHES_PER_RESERVE)
    assert disk.looks == 1
    disk.free = 0
    assert not made.admits(1)
    assert disk.looks == 2


def test_a_reserve_of_nothing_is_never_touched() -> None:
    assert guard(0, reserve=0)[0].admits(1)


@pytest.mark.parametrize(
    ("free", "reusable", "reserve", "parts"),
    [
        (
            60 * MIB,
            7 * MIB,
            100 * MIB,
            ("60 MiB left", "7 MiB to use again", "reserve of 100 MiB", "46 MiB must still go"),
        ),
        (50 * MIB, 50 * MIB - 1, 100 * MIB, ("13 MiB must still go: delete topics or records, or free",)),  # and a byte
        (3 * MIB, 900 * MIB, 100 * MIB, ("47 MiB must still go: free 47 MiB of them on that disk's file system",)),
        (3 * MIB, 7 * MIB, 100 * MIB, ("103 MiB must still go: free 47 MiB of them", "for the rest delete topics")),
    ],
)
def test_the_refusal_says_how_many_bytes_must_still_go(
    free: int, reusable: int, reserve: int, parts: tuple[str, ...]
) -> None:
    made, disk = guard(free, reusable, reserve=reserve)
    error = made.refusal(2)
    assert error.code is ErrorCode.STORAGE_FULL
    for part in ("node 2", "writes then resume by themselves", *parts):
        assert part in error.message
    # It is true: that much less is not enough, and that much is.
    missing, outside = made._missing_bytes, made._missing_outside_bytes
    for short, is_full in ((1, True), (0, False)):
        disk.free, disk.reusable = free + outside, reusable + missing - outside - short
        if outside == missing:
            disk.free -= short
        made.refresh()
        assert made.is_full is is_full


# ---------------------------------------------------------------------------------------------- one replica
def fill(host: Host) -> None:
    host.space = SpaceGuard(host.disk, RESERVE)
    host.disk.capacity = host.disk.size_bytes() + 1
    host.space.refresh()


def free(host: Host) -> None:
    host.disk.capacity = None
    host.space.refresh()


def test_a_leader_with_a_full_disk_refuses_records_and_answers_what_it_has() -> None:
    host = leader_of_one_record()
    repeated = batch(b"r", producer_id=7, producer_epoch=0, base_sequence=0)
    host.produce(repeated)
    host.settle()
    host.ack(PEER_A, 2)
    host.advance(2)
    fill(host)
    with pytest.raises(SmqError, match="STORAGE_FULL"):
        host.produce()
    answer = host.produce(repeated)
    host.settle(10)
    assert answer.is_duplicate, "what is stored already needs no room"
    assert [v.base for v in host.live.log.read(Offset(0), Offset(2), 1 << 20)] == [0, 1]
    free(host)
    assert host.produce().result is None


def test_a_leader_takes_records_again_once_enough_of_its_file_can_be_used_again() -> None:
    """The file never shrinks, so what the file system has free stays as it is."""
    host = leader_of_one_record()
    size = RESERVE // REFRESHES_PER_RESERVE
    host.space = SpaceGuard(host.disk, RESERVE)
    host.disk.capacity = host.disk.size_bytes() + RESERVE + 3 * size
    for end in range(2, 100):
        host.produce(batch(bytes(size)))
        host.settle()
        host.ack(PEER_A, end)
        host.advance(end)
        host.space.refresh()
        if host.space.is_full:
            break
    free = host.space.space.free_bytes
    host.move_log_start(2)
    host.settle()
    host.space.refresh()
    with pytest.raises(SmqError, match=r"STORAGE_FULL.* 1 MiB must still go: delete topics or records"):
        host.produce()
    host.move_log_start(end)
    host.settle()
    host.space.refresh()
    assert host.space.space.free_bytes <= free
    assert host.produce().result is None


@pytest.mark.parametrize(("is_other_full", "candidates"), [(False, [PEER_B]), (True, [])])
def test_a_leader_with_a_full_disk_hands_over_to_a_follower_with_room_or_leads_on(
    is_other_full: bool, candidates: list[NodeId]
) -> None:
    host = leader_of_one_record()
    fill(host)
    host.answer_probe(PEER_A, 1, is_full=True)
    host.answer_probe(PEER_B, 1, is_full=is_other_full)
    host.live.on_tick(host.clock.monotonic_ns())
    assert [getattr(command, "candidate", None) for command in host.proposed] == candidates


def test_a_leader_with_space_accepts_with_a_majority_and_refuses_without_one() -> None:
    host = leader_of_one_record()
    host.answer_probe(PEER_A, 1, is_full=True)
    answer = host.produce()
    host.settle()
    host.ack(PEER_B, 2)
    host.advance(2)
    host.settle(10)
    assert answer.offsets == (1, 1)
    host.answer_probe(PEER_B, 2, is_full=True)
    with pytest.raises(SmqError, match="STORAGE_FULL"):
        host.produce()
    host.answer_probe(PEER_A, 1, is_full=False)
    assert host.produce().result is None


def test_a_full_follower_is_sent_nothing_until_it_has_room() -> None:
    host = leader_of_one_record()
    probe = host.last_probe(PEER_A)
    host.answer_probe(PEER_A, 0, is_full=True)
    assert host.appends_to(PEER_A) == []
    host.settle(1_500)
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.last_probe(PEER_A).stream > probe.stream, "it is asked again"
    host.answer_probe(PEER_A, 0)
    assert host.appends_to(PEER_A)


def test_a_follower_with_a_full_disk_takes_nothing_reports_it_and_resumes() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1, ts_ns=10))
    host.settle()
    fill(host)
    append(host, stored(batch(), 1, 1, ts_ns=11))
    host.settle()
    assert (host.live.log.appended_end, acks(host)[-1].is_full, acks(host)[-1].expect) == (1, True, 1)
    free(host)
    append(host, stored(batch(), 1, 1, ts_ns=11))
    host.settle()
    assert (host.live.log.appended_end, acks(host)[-1].is_full) == (2, False)


def test_a_follower_whose_link_was_busy_with_others_is_served_without_another_record(host: Host) -> None:
    host.produce()
    host.settle()
    host.network.backlog = 1 << 30
    host.answer_probe(PEER_B, 0)
    host.network.backlog = 0
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.appends_to(PEER_B)


# ----------------------------------------------------------------------------------------------------------- hung disk
# A leader whose disk hangs without an error: what it serves, and to which follower it hands over.
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
