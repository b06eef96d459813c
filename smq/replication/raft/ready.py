"""What one turn of Raft takes and gives, as data.

Owns the types between Raft (the consensus library with its repairs) and the node around it, after etcd's `Ready`. A
turn has two steps, because the state machine works in slices. What Raft says to its peers does not wait for that:

    step(messages)          -> Work, Output   what the state machine is to do; what is to be persisted and sent first
    conclude(MachineReport) -> Ready          everything else that is to happen

It must never do anything by itself. Everything in this package may import it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from smq.raft_state.ids import LogIndex, NodeId, Term
from smq.raft_state.replies import Applied
from smq.replication.ports import Committed, ProposalLost
from smq.replication.raft.journal import Changes, Snapshot
from smq.replication.raft.messages import Message


class RaftViolation(Exception):
    """Something that Raft rules out has happened. The process must end: its state cannot be trusted."""


class Needs(enum.Enum):
    """What must be on disk before a message may leave."""

    EVERYTHING = enum.auto()  # every change of journal, term and vote up to the end of its turn
    VOTE = enum.auto()  # term and vote only: a leader's entries may travel while they are being written
    # (Ongaro's thesis 10.2.1; the leader counts itself only once they are on its own disk)
    ALIVE = enum.auto()  # term and vote, but says no more than that: may overtake, is dropped rather than kept


# ------------------------------------------------------------------------------------- Raft -> the state machine
@dataclass(frozen=True, slots=True)
class Apply:
    """Entries up to this index are committed: apply some of them, or continue a snapshot of the applied state."""

    up_to: LogIndex


@dataclass(frozen=True, slots=True)
class Install:
    """Replace the state by this snapshot, some steps per turn. Every turn has the same object until it is done."""

    snapshot: Snapshot


Work: TypeAlias = Apply | Install | None


# ------------------------------------------------------------------------------------- the state machine -> Raft
@dataclass(frozen=True, slots=True)
class AppliedEntry:
    """`outcome` is None for an entry without a command."""

    index: LogIndex
    term: Term
    outcome: Applied | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """How far the state machine came in this turn. `up_to` is the last entry that has been applied as a whole, `taken`
    a snapshot of the state there."""

    up_to: LogIndex
    entries: tuple[AppliedEntry, ...] = ()
    installed: Snapshot | None = None
    taken: Snapshot | None = None
    is_taking_snapshot: bool = False


# --------------------------------------------------------------------------------------------- Raft -> the world
@dataclass(frozen=True, slots=True)
class Outgoing:
    peer: NodeId
    message: Message
    needs: Needs


@dataclass(frozen=True, slots=True)
class Answer:
    """To a proposal (Committed or ProposalLost) or a read (an index or ProposalLost)."""

    done: Callable[[Any], None]
    outcome: Committed | LogIndex | ProposalLost


@dataclass(frozen=True, slots=True)
class Leadership:
    term: Term
    leader: NodeId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """For disk and peers, in this order."""

    changes: Changes | None  # to be persisted
    messages: tuple[Outgoing, ...]  # each with its barrier


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Output):
    """The end of a turn, carried out by raft/executor.py. Its output is that of a snapshot
    which was taken or installed."""

    answers: tuple[Answer, ...]
    leadership: Leadership | None  # if it differs from that of the previous turn
    has_more: bool  # the next turn must not wait for an event
