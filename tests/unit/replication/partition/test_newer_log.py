"""A node whose state is older than what its log has installed: it has just started, and its Raft log is behind."""

import pytest

from smq.raft_state.ids import Offset
from smq.raft_state.state import Segment
from smq.replication.log.segments import HeldSegments
from smq.replication.log.state import sealed
from smq.replication.partition.compaction.segments import lowest_behind
from smq.replication.ports import DataDamaged
from tests.unit.replication.support import Host, batch
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


def test_a_newer_log_is_not_read_by_the_marks_of_an_older_state(host: Host) -> None:
    assert host.live.readable_end == 4
    host.live.log.segments.compactions = 3
    assert host.live.readable_end == 0


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
