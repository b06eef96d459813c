"""A partition log compared with a list: after any operations, in any order of the disk's reports, and after crashes."""

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smq.raft_state.ids import Epoch, Offset, TsNs
from smq.raft_state.topic_config import Retention
from smq.records import parse_header
from smq.replication.log import log_state as log_state
from smq.replication.log import partition_log
from smq.replication.log import reader as log_reader
from smq.replication.log.lineage import EpochRun, extend_runs, runs_from
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue, build_value, parse_value
from smq.replication.ports import DataDamaged
from tests.examples import examples
from tests.unit.replication.log.support import PID, fold
from tests.unit.replication.storage.support import FakeHarness, Harness, StoreHarness, make_batch

FAR = 1 << 41  # every offset beyond 2^40


class Row(NamedTuple):
    number: int  # of the append, never used again
    created_ms: int
    stored: StoredValue


def last_ts_ns(stored: StoredValue) -> int:
    """Of the last record: each record's is one more than that of the record before it."""
    return stored.ts_ns + stored.end - 1 - stored.base


class Model(NamedTuple):
    log_start: Offset
    deleted: tuple[Row, ...]  # from the front, as far as their producers are known
    live: tuple[Row, ...]
    base_ts: int  # ts_ns before the first live row
    has_producers: bool = True

    @property
    def end(self) -> Offset:
        return self.live[-1].stored.end if self.live else self.log_start

    @property
    def last_ts(self) -> int:
        return last_ts_ns(self.live[-1].stored) if self.live else self.base_ts

    def truncated(self, cut: int) -> "Model":
        return self._replace(live=tuple(row for row in self.live if row.stored.end <= cut))

    def advanced(self, offset: Offset) -> "Model":
        if offset <= self.log_start:
            return self
        gone = tuple(row for row in self.live if row.stored.end <= offset)
        base_ts = last_ts_ns(gone[-1].stored) if gone else self.base_ts
        if offset > self.end:
            return Model(offset, (), (), base_ts, has_producers=False)
        return Model(offset, self.deleted + gone, self.live[len(gone) :], base_ts, self.has_producers)

    def producers(self) -> ProducerTable:
        table = ProducerTable()
        for row in self.deleted + self.live:
            fold(table, parse_header(row.stored.batch), row.stored.ts_ns)
        return table

    @property
    def first(self) -> Offset:
        return self.live[0].stored.base if self.live else self.end

    @property
    def size(self) -> int:
        return sum(len(row.stored.value) for row in self.live)

    def runs(self) -> list[EpochRun]:
        runs: list[EpochRun] = []
        for row in self.live:
            extend_runs(runs, row.stored.epoch, row.stored.base, row.stored.end)
        return runs


BATCHES = st.builds(
    make_batch,
    st.integers(1, 4),
    created_ms=st.integers(-3, 40),
    producer=st.one_of(
        st.just((-1, -1, -1)), st.tuples(st.integers(1, 3), st.integers(0, 1), st.sampled_from([0, 7, 2**31 - 2]))
    ),
    payload=st.binary(max_size=60),
)


