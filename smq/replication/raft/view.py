"""What the roles of Raft (follower, leader, pre-vote) see of the consensus library, and its time-outs.

Owns the seam between our repairs and pysyncobj: the roles are written against RaftView and never import the
library. The engine implements it; the roles import it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from smq.raft_state.ids import NodeId
from smq.replication.config import NodeConfig
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.messages import Message
from smq.replication.raft.outbox import Needs
from smq.replication.raft.voters import Voters


class RaftViolation(Exception):
    """Something that Raft excludes has been seen. The process must end: its state cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTiming:
    """`leader_fallback_ms`: a leader that hears no majority this long steps down. `snapshot_entries`: applied
    entries between two snapshots."""

    election_timeout_min_ms: int = 300
    election_timeout_max_ms: int = 600
    heartbeat_ms: int = 50
    leader_fallback_ms: int = 500
    snapshot_entries: int = 5000

    def __post_init__(self) -> None:
        if not 0 < 3 * self.heartbeat_ms < self.election_timeout_min_ms < self.election_timeout_max_ms:
            raise ValueError("an election time-out is longer than three heartbeats, and its maximum than its minimum")
        if self.leader_fallback_ms <= self.heartbeat_ms:
            raise ValueError("leader_fallback_ms must be longer than heartbeat_ms")
        if self.snapshot_entries < 2:
            raise ValueError("snapshot_entries must be at least 2")

    @classmethod
    def of(cls, config: NodeConfig) -> "EngineTiming":
        return cls(
            election_timeout_min_ms=config.election_timeout_min_ms,
            election_timeout_max_ms=config.election_timeout_max_ms,
            heartbeat_ms=config.raft_heartbeat_ms,
            snapshot_entries=config.raft_snapshot_entries,
        )


class RaftView(Protocol):
    """Times are seconds of the node's monotonic clock."""

    @property
    def journal(self) -> RaftJournal: ...

    @property
    def voters(self) -> Voters: ...

    @property
    def timing(self) -> EngineTiming: ...

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """All other voters, ascending."""

    @property
    def term(self) -> int: ...

    @property
    def leader(self) -> NodeId | None: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def commit_index(self) -> int: ...

    def now(self) -> float: ...

    def is_connected(self, peer: NodeId) -> bool: ...

    def send(self, peer: NodeId, message: Message, needs: Needs = Needs.EVERYTHING) -> None:
        """Behind the barrier. Nothing where there is no session."""

    def adopt_term(self, term: int) -> None:
        """A newer term was seen: follow nobody in it yet."""

    def follow(self, leader: NodeId) -> None:
        """`leader` leads the present term; the election deadline starts anew."""

    def commit_to(self, index: int) -> None:
        """Moves the commit index forward, never back."""

    @property
    def is_installing(self) -> bool:
        """A snapshot is being installed: the journal must not change until it is."""

    def install(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        """Begins to replace journal and state machine; `done` when that is over, some turns later."""
