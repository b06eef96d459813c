"""Brings a replica's compacted segments in line with the replicated state: the lowest one that differs is next.

Owns the one segment that a node is bringing in line at a time, the requests for it, and the answers to other replicas.
If the log has the bytes already, nothing is sent. Otherwise it asks the leader, then the other replicas, piece by
piece, compares the digest, and installs all of it in one transaction. Always the lowest one: a tombstone must not be
gone from a log that still has what it deleted. It must never choose what a segment contains: the leader's compaction
does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Final, TypeAlias

import structlog

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.raft_state.state import PartitionState
from smq.replication.host import Host
from smq.replication.log.reader import LogReader
from smq.replication.log.segments import NO_DIGEST, Replaced, digest_of, own_digest, replaced
from smq.replication.log.stored_batch import StoredValue, parse_value
from smq.replication.net.wire import SegmentPart, SegmentQuery, StepQuery, StepReport
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel, DataDamaged
from smq.replication.runtime.deadlines import Deadline

_log = structlog.get_logger("smq.segments")

_Place: TypeAlias = tuple[Offset, Offset, bytes]  # start, end and digest of a segment

ANSWER_NS_MIN: Final = 2_000_000_000  # a replica has at least this long for each piece, then the next one is asked,
ANSWER_NS_MAX: Final = 30_000_000_000  # and at most this long if it is slow: as LOOK_UP_MS
PART_BYTES_MAX: Final = 1 << 20  # as an Append, a piece must not hold up the link
LOOK_UP_MS: Final = 30_000  # a whole segment may have to come from the medium
SERVED_MAX: Final = 4  # pieces being read for others; the askers ask again
RECENT_NS: Final = 60_000_000_000  # the compaction looks after each attempt, but may be long at another partition
PAUSE_NS: Final = 1_000_000_000  # before a partition is tried again without success
SLOW_NS_MAX: Final = 600_000_000_000  # after that a replica that was slow has to show it again
REQUESTS_APART: Final = 0x1E3779B97F4A7C15  # between the numbers of two processes, whose incarnations may be neighbours


@dataclass(slots=True, eq=False)
class _Work:
    """The segment that is being brought in line."""

    replica: Replica
    start: Offset
    end: Offset
    digest: bytes
    values: list[StoredValue] = field(default_factory=list)
    peers: list[NodeId] = field(default_factory=list)  # not asked yet, the next one last
    asked: NodeId | None = None
    request: int = 0
    deadline: Deadline | None = None
    adopt: Callable[[list[StoredValue]], None] | None = None  # takes any replica's bytes, or none
    began_ns: int = 0  # to ask
    is_found: bool = False  # some replica has the segment, but is too busy to send it

    @property
    def place(self) -> _Place:
        return self.start, self.end, self.digest

    @property
    def at(self) -> Offset:
        """Where the next piece begins."""
        return self.values[-1].end if self.values else self.start


class Segments:
    def __init__(
        self,
        host: Host,
        look_ups: LookUps,
        get: Callable[[PartitionId], Replica | None],
        mark_durable: Callable[[PartitionId], None],
    ) -> None:
        self._host = host
        self._look_ups = look_ups
        self._get = get
        self._mark_durable = mark_durable
        self._due: dict[PartitionId, None] = {}  # bounded by the node's partitions
        self._work: _Work | None = None
        self._is_next_due = False  # `_go_on` will be called
        self._adoptions: deque[_Work] = deque()  # one, or none: a node has one pass of compaction at a time
        self._excluded: set[PartitionId] = set()  # the compaction is at work there; one, or none
        self._questions = 0
        self._unanswered: dict[int, tuple[NodeId, int]] = {}  # by request: the replica, and when; of the last 30 s
        self._patience: dict[NodeId, tuple[int, int]] = {}  # of slow replicas: how long they have, and when it was seen
        self._serving = 0
        self._versions: dict[NodeId, int] = {}  # `HeldSegments.changes` when each node began to ask for a segment
        # What no replica could be found to hold, and when that was first and last.
        self._lacking: dict[PartitionId, tuple[_Place, int, int]] = {}
        self.fetched = 0  # segments that came from other replicas, since the start of this process

    # ------------------------------------------------------------------------------------------- in line
    def visit(self, replica: Replica, now_ns: int) -> None:
        """To be called often for every partition."""
        if replica.part.segments and now_ns >= replica.segments_due_ns and lowest_behind(replica) is not None:
            self._due[replica.pid] = None
            self._begin_next()

    def exclude(self, pid: PartitionId) -> None:
        """This node's compaction changes the partition's segments, and installs them itself."""
        self._excluded.add(pid)

    def include(self, pid: PartitionId) -> None:
        self._excluded.discard(pid)

    def is_fetching(self, pid: PartitionId) -> bool:
        """Whether a segment of the partition is being brought in line."""
        return self._work is not None and self._work.adopt is None and self._work.replica.pid == pid

    def forget(self, pid: PartitionId) -> None:
        """The partition is gone."""
        self._due.pop(pid, None)
        self._lacking.pop(pid, None)
        work = self._work
        if work is not None and work.replica.pid == pid:
            if work.adopt is not None:
                self._finish_adoption(work, [])
            else:
                self._end(None)

    def lacked_ns(self, pid: PartitionId, place: _Place) -> int | None:
        """For how long no replica could be found that holds this very segment. None if one may hold it: either it was
        found, or the last attempt is not recent, as others took their turns. An earlier segment's time says nothing of
        this one: its leader may just be about to install and send it."""
        lacked, first_ns, last_ns = self._lacking.get(pid, (None, 0, 0))
        is_recent = self._host.clock.monotonic_ns() - last_ns <= RECENT_NS
        return last_ns - first_ns if lacked == place and is_recent else None

    def adopt(self, replica: Replica, start: Offset, end: Offset, done: Callable[[list[StoredValue]], None]) -> None:
        """Fetches what any other replica has in [start, end), whole batches. `done` gets nothing if none could help."""
        self._adoptions.append(_Work(replica, start, end, NO_DIGEST, adopt=done))
        self._begin_next()

    def _begin_next(self) -> None:
        if self._work is None and self._adoptions:
            self._work = self._adoptions.popleft()
            self._fetch(self._work)
        while self._due and self._work is None and not self._is_next_due:
            pid = next(iter(self._due))
            del self._due[pid]
            replica = self._get(pid)
            behind = lowest_behind(replica) if replica is not None else None
            is_free = pid not in self._excluded
            if replica is None or behind is None or not is_free or not replica.may_install(behind[1]):
                continue
            work = self._work = _Work(replica, *behind)
            if replica.log.appended_end >= work.end and replica.log.holds(work.start):
                find = partial(own_digest, start=work.start, end=work.end)
                self._look_ups.run(replica, find, LOOK_UP_MS, partial(self._on_own, work))
            else:
                self._fetch(work)

    def _on_own(self, work: _Work, digest: bytes | SmqError) -> None:
        if self._work is not work:
            return
        if digest == work.digest and work.end <= work.replica.log.durable_end:
            work.replica.log.note_held(work.start, work.end, work.digest)
            self._end(work)
        else:  # others may have the bytes also if these here cannot be read
            self._fetch(work)

    def _end(self, work: _Work | None) -> None:
        """Goes on with the same partition, if the work was done."""
        if self._work is not None:
            if self._work.deadline is not None:
                self._work.deadline.cancel()
            self._leave_out(self._work)
        self._work = None
        if work is not None:
            self._lacking.pop(work.replica.pid, None)
            work.replica.segments_due_ns = 0
            self.visit(work.replica, 0)
        if not self._is_next_due:
            self._is_next_due = True
            self._host.deliver(self._go_on)

    def _leave_out(self, work: _Work) -> None:
        """No other segment was looked for while this one was fetched: if that took long, it counts for none of them."""
        took_ns = self._host.clock.monotonic_ns() - work.began_ns
        if not work.began_ns or took_ns < ANSWER_NS_MIN:
            return
        for pid, (place, first_ns, last_ns) in self._lacking.items():
            if pid != work.replica.pid or work.adopt is not None:
                self._lacking[pid] = place, first_ns + took_ns, last_ns + took_ns

    def _go_on(self) -> None:
        """Once per turn of the loop, for thousands of partitions are given up immediately while no link is open."""
        self._is_next_due = False
        self._begin_next()

    def _give_up(self, work: _Work, *, is_lacking: bool = False) -> None:
        now_ns = self._host.clock.monotonic_ns()
        work.replica.segments_due_ns = now_ns + PAUSE_NS
        self._due.pop(work.replica.pid, None)  # visited meanwhile; the compaction looks first
        if is_lacking:
            lacked, first_ns, _ = self._lacking.get(work.replica.pid, (None, now_ns, now_ns))
            self._lacking[work.replica.pid] = work.place, first_ns if lacked == work.place else now_ns, now_ns
            work.replica.compaction_due_ns = 0  # a leader may give the missing bytes up
        self._end(None)

    # ------------------------------------------------------------------------------------------- fetching
    def _fetch(self, work: _Work) -> None:
        part = work.replica.part
        work.began_ns = self._host.clock.monotonic_ns()
        work.peers = [n for n in part.replicas if n not in (self._host.node_id, part.leader)]
        if part.leader != self._host.node_id:
            work.peers.append(part.leader)
        self._ask_next_peer(work)

    def _ask_next_peer(self, work: _Work) -> None:
        work.values.clear()
        while work.peers:
            work.asked = work.peers.pop()
            if self._ask(work, work.asked):
                return
        if work.adopt is not None:
            self._finish_adoption(work, [])
        else:
            self._give_up(work, is_lacking=not work.is_found)

    def _finish_adoption(self, work: _Work, values: list[StoredValue]) -> None:
        if work.adopt is not None:
            self._host.deliver(partial(work.adopt, values))
        self._end(None)

    def _ask(self, work: _Work, peer: NodeId) -> bool:
        self._questions += 1
        # No process uses the numbers of the one before it, as it would take an answer that was meant for that one.
        work.request = (self._host.incarnation * REQUESTS_APART + self._questions) % (1 << 63)
        query = SegmentQuery(work.replica.pid, work.request, work.start, work.end, work.digest, work.at)
        if not self._host.links.is_open(peer, Channel.DATA):
            return False
        if not self._host.links.send(peer, Channel.DATA, query):
            return False
        now_ns = self._host.clock.monotonic_ns()
        self._unanswered = {n: asked for n, asked in self._unanswered.items() if now_ns - asked[1] < ANSWER_NS_MAX}
        self._unanswered[work.request] = peer, now_ns
        until_ns = now_ns + self._patience_with(peer)
        work.deadline = self._host.deadlines.add(until_ns, partial(self._expire, work, work.request))
        return True

    def _expire(self, work: _Work, request: int) -> None:
        if self._work is not work or work.request != request:
            return
        peer, asked_ns = self._unanswered.get(request, (None, 0))
        if peer is not None and self._patience.get(peer, (0, 0))[1] < asked_ns:
            self._patience.pop(peer, None)  # it was slow before; now it may have gone
        self._ask_next_peer(work)

    def _patience_with(self, peer: NodeId) -> int:
        """How long the next answer of a replica is waited for."""
        patience_ns, seen_ns = self._patience.get(peer, (0, 0))
        is_recent = self._host.clock.monotonic_ns() - seen_ns < SLOW_NS_MAX
        return patience_ns if patience_ns and is_recent else ANSWER_NS_MIN

    def _note_answer(self, peer: NodeId, request: int) -> None:
        """A late one is not used, but says how long the replica takes: otherwise it would be too late each time. Fast
        ones say nothing: a segment has many pieces, and one of them may be slow each time."""
        asked, asked_ns = self._unanswered.get(request, (None, 0))
        if asked != peer:
            return
        del self._unanswered[request]
        now_ns = self._host.clock.monotonic_ns()
        needed_ns = min(2 * (now_ns - asked_ns), ANSWER_NS_MAX)
        if needed_ns > self._patience_with(peer):
            self._patience[peer] = needed_ns, now_ns

    def on_part(self, peer: NodeId, message: SegmentPart) -> None:
        """Raises DataDamaged for bytes that fail their CRC."""
        self._note_answer(peer, message.request)
        work = self._work
        if work is None or work.asked != peer or work.request != message.request:
            return
        work.is_found |= message.is_busy
        for raw in message.values:
            try:
                stored = parse_value(work.replica.pid, bytes(raw))
            except DataDamaged:
                self._ask_next_peer(work)
                raise
            if stored.base != work.at or stored.end > work.end:
                self._ask_next_peer(work)
                return
            work.values.append(stored)
        if work.deadline is not None:
            work.deadline.cancel()
        if not message.values:
            self._ask_next_peer(work)
        elif work.at < work.end:
            if not self._ask(work, peer):
                self._ask_next_peer(work)
        elif work.adopt is not None:
            self._finish_adoption(work, work.values)
        elif digest_of(work.values) != work.digest:
            _log.warning("a replica sent a segment of another digest", peer=peer, partition=work.replica.pid.hex())
            self._ask_next_peer(work)
        else:
            self.fetched += 1
            self._lacking.pop(work.replica.pid, None)  # it was found, even if it cannot be installed now
            self._prepare(work)

    def _prepare(self, work: _Work) -> None:
        find = partial(replaced, start=work.start, end=work.end)
        self._look_ups.run(work.replica, find, LOOK_UP_MS, partial(self._on_prepared, work))

    def _on_prepared(self, work: _Work, old: Replaced | SmqError) -> None:
        if self._work is not work:
            return
        replica = work.replica
        is_current = lowest_behind(replica) == work.place and replica.pid not in self._excluded
        if isinstance(old, SmqError) or not is_current:
            self._give_up(work)
            return
        if not replica.install(*work.place, work.values, old, partial(self._on_installed, work)):
            self._give_up(work)

    def _on_installed(self, work: _Work) -> None:
        self._mark_durable(work.replica.pid)
        work.replica.report_position()
        if self._work is work:
            self._end(work)

    # ------------------------------------------------------------------------------------------- answering
    def on_query(self, peer: NodeId, message: SegmentQuery) -> None:
        replica = self._get(message.partition)
        if replica is not None and message.at == message.start:
            self._versions[peer] = replica.log.segments.changes
        end = self._end_of_version(peer, replica, message) if replica is not None else None
        if replica is None or end is None or self._serving >= SERVED_MAX:
            self._answer(peer, message, [], is_busy=end is not None)
            return

        def find(log: LogReader) -> list[StoredValue]:
            return log.read_segment(message.at, end, PART_BYTES_MAX)

        def on_read(found: list[StoredValue] | SmqError) -> None:
            self._serving -= 1
            is_current = self._end_of_version(peer, replica, message) == end
            self._answer(peer, message, found if is_current and not isinstance(found, SmqError) else [])

        self._serving += 1
        self._look_ups.run(replica, find, LOOK_UP_MS, on_read)

    def _end_of_version(self, peer: NodeId, replica: Replica, query: SegmentQuery) -> Offset | None:
        """As `held_end`. Pieces without a digest must all be of one version of the bytes, and the asker cannot see that
        they are: no more come once a segment here has changed, or this node has started again."""
        is_same = query.digest != NO_DIGEST or self._versions.get(peer) == replica.log.segments.changes
        return held_end(replica, query) if is_same else None

    def _answer(self, peer: NodeId, query: SegmentQuery, values: list[StoredValue], *, is_busy: bool = False) -> None:
        if values and values[0].base != query.at:
            values = []
        part = SegmentPart(query.partition, query.request, [stored.value for stored in values], is_busy)
        self._host.links.send(peer, Channel.DATA, part)

    def on_step_query(self, peer: NodeId, message: StepQuery) -> None:
        replica = self._get(message.partition)
        is_in_step = (
            replica is not None
            and combined(replica.part) == message.digest
            and lowest_behind(replica) is None
            and not replica.log.segments.is_newer_than(replica.part.compactions)
            and not replica.log.is_installing
            and replica.log.appended_end >= replica.part.compacted_end
        )
        self._host.links.send(peer, Channel.DATA, StepReport(message.partition, message.request, is_in_step))


def lowest_behind(replica: Replica) -> _Place | None:
    """Start, end and digest of the first segment whose bytes this log does not hold. None if it holds all of them, or
    newer ones: an older segment must not take the place of a newer one, whose borders may be others."""
    part, held = replica.part, replica.log.segments
    if held.is_newer_than(part.compactions):
        return None
    if replica.segments_checked == (part.compactions, held.changes):
        return None
    for number, segment in enumerate(part.segments):
        end = part.segment_end(number)
        if end > replica.log.log_start and not held.holds(segment.start, end, segment.digest):
            return segment.start, end, segment.digest
    replica.segments_checked = part.compactions, held.changes
    return None


def held_end(replica: Replica, query: SegmentQuery) -> Offset | None:
    """Where the segment ends, if this log holds it in whole."""
    log = replica.log
    end = query.end if query.digest == NO_DIGEST else log.segments.end_of(query.start, query.digest)
    is_durable = not log.is_installing and log.holds(query.start)
    return end if end is not None and is_durable and end <= replica.durable_verified_end else None


def combined(part: PartitionState) -> bytes:
    """One digest of all segments of the state."""
    total = sha256()
    for segment in part.segments:
        total.update(segment.start.to_bytes(8, "big") + segment.digest)
    total.update(part.compacted_end.to_bytes(8, "big"))
    return total.digest()[:SEGMENT_DIGEST_BYTES]