class LogAgainstList(RuleBasedStateMachine):
    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in {
            "CHECKPOINT_BATCHES": 3,
            "SLICE_BATCHES": 1,
        }.items():
            self.patch.setattr(partition_log, name, value)
        self.patch.setattr(partition_log, "TAIL_BYTES_KEPT", 200)
        self.patch.setattr(log_reader, "INDEX_ROWS_PER_SCAN", 2)
        self.patch.setattr(log_state, "SMALL_TABLE_BYTES", 0)  # so that checkpoints continue each other
        self.patch.setattr(log_state, "CHAIN_ROWS_MAX", 4)
        self.model = Model(Offset(FAR), (), (), 0)
        self.log: PartitionLog
        self.count = 0
        self.done: set[int] = set()
        self.epoch = 1
        self.reads_under_way = 0
        self.snapshots: dict[int, Model] = {}

    def begin(self, harness: Harness) -> None:
        self.harness = harness
        self.log = LogStore(harness.disk).create(PID, self.model.log_start)
        harness.settle()
        self.note()

    def note(self) -> None:
        """Records what the disk holds once everything submitted so far is durable."""
        self.snapshots[self.harness.disk.submitted_seq] = self.model

    def add(self, batch: bytes, stored: StoredValue, *, base_ts: int | None = None) -> None:
        row = Row(self.count, parse_header(batch).max_timestamp, stored)
        self.model = self.model._replace(
            live=(*self.model.live, row), base_ts=self.model.base_ts if base_ts is None else base_ts
        )
        self.note()

    # ---------------------------------------------------------------------------------------- rules
    @rule(batch=BATCHES, newer=st.booleans(), gap=st.integers(1, 3))
    def append(self, batch: bytes, newer: bool, gap: int) -> None:
        self.epoch += newer
        self.count += 1
        number = self.count
        stored = self.log.append(
            batch,
            parse_header(batch),
            epoch=Epoch(self.epoch),
            ts_ns=TsNs(self.log.last_ts_ns + gap),
            done=lambda: self.done.add(number),
        )
        assert parse_value(PID, stored.value) == stored
        assert (stored.base, stored.epoch) == (self.model.end, self.epoch)
        assert bytes(stored.batch[16:]) == batch[16:]
        self.add(batch, stored)

    @rule(
        batches=st.lists(BATCHES, min_size=1, max_size=3),
        gap=st.integers(1, 3),
        below=st.integers(0, 3),
        back=st.integers(0, 5),
    )
    def append_stored(self, batches: list[bytes], gap: int, below: int, back: int) -> None:
        """As one submission, of which a truncation may leave the first ones."""
        base, ts_ns, base_ts = self.model.end, self.log.last_ts_ns + gap, None
        if not self.model.live:
            base = Offset(base - min(below, parse_header(batches[0]).last_offset_delta))
            ts_ns = max(1, ts_ns - back)
            base_ts = min(self.model.base_ts, ts_ns - 1)
        values: list[StoredValue] = []
        for batch in batches:
            value = build_value(PID, batch, parse_header(batch), base, Epoch(self.epoch), TsNs(ts_ns))
            stored = parse_value(PID, value)
            values.append(stored)
            base, ts_ns = stored.end, last_ts_ns(stored) + gap
        numbers = range(self.count + 1, self.count + 1 + len(values))
        self.log.append_stored(values, lambda: self.done.update(numbers))
        for batch, stored in zip(batches, values, strict=True):
            self.count += 1
            self.add(batch, stored, base_ts=base_ts)
            base_ts = None

    @rule(distance=st.integers(-2, 12))
    def truncate(self, distance: int) -> None:
        cut = Offset(self.model.end - distance)
        self.model = self.model.truncated(cut)
        self.log.truncate(cut)
        self.note()

    @rule(distance=st.integers(-1, 9))
    def advance_log_start(self, distance: int) -> None:
        offset = Offset(self.model.log_start + distance)
        self.model = self.model.advanced(offset)
        self.log.keep_from(max(offset, self.log.log_start))  # as a replica does
        self.log.advance_log_start(offset)
        self.note()

    @rule()
    def empty(self) -> None:
        offset = Offset(self.model.end + 1)
        self.model = self.model.advanced(offset)
        self.log.keep_from(offset)
        self.log.advance_log_start(offset)
        self.note()

    @rule()
    def settle(self) -> None:
        self.harness.settle()
        assert self.log.durable_end == self.log.appended_end
        assert (self.log.runs, self.log.size_bytes) == (self.model.runs(), self.model.size)

    @rule()
    def reopen(self) -> None:
        self.await_reads()
        self.recover(LogStore(self.harness.reopen()))
        self.snapshots = {0: self.model}

    def recover(self, store: LogStore) -> None:
        logs = store.open_all()
        assert set(logs) == {PID}
        self.log = logs[PID]
        self.log.keep_from(self.log.log_start)  # as a replica does
        assert self.log.tail_damage is None
        self.done = {row.number for row in self.model.live}

    # ----------------------------------------------------------------------------------- look-ups
    @rule(at=st.integers(-2, 20), length=st.integers(0, 9), bytes_max=st.integers(0, 600))
    def read(self, at: int, length: int, bytes_max: int) -> None:
        offset = Offset(self.model.log_start + at)
        end = Offset(offset + length)
        expected = [row.stored for row in self.model.live if row.stored.end > offset and row.stored.base < end]
        if offset < self.model.log_start or not length:
            expected = []
        found = self.log.read(offset, end, bytes_max)
        assert found == expected[: len(found)]
        assert bool(found) == bool(expected)
        assert len(found) <= 1 or sum(len(s.value) for s in found) <= bytes_max

    @rule(at=st.integers(0, 20), length=st.integers(1, 9), bytes_max=st.integers(0, 600))
    def read_later(self, at: int, length: int, bytes_max: int) -> None:
        """What is committed in between may be cut, trimmed and written again: the answer must not show it."""
        offset = Offset(self.model.log_start + at)
        end, durable_end, expected = Offset(offset + length), self.log.durable_end, self.model
        if offset >= durable_end:
            return

        def done(found: list[StoredValue] | DataDamaged | None) -> None:
            self.reads_under_way -= 1
            if found is None:
                assert self.model is not expected, "nothing has changed, so there is nothing to look at again"
                return
            assert not isinstance(found, DataDamaged), found
            stop = min(end, durable_end)
            rows = [r.stored for r in expected.live if r.stored.end > offset and r.stored.base < stop]
            assert found, "there is such a batch"
            assert found == rows[: len(found)]
            assert len(found) <= 1 or sum(len(s.value) for s in found) <= bytes_max

        self.reads_under_way += 1
        assert self.log.read_later(offset, end, bytes_max, done)

    @rule()
    def await_reads(self) -> None:
        self.harness.wait(lambda: not self.reads_under_way)

    @rule(start=st.integers(0, 12), length=st.integers(0, 20), bytes_max=st.integers(1, 2000))
    def sized_run(self, start: int, length: int, bytes_max: int) -> None:
        offset = Offset(self.model.log_start + start)
        end = Offset(offset + length)
        whole = [row.stored for row in self.model.live if row.stored.end > offset and row.stored.end <= end]
        sizes = list(itertools.accumulate(len(stored.value) for stored in whole))
        fitting = max(sum(size <= bytes_max for size in sizes), min(1, len(sizes)))
        expected = (whole[fitting - 1].end, sizes[fitting - 1]) if fitting else (offset, 0)
        assert self.log.sized_run(offset, end, bytes_max) == expected

    @rule(start=st.integers(0, 12), length=st.integers(0, 30))
    def backlog_bytes(self, start: int, length: int) -> None:
        offset = Offset(self.model.log_start + start)
        end = Offset(offset + length)
        whole = [row.stored for row in self.model.live if row.stored.end > offset and row.stored.end <= end]
        size = sum(len(stored.value) for stored in whole)
        assert self.log.backlog_bytes(offset, end) == size

    @rule(
        below=st.integers(0, 10),
        open_=st.integers(0, 6),
        age_ms=st.none() | st.integers(0, 45),
        size=st.none() | st.integers(0, 1_000),
        records=st.none() | st.integers(1, 12),
    )
    def retained_start(self, below: int, open_: int, age_ms: int | None, size: int | None, records: int | None) -> None:
        ends = [self.model.log_start, *(row.stored.end for row in self.model.live)]
        end = max(e for e in ends if e <= max(self.model.log_start, self.model.end - below))
        stop = Offset(max(self.model.log_start, end - open_))
        expected = self.model.log_start
        for i, row in enumerate(self.model.live):
            header = parse_header(row.stored.batch)
            later = [r for r in self.model.live[i + 1 :] if r.stored.end <= end]
            newest_ms = header.max_timestamp if header.max_timestamp >= 0 else row.stored.ts_ns // 1_000_000
            is_old = age_ms is not None and newest_ms < 40 - age_ms
            has_bytes = size is not None and sum(len(r.stored.value) for r in later) >= size
            has_records = records is not None and end - row.stored.end >= records
            if row.stored.end > stop or not (is_old or has_bytes or has_records):
                break
            expected = row.stored.end
        limits = Retention(age_ms, size, records)
        found = self.log.retained_start(end, stop, limits, 40)
        if self.model.live and expected == self.model.end and found[1]:  # the last batch goes alone
            expected = max(self.model.live[-1].stored.base, self.model.log_start)
        else:
            assert expected < self.model.end or len(self.model.live) <= 1
        assert found[0] == expected

    @rule(distance=st.integers(-3, 20))
    def find_ts_ns(self, distance: int) -> None:
        ts_ns = self.model.base_ts + distance
        expected = next((row.stored for row in self.model.live if last_ts_ns(row.stored) >= ts_ns), None)
        found = self.log.find_ts_ns(ts_ns)
        assert (found and (found.base, found.epoch, found.ts_ns)) == (
            expected and (expected.base, expected.epoch, expected.ts_ns)
        )

    @rule(created_ms=st.integers(-5, 45))
    def find_timestamp(self, created_ms: int) -> None:
        bases = [row.stored.base for row in self.model.live if row.created_ms >= created_ms]
        found = self.log.find_timestamp(created_ms)
        assert (found.base if found else None) == (bases[0] if bases else None)
        if found is not None:
            following = self.log.find_timestamp(created_ms, after=found)
            assert (following.base if following else None) == (bases[1] if len(bases) > 1 else None)

    # --------------------------------------------------------------------------------- invariants
    @invariant()
    def log_is_the_models(self) -> None:
        log, model = self.log, self.model
        seen = (log.log_start, log.appended_end, log.last_ts_ns)
        assert seen == (model.log_start, model.end, model.last_ts), (
            seen,
            (model.log_start, model.end, model.last_ts),
        )
        # The batches before log_start go in slices, each after the disk has reported the one before it. Until then
        # their lineage and size are still there, invisible to readers.
        assert runs_from(log.runs, model.first) == model.runs()
        assert log.size_bytes >= model.size
        assert (log.has_producers, log.producers) == (model.has_producers, model.producers())

    @invariant()
    def durable_end_is_what_was_reported(self) -> None:
        log, model = self.log, self.model
        assert log.durable_end <= log.appended_end
        for row in model.live:
            assert (row.number in self.done) == (row.stored.end <= log.durable_end)

    @invariant()
    def every_batch_can_be_read(self) -> None:
        found: list[StoredValue] = []
        at = self.model.log_start
        while batches := self.log.read(at, Offset(1 << 62), 150):
            found.extend(batches)
            at = batches[-1].end
        assert found == [row.stored for row in self.model.live]

    def teardown(self) -> None:
        self.harness.close()
        self.patch.undo()


