"""The follower's role: takes the leader's entries and snapshots.

Owns the log-matching check, truncation on real conflicts only, and the assembly of a snapshot that comes in
chunks. pysyncobj's own handler truncates at every shorter message and trusts a tail it never compared
(docs/rules.md, findings 3, 4, 8, 9), so it is not used. The follower must never drop a committed entry, nor acknowledge
an entry that does not match. Only the core imports it.
"""

from collections import deque
from typing import TYPE_CHECKING, Final

from smq.raft_state.ids import NodeId
from smq.replication.raft.journal import Snapshot
from smq.replication.raft.messages import (
    NO_ANSWER,
    Append,
    AppendReply,
    Confirm,
    Confirmed,
    SnapshotChunk,
    TermNotice,
)
from smq.replication.raft.ready import Needs, RaftViolation

if TYPE_CHECKING:  # the core makes the roles
    from smq.replication.raft.core import Core

NEVER: Final = float("-inf")
HELD_ENTRIES_PER_TURN: Final = 1_000  # about 3 ms; a message is never split


class SnapshotRefused(Exception):
    """A chunk does not follow the one before it, or the snapshot fails its checksum."""


class Follower:
    def __init__(self, core: "Core") -> None:
        self._core = core
        self._assembly: SnapshotAssembly | None = None
        self.heard_at = NEVER  # when a leader was last heard; while that is recent, no pre-vote is given against it
        self._alive_at = NEVER  # when this node last reported out of turn that it is alive
        # Bounded by the leader's window, which opens only with their answers.
        self._held: deque[tuple[NodeId, Append | SnapshotChunk]] = deque()

    def forget_session(self, peer: NodeId) -> None:
        """Messages in flight from this peer are lost, and so is what it had sent of a snapshot."""
        self._held = deque(item for item in self._held if item[0] != peer)
        if self._assembly is not None and self._assembly.sender == peer:
            self._assembly = None

    def leader_lost(self) -> None:
        self.heard_at = NEVER

    def on_append(self, peer: NodeId, m: Append) -> None:
        if self._accept(peer, m.term) and not self._is_busy(peer, m):
            self._append(peer, m)

    def _append(self, peer: NodeId, m: Append) -> None:
        core, journal = self._core, self._core.journal
        if m.prev_index > journal.last_index:
            self._reply(peer, m.number, next_index=journal.last_index + 1, reset=True)
            return
        # Everything committed here matches the leader by Raft's leader completeness, in the journal or not.
        if m.prev_index > core.commit_index and journal.term_at(m.prev_index) != m.prev_term:
            self._reply(peer, m.number, next_index=core.commit_index + 1, reset=True)
            return
        for index, (term, entry) in enumerate(m.entries, m.prev_index + 1):
            self._take(index, term, entry)
        matched = m.prev_index + len(m.entries)
        core.commit_to(min(m.commit, matched))
        self._reply(peer, m.number, next_index=matched + 1, success=True)

    def on_confirm(self, peer: NodeId, m: Confirm) -> None:
        """The answer depends on term and vote only, so it does not wait for entries to be durable."""
        if self._accept(peer, m.term):
            confirmed = Confirmed(term=m.term, number=m.number, disk=self._core.voters.own_disk)
            self._core.send(peer, confirmed, Needs.ALIVE)

    def _take(self, index: int, term: int, entry: bytes) -> None:
        """Stores one entry of the leader, unless it is here already."""
        journal = self._core.journal
        if index <= self._core.commit_index:
            if index >= journal.first_index and journal.term_at(index) != term:
                raise RaftViolation(f"committed entry {index} has term {journal.term_at(index)}, the leader's {term}")
            return
        if index <= journal.last_index:
            if journal.term_at(index) == term:
                return
            journal.truncate_from(index)
        journal.add(entry, index, term)

    def on_chunk(self, peer: NodeId, m: SnapshotChunk) -> None:
        if self._accept(peer, m.term) and not self._is_busy(peer, m):
            self._add_chunk(peer, m)

    def _add_chunk(self, peer: NodeId, m: SnapshotChunk) -> None:
        core, journal = self._core, self._core.journal
        if self._holds(m.index, m.index_term):
            self._assembly = None
            core.commit_to(m.index)
            self._reply(peer, m.number, next_index=m.index + 1, success=True)
            return
        try:
            snapshot = self._assemble(peer, m)
        except SnapshotRefused:
            self._assembly = None
            self._reply(peer, m.number, next_index=journal.last_index + 1, reset=True)
            return
        if snapshot is None:
            self._reply(peer, m.number, next_index=1)
            return
        self._install(peer, m.number, snapshot)

    def _install(self, peer: NodeId, number: int, snapshot: Snapshot) -> None:
        """The commit index becomes the snapshot's, no higher: entries after it here were never compared."""
        core, term = self._core, self._core.term

        def installed() -> None:
            if core.term == term:
                self._reply(peer, number, next_index=snapshot.index + 1, success=True)

        core.install(snapshot, installed)

    @property
    def has_held(self) -> bool:
        """Messages wait for `take_held`, once no snapshot is being installed."""
        return bool(self._held)

    def take_held(self) -> None:
        """Takes messages that came while a snapshot was being installed, and those queued after them. Each turn takes
        only this many entries, because there may be megabytes. Messages of an older term are dropped: no leader waits
        for their answers."""
        left = HELD_ENTRIES_PER_TURN
        while self._held and left > 0 and not self._core.is_installing:
            peer, m = self._held.popleft()
            if m.term != self._core.term or not self._accept(peer, m.term):
                continue
            if isinstance(m, Append):
                left -= 1 + len(m.entries)
                self._append(peer, m)
            else:
                left = 0  # a quarter of a megabyte
                self._add_chunk(peer, m)

    def _is_busy(self, peer: NodeId, m: Append | SnapshotChunk) -> bool:
        """While a snapshot is being installed nothing enters the journal, because the snapshot will replace it.
        Messages wait instead. If they were dropped, a busy leader could have compacted the entries away before sending
        them again. Later messages wait as well, to keep the order."""
        if not self._core.is_installing and not self._held:
            return False
        if isinstance(m, SnapshotChunk) or m.entries:
            self._held.append((peer, m))
        return True

    def _holds(self, index: int, term: int) -> bool:
        """Whether the journal covers a snapshot: the same entry at its end means the same log up to there."""
        journal = self._core.journal
        return index <= self._core.commit_index or (index <= journal.last_index and journal.term_at(index) == term)

    def _assemble(self, peer: NodeId, m: SnapshotChunk) -> Snapshot | None:
        if m.offset == 0:
            self._assembly = SnapshotAssembly(peer, m)
        if self._assembly is None:
            raise SnapshotRefused("its first chunk has not arrived")
        snapshot = self._assembly.add(peer, m)
        if snapshot is not None:
            self._assembly = None
        return snapshot

    def _accept(self, peer: NodeId, term: int) -> bool:
        """Recognises the sender as leader of its term, unless the term is over."""
        core = self._core
        if term < core.term:
            core.send(peer, TermNotice(term=core.term))
            return False
        if term > core.term:
            core.adopt_term(term)
        if core.is_leader or core.leader not in (None, peer):
            raise RaftViolation(f"node {peer} leads term {term}, and so does node {core.leader}")
        core.follow(peer)
        self.heard_at = core.now()
        self._report_alive(peer)
        return True

    def _report_alive(self, peer: NodeId) -> None:
        """Other answers wait for the disk or a snapshot, perhaps longer than the leader's patience."""
        core = self._core
        is_quiet = core.journal.is_behind or core.is_installing or self.has_held
        if is_quiet and self.heard_at >= self._alive_at + core.timing.heartbeat_ms / 1000:
            self._alive_at = self.heard_at
            alive = AppendReply(
                term=core.term, number=0, next_index=1, success=False, reset=False, disk=core.voters.own_disk
            )
            core.send(peer, alive, Needs.ALIVE)

    def _reply(self, peer: NodeId, number: int, *, next_index: int, success: bool = False, reset: bool = False) -> None:
        if number == NO_ANSWER:
            return
        core = self._core
        reply = AppendReply(
            term=core.term,
            number=number,
            next_index=next_index,
            success=success,
            reset=reset,
            disk=core.voters.own_disk,
        )
        core.send(peer, reply)


class SnapshotAssembly:
    """A snapshot on its way in, in memory, bounded by SNAPSHOT_BYTES_MAX (the codec refuses larger ones)."""

    def __init__(self, sender: NodeId, first: SnapshotChunk) -> None:
        self.sender = sender
        self._identity = _identity(first)
        self._data = bytearray()

    def add(self, sender: NodeId, m: SnapshotChunk) -> Snapshot | None:
        """The snapshot once it is complete. SnapshotRefused if this chunk cannot be the next one."""
        if sender != self.sender or _identity(m) != self._identity or m.offset != len(self._data):
            raise SnapshotRefused("it is not the next chunk")
        self._data += m.data
        if len(self._data) < m.size:
            return None
        snapshot = Snapshot(index=m.index, term=m.index_term, state=bytes(self._data))
        if snapshot.crc != m.crc:
            raise SnapshotRefused("the checksum of the snapshot does not match")
        return snapshot


def _identity(m: SnapshotChunk) -> tuple[int, int, int, int]:
    return m.index, m.index_term, m.size, m.crc
