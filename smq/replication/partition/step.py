"""What a replica gets from its node, and what its steps leave to be done.

A step over a replica is a message, a batch, a commit of the disk, or a change of the applied state. What is then due
outside of the replica, it notes in `Outputs`; `Replicas` does all of that in one place, once per turn of the loop. A
note names a partition and a kind, not an event: what is done goes by what the replica is at that time, so notes of one
turn fall together. It must never hold a rule. Replicas and `Replicas` import it, and what a replica is made of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from smq.raft_state.ids import Epoch, Incarnation, NodeId, PartitionId
from smq.replication.log.codec import BatchDamaged
from smq.replication.partition.intake import Intake
from smq.replication.partition.send_order import SendOrder
from smq.replication.storage.hang import HangGuard
from smq.replication.storage.space import SpaceGuard

Noted: TypeAlias = dict[PartitionId, None]  # bounded by the node's partitions


class Outputs:
    """One per node."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], None], drain: Callable[[], None]) -> None:
        """`drain` empties all of them, and then calls `end_drain`."""
        self._call_soon = call_soon
        self._drain = drain
        self._is_scheduled = False
        self.durable: Noted = {}  # more of the log is on disk: to be counted, or acknowledged (rule 7)
        self.unsent: Noted = {}  # a led log has grown: its followers get what they lack
        self.readable: Noted = {}  # more of the log may be readable
        self.committed: Noted = {}  # a leader's commit point is beyond Raft's high water mark, or followers miss it
        self.caught_up: Noted = {}  # incomplete replicas of a led partition may be complete again (rule 22)
        self.damaged: Noted = {}  # damage hides where the log ended, and the others do not know it yet (rule 23)

    def note(self, kind: Noted, pid: PartitionId) -> None:
        kind[pid] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._drain)

    def end_drain(self) -> None:
        """What was noted meanwhile is for the next turn."""
        self._is_scheduled = False
        if self.durable or self.unsent or self.readable or self.committed or self.caught_up or self.damaged:
            self._is_scheduled = True
            self._call_soon(self._drain)


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all replicas of a node share."""

    outputs: Outputs
    space: SpaceGuard  # for records, on this node's disk
    hang: HangGuard  # whether that disk writes at all
    intake: Intake
    send_order: SendOrder
    producers_held: Callable[[], int]  # that this node remembers, over all its partitions
    is_candidate: Callable[[NodeId], bool]  # whether another node is healthy, and its disk writes
    registered: Callable[[NodeId], Incarnation | None]  # a node's process in the state that the replicas have followed
    resign: Callable[[PartitionId, Epoch], None]  # reports to the Raft leader that this node stops leading the epoch
    # Has a damaged batch fetched again. The callback is called later, with whether the batch is intact.
    repair: Callable[[BatchDamaged, Callable[[bool], None]], None]
