"""Bugs for Raft alone: one repair taken out of production code, to prove that the Raft group would notice.

Owns the list, and the faults that the list of whole clusters (`chaos_tests/sim/planted`) plants, too. A bug with
a `plan` is found by seeds (`python -m chaos_tests planted`). The others need a history that no seed is sure to draw:
tests build it by hand (tests/sim/test_raft_group.py, tests/unit/replication/raft).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from chaos_tests.sim.raft.group import Plan, Violation
from chaos_tests.sim.replacement import Bug, Fault, replace, returns
from smq.raft_state.ids import NodeId
from smq.replication.raft.core import Core
from smq.replication.raft.executor import Outbox
from smq.replication.raft.follower import Follower
from smq.replication.raft.journal import Changes, JournalWriter
from smq.replication.raft.leader import Leader
from smq.replication.raft.messages import Append, AppendReply, Vote
from smq.replication.raft.ready import Needs, RaftViolation
from smq.replication.raft.timing import RaftTiming
from smq.replication.runtime.heard_time import HeardTime

_RAFT: Final = "smq.replication.raft."
_SLOW_DISK: Final = (1.0, 25.0)
_SEEDS_MAX: Final = 200  # each is found within about 100 seeds; twice that leaves little to luck


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBug(Bug):
    """`plan`: the runs whose seeds find it, within `seeds` of them, by an error of one of these types that says
    `message` (a pattern)."""

    plan: Plan | None = None
    seeds: int = _SEEDS_MAX
    errors: tuple[type[Exception], ...] = (Violation, RaftViolation)
    message: str = ""


def _plan(
    *only: str,
    nodes: int = 3,
    faults_ms: int = 4_000,
    disk_latency_ms: tuple[float, float] | None = None,
    timing: RaftTiming | None = None,
    repeats_votes: bool = False,
) -> Plan:
    """Without looking at the wire: a bug must show by what it does to acknowledged commands, terms and histories."""
    return Plan(
        seed=0,
        inspects_wire=False,
        only=only,
        nodes=nodes,
        faults_ms=faults_ms,
        disk_latency_ms=disk_latency_ms,
        timing=timing or RaftTiming(snapshot_entries=25),
        repeats_votes=repeats_votes,
    )


# ------------------------------------------------------------------------------------------------- the faults
def _last_index(_original: Fault, lead: Leader) -> int:
    return lead._core.journal.last_index


NO_BARRIER: Final = replace(_RAFT + "executor:Outbox.barrier_seq", by=returns(0))
COUNTS_UNSYNCED: Final = replace(_RAFT + "leader:Leader.own_durable_index", by=_last_index)
UNCONFIRMED_READS: Final = replace(_RAFT + "leader:Leader.confirmed_by_majority", by=returns(float("inf")))
EVERY_DISK_COUNTS: Final = replace(_RAFT + "voters:Voters.counts", by=returns(True))


def _votes_only(original: Fault, outbox: Outbox, _needs: Needs) -> Any:
    return original(outbox, Needs.VOTE)


def _drops_its_tail(original: Fault, follower: Follower, peer: NodeId, m: Append) -> None:
    core = follower._core
    end = max(m.prev_index + len(m.entries), core.commit_index)
    if m.term == core.term and m.prev_index and end < core.journal.last_index:
        core.journal.truncate_from(end + 1)
    original(follower, peer, m)


def _rewinds(original: Fault, lead: Leader, peer: NodeId, m: AppendReply) -> None:
    original(lead, peer, m)
    if m.success and m.next_index > 1:
        lead._progress[peer].next_index = m.next_index


def _counts_twice(_original: Fault, library: Any, _peer: NodeId, m: Vote) -> bool:
    return bool(m.term == library.term)


def _holds_what_is_as_long(_original: Fault, follower: Follower, index: int, _term: int) -> bool:
    return index <= follower._core.journal.last_index


def _in_two(original: Fault, writer: JournalWriter, changes: Changes) -> int:
    """Up to the first deletion of a range, then the rest."""
    for at, op in enumerate(changes.ops, 1):
        if len(getattr(op, "stop", b"")) > 8:
            writer._disk.submit(changes.ops[:at])
            return int(original(writer, dataclasses.replace(changes, ops=changes.ops[at:])))
    return int(original(writer, changes))


def _commits_any_term(_original: Fault, lead: Leader) -> None:
    if (index := lead.committable_index()) > lead._core.commit_index:
        lead._core.commit_to(index)


def _stands_at_once(_original: Fault, core: Core) -> None:
    core._stand_for_election()


def _every_moment(_original: Fault, heard_time: HeardTime) -> int:
    return heard_time._clock.monotonic_ns()


_ALL: Final = (
    GroupBug(
        name="no-barrier",
        rule="finding 2: on disk before it is acknowledged",
        faults=(NO_BARRIER,),
        plan=_plan("crash_one", "crash_all", "isolate", disk_latency_ms=_SLOW_DISK),
    ),
    GroupBug(
        name="ack-before-durable",
        rule="finding 2: on disk before it is acknowledged, entries as well as votes",
        faults=(replace(_RAFT + "executor:Outbox.barrier_seq", by=_votes_only),),
        plan=_plan("crash_one", "crash_all", disk_latency_ms=_SLOW_DISK),
    ),
    GroupBug(
        name="truncate-without-conflict",
        rule="finding 3: a follower drops its tail on a conflict only, and a success rewinds nothing",
        faults=(
            replace(_RAFT + "follower:Follower.on_append", by=_drops_its_tail),
            replace(_RAFT + "leader:Leader.on_reply", by=_rewinds),
        ),
        plan=_plan("crash_one", "isolate", "break_session"),
    ),
    GroupBug(
        name="unconfirmed-read",
        rule="finding 12: a leader gives a read index once a majority has answered what it sent after the read began",
        faults=(UNCONFIRMED_READS,),
        plan=_plan("isolate", "pause", "cut_one_way"),
    ),
    GroupBug(
        name="duplicate-votes",
        rule="finding 11: votes are told apart by voter",
        faults=(replace(_RAFT + "pysyncobj_adapter:Library._counts_vote", by=_counts_twice),),
        plan=_plan("crash_one", "isolate", "pause", nodes=5, repeats_votes=True),
    ),
    GroupBug(
        name="no-snapshot-clamp",
        rule="finding 4: a snapshot commits no tail that was never compared",
        faults=(replace(_RAFT + "follower:Follower._holds", by=_holds_what_is_as_long),),
    ),
    GroupBug(
        name="install-not-atomic",
        rule="findings 5 and 6: a snapshot and the journal it replaces are one transaction",
        faults=(replace(_RAFT + "journal:JournalWriter.write", by=_in_two),),
    ),
    GroupBug(
        name="commit-older-terms",
        rule="only an entry of the leader's own term is committed by counting",
        faults=(replace(_RAFT + "leader:Leader.advance_commit", by=_commits_any_term),),
    ),
    GroupBug(
        name="no-pre-vote",
        rule="finding 13: a node that was paused does not depose a healthy leader",
        faults=(replace(_RAFT + "core:Core._ask_for_election", by=_stands_at_once),),
    ),
    GroupBug(
        name="counts-what-it-slept-through",
        rule="a silence that a node slept through counts for nothing",
        faults=(replace("smq.replication.runtime.heard_time:HeardTime.now_ns", by=_every_moment),),
        plan=_plan("oversleep"),
        message="merely slept",
    ),
    GroupBug(
        name="vote-of-a-replaced-disk",
        rule="18: a replaced disk is no Raft voter until the others have let it in",
        faults=(EVERY_DISK_COUNTS,),
    ),
    GroupBug(
        name="ack-of-a-replaced-disk",
        rule="18: what a replaced disk acknowledges counts no more than its vote",
        faults=(replace(_RAFT + "leader:Leader._counts", by=returns(True)),),
    ),
)

BUGS: Final = {bug.name: bug for bug in _ALL}
