"""How much each disk has reported that it remembers of Raft, to recognise an old copy of a disk (rule 18).

A directory that is put back from an old copy has the same disk id, but has forgotten votes and entries that the disk
acknowledged. So each disk counts its writes of Raft's memory and reports the count once it is durable, and the others
store it beside their own. Owns the reports and the judgement. It must never report a count that is not on disk, nor
replace a known count by that of a process that does not remember it. The argument is in
docs/decisions/an-old-copy-counts-as-a-replaced-disk.md. The engine and its voters import it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from smq.raft_state.ids import DiskId, NodeId
from smq.replication.marks import DISKS_KEPT_MAX, Mark, pack_marks, unpack_marks


class Memory(Protocol):
    """The journal's part in this: it stores `marks` with its own rows."""

    @property
    def base_writes(self) -> int: ...

    @property
    def durable_writes(self) -> int: ...

    @property
    def marks(self) -> bytes: ...

    def keep_marks(self, marks: bytes) -> None: ...


class DiskMarks:
    def __init__(
        self,
        node_id: NodeId,
        peers: Sequence[NodeId],
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        start: bytes,
        memory: Memory,
    ) -> None:
        self._node_id = node_id
        self._peers = frozenset(peers)
        self._disk_id = disk_id
        self._registered_disk = registered_disk
        self._start = start
        self._memory = memory
        self._known: dict[tuple[NodeId, DiskId], Mark] = {}
        self._claims: dict[NodeId, Mark] = {}  # each peer's report about itself in the present session

    def load(self) -> None:
        """Reads what this directory knew about the others. ValueError if it does not decode."""
        self._known = {(mark.node, mark.disk): mark for mark in unpack_marks(self._memory.marks)}

    @property
    def own(self) -> Mark:
        memory = self._memory
        return Mark(self._node_id, self._disk_id(), self._start, memory.base_writes, memory.durable_writes)

    @property
    def known(self) -> tuple[Mark, ...]:
        """Marks of the other nodes' disks."""
        return tuple(self._known.values())

    def session_over(self, peer: NodeId) -> None:
        self._claims.pop(peer, None)

    def receive(self, peer: NodeId, claim: Mark, known: Iterable[Mark]) -> Mark | None:
        """Takes a peer's report about itself and about all others. Returns a mark of this node's disk that the disk
        does not remember, if there is one: then this directory is an old copy."""
        self._claims[peer] = claim
        before = self.known
        forgotten = None
        for mark in (claim, *known):
            if mark.node in self._peers:
                self._learn(mark, is_claim=mark is claim)
            elif mark.node == self._node_id and self._is_beyond_own(mark):
                forgotten = mark
        if self.known != before:
            self._memory.keep_marks(pack_marks(self.known))
        return forgotten

    def doubts(self, node: NodeId, disk: DiskId) -> bool:
        """Whether answers of this disk of a peer must not count: its process has forgotten what the disk reported, or
        runs on another disk by now."""
        claim = self._claims.get(node)
        if claim is None:
            return False  # every session begins with one
        reported = self._known.get((node, disk))
        return claim.disk != disk or (reported is not None and has_forgotten(reported, claim.start, claim.base))

    def _is_beyond_own(self, reported: Mark) -> bool:
        own = self.own
        if reported.disk != own.disk:
            return False
        # The same process with less than it reported: a virtual machine went back in time with its memory.
        return has_forgotten(reported, own.start, own.base) or (
            reported.start == own.start and reported.writes > own.writes
        )

    def _learn(self, mark: Mark, *, is_claim: bool) -> None:
        """Keeps the higher count, unless its process does not remember the lower one, which then stays as evidence."""
        old = self._known.get((mark.node, mark.disk))
        if old is None:
            if not self._make_space(mark, is_claim=is_claim):
                return
        elif mark.writes <= old.writes or has_forgotten(old, mark.start, mark.base):
            return
        self._known[mark.node, mark.disk] = mark

    def _make_space(self, mark: Mark, *, is_claim: bool) -> bool:
        """Drops the oldest disk of the node, never the registered one. Hearsay about another disk takes no place:
        otherwise two peers that know different old disks would drive out the present one with their reports."""
        disks = [disk for node, disk in self._known if node == mark.node]
        if len(disks) < DISKS_KEPT_MAX:
            return True
        registered = self._registered_disk(mark.node)
        if not is_claim and mark.disk != registered:
            return False
        del self._known[mark.node, next(disk for disk in disks if disk != registered)]
        return True


def has_forgotten(reported: Mark, start: bytes, base: int) -> bool:
    """Whether the process `start`, which found `base` writes on this disk, lacks some that another process reported."""
    return reported.start != start and reported.writes > base
