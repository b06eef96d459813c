"""A partition that commits by its leader's count: what is answered, told and read (rules 8-10, 13, 14, 24, 26)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import (
    AdvanceLogStart,
    ElectLeader,
    Seal,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset
from smq.raft_state.replies import Reply
from smq.replication.api import DoneFn
from smq.replication.commands.coalescing import Barriers
from smq.replication.net import wire
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.high_water_mark import LogStarts, untold_commits
from smq.replication.partition.replica import Replica
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch
from tests.unit.replication.test_rules import acks, append, stored


def elect(host: Host, node: NodeId, end: int) -> None:
    """With the seals of both others, which end there."""
    seals = tuple(Seal(node=n, incarnation=INCARNATION, end=Offset(end)) for n in (PEER_A, PEER_B))
    part = host.part
    host.apply(
        ElectLeader(
            partition=part.pid,
            expected_epoch=part.epoch,
            candidate=node,
            incarnation=INCARNATION,
            end=Offset(end),
            seals=seals,
        )
    )


def follower() -> Host:
    """A host whose replica follows PEER_A in epoch 1, which started at 0."""
    host = Host()
    host.create_partition()
    elect(host, PEER_A, 0)
    return host


# ------------------------------------------------------------------------------------------------ 8, 9, 10
def test_rule_08_what_a_majority_has_on_disk_is_answered_without_raft(host: Host) -> None:
    host.disk.latency_ms = (50, 50)
    answer = host.produce()
    host.ack(PEER_A, 1)
    host.settle(0)
    assert answer.result is None, "one of three"
    host.settle()
    assert (answer.offsets, host.part.hwm) == ((0, 0), 0)
    assert (host.live.known_commit_point(), host.live.readable_end) == (1, 1)
    assert host.noted["committed"] > 0


def test_rule_08_the_leaders_own_disk_counts_like_any_other(host: Host) -> None:
    host.disk.latency_ms = (60_000, 60_000)
    answer = host.produce()
    host.ack(PEER_A, 1)
    assert host.live.known_commit_point() == 0
    host.ack(PEER_B, 1)
    host.settle(1)
    assert answer.offsets == (0, 0)


def test_rule_10_a_waiter_below_the_next_epochs_start_stays_open(host: Host) -> None:
    kept, lost = host.produce(), host.produce()
    host.settle()
    elect(host, PEER_A, 1)
    host.settle(1)
    assert (kept.result, lost.error) == (None, "APPEND_LOST")
    host.live.on_commit(PEER_A, Epoch(1), Offset(1))
    host.settle(1)
    assert kept.offsets == (0, 0)


def test_rule_10_a_waiter_fails_once_its_epoch_is_cut_short(host: Host) -> None:
    waiting = [host.produce(), host.produce()]
    host.settle()
    elect(host, PEER_A, 2)
    elect(host, PEER_B, 1)  # what node 2 had beyond it is on no other disk
    host.settle(1)
    assert (waiting[0].result, waiting[1].error) == (None, "APPEND_LOST")
    assert host.live.log.appended_end == 1


def test_rule_11_a_new_leader_keeps_the_tail_that_its_epoch_starts_after(host: Host) -> None:
    kept = host.produce()
    host.settle()
    host.elect(ME, end=1)
    assert (host.live.leading, host.live.log.appended_end, host.live.known_commit_point()) == (1, 1, 0)
    host.ack(PEER_B, 1)
    host.settle(1)
    assert kept.offsets == (0, 0)


# ------------------------------------------------------------------------------------------------ 13, 24
def test_rule_24_a_follower_learns_the_commit_point_from_appends_and_messages() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1), stored(batch(), 1, 1, ts_ns=2), commit=1)
    host.settle()
    assert (host.live.known_commit_point(), host.live.readable_end) == (1, 1)
    host.noted.clear()
    host.live.on_commit(PEER_A, Epoch(1), Offset(2))
    assert (host.live.readable_end, host.noted["readable"]) == (2, 1)
    host.live.on_commit(PEER_A, Epoch(1), Offset(1))
    assert host.live.known_commit_point() == 2


@pytest.mark.parametrize("why", ["older epoch", "newer epoch", "not the leader", "sealed", "not judged"])
def test_rule_24_a_commit_point_counts_only_in_the_epoch_by_which_the_log_was_judged(why: str) -> None:
    host = follower()
    append(host, stored(batch(), 0, 1))
    host.settle()
    peer, epoch = PEER_A, 1
    if why == "older epoch":
        elect(host, PEER_A, 0)  # what this log holds is wrong now
    elif why == "newer epoch":
        epoch = 2
    elif why == "not the leader":
        peer = PEER_B
    elif why == "sealed":
        host.live.seal(Epoch(1))
    else:
        replica, host.replica, epoch = host.live, None, 2
        elect(host, PEER_A, 0)
        host.replica = replica
    host.live.on_commit(peer, Epoch(epoch), Offset(1))
    assert (host.live.known_commit_point(), host.live.readable_end) == (0, 0)


def test_rule_24_each_follower_is_told_once_and_again_when_its_position_is_known_again(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    host.ack(PEER_B, 1)
    assert host.live.known_commit_point() == 1
    assert {(peer, commit) for peer, _, commit in untold_commits(host.live)} == {(PEER_A, 1), (PEER_B, 1)}
    assert untold_commits(host.live) == []
    host.live.on_session_close(PEER_B)
    assert untold_commits(host.live) == [], "it is not known where it is"
    host.live.on_session_open(PEER_B)
    host.ack(PEER_B, 1)
    assert untold_commits(host.live) == [(PEER_B, 0, 1)]


def test_rule_24_an_append_carries_the_commit_point(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    host.ack(PEER_B, 0)
    host.ack(PEER_B, 1)
    host.sent.clear()
    host.produce()
    sent = {peer: message.commit for peer, message in host.sent if isinstance(message, wire.Append)}
    assert sent == {PEER_A: 1, PEER_B: 1}


def test_rule_13_a_damaged_batch_below_the_commit_point_counts() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1), commit=0)
    host.settle()
    host.live.log.damaged_batches.add(Offset(0))
    assert host.live.durable_verified_end == 0
    host.live.on_commit(PEER_A, Epoch(1), Offset(1))
    assert host.live.durable_verified_end == 1, "the others have it"


def test_rule_26_a_hand_over_needs_no_mark_and_gives_up_nothing(host: Host) -> None:
    waiting = host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    host.ack(PEER_A, 1)
    (command,) = [c for c in host.proposed if isinstance(c, ElectLeader)]
    assert (command.candidate, command.end, command.by_leader, host.part.hwm) == (PEER_A, 1, True, 0)
    host.settle(1)
    assert waiting.offsets == (0, 0)
    host.apply(command)
    host.sent.clear()
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 1))
    assert [(ack.epoch, ack.end) for ack in acks(host)] == [(1, 1)]


# ------------------------------------------------------------------------------------------------ 14
def log_start(host: Host, offset: int) -> AdvanceLogStart:
    return AdvanceLogStart(partition=host.part.pid, offset=Offset(offset))


def ask_log_start(
    host: Host, offset: int, advance: Callable[[Replica], None] = lambda _: None, *, reaches_raft: bool = True
) -> list[Reply | SmqError]:
    """Of this node. A read index is passed immediately, or fails. Returns where the answer will be."""

    def wait(_timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        done(LogIndex(1) if reaches_raft else SmqError(ErrorCode.TIMED_OUT, "no majority"))

    barriers = cast(Barriers, SimpleNamespace(wait=wait))
    ends = ExactEnds(host.node_host(), barriers, {host.part.pid: host.live}.get)
    answers: list[Reply | SmqError] = []
    starts = LogStarts(host.node_host(), ends, {host.part.pid: host.live}.get, advance)
    starts.propose(log_start(host, offset), 5_000, answers.append)
    return answers


def test_rule_14_a_leader_moves_the_mark_to_the_commit_point_before_the_log_start(host: Host) -> None:
    host.produce(batch(count=3))
    host.settle()
    host.ack(PEER_A, 3)
    assert (host.live.known_commit_point(), host.part.hwm) == (3, 0)
    advanced: list[Replica] = []
    ask_log_start(host, 3, advanced.append)
    host.settle(50)
    assert advanced, "without waiting for the pace"
    assert host.proposed == []
    host.advance(3)
    host.settle(10)
    assert host.proposed == [log_start(host, 3)]


def test_rule_14_a_log_start_beyond_the_commit_point_is_refused_at_once_by_apply(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    host.advance(1)
    ask_log_start(host, 9)
    host.settle(10)
    assert host.proposed == [log_start(host, 9)]


def test_rule_14_a_log_start_is_not_judged_by_a_mark_that_may_be_behind(host: Host) -> None:
    answers = ask_log_start(host, 1, reaches_raft=False)
    host.settle(5_000)
    assert host.proposed == []
    (answer,) = answers
    assert isinstance(answer, SmqError)
    assert answer.code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_rule_14_a_log_start_below_the_mark_needs_no_leader(host: Host) -> None:
    host.advance(1)
    ask_log_start(host, 1, reaches_raft=False)
    assert host.proposed == [log_start(host, 1)]
