"""Courses of one partition, built by hand: each meets the one moment at which a rule matters.

Owns these histories, of three nodes of which node 1 leads epoch 0. Production code survives each of them, and the
partition works at its end. With its rule taken out (`planted`), a course breaks a promise. It must never look inside a
replica: what a course demands is what `truth` judges.
"""

from typing import Final

from chaos_tests.sim.partition.group import Group
from chaos_tests.sim.partition.producer_truth import Violation
from smq.raft_state.commands import (
    AdvanceHwms,
    ApplyRetention,
    CompactSegment,
    CompleteReplicas,
    ElectLeader,
    MarkIncomplete,
)
from smq.raft_state.ids import Offset

PASS_TURNS: Final = 20
PASS_TURN_MS: Final = 200.0  # a pass begins within three of them, and pauses for less than one at a time


def _election_of(group: Group, *nodes: int, candidate: int) -> int:
    """Sealed and proposed, but not committed yet. Returns the proposal's number."""
    reports = {int(r.node): r for r in map(group.seal, nodes) if r is not None}
    group.propose_election(list(reports.values()), reports[candidate])
    return len(group.proposals) - 1


def _apply(group: Group, *nodes: int) -> None:
    """All that Raft has committed."""
    for node in nodes:
        group.apply(node)


def _advance_mark(group: Group, leader: int) -> None:
    """To what the leader knows to be committed. No node has applied that yet."""
    group.tick(leader, 200)
    group.commit(group.latest(AdvanceHwms))


def _replicate(group: Group, leader: int, *followers: int) -> None:
    """One record."""
    group.produce(leader)
    group.exchange(leader, *followers)


# ---------------------------------------------------------------------------------------------- seals
def leader_goes_on_after_its_seal(group: Group) -> None:
    """The leader itself is one of the two that have sealed."""
    election = _election_of(group, 1, 3, candidate=3)
    _replicate(group, 1, 2)
    group.commit_number(election)


def sealed_follower_starts_again_unregistered(group: Group) -> None:
    """Its new process has promised nothing, and no other node knows it yet."""
    election = _election_of(group, 2, 3, candidate=3)
    group.crash(2)
    group.start(2)
    _replicate(group, 1, 2)
    group.commit_number(election)


def follower_seals_before_a_placed_batch_is_durable(group: Group) -> None:
    """Of two nodes. The leader has probed meanwhile, and knows that the follower has the batch in memory."""
    group.hold_disk(2)
    group.produce(1)
    group.tick(1, 6_000)
    group.deliver(1, 2)
    group.deliver(2, 1)
    group.seal(2)


# ---------------------------------------------------------------------------------------------- elections
def one_replica_of_three_is_asked(group: Group) -> None:
    """It lacks what the two others have committed."""
    _replicate(group, 1, 2)
    group.crash(1)
    group.elect(3)


def leader_goes_on_after_it_has_proposed_another(group: Group) -> None:
    """The hand-over is committed late."""
    group.exchange(1, 2, 3)
    group.hand_over(1, 2)
    _replicate(group, 1, 3)
    group.commit(group.latest(ElectLeader))


# ---------------------------------------------------------------------------------------------- lost disks, damage
def replaced_disk_is_asked_after_its_first_word(group: Group) -> None:
    """It has been heard by the leader, and has received nothing yet."""
    _replicate(group, 1, 2)
    group.wipe(2)
    group.commit(group.start(2))
    _apply(group, 1, 2, 3)
    group.deliver(1, 2)
    group.deliver(2, 1)
    found = [p for p in group.proposals if isinstance(p.command, CompleteReplicas)]
    for proposal in found:
        group.commit(proposal)
    group.crash(1)
    _apply(group, 2, 3)
    group.elect(2, 3)


def damage_is_found_in_an_older_state(group: Group) -> None:
    """A replaced disk has caught up. Then its tail is damaged, and its next process begins with a state of the time
    when it was incomplete."""
    group.wipe(3)
    group.commit(group.start(3))
    while_incomplete = len(group.log)
    group.apply(1)
    group.apply(3)
    group.exchange(1, 3)
    group.commit(group.latest(CompleteReplicas))
    _replicate(group, 1, 3)
    group.crash(3)
    group.damage_tail(3)
    group.commit(group.start(3, while_incomplete))
    _apply(group, 2, 3)
    group.crash(1)
    group.elect(2, 3)


def last_batch_is_missing(group: Group) -> None:
    """A follower's copy of the last committed batch is not even there any more: only its index row says that it was."""
    _replicate(group, 1, 2)
    group.produce(1)
    group.deliver(1, 2)
    group.deliver(2, 1)
    group.lose_last_batch(2)
    group.commit(group.start(2))
    _apply(group, 2, 3)
    group.crash(1)
    group.elect(2, 3, candidate=2)


