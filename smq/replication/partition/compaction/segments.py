"""Brings a replica's compacted segments in line with the replicated state: the lowest one that differs is next.

Owns the one segment that a node is bringing in line at a time, the requests for it, and the answers to other replicas.
If the log has the bytes already, nothing is sent. Otherwise it asks the leader, then the other replicas, piece by
piece, compares the digest, and installs all of it in one transaction. A segment whose replicas are slow gives its turn
up, and keeps its pieces and its questions: late answers count. Always the lowest one: a tombstone must not be gone from
a log that still has what it deleted. It must never choose what a segment contains: the leader's compaction does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias

import structlog

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.raft_state.state import PartitionState
from smq.replication.host import Host
from smq.replication.log.codec import StoredValue, parse_value
from smq.replication.log.reader import LogReader
from smq.replication.log.rewriting import digest_of
from smq.replication.log.segments import NO_DIGEST, Replaced, own_digest, replaced
from smq.replication.net.segment_messages import SegmentPart, SegmentQuery, StepQuery, StepReport
from smq.replication.partition.look_ups import LookUps
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel
from smq.replication.runtime.deadlines import Deadline

_log = structlog.get_logger("smq.segments")

_Place: TypeAlias = tuple[Offset, Offset, bytes]  # start, end and digest of a segment

ANSWER_NS_MAX: Final = 2_000_000_000  # per piece, then the next replica is asked, too
PART_BYTES_MAX: Final = 1 << 20  # as an Append, a piece must not hold up the link
LOOK_UP_MS: Final = 30_000  # a whole segment may have to come from the medium
LATE_NS_MAX: Final = LOOK_UP_MS * 1_000_000  # until a replica is asked for the same piece again, at most
KEPT_BYTES_MAX: Final = 32 << 20  # of pieces of segments that have no turn; one of them may always have more
SERVED_MAX: Final = 4  # pieces being read for others; the askers ask again
RECENT_NS: Final = 60_000_000_000  # the compaction looks after each attempt, but may be long at another partition
PAUSE_NS: Final = 1_000_000_000  # before a partition is tried again without success


class _Question(NamedTuple):
    """That has no answer yet."""

    peer: NodeId
    at: Offset
    asked_ns: int


@dataclass(slots=True, eq=False)
class _Work:
    """A segment that is being brought in line, now or when it has its turn again."""

    replica: Replica
    start: Offset
    end: Offset
    digest: bytes
    adopt: Callable[[list[StoredValue]], None] | None = None  # takes any replica's bytes, or none
    values: list[StoredValue] = field(default_factory=list)
    size: int = 0  # of the values
    furthest: Offset = Offset(0)  # that any pieces reached
    asked: dict[int, _Question] = field(default_factory=dict)  # by request; a few for each replica
    patience_ns: int = ANSWER_NS_MAX  # until a replica is asked for the same piece again
    # In this turn:
    peers: list[NodeId] = field(default_factory=list)  # not asked yet, the next one last
    holders: set[NodeId] = field(default_factory=set)  # those that have not said that they do not hold the segment
    request: int = 0  # the one that the turn waits for, or 0
    deadline: Deadline | None = None  # of that
    is_fetching: bool = False  # not while the disk is read for it
    is_found: bool = False  # some replica holds it, and had too much to do

    @property
    def place(self) -> _Place:
        return self.start, self.end, self.digest

    @property
    def at(self) -> Offset:
        """Where the next piece begins."""
        return self.values[-1].end if self.values else self.start

    def add(self, piece: list[StoredValue]) -> None:
        self.values += piece
        self.size += sum(len(stored.value) for stored in piece)
        self.furthest = max(self.furthest, self.at)

    def clear(self) -> None:
        self.values.clear()
        self.size = 0


@dataclass(slots=True)
class _Lack:
    """What no replica could be found to hold."""

    place: _Place
    furthest: Offset  # its pieces up to there are no news
    first_ns: int | None  # None: pieces beyond have come since then
    last_ns: int


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
        self._work: _Work | None = None  # whose turn it is
        # By partition, without adoptions: what has been begun. Bounded by the node's partitions, oldest first.
        self._works: dict[PartitionId, _Work] = {}
        self._is_next_due = False  # `_go_on` will be called
        self._adoptions: deque[_Work] = deque()  # one, or none: a node has one pass of compaction at a time
        self._excluded: set[PartitionId] = set()  # the compaction is at work there; one, or none
        self._request = 0
        self._serving = 0
        self._versions: dict[NodeId, int] = {}  # `HeldSegments.changes` when each node began to ask for a segment
        self._lacking: dict[PartitionId, _Lack] = {}  # likewise
        self.fetched = 0  # segments that came from other replicas, since the start of this process

    # ------------------------------------------------------------------------------------------- in line
    def visit(self, replica: Replica, now_ns: int) -> None:
        """To be called often for every partition."""
        self._drop_outdated(replica)
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
        self._works.pop(pid, None)
        work = self._work
        if work is not None and work.replica.pid == pid:
            if work.adopt is not None:
                self._finish_adoption(work, [])
            else:
                self._end_turn()

    def lacked_ns(self, pid: PartitionId, place: _Place) -> int | None:
        """For how long no replica could be found that holds this very segment. None if one may hold it: either it was
        found, or the last attempt is not recent, as others took their turns. An earlier segment's time says nothing of
        this one: its leader may just be about to install and send it."""
        lack = self._lacking.get(pid)
        if lack is None or lack.place != place or lack.first_ns is None:
            return None
        is_recent = self._host.clock.monotonic_ns() - lack.last_ns <= RECENT_NS
        return lack.last_ns - lack.first_ns if is_recent else None

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
            self._drop_outdated(replica)
            work = self._work = self._works.setdefault(pid, _Work(replica, *behind))
            work.is_fetching = False
            if not work.values and replica.log.appended_end >= work.end and replica.log.holds(work.start):
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

    def _end(self, work: _Work) -> None:
        """It is done. Goes on with the same partition."""
        self._end_turn()
        self._works.pop(work.replica.pid, None)
        self._lacking.pop(work.replica.pid, None)
        self._visit_now(work.replica)

    def _end_turn(self) -> None:
        if self._work is not None:
            _wait_no_more(self._work)
        self._work = None
        if not self._is_next_due:
            self._is_next_due = True
            self._host.deliver(self._go_on)

    def _visit_now(self, replica: Replica) -> None:
        replica.segments_due_ns = 0
        self.visit(replica, 0)

    def _drop_outdated(self, replica: Replica) -> None:
        """What was begun for another replica or another version."""
        work = self._works.get(replica.pid)
        if work is None or work is self._work:
            return
        if work.replica is not replica or work.place != lowest_behind(replica):
            del self._works[replica.pid]

    def _go_on(self) -> None:
        """Once per turn of the loop, for thousands of partitions are given up immediately while no link is open."""
        self._is_next_due = False
        self._begin_next()

    def _give_up(self, work: _Work) -> None:
        """It begins again later."""
        self._works.pop(work.replica.pid, None)
        self._pause(work)

    def _pause(self, work: _Work) -> None:
        work.replica.segments_due_ns = self._host.clock.monotonic_ns() + PAUSE_NS
        self._due.pop(work.replica.pid, None)  # visited meanwhile; the compaction looks first
        self._end_turn()

    def _give_way(self, work: _Work) -> None:
        """No replica has sent the next piece in this turn. Late answers count, and the work goes on from there."""
        if not work.holders:
            work.clear()  # its pieces may be those of a wrong copy
        if not work.values and not work.asked:
            self._works.pop(work.replica.pid, None)
        if not work.is_found:
            self._note_lack(work)
            work.replica.compaction_due_ns = 0  # a leader may give the missing bytes up
        self._pause(work)
        self._limit_kept()

    def _note_lack(self, work: _Work) -> None:
        now_ns = self._host.clock.monotonic_ns()
        lack = self._lacking.get(work.replica.pid)
        if lack is None or lack.place != work.place:
            lack = self._lacking[work.replica.pid] = _Lack(work.place, work.furthest, now_ns, now_ns)
        lack.furthest = max(lack.furthest, work.furthest)
        lack.first_ns = lack.first_ns if lack.first_ns is not None else now_ns
        lack.last_ns = now_ns

    def _note_found(self, work: _Work) -> None:
        """Some replica holds the segment."""
        lack = self._lacking.get(work.replica.pid)
        if lack is not None and lack.place == work.place:
            lack.first_ns = None

    # ------------------------------------------------------------------------------------------- fetching
    def _fetch(self, work: _Work) -> None:
        part = work.replica.part
        work.is_fetching, work.is_found = True, False
        work.peers = [n for n in part.replicas if n not in (self._host.node_id, part.leader)]
        if part.leader != self._host.node_id:
            work.peers.append(part.leader)
        work.holders = set(work.peers)
        if work.at < work.end:
            self._ask_next_peer(work)
        else:
            self._check(work)

    def _ask_next_peer(self, work: _Work) -> None:
        """A digest names the bytes, whichever replica sends them. Without one, all of them are of one replica, and of
        one chain of questions: its later pieces are of the version that it had when it was last asked for the first."""
        if work.adopt is not None:
            work.clear()
            work.asked.clear()
        while work.peers:
            if self._ask(work, work.peers.pop()):
                return
        if work.adopt is not None:
            self._finish_adoption(work, [])
        else:
            self._give_way(work)

    def _finish_adoption(self, work: _Work, values: list[StoredValue]) -> None:
        if work.adopt is not None:
            self._host.deliver(partial(work.adopt, values))
        self._end_turn()

    def _ask(self, work: _Work, peer: NodeId) -> bool:
        now_ns = self._host.clock.monotonic_ns()
        asked_ns = [q.asked_ns for q in work.asked.values() if q.peer == peer and q.at == work.at]
        if asked_ns and now_ns < max(asked_ns) + work.patience_ns:
            return False  # the answer may be on its way
        if not self._host.links.is_open(peer, Channel.DATA):
            return False
        # A process never uses the number of one before it: another replica may still be reading for that one.
        self._request = max(self._request, self._host.incarnation) + 1
        query = SegmentQuery(work.replica.pid, self._request, work.start, work.end, work.digest, work.at)
        if not self._host.links.send(peer, Channel.DATA, query):
            return False
        if asked_ns:
            work.patience_ns = min(2 * work.patience_ns, LATE_NS_MAX)
        oldest_ns = now_ns - 2 * LATE_NS_MAX
        kept = {n: q for n, q in work.asked.items() if q.at == work.at and q.asked_ns > oldest_ns}
        work.asked = {**kept, self._request: _Question(peer, work.at, now_ns)}
        work.request = self._request
        until_ns = now_ns + (ANSWER_NS_MAX if work.adopt is None else LATE_NS_MAX)
        work.deadline = self._host.deadlines.add(until_ns, partial(self._expire, work, work.request))
        return True

    def _expire(self, work: _Work, request: int) -> None:
        if self._work is work and work.request == request:
            self._ask_next_peer(work)

    def on_part(self, peer: NodeId, message: SegmentPart) -> None:
        """Raises DataDamaged for bytes that fail their CRC."""
        for work in (self._work, self._works.get(message.partition)):
            if work is not None and message.request in work.asked:
                break
        else:
            return
        if work.asked[message.request].peer != peer:
            return
        del work.asked[message.request]
        # Damaged in transit: the deadline finds another peer.
        piece = [parse_value(work.replica.pid, bytes(raw)) for raw in message.values]
        if message.is_busy:
            work.is_found = True
            self._note_found(work)
        if _is_next(work, piece):
            self._take(work, peer, piece)
        elif self._work is work and work.request == message.request:
            _wait_no_more(work)
            if not message.is_busy:
                work.holders.discard(peer)
            self._ask_next_peer(work)

    def _take(self, work: _Work, peer: NodeId, piece: list[StoredValue]) -> None:
        """The next piece, perhaps a late one: who sent it is asked for more."""
        work.add(piece)
        lack = self._lacking.get(work.replica.pid)
        if lack is not None and work.at > lack.furthest:  # otherwise it has come before, and then no more came
            self._note_found(work)
        if self._work is not work:
            self._limit_kept()
            self._visit_now(work.replica)
        elif work.is_fetching:
            _wait_no_more(work)
            if work.at == work.end:
                self._check(work)
            elif not self._ask(work, peer):
                self._ask_next_peer(work)

    def _limit_kept(self) -> None:
        """The oldest keeps what it has, so that one is always completed."""
        kept = [work for work in self._works.values() if work.values and work is not self._work]
        while len(kept) > 1 and sum(work.size for work in kept) > KEPT_BYTES_MAX:
            kept.pop().clear()

    def _check(self, work: _Work) -> None:
        """All pieces are here."""
        work.is_fetching = False
        if work.adopt is not None:
            self._finish_adoption(work, work.values)
        elif digest_of(work.values) != work.digest:
            _log.warning("replicas sent a segment of another digest", partition=work.replica.pid.hex())
            work.clear()
            work.is_fetching = True
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


def _wait_no_more(work: _Work) -> None:
    work.request = 0
    if work.deadline is not None:
        work.deadline.cancel()


def _is_next(work: _Work, piece: list[StoredValue]) -> bool:
    """Whether the work goes on with this piece, without a gap."""
    at = work.at
    for stored in piece:
        if stored.base != at or stored.end > work.end:
            return False
        at = stored.end
    return bool(piece)


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
