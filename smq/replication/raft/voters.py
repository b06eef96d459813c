"""Which disks have a vote in Raft: a replaced disk is another voter (rule 18).

Raft relies on voters to remember their votes and acknowledgements. A node that comes back with an empty disk does not.
Its answers count for nothing until the others have agreed, through the log, that it now runs on another disk. Owns that
judgement, by the disk ids of the applied state and by the evidence that a disk is an old copy. It must never change
anything. The argument is in docs/decisions/a-replaced-disk-is-a-new-voter.md. Only the engine, the core and its roles
import it.
"""

from collections.abc import Callable, Sequence

from smq.raft_state.ids import DiskId, NodeId


class Voters:
    def __init__(
        self,
        node_id: NodeId,
        peers: Sequence[NodeId],
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        is_doubted: Callable[[NodeId, DiskId], bool],
        is_home: Callable[[NodeId], bool],
    ) -> None:
        """`registered_disk` answers from the applied state of this node; None if it knows no such node. `is_doubted`
        recognises an old copy of a peer's disk (raft/disk_marks.py). `is_home`: the peer's session is of the process
        that answers at the peer's address."""
        self._node_id = node_id
        # With one or two voters every majority is all of them. A voter that has kept its disk has everything, and
        # nothing is decided without it. If replaced disks did not count, a group of two would never decide again.
        self._all_decide = len(peers) <= 1
        self._disk_id = disk_id
        self._registered_disk = registered_disk
        self._is_doubted = is_doubted
        self._is_home = is_home

    @property
    def own_disk(self) -> DiskId:
        return self._disk_id()

    def counts(self, node: NodeId, disk: DiskId) -> bool:
        """Whether a vote or acknowledgement by this disk counts as the node's. Until a disk is registered, any does
        that is at the node's address: two processes by mistake with one id would be two voters otherwise."""
        if self._all_decide:
            return True
        if self._registered_disk(node) is None and node != self._node_id and not self._is_home(node):
            return False
        return self._registered_disk(node) in (None, disk) and not self._is_doubted(node, disk)

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