def missing_batch_is_cut(group: Group) -> None:
    """A leader's copy of a batch that no other replica has is missing, and the next epoch begins without it. The batch
    before it is committed, and stays."""
    _replicate(group, 1, 3)
    group.produce(1)
    group.lose_last_batch(1)
    group.commit(group.start(1))
    group.apply_all()
    group.elect(1, 2, 3, candidate=3)
    group.apply_all()
    group.crash(3)
    group.elect(1, 2)


def _move_start_into_first_batch(group: Group) -> None:
    group.produce(1, 2)
    group.exchange(1, 2, 3)
    _advance_mark(group, 1)
    group.move_log_start(Offset(1))
    group.apply_all()


def first_batch_is_damaged_before_a_cut(group: Group) -> None:
    """The log start lies inside it. Its index row is damaged, too, and a leader's process that still runs cuts what no
    other replica has: the batch between the two is committed, and stays."""
    _move_start_into_first_batch(group)
    _replicate(group, 1, 3)
    group.produce(1)
    group.damage_running(1, 0)
    group.elect(2, 3, candidate=3)
    group.apply_all()
    group.crash(3)
    group.elect(1, 2)


def more_is_damaged_before_the_damage_is_cut(group: Group) -> None:
    """A replica has been completed. Its damaged tail is still there when the batch before it is damaged, too; then the
    leader sends what follows."""
    _complete_with_damage(group)
    group.commit(group.latest(CompleteReplicas))
    group.apply_all()
    _damage_more(group)
    group.elect(1, 2)


def replica_is_completed_after_more_is_damaged(group: Group) -> None:
    """As before, but what it had acknowledged completes it only after it has found more damage."""
    _complete_with_damage(group)
    group.apply_all()
    _damage_more(group)
    for _ in range(2):
        group.tick(1, 200)
    group.commit(group.latest(CompleteReplicas))
    group.apply(1)
    group.elect(1, 2)


def _complete_with_damage(group: Group) -> None:
    """Proposed, not committed."""
    _replicate(group, 1, 3)
    group.produce(1)
    group.damage_tail(1)
    group.commit(group.start(1))
    group.apply_all()
    group.tick(1)
    group.commit(group.latest(MarkIncomplete))
    group.elect(2, 3, candidate=3)
    group.apply_all()
    group.exchange(1, 3)


def _damage_more(group: Group) -> None:
    group.damage_running(1, 0)
    group.produce(3)
    group.deliver(3, 1)
    group.crash(3)


def only_batch_is_missing(group: Group) -> None:
    """The log start lies inside it, and a follower's copy of it is not even there any more."""
    _move_start_into_first_batch(group)
    group.run(5)
    group.lose_last_batch(2)


def log_is_missing(group: Group) -> None:
    """A follower's log is not there any more, although its state says that it has one."""
    _replicate(group, 1, 2)
    group.lose_log(2)
    group.commit(group.start(2))
    _apply(group, 2, 3)
    group.crash(1)
    group.elect(2, 3)


def log_start_passes_hidden_damage(group: Group) -> None:
    """A follower's damaged log is passed by the log start, and its process dies before the others know of the damage.
    The next one must still find that there was more."""
    _replicate(group, 1, 2, 3)
    _advance_mark(group, 1)
    for _ in range(2):
        group.apply(1)
        _replicate(group, 1, 2)
    group.damage_tail(2, 9)
    group.start(2)
    group.move_log_start(group.part.hwm)
    group.apply(2)
    group.run(2)
    group.crash(2)
    group.commit(group.start(2))
    _apply(group, 2, 3)
    group.crash(1)
    group.elect(2, 3)


# ---------------------------------------------------------------------------------------------- commit points, modes
def commit_point_arrives_before_its_epoch(group: Group) -> None:
    """A follower has a batch that the next epoch of the same leader does not have, and hears of the commit of another
    one in its place."""
    _replicate(group, 1, 2, 3)
    group.hold_disk(1)
    group.produce(1)
    group.deliver(1, 3)
    group.elect(1, 2, candidate=1)
    _apply(group, 1, 2)
    group.free_disk(1)
    _replicate(group, 1, 2)
    group.deliver(1, 3)


# ---------------------------------------------------------------------------------------------- retention
def everything_is_to_be_kept_before_a_deletion_is_committed(group: Group) -> None:
    """A leader has found what goes. Its command is committed after that of an operator, and after the answer to it."""
    group.set_limit(1)
    for _ in range(3):
        _replicate(group, 1, 2, 3)
    _advance_mark(group, 1)
    group.apply_all()
    group.tick(1, 2_000)
    group.run(50)
    deletion = group.latest(ApplyRetention)
    group.set_limit(0)
    group.commit(deletion)


