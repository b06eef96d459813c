"""What a replica asks of the node's replicas, which own it.

Owns the interface only: `Replicas` fulfils it, and tests fulfil it in its place. It must never hold a rule.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from smq.raft_state.ids import Epoch, Incarnation, NodeId, PartitionId
from smq.replication.log.codec import BatchDamaged
from smq.replication.partition.admission import RecordSpace
from smq.replication.partition.intake import Intake
from smq.replication.partition.send_order import SendOrder
from smq.replication.storage.hang import HangGuard

if TYPE_CHECKING:
    from smq.replication.partition.replica import Replica


class ReplicaOwner(Protocol):
    """See the module."""

    @property
    def space(self) -> RecordSpace: ...

    @property
    def intake(self) -> Intake: ...

    @property
    def send_order(self) -> SendOrder: ...

    @property
    def producers_held(self) -> int:
        """The producers that this node remembers, over all its partitions."""

    def mark_committed(self, replica: "Replica") -> None:
        """The partition's commit point has moved beyond its high water mark, by its leader's count."""

    def mark_caught_up(self, replica: "Replica") -> None:
        """Incomplete replicas of a led partition may be complete again."""

    def mark_damaged(self, replica: "Replica") -> None:
        """Damage hides where the log ended, and the others do not know it yet."""

    def registered(self, node: NodeId) -> Incarnation | None:
        """The node's process in the state that the replicas have followed."""

    @property
    def hang(self) -> HangGuard: ...

    @property
    def is_candidate(self) -> Callable[[NodeId], bool]:
        """Whether another node is healthy, and its disk writes."""

    @property
    def resign(self) -> Callable[[PartitionId, Epoch], None]:
        """Reports to the Raft leader that this node stops leading the epoch."""

    def wake(self, replica: "Replica") -> None:
        """More of the log may be readable."""

    def mark_durable(self, pid: PartitionId) -> None:
        """More of the log is on disk: `after_durable` is called soon, once for all submissions of one commit."""

    def mark_unsent(self, replica: "Replica") -> None:
        """The log has grown: `pump` is called at the end of the turn, once for all appends of it."""

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        """Has a damaged batch fetched again. `done` is called later, with whether the batch is intact."""
