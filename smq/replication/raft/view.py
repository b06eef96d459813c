"""The seam between Raft's roles (follower, leader, pre-vote) and the consensus library, and the time-outs of both.

Owns RaftView, which the roles are written against, and Consensus, which hides the library. One file implements
Consensus (engine_pysyncobj.py), so replacing the library means replacing that file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from smq.raft_state.ids import NodeId
from smq.replication.config import NodeConfig
from smq.replication.ports import Committed, ProposalDone, ProposalLost, Rng
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.messages import Message, RequestVote, Vote
from smq.replication.raft.ready import AppliedEntry, Needs
from smq.replication.raft.voters import Voters


class RaftViolation(Exception):
    """Something that Raft rules out has happened. The process must end: its state cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTiming:
    """`leader_fallback_ms`: a leader that hears no majority for this long steps down. `snapshot_entries`: applied
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftSetup:
    """What a RaftCore is made of. The journal has been loaded; `peers` are all other voters, ascending; `now` is in
    seconds of the node's monotonic clock."""

    node_id: NodeId
    peers: tuple[NodeId, ...]
    journal: RaftJournal
    voters: Voters
    timing: EngineTiming
    now: Callable[[], float]
    rng: Rng


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
        """Waits for its barrier. Dropped if there is no session."""

    def adopt_term(self, term: int) -> None:
        """A newer term was seen; no leader of it is known yet."""

    def follow(self, leader: NodeId) -> None:
        """`leader` leads the present term; the election deadline is set again."""

    def commit_to(self, index: int) -> None:
        """Moves the commit index forward, never back."""

    @property
    def is_installing(self) -> bool:
        """A snapshot is being installed: until then, the journal must not change."""

    def install(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        """Begins to replace journal and state machine; `done` is called when that is complete, some turns later."""


class Listener(Protocol):
    """Takes the library's reports, messages and answers."""

    def send(self, peer: NodeId, message: Message) -> None: ...

    def answer(self, done: ProposalDone, outcome: Committed | ProposalLost) -> None: ...

    def began_to_lead(self) -> None:
        """Before the first entry of the term is added."""

    def ceased_to_lead(self) -> None: ...

    def announce(self) -> None:
        """The first entry of the term has been added: send it, and a heartbeat, to all members."""


class Consensus(Protocol):
    """The consensus library: term, vote and leader, elections, and the proposals that wait for a commit.

    It changes term, vote and entries through the journal of its RaftSetup, where the commit index begins, and does
    nothing by itself.
    """

    @property
    def term(self) -> int: ...

    @property
    def leader(self) -> NodeId | None: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def is_follower(self) -> bool:
        """Neither a leader nor a candidate."""

    @property
    def commit_index(self) -> int: ...

    def commit_to(self, index: int) -> None:
        """Forward, never back. The journal's own is not touched."""

    def adopt_term(self, term: int) -> None:
        """A newer one; no leader of it is known yet."""

    def step_down(self) -> None:
        """Within the present term: its vote stays cast."""

    def follow(self, leader: NodeId) -> None:
        """`leader` leads the present term; the election deadline is set again."""

    @property
    def is_election_due(self) -> bool:
        """The election deadline has passed."""

    def expedite_election(self, at: float) -> None:
        """Moves the election deadline there, if it is later."""

    def postpone_election(self) -> None:
        """Sets the election deadline again; no leader is known."""

    def stand(self) -> None:
        """A candidate of the next term, with its own vote. The caller asks the others."""

    def lead(self) -> None:
        """Elected by its own vote alone: a cluster of one."""

    def on_request_vote(self, peer: NodeId, m: RequestVote) -> None:
        """By a disk that may be elected, of this term or a newer one. Sends a Vote, or nothing."""

    def on_vote(self, peer: NodeId, m: Vote) -> None:
        """Counts it at most once, in its own term, if the disk is the voter's. The majority makes it the leader."""

    def propose(self, command: bytes, done: ProposalDone) -> None:
        """Queues it, or answers NOT_LEADER if too many are queued."""

    @property
    def has_proposals(self) -> bool: ...

    def take_proposals(self) -> None:
        """Queued commands enter the journal, of a leader. Nothing is ever forwarded (docs/rules.md, finding 10)."""

    def refuse_proposals(self) -> None: ...

    def answer_waiting(self, entry: AppliedEntry) -> None:
        """The proposals that wait for this index: Committed if the entry is of the same term, otherwise lost."""

    def give_up_waiting(self, *, up_to: int) -> None:
        """Proposals at these indexes: UNKNOWN. Another node decides whether they are committed."""
