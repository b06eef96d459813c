"""Planted bugs that a hand-built course of one partition finds: moments that seeds of a whole cluster seldom meet.

Owns the list: for each bug the rule that it breaks, the change, its course and what the course then says.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from chaos_tests.sim.mutation import Mutation, mutated
from chaos_tests.sim.partition import courses
from chaos_tests.sim.partition.group import Group
from chaos_tests.sim.partition.producer_truth import Violation

_PARTITION: Final = "smq.replication.partition."
_PARTITION_LOG: Final = "smq.replication.log.partition_log:PartitionLog."
_REPLICA: Final = _PARTITION + "replica:Replica."
_STREAM: Final = _PARTITION + "streams:FollowerStream."
_ELECTIONS: Final = "smq.raft_state.handlers.elections:"
_SEALS: Final = "smq.raft_state.seals:"
CUT_OFF: Final = "is cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseBug:
    """`message` is a pattern of what the course then violates. `nodes`: all have a replica."""

    name: str
    rule: str
    mutations: tuple[Mutation, ...]
    course: Callable[[Group], None]
    message: str = CUT_OFF
    nodes: int = 3

    def planted(self) -> AbstractContextManager[None]:
        return mutated(self.mutations)

    def found(self) -> str | None:
        """What the course says with the bug, if that fits; None if the bug does not show."""
        try:
            with self.planted():
                run(self.course, self.nodes)
        except Violation as e:
            return str(e) if re.search(self.message, str(e)) else None
        return None


def run(course: Callable[[Group], None], nodes: int = 3) -> Group:
    """Raises Violation if the course breaks a promise, or if the partition does not work again afterwards."""
    group = Group(nodes=nodes)
    course(group)
    group.heal()
    return group


COURSE_BUGS: tuple[CourseBug, ...] = (
    CourseBug(
        name="sealed-leader-leads-on",
        rule="21: a process that has sealed an epoch leads it no more",
        mutations=(Mutation(_REPLICA + "seal", "self._stop_leading()", "pass"),),
        course=courses.leader_goes_on_after_its_seal,
    ),
    CourseBug(
        name="acknowledges-after-its-seal",
        rule="7: a process that has sealed the epoch acknowledges nothing, not even what becomes durable later",
        mutations=(Mutation(_REPLICA + "_send_ack", "if self._is_out:", "if self.is_end_hidden:"),),
        course=courses.follower_writes_after_its_seal,
    ),
    CourseBug(
        name="unregistered-process-counts",
        rule="8: only the registered process of a follower counts",
        mutations=(Mutation(_STREAM + "acked_end", " or self._incarnation != self._registered(self.peer)", ""),),
        course=courses.sealed_follower_starts_again_unregistered,
    ),
    CourseBug(
        name="seal-of-a-former-process",
        rule="11: a seal counts only while its process is the registered one",
        mutations=(
            Mutation(_ELECTIONS + "_check_seals", " and state.nodes[seal.node].incarnation == seal.incarnation", ""),
        ),
        course=courses.sealed_follower_starts_again_registered,
    ),
    CourseBug(
        name="placed-batch-is-not-asked-about",
        rule="27: a leader learns that a follower acknowledges nothing more in its epoch",
        mutations=(Mutation(_STREAM + "_patience_ns", "self._end < self._next", "self._in_flight"),),
        course=courses.follower_seals_before_a_placed_batch_is_durable,
        message="it does not work again: ",
        nodes=2,
    ),
    CourseBug(
        name="seal-of-another-epoch",
        rule="21: a replica seals only the epoch that is applied there",
        mutations=(Mutation(_REPLICA + "seal", "self.part.epoch != epoch or ", ""),),
        course=courses.late_question_after_a_seal,
    ),
    CourseBug(
        name="one-seal-elects",
        rule="11: so many replicas have sealed that the others are no majority",
        mutations=(
            Mutation(_SEALS + "seals_needed", "return replicas - majority_of(replicas) + 1", "return 1"),
            Mutation(_SEALS + "commit_floor", "known = sorted(ends, reverse=True)\n", "return min(ends)\n"),
        ),
        course=courses.one_replica_of_three_is_asked,
    ),
    CourseBug(
        name="older-epochs-keep-their-starts",
        rule="11: an older epoch that starts above the new one ends where it starts",
        mutations=(
            Mutation(_ELECTIONS + "_begin_epoch", "history[-1].start >= beginning", "history[-1].start == beginning"),
        ),
        course=courses.epoch_starts_below_an_older_one,
        message=r"is committed on the disks of \[2\]",
    ),
    CourseBug(
        name="former-process-elected",
        rule="11: the candidate is still the process that has offered its log",
        mutations=(
            Mutation(
                _ELECTIONS + "elect_leader",
                "find_node(state, command.candidate, command.incarnation)",
                "state.nodes[command.candidate]",
            ),
        ),
        course=courses.process_that_is_gone_is_elected,
    ),
    CourseBug(
        name="appends-after-a-proposed-hand-over",
        rule="26: once a successor has been proposed, nothing is appended in the epoch any more",
        mutations=(
            Mutation(
                _PARTITION + "handover:HandOver.is_under_way",
                "self._target is not None",
                "self._target is not None and not self._is_proposed",
            ),
        ),
        course=courses.leader_goes_on_after_it_has_proposed_another,
    ),
    CourseBug(
        name="replaced-disk-seals",
        rule="18 and 22: the seal of a replica on another disk proves nothing until it has caught up",
        mutations=(Mutation(_ELECTIONS + "_check_seals", " and seal.node not in partition.incomplete", ""),),
        course=courses.replaced_disk_is_asked,
    ),
    CourseBug(
        name="replica-complete-at-its-first-word",
        rule="22: a replica is complete once it has what the leader's log had when it was first counted",
        mutations=(Mutation(_STREAM + "has_caught_up", " and end >= self._counted_at", ""),),
        course=courses.replaced_disk_is_asked_after_its_first_word,
    ),
    CourseBug(
        name="end-before-the-mark-is-known",
        rule="23: a log ends before its damage only in a state that has this very process registered",
        mutations=(Mutation(_REPLICA + "note_damage", " or self._owner.registered(me) != self._host.incarnation", ""),),
        course=courses.damage_is_found_in_an_older_state,
    ),
    CourseBug(
        name="damage-shortens-a-seal",
        rule="21: a seal says where the log ended, damaged batches included",
        mutations=(
            Mutation(_REPLICA + "seal", "wire.SealedLog(self.pid, end,", "wire.SealedLog(self.pid, self._intact(end),"),
        ),
        course=courses.damaged_batch_is_in_a_sealed_log,
    ),
    CourseBug(
        name="missing-batch-forgotten",
        rule="23: what only the index still knows of is damaged, and its log ends after it",
        mutations=(Mutation("smq.replication.log.store:LogStore._recover", "recovery.take_missing()", "pass"),),
        course=courses.last_batch_is_missing,
    ),
    CourseBug(
        name="missing-batch-takes-its-neighbour-along",
        rule="23: a log keeps what is intact before a batch that is missing",
        mutations=(
            Mutation(
                "smq.replication.log.reader:LogReader._boundary",
                "return self._described_boundary(at)",
                "return base_of_key(self._key_of_batch_at(at))",
            ),
        ),
        course=courses.missing_batch_is_cut,
    ),
    CourseBug(
        name="cut-takes-all-for-a-damaged-first-batch",
        rule="23: a cut that damage keeps from what is to stay says so",
        mutations=(
            Mutation(
                _PARTITION_LOG + "truncate",
                "state.end < end and end > self.log_start",
                "max(self.log_start, self._first) <= state.end < end",
            ),
        ),
        course=courses.first_batch_is_damaged_before_a_cut,
    ),
    CourseBug(
        name="second-damage-is-cut-with-the-first",
        rule="23: a cut of known damage that finds more of it says so",
        mutations=(Mutation(_REPLICA + "_on_end_hidden", "self.is_end_hidden = True", "pass"),),
        course=courses.more_is_damaged_before_the_damage_is_cut,
    ),
    CourseBug(
        name="acknowledged-before-its-second-damage",
        rule="23: a replica that finds more damage waits for the next epoch",
        mutations=(Mutation(_REPLICA + "note_damage", " or self._damaged_in == self.part.epoch", ""),),
        course=courses.replica_is_completed_after_more_is_damaged,
    ),
    CourseBug(
        name="only-batch-is-never-repaired",
        rule="23: a batch that only its index row still names is fetched again",
        mutations=(
            Mutation("smq.replication.log.store:LogStore._recover", "min([first, *recovery.damaged_batches])", "first"),
        ),
        course=courses.only_batch_is_missing,
        message="it does not work again: node 2 has damaged batches",
    ),
    CourseBug(
        name="missing-log-begins-anew",
        rule="23: a log that is missing although its disk has the partition's state may have held anything",
        mutations=(Mutation(_PARTITION + "replicas:Replicas.touch_all", "if is_own_disk:", "if False:"),),
        course=courses.log_is_missing,
    ),
    CourseBug(
        name="log-start-deletes-hidden-damage",
        rule="23: damage that hides where a log ended stays there until the others know of it",
        mutations=(Mutation(_REPLICA + "_follow_log_start", " and not self.is_end_hidden", ""),),
        course=courses.log_start_passes_hidden_damage,
    ),
    CourseBug(
        name="commit-point-of-another-epoch",
        rule="24: a follower takes a commit point only in its applied epoch, and its leader sends none before",
        mutations=(
            Mutation(_REPLICA + "on_commit", "epoch == self.part.epoch and self.has_followed", "self.has_followed"),
            Mutation(_STREAM + "take_commit", "self._next is None or ", ""),
        ),
        course=courses.commit_point_arrives_before_its_epoch,
        message="offset 1: committed is the batch of epoch 1, served that of epoch 0",
    ),
    CourseBug(
        name="count-goes-on-into-two-rounds",
        rule="28: a leader stops to count before it proposes two rounds",
        mutations=(Mutation(_REPLICA + "counts_alone", " and not self.is_count_held", ""),),
        course=courses.two_rounds_are_committed_late,
    ),
    CourseBug(
        name="late-change-of-mode",
        rule="28: a change of the mode fits only the number of changes that its proposer knew",
        mutations=(
            Mutation(
                _ELECTIONS + "set_mode",
                "(command.epoch, command.mode_seq) != (partition.epoch, partition.mode_seq)",
                "command.epoch != partition.epoch",
            ),
        ),
        course=courses.two_rounds_are_committed_twice,
    ),
    CourseBug(
        name="two-rounds-before-the-epoch-is-adopted",
        rule="28: two rounds begin only once the leader knows that all before its epoch is committed",
        mutations=(
            Mutation(
                _PARTITION + "due:mode_changes",
                "part.incomplete if part.two_round else known < part.history[-1].start",
                "part.two_round and part.incomplete",
            ),
            Mutation(
                _ELECTIONS + "set_mode", "if command.two_round and hwm < partition.history[-1].start:", "if False:"
            ),
        ),
        course=courses.two_rounds_before_the_epoch_is_adopted,
    ),
    CourseBug(
        name="deletion-by-former-limits",
        rule="14: retention deletes by the limits that the topic has when its command is applied",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.partitions:apply_retention",
                " and limits[partition.topic_id] == item.limits",
                "",
            ),
        ),
        course=courses.everything_is_to_be_kept_before_a_deletion_is_committed,
        message="is left by retention",
    ),
    CourseBug(
        name="last-epoch-forgotten-with-its-records",
        rule="20: the epoch that ends at the log start stays, and a log is judged by it before it moves there",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.partitions:_prune",
                "history[keep + 1].start < log_start",
                "history[keep + 1].start <= log_start",
            ),
        ),
        course=courses.log_start_moves_while_a_leader_is_cut_off,
        message="acknowledged at 1, where another is committed",
    ),
    CourseBug(
        name="producers-forgotten-with-the-last-record",
        rule="16: a log whose end the log start reaches knows its producers",
        mutations=(Mutation(_PARTITION_LOG + "advance_log_start", "if offset > self.appended_end:", "if True:"),),
        course=courses.all_start_again_before_they_have_moved_the_log_start,
        message="it does not work again",
    ),
    CourseBug(
        name="older-segment-over-a-newer-one",
        rule="compaction: a segment of the past takes no place in a log that has a newer one",
        mutations=(
            Mutation(
                _PARTITION + "compaction.segments:lowest_behind",
                "if held.is_newer_than(part.compactions):",
                "if False:",
            ),
        ),
        course=courses.older_segment_is_offered_after_a_start,
        message="node 1 takes batches of a sound disk for damaged",
    ),
    CourseBug(
        name="damage-keeps-a-segment-out",
        rule="23: a log that damage keeps from growing ends before the damage",
        mutations=(Mutation(_PARTITION_LOG + "install", "self._hide_from(state)", "pass"),),
        course=courses.segment_continues_a_damaged_log,
        message="it does not work again: node 3 lacks a segment",
    ),
    CourseBug(
        name="damage-that-keeps-a-segment-out-is-not-reported",
        rule="23: the others learn of damage that hides where a log ended",
        mutations=(Mutation(_REPLICA + "install", "self._on_end_hidden()", "pass"),),
        course=courses.segment_continues_a_damaged_log,
        message="it does not work again",
    ),
    CourseBug(
        name="damage-that-can-be-repaired-hides-a-log",
        rule="23: a log ends before damage that keeps a segment out only if no other replica has the batch",
        mutations=(
            Mutation(
                _PARTITION_LOG + "install",
                "if base_of_key(self._key_of_batch_at(self.log_start)) > state.end:",
                "if True:",
            ),
        ),
        course=courses.segment_continues_a_log_that_can_be_repaired,
        message="two of three replicas elect no leader",
    ),
)
