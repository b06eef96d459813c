"""The reads of a partition's log: batches by offset, look-ups by time, and the state at any batch boundary.

Owns the way from an offset or a time to a batch, through the in-memory tail or the disk, past damaged rows. It reads
the disk below `durable_end` only, so that a queued change is never seen half-applied. Every read here waits for the
medium if it has to. There are two kinds of LogReader: PartitionLog, on the loop, and a `frozen` one, which a look-up
reads on another thread. It must never change anything: PartitionLog does. This package and the partitions import it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from smq.raft_state.ids import Offset, PartitionId, TsNs
from smq.raft_state.topic_config import Retention
from smq.replication.log.lineage import EpochRun
from smq.replication.log.log_state import NOT_SAVED, LogState, checkpoint_key, load_checkpoint
from smq.replication.log.producers import ProducerTable
from smq.replication.log.stored_batch import (
    INT64_MAX,
    TIME_APPEND,
    TIME_CREATE,
    BatchDamaged,
    BatchInfo,
    StoredValue,
    after_append_time,
    append_time_of_key,
    base_of_key,
    batch_key,
    create_ms_of_key,
    create_time_key,
    envelope_crc,
    info_of_stored,
    parse_index_row,
    parse_value,
    partition_name,
    times_range,
)
from smq.replication.ports import DataDamaged, Rows, Table

INDEX_ROWS_PER_SCAN: Final = 1024  # some 0.3 ms and 100 KB
SIZED_RUN_BATCHES_MAX: Final = 32_768  # some 15 ms of the node's loop; a shorter answer is as correct
RETENTION_BATCHES_MAX: Final = 10_000  # looked at by one look-up


class Retained(NamedTuple):
    """What is left of a log by its limits. `is_more`: the look ended early, and more may be due."""

    start: Offset
    is_more: bool
    size: int  # of the batches before the start


class LogReader:
    """See the module."""

    def __init__(
        self, rows: Rows, pid: PartitionId, log_start: Offset, *, base: LogState, state: LogState, first: Offset
    ) -> None:
        self.pid = pid
        self.log_start = log_start
        self.durable_end = state.end
        self.rows = rows  # a disk's on the loop, or a look-up's
        self._state = state
        self._base = base  # the state before the first batch; see `log_state`
        self._first = first  # base offset of the first batch; log_start if there is none
        self.producers_start = Offset(0)  # expired producers have been removed up to there
        self._compacted_end = Offset(0)  # below it, only the borders of segments are surely batch borders
        self._tail: deque[StoredValue] = deque()  # contiguous up to appended_end; holds every batch not yet durable

    def frozen(self) -> "LogReader":
        """The log as it is now, for another thread, which gives it `rows` of its own."""
        base, state = LogState(self._base.end), LogState(self.appended_end)
        base.last_ts_ns, base.create_ms_max = self._base.last_ts_ns, self._base.create_ms_max
        base.bytes_total, state.bytes_total = self._base.bytes_total, self._state.bytes_total
        reader = LogReader(self.rows, self.pid, self.log_start, base=base, state=state, first=self._first)
        reader.durable_end, reader._tail = self.durable_end, self._tail.copy()
        reader._compacted_end = self._compacted_end
        return reader

    @property
    def appended_end(self) -> Offset:
        return self._state.end

    @property
    def first(self) -> Offset:
        """Base of the first batch that is not trimmed yet; log_start if there is none."""
        return self._first

    @property
    def base_end(self) -> Offset:
        """Batches that end at or below it belong to a compacted segment, and are not counted."""
        return self._base.end

    @property
    def last_ts_ns(self) -> TsNs:
        """Of the last record, even if it has been deleted; 0 before the first."""
        return self._state.last_ts_ns

    @property
    def size_bytes(self) -> int:
        """Of all stored batches with their envelopes."""
        return self._state.bytes_total - self._base.bytes_total

    @property
    def producers(self) -> ProducerTable:
        """Of the appended log. Truncation replaces it."""
        return self._state.producers

    @property
    def runs(self) -> list[EpochRun]:
        """The lineage of the appended log. Read-only; the list changes with the log."""
        return self._state.runs

    def __repr__(self) -> str:
        return f"<{partition_name(self.pid)} {self.log_start}..{self.durable_end}..{self.appended_end}>"

    def producers_at(self, offset: Offset) -> bytes:
        """The producer state before the batch that contains `offset`, or at the log's end, for `adopt_producers`."""
        end = max(self._boundary(offset), self._base.end)
        if end == self.appended_end:
            return self._state.producers.snapshot()
        producers = self._state_at(end).producers
        producers.forget_before(self.producers_start)
        return producers.snapshot()

    def _state_at(self, end: Offset) -> LogState:
        """The state when the log ended at `end`, the end of a batch. Raises BatchDamaged if both a batch before it and
        that batch's index row fail."""
        state = self._state_up_to(end)
        if state.end != end:
            raise BatchDamaged(self.pid, state.end, "both the batch and its index row are damaged")
        return state

    def _state_up_to(self, end: Offset, start: LogState | None = None) -> LogState:
        """As `_state_at`, but stops before the first batch that fails together with its index row. `start` is a state
        to begin with: it is changed and returned."""
        state = self._folded(start if start is not None else self._checkpoint_at_or_below(end), end)
        if state.end < end and start is None and self._compacted_end:
            # Damage that is not repaired, as the others have deleted what it was. A checkpoint inside a batch that
            # compaction has joined is right in everything but the sizes, and the number of aborted transactions, which
            # AbortedLog corrects: such a batch has one epoch, and no producer.
            later = self._folded(self._checkpoint_at_or_below(end, may_be_inside=True), end)
            if later.end == end:
                later.bytes_total = self._base.bytes_total + self._counted_below(end)
                state = later
        state.forget_before(self._first)
        return state

    def _folded(self, state: LogState, end: Offset) -> LogState:
        """The state, with the batches up to `end`, or up to the first that fails together with its index row."""
        while state.end < end:
            with suppress(BatchDamaged):
                self._fold_rows(state, end)
            # A damaged row does no harm: the batch holds the same facts.
            if state.end < end and not self._fold_batch(state, end):
                break
        return state

    def _boundary(self, at: Offset) -> Offset:
        """The base of the batch that contains `at`; if none does, appended_end or the first batch's base. If the batch
        is damaged or missing, its index row says where it begins. If that fails, too, it is `at` itself: the nearest
        batch before it may be intact, and must not go with this one."""
        if at >= self.appended_end:
            return self.appended_end
        if at <= self._first:
            return self._first
        if self._tail and at >= self._tail[0].base:
            return next(stored.base for stored in reversed(self._tail) if stored.base <= at)
        with suppress(BatchDamaged):
            is_base = base_of_key(self._key_of_batch_at(at)) == at
            return at if is_base else self._read_disk(at, Offset(at + 1), 1)[0].base
        return self._described_boundary(at)

    def _described_boundary(self, at: Offset) -> Offset:
        start = after_append_time(self.pid, self._checkpoint_at_or_below(at).last_ts_ns)
        for key, value in self.rows_of_times(start, times_range(self.pid, TIME_APPEND)[1]):
            if base_of_key(key) >= at:
                break
            with suppress(DataDamaged):
                info = parse_index_row(key, value)
                if at < info.end <= self.durable_end:
                    return info.base
        return at

    def _counted_below(self, end: Offset) -> int:
        """The size of the batches between the base and `end`."""
        start, stop = after_append_time(self.pid, self._base.last_ts_ns), times_range(self.pid, TIME_APPEND)[1]
        return self.counted_size(self.rows_of_times(start, stop), self._first, end)

    def rows_of_times(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows on disk between two keys of table TIMES."""
        while rows := self.rows.scan(Table.TIMES, start, stop, limit=INDEX_ROWS_PER_SCAN):
            yield from rows
            start = rows[-1][0] + b"\x00"

    def counted_size(self, rows: Iterable[tuple[bytes, bytes]], start: Offset, end: Offset) -> int:
        """Of the batches on disk that begin in [start, end), as the log counts them. `rows` holds their index rows, in
        order. What a row does not say, because it is damaged or missing, the batch says: it is as long as ever, even if
        its own bytes are damaged, too."""
        sizes = _sizes_of(rows)
        known, size = next(sizes, None), 0
        for base, batch_end in self._spans(max(start, self._first), end):
            while known is not None and known[0] < base:
                known = next(sizes, None)
            if batch_end <= self.base_end:
                continue
            if known is not None and known[0] == base:
                size += known[1]
            else:
                size += len(self.rows.get(Table.BATCHES, batch_key(self.pid, base)) or b"")
        return size

    def first_on_disk(self, start: Offset, end: Offset) -> Offset:
        """Base of the first batch on disk that begins in [start, end); `end` if none does."""
        return next((base for base, _ in self._spans(max(start, self._first), end)), end)

    def _spans(self, start: Offset, end: Offset) -> Iterator[tuple[Offset, Offset]]:
        """Base and end of the batches on disk that begin in [start, end): each ends where the next begins."""
        base: Offset | None = None
        at, stop = batch_key(self.pid, start), batch_key(self.pid, end)
        while keys := self.rows.scan_keys(Table.BATCHES, at, stop, limit=INDEX_ROWS_PER_SCAN):
            for key in keys:
                if base is not None:
                    yield base, base_of_key(key)
                base = base_of_key(key)
            at = keys[-1] + b"\x00"
        if base is not None:
            yield base, end

    def _fold_rows(self, state: LogState, end: Offset) -> None:
        """Adds the batches that the index rows describe, up to the first row that is damaged or missing."""
        for info in self._infos(state.last_ts_ns, end):
            if info.base > state.end:
                return
            if info.end > state.end:
                state.add(info)

    def _fold_batch(self, state: LogState, end: Offset) -> bool:
        """Adds the next batch from its own bytes; False if it is damaged."""
        at = state.end  # also of the base: then the batch that contains it is the next
        try:
            if self._tail and at >= self._tail[0].base:
                found = self._read_tail(at, end)
            else:
                found = self._read_disk(at, min(end, self.durable_end), 1)
        except BatchDamaged:
            return False
        for stored in found[:1]:
            state.add(info_of_stored(stored))
        return bool(found)

    def _checkpoint_at_or_below(self, end: Offset, *, may_be_inside: bool = False) -> LogState:
        """The base if there is no better one. A checkpoint beyond durable_end may belong to a log that was cut. Only if
        it `may_be_inside`, one is taken that may lie inside a compacted batch."""
        stop = checkpoint_key(self.pid, min(end, self.durable_end) + 1)
        lowest = self._base.end + 1
        start = checkpoint_key(self.pid, lowest if may_be_inside else max(lowest, self._compacted_end))
        while rows := self.rows.scan(Table.CHECKPOINTS, start, stop, reverse=True, limit=1):
            stop, row = rows[0]
            try:
                state = load_checkpoint(row, self._checkpoint_row)
            except DataDamaged:
                continue  # an older checkpoint only means more to read
            if state.saved.full_end < self._base.saved.full_end:
                state.saved = NOT_SAVED  # the deletion of some of its checkpoints is queued
            return state
        return self._base.copy()

    def _checkpoint_row(self, end: Offset) -> bytes | None:
        return self.rows.get(Table.CHECKPOINTS, checkpoint_key(self.pid, end))

    def _checkpoint_from(self, start: Offset) -> LogState | None:
        """The first that no compacted batch contains, at or after `start`; None if there is no whole one."""
        at = checkpoint_key(self.pid, max(start, self._base.end + 1, self._compacted_end))
        for _, row in self.rows.scan(Table.CHECKPOINTS, at, checkpoint_key(self.pid, self.durable_end + 1), limit=1):
            with suppress(DataDamaged):
                return load_checkpoint(row, self._checkpoint_row)
        return None

    def _infos(self, after_ts_ns: TsNs, end: Offset) -> Iterator[BatchInfo]:
        """The batches appended after that time that end at or below `end`."""
        seen = Offset(0)
        for info in self._durable_infos(after_ts_ns, self._first):
            if info.end > end:
                return
            seen = info.end
            yield info
        for stored in self._tail:
            if stored.ts_ns > after_ts_ns and seen < stored.end <= end:
                yield info_of_stored(stored)

    def _live_infos(self, after_ts_ns: int) -> Iterator[BatchInfo]:
        """The batches above log_start that were appended after that time."""
        return (i for i in self._infos(TsNs(after_ts_ns), self.appended_end) if i.end > self.log_start)

    def _undurable_infos(self) -> Iterator[BatchInfo]:
        """The batches above log_start that are in memory only."""
        for stored in self._tail:
            if stored.end > max(self.durable_end, self.log_start):
                yield info_of_stored(stored)

    def _durable_infos(self, after_ts_ns: int, at_least: Offset | None = None) -> Iterator[BatchInfo]:
        """The index rows on disk, in order, of batches above log_start; `at_least` in its place includes batches that
        wait to be deleted."""
        pid, above = self.pid, self.log_start if at_least is None else at_least
        start, stop = after_append_time(pid, max(after_ts_ns, self._base.last_ts_ns)), times_range(pid, TIME_APPEND)[1]
        while rows := self.rows.scan(Table.TIMES, start, stop, limit=INDEX_ROWS_PER_SCAN):
            for key, value in rows:
                info = parse_row(pid, key, value)
                if info.end > self.durable_end:
                    return
                if info.end > above:
                    yield info
            start = rows[-1][0] + b"\x00"

    def infos_between(self, start: Offset, end: Offset) -> Iterator[BatchInfo]:
        """The durable batches that lie in [start, end), from their index rows. A batch at `start` is read first."""
        at = max(start, self._first)
        if at >= min(end, self.durable_end):
            return
        found = self._read_disk(at, min(end, self.durable_end), 1)
        for info in self._durable_infos(found[0].ts_ns - 1, at):
            if info.end > end:
                return
            yield info

    # --------------------------------------------------------------------------------------------- reading
    def read_memory(self, offset: Offset, end: Offset, bytes_max: int) -> list[StoredValue] | None:
        """As `read`, but None if the batches have to come from the disk, where `read_later` finds them."""
        if not self.log_start <= offset < min(end, self.appended_end):
            return []
        if not self._tail or offset < self._tail[0].base:
            return None
        return fitting(self._read_tail(offset, end), bytes_max)

    def crc_before(self, end: Offset) -> int:
        """Of the batch that holds the last offset below `end`: the CRC of its envelope, which covers all its bytes. 0
        if there is none, or if it is not in memory."""
        found = self.read_memory(Offset(end - 1), end, 1)
        return envelope_crc(found[0].value) if found else 0

    def read(self, offset: Offset, end: Offset, bytes_max: int) -> list[StoredValue]:
        """The batches from the one that contains `offset` to the last that starts below `end`: at least one if there
        is one, then as many as fit into `bytes_max`. A short answer does not mean the end of the log.

        Empty below log_start and at or beyond the end. Batches that are not durable yet are read from memory. Raises
        BatchDamaged if the first batch fails; batches before a damaged one are returned.
        """
        stop = min(end, self.appended_end)
        if not self.log_start <= offset < stop:
            return []
        if self._tail and offset >= self._tail[0].base:
            found = self._read_tail(offset, stop)
        else:
            found = self._read_disk(offset, min(stop, self.durable_end), bytes_max)
        return fitting(found, bytes_max)

    def read_segment(self, offset: Offset, end: Offset, bytes_max: int) -> list[StoredValue]:
        """As `read`, of what is on disk, also where it waits to be deleted. `offset` is the base of a batch."""
        stop = min(end, self.durable_end)
        if not self._first <= offset < stop:
            return []
        return fitting(self._read_disk(offset, stop, bytes_max), bytes_max)

    def holds(self, offset: Offset) -> bool:
        """Whether the log has the offset on disk. Deleted batches do not count, even if their bytes are still there. If
        only the first batch contains log_start, `durable_end` lies in it until it is written."""
        return self._first <= offset < self.durable_end != self.log_start

    def _read_tail(self, offset: Offset, stop: Offset) -> list[StoredValue]:
        found: list[StoredValue] = []
        for stored in reversed(self._tail):
            if stored.base < stop:
                found.append(stored)
            if stored.base <= offset:
                break
        found.reverse()
        return found

    def _read_disk(self, offset: Offset, stop: Offset, bytes_max: int) -> list[StoredValue]:
        start = self._key_of_batch_at(offset)
        rows = self.rows.scan(Table.BATCHES, start, batch_key(self.pid, stop), bytes_max=max(bytes_max, 1))
        return self._parse_rows(rows, start, offset, stop)

    def _parse_rows(
        self, rows: list[tuple[bytes, bytes]], start: bytes, offset: Offset, stop: Offset
    ) -> list[StoredValue]:
        """`start` is the key of the batch that contains `offset`."""
        found: list[StoredValue] = []
        expected = base_of_key(start)
        for key, value in rows:
            try:
                if not found and key != start:
                    # A key with flipped bits sorts before the batch, where every search looks. That row is damaged, but
                    # it can be found and removed only under its new key.
                    raise BatchDamaged(self.pid, offset, "it is missing")
                stored = parse_stored(self.pid, key, value)
                if stored.base != expected or (not found and stored.end <= offset):
                    raise BatchDamaged(self.pid, Offset(max(offset, expected)), "it is missing")
            except BatchDamaged:
                if not found:
                    raise
                break
            expected = stored.end
            found.append(stored)
        if not found and offset < stop:
            # A damaged tree may show a key to a backward scan and not to a forward one: this is not the end of the log.
            raise BatchDamaged(self.pid, offset, "it is missing")
        return found

    def sized_run(self, offset: Offset, end: Offset, bytes_max: int) -> tuple[Offset, int]:
        """(end, stored size) of the batches that fit into `bytes_max`, beginning with the one that contains
        `offset`. At least one batch if one ends at or below `end`, at most SIZED_RUN_BATCHES_MAX."""
        first = self.read(offset, end, 1)
        at, size = offset, 0
        if first:
            for info in islice(self._live_infos(first[0].ts_ns - 1), SIZED_RUN_BATCHES_MAX):
                if info.end > end or (size and size + info.size > bytes_max):
                    break
                at, size = info.end, size + info.size
        return at, size

    def backlog_bytes(self, offset: Offset, end: Offset) -> int:
        """Stored size of the batches from the one that contains `offset` to the last that ends at or below `end`. Reads
        no more index rows than lie between two checkpoints, twice. Raises BatchDamaged if one is damaged or missing."""
        first = self.read(offset, end, 1)
        if not first or first[0].end > end:
            return 0
        start, stop = first[0].base, self._boundary(end)
        after_ts_ns = TsNs(first[0].ts_ns - 1)
        last = self._checkpoint_at_or_below(stop)
        if last.end <= start or (next_one := self._checkpoint_from(start)) is None or next_one.end > last.end:
            return self._bytes_between(after_ts_ns, start, stop)
        middle = last.bytes_total - next_one.bytes_total
        before = self._bytes_between(after_ts_ns, start, next_one.end)
        return before + middle + self._bytes_between(last.last_ts_ns, last.end, stop)

    def _bytes_between(self, after_ts_ns: TsNs, start: Offset, end: Offset) -> int:
        """Of the batches in [start, end), the bounds of batches; they were appended after that time."""
        at, size = start, 0
        for info in self._infos(after_ts_ns, end):
            if info.base != at:
                break
            at, size = info.end, size + info.size
        if at < end:
            raise BatchDamaged(self.pid, at, "its index row is missing")
        return size

    def retained_start(self, end: Offset, stop: Offset, limits: Retention, now_ms: int) -> Retained:
        """Where the log starts once what `limits` does not retain below `stop` has gone: whole batches, from the oldest
        on. It stops early after RETENTION_BATCHES_MAX. Batches beyond `end` do not count. Raises BatchDamaged if a
        batch there is damaged or missing.

        A batch goes if its newest record is too old, or if the batches after it are as many bytes, or records, as are
        to be kept. Its age is that of its newest create time, as in Kafka; of its append time if it has none. Append
        times come from the clocks of leaders, and one that is behind would delete too early."""
        start, size, count, gone, last = self.log_start, 0, 0, 0, 0
        if limits.bytes is not None:
            size = self._live_bytes() - self.backlog_bytes(max(end, start), self.appended_end)
        before = start
        for count, info in enumerate(self._live_infos(0)):
            if count >= RETENTION_BATCHES_MAX:
                return Retained(start, True, gone)
            if limits.bytes is not None and info.base > start:
                # What is missing would count as kept. A trim during this look-up may be the reason.
                raise BatchDamaged(self.pid, start, "its index row is missing")
            size -= info.size
            newest_ms = info.max_timestamp_ms if info.max_timestamp_ms >= 0 else info.ts_ns // 1_000_000
            is_due = (
                (limits.ms is not None and newest_ms < now_ms - limits.ms)
                or (limits.bytes is not None and size >= limits.bytes)
                or (limits.records is not None and end - info.end >= limits.records)
            )
            if info.end > stop or not is_due:
                break
            before, start = start, info.end
            gone, last = gone + info.size, info.size
        if start == self.appended_end and count:
            return Retained(before, True, gone - last)  # a log is emptied in one transaction: the last batch goes alone
        return Retained(start, False, gone)

    def _live_bytes(self) -> int:
        """Size of the batches above log_start. Reads index rows up to the next checkpoint: what is below log_start may
        go during a look-up, so it cannot be taken from the size of all. Reads no batch, as backlog_bytes would: one
        that is damaged there may still go."""
        later = self._checkpoint_from(self.log_start)
        end = later.end if later is not None else self.appended_end
        after = self._state.bytes_total - later.bytes_total if later is not None else 0
        return after + sum(info.size for info in self._infos(TsNs(0), end) if info.end > self.log_start)

    def _key_of_batch_at(self, offset: Offset) -> bytes:
        """The key of the durable batch that contains `offset`."""
        start, stop = batch_key(self.pid, self._first), batch_key(self.pid, offset + 1)
        keys = self.rows.scan_keys(Table.BATCHES, start, stop, reverse=True, limit=1)
        if not keys:
            raise BatchDamaged(self.pid, offset, "it is missing")
        return keys[0]

    # ---------------------------------------------------------------------------------------- look-ups by time
    def find_ts_ns(self, ts_ns: int) -> BatchInfo | None:
        """The first batch with a record appended at `ts_ns` or later. It may begin below log_start."""
        if ts_ns > INT64_MAX:
            return None
        infos = self._live_infos(self._append_time_at(ts_ns) - 1)
        return next((info for info in infos if info.last_ts_ns >= ts_ns), None)

    def _append_time_at(self, ts_ns: int) -> int:
        """Of the last batch on disk that was appended at `ts_ns` or before. If there is none: a time that is not later
        than the first batch's."""
        start = after_append_time(self.pid, self._base.last_ts_ns)
        stop = after_append_time(self.pid, max(ts_ns, self._base.last_ts_ns))
        while keys := self.rows.scan_keys(Table.TIMES, start, stop, reverse=True, limit=INDEX_ROWS_PER_SCAN):
            for key in keys:
                if base_of_key(key) < self.durable_end:  # otherwise its batch was cut, and its deletion is queued
                    return append_time_of_key(key)
            stop = keys[-1]
        return self._base.last_ts_ns + 1

    def create_ms_max(self, end: Offset, *, after: BatchInfo | None = None) -> int:
        """The largest create time of the batches below `end` (and after `after`); INT64_MAX + 1, which no batch has, if
        there is none. The batch that contains log_start counts with all its records.

        Usually one look-up; a walk over index rows with `after`, if every batch that is left is older than the deleted
        ones, or if records with the largest times may have been compacted away.
        """
        start, stop = times_range(self.pid, TIME_CREATE)
        keys: list[bytes] = []
        if after is None and not self._compacted_end:
            keys = self.rows.scan_keys(Table.TIMES, start, stop, reverse=True, limit=INDEX_ROWS_PER_SCAN)
        for key in keys:
            # The rows ascend in time and in offset: the last readable one has the largest time of all readable ones.
            if max(self._first, self.log_start) <= base_of_key(key) < min(end, self.durable_end):
                newer = (info.max_timestamp_ms for info in self._undurable_infos() if info.end <= end)
                return max((create_ms_of_key(key), *newer))
        infos = self._live_infos(after.ts_ns if after is not None else 0)
        times = (info.max_timestamp_ms for info in infos if info.end <= end)
        return max(times, default=INT64_MAX + 1)

    def find_timestamp(self, create_ms: int, *, after: BatchInfo | None = None) -> BatchInfo | None:
        """The first batch (after `after`) that holds a record created at `create_ms` or later. It may begin
        below log_start.

        One look-up. With `after`, or if `create_ms` is not later than every deleted batch, a walk over index rows (1 M
        in some 0.5 s) instead; in the second case the first row usually answers.
        """
        if create_ms > INT64_MAX:
            return None
        if after is not None or create_ms <= self._base.create_ms_max:
            return self._walk_to_timestamp(create_ms, after.ts_ns if after is not None else 0)
        start = create_time_key(self.pid, max(create_ms, self._base.create_ms_max + 1), 0)
        keys = self.rows.scan_keys(Table.TIMES, start, times_range(self.pid, TIME_CREATE)[1], limit=1)
        # The row may belong to a batch that is not durable yet. It may also belong to a batch that contains log_start,
        # and so begins below durable_end, while no batch is durable.
        is_any_durable = self.durable_end > self.log_start
        if not keys or not is_any_durable or (base := base_of_key(keys[0])) >= self.durable_end:
            return next((info for info in self._undurable_infos() if info.max_timestamp_ms >= create_ms), None)
        if base < self.log_start:  # it contains log_start, or waits to be deleted: later batches may have no row
            return self._walk_to_timestamp(create_ms, 0)
        key = batch_key(self.pid, base)
        value = self.rows.get(Table.BATCHES, key)
        if value is None:
            raise BatchDamaged(self.pid, base, "it is missing")
        return info_of_stored(parse_stored(self.pid, key, value))

    def _walk_to_timestamp(self, create_ms: int, after_ts_ns: int) -> BatchInfo | None:
        return next((info for info in self._live_infos(after_ts_ns) if info.max_timestamp_ms >= create_ms), None)


def fitting(found: list[StoredValue], bytes_max: int) -> list[StoredValue]:
    """At least one, if there is one."""
    total = 0
    for i, stored in enumerate(found):
        total += len(stored.value)
        if total > bytes_max and i:
            return found[:i]
    return found


def parse_stored(pid: PartitionId, key: bytes, value: bytes) -> StoredValue:
    """A row of table BATCHES, verified. Raises BatchDamaged."""
    offset = base_of_key(key)
    try:
        stored = parse_value(pid, value)
    except DataDamaged as e:
        raise BatchDamaged(pid, offset, str(e)) from e
    if stored.base != offset:
        raise BatchDamaged(pid, offset, f"it holds offset {stored.base}")
    return stored


def parse_row(pid: PartitionId, key: bytes, value: bytes) -> BatchInfo:
    """An index row of table TIMES, verified. Raises BatchDamaged."""
    try:
        return parse_index_row(key, value)
    except DataDamaged as e:
        raise BatchDamaged(pid, base_of_key(key), "its row does not match its CRC-32C", key) from e


def _sizes_of(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[Offset, int]]:
    """Base and size of the batches whose index rows are whole."""
    for key, row in rows:
        with suppress(DataDamaged):
            info = parse_index_row(key, row)
            yield info.base, info.size
