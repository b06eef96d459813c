"""How much each disk has said that it remembers of Raft, so that an old copy of one is told from it (rule 18).

A directory that is put back from an old copy has its disk id, and has forgotten votes and entries that the disk had
acknowledged. So each disk counts its writes of Raft's memory, tells the others the count once it is durable, and they
keep it beside their own. Owns what was told, and the judgement. It must never tell a count that is not on disk, nor
replace what it knows by what a process says that does not remember it. The argument is in ARCHITECTURE.md, "An old copy
of a disk counts as a replaced disk". The engine and its voters import it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from smq.raft_state.ids import DiskId, NodeId
from smq.replication.marks import DISKS_KEPT_MAX, Mark, pack_marks, unpack_marks


class Memory(Protocol):
    """What the journal has for this: `marks` are kept with its own rows."""

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
        self._claims: dict[NodeId, Mark] = {}  # what each peer has said of itself in the present session

    def load(self) -> None:
        """What this directory knew of the others. ValueError where that does not decode."""
        self._known = {(mark.node, mark.disk): mark for mark in unpack_marks(self._memory.marks)}

    @property
    def own(self) -> Mark:
        memory = self._memory
        return Mark(self._node_id, self._disk_id(), self._start, memory.base_writes, memory.durable_writes)

    @property
    def known(self) -> tuple[Mark, ...]:
        """Of the others."""
        return tuple(self._known.values())

    def session_over(self, peer: NodeId) -> None:
        self._claims.pop(peer, None)

    def hear(self, peer: NodeId, claim: Mark, known: Iterable[Mark]) -> Mark | None:
        """A peer tells of itself and of all others. What it knows of this node's disk and that disk does not: then this
        directory is an old copy."""
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
        """Whether what this disk of a peer says must not count: its process has forgotten what the disk had told, or
        goes by another disk by now."""
        claim = self._claims.get(node)
        if claim is None:
            return False  # every session begins with one
        told = self._known.get((node, disk))
        return claim.disk != disk or (told is not None and has_forgotten(told, claim.start, claim.base))

    def _is_beyond_own(self, told: Mark) -> bool:
        own = self.own
        if told.disk != own.disk:
            return False
        # The same process with less than it had told: a virtual machine went back in time with its memory.
        return has_forgotten(told, own.start, own.base) or (told.start == own.start and told.writes > own.writes)

    def _learn(self, mark: Mark, *, is_claim: bool) -> None:
        """Keeps the higher count, unless its process does not remember the lower one: then that is the evidence."""
        old = self._known.get((mark.node, mark.disk))
        if old is None:
            if not self._make_room(mark, is_claim=is_claim):
                return
        elif mark.writes <= old.writes or has_forgotten(old, mark.start, mark.base):
            return
        self._known[mark.node, mark.disk] = mark

    def _make_room(self, mark: Mark, *, is_claim: bool) -> bool:
        """The oldest disk of the node goes, never the registered one. Hearsay of another than that takes no place: two
        peers that know different old disks would drive the present one out by telling each other."""
        disks = [disk for node, disk in self._known if node == mark.node]
        if len(disks) < DISKS_KEPT_MAX:
            return True
        registered = self._registered_disk(mark.node)
        if not is_claim and mark.disk != registered:
            return False
        del self._known[mark.node, next(disk for disk in disks if disk != registered)]
        return True


def has_forgotten(told: Mark, start: bytes, base: int) -> bool:
    """Whether the process `start`, which found `base` writes on this disk, lacks some that another had told of."""
    return told.start != start and told.writes > base
