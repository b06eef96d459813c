"""Bugs for Raft alone: production code with one repair taken out, to prove that the Raft group would notice.

Owns the list, and the changes that the list of whole clusters (`chaos_tests/sim/planted`) plants, too. A bug with
a `plan` is found by seeds (`python -m chaos_tests planted`). The others need a history that no seed is sure to draw:
tests build it by hand (tests/sim/test_raft_group.py, tests/unit/replication/raft).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from chaos_tests.sim.mutation import Mutation, mutated
from chaos_tests.sim.raft.group import Plan, Violation
from smq.replication.raft.view import EngineTiming, RaftViolation

_RAFT: Final = "smq.replication.raft."
_SLOW_DISK: Final = (1.0, 25.0)
_SEEDS_MAX: Final = 200  # each is found within about 100 seeds; twice that leaves little to luck

NO_BARRIER: Final = Mutation(
    _RAFT + "outbox:Outbox.barrier_seq",
    "self._changed_seq if needs is Needs.EVERYTHING else self._vote_seq",
    "0",
)
COUNTS_UNSYNCED: Final = Mutation(
    _RAFT + "leader:Leader.own_durable_index", "self._view.journal.durable_index", "self._view.journal.last_index"
)
UNCONFIRMED_READS: Final = Mutation(
    _RAFT + "leader:Leader.confirmed_by_majority", "return numbers[len(numbers) // 2]", 'return float("inf")'
)
EVERY_DISK_COUNTS: Final = Mutation(
    _RAFT + "voters:Voters.counts", "self._registered_disk(node) in (None, disk)", "True"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBug:
    """`plan`: the runs whose seeds find it, within `seeds` of them, by an error of one of these types that says
    `message` (a pattern)."""

    name: str
    rule: str
    mutations: tuple[Mutation, ...]
    plan: Plan | None = None
    seeds: int = _SEEDS_MAX
    errors: tuple[type[Exception], ...] = (Violation, RaftViolation)
    message: str = ""

    def planted(self) -> AbstractContextManager[None]:
        return mutated(self.mutations)


def _plan(
    *only: str,
    nodes: int = 3,
    faults_ms: int = 4_000,
    disk_latency_ms: tuple[float, float] | None = None,
    timing: EngineTiming | None = None,
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
        timing=timing or EngineTiming(snapshot_entries=25),
        repeats_votes=repeats_votes,
    )


_ALL: Final = (
    GroupBug(
        name="no-barrier",
        rule="finding 2: on disk before it is acknowledged",
        mutations=(NO_BARRIER,),
        plan=_plan("crash_one", "crash_all", "isolate", disk_latency_ms=_SLOW_DISK),
    ),
    GroupBug(
        name="ack-before-durable",
        rule="finding 2: on disk before it is acknowledged, entries as well as votes",
        mutations=(
            Mutation(
                _RAFT + "outbox:Outbox.barrier_seq",
                "self._changed_seq if needs is Needs.EVERYTHING else self._vote_seq",
                "self._vote_seq",
            ),
        ),
        plan=_plan("crash_one", "crash_all", disk_latency_ms=_SLOW_DISK),
    ),
    GroupBug(
        name="self-count-before-durable",
        rule="finding 2: the leader counts itself only once its entries are on its own disk",
        mutations=(COUNTS_UNSYNCED,),
        plan=_plan("crash_one", "isolate", disk_latency_ms=(1.0, 120.0)),
    ),
    GroupBug(
        name="truncate-without-conflict",
        rule="finding 3: a follower drops its tail on a conflict only, and a success rewinds nothing",
        mutations=(
            Mutation(
                _RAFT + "follower:Follower.on_append",
                "if self._accept(peer, m.term)",
                "journal, commit = self._view.journal, self._view.commit_index\n"
                "    end = max(m.prev_index + len(m.entries), commit)\n"
                "    if m.term == self._view.term and m.prev_index and end < journal.last_index:\n"
                "        journal.truncate_from(end + 1)\n"
                "    if self._accept(peer, m.term)",
            ),
            Mutation(
                _RAFT + "leader:Leader.on_reply",
                "progress.next_index = max(progress.next_index, progress.match_index + 1)",
                "progress.next_index = m.next_index if m.next_index > 1 else progress.next_index",
            ),
        ),
        plan=_plan("crash_one", "isolate", "break_session"),
    ),
    GroupBug(
        name="unconfirmed-read",
        rule="finding 12: a leader gives a read index once a majority has answered what it sent after the read began",
        mutations=(UNCONFIRMED_READS,),
        plan=_plan("isolate", "pause", "cut_one_way"),
    ),
    GroupBug(
        name="duplicate-votes",
        rule="finding 11: votes are told apart by voter",
        mutations=(
            Mutation(
                _RAFT + "engine_pysyncobj:_Library._counts_vote",
                "peer not in self._voted and self._voters.counts(peer, m.disk)",
                "True",
            ),
        ),
        plan=_plan("crash_one", "isolate", "pause", nodes=5, repeats_votes=True),
    ),
    GroupBug(
        name="forgotten-vote",
        rule="a leader that steps down has voted in its term nevertheless",
        mutations=(
            Mutation(
                _RAFT + "core:Core._step_down", "self._library.step_down()", "self._library.adopt_term(self.term)"
            ),
        ),
        plan=_plan("isolate"),
        seeds=20,
        errors=(ValueError,),
        message="vote for None in term",
    ),
    GroupBug(
        name="next-entry-too-early",
        rule="an entry is applied once the one before it has settled",
        mutations=(Mutation(_RAFT + "applier:Applier._settle", "not self._machine.settle()", "False"),),
        plan=_plan(),
        seeds=1,
        errors=(Violation,),
        message="has settled",
    ),
    GroupBug(
        name="no-snapshots",
        rule="a follower that needs a snapshot installs it",
        mutations=(
            Mutation(
                _RAFT + "follower:Follower.on_chunk",
                "self._accept(peer, m.term) and not self._is_busy(peer, m)",
                "False",
            ),
        ),
        plan=_plan(faults_ms=2_000, timing=EngineTiming(snapshot_entries=8)),
        seeds=20,
        errors=(Violation,),
        message="entries|no progress",
    ),
    GroupBug(
        name="no-snapshot-clamp",
        rule="finding 4: a snapshot commits no tail that was never compared",
        mutations=(
            Mutation(
                _RAFT + "follower:Follower._holds",
                "index <= self._view.commit_index or (index <= journal.last_index and journal.term_at(index) == term)",
                "index <= journal.last_index",
            ),
        ),
    ),
    GroupBug(
        name="quorum-of-what-was-sent",
        rule="an operator sees what is durable on each voter's disk, not what was sent there",
        mutations=(
            Mutation(
                _RAFT + "leader:_described",
                "progress.match_index + 1 if progress.match_index else -1",
                "progress.next_index",
            ),
        ),
        plan=_plan(),
        message="is said to have",
    ),
    GroupBug(
        name="install-not-atomic",
        rule="findings 5 and 6: a snapshot and the journal it replaces are one transaction",
        mutations=(
            Mutation(
                _RAFT + "writer:JournalWriter.write",
                "seq = self._disk.submit(changes.ops, self._on_submission_done)",
                "emptied = [at for at, op in enumerate(changes.ops, 1) if len(getattr(op, 'stop', b'')) > 8]\n"
                "    if emptied:\n"
                "        self._disk.submit(changes.ops[:emptied[0]])\n"
                "    seq = self._disk.submit(changes.ops[sum(emptied[:1]):], self._on_submission_done)",
            ),
        ),
    ),
    GroupBug(
        name="commit-older-terms",
        rule="only an entry of the leader's own term is committed by counting",
        mutations=(
            Mutation(
                _RAFT + "leader:Leader.advance_commit",
                " and self._view.journal.term_at(index) == self._view.term",
                "",
            ),
        ),
    ),
    GroupBug(
        name="no-pre-vote",
        rule="finding 13: a node that was paused does not depose a healthy leader",
        mutations=(
            Mutation(
                _RAFT + "core:Core._ask_for_election",
                "self._library.postpone_election()",
                "return self._stand_for_election()",
            ),
        ),
    ),
    GroupBug(
        name="vote-of-a-replaced-disk",
        rule="18: a replaced disk is no Raft voter until the others have let it in",
        mutations=(EVERY_DISK_COUNTS,),
    ),
    GroupBug(
        name="ack-of-a-replaced-disk",
        rule="18: what a replaced disk acknowledges counts no more than its vote",
        mutations=(
            Mutation(
                _RAFT + "leader:Leader._counts",
                "progress.disk is not None and self._view.voters.counts(peer, progress.disk)",
                "True",
            ),
        ),
    ),
)

BUGS: Final = {bug.name: bug for bug in _ALL}
