"""The reads of one pass of compaction: what is dirty, the newest offset of each key, the segments rewritten.

Owns how a log is walked for that, in steps that each read a bounded amount, so that its caller can pause between them.
A step runs where it may wait for the medium, on a view of the log. Every transaction that it meets has ended: the
records of aborted ones all go, and count as no version of their keys. It must never change a log, nor know time or the
replicated state: the pass says what is dirty, what was aborted, and what may go. Only the leader's compaction uses it.
"""

from itertools import islice
from typing import Final, NamedTuple

from smq.raft_state.ids import Offset, ProducerId
from smq.records import KeyedRecord
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter, readable_records
from smq.replication.log.reader import LogReader
from smq.replication.log.stored_batch import StoredValue, parse_header_of

STEP_BYTES: Final = 1 << 20  # stored bytes read by one step
DIRT_BATCHES_MAX: Final = 10_000  # looked at by one step, by their index rows: some 3 ms
NO_AGE: Final = -1


class Dirt(NamedTuple):
    """What compaction has not looked at yet, and may look at now."""

    end: Offset  # of the last batch that is old enough
    size: int
    oldest_ms: int  # the newest time in the oldest such batch; NO_AGE if there is none


class DirtScan:
    """Adds to what is `found`, which ends at a batch border, up to another. A batch with a record newer than
    `newest_ms_max`, and everything after it, stays as it is."""

    def __init__(self, found: Dirt, stop: Offset, newest_ms_max: int) -> None:
        self.found = found
        self.log_bytes = 0  # of the log up to the end of what was found, once this is done
        self._stop = stop
        self._newest_ms_max = newest_ms_max
        self.is_done = False

    def step(self, log: LogReader) -> bool:
        """As KeyScan's. It reads index rows only."""
        end, size, oldest_ms = self.found
        infos = list(islice(log.infos_between(end, self._stop), DIRT_BATCHES_MAX))
        self.is_done = len(infos) < DIRT_BATCHES_MAX
        for info in infos:
            newest_ms = info.max_timestamp_ms if info.max_timestamp_ms >= 0 else info.ts_ns // 1_000_000
            if newest_ms > self._newest_ms_max:
                self.is_done = True
                break
            oldest_ms = newest_ms if oldest_ms == NO_AGE else oldest_ms
            end, size = info.end, size + info.size
        self.found = Dirt(end, size, oldest_ms)
        if self.is_done:
            self.log_bytes = log.size_bytes - log.backlog_bytes(end, log.appended_end)
        return True


def is_aborted(stored: StoredValue, aborted: AbortedTransactions) -> bool:
    """Whether no committed reader returns the batch's records. Its transaction has ended."""
    _, header = parse_header_of(stored.value, verify=None)
    if not header.is_transactional or header.is_control:
        return False
    return aborted.covers(ProducerId(header.producer_id), stored.base)


class Stretch(NamedTuple):
    start: Offset
    end: Offset


class KeyScan:
    """Fills a table with the keys of stretches that ascend, up to `end`: all of them, unless the table gets full."""

    def __init__(self, stretches: list[Stretch], keys_max: int, aborted: AbortedTransactions) -> None:
        offsets = sum(s.end - s.start for s in stretches)
        self.table = KeyTable(stretches[0].start, min(offsets, keys_max))
        self._stretches = stretches
        self._aborted = aborted
        self._number = 0
        self._at = stretches[0].start
        self.end = stretches[-1].end
        self.is_done = False

    def step(self, log: LogReader) -> bool:
        """False if the log no longer has what is to be read: its start has moved meanwhile. A step may be repeated."""
        if self.is_done:
            return True
        stretch = self._stretches[self._number]
        self._at = min(max(self._at, log.first), stretch.end)  # nothing needs the keys of what has been trimmed
        values = log.read_segment(self._at, stretch.end, STEP_BYTES)
        if not values and self._at < stretch.end:
            return False
        for stored in values:
            found = readable_records(stored) if not is_aborted(stored, self._aborted) else None
            if found is not None and not self.table.has_room(len(found[2]), stored.end):
                # Of a stretch before the last, the part that was read does no harm: its keys are deleted below it only.
                self.end = stored.base if self._number == len(self._stretches) - 1 else stretch.start
                self.is_done = True
                return True
            if found is not None:
                self.table.add([(key, offset) for offset, key, _ in found[2] if key is not None])
            self._at = stored.end
        if self._at >= stretch.end:
            self._number += 1
            self.is_done = self._number == len(self._stretches)
            if not self.is_done:
                self._at = self._stretches[self._number].start
        return True


class Cleaner:
    """Rewrites one segment: [start, stop), or with `bytes_max` only what fits that, but at least one batch."""

    def __init__(
        self,
        table: KeyTable,
        writer: SegmentWriter,
        aborted: AbortedTransactions,
        start: Offset,
        stop: Offset,
        *,
        drops_tombstones: bool,
        bytes_max: int | None,
    ) -> None:
        self._table = table
        self._drops_tombstones = drops_tombstones
        self._bytes_max = bytes_max
        self._stop = stop
        self._read_bytes = 0
        self._writer = writer
        self._aborted = aborted
        self.start = start
        self.at = start  # where the next batch begins
        self.is_done = False

    def extend(self, stop: Offset, bytes_max: int) -> bool:
        """Takes the next stretch in, if no more than that has been read yet. Between two steps only, once it is
        done."""
        is_small = self._bytes_max is None and self._read_bytes <= bytes_max
        if is_small:
            self._stop, self.is_done = stop, False
        return is_small

    def step(self, log: LogReader) -> bool:
        """As KeyScan's. Also False if no batch begins where the last step ended: others have been installed since."""
        values = log.read_segment(self.at, self._stop, STEP_BYTES)
        if self.at < self._stop and (not values or values[0].base != self.at):
            return False
        for stored in values:
            size = self._read_bytes + len(stored.value)
            if self._bytes_max is not None and self._read_bytes and size > self._bytes_max:
                self.is_done = True
                return True
            if is_aborted(stored, self._aborted):
                self._writer.add_aborted(stored)
            else:
                self._writer.add(stored, self._select)
            self.at, self._read_bytes = stored.end, size
        self.is_done = self.at >= self._stop
        return True

    @property
    def has_unread(self) -> bool:
        """A batch of this segment stays as it is, with older records of any key: no tombstone above it may go."""
        return self._writer.has_unread

    def finish(self, _log: LogReader) -> Rewritten:
        """A step of its own: it compresses, and computes every CRC."""
        return self._writer.finish()

    def _select(self, records: list[KeyedRecord]) -> list[bool]:
        """The last record of each key stays, as do records without one."""
        drops = self._drops_tombstones and not self._writer.has_unread
        newest = iter(self._table.newest([key for _, key, _ in records if key is not None]))
        return [
            key is None or (offset >= next(newest) and not (drops and is_tombstone))
            for offset, key, is_tombstone in records
        ]
