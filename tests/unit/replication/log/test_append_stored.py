"""A follower's append: all batches of a message are one submission, and truncation may leave the first of them."""

import pytest

from smq.raft_state.ids import Offset
from smq.replication.log.store import LogStore
from tests.unit.replication.log.support import ALL, PID, append, nothing, reopened
from tests.unit.replication.storage.support import Harness


def test_the_batches_of_one_submission_that_a_cut_leaves_become_durable(harness: Harness) -> None:
    leader = LogStore(harness.disk).create(PID, Offset(0))
    values = [append(leader, 2) for _ in range(4)]
    leader.truncate(Offset(0))
    reports: list[Offset] = []
    leader.append_stored(values, lambda: reports.append(leader.durable_end))
    leader.truncate(Offset(4))
    assert (leader.appended_end, leader.durable_end) == (4, 0)
    harness.settle()
    assert (leader.durable_end, reports) == (4, [4])
    leader.append_stored(values[2:], lambda: reports.append(leader.durable_end))
    leader.truncate(Offset(4))  # nothing of it is left, so nothing is reported
    harness.settle()
    assert (leader.durable_end, reports) == (4, [4])
    log = reopened(harness)
    assert log.read(Offset(0), ALL, 1 << 30) == values[:2]


def test_batches_that_do_not_follow_one_another_are_refused_as_a_whole(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    first, second, third = [append(log, 2) for _ in range(3)]
    log.truncate(Offset(0))
    seen = harness.disk.submitted_seq
    for wrong in ([first, third], [first, first], [first, second._replace(ts_ns=first.ts_ns)]):
        with pytest.raises(ValueError, match="does not"):
            log.append_stored(wrong, nothing)
        assert (log.appended_end, harness.disk.submitted_seq) == (0, seen)
    log.append_stored([first, second, third], nothing)
    assert (log.appended_end, harness.disk.submitted_seq) == (6, seen + 1)
