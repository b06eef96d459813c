"""Planted bugs that a hand-built course of one partition finds: moments that seeds of a whole cluster seldom meet.

Owns the list: for each bug the rule that it breaks, the fault, its course and what the course then says.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from chaos_tests.sim.partition import courses
from chaos_tests.sim.partition.group import Group
from chaos_tests.sim.partition.producer_truth import Violation
from chaos_tests.sim.replacement import Bug, Fault, replace, returns
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset
from smq.replication.partition.handover import HandOver
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.streams import FollowerStream

_PARTITION: Final = "smq.replication.partition."
_REPLICA: Final = _PARTITION + "replica:Replica."
_STREAM: Final = _PARTITION + "streams:FollowerStream."
CUT_OFF: Final = "is cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseBug(Bug):
    """`message` is a pattern of what the course then violates. `nodes`: all have a replica."""

    course: Callable[[Group], None]
    message: str = CUT_OFF
    nodes: int = 3

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


# ------------------------------------------------------------------------------------------------- seals, elections
def _leads_on_after_its_seal(original: Fault, replica: Replica) -> None:
    if replica._sealed != replica.part.epoch:
        original(replica)


def _of_any_process(_original: Fault, stream: FollowerStream) -> Offset | None:
    return stream._end if stream._incarnation is not None else None


def _only_while_something_is_under_way(original: Fault, stream: FollowerStream) -> Any:
    end, stream._end = stream._end, stream._next or stream._end
    try:
        return original(stream)
    finally:
        stream._end = end


def _shortest(_original: Fault, ends: Iterable[Offset], _replicas: int) -> Offset:
    return min(ends)


def _until_it_is_proposed(_original: Fault, hand_over: HandOver) -> bool:
    return hand_over._target is not None and not hand_over._is_proposed


def _at_its_first_word(_original: Fault, stream: FollowerStream) -> bool:
    return stream.acked_end is not None and stream._counted == stream._incarnation


# ------------------------------------------------------------------------------------------------- damage
def _itself(original: Fault, replicas: Replicas, node: NodeId) -> Incarnation | None:
    known: Incarnation | None = original(replicas, node)
    return replicas._host.incarnation if node == replicas._host.node_id else known


# ------------------------------------------------------------------------------------------------- marks and starts
def _of_any_epoch(original: Fault, replica: Replica, peer: NodeId, _epoch: Epoch, commit: Offset) -> None:
    seen, replica._epoch_seen = replica._epoch_seen, replica.part.epoch
    original(replica, peer, replica.part.epoch, commit)
    replica._epoch_seen = seen


def _before_it_is_placed(_original: Fault, stream: FollowerStream) -> Offset | None:
    commit = stream._commit_point()
    if commit <= stream._commit_told:
        return None
    stream._commit_told = commit
    return commit


COURSE_BUGS: Final = (
    CourseBug(
        name="sealed-leader-leads-on",
        rule="6 and 21: a process that has sealed an epoch leads it no more, and appends nothing in it",
        faults=(replace(_REPLICA + "_stop_leading", by=_leads_on_after_its_seal),),
        course=courses.leader_goes_on_after_its_seal,
    ),
    CourseBug(
        name="unregistered-process-counts",
        rule="8: only the registered process of a follower counts",
        faults=(replace(_STREAM + "acked_end", by=_of_any_process),),
        course=courses.sealed_follower_starts_again_unregistered,
    ),
    CourseBug(
        name="placed-batch-is-not-asked-about",
        rule="27: a leader learns that a follower acknowledges nothing more in its epoch",
        faults=(replace(_STREAM + "_patience_ns", by=_only_while_something_is_under_way),),
        course=courses.follower_seals_before_a_placed_batch_is_durable,
        message="it does not work again: ",
        nodes=2,
    ),
    CourseBug(
        name="one-seal-elects",
        rule="11: so many replicas have sealed that the others are no majority",
        faults=(
            replace("smq.raft_state.handlers.elections:seals_needed", by=returns(1)),
            replace("smq.raft_state.handlers.elections:commit_floor", by=_shortest),
        ),
        course=courses.one_replica_of_three_is_asked,
    ),
    CourseBug(
        name="appends-after-a-proposed-hand-over",
        rule="26: once a successor has been proposed, nothing is appended in the epoch any more",
        faults=(replace(_PARTITION + "handover:HandOver.is_under_way", by=_until_it_is_proposed),),
        course=courses.leader_goes_on_after_it_has_proposed_another,
    ),
    CourseBug(
        name="replica-complete-at-its-first-word",
        rule="22: a replica is complete once it has what the leader's log had when it was first counted",
        faults=(replace(_STREAM + "has_caught_up", by=_at_its_first_word),),
        course=courses.replaced_disk_is_asked_after_its_first_word,
    ),
    CourseBug(
        name="end-before-the-mark-is-known",
        rule="23: a log ends before its damage only in a state that has this very process registered",
        faults=(replace(_PARTITION + "replicas:Replicas._registered", by=_itself),),
        course=courses.damage_is_found_in_an_older_state,
    ),
    CourseBug(
        name="commit-point-of-another-epoch",
        rule="24: a follower takes a commit point only in its applied epoch, and its leader sends none before",
        faults=(
            replace(_REPLICA + "on_commit", by=_of_any_epoch),
            replace(_STREAM + "take_commit", by=_before_it_is_placed),
        ),
        course=courses.commit_point_arrives_before_its_epoch,
        message="offset 1: committed is the batch of epoch 1, served that of epoch 0",
    ),
)
