"""What one part of a node sees of the node around it.

The seams between the node and the logic inside it: everything a replica or the controller may do to the world is a
method here, which keeps each testable and free of the node's other affairs.
"""

from collections.abc import Callable
from typing import Protocol

from smq.raft_state.commands import Command, Reply
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionId
from smq.raft_state.state import ClusterState
from smq.replication.api import DoneFn
from smq.replication.config import NodeConfig
from smq.replication.log.codec import BatchDamaged
from smq.replication.net import wire
from smq.replication.ports import Channel, Clock, Engine
from smq.replication.runtime.deadlines import Deadlines


class NodeView(Protocol):
    """Who the node is, what it has applied, and how it speaks."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def incarnation(self) -> Incarnation: ...

    @property
    def config(self) -> NodeConfig: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def state(self) -> ClusterState: ...

    def is_open(self, peer: NodeId, channel: Channel) -> bool: ...

    def send(self, peer: NodeId, channel: Channel, message: wire.Message) -> bool: ...

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None: ...


class ReplicaHost(NodeView, Protocol):
    @property
    def deadlines(self) -> Deadlines: ...

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int: ...

    def queued_bytes(self) -> int:
        """Bytes submitted to the disk and not yet durable."""

    @property
    def is_full(self) -> bool:
        """The disk has come down to its reserve."""

    def admits(self, size: int) -> bool:
        """Whether so many bytes of records may be appended to this node's disk."""

    def full_error(self, node: NodeId) -> SmqError:
        """STORAGE_FULL, of this node or as another has told."""

    def deliver(self, fn: Callable[[], None]) -> None:
        """Runs fn soon, in order: the way every answer to a caller leaves, so that none is made from within."""

    def mark_due(self, pid: PartitionId) -> None:
        """The partition's high water mark may move."""

    def mark_durable(self, pid: PartitionId) -> None:
        """More of the log is on disk: `after_durable` is called soon, once for all of one commit."""

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        """Has a damaged batch fetched again; `done` is told later whether it is whole."""

    def resign(self, pid: PartitionId, epoch: Epoch) -> None:
        """Tells the Raft leader that this node will not go on leading the epoch."""


class ControllerHost(NodeView, Protocol):
    @property
    def engine(self) -> Engine: ...

    def heard_ns(self, peer: NodeId, incarnation: Incarnation) -> int:
        """When this process of a peer was last heard of on CONTROL; 0 for never."""

    def is_leaving(self, node: NodeId, incarnation: Incarnation) -> bool:
        """Whether this process, of this node or another, is about to end."""

    def is_full_node(self, node: NodeId) -> bool:
        """Whether the node has said that its disk has come down to its reserve."""

    def election_ends(
        self, partitions: tuple[tuple[PartitionId, Epoch], ...]
    ) -> tuple[tuple[PartitionId, Offset], ...]:
        """This node's own report."""

    def transfer(self, pid: PartitionId, epoch: Epoch, target: NodeId) -> None:
        """Hands over a partition that this node itself leads."""
