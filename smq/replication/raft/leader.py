"""The leader's role: sends entries and snapshots, counts what is durable, hands over.

Owns the progress of every follower within one leadership, and the reads that wait in it. pysyncobj's own send loop
rewinds on success, cuts large entries with pickle, spins while a snapshot is pending and does not bound what is in
flight (docs/rules.md, findings 3, 9, 16, 20), so it is not used. The leader must never count an entry that is not
durable, its own included, nor commit an entry of an older term by counting. Only the core imports it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from smq.raft_state.ids import DiskId, NodeId, Term
from smq.replication.ports import Quorum, QuorumReplica
from smq.replication.raft.journal import Snapshot
from smq.replication.raft.messages import (
    NO_ANSWER,
    Append,
    AppendReply,
    Confirm,
    Confirmed,
    SnapshotChunk,
    TimeoutNow,
)
from smq.replication.raft.ready import Needs

if TYPE_CHECKING:  # the core makes the roles
    from smq.replication.raft.core import Core

APPEND_BYTES_MAX: Final = 256 << 10  # of entries per message: small enough not to delay the heartbeat after it
APPEND_ENTRIES_MAX: Final = 4096
CHUNK_BYTES_MAX: Final = 256 << 10
WINDOW_BYTES_MAX: Final = 4 << 20  # sent to one follower and not answered: a slow follower costs this much memory
READS_MAX: Final = 10_000  # each node has a few in flight; the rest belong to callers that have given up


@dataclass(slots=True)
class Progress:
    """One follower, as the leader of this term sees it."""

    next_index: int
    heard_at: float
    match_index: int = 0  # durable at the follower, by its answers in the present session
    requested: int = 0  # the latest question (for reads) of the present session
    confirmed: int = 0  # the latest question that it has answered
    disk: DiskId | None = None  # that gave these answers
    answered_at: float | None = None  # its last answer with its log's end; None before the first, or a snapshot
    end_at_answer: int = 0  # the leader's last index at that time
    caught_up_at: float | None = None  # when it last had all that the leader had
    commit_sent: int = 0
    answered_floor: int = 0  # refusals of earlier messages were handled by the reset that set this number
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # (number, bytes)
    in_flight_bytes: int = 0
    transfer: "Transfer | None" = None
    catches_up_from: int = 0  # the snapshot sent to it in this session, until it has caught up; 0: none

    def sent(self, number: int, size: int) -> None:
        if size:
            self.in_flight.append((number, size))
            self.in_flight_bytes += size

    def answered(self, number: int) -> None:
        """Sessions are FIFO: an answer settles every earlier message, too."""
        while self.in_flight and self.in_flight[0][0] <= number:
            self.in_flight_bytes -= self.in_flight.popleft()[1]

    def note_end(self, now: float, last_index: int) -> None:
        """After an answer. Under load a follower never has the newest entry: then it counts as caught up at its answer
        before, if it now has all that the leader had at that time."""
        if self.match_index >= last_index:
            self.caught_up_at, self.catches_up_from = now, 0
        elif self.answered_at is not None and self.match_index >= self.end_at_answer:
            self.caught_up_at, self.catches_up_from = self.answered_at, 0
        self.answered_at, self.end_at_answer = now, last_index

    def restart(self, next_number: int) -> None:
        """Everything in flight is lost, or will be refused."""
        self.in_flight.clear()
        self.in_flight_bytes = 0
        self.transfer = None
        self.catches_up_from = 0
        self.answered_floor = next_number


@dataclass(slots=True)
class Transfer:
    """A snapshot on its way to a follower. It keeps its bytes, so a newer snapshot does not disturb it."""

    snapshot: Snapshot
    crc: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    number: int  # of the last question before it
    index: int
    done: Callable[[int | None], None]


class Reads:
    """Read indexes: a log position that covers everything committed when a read began, without an entry of its own
    (Ongaro's thesis, 6.4).

    A read is confirmed when a majority has answered a question that was sent after the read began. Then no node led a
    newer term when it began, so the index taken at that moment covers everything committed by then. It must never be
    confirmed by a clock, nor by an answer to an older question. `done` gets the index, or None if this node no longer
    leads.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Read] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def last_number(self) -> int:
        """The number of the last question before the youngest read; -1 if no read waits."""
        return self._waiting[-1].number if self._waiting else -1

    def begin(self, number: int, index: int, done: Callable[[int | None], None]) -> None:
        if len(self._waiting) >= READS_MAX:
            done(None)
        else:
            self._waiting.append(_Read(number, index, done))

    def confirm(self, answered: float) -> None:
        """A majority has answered the question with this number, or a later one."""
        while self._waiting and self._waiting[0].number < answered:
            read = self._waiting.popleft()
            read.done(read.index)

    def give_up(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for read in waiting:
            read.done(None)


class Leader:
    def __init__(self, core: "Core") -> None:
        self._core = core
        self._progress: dict[NodeId, Progress] = {}
        self._number = 0
        self._first_index = 0
        self._reads = Reads()
        self._requested = 0  # the latest question
        self._heartbeat_at = 0.0
        self._successor: NodeId | None = None
        self._is_successor_notified = False
        self._handover_until = 0.0

    def begin(self, first_index: int) -> None:
        """`first_index` is that of the term's first entry."""
        now = self._core.now()
        self._progress = {peer: Progress(next_index=first_index, heard_at=now) for peer in self._core.peers}
        self._number = self._requested = 0
        self._first_index = first_index
        self._successor = None

    def end(self) -> None:
        """Another term has begun, or this node has stepped down within its term."""
        self._reads.give_up()

    def forget_session(self, peer: NodeId) -> None:
        """Messages in flight are lost. The commit index is sent immediately: the follower's answer says again what it
        has, because the new session may lead to another disk."""
        if (progress := self._progress.get(peer)) is not None:
            progress.match_index = 0
            progress.requested = progress.confirmed = 0
            progress.restart(self._number + 1)
            progress.commit_sent = 0

    # -------------------------------------------------------------------------------------------------- counting
    def on_reply(self, peer: NodeId, m: AppendReply) -> None:
        """An answer in the present term."""
        progress, last_index = self._progress[peer], self._core.journal.last_index
        progress.heard_at = self._core.now()
        progress.disk = m.disk
        progress.answered(m.number)
        if m.success:
            progress.match_index = max(progress.match_index, min(m.next_index - 1, last_index))
            progress.next_index = max(progress.next_index, progress.match_index + 1)
            progress.note_end(progress.heard_at, last_index)
            if progress.transfer and progress.transfer.snapshot.index <= progress.match_index:
                progress.transfer = None
        elif m.reset and m.number >= progress.answered_floor:
            progress.restart(self._number + 1)
            progress.next_index = max(2, min(m.next_index, last_index + 1))

    def may_wait(self, peer: NodeId, m: AppendReply) -> bool:
        """Whether an answer in the present term changes nothing: it cannot move the commit index, and the
        follower gets nothing for it. Most answers that come after a majority's are such."""
        progress, core = self._progress[peer], self._core
        is_known = m.success and m.disk == progress.disk and m.next_index - 1 <= core.commit_index
        has_all = progress.transfer is None and progress.next_index > core.journal.last_index
        return is_known and has_all and not self._reads and self._successor is None

    def committable_index(self) -> int:
        """The highest index that is durable on a majority of the registered disks (rule 18)."""
        durable = [p.match_index if self._counts(peer, p) else 0 for peer, p in self._progress.items()]
        durable.append(self.own_durable_index())
        durable.sort(reverse=True)
        return durable[len(durable) // 2]

    def _counts(self, peer: NodeId, progress: Progress) -> bool:
        return progress.disk is not None and self._core.voters.counts(peer, progress.disk)

    def own_durable_index(self) -> int:
        return self._core.journal.durable_index

    def advance_commit(self) -> None:
        """Only an entry of the present term is committed by counting; earlier entries follow."""
        if self._core.commit_index >= self._core.journal.last_index:
            return  # nothing to commit
        index = self.committable_index()
        if index > self._core.commit_index and self._core.journal.term_at(index) == self._core.term:
            self._core.commit_to(index)

    def quorum(self, node_id: NodeId, wall_ms: Callable[[float], int]) -> Quorum:
        """`wall_ms`: the wall clock's time at a time of the monotonic clock."""
        core = self._core
        own = QuorumReplica(
            node=node_id,
            disk=core.voters.own_disk,
            end=core.journal.last_index + 1,
            heard_ms=-1,
            caught_up_ms=wall_ms(core.now()),
        )
        voters, observers = [own], []
        for peer, progress in self._progress.items():
            known = _described(peer, progress, wall_ms)
            registered = core.voters.registered_disk(peer)
            if self._counts(peer, progress) or known.disk in (b"", registered):
                voters.append(replace(known, disk=known.disk or registered or DiskId(b"")))
            else:
                nothing = QuorumReplica(node=peer, disk=registered or DiskId(b""), end=-1, heard_ms=-1, caught_up_ms=-1)
                voters.append(nothing)
                observers.append(known)
        return Quorum(
            leader=node_id,
            term=Term(core.term),
            committed_end=core.commit_index + 1,
            voters=tuple(sorted(voters, key=lambda replica: replica.node)),
            observers=tuple(observers),
        )

    # --------------------------------------------------------------------------------------------------- reading
    def begin_read(self, done: Callable[[int | None], None]) -> None:
        """`done` gets an index that covers everything committed so far; None if the leadership ends first. Entries that
        earlier leaders committed come before this term's first entry."""
        self._reads.begin(self._requested, max(self._core.commit_index, self._first_index), done)

    def on_confirmed(self, peer: NodeId, m: Confirmed) -> None:
        """An answer in the present term."""
        progress = self._progress[peer]
        progress.heard_at = self._core.now()
        progress.disk = m.disk
        progress.confirmed = max(progress.confirmed, min(m.number, progress.requested))

    def confirm_reads(self) -> None:
        if self._reads:
            self._reads.confirm(self.confirmed_by_majority())

    def confirmed_by_majority(self) -> float:
        """The latest question that a majority of the registered disks has answered, this node included."""
        numbers = [float(p.confirmed) if self._counts(peer, p) else -1.0 for peer, p in self._progress.items()]
        numbers.append(float("inf"))
        numbers.sort(reverse=True)
        return numbers[len(numbers) // 2]

    # --------------------------------------------------------------------------------------------------- sending
    def hears_from_majority(self) -> bool:
        since = self._core.now() - self._core.timing.leader_fallback_ms / 1000
        heard = 1 + sum(progress.heard_at > since for progress in self._progress.values())
        return 2 * heard > len(self._progress) + 1

    def needed_from(self) -> int | None:
        """The oldest entry that must stay for followers that were sent a snapshot and have not caught up: without it
        they would need another snapshot. They may still be installing theirs. None if there are no such followers."""
        catching_up = [progress for progress in self._progress.values() if progress.catches_up_from]
        needed = [max(progress.catches_up_from, progress.match_index) for progress in catching_up]
        return min((index for index in needed if index >= self._core.journal.first_index), default=None)

    def send(self, *, is_forced: bool = False) -> None:
        """Sends what is due to every follower with a session: new entries, a moved commit index, a heartbeat, a read's
        question."""
        now = self._core.now()
        is_due = is_forced or now >= self._heartbeat_at
        if is_due:
            self._heartbeat_at = now + self._core.timing.heartbeat_ms / 1000
        if self._reads.last_number == self._requested:
            self._requested += 1
        for peer, progress in self._progress.items():
            if self._core.is_connected(peer):
                self._send_to(peer, progress, is_due=is_due)
                if self._reads:
                    self._ask(peer, progress, is_due=is_due)
        self._hand_over(now, is_due=is_due)

    def _ask(self, peer: NodeId, progress: Progress, *, is_due: bool) -> None:
        """One question at a time, and another with the heartbeat if no answer came: it may have been dropped."""
        if progress.confirmed < self._requested and (is_due or progress.confirmed == progress.requested):
            progress.requested = self._requested
            self._core.send(peer, Confirm(term=self._core.term, number=self._requested), Needs.VOTE)

    def _send_to(self, peer: NodeId, progress: Progress, *, is_due: bool) -> None:
        sent = False
        while progress.in_flight_bytes < WINDOW_BYTES_MAX:
            if progress.transfer or progress.next_index <= self._core.journal.first_index:
                self._send_chunk(peer, progress)
            elif progress.next_index <= self._core.journal.last_index:
                self._send_entries(peer, progress)
            else:
                break
            sent = True
        if sent:
            return
        if is_due or not progress.commit_sent:
            self._send_heartbeat(peer, progress, is_answered=True)
        elif progress.commit_sent < self._core.commit_index:
            self._send_heartbeat(peer, progress, is_answered=False)

    def _send_entries(self, peer: NodeId, progress: Progress) -> None:
        journal = self._core.journal
        entries = journal.entries_from(progress.next_index, count_max=APPEND_ENTRIES_MAX, bytes_max=APPEND_BYTES_MAX)
        self._send_append(peer, progress, progress.next_index - 1, [(term, entry) for entry, _, term in entries])
        progress.next_index = entries[-1][1] + 1

    def _send_heartbeat(self, peer: NodeId, progress: Progress, *, is_answered: bool) -> None:
        """An Append without entries. While a snapshot is in flight it names index 0, which matches everywhere. If it
        only reports a moved commit index it needs no answer: the follower has answered the entries themselves."""
        is_matching = progress.transfer is None and progress.next_index > self._core.journal.first_index
        prev_index = progress.next_index - 1 if is_matching else 0
        self._send_append(peer, progress, prev_index, [], is_answered=is_answered)

    def _send_append(
        self,
        peer: NodeId,
        progress: Progress,
        prev_index: int,
        entries: list[tuple[int, bytes]],
        *,
        is_answered: bool = True,
    ) -> None:
        if is_answered:
            self._number += 1
        message = Append(
            term=self._core.term,
            number=self._number if is_answered else NO_ANSWER,
            commit=self._core.commit_index,
            prev_index=prev_index,
            prev_term=self._core.journal.term_at(prev_index) if prev_index else 0,
            entries=entries,
        )
        progress.commit_sent = self._core.commit_index
        progress.sent(self._number, sum(len(entry) for _, entry in entries))
        self._core.send(peer, message, Needs.VOTE)

    def _send_chunk(self, peer: NodeId, progress: Progress) -> None:
        if progress.transfer is None:
            snapshot = self._core.journal.snapshot
            assert snapshot is not None, "a journal that does not begin with entry 1 has a snapshot"
            progress.transfer = Transfer(snapshot, snapshot.crc)
            progress.catches_up_from, progress.answered_at = snapshot.index, None
        transfer = progress.transfer
        snapshot, size = transfer.snapshot, len(transfer.snapshot.state)
        data = memoryview(snapshot.state)[transfer.offset : transfer.offset + CHUNK_BYTES_MAX]
        self._number += 1
        message = SnapshotChunk(
            term=self._core.term,
            number=self._number,
            index=snapshot.index,
            index_term=snapshot.term,
            size=size,
            crc=transfer.crc,
            offset=transfer.offset,
            data=data,
        )
        transfer.offset += len(data)
        progress.sent(self._number, len(data))
        self._core.send(peer, message, Needs.VOTE)
        if transfer.offset == size:
            progress.transfer = None
            progress.next_index = snapshot.index + 1

    # ---------------------------------------------------------------------------------------------- handing over
    @property
    def is_handing_over(self) -> bool:
        """New proposals are refused meanwhile; otherwise the successor would never catch up (thesis 3.10)."""
        return self._successor is not None and self._core.now() < self._handover_until

    def hand_over(self, to: NodeId | None) -> None:
        """Best effort, for one election time-out. None: to the most advanced follower."""
        connected = [
            peer for peer, p in self._progress.items() if self._core.is_connected(peer) and self._counts(peer, p)
        ]
        if to is None and connected:
            to = max(connected, key=lambda peer: (self._progress[peer].match_index, peer))
        if to in connected:
            self._successor, self._is_successor_notified = to, False
            self._handover_until = self._core.now() + self._core.timing.election_timeout_min_ms / 1000

    def _hand_over(self, now: float, *, is_due: bool) -> None:
        """Sends TimeoutNow again with each heartbeat: it may be lost, or come too early. A successor does not stand
        before it has applied what it knows to be committed, and may learn of the last commit in the same turn."""
        if self._successor is None:
            return
        if now >= self._handover_until:
            self._successor = None
            return
        has_all = self._progress[self._successor].match_index == self._core.journal.last_index
        if has_all and (is_due or not self._is_successor_notified):
            self._is_successor_notified = True
            self._core.send(self._successor, TimeoutNow(term=self._core.term), Needs.VOTE)


def _described(peer: NodeId, progress: Progress, wall_ms: Callable[[float], int]) -> QuorumReplica:
    return QuorumReplica(
        node=peer,
        disk=progress.disk or DiskId(b""),
        end=progress.match_index + 1 if progress.match_index else -1,
        heard_ms=wall_ms(progress.heard_at) if progress.disk is not None else -1,
        caught_up_ms=wall_ms(progress.caught_up_at) if progress.caught_up_at is not None else -1,
    )
