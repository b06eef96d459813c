"""The time-outs of Raft, and how often it takes a snapshot.

Owns RaftTiming, which the composition root makes from a node's settings. Everything in this package may import it.
"""

from dataclasses import dataclass

from smq.replication.node_config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftTiming:
    """`leader_fallback_ms`: a leader that hears no majority for this long steps down. A node's is its shortest election
    time-out, so that late followers cost no term that they would not end themselves. `snapshot_entries`: applied
    entries between two snapshots."""

    election_timeout_min_ms: int = 300
    election_timeout_max_ms: int = 600
    heartbeat_ms: int = 50
    leader_fallback_ms: int = 500
    snapshot_entries: int = 5000
    tick_ms: int = 20  # between two looks at the clock

    def __post_init__(self) -> None:
        if not 0 < 3 * self.heartbeat_ms < self.election_timeout_min_ms < self.election_timeout_max_ms:
            raise ValueError("an election time-out is longer than three heartbeats, and its maximum than its minimum")
        if self.leader_fallback_ms <= self.heartbeat_ms:
            raise ValueError("leader_fallback_ms must be longer than heartbeat_ms")
        if self.snapshot_entries < 2:
            raise ValueError("snapshot_entries must be at least 2")

    @classmethod
    def of(cls, config: NodeConfig) -> "RaftTiming":
        return cls(
            election_timeout_min_ms=config.election_timeout_min_ms,
            election_timeout_max_ms=config.election_timeout_max_ms,
            heartbeat_ms=config.raft_heartbeat_ms,
            leader_fallback_ms=config.election_timeout_min_ms,
            snapshot_entries=config.raft_snapshot_entries,
            tick_ms=config.tick_interval_ms,
        )
