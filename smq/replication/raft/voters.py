"""Which disks have a vote in Raft: a replaced disk is another voter, and so is an old copy (rule 18).

Raft relies on voters to remember their votes and acknowledgements. A node that comes back with an empty disk does not.
Its answers count for nothing until the others have agreed, through the log, that it now runs on another disk. Owns that
judgement, by the disk ids of the applied state and by the evidence that a disk is an old copy. It must never send
anything. The argument is in docs/decisions/a-replaced-disk-is-a-new-voter.md. The engine, the core and its roles import
it.
"""

from collections.abc import Callable, Iterable, Sequence

from smq.raft_state.ids import DiskId, NodeId
from smq.replication.net.disk_marks import DISKS_KEPT_MAX, MARKS, Mark
from smq.replication.raft.journal import RaftJournal


class Voters:
    def __init__(
        self,
        node_id: NodeId,
        peers: Sequence[NodeId],
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        is_doubted: Callable[[NodeId, DiskId], bool],
        born_disk: Callable[[NodeId], DiskId | None],
    ) -> None:
        """`registered_disk` answers from the applied state of this node; None if it knows no such node. `is_doubted`
        recognises an old copy of a peer's disk (`DiskMarks.doubts`). `born_disk`: the disk of a node at the birth of
        the cluster; None on a directory that has no birth."""
        self._node_id = node_id
        # With one or two voters every majority is all of them. A voter that has kept its disk has everything, and
        # nothing is decided without it. If replaced disks did not count, a group of two would never decide again.
        self._all_decide = len(peers) <= 1
        self._disk_id = disk_id
        self._registered_disk = registered_disk
        self._is_doubted = is_doubted
        self._born_disk = born_disk

    @property
    def own_disk(self) -> DiskId:
        return self._disk_id()

    def counts(self, node: NodeId, disk: DiskId) -> bool:
        """Whether a vote or acknowledgement by this disk counts as the node's. Until one is registered, the disk has it
        with which the cluster was born."""
        voter = self._registered_disk(node) or self._born_disk(node)
        if voter is None or self._all_decide:
            return voter is not None
        return voter == disk and not self._is_doubted(node, disk)

    def registered_disk(self, node: NodeId) -> DiskId | None:
        """The disk that has the node's vote; None until one is registered."""
        return self._registered_disk(node)

    @property
    def may_stand(self) -> bool:
        return self.counts(self._node_id, self.own_disk)

    @property
    def is_admitted(self) -> bool:
        """This disk's registration has been applied here, and so has everything before it, its predecessor's too."""
        return self._registered_disk(self._node_id) == self.own_disk

    def may_be_elected(self, node: NodeId, disk: DiskId, *, is_admitted: bool) -> bool:
        """Whether to vote for it. A node that says that it was admitted may know more than this node does. An old copy
        of an admitted disk says so, too."""
        return self.counts(node, disk) or (is_admitted and not self._is_doubted(node, disk))


class DiskMarks:
    """How much each disk has reported that it remembers of Raft, to recognise an old copy of a disk.

    A directory that is put back from an old copy has the same disk id, but has forgotten votes and entries that the
    disk acknowledged. So each disk counts its writes of Raft's memory and reports the count once it is durable (its
    mark), and the others store it in their journals. A count that is not on disk is never reported, and a known count
    never replaced by that of a process that does not remember it. The argument is in
    docs/decisions/an-old-copy-counts-as-a-replaced-disk.md.
    """

    def __init__(
        self,
        node_id: NodeId,
        peers: Sequence[NodeId],
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        start: bytes,
        journal: RaftJournal,
    ) -> None:
        self._node_id = node_id
        self._peers = frozenset(peers)
        self._disk_id = disk_id
        self._registered_disk = registered_disk
        self._start = start
        self._journal = journal
        self._known: dict[tuple[NodeId, DiskId], Mark] = {}
        self._claims: dict[NodeId, Mark] = {}  # each peer's report about itself in the present session

    def load(self) -> None:
        """Reads what this directory knew about the others. CodecError if it does not decode."""
        self._known = {(mark.node, mark.disk): mark for mark in MARKS.unpack(self._journal.marks)}

    @property
    def own(self) -> Mark:
        journal = self._journal
        return Mark(self._node_id, self._disk_id(), self._start, journal.base_writes, journal.durable_writes)

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
            self._journal.keep_marks(MARKS.pack(self.known))
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
