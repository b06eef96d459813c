"""Compacts the partitions that this node leads and whose topics ask for it: the last record of each key stays.

Owns the pass, one on a node at a time: what is dirty, the newest offset of each key there, then every segment from the
oldest on, rewritten where something goes, agreed through Raft and installed here; the other replicas fetch it. It
pauses between its steps. It must never remove a record whose successor is not committed, nor one above the last stable
offset (below it, the log's index says which transactions were aborted), nor a tombstone before its time (`tombstones`).
Time is the replicated clock's.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import structlog

from smq.raft_state.commands import CompactSegment
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset
from smq.raft_state.replies import Done, Reply
from smq.raft_state.state import NOT_IN_STEP_MS, PartitionState, Segment
from smq.raft_state.topic_config import Compaction, compaction
from smq.replication.host import Host
from smq.replication.log.aborted import AbortedTransactions
from smq.replication.log.compaction.cleaner import NO_AGE, Cleaner, Dirt, DirtScan, KeyScan, Stretch
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter
from smq.replication.log.reader import LogReader
from smq.replication.log.segments import NO_DIGEST, digest_of, own_digest, replaced
from smq.replication.log.stored_batch import StoredValue
from smq.replication.net.wire import StepQuery, StepReport
from smq.replication.partition.compaction.segment_catch_up import Segments, combined, lowest_behind
from smq.replication.partition.compaction.tombstones import is_alike, is_expired, is_waiting, stamp_ms
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel, DataDamaged

_log = structlog.get_logger("smq.compaction")

T = TypeVar("T")

PROPOSAL_MS: Final = 5_000
STEP_MS: Final = 30_000  # a step reads a mebibyte; the disk may be busy
PAUSE_FACTOR: Final = 3  # between two steps, times the length of the first: a quarter of one core at most
PAUSE_MS_MAX: Final = 1_000
WAIT_MS: Final = 20  # for this node to apply what was agreed, or for changes on their way to the disk
WAITS_MAX: Final = 500
IN_STEP_MS: Final = 2_000  # for the followers' answers
ASK_MS_MAX: Final = 60_000  # until they are asked again after a no, or a tenth of `delete.retention.ms`
STAMPS_MAX: Final = 100  # segments per pass whose time begins: each is an entry of the Raft log
URGENT_RESET_MS: Final = 2_000  # longer than a restart of a fast node; older bytes lose nothing
SMALL_PART: Final = 4  # of a segment's usual size: one that is no larger is joined with the next
FIRST_TRIES_MAX: Final = 6  # of a first segment, while the log start moves
FIRST_TRY_BITS: Final = 3  # of its size, fewer at each: 8 MiB, 1 MiB, 128 KiB
NO_LIMIT_MS: Final = (1 << 63) - 1

_MOVED: Final = ("log_start", "read", "agree")  # what may come of a log start that moves meanwhile

_Done: TypeAlias = Callable[[Any], None]
_Steps: TypeAlias = Generator[Callable[[_Done], object], Any, T]


class _Abandoned(Exception):
    """The pass ends here; the next one begins again. `result` is a label of its metric."""

    def __init__(self, result: str, why: str) -> None:
        super().__init__(why)
        self.result = result


@dataclass(slots=True, eq=False)
class _Pass:
    replica: Replica
    epoch: Epoch
    limits: Compaction | None  # None: the topic is no longer compacted
    answers: dict[NodeId, bool] = field(default_factory=dict)
    request: int = 0
    log_start: Offset = Offset(0)  # as the pass began, or later its first segment
    aborted: AbortedTransactions = field(default_factory=lambda: AbortedTransactions([]))  # as the pass began
    is_partial: bool = False  # more is dirty than the table of keys could take
    has_agreed: bool = False
    lacks_bytes: bool = False  # of a segment: all that it can do is to give them up
    removed: int = 0


class _Look(NamedTuple):
    """What was dirty when a partition was last looked at."""

    place: tuple[Epoch, Offset, int]  # who led, where it begins, and the lag: otherwise it is of no use
    dirt: Dirt


class Compactor:
    def __init__(self, host: Host, look_ups: LookUps, segments: Segments) -> None:
        self._host = host
        self._look_ups = look_ups
        self._segments = segments
        self._due: dict[Replica, None] = {}  # bounded by the node's partitions
        self._looks: dict[Replica, _Look] = {}  # likewise
        self._ask_ns: dict[Replica, int] = {}  # not before that; likewise
        self._pass: _Pass | None = None
        self._is_next_due = False  # `_go_on` will be called
        self._request = 0
        # Likewise: the epoch that is led, and the end of the last whole pass in it, or the first look.
        self._whole_ns: dict[Replica, tuple[Epoch, int]] = {}
        self.passes = 0  # that were not abandoned, since the start of this process

    @property
    def is_at_work(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None

    def visit(self, replica: Replica, now_ns: int) -> None:
        """To be called often for every led partition."""
        if now_ns < replica.compaction_due_ns or replica.leading is None:
            return
        replica.compaction_due_ns = now_ns + self._host.config.compaction_check_ms * 1_000_000
        is_compacted = self._limits(replica) is not None and replica.part.hwm > replica.part.log_start
        if not is_compacted:
            self.forget(replica)
        elif replica not in self._whole_ns or self._whole_ns[replica][0] != replica.leading:
            self._whole_ns[replica] = replica.leading, now_ns
        if is_compacted or lowest_behind(replica) is not None:
            self._due[replica] = None
            self._begin_next()

    def forget(self, replica: Replica) -> None:
        """The partition is gone, or no longer compacted."""
        self._looks.pop(replica, None)
        self._ask_ns.pop(replica, None)
        self._whole_ns.pop(replica, None)

    @property
    def dirty_bytes(self) -> int:
        """What the last looks at the led partitions found, and no pass has compacted since."""
        return sum(look.dirt.size for replica, look in self._looks.items() if replica.leading is not None)

    @property
    def age_ms(self) -> int:
        """The longest time that a led partition has been without a whole pass; 0 if none is compacted."""
        now_ns = self._host.clock.monotonic_ns()
        ages = (now_ns - at_ns for replica, (epoch, at_ns) in self._whole_ns.items() if replica.leading == epoch)
        return max(ages, default=0) // 1_000_000

    def _limits(self, replica: Replica) -> Compaction | None:
        name = self._host.state.topic_names.get(replica.part.topic_id)
        return compaction(self._host.state.topics[name].config) if name is not None else None

    # ------------------------------------------------------------------------------------------- driving
    def _begin_next(self) -> None:
        while self._pass is None and not self._is_next_due:
            # One that is being fetched keeps its turn: it may be for most of the time, and others' passes are long.
            replica = next((r for r in self._due if not self._segments.is_fetching(r.pid)), None)
            if replica is None:
                return
            del self._due[replica]
            epoch = replica.leading
            if epoch is None:
                continue
            if replica.log.is_installing:  # what is read now may be older than what the log says that it holds
                replica.compaction_due_ns = 0
                continue
            current = self._pass = _Pass(replica, epoch, self._limits(replica))
            self._segments.exclude(replica.pid)
            self._drive(current, self._steps(current), None)

    def _drive(self, current: _Pass, steps: _Steps[None], result: object) -> None:
        try:
            begin = steps.send(result)
        except StopIteration:
            self.passes += 1
            is_whole = not current.lacks_bytes and not current.is_partial
            if is_whole and current.replica in self._whole_ns:
                self._whole_ns[current.replica] = current.epoch, self._host.clock.monotonic_ns()
            self._end(current, "lacks_bytes" if current.lacks_bytes else "done")
        except _Abandoned as e:
            name = current.replica.pid.hex()
            _log.info("a compaction is tried again later", node=self._host.node_id, partition=name, why=str(e))
            self._end(current, e.result)
        else:
            begin(partial(self._drive, current, steps))

    def _end(self, current: _Pass, result: str) -> None:
        self._segments.include(current.replica.pid)
        self._host.measures.compactions.add(1, result)
        self._host.measures.compacted_records.amount += current.removed
        if current.is_partial and current.has_agreed:
            current.replica.compaction_due_ns = 0
        elif current.is_partial and result == "done":
            why = "compaction_memory_bytes has too little room for the keys of one segment: it stays as it is"
            _log.warning(why, node=self._host.node_id, partition=current.replica.pid.hex())
        if current.removed:
            name = current.replica.pid.hex()
            _log.info("compacted", node=self._host.node_id, partition=name, records_removed=current.removed)
        self._pass = None
        if not self._is_next_due:
            self._is_next_due = True
            self._host.deliver(self._go_on)

    def _go_on(self) -> None:
        """Once per turn of the loop, for thousands of passes may end as they begin."""
        self._is_next_due = False
        self._begin_next()

    def _read(self, current: _Pass, find: Callable[[LogReader], T]) -> _Steps[T]:
        """One step in the log, and the pause after it."""
        began_ns = self._host.clock.monotonic_ns()
        found = yield lambda done: self._look_ups.run(current.replica, find, STEP_MS, done)
        if isinstance(found, SmqError):
            raise _Abandoned("read", str(found))
        took_ms = (self._host.clock.monotonic_ns() - began_ns) // 1_000_000
        if took_ms:
            yield from self._pause(min(PAUSE_MS_MAX, took_ms * PAUSE_FACTOR))
        self._check_leads(current)
        result: T = found
        return result

    def _pause(self, ms: int) -> _Steps[None]:
        yield lambda done: self._host.clock.call_later(ms, partial(done, None))

    def _check_leads(self, current: _Pass) -> None:
        if current.replica.leading != current.epoch:
            raise _Abandoned("leader", "this node no longer leads the partition")

    def _check_limits(self, current: _Pass) -> None:
        """Before anything is agreed only: what is agreed is also installed."""
        if self._limits(current.replica) != current.limits:
            raise _Abandoned("leader", "the topic asks for another compaction, or for none")

    # ------------------------------------------------------------------------------------------- the pass
    def _steps(self, current: _Pass) -> _Steps[None]:
        replica, limits = current.replica, current.limits
        current.log_start = replica.part.log_start
        part, now_ms = replica.part, self._host.state.expiry_clock_ms
        if lowest_behind(replica) is not None:
            current.lacks_bytes = True
            yield from self._give_up_lost(current)
            return
        if limits is None:
            return
        start, stable = part.compacted_end, Offset(min(part.hwm, replica.stable_end))
        current.aborted = _aborted(replica)
        if not part.segments:
            found = yield from self._read(current, lambda log: log.read(part.log_start, stable, 1))
            if not found:
                return
            start = found[0].base
        dirt, log_bytes = yield from self._find_dirt(current, limits, start, stable)
        dirty = [
            Stretch(segment.start, part.segment_end(n)) for n, segment in enumerate(part.segments) if segment.is_dirty
        ]
        is_due = bool(dirty) or _is_due(dirt, limits, log_bytes, now_ms)
        drops = yield from self._may_drop(current, limits)
        if not is_due and not drops:
            return
        if is_due and dirt.size:
            dirty.append(Stretch(start, dirt.end))
        table, end = yield from self._scan(current, dirty)
        end = end if dirty else part.compacted_end
        current.is_partial = bool(dirty) and end < dirty[-1].end
        yield from self._clean_old(current, limits, table, end, drops=drops)
        if end > start:
            yield from self._clean_rest(current, table, end)
            self._looks.pop(replica, None)

    def _find_dirt(self, current: _Pass, limits: Compaction, start: Offset, stop: Offset) -> _Steps[tuple[Dirt, int]]:
        """What is dirty from `start` on, and the size of the log up to its end. Goes on where the last look ended, if
        nothing has changed below."""
        replica, now_ms = current.replica, self._host.state.expiry_clock_ms
        place = current.epoch, max(start, current.log_start), limits.lag_ms
        looked = self._looks.get(replica)
        found = looked.dirt if looked is not None and looked.place == place else Dirt(start, 0, NO_AGE)
        newest_ms_max = now_ms - limits.lag_ms if limits.lag_ms else NO_LIMIT_MS
        scan = DirtScan(found, stop, newest_ms_max)
        while not scan.is_done:
            yield from self._step(current, scan.step)
        self._looks[replica] = _Look(place, scan.found)
        return scan.found, scan.log_bytes

    def _scan(self, current: _Pass, dirty: list[Stretch]) -> _Steps[tuple[KeyTable, Offset]]:
        """The newest offset of each dirty key, and how far that goes."""
        if not dirty:
            return KeyTable(Offset(0), 0), Offset(0)
        keys_max = KeyTable.keys_in(self._host.config.compaction_memory_bytes)
        scan = KeyScan(dirty, keys_max, current.aborted)
        while not scan.is_done:
            yield from self._step(current, scan.step)
        return scan.table, scan.end

    def _clean_old(
        self, current: _Pass, limits: Compaction, table: KeyTable, end: Offset, *, drops: bool
    ) -> _Steps[None]:
        """The segments. If the log start passes the one that is cleaned, those above it follow."""
        segments = current.replica.part.segments
        while segments:
            lowest = segments[0].start
            try:
                yield from self._clean_segments(current, limits, table, end, drops=drops)
            except _Abandoned as e:
                if e.result not in _MOVED or (segments and segments[0].start == lowest):
                    raise
            else:
                return

    def _clean_segments(
        self, current: _Pass, limits: Compaction, table: KeyTable, end: Offset, *, drops: bool
    ) -> _Steps[None]:
        """Every segment that ends at or below `end`, from the log's start up. Small neighbours of one kind become one.
        A tombstone stays for another `delete.retention.ms` above a batch that could not be read: what it deletes may
        be in there."""
        part, now_ms = current.replica.part, self._host.state.expiry_clock_ms
        small_bytes = self._host.config.compaction_segment_bytes // SMALL_PART
        left = [(s, part.segment_end(n)) for n, s in enumerate(part.segments) if part.segment_end(n) <= end]
        has_unread = False
        while left:
            first, stop = left.pop(0)
            was_kept = drops and is_expired(first, limits, now_ms)
            drops_here = was_kept and not has_unread
            covered = [first]
            cleaner = self._cleaner(current, table, first.start, stop, drops_tombstones=drops_here)
            yield from self._run(current, cleaner)
            while left and is_alike(first, left[0][0], limits, now_ms, drops=drops_here):
                if not cleaner.extend(left[0][1], small_bytes):
                    break
                covered.append(left.pop(0)[0])
                yield from self._run(current, cleaner)
            has_unread |= cleaner.has_unread
            new = yield from self._read(current, cleaner.finish)
            tombstones_ms = 0
            if new.has_tombstones:
                since = max(segment.tombstones_ms for segment in covered)
                tombstones_ms = since if since and not first.is_dirty and not was_kept else NOT_IN_STEP_MS
            if covered != [Segment(first.start, new.digest, tombstones_ms)]:
                yield from self._replace(current, cleaner.start, cleaner.at, new, tombstones_ms)

    def _clean_rest(self, current: _Pass, table: KeyTable, end: Offset) -> _Steps[None]:
        """The log above the segments. Without one, nothing holds the log start up (`log_start_seen`): if it moves
        meanwhile, the first segment is begun again there, and is smaller. The keys stay right: what it has passed is
        older."""
        part, tries = current.replica.part, 0
        while True:
            try:
                start = part.compacted_end if part.segments else (yield from self._first_start(current, end))
                yield from self._clean_new(current, table, start, end, tries)
            except _Abandoned as e:
                has_moved = not part.segments and part.log_start != current.log_start
                if e.result not in _MOVED or not has_moved or tries == FIRST_TRIES_MAX:
                    raise
                tries += 1
            else:
                return

    def _first_start(self, current: _Pass, stop: Offset) -> _Steps[Offset]:
        """Where the first segment begins."""
        at = current.log_start = current.replica.part.log_start
        if at >= stop:
            return stop
        found = yield from self._read(current, lambda log: log.read(at, stop, 1))
        if not found:
            raise _Abandoned("log_start", "the log start has moved")
        return found[0].base

    def _clean_new(self, current: _Pass, table: KeyTable, start: Offset, end: Offset, first_tries: int) -> _Steps[None]:
        """What has never been compacted becomes segments."""
        usual = self._host.config.compaction_segment_bytes
        bytes_max = max(1, usual >> first_tries * FIRST_TRY_BITS)
        while start < end:
            cleaner = self._cleaner(current, table, start, end, bytes_max=bytes_max)
            yield from self._run(current, cleaner)
            new = yield from self._read(current, cleaner.finish)
            tombstones_ms = NOT_IN_STEP_MS if new.has_tombstones else 0
            yield from self._replace(current, cleaner.start, cleaner.at, new, tombstones_ms)
            start, bytes_max = cleaner.at, min(usual, 2 * bytes_max)  # the log start must not pass all during the next

    def _cleaner(
        self,
        current: _Pass,
        table: KeyTable,
        start: Offset,
        stop: Offset,
        *,
        drops_tombstones: bool = False,
        bytes_max: int | None = None,
    ) -> Cleaner:
        part = current.replica.part
        writer = SegmentWriter(part.pid, part.producers_start)
        return Cleaner(
            table, writer, current.aborted, start, stop, drops_tombstones=drops_tombstones, bytes_max=bytes_max
        )

    def _run(self, current: _Pass, cleaner: Cleaner) -> _Steps[None]:
        while not cleaner.is_done:
            yield from self._step(current, cleaner.step)

    def _step(self, current: _Pass, step: Callable[[LogReader], bool]) -> _Steps[None]:
        if not (yield from self._read(current, step)):
            raise _Abandoned("log_start", "what was to be read is gone, as the log start has moved, or has changed")
        self._check_limits(current)

    # ------------------------------------------------------------------------------------------- agreeing
    def _replace(
        self,
        current: _Pass,
        start: Offset,
        end: Offset,
        new: Rewritten,
        tombstones_ms: int,
        *,
        is_reset: bool = False,
    ) -> _Steps[None]:
        """Agrees on the new bytes, and installs them here."""
        replica = current.replica
        if not replica.has_space(sum(len(stored.value) for stored in new.values)):
            raise _Abandoned("disk_full", "this node's disk takes no more records")
        yield from self._agree(current, start, end, new.digest, tombstones_ms, is_reset=is_reset)
        current.removed += new.removed
        if not new.is_changed:
            replica.log.note_held(start, end, new.digest)
            return
        for _ in range(WAITS_MAX):
            if end <= replica.log.log_start:
                return  # deleted meanwhile
            old = yield from self._read(current, partial(replaced, start=start, end=end))
            installed = yield partial(self._install, replica, start, end, new, old)
            if installed:
                return
            yield from self._pause(WAIT_MS)
            self._check_leads(current)
        raise _Abandoned("install", "a compacted segment could not be installed")

    def _install(self, replica: Replica, start: Offset, end: Offset, new: Rewritten, old: Any, done: _Done) -> None:
        if not replica.install(start, end, new.digest, new.values, old, partial(done, True)):
            self._host.deliver(partial(done, False))

    def _agree(
        self,
        current: _Pass,
        start: Offset,
        end: Offset,
        digest: bytes,
        tombstones_ms: int,
        *,
        is_reset: bool = False,
    ) -> _Steps[None]:
        replica, seen, log_start = current.replica, current.replica.part.compactions, current.log_start
        if not is_reset:
            self._check_limits(current)
            if lowest_behind(replica) is not None:
                raise _Abandoned("damage", "a compacted segment has been damaged meanwhile")
        if replica.log.is_installing:
            raise _Abandoned("install", "a segment is on its way to the disk, what was read may be older")
        command = CompactSegment(
            partition=replica.pid,
            epoch=current.epoch,
            compactions_seen=seen,
            log_start_seen=log_start,
            start=start,
            end=end,
            digest=digest,
            tombstones_ms=tombstones_ms,
            is_reset=is_reset,
        )
        reply: Reply | SmqError = yield lambda done: self._host.propose(command, PROPOSAL_MS, done)
        if not isinstance(reply, Done):
            yield from self._pause(WAIT_MS)  # this node may not have applied why it was refused
            self._check_leads(current)
            if not _is_agreed(replica.part, seen + 1, (start, end, digest)):  # a repetition is refused, too
                raise _Abandoned("agree", str(reply))
        for _ in range(WAITS_MAX):
            self._check_leads(current)
            if replica.part.compactions > seen:
                current.has_agreed = True
                return
            yield from self._pause(WAIT_MS)
        raise _Abandoned("agree", "this node does not apply what was agreed")

    def _give_up_lost(self, current: _Pass) -> _Steps[None]:
        """The bytes of a segment are agreed, but no replica holds them: their leader ended before it sent them, or they
        are damaged. This log's own bytes take their place, or another's if these cannot be read. They may hold what was
        removed, so everything from there on is dirty again."""
        replica = current.replica
        if self._segments.is_fetching(replica.pid):
            return  # it may be installed over what would be read here
        behind = lowest_behind(replica)
        lacked_ns = self._segments.lacked_ns(replica.pid, behind) if behind is not None else None
        if lacked_ns is None or behind is None or lacked_ns < self._patience_ms(replica) * 1_000_000:
            return
        start, end, _ = behind
        digest: bytes | SmqError = yield lambda done: self._look_ups.run(
            replica, partial(own_digest, start=start, end=end), STEP_MS, done
        )
        self._check_leads(current)
        if not isinstance(digest, SmqError) and digest != NO_DIGEST:
            yield from self._agree(current, start, end, digest, 0, is_reset=True)
            replica.log.note_held(start, end, digest)
        else:
            values: list[StoredValue] = yield lambda done: self._segments.adopt(replica, start, end, done)
            self._check_leads(current)
            if not values:
                raise _Abandoned("damage", f"no replica can read [{start}, {end})")
            adopted = Rewritten(values, digest_of(values), has_tombstones=False, removed=0, is_changed=True)
            yield from self._replace(current, start, end, adopted, 0, is_reset=True)
        replica.compaction_due_ns = 0

    def _patience_ms(self, replica: Replica) -> int:
        """How long bytes may be nowhere. Not long while a follower needs them: it gets no appends until it has them,
        and so acknowledges nothing."""
        reset_ms = self._host.config.compaction_reset_ms
        is_urgent = any(end < replica.part.compacted_end for end in replica.follower_ends().values())
        return min(reset_ms, URGENT_RESET_MS) if is_urgent else reset_ms

    # ------------------------------------------------------------------------------------------- tombstones
    def _may_drop(self, current: _Pass, limits: Compaction) -> _Steps[bool]:
        """Whether tombstones whose time has passed go in this pass. Begins the time of those of which no replica has
        what they delete any more."""
        replica, now_ms = current.replica, self._host.state.expiry_clock_ms
        part, began_ns = replica.part, self._host.clock.monotonic_ns()
        has_expired = any(is_expired(segment, limits, now_ms) for segment in part.segments)
        waiting = [(s, part.segment_end(n)) for n, s in enumerate(part.segments) if is_waiting(s)]
        if not now_ms or not (has_expired or waiting) or began_ns < self._ask_ns.get(replica, 0):
            return False
        if not (yield from self._are_in_step(current)):
            self._ask_ns[replica] = began_ns + min(ASK_MS_MAX, limits.tombstones_ms // 10) * 1_000_000
            return False
        for segment, end in waiting[:STAMPS_MAX]:
            if segment in replica.part.segments:  # the log start may have passed it
                yield from self._agree(current, segment.start, end, segment.digest, stamp_ms(self._host))
        return has_expired

    def _are_in_step(self, current: _Pass) -> _Steps[bool]:
        """Whether every replica holds all segments as they are now."""
        part = current.replica.part
        others = [node for node in part.replicas if node != self._host.node_id]
        self._request += 1
        current.request = self._request
        current.answers.clear()
        query = StepQuery(part.pid, current.request, combined(part))
        for node in others:
            if not self._host.links.send(node, Channel.DATA, query):
                return False  # the partitions after this one must not wait for a node that is down
        for _ in range(IN_STEP_MS // WAIT_MS):
            if len(current.answers) == len(others):
                break
            if not all(current.answers.values()):
                break
            yield from self._pause(WAIT_MS)
        self._check_leads(current)
        return len(current.answers) == len(others) and all(current.answers.values())

    def on_step_report(self, peer: NodeId, message: StepReport) -> None:
        current = self._pass
        if current is not None and current.request == message.request and current.replica.pid == message.partition:
            current.answers[peer] = message.is_in_step


def _aborted(replica: Replica) -> AbortedTransactions:
    """All that were aborted below the last stable offset, and later ones."""
    try:
        replica.log.check_aborted()
    except DataDamaged as e:
        raise _Abandoned("damage", str(e)) from e
    return replica.log.aborted.copy()


def _is_agreed(part: PartitionState, compactions: int, place: tuple[Offset, Offset, bytes]) -> bool:
    """Whether the partition's last compaction has this number, and is this one."""
    places = ((segment.start, part.segment_end(n), segment.digest) for n, segment in enumerate(part.segments))
    return part.compactions == compactions and place in places


def _is_due(dirt: Dirt, limits: Compaction, log_bytes: int, now_ms: int) -> bool:
    if not dirt.size:
        return False
    is_old = dirt.oldest_ms != NO_AGE and dirt.oldest_ms <= now_ms - limits.lag_ms_max
    return is_old or dirt.size >= Decimal(limits.dirty_ratio) * log_bytes
