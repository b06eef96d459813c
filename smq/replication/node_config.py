"""The settings of one node: identities, peers and timeouts. Read once at start, never replicated.

No setting here may change the outcome of a command: those that do are in the replicated state.
"""

from dataclasses import dataclass
from typing import Final

from smq.raft_state.command_codec import FEATURE_LEVEL
from smq.raft_state.commands import Listener
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import REPLIES_MAX_DEFAULT

TAIL_BYTES_KEPT: Final = 1 << 20  # two of librdkafka's largest batches: consumers and followers read the newest next


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """`peers` names every node of the cluster, this one included, with its host and port for other nodes."""

    node_id: NodeId
    cluster_id: str
    peers: dict[NodeId, tuple[str, int]]
    grpc_address: str = ""
    http_address: str = ""
    kafka_address: str = ""
    rack: str = ""
    listeners: tuple[Listener, ...] = ()

    feature_level_known: int = FEATURE_LEVEL  # to this smq; the simulation runs older ones by it
    feature_level_max: int = 0  # the cluster's feature level does not rise above it; 0: as far as all nodes know

    heartbeat_interval_ms: int = 100  # between two messages by which the other nodes see that this one lives
    session_timeout_ms: int = 3000  # a silent node is fenced after this; after 500 at most if its connection is gone
    tick_interval_ms: int = 20  # between two looks at the timeouts: nothing that a user waits for depends on it
    # Raft's. They are for a machine that falls silent: a killed leader's sessions close. Kafka's controllers wait for
    # 2000, too. A leader that gets no processor for less than this, beside followers that do, stays leader.
    election_timeout_min_ms: int = 2000
    election_timeout_max_ms: int = 3000
    raft_heartbeat_ms: int = 50  # between two messages of an idle Raft leader, which keep others from an election
    leader_isolation_ms: int = 2000  # rule 20: a Raft leader without a majority of followers for this long resigns
    disk_hang_ms: int = 2000  # a disk that has written nothing for this long hangs: its node gives up leading
    rebalance_interval_ms: int = 5000  # how long a node must be healthy before it gets its leaderships back
    raft_snapshot_entries: int = 5000  # journal entries between two snapshots
    # Applied entries between two digests of the replicated state, which nodes compare. Entries wait for each: 0.1 s at
    # 10,000 partitions, some ms in most clusters. Nodes with different numbers compare fewer. 0: never.
    digest_entries: int = 1 << 14
    settle_work_max: int = 300  # units of 10 us: how long replicas may follow the applied state without a pause

    replies_max: int = REPLIES_MAX_DEFAULT  # answers kept for repeated commands, in a cluster that this node founds

    # A node's appends not yet durable: half of it for partitions that it leads (beyond it OVERLOADED), half of it for
    # those that it follows (beyond it their leaders wait).
    append_inflight_bytes_max: int = 64 << 20
    # Producers that this node remembers over all its partitions, 160 to 340 bytes each; beyond it new ones are refused.
    # A follower takes what its leaders have taken, so a node may hold more.
    producers_max: int = 1_000_000
    # Below it no records are appended. Twice the bytes that may be in flight, and their pages, must fit into it.
    disk_reserve_bytes: int = 256 << 20
    tail_bytes_kept: int = TAIL_BYTES_KEPT  # of each partition's newest durable batches: readers get these from memory
    retention_check_ms: int = 1_000  # between two looks at what a led partition does not retain
    compaction_check_ms: int = 15_000  # between two looks at what may be compacted of a led partition
    compaction_memory_bytes: int = 128 << 20  # of the table of keys: 6.7 million keys in one pass
    compaction_segment_bytes: int = 8 << 20  # fetched, checked and installed as one
    compaction_reset_ms: int = 60_000  # how long compacted bytes may be nowhere before the leader gives them up
    scrub_period_s: int = 7 * 24 * 3600  # everything on disk is read and checked once per period; 0: never
    replica_inflight_bytes_max: int = 8 << 20  # of one partition, sent to one follower and not yet acknowledged
    fetch_bytes_max: int = 8 << 20  # of one partition in one answer to a fetch, whatever the client asks for
    fetch_waiters_max: int = 20_000  # long polls parked on a node

    @property
    def feature_level(self) -> int:
        """The highest feature level that this node agrees to."""
        return min(self.feature_level_known, self.feature_level_max or self.feature_level_known)
