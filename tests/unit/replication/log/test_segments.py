"""Compacted segments in a log: installed, served, kept through restarts, power cuts, cuts and deletions at the start.

A leader's log compacts itself, a follower's takes what the leader's has: as appends above what is compacted, and as
whole segments below. Both must hold the same bytes in the end, on both kinds of disk. Aborted transactions lose their
records; what is open, stable and aborted is as in a list of all batches that there ever were.
"""

import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smq.raft_state.ids import Epoch, Offset, ProducerId, TsNs
from smq.records import NewRecord, decode_batch, encode_batch, marker_batch, parse_header
from smq.replication.api import Aborted
from smq.replication.log import partition_log
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction.cleaner import is_aborted
from smq.replication.log.compaction.segment_writer import SegmentWriter
from smq.replication.log.log_state import CHECKPOINT_BATCHES
from smq.replication.log.segments import digest_of, own_digest, replaced
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import (
    TIME_APPEND,
    TIME_CREATE,
    BatchDamaged,
    StoredValue,
    base_of_key,
    create_ms_of_key,
    times_range,
)
from smq.replication.ports import Delete, Put, Table
from tests.examples import examples
from tests.unit.replication.log.committed_readers import check_readers, of_fetch
from tests.unit.replication.log.support import PID, flipped
from tests.unit.replication.storage.support import FakeHarness, Harness, StoreHarness

EVERY = "CHECKPOINT_BATCHES"
PRODUCERS = (1, 2)  # of transactions


class Row(NamedTuple):
    """A batch of a transaction, as it was written."""

    base: int
    end: int
    producer: int
    kind: str  # data, commit, abort


def nothing() -> None:
    pass


