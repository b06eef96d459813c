"""A node whose state is older than what its log has installed: it has just started, and its Raft log is behind."""

from typing import cast

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.raft_state.state import Segment
from smq.replication.api import Fetched
from smq.replication.commands.coalescing import Barriers
from smq.replication.log.log_state import sealed
from smq.replication.log.segments import HeldSegments
from smq.replication.net.wire import StepQuery, StepReport
from smq.replication.partition.compaction.segment_catch_up import Segments, combined, lowest_behind
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.older_state import Outlived
from smq.replication.partition.reads import Poll, Reads
from smq.replication.ports import DataDamaged
from tests.unit.replication.support import INCARNATION, ME, PEER_A, Host, batch, register
from tests.unit.replication.test_rules import append, follower, stored

OLD, NEW = b"o" * 16, b"n" * 16


@pytest.fixture
def host() -> Host:
    """A follower of one batch after the other, up to 4, which the state takes for compacted in two segments."""
    host = follower()
    append(host, *[stored(batch(b"v"), n, 1, ts_ns=10 + n) for n in range(4)])
    host.settle()
    host.advance(4)
    part = host.live.part
    part.segments = [Segment(start=Offset(0), digest=OLD), Segment(start=Offset(2), digest=OLD)]
    part.compacted_end, part.compactions = Offset(4), 2
    host.live.log.segments.put(Offset(0), Offset(4), NEW)
    return host


def test_an_older_segment_takes_no_place_in_a_newer_log(host: Host) -> None:
    assert lowest_behind(host.live) == (0, 2, OLD), "an older log"
    host.live.log.segments.compactions = 3
    assert lowest_behind(host.live) is None
    host.live.part.compactions = 3
    assert lowest_behind(host.live) == (0, 2, OLD), "the state has caught up"


def test_a_newer_log_says_of_no_older_state_that_it_is_in_step(host: Host) -> None:
    """It may lack what the next entries of that state put in line."""
    live = host.live
    segments = Segments(host.node_host(), host.look_ups(), {live.pid: live}.get, lambda _: None)
    live.part.segments = [Segment(start=Offset(0), digest=NEW)]

    def is_in_step() -> bool:
        segments.on_step_query(PEER_A, StepQuery(live.pid, 1, combined(live.part)))
        report = host.messages(StepReport)[-1]
        assert isinstance(report, StepReport)
        return report.is_in_step

    assert is_in_step()
    live.log.segments.compactions = 3
    assert not is_in_step()


def test_a_newer_log_is_not_read_by_the_marks_of_an_older_state(host: Host) -> None:
    assert host.live.readable_end == 4
    host.live.log.segments.compactions = 3
    assert host.live.readable_end == 0


def outlived(host: Host) -> tuple[Outlived, list[Fetched | Offset | SmqError]]:
    """The node's own view of it, and what two readers get, after the log has been found to be newer."""
    host.live.log.segments.compactions = 3
    node = host.node_host()
    seen = Outlived(node)
    seen.visit(host.live)
    found: list[Fetched | Offset | SmqError] = []
    ends = ExactEnds(node, cast(Barriers, None), {host.live.pid: host.live}.get)
    Reads(node, ends, host.repairs).fetch(Poll(host.live, Offset(0), 1 << 20, 0, found.append))
    host.look_ups().run(host.live, lambda log: log.log_start, 1_000, found.append)
    host.settle(10)
    return seen, found


def test_an_older_state_is_waited_for_before_the_process_is_registered(host: Host) -> None:
    host.reopen(INCARNATION + 1)
    seen, (fetched, _) = outlived(host)
    assert seen.warnings() == []
    assert isinstance(fetched, Fetched)
    assert fetched.batches == []


def test_a_log_that_has_outlived_the_state_is_refused_with_the_way_out(host: Host) -> None:
    """The registration of this process is applied: nothing that it had applied before is yet to come."""
    host.reopen(INCARNATION + 1)
    host.apply(register(ME, INCARNATION + 1))
    seen, found = outlived(host)
    assert ["empty its directory" in warning for warning in seen.warnings()] == [True]
    for error in found:
        assert isinstance(error, SmqError)
        assert error.code is ErrorCode.DATA_DAMAGED
        assert "empty its directory" in str(error)
    assert host.live.log.segments.compactions == 3, "the count is never lowered"


def test_the_row_keeps_the_compactions_and_one_of_the_first_version_has_none() -> None:
    held = HeldSegments()
    held.put(Offset(0), Offset(4), NEW)
    held.compactions = 7
    again = HeldSegments.decode(held.encode())
    assert (again.compactions, again.compacted_end, again.holds(Offset(0), Offset(4), NEW)) == (7, 4, True)
    first = bytes.fromhex("010000000000000004")
    older = HeldSegments.decode(sealed(first + held.encode()[17:-4]))
    assert (older.compactions, older.compacted_end, older.holds(Offset(0), Offset(4), NEW)) == (0, 4, True)
    with pytest.raises(DataDamaged, match="version 3"):
        HeldSegments.decode(sealed(b"\x03" + first[1:]))
