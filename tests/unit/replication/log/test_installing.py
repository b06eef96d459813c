"""A segment is installed while the log is not at rest: rows, sizes and reads stay right."""

from functools import partial

import pytest

from smq.raft_state.ids import Offset
from smq.replication.log.segments import Replaced, digest_of, replaced
from smq.replication.log.stored_batch import StoredValue
from smq.replication.ports import DataDamaged
from tests.unit.replication.log.test_segments import Node, nothing, rewritten
from tests.unit.replication.storage.support import FakeHarness


def leading(count: int) -> Node:
    """A log of one record in each batch."""
    node = Node(FakeHarness(0))
    for key in range(count):
        node.append([key], 0, key)
    node.harness.settle()
    return node


def following(values: list[StoredValue], durable: int) -> Node:
    """A log of these batches, of which the first ones are on its disk."""
    node = Node(FakeHarness(1))
    for number, value in enumerate(values):
        if number == durable:
            node.harness.settle()
        node.log.append_stored([value], nothing)
    if durable == len(values):
        node.harness.settle()
    return node


@pytest.mark.parametrize("end", [6, 8], ids=["replaces", "grows"])
def test_a_look_up_that_saw_fewer_durable_batches_is_not_used(end: int) -> None:
    leader = leading(10)
    whole = leader.stored()
    new = rewritten(whole[:end], {3, 4, 5}, 100, leader.log.aborted)
    node = following(whole[:6], 4)
    found: list[Replaced | DataDamaged | None] = []
    node.log.look_up(partial(replaced, start=Offset(0), end=Offset(end)), found.append)
    node.harness.settle()
    assert node.log.durable_end == 6
    assert isinstance(found[0], Replaced)
    assert not node.log.install(Offset(0), Offset(end), digest_of(new), new, found[0], nothing)
    assert node.install(0, end, new)
    assert [info.base for info in node.log._durable_infos(0, Offset(0))] == [value.base for value in node.stored()]
    assert node.log.size_bytes == sum(len(value.value) for value in node.stored())


def growing() -> Node:
    """A follower with [0, 6) gets the segment [0, 8), in which one batch covers [2, 7)."""
    leader = leading(10)
    whole = leader.stored()
    new = rewritten(whole[:8], {3, 4, 5, 6}, 100, leader.log.aborted)
    node = following(whole[:6], 6)
    old = replaced(node.log, Offset(0), Offset(8))
    assert node.log.install(Offset(0), Offset(8), digest_of(new), new, old, nothing)
    return node


def test_a_tail_that_is_released_while_the_log_grows_keeps_what_is_not_durable() -> None:
    node = growing()
    node.log.release_tail()
    assert [value.base for value in node.log.read(Offset(6), Offset(8), 1)] == [2]


def test_the_backlog_of_a_log_whose_base_lies_inside_its_first_batch() -> None:
    leader = leading(12)
    whole = leader.stored()
    assert leader.install(0, 8, rewritten(whole[:8], {3, 4, 5, 6}, 100, leader.log.aborted))
    values = leader.stored()
    node = Node(FakeHarness(1))
    node.log.keep_from(Offset(0))
    node.log.advance_log_start(Offset(5))  # far behind: the log is emptied, and its start lies inside a segment
    node.harness.settle()
    assert node.install(0, 8, [value for value in values if value.base < 8])
    for value in values:
        if value.base >= 8:
            node.log.append_stored([value], nothing)
    node.harness.settle()
    joined = rewritten([value for value in node.stored() if value.base < 10], {1, 8}, 100, leader.log.aborted)
    assert node.install(0, 10, joined)
    expected = sum(len(value.value) for value in node.stored() if 5 < value.end <= 11)
    assert node.log.backlog_bytes(Offset(5), Offset(11)) == expected
