"""Records found by their create time while cuts, trims and segments are on their way to the disk, or after damage."""

from collections.abc import Callable
from functools import partial

import pytest

from smq.raft_state.ids import Offset
from smq.records import NewRecord, encode_batch
from smq.replication.api import TimeKind
from smq.replication.log.log_state import checkpoint_key
from smq.replication.log.segments import digest_of, replaced
from smq.replication.log.stored_batch import StoredValue
from smq.replication.partition.log_search import find_time
from smq.replication.ports import Put, Table
from tests.unit.replication.log.support import PID
from tests.unit.replication.log.test_segments import Node, compacted, create_rows, nothing, rewritten
from tests.unit.replication.storage.support import FakeHarness


def append(node: Node, create_ms: int, epoch: int = 0) -> None:
    """A batch of one record."""
    node.write(encode_batch([NewRecord(b"k", b"v", create_ms)]), epoch)


def log_of(*times: int, seed: int = 0) -> Node:
    node = Node(FakeHarness(seed))
    for create_ms in times:
        append(node, create_ms)
    node.harness.settle()
    return node


def find(node: Node, create_ms: int) -> int | None:
    """The offset of the first record created then or later, as ListOffsets answers."""
    found = find_time(node.log, end=node.log.durable_end, kind=TimeKind.TIMESTAMP_MS, value=create_ms)
    offset: int | None = getattr(found, "offset", None)
    return offset


def test_a_cut_that_is_on_its_way_to_the_disk_hides_no_record_from_a_search() -> None:
    """Two elections during one slow flush. The rows of what was cut first are still on the disk."""
    node = log_of(10, 20, 100)
    node.log.truncate(Offset(2))
    append(node, 50, 1)
    append(node, 60, 1)
    node.log.truncate(Offset(3))
    append(node, 70, 2)
    node.harness.settle()
    for _ in range(2):
        assert [find(node, create_ms) for create_ms in (15, 45, 55, 65, 75)] == [1, 2, 3, 3, None]
        node.reopen()


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_search_that_a_trim_overtakes_is_right_or_is_made_again(is_compacted: bool) -> None:
    """The deleted row stood in for batches that have none."""
    for seed in range(40):
        node = log_of(200, 190, 195, 210, seed=seed)
        if is_compacted:
            old = node.log.read_segment(Offset(0), Offset(1), 1 << 20)
            assert node.install(0, 1, rewritten(old, {0}, 0, node.log.aborted))
        found: list[object] = []
        look: Callable[..., object] = partial(
            find_time, end=node.log.durable_end, kind=TimeKind.TIMESTAMP_MS, value=190
        )
        node.log.look_up(look, found.append)
        node.log.advance_log_start(Offset(1))
        node.harness.settle()
        (answer,) = found
        assert answer is None or getattr(answer, "offset", answer) in {0, 1}, seed
        assert find(node, 190) == 1


def test_a_log_that_ends_inside_a_segment_and_grows_keeps_its_rows_in_order() -> None:
    """Its own newest record was created before one that the segment no longer has."""
    leader, follower = log_of(200, 190, 195), log_of(200, 190, seed=1)
    new = rewritten(leader.log.read_segment(Offset(0), Offset(3), 1 << 20), {0}, 0, leader.log.aborted)
    for node in (leader, follower):
        assert node.install(0, 3, new)
        assert [find(node, create_ms) for create_ms in (189, 190, 195)] == [1, 1, 2]
    assert create_rows(leader) == create_rows(follower)


@pytest.mark.parametrize(("later", "newest"), [([], None), ([5], 3), ([5, 40, 6], 4), ([30], 3)])
def test_the_newest_record_is_none_of_a_batch_that_has_no_record_left(later: list[int], newest: int | None) -> None:
    """Compaction has left only the first record of its batch, and log_start is after it."""
    node = Node(FakeHarness(0))
    node.write(encode_batch([NewRecord(b"k", b"v", create_ms) for create_ms in (30, 10, 20)]), 0)
    node.harness.settle()
    assert node.install(
        0, 3, rewritten(node.log.read_segment(Offset(0), Offset(3), 1 << 20), {1, 2}, 0, node.log.aborted)
    )
    for create_ms in later:
        append(node, create_ms)
    node.log.advance_log_start(Offset(1))
    node.harness.settle()
    found = find_time(node.log, end=node.log.durable_end, kind=TimeKind.MAX_TIMESTAMP, value=0)
    assert getattr(found, "offset", None) == newest


def test_after_a_damaged_checkpoint_a_compacted_log_takes_its_rows_for_no_fewer_than_they_are() -> None:
    node = compacted([10, 7, 6], 2, {0})
    disk = node.harness.disk
    for key, row in disk.scan(Table.CHECKPOINTS, checkpoint_key(PID, Offset(node.log._base.end + 1)), PID + b"\xff"):
        disk.submit([Put(Table.CHECKPOINTS, key, row[:-1] + bytes([row[-1] ^ 1]))])
    node.harness.settle()
    node.reopen()
    append(node, 8)
    node.harness.settle()
    assert find(node, 7) == 1
    node.log.truncate(Offset(3))
    node.harness.settle()
    assert [find(node, create_ms) for create_ms in (6, 7, 8)] == [1, 1, None]


@pytest.mark.parametrize("times", [(100, 150, 200, 110), (100, 120, 130, 110), (65, 127, 130, 110)])
def test_an_installation_brings_no_row_of_a_cut_back(times: tuple[int, int, int, int]) -> None:
    """The cut is on its way to the disk when the rows are read that the segment is to replace."""
    first, cut_later, second, last = times
    leader, follower = log_of(10, 20, 30, 40, 50, 60), log_of(10, 20, first, second, seed=1)
    new: list[StoredValue] = rewritten(
        leader.log.read_segment(Offset(0), Offset(5), 1 << 20), {1, 3}, 100, leader.log.aborted
    )
    assert leader.install(0, 5, new)
    follower.log.truncate(Offset(2))
    old = replaced(follower.log, Offset(0), Offset(5))
    follower.log.install(Offset(0), Offset(5), digest_of(new), new, old, nothing)
    follower.harness.settle()
    for stored in leader.stored(5):
        follower.log.append_stored([stored], nothing)
    append(follower, 5)
    append(follower, cut_later)
    follower.harness.settle()
    follower.log.truncate(Offset(6))
    follower.harness.settle()
    append(follower, last, 1)
    follower.harness.settle()
    assert {find(follower, create_ms) for create_ms in range(61, last + 1)} == {6}
    assert create_rows(follower)[-1] == (last, 6)