class Node:
    """A log on a disk of its own."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.log = LogStore(harness.disk, tail_bytes_kept=0).create(PID, Offset(0))
        harness.settle()

    def reopen(self, *, crash: bool = False) -> None:
        disk = self.harness.crash() if crash and isinstance(self.harness, FakeHarness) else self.harness.reopen()
        self.log = LogStore(disk, tail_bytes_kept=0).open_all()[PID]
        self.log.keep_from(Offset(0))
        self.harness.settle()

    def append(self, keys: list[int], epoch: int, created_ms: int | None = None) -> None:
        log = self.log
        time_ms = log.appended_end if created_ms is None else created_ms
        records = [NewRecord(b"%d" % key, b"v" * 20, time_ms) for key in keys]
        batch = encode_batch(records, producer_id=7, producer_epoch=0, base_sequence=log.appended_end)
        self.write(batch, epoch)

    def write(self, batch: bytes, epoch: int) -> int:
        """Returns the base offset."""
        ts_ns = TsNs(self.log.last_ts_ns + 5)
        return self.log.append(batch, parse_header(batch), epoch=Epoch(epoch), ts_ns=ts_ns, done=nothing).base

    def stored(self, start: int = 0) -> list[StoredValue]:
        """Everything on disk and in memory from the batch at `start` on."""
        log, at, found = self.log, max(start, self.log._first), []
        while at < log.appended_end:
            found += log.read_segment(Offset(at), log.durable_end, 1 << 30) or log.read(Offset(at), log.appended_end, 1)
            at = found[-1].end
        return found

    def install(self, start: int, end: int, values: list[StoredValue], under_way: Callable[[], None] = nothing) -> bool:
        """`under_way` runs while the segment may be on the disk, or not."""
        old = replaced(self.log, Offset(start), Offset(end))
        done: list[bool] = []
        took = self.log.install(Offset(start), Offset(end), digest_of(values), values, old, lambda: done.append(True))
        under_way()
        self.harness.settle()
        assert not took or done or not isinstance(self.harness, FakeHarness)
        return took


def rewritten(
    values: list[StoredValue], removed: set[int], producers_start: int, aborted: AbortedTransactions
) -> list[StoredValue]:
    writer = SegmentWriter(PID, Offset(producers_start))
    for value in values:
        if is_aborted(value, aborted):
            writer.add_aborted(value)
        else:
            writer.add(value, lambda records: [offset not in removed for offset, *_ in records])
    return writer.finish().values


def in_transaction(times: list[int], producer: int, sequence: int) -> bytes:
    """A batch that a producer writes in a transaction: records that were created at these times."""
    return encode_batch(
        [NewRecord(b"k", b"v" * 20, created_ms) for created_ms in times],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=sequence,
        is_transactional=True,
    )


def records_in(value: StoredValue) -> list[int]:
    """The offsets of its records."""
    header = parse_header(value.batch)
    return [r.offset for r in decode_batch(value.batch)] if header.count and not header.is_control else []


def create_rows(node: Node) -> list[tuple[int, int]]:
    """Create time and base of each."""
    keys = node.harness.disk.scan_keys(Table.TIMES, *times_range(PID, TIME_CREATE))
    return [(create_ms_of_key(key), base_of_key(key)) for key in keys]


def compacted(times: list[int], end: int, removed: set[int]) -> Node:
    """A log of one record in each batch, created at these times, and compacted up to `end`: that may go."""
    node = Node(FakeHarness(0))
    for key, created_ms in enumerate(times):
        node.append([key], 0, created_ms)
    node.harness.settle()
    old = node.log.read_segment(Offset(0), Offset(end), 1 << 20)
    assert node.install(0, end, rewritten(old, removed, 0, node.log.aborted))
    node.log.keep_from(Offset(end))
    return node


def found_at(node: Node, create_ms: int) -> int | None:
    found = node.log.find_timestamp(create_ms)
    return found.base if found is not None else None


def test_the_times_of_records_that_were_compacted_away_go_with_what_is_left_of_their_batches() -> None:
    node = compacted(list(range(8)), 7, {4, 5, 6})
    node.log.advance_log_start(Offset(7))
    node.harness.settle()
    assert create_rows(node) == [(7, 7)]
    assert [found_at(node, create_ms) for create_ms in range(4, 9)] == [7, 7, 7, 7, None]


def test_records_older_than_one_that_was_compacted_away_and_deleted_are_found() -> None:
    """Only the newest record so far has a row, so the one at 1 has none."""
    node = compacted([10, 7, 12], 1, {0})
    node.log.advance_log_start(Offset(1))
    node.harness.settle()
    assert create_rows(node) == [(12, 2)]
    for _ in range(2):
        assert [found_at(node, create_ms) for create_ms in (6, 7, 8, 12, 13)] == [1, 1, 2, 2, None]
        node.reopen()


def test_records_older_than_one_that_was_compacted_away_are_found_after_a_cut() -> None:
    node = compacted([10, 7, 6, 20], 2, {0})
    node.log.truncate(Offset(3))
    node.append([3], 0, 8)
    node.harness.settle()
    for _ in range(2):
        assert [found_at(node, create_ms) for create_ms in (6, 7, 11)] == [0, 0, None]
        node.reopen()
    assert create_rows(node) == [(10, 0)]


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("damaged", range(4))
def test_a_lost_index_row_of_what_is_compacted_does_not_falsify_the_sizes(damaged: int, is_missing: bool) -> None:
    node = Node(FakeHarness(0))
    for key in range(6):
        node.append([key, key + 1], 0)
    node.harness.settle()
    old = node.stored()
    at, row = node.harness.disk.scan(Table.TIMES, *times_range(PID, TIME_APPEND), limit=6)[damaged]
    lost = Delete(Table.TIMES, at, at + b"\x00") if is_missing else Put(Table.TIMES, at, flipped(row, 60))
    node.harness.disk.submit([lost], nothing)
    node.harness.settle()
    with pytest.raises(BatchDamaged):
        node.log.backlog_bytes(Offset(0), Offset(12))
    assert node.install(0, 8, rewritten(old[:4], {0, 1, 2, 5}, 0, node.log.aborted))
    sizes = [len(stored.value) for stored in node.stored()]
    assert node.log.size_bytes == sum(sizes) < sum(len(stored.value) for stored in old)
    assert node.log.backlog_bytes(Offset(0), Offset(12)) == sum(sizes)


def test_records_older_than_one_that_was_compacted_away_are_found_after_the_log_has_grown_by_a_segment() -> None:
    node, leader = compacted([10, 7, 6], 2, {0}), compacted([10, 7, 6, 8, 20], 2, {0})
    node.log.truncate(Offset(2))
    node.harness.settle()
    assert node.install(2, 5, leader.log.read_segment(Offset(2), Offset(5), 1 << 20))
    for _ in range(2):
        assert [found_at(node, create_ms) for create_ms in (6, 7, 11, 21)] == [0, 0, 4, None]
        node.reopen()


def test_a_segment_below_the_log_start_does_not_come_back() -> None:
    node = compacted([10, 7, 6, 8, 20], 2, set())
    values, log = node.stored()[:2], node.log
    log.keep_from(values[-1].end)
    log.advance_log_start(values[-1].end)
    node.harness.settle()
    left = log.size_bytes, node.stored()
    assert not node.install(0, values[-1].end, values)
    assert (log.size_bytes, node.stored()) == left


class Segments(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["fake", "lmdb"]))
    def begin(self, kind: str) -> None:
        # Checkpoints between all batches: most lie inside a compacted batch later.
        vars(partition_log)[EVERY] = 1
        self.folder = Path(tempfile.mkdtemp(prefix="smq-segments-"))
        self.nodes = [Node(FakeHarness(n) if kind == "fake" else StoreHarness(self.folder / str(n))) for n in range(2)]
        self.leader, self.follower = self.nodes
        self.borders: dict[int, int] = {}  # start -> end of the segments of the state
        self.gone: set[int] = set()
        self.rows: list[Row] = []
        self.sequences = dict.fromkeys(PRODUCERS, 0)
        self.epoch = 0
        self.producers_start = 0
        for keys in range(8):
            self.leader.append([keys % 3] * (1 + keys % 3), keys // 3)
        self.epoch = 2
        self.leader.harness.settle()

    @property
    def compacted_end(self) -> int:
        return max(self.borders.values(), default=0)

    @rule(
        batches=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
        created_ms=st.one_of(st.none(), st.integers(0, 60)),
    )
    def append(self, batches: list[list[int]], created_ms: int | None) -> None:
        for keys in batches:
            self.leader.append(keys, self.epoch, created_ms)
        self.leader.harness.settle()

    @rule(count=st.integers(1, 3), producer=st.sampled_from(PRODUCERS))
    def write_in_transaction(self, count: int, producer: int) -> None:
        batch = in_transaction([self.leader.log.appended_end] * count, producer, self.sequences[producer])
        self.sequences[producer] += count
        self.note(self.leader.write(batch, self.epoch), producer, "data")

    @rule(producer=st.sampled_from(PRODUCERS), is_commit=st.booleans())
    def end_transaction(self, producer: int, is_commit: bool) -> None:
        if producer in self.transactions(self.leader.log.appended_end)[0]:
            data = marker_batch(producer_id=producer, producer_epoch=0, is_commit=is_commit, timestamp_ms=5)
            self.note(self.leader.write(data, self.epoch), producer, "commit" if is_commit else "abort")

    @rule(ends=st.lists(st.booleans(), min_size=2, max_size=5), producer=st.sampled_from(PRODUCERS))
    def end_one_after_another(self, ends: list[bool], producer: int) -> None:
        for is_commit in ends:
            self.write_in_transaction(1, producer)
            self.end_transaction(producer, is_commit=is_commit)

    def note(self, base: int, producer: int, kind: str) -> None:
        self.rows.append(Row(base, self.leader.log.appended_end, producer, kind))
        self.leader.harness.settle()

    def transactions(self, end: int) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """Of a log up to `end`: where each open one begins, and (marker, first, producer) of those aborted."""
        first: dict[int, int] = {}
        aborted = []
        for base, stop, producer, kind in self.rows:
            if stop > end:
                break
            if kind == "data":
                first.setdefault(producer, base)
            else:
                began = first.pop(producer)
                aborted += [(base, began, producer)] if kind == "abort" else []
        return first, aborted

    @rule()
    def begin_epoch(self) -> None:
        self.epoch += 1

    @precondition(lambda self: self.leader.log.appended_end > self.leader.log.log_start)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """A stretch of whole segments, or what follows the last one, with any records removed."""
        log = self.leader.log
        first = min(self.borders, default=self.leader.stored(log.log_start)[0].base if not self.borders else 0)
        if not self.borders:
            first = next(v.base for v in self.leader.stored() if v.end > log.log_start)
        ends = sorted({*self.borders.values(), *(v.end for v in self.leader.stored() if v.end > self.compacted_end)})
        start = data.draw(st.sampled_from(sorted({*self.borders, self.compacted_end if self.borders else first})))
        stable = min(self.transactions(log.appended_end)[0].values(), default=log.appended_end)
        above = [end for end in ends if max(start, log.log_start) < end <= stable]
        if not above:
            return
        end = data.draw(st.sampled_from(above))
        values = [v for v in self.leader.stored(start) if start <= v.base < end]
        aborted = {offset for v in values if is_aborted(v, log.aborted) for offset in records_in(v)}
        offsets = sorted({offset for v in values for offset in records_in(v)} - aborted)
        removed = set(data.draw(st.lists(st.sampled_from(offsets), unique=True))) if offsets else set()
        self.producers_start = max(self.producers_start, data.draw(st.one_of(st.just(end), st.integers(0, end))))
        self.leader.log.forget_producers(Offset(self.producers_start))
        self.follower.log.forget_producers(Offset(self.producers_start))
        new = rewritten(values, removed, self.producers_start, log.aborted)
        whole = self.leader.stored()
        other = [v for v in whole if v.base < start] + new + [v for v in whole if v.base >= end]

        def either_is_read() -> None:
            for found in (whole, other):
                self.check_readers_of(self.leader, [v for v in found if v.end > log.log_start])

        assert self.leader.install(start, end, new, either_is_read)
        self.gone |= removed | aborted
        self.borders = {s: e for s, e in self.borders.items() if e <= start or s >= end} | {start: end}

    @rule(data=st.data())
    def bring_older_bytes_back(self, data: st.DataObject) -> None:
        """The leader of a segment has ended before it sent it, and the next one puts its own bytes in its place."""
        found = []
        for start, end in self.borders.items():
            values = [v for v in self.follower.stored(start) if start <= v.base < end]
            is_whole = values and (values[0].base, values[-1].end) == (start, end)
            if is_whole and not self.leader.log.segments.holds(Offset(start), Offset(end), digest_of(values)):
                found.append((start, end, values))
        if found:
            assert self.leader.install(*data.draw(st.sampled_from(found)))

    @rule(times=st.integers(1, 4), count=st.integers(1, 5))
    def replicate(self, times: int, count: int) -> None:
        for _ in range(times):
            self.replicate_once(count)

    def replicate_once(self, count: int) -> None:
        """The next segment that differs, or the next batches above all of them."""
        log = self.follower.log
        for start, end in sorted(self.borders.items()):
            digest = self.leader.log.segments.digest_at(Offset(start))
            if end > log.log_start and log.segments.end_of(Offset(start), digest) != end:
                if log.appended_end >= start or log.appended_end == log.log_start:
                    values = [v for v in self.leader.stored(start) if start <= v.base < end]
                    if values and values[0].base == start:
                        self.follower.install(start, end, values)
                return
        if log.appended_end < self.compacted_end:
            return
        for value in self.leader.stored(log.appended_end)[:count]:
            if value.base == log.appended_end or value.base <= log.log_start == log.appended_end:
                log.append_stored([value], nothing)
        self.follower.harness.settle()

    @precondition(lambda self: self.leader.log.appended_end > self.leader.log.log_start)
    @rule(data=st.data())
    def advance_log_start(self, data: st.DataObject) -> None:
        log = self.leader.log
        start = min(log.log_start + data.draw(st.integers(1, 6)), log.appended_end)
        self.borders = {s: e for s, e in self.borders.items() if e > start}
        for node in self.nodes:
            node.log.keep_from(Offset(min(self.borders, default=start)))
            is_passed = start > node.log.appended_end
            node.log.advance_log_start(Offset(start))
            if is_passed:
                node.log.adopt_producers(self.leader.log.producers_at(Offset(start)))
            node.harness.settle()

    @rule(data=st.data())
    def truncate_follower(self, data: st.DataObject) -> None:
        log = self.follower.log
        cut = data.draw(st.integers(0, 3))
        log.truncate(Offset(max(self.compacted_end, log.log_start, log.appended_end - cut)))
        self.follower.harness.settle()

    @rule(number=st.integers(0, 1), crash=st.booleans())
    def restart(self, number: int, crash: bool) -> None:
        self.nodes[number].reopen(crash=crash)
        self.nodes[number].log.forget_producers(Offset(self.producers_start))
        self.nodes[number].log.keep_from(Offset(min(self.borders, default=self.nodes[number].log.log_start)))
        self.nodes[number].harness.settle()

    @invariant()
    def logs_are_whole(self) -> None:
        for node in getattr(self, "nodes", ()):
            log = node.log
            assert log.tail_damage is None
            assert not log.damaged_batches
            values = node.stored()
            assert all(a.end == b.base for a, b in pairwise(values))
            offsets = {offset for v in values for offset in records_in(v)}
            markers = {row.base for row in self.rows if row.kind != "data"}
            expected = set(range(log.log_start, log.appended_end)) - self.gone - markers
            assert expected <= offsets, "no record is missing but those that were removed"
            size = sum(len(v.value) for v in values if v.end > log._base.end)
            assert log.size_bytes == size
            infos = list(log._durable_infos(0, log._first))
            assert [(i.base, i.end, i.ts_ns) for i in infos] == [(v.base, v.end, v.ts_ns) for v in values]

    @invariant()
    def transactions_are_as_they_were_written(self) -> None:
        """From memory, and as a fold over the batches that are left. A log that ends inside what is compacted may lack
        the control batch that ends its transactions: it is not read, and gets the segment whole."""
        for node in getattr(self, "nodes", ()):
            log = node.log
            opened, aborted = self.transactions(log.appended_end)
            refolded = log._state_up_to(log.appended_end, log._base.copy())
            is_read = log.appended_end >= self.compacted_end
            for producers in (log.producers, refolded.producers) if is_read else ():
                found = {p: at for p in PRODUCERS if (at := producers.open_from(p)) is not None}
                assert found == opened
                assert producers.stable_end(log.appended_end) == min(opened.values(), default=log.appended_end)
            folded, end = log._fold_aborted()
            assert end == log.appended_end
            assert {a[:3] for a in log.aborted} <= set(aborted)
            assert log._state.aborted - log._base.aborted == len(log.aborted)
            # What is named of them is the same, whatever else the fold finds where it begins inside a segment.
            written = AbortedTransactions([Aborted(Offset(m), Offset(f), ProducerId(p)) for m, f, p in aborted])
            values = node.stored(log.log_start)
            for at in range(0, len(values), 3):
                expected = [a[:3] for a in of_fetch(values[at:], written)]
                for index in (log.aborted, AbortedTransactions(folded)):
                    assert [a[:3] for a in of_fetch(values[at:], index)] == expected

    @invariant()
    def no_aborted_record_is_visible(self) -> None:
        ends = {row.base: row.kind for row in self.rows if row.kind != "data"}
        for node in getattr(self, "nodes", ()):
            hidden = {a[1:] for a in self.transactions(node.log.appended_end)[1]}
            for value in node.stored(node.log.log_start):
                header = parse_header(value.batch)
                aborted = {o for o in records_in(value) if self.began(o) in hidden}
                if header.is_control:
                    assert value.base in ends
                elif header.is_transactional:
                    assert not aborted or node.log.aborted.covers(ProducerId(header.producer_id), value.base)
                else:
                    assert not aborted
            self.check_readers_of(node, node.stored(node.log.log_start))

    def check_readers_of(self, node: Node, values: list[StoredValue]) -> None:
        opened, aborted = self.transactions(node.log.appended_end)
        stable = min(opened.values(), default=node.log.appended_end)
        hidden = {a[1:] for a in aborted}
        read = [value for value in values if value.end <= stable]
        check_readers(read, node.log.aborted, lambda base: self.began(base) in hidden)

    def began(self, offset: int) -> tuple[int, int] | None:
        """First offset and producer of the transaction that wrote this record."""
        first: dict[int, int] = {}
        for base, end, producer, kind in self.rows:
            if kind == "data":
                first.setdefault(producer, base)
                if base <= offset < end:
                    return first[producer], producer
            else:
                first.pop(producer)
        return None

    @invariant()
    def time_lookups_find_every_record(self) -> None:
        for node in getattr(self, "nodes", ()):
            log = node.log
            for value in node.stored(log.log_start):
                header = parse_header(value.batch)
                if header.count and value.base >= log.log_start:
                    found = log.find_timestamp(header.max_timestamp)
                    assert found is not None
                    assert found.base <= value.base

    @invariant()
    def segments_of_the_state_are_kept_in_whole(self) -> None:
        if getattr(self, "borders", None):
            assert self.leader.log._first <= min(self.borders)

    @invariant()
    def held_segments_have_their_digest(self) -> None:
        for node in getattr(self, "nodes", ()):
            for start, end, digest in node.log.segments._rows():
                if node.log.holds(start):
                    assert own_digest(node.log, start, end) == digest

    def teardown(self) -> None:
        for node in getattr(self, "nodes", ()):
            node.harness.close()
        if hasattr(self, "folder"):
            vars(partition_log)[EVERY] = CHECKPOINT_BATCHES
            shutil.rmtree(self.folder, ignore_errors=True)


TestSegments = Segments.TestCase
TestSegments.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
