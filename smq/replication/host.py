"""What every part of a node shares: who the node is, what it has applied, its clock and disk, its links and proposals.

Owns no behaviour. A part takes the host and whatever else it needs by name, so each can be tested with a host of its
own. The node builds the one host of a process; nothing here may import a part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from smq.raft_state.commands import Command
from smq.raft_state.ids import NO_BIRTH, BirthId, DiskId, Incarnation, NodeId
from smq.raft_state.replies import Reply
from smq.raft_state.state import ClusterState
from smq.replication.api import DoneFn
from smq.replication.monitoring.anomalies import Anomalies
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.net.links import Links
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Clock, Disk
from smq.replication.raft.raft import Raft
from smq.replication.runtime.deadlines import Deadlines


@dataclass(slots=True)
class Identity:
    """Of this process and its disk. Written by the registration, the birth by `nodes.births`."""

    incarnation: Incarnation  # 0 until one has been claimed
    disk: DiskId  # empty until then
    birth: BirthId = NO_BIRTH  # of the cluster; zeros until the directory has one


class StateView(Protocol):
    @property
    def state(self) -> ClusterState:
        """As this node has applied it: read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    config: NodeConfig
    identity: Identity
    applied: StateView
    clock: Clock
    deadlines: Deadlines
    disk: Disk
    links: Links
    engine: Raft
    propose: Callable[[Command, int, DoneFn[Reply]], None]  # with a timeout in milliseconds
    anomalies: Anomalies
    deliver: Callable[[Callable[[], None]], None]  # how every answer leaves: soon, in order, never from within the call
    measures: NodeMeasures = field(default_factory=NodeMeasures)

    @property
    def node_id(self) -> NodeId:
        return self.config.node_id

    @property
    def incarnation(self) -> Incarnation:
        return self.identity.incarnation

    @property
    def state(self) -> ClusterState:
        return self.applied.state