def all_start_again_before_they_have_moved_the_log_start(group: Group) -> None:
    """Its epochs since the last record have none. The log start moves to the end, and no node has applied that yet."""
    _send(group)
    group.connect(1, 1)  # the answer is not heard: its producer sends the record again
    group.exchange(1, 2, 3)
    _advance_mark(group, 1)
    for _ in range(3):
        group.elect(1, 2, 3, candidate=1)
        group.apply_all()
        group.exchange(1, 2, 3)
    group.move_log_start(group.part.hwm)
    for node in (1, 2, 3):
        group.crash(node)
    for node in (1, 2, 3):
        group.start(node, len(group.log))


def log_start_moves_while_a_leader_is_cut_off(group: Group) -> None:
    """It has a batch that no other has. It learns of the epochs without that batch, and of the log start beyond it,
    all together."""
    _send(group)
    group.exchange(1, 2, 3)
    _advance_mark(group, 1)
    _send(group)
    group.elect(2, 3, candidate=2)
    _apply(group, 2, 3)
    _replicate(group, 2, 3)
    _advance_mark(group, 2)
    group.elect(2, 3, candidate=3)
    group.move_log_start(group.part.hwm)
    for node in (2, 3):
        group.apply(node)
        group.drop(1, node)
    group.apply(1, jumps=True)
    group.exchange(1, 3)
    group.elect(1, 3, candidate=1)
    group.apply_all()
    group.connect(1, 1)
    group.request(1)
    group.take_in(1)
    group.exchange(1, 2, 3)


def _send(group: Group) -> None:
    """A producer sends its next batch to node 1."""
    group.connect(1, 1)
    group.number(1)
    group.request(1)
    group.take_in(1)


# ---------------------------------------------------------------------------------------------- compaction
def older_segment_is_offered_after_a_start(group: Group) -> None:
    """A leader has made one segment of two, and installed it. Its next process begins with a state in which there are
    still two, and another replica sends the first of these."""
    group.set_compaction()
    for keys in (b"abcc", b"abd"):
        _compact_with(group, keys, 1, 2, 3)
    with_two_segments = len(group.log)
    _compact_with(group, b"a", 1)
    group.start(1, with_two_segments)
    for _ in range(8):
        for node in (1, 3):
            group.tick(node, 200)
        group.exchange(1, 3, turns=1)


def segment_continues_a_damaged_log(group: Group) -> None:
    """A follower's batch below the log start is damaged with its index row, and so has not been deleted. Then a segment
    comes that begins in its log and ends beyond it."""
    group.set_compaction()
    for key in (b"a", b"b"):
        group.produce(1, 1, key)
    group.exchange(1, 2, 3)
    _advance_mark(group, 1)
    group.damage_running(3, 0)
    group.move_log_start(Offset(1))
    group.apply_all()
    _compact_with(group, b"bc", 1, 2, sent_to=(2,))
    group.drop(1, 3)


def segment_continues_a_log_that_can_be_repaired(group: Group) -> None:
    """As before, but the damaged batch is above the log start, so that another replica has it. The leader is down, and
    the follower is needed to elect another one."""
    group.set_compaction()
    _compact_with(group, b"ab", 1, 2)
    group.produce(1, 1, b"c")
    group.exchange(1, 2, 3)
    for _ in range(PASS_TURNS):
        group.apply(3)
        group.exchange(1, 2, 3, turns=1)
        group.tick(3)
    group.damage_running(3, 0)
    _compact_with(group, b"d", 1, 2, sent_to=(2,))
    group.drop(1, 3)
    group.crash(1)
    for _ in range(PASS_TURNS):
        group.apply(3)
        group.exchange(2, 3, turns=1)
        group.tick(3)
    if not group.elect(2, 3):
        raise Violation("two of three replicas elect no leader")


def _compact_with(
    group: Group, keys: bytes, leader: int, *followers: int, sent_to: tuple[int, ...] = (1, 2, 3)
) -> None:
    """A record of each key, and the leader's next pass, to its end. Only these followers hear of it."""
    for key in keys:
        group.produce(leader, 1, bytes([key]))
    group.exchange(leader, *sent_to)
    for _ in range(PASS_TURNS):
        group.tick(leader, PASS_TURN_MS)
        for proposal in group.proposals:
            if isinstance(proposal.command, AdvanceHwms | CompactSegment) and proposal.done is not None:
                group.commit(proposal)
        for node in (leader, *followers):
            group.apply(node)
            group.tick(node)
        group.exchange(leader, *followers, turns=1)
