"""The replicated state of this node, and everything that follows a change of it.

Owns the machine, the index of the last entry that it holds, and the order of what follows an entry: the controller is
woken, the replicas follow, then the waiting proposals are answered. No proposal is answered before the replicas have
followed its entry. The engine drives it; the parts of the node only read `state`.
"""

from collections.abc import Iterator
from typing import Final

from smq.raft_state.codec import decode_command
from smq.raft_state.commands import (
    AddPartitions,
    CommitOffsets,
    CompleteTransactions,
    CreateTopic,
    ElectLeader,
    EndTransaction,
    FenceNode,
    RegisterNode,
    SetNodeDrained,
    UnfenceNode,
)
from smq.raft_state.ids import DiskId, LogIndex, NodeId
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied
from smq.replication.anomalies import CommitWatch, StateWatch
from smq.replication.commands.proposer import Proposer
from smq.replication.digests import Digests
from smq.replication.nodes.controller import Controller
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.transaction_joins import TransactionJoins
from smq.replication.ports import Clock

_MAY_NEED_ELECTION: Final = (RegisterNode, FenceNode, UnfenceNode, CreateTopic, AddPartitions, ElectLeader)
_MAY_MOVE_COMMITS: Final = (CommitOffsets, EndTransaction)


class AppliedState:
    """Implements the StateMachine port."""

    _controller: Controller
    _replicas: Replicas
    _proposer: Proposer
    _commits: CommitWatch
    _states: StateWatch

    def __init__(self, clock: Clock, known_level: int) -> None:
        """`known_level`: the highest feature level that this node knows."""
        self._known_level = known_level
        self._machine = Machine(known_level=known_level)
        self.state = self._machine.state  # an attribute: it is read several times for every batch
        self.index = LogIndex(0)  # in the state; the engine calls an entry applied only once this node has followed it
        self.digests = Digests(clock, self.snapshot, lambda: self.index)

    def connect(self, controller: Controller, replicas: Replicas, proposer: Proposer, joins: TransactionJoins) -> None:
        """To the parts that follow the state. They read it too, so they are made after it."""
        self._controller, self._replicas, self._proposer, self._joins = controller, replicas, proposer, joins

    def watch(self, commits: CommitWatch, states: StateWatch, digest_entries: int) -> None:
        """Has a digest taken after every so many entries; 0: never."""
        self._commits, self._states, self._digest_entries = commits, states, digest_entries

    def registered_disk(self, node: NodeId) -> DiskId | None:
        known = self.state.nodes.get(node)
        return known.disk if known is not None else None

    # ---------------------------------------------------------------------------------------- StateMachine
    def apply(self, index: LogIndex, command: bytes) -> Applied:
        decoded = decode_command(command, self._known_level)
        watched = self._commits.before(self.state, decoded) if isinstance(decoded, _MAY_MOVE_COMMITS) else None
        applied = self._machine.apply(index, decoded)
        if watched is not None:
            self._commits.after(self.state, watched)
        if isinstance(decoded, _MAY_NEED_ELECTION):
            self._controller.wake()
        elif isinstance(decoded, SetNodeDrained):
            self._controller.rebalance_soon()
        elif isinstance(decoded, CompleteTransactions):
            self._joins.on_completions()
        self.index = index
        self.digests.on_state_moved()
        if self._digest_entries > 0 and index % self._digest_entries == 0:
            self.digests.request_here(self._states.computed)
        self._replicas.touch(applied.touched)
        return applied

    def pass_over(self, index: LogIndex) -> None:
        self.index = index

    def settle(self) -> bool:
        """Also holds the next entry back while a digest is computed that the last one has disturbed."""
        if not self._replicas.follow() or self.digests.holds_state:
            return False
        self._proposer.on_applied(self.index)
        return True

    def snapshot(self) -> Iterator[bytes]:
        return self._machine.snapshot_pieces()

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        """The new state replaces the old one in one step. Until a replica is settled, it continues with the old record
        of its partition, as on a node that lags. No barrier ends before all replicas are settled. The first state of a
        process comes from its own disk."""
        is_own = not self.index
        self._machine = yield from Machine.restoring(snapshot, self._known_level)
        self.state = self._machine.state
        self.index = index
        self._commits.forget()
        self.digests.on_state_moved()
        self._replicas.touch_all(is_own_disk=is_own)
        self._controller.wake()
        while not self._replicas.follow():
            yield
        self._proposer.on_applied(index)
