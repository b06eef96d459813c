"""A full disk: records are refused or wait, all other work continues, and records resume once there is space."""

import pytest

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.replication.partition.intake import REFRESHES_PER_RESERVE, SpaceGuard
from smq.replication.ports import Space
from tests.unit.replication.support import PEER_A, PEER_B, Host, batch, leader_of_one_record
from tests.unit.replication.test_rules import acks, append, follower, stored

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
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(2)))
    host.settle()
    host.space.refresh()
    with pytest.raises(SmqError, match=r"STORAGE_FULL.* 1 MiB must still go: delete topics or records"):
        host.produce()
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(end)))
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
