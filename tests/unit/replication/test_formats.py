"""The bytes of version 1 between nodes, in Raft's tables and of a log's checkpoints, against text dumps in
tests/transcripts/formats.

From the first release on a dump never changes: a changed format is a new version and a dump of its own. Commands,
replies and the snapshot have theirs in tests/unit/raft_state, batches in log/test_stored_batch.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import get_args
from unittest.mock import patch

import pytest

from smq.raft_state.ids import (
    BirthId,
    DiskId,
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    ProducerEpoch,
    ProducerId,
    Sequence,
    Term,
    TsNs,
)
from smq.replication.api import Aborted
from smq.replication.log import log_state
from smq.replication.log.aborted import aborted_row, parse_aborted_row
from smq.replication.log.segments import HeldSegments
from smq.replication.log.stored_batch import BatchInfo, BatchKind
from smq.replication.net import wire
from smq.replication.net.disk_marks import MARKS, Mark
from smq.replication.net.frames import FrameKind, Hello, encode_hello, frame_header
from smq.replication.net.wire import SegmentPart, SegmentQuery, StepQuery, StepReport
from smq.replication.ports import Channel, Quorum, QuorumReplica, Table
from smq.replication.raft import messages as raft
from smq.replication.raft.journal import JournalWriter, RaftJournal, Snapshot
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.disk import FakeDisk

DUMPS = Path(__file__).parents[2] / "transcripts" / "formats"
PID = PartitionId(bytes(range(16)) + (5).to_bytes(4, "big"))
DISK = DiskId(b"d" * 16)
MARK = Mark(NodeId(2), DISK, b"s" * 8, 3, 4)

WIRE: list[wire.Message] = [
    wire.Heartbeat(Incarnation(7), (MARK, MARK), is_leaving=True, disk=wire.DiskCondition.FINE, may_found=True),
    wire.Birth(BirthId(b"b" * 16), ((NodeId(1), DISK), (NodeId(2), DISK))),
    wire.Propose(8, b"command"),
    wire.Proposed(8, wire.COMMITTED, LogIndex(9), b"reply"),
    wire.ElectionQuery(10, Term(2), ((PID, Epoch(1)),)),
    wire.ElectionReport(10, Incarnation(7), (wire.SealedLog(PID, Offset(11), wire.NO_CANDIDATE),)),
    wire.Resign(((PID, Epoch(1)),)),
    wire.Transfer(PID, Epoch(1), NodeId(3)),
    wire.ReadIndex(12),
    wire.DescribeQuorum(19),
    wire.QuorumDescribed(
        19,
        Quorum(
            leader=NodeId(1),
            term=Term(2),
            committed_end=3,
            voters=(QuorumReplica(node=NodeId(1), disk=DISK, end=4, heard_ms=-1, caught_up_ms=5),),
            observers=(QuorumReplica(node=NodeId(2), disk=DiskId(b""), end=-1, heard_ms=6, caught_up_ms=-1),),
        ),
    ),
    wire.EndsQuery(20, Incarnation(7), 21, (PID,)),
    wire.EndsReport(
        20,
        Incarnation(7),
        (
            wire.End(PID, wire.EndOutcome.KNOWN, Epoch(1), Offset(22), Offset(23), Offset(24), Offset(25)),
            wire.End(PID, wire.EndOutcome.NOT_KNOWN),
        ),
    ),
    wire.Probe(PID, Epoch(1), 13),
    wire.Ack(PID, Epoch(1), Incarnation(7), Offset(14), Offset(15), 13, True, is_full=True, is_held=True),
    wire.Append(PID, Epoch(1), 13, Offset(9), [b"one", b"two"]),
    wire.Ping(16, True),
    wire.Producers(PID, Epoch(1), 13, Offset(14), 0, 2, b"table"),
    wire.FetchBatch(PID, 17, Offset(18)),
    wire.FoundBatch(PID, 17, False, b"value"),
    wire.Sealed(PID, Epoch(1)),
    wire.Commits(((PID, Epoch(1), Offset(9)),)),
    SegmentQuery(PID, 17, Offset(18), Offset(19), b"d" * 16, Offset(18)),
    SegmentPart(PID, 17, [b"one", b"two"]),
    SegmentPart(PID, 17, [], is_busy=True),
    StepQuery(PID, 17, b"d" * 16),
    StepReport(PID, 17, True),
]
RAFT: list[raft.Message] = [
    raft.RequestVote(term=1, last_index=2, last_term=3, disk=DISK, is_admitted=True),
    raft.PreVote(term=1, last_index=2, last_term=3, disk=DISK, is_admitted=False),
    raft.Vote(term=1, disk=DISK),
    raft.PreVoteGranted(term=1, disk=DISK),
    raft.TermNotice(term=1),
    raft.TimeoutNow(term=1),
    raft.Append(
        term=1, number=2, commit=3, prev_index=4, prev_term=1, entries=[(1, bytes([raft.REGULAR]) + b"command")]
    ),
    raft.SnapshotChunk(term=1, number=2, index=3, index_term=1, size=100, crc=4, offset=5, data=b"chunk"),
    raft.AppendReply(term=1, number=2, next_index=3, success=True, reset=False, disk=DISK),
    raft.Confirm(term=1, number=2),
    raft.Confirmed(term=1, number=2, disk=DISK),
]


def wire_lines() -> Iterator[str]:
    hello = Hello(
        sender=NodeId(1),
        receiver=NodeId(2),
        channel=Channel.CONTROL,
        process=b"p" * 16,
        serial=3,
        wall_ms=7,
        cluster_id="c",
    )
    yield f"Hello {encode_hello(hello).hex()}"
    yield f"Frame {frame_header(FrameKind.MESSAGE, (b'pay', b'load')).hex()}{b'payload'.hex()}"
    for message in WIRE:
        yield f"{type(message).__name__} {b''.join(wire.encode(message)).hex()}"


def raft_lines() -> Iterator[str]:
    for message in RAFT:
        yield f"{type(message).__name__} {b''.join(raft.encode(message)).hex()}"


def journal_lines() -> Iterator[str]:
    """Of a journal with a snapshot of its second entry, a vote, and the mark of another disk."""
    scheduler = Scheduler()
    errors: list[BaseException] = []
    clock = SimClock(Process(scheduler, "node", errors.append), Machine())
    disk = FakeDisk(clock, Random(1), latency_ms=(1, 1), on_fatal=errors.append)
    journal = RaftJournal()
    journal.set_term(1, NodeId(2))
    journal.add(bytes([raft.NO_OP]), 1, 0)
    journal.add(bytes([raft.REGULAR]) + b"two", 2, 1)
    journal.add(bytes([raft.REGULAR]) + b"three", 3, 1)
    journal.commit_to(2)
    journal.compact(Snapshot(index=2, term=1, state=b"state"), 2)
    journal.keep_marks(MARKS.pack([MARK]))
    JournalWriter(disk, journal, lambda: None).flush()
    scheduler.run_for_ms(10)
    assert not errors
    for table in (Table.META, Table.RAFT_LOG, Table.RAFT_META):
        for key, value in sorted(disk.image.tables[table].items()):
            name = key.hex() if table is Table.RAFT_LOG else key.decode()
            yield f"{table.value} {name} {value.hex()}"


def checkpoint_lines() -> Iterator[str]:
    """Of a log of three epochs, whose producers write plainly, in a transaction, and after one that was aborted. The
    second checkpoint holds only what has changed."""
    state = log_state.LogState(Offset(0))
    kinds = (BatchKind.PLAIN, BatchKind.TRANSACTIONAL, BatchKind.TRANSACTIONAL, BatchKind.ABORT, BatchKind.PLAIN)
    rows: dict[Offset, bytes] = {}
    for number, (producer, kind) in enumerate(zip((40, 41, 42, 42, 40), kinds, strict=True)):
        base, width = state.end, 1 if kind == BatchKind.ABORT else 3
        found = (ProducerId(producer), ProducerEpoch(2), Sequence(3 * (number > 3)))
        ts_ns = TsNs(1_700_000_000_000_000_000 + 10 * number)
        state.add(BatchInfo(base, Offset(base + width), Epoch(1 + number // 2), ts_ns, 1_700, 90, *found, kind))
        if number >= 3:
            with patch.object(log_state, "SMALL_TABLE_BYTES", 0):
                rows[state.end] = log_state.next_checkpoint(state)
            yield f"Checkpoint {rows[state.end].hex()}"
    assert [log_state.decode_checkpoint(row).before for row in rows.values()] == [-1, 10]
    loaded = log_state.load_checkpoint(rows[state.end], rows.get)
    assert (loaded.runs, loaded.producers, loaded.aborted) == (state.runs, state.producers, 1)
    partition = log_state.PartitionRow(Offset(5), Offset(4), True)
    assert log_state.decode_partition(log_state.encode_partition(partition)) == partition
    yield f"Partition {log_state.encode_partition(partition).hex()}"
    held = HeldSegments()
    held.note_compactions(7)
    held.put(Offset(3), Offset(9), b"d" * 16)
    held.put(Offset(9), Offset(12), b"e" * 16)
    assert HeldSegments.decode(held.encode()).encode() == held.encode()
    yield f"HeldSegments {held.encode().hex()}"
    row = aborted_row(PID, Aborted(Offset(9), Offset(6), ProducerId(42)))
    assert parse_aborted_row(*row) == Aborted(Offset(9), Offset(6), ProducerId(42))
    yield f"Aborted {row[0].hex()} {row[1].hex()}"


DUMPED = {
    "wire_v1": wire_lines,
    "raft_messages_v1": raft_lines,
    "journal_v1": journal_lines,
    "checkpoints_v1": checkpoint_lines,
}


@pytest.mark.parametrize("name", DUMPED)
def test_format_has_the_bytes_of_its_dump(name: str, is_rewriting: bool) -> None:
    now = "".join(f"{line}\n" for line in DUMPED[name]())
    path = DUMPS / f"{name}.txt"
    if is_rewriting:
        path.write_text(now)
    else:
        assert now == path.read_text()


def test_every_message_is_in_a_dump() -> None:
    assert {type(message) for message in WIRE} == set(get_args(wire.Message))
    assert {type(message) for message in RAFT} == set(get_args(raft.Message))
