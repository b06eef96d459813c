"""A log that has not installed an agreed segment keeps its older bytes of it in whole: they may be the last ones."""

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.ids import Offset
from smq.replication.log.segments import NO_DIGEST, own_digest
from tests.unit.replication.partition.compaction.test_passes import agree
from tests.unit.replication.support import Host, batch
from tests.unit.replication.test_rules import append, follower, stored

LOST = b"d" * 16  # digest of other bytes of [0, 6), which no replica holds


def grown() -> Host:
    """A follower with four batches of two records each, all of them committed."""
    host = follower()
    append(host, *[stored(batch(b"v", 2), base, 1, ts_ns=10 + base) for base in range(0, 8, 2)])
    host.settle()
    host.advance(8)
    return host


def move(host: Host, log_start: int) -> None:
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(log_start)))
    host.settle()


def holds_whole(host: Host) -> bool:
    """Whether it has whole bytes of [0, 6), as a leader needs them to give the agreed ones up."""
    host.settle()
    return own_digest(host.live.log, Offset(0), Offset(6)) != NO_DIGEST


def test_a_restart_deletes_nothing_of_a_segment_that_the_log_never_had() -> None:
    """The row of the segments has none of them."""
    host = grown()
    agree(host, 6, LOST)
    move(host, 4)
    assert holds_whole(host)
    host.reopen()
    assert holds_whole(host)
    move(host, 6)
    assert not holds_whole(host), "and then it goes as a whole"


def test_a_log_opened_before_its_state_deletes_nothing() -> None:
    """The node's Raft log is behind its log: the state is that of before the segment, when the log started inside a
    batch."""
    host = grown()
    move(host, 1)
    agree(host, 6, LOST)
    move(host, 4)
    part = host.part
    newer = part.log_start, part.segments, part.compacted_end, part.compactions
    part.log_start, part.segments, part.compacted_end, part.compactions = Offset(1), [], Offset(0), 0
    host.reopen()
    assert holds_whole(host)
    part.log_start, part.segments, part.compacted_end, part.compactions = newer
    host.live.on_applied()
    assert holds_whole(host)


def test_a_restart_goes_on_with_a_deletion_once_the_state_has_the_log_start() -> None:
    host = grown()
    host.live.log.keep_from(Offset(0))  # the process dies before it deletes anything
    host.live.log.advance_log_start(Offset(4))
    host.settle()
    host.reopen()
    assert holds_whole(host)
    move(host, 4)
    assert not holds_whole(host)
    assert host.live.log.size_bytes > 0
