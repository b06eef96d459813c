"""Features of the simulated disk alone: virtual latency, crashes, faults. The same seed gives the same run."""

import random

from smq.replication.ports import Put, Table
from smq.testing.virtual.disk import DiskImage, FakeDisk
from tests.unit.replication.storage.support import ManualClock

T = Table.RAFT_LOG
SEEDS = range(60)


def disk_with(clock: ManualClock, seed: int, image: DiskImage | None = None) -> FakeDisk:
    return FakeDisk(clock, random.Random(seed), image=image, latency_ms=(1, 2), on_fatal=lambda e: None)


def submit(disk: FakeDisk, count: int, done: list[int] | None = None) -> None:
    for i in range(count):
        disk.submit(
            [
                Put(T, b"%04d" % (disk.submitted_seq + 1), b"v"),
                Put(Table.TIMES, b"%04d" % (disk.submitted_seq + 1), b""),
            ],
            None if done is None else lambda i=i: done.append(i),  # type: ignore[misc]  # default binds i
        )


def found(image: DiskImage) -> list[bytes]:
    keys = list(image.tables[T])
    assert list(image.tables[Table.TIMES]) == keys  # submissions are atomic
    return keys


def test_nothing_is_committed_before_its_latency_has_passed() -> None:
    clock = ManualClock()
    disk = disk_with(clock, 1)
    submit(disk, 1)
    assert disk.get(T, b"0001") is None
    clock.run()
    assert clock.now_ns >= 1_000_000
    assert disk.get(T, b"0001") == b"v"


def test_a_crash_keeps_reported_submissions_and_a_prefix_of_the_rest() -> None:
    survivors = set()
    for seed in SEEDS:
        clock = ManualClock()
        disk = disk_with(clock, seed)
        submit(disk, 3)
        clock.run()
        submit(disk, 2)  # the first of them is in flight
        keys = found(disk.crash())
        assert keys == [b"%04d" % (i + 1) for i in range(len(keys))]
        survivors.add(len(keys))
    assert survivors == {3, 4, 5}


def test_commits_that_are_not_reported_yet_survive_a_crash() -> None:
    seen_unreported = False
    for seed in SEEDS:
        clock = ManualClock()
        disk = disk_with(clock, seed)
        submit(disk, 1)
        while disk.get(T, b"0001") is None:
            clock.step()
        seen_unreported = seen_unreported or disk.durable_seq == 0
        assert found(disk.crash()) == [b"0001"]
    assert seen_unreported


def test_nothing_runs_after_a_crash() -> None:
    clock = ManualClock()
    disk = disk_with(clock, 1)
    done: list[int] = []
    submit(disk, 5, done)
    image = disk.crash().copy()
    clock.run()
    assert done == []
    assert disk.durable_seq == 0
    assert found(image) == found(disk.crash())


def test_a_group_whose_commit_failed_may_or_may_not_be_there_afterwards() -> None:
    survivors = set()
    for seed in SEEDS:
        clock = ManualClock()
        disk = disk_with(clock, seed)
        disk.fail_next_commit(OSError("fsync"))
        submit(disk, 1)
        clock.run()
        submit(disk, 1)  # after the failure: the writer is gone
        survivors.add(len(found(disk.crash())))
    assert survivors == {0, 1}


def test_a_full_disk_fails_the_commit_and_still_reads() -> None:
    clock, fatal = ManualClock(), list[BaseException]()
    disk = FakeDisk(clock, random.Random(1), on_fatal=fatal.append)
    submit(disk, 1)
    clock.run()
    disk.capacity = 0
    submit(disk, 1)
    clock.run()
    assert [type(e) for e in fatal] == [OSError]
    assert disk.get(T, b"0001") == b"v"


def test_a_stalled_disk_commits_when_the_stall_is_over() -> None:
    clock = ManualClock()
    disk = disk_with(clock, 1)
    submit(disk, 1)
    disk.stall(500)
    clock.run()
    assert clock.now_ns >= 500_000_000
    assert disk.durable_seq == 1


def test_the_same_seed_gives_the_same_times_and_the_same_image() -> None:
    def run(seed: int) -> tuple[int, list[bytes], bytes | None]:
        clock = ManualClock()
        disk = disk_with(clock, seed)
        for _ in range(10):
            submit(disk, 3)
            clock.step()
        image = disk.crash()
        return clock.now_ns, found(image), image.flip_bit(T, random.Random(seed))

    assert [run(seed) for seed in SEEDS] == [run(seed) for seed in SEEDS]


def test_a_flipped_bit_is_one_bit_of_one_value() -> None:
    image = DiskImage()
    image.apply([Put(T, b"a", bytes(8)), Put(T, b"b", b"")])
    assert image.flip_bit(T, random.Random(1)) == b"a"
    assert int.from_bytes(image.tables[T][b"a"], "big").bit_count() == 1
    assert image.flip_bit(Table.META, random.Random(1)) is None
