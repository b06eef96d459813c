"""Look-ups in a replica's log: the first record at or after a time, and the batches that fit into a size.

Owns what is asked of the log and how the answer is made of it. A look-up may read thousands of index rows, any of which
may have to come from the medium, so a thread of the disk's reads them: it sees the log as it was when the look-up
began. That no record is as late as a time is said only for the end that the partition's leader has reported (rule 25).
Nothing here may read on the loop.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, TypeVar

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset, TsNs
from smq.raft_state.topic_config import Retention
from smq.records import BatchCorrupt, BatchHeader
from smq.replication.api import Backlog, Cancel, DoneFn, PartitionEnd, SizedRun, TimeKind, TimeOffset
from smq.replication.host import Host
from smq.replication.log.decoding import decode_bounded
from smq.replication.log.reader import LogReader, Retained
from smq.replication.log.stored_batch import INT64_MAX, BatchDamaged, BatchInfo, parse_header_of
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.older_state import check_state
from smq.replication.partition.reads import READ_MS_MAX, REPAIRS_PER_POLL_MAX, read_failure
from smq.replication.partition.repair import READ_AGAIN, Outcome, Repairs, repair_error
from smq.replication.partition.replica import Replica
from smq.replication.ports import DataDamaged, GiveUp
from smq.replication.runtime.deadlines import Deadline

T = TypeVar("T")

ANY_TIMESTAMP_MS: Final = -(1 << 63)
NEXT_RECORD_BYTES: Final = 64 << 10  # some 500 batches that compaction has emptied
NEXT_RECORD_READS: Final = 16  # in one step, 1 MiB: other reads take turns with the steps on the disk's thread
AGAIN_MAX: Final = 10  # a log that is trimmed during every attempt: the caller tries again


class _LookUp:
    """One search under way: the disk's read, repairs that it waits for, and its deadline."""

    def __init__(
        self,
        host: Host,
        repairs: Repairs,
        replica: Replica,
        find: Callable[[LogReader], T],
        done: Callable[[T | SmqError], None],
    ) -> None:
        self._host = host
        self._repairs = repairs
        self._replica = replica
        self._find = find
        self._done = done
        self._attempts = self._repaired = 0
        self._reading: GiveUp | None = None
        self._deadline: Deadline | None = None
        self._is_over = False

    def begin(self, timeout_ms: int) -> None:
        at_ns = self._host.clock.monotonic_ns() + timeout_ms * 1_000_000
        self._deadline = self._host.deadlines.add(at_ns, self._expire)
        self._attempt()

    def _attempt(self) -> None:
        self._attempts += 1
        if self._host.state.partition(self._replica.pid) is None:
            self._end(SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted"))
            return
        if self._attempts > AGAIN_MAX + REPAIRS_PER_POLL_MAX:
            self._end(_not_ready("the log is being deleted at its start: try again"))
            return
        try:
            check_state(self._host, self._replica)
        except SmqError as e:
            self._end(e)
            return
        self._reading = self._replica.log.look_up(self._guarded, self._on_found)
        if self._reading is None:
            details = ErrorDetails(retry_after_ms=200)
            self._end(SmqError(ErrorCode.OVERLOADED, "too many reads wait for this node's disk", details))

    def _guarded(self, log: LogReader) -> object:
        """On the disk's thread. An unforeseen exception is the caller's error: it must not end the thread."""
        try:
            return self._find(log)
        except DataDamaged:
            raise
        except Exception as e:  # noqa: BLE001  # a read changes nothing, so the node survives any exception
            return read_failure(e)

    def _on_found(self, found: object) -> None:
        self._reading = None
        if self._is_over:
            return
        if found is None:
            self._attempt()
        elif isinstance(found, BatchDamaged):
            self._repairs.request(self._replica, found, partial(self._after_repair, found))
        elif isinstance(found, DataDamaged):
            self._end(read_failure(found))
        else:
            self._end(found)

    def _after_repair(self, damage: BatchDamaged, outcome: Outcome) -> None:
        self._repaired += 1
        if self._is_over:
            return
        if outcome in READ_AGAIN and self._repaired <= REPAIRS_PER_POLL_MAX:
            self._attempt()
        else:
            self._end(repair_error(damage, outcome if outcome not in READ_AGAIN else Outcome.INEFFECTIVE))

    def _expire(self) -> None:
        self._end(_not_ready("this node's disk takes too long to read: read from another replica, or try again"))

    def _end(self, result: object) -> None:
        if self._is_over:
            return
        self.cancel()
        self._host.deliver(partial(self._done, result))  # type: ignore[arg-type]  # what `find` has returned

    def cancel(self) -> None:
        """Its caller waits no longer."""
        self._is_over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reading is not None:
            self._reading()
            self._reading = None


def _not_ready(message: str) -> SmqError:
    return SmqError(ErrorCode.NODE_NOT_READY, message, ErrorDetails(retry_after_ms=200))


class _NoMatch:
    """No record is as late as that."""


class _TimeLookUp:
    """A look-up by time. Most find their record below the commit point that this replica knows, and need no leader.
    Otherwise the partition's exact end decides: the leader says it, and what is new below it is searched."""

    def __init__(
        self,
        host: Host,
        ends: ExactEnds,
        repairs: Repairs,
        replica: Replica,
        kind: TimeKind,
        value: int,
        done: DoneFn[TimeOffset],
        timeout_ms: int,
    ) -> None:
        self._host = host
        self._ends = ends
        self._repairs = repairs
        self._replica = replica
        self._kind = kind
        self._value = value
        self._done = done
        self._until_ns = host.clock.monotonic_ns() + timeout_ms * 1_000_000
        self._withdraw: Cancel | None = None  # the step under way
        self._is_cancelled = False

    def begin(self) -> None:
        if self._kind is TimeKind.MAX_TIMESTAMP:
            self._ask_end(Offset(0))  # any later record may have a larger one
        else:
            self._search(None)

    def _time_left_ms(self) -> int:
        """One timeout for all steps."""
        return max(0, self._until_ns - self._host.clock.monotonic_ns()) // 1_000_000

    def _search(self, exact: PartitionEnd | None) -> None:
        end = self._replica.readable_end
        find = partial(find_time, end=end, kind=self._kind, value=self._value)
        done = partial(self._on_searched, end, exact)
        look_up = _LookUp(self._host, self._repairs, self._replica, find, done)
        self._withdraw = look_up.cancel
        look_up.begin(self._time_left_ms())

    def _on_searched(self, end: Offset, exact: PartitionEnd | None, found: TimeOffset | _NoMatch | SmqError) -> None:
        if self._is_cancelled:
            return
        if not isinstance(found, _NoMatch):
            self._done(found)
        elif exact is None:
            self._ask_end(end)
        else:
            self._done(_no_record(exact) if end >= exact.hwm else self._replica.not_leader())

    def _ask_end(self, searched: Offset) -> None:
        """`searched`: no record below it is as late."""
        answer = partial(self._on_end, searched)
        self._withdraw = self._ends.ask_one(self._replica.pid, self._time_left_ms(), answer)

    def _on_end(self, searched: Offset, exact: PartitionEnd | SmqError) -> None:
        if self._is_cancelled:
            return
        if isinstance(exact, SmqError):
            self._done(exact)
        elif searched >= exact.hwm:
            self._done(_no_record(exact))
        elif self._kind is TimeKind.MAX_TIMESTAMP and self._replica.readable_end < exact.hwm:
            self._done(self._replica.not_leader())
        else:
            self._search(exact)

    def cancel(self) -> None:
        """Its caller waits no longer."""
        self._is_cancelled = True
        if self._withdraw is not None:
            self._withdraw()


def _no_record(exact: PartitionEnd) -> TimeOffset:
    return TimeOffset(exact.hwm, TsNs(-1), -1)


class _Measured(NamedTuple):
    """What a step has found: the size of the whole backlog, and the next record or where the next step goes on."""

    size_bytes: int
    ts_ns: TsNs | None  # -1: there is no record; None: there is none below `at`
    at: Offset


class _BacklogLookUp:
    """What a reader has before it. Batches without records are passed over, in as many steps as they take."""

    def __init__(
        self, host: Host, repairs: Repairs, replica: Replica, end: Offset, done: DoneFn[Backlog], timeout_ms: int
    ) -> None:
        self._host = host
        self._repairs = repairs
        self._replica = replica
        self._end = end
        self._done = done
        self._until_ns = host.clock.monotonic_ns() + timeout_ms * 1_000_000
        self._withdraw: Cancel | None = None  # the step under way
        self._is_cancelled = False

    def begin(self, offset: Offset, size_bytes: int | None = None) -> None:
        """The next step, from `offset` on."""
        find = partial(_measure, offset=offset, end=self._end, size_bytes=size_bytes)
        look_up = _LookUp(self._host, self._repairs, self._replica, find, self._on_measured)
        self._withdraw = look_up.cancel
        look_up.begin(max(0, self._until_ns - self._host.clock.monotonic_ns()) // 1_000_000)

    def _on_measured(self, found: _Measured | SmqError) -> None:
        if self._is_cancelled:
            return
        if isinstance(found, SmqError):
            self._done(found)
        elif found.ts_ns is None:
            self.begin(found.at, found.size_bytes)
        else:
            self._done(Backlog(found.size_bytes, found.ts_ns))

    def cancel(self) -> None:
        """Its caller waits no longer."""
        self._is_cancelled = True
        if self._withdraw is not None:
            self._withdraw()


class LookUps:
    """All look-ups of a node. The disk bounds how many search, and `ends` how many wait for a leader."""

    def __init__(self, host: Host, ends: ExactEnds, repairs: Repairs) -> None:
        self._host = host
        self._ends = ends
        self._repairs = repairs

    def time(self, replica: Replica, kind: TimeKind, value: int, timeout_ms: int, done: DoneFn[TimeOffset]) -> Cancel:
        """First record at or after a time, below the partition's end; call it after a barrier. NOT_LEADER if this
        replica does not reach that end and so does not know."""
        look_up = _TimeLookUp(self._host, self._ends, self._repairs, replica, kind, value, done, timeout_ms)
        look_up.begin()
        return look_up.cancel

    def sized_run(
        self, replica: Replica, offset: Offset, bytes_max: int, timeout_ms: int, done: DoneFn[SizedRun]
    ) -> Cancel:
        """The whole batches from the one that contains `offset` on, below the known commit point, that fit into
        `bytes_max`. Raises OFFSET_OUT_OF_RANGE below log_start."""
        part, end = replica.part, replica.readable_end
        if offset < part.log_start:
            details = ErrorDetails(lo=part.log_start, hi=replica.known_commit_point())
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is below {part.log_start}", details)

        def find(log: LogReader) -> SizedRun:
            return SizedRun(*log.sized_run(offset, end, bytes_max))

        look_up = _LookUp(self._host, self._repairs, replica, find, done)
        look_up.begin(max(timeout_ms, READ_MS_MAX))
        return look_up.cancel

    def run(
        self, replica: Replica, find: Callable[[LogReader], T], timeout_ms: int, done: Callable[[T | SmqError], None]
    ) -> Cancel:
        """Any search in the log."""
        look_up = _LookUp(self._host, self._repairs, replica, find, done)
        look_up.begin(timeout_ms)
        return look_up.cancel

    def backlog(self, replica: Replica, offset: Offset, end: Offset, timeout_ms: int, done: DoneFn[Backlog]) -> Cancel:
        """What a reader at `offset` has before it, up to `end`, the partition's exact high water mark. Raises
        NOT_LEADER if this replica does not reach it."""
        log_start = replica.part.log_start
        if replica.readable_end < end:
            raise replica.not_leader()
        at = max(offset, log_start)  # what retention has deleted is not there to be read

        look_up = _BacklogLookUp(self._host, self._repairs, replica, end, done, max(timeout_ms, READ_MS_MAX))
        look_up.begin(at)
        return look_up.cancel

    def retained_start(self, replica: Replica, limits: Retention, now_ms: int, done: DoneFn[Retained]) -> Cancel:
        """Where the log starts once what `limits` does not retain has gone. An open
        transaction may yet be committed: none of its records goes, though they count (rule 14)."""
        end = replica.part.hwm
        stop = min(end, replica.stable_end)

        def find(log: LogReader) -> Retained:
            return log.retained_start(end, stop, limits, now_ms)

        look_up = _LookUp(self._host, self._repairs, replica, find, done)
        look_up.begin(READ_MS_MAX)
        return look_up.cancel


def _measure(log: LogReader, *, offset: Offset, end: Offset, size_bytes: int | None) -> _Measured:
    """The append time of the first record at or after `offset`: the one there may have been compacted away, and control
    batches hold none. `size_bytes` is measured in the first step only, where it is None."""
    at = max(offset, log.log_start)
    size_bytes = log.backlog_bytes(at, end) if size_bytes is None else size_bytes
    bytes_max = 1  # the first batch usually has it
    for _ in range(NEXT_RECORD_READS):
        found = log.read(at, end, bytes_max)
        for stored in found:
            ts_ns, header = parse_header_of(stored.value, verify=None)
            first = _first_record(stored.batch, header, Offset(max(at, stored.base)))
            if first is not None:
                return _Measured(size_bytes, TsNs(ts_ns + first - stored.base), first)
        if not found:
            return _Measured(size_bytes, TsNs(-1), end)
        at, bytes_max = found[-1].end, NEXT_RECORD_BYTES
    return _Measured(size_bytes, None, at)


def _first_record(batch: memoryview, header: BatchHeader, offset: Offset) -> Offset | None:
    """Offset of the batch's first record at or after `offset`, which is in the batch."""
    if header.is_control or not header.count:
        return None
    if header.count == header.last_offset_delta + 1:
        return offset  # none is missing
    try:
        return next((Offset(record.offset) for record in decode_bounded(batch) if record.offset >= offset), None)
    except (BatchCorrupt, SmqError):
        return offset  # as in `_within`: exact to the batch only


def find_time(log: LogReader, *, end: Offset, kind: TimeKind, value: int) -> TimeOffset | _NoMatch:
    """The first record at or after a time, below `end`. Raises BatchDamaged if the batch that it points to, or a row on
    the way, fails its CRC."""
    if kind is TimeKind.MAX_TIMESTAMP:
        kind, value = TimeKind.TIMESTAMP_MS, _newest_ms(log, end)
    info = log.find_ts_ns(value) if kind is TimeKind.TS_NS else log.find_timestamp(value)
    while info is not None and info.end <= end:
        match = _within(log, info, kind, value)
        if match is not None:
            return match
        # Only if log_start cut the batch after its matching record, or compaction removed it: the next batches decide.
        if kind is TimeKind.TS_NS:
            kind, value = TimeKind.TIMESTAMP_MS, ANY_TIMESTAMP_MS  # each of their records is later
        info = log.find_timestamp(value, after=info)
    return _NoMatch()


def _newest_ms(log: LogReader, end: Offset) -> int:
    """The largest create time of the records from log_start on; INT64_MAX + 1 if there is none. The newest record of
    the batch that contains log_start may be below it."""
    newest_ms, first = log.create_ms_max(end), log.find_timestamp(ANY_TIMESTAMP_MS)
    if first is None or first.base >= log.log_start or first.max_timestamp_ms != newest_ms:
        return newest_ms
    found = log.read(log.log_start, first.end, 1)
    records = chain.from_iterable(decode_bounded(stored.batch) for stored in found)
    try:
        left_ms = max((record.timestamp_ms for record in records if record.offset >= log.log_start), default=None)
    except (BatchCorrupt, SmqError):
        return newest_ms  # as `_within`: exact to the batch only
    later_ms = log.create_ms_max(end, after=first)
    if left_ms is None:
        return later_ms
    return left_ms if later_ms > INT64_MAX else max(later_ms, left_ms)


def _within(log: LogReader, info: BatchInfo, kind: TimeKind, value: int) -> TimeOffset | None:
    """The record inside a batch."""
    at = Offset(max(info.base, log.log_start))
    if kind is TimeKind.TS_NS:
        at, value = max(at, Offset(info.base + value - info.ts_ns)), ANY_TIMESTAMP_MS
    found = log.read(at, info.end, 1)
    if not found:
        return None
    try:
        for record in decode_bounded(found[0].batch):
            if record.offset >= at and record.timestamp_ms >= value:
                return TimeOffset(Offset(record.offset), info.ts_ns_at(Offset(record.offset)), record.timestamp_ms)
    except (BatchCorrupt, SmqError):
        # Malformed or oversized content: exact to the batch only. Its reader will meet the error itself.
        return TimeOffset(at, info.ts_ns_at(at), info.max_timestamp_ms)
    return None