class FakeLogAgainstList(LogAgainstList):
    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeHarness()
        self.begin(self.fake)

    @rule(steps=st.integers(1, 3))
    def disk_goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self.fake.clock.step()

    @rule()
    def crash(self) -> None:
        """Every reported submission survives; of the others, a prefix."""
        reported = self.fake.disk.durable_seq
        # A slice of deletions that follows another by itself is a submission, too, invisible to the model.
        newest = max(seq for seq in self.snapshots if seq <= reported)
        candidates = [m for seq, m in self.snapshots.items() if seq >= newest]
        store = LogStore(self.fake.crash())
        log = store.open_all()[PID]
        stored = log.read(log.log_start, Offset(1 << 62), 1 << 30)
        for model in candidates:
            found = (log.log_start, log.appended_end, log.last_ts_ns)
            if (model.log_start, model.end, model.last_ts) == found and (stored == [row.stored for row in model.live]):
                self.model = model
                break
        else:
            raise AssertionError(f"{log} is none of what was submitted after {reported}: {candidates}")
        self.recover(store)
        self.snapshots = {0: self.model}
        self.reads_under_way = 0  # they died with the process


class LmdbLogAgainstList(LogAgainstList):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="smq-test-"))
        self.begin(StoreHarness(self.path / "node"))

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


TestFakeLogAgainstList = FakeLogAgainstList.TestCase
TestFakeLogAgainstList.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestLmdbLogAgainstList = LmdbLogAgainstList.TestCase
TestLmdbLogAgainstList.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
