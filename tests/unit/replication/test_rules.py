"""The numbered rules of replication, each under its number, on one replica.

What a rule demands of the state machine alone is tested with the state machine; the hand-over of rule 11 in
test_leading; what a rule demands of several nodes together, in the simulation.
"""

import pytest

from smq.raft_state.commands import AddPartitions, AdvanceHwms, Command
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, TsNs
from smq.raft_state.replies import HwmsAdvanced, Reply
from smq.records import parse_header
from smq.replication.api import DoneFn
from smq.replication.log import partition_log
from smq.replication.log.stored_batch import StoredValue, partition_stop
from smq.replication.net import wire
from smq.replication.partition.high_water_mark import hwm_advances
from smq.replication.partition.proposals import Proposals
from smq.replication.ports import Table
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register


def follower() -> Host:
    """A host whose replica follows PEER_A in epoch 1."""
    host = Host()
    host.create_partition()
    host.elect(PEER_A)
    return host


def stored(data: bytes, base: int, epoch: int, ts_ns: int = 1) -> bytes:
    """The bytes that a leader's log would hold."""
    other = Host()
    replica = other.create_partition(start=base)
    value: StoredValue = replica.log.append(
        data, parse_header(data), epoch=Epoch(epoch), ts_ns=TsNs(ts_ns), done=lambda: None
    )
    return value.value


def behind(*, epoch: int = 1) -> Host:
    """A host that has not applied more than `epoch`, led by another, and whose log holds a batch of epoch 2."""
    ahead = follower()
    ahead.elect(PEER_B)
    append(ahead, stored(batch(), 0, 2), epoch=2, peer=PEER_B)
    ahead.settle()
    host = follower() if epoch else Host()
    if not epoch:
        host.create_partition()
    host.reopen(image=ahead.disk.crash())
    assert host.live.log.appended_end == 1
    return host


def append(host: Host, *values: bytes, epoch: int = 1, stream: int = 1, peer: NodeId = PEER_A, commit: int = 0) -> None:
    host.live.on_append(peer, wire.Append(host.part.pid, Epoch(epoch), stream, Offset(commit), values))


def acks(host: Host) -> list[wire.Ack]:
    return host.messages(wire.Ack)


# ------------------------------------------------------------------------------------------------ 1, 2
def test_rule_01_a_batch_keeps_the_epoch_it_was_appended_in(host: Host) -> None:
    host.produce(batch(b"first"))
    host.settle()
    host.advance(1)
    host.elect(ME)
    host.produce(batch(b"second"))
    host.settle()
    values = host.live.log.read(Offset(0), Offset(2), 1 << 20)
    assert [(v.base, v.epoch) for v in values] == [(0, 0), (1, 1)]
    assert [parse_header(v.batch).epoch for v in values] == [0, 1]


def test_rule_02_a_restarted_process_stops_leading(host: Host) -> None:
    host.produce()
    host.settle()
    replica = host.reopen()
    assert replica.leading is None
    with pytest.raises(SmqError) as e:
        host.produce()
    assert e.value.code is ErrorCode.LEADER_UNAVAILABLE


def test_rule_02_a_restarted_process_leads_the_epoch_given_to_it(host: Host) -> None:
    host.settle()
    replica = host.reopen()
    host.apply(register(ME, host.identity.incarnation))
    host.elect(ME, host.identity.incarnation)
    assert replica.leading == 1


# ------------------------------------------------------------------------------------------------ 3, 4
def test_rule_03_a_batch_beyond_its_epochs_end_is_neither_counted_nor_served(host: Host) -> None:
    host.produce()
    host.produce()
    host.settle()
    host.advance(1)
    assert host.live.durable_verified_end == 2
    host.elect(PEER_A)
    assert host.live.durable_verified_end == 1


def test_rule_04_the_log_is_cut_from_the_first_wrong_batch_when_the_epoch_is_applied(host: Host) -> None:
    host.produce(batch(b"kept"))
    host.produce(batch(b"lost", count=3))
    host.settle()
    host.advance(1)
    host.elect(PEER_A)
    host.settle()
    assert host.live.log.appended_end == 1
    assert [v.base for v in host.live.log.read(Offset(0), Offset(9), 1 << 20)] == [0]


def test_rule_04_a_batch_newer_than_the_applied_epoch_waits_unjudged() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1))
    host.settle()
    image = host.disk.crash()
    behind = Host()
    behind.create_partition()  # this node's applied state is still in epoch 0
    replica = behind.reopen(image=image)
    assert replica.log.appended_end == 1
    assert replica.durable_verified_end == 0
    behind.elect(PEER_A)
    assert replica.log.appended_end == 1
    assert replica.durable_verified_end == 1


def test_rule_03_a_batch_that_begins_before_its_epoch_is_wrong_as_a_whole() -> None:
    host = follower()
    append(host, stored(batch(count=4), 0, 1))
    host.settle()
    other = Host()
    other.create_partition()
    other.advance(2)
    other.elect(PEER_A)  # here epoch 1 begins at 2
    replica = other.reopen(image=host.disk.crash())
    assert (replica.durable_verified_end, replica.log.appended_end) == (0, 0)


def test_rule_04_nothing_is_appended_after_a_batch_that_waits_unjudged() -> None:
    host = behind()
    append(host, stored(batch(), 1, 1))
    host.settle()
    assert (host.live.log.appended_end, host.live.durable_verified_end) == (1, 0)


# ------------------------------------------------------------------------------------------------ 5
def test_rule_05_a_truncation_takes_every_row_at_or_past_the_cut(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 1)
    tables = (Table.BATCHES, Table.TIMES, Table.CHECKPOINTS)

    def rows() -> list[list[bytes]]:
        return [host.disk.scan_keys(table, host.part.pid, partition_stop(host.part.pid)) for table in tables]

    host.produce(batch(b"kept"))
    host.settle()
    host.advance(1)
    kept = rows()
    host.produce(batch(b"lost", count=3))  # of a later create time, too
    host.settle()
    assert [len(now) - len(before) for now, before in zip(rows(), kept, strict=True)] == [1, 2, 1]
    host.elect(PEER_A)
    host.settle()
    assert rows() == kept


def test_rule_05_appends_and_truncations_reach_the_disk_in_the_order_they_were_made(host: Host) -> None:
    host.produce(batch(b"cut before it was on disk", count=3))
    host.elect(ME)
    host.produce(batch(b"in its place"))
    host.settle()
    (value,) = host.live.log.read(Offset(0), Offset(9), 1 << 20)
    assert (value.base, value.end, value.epoch) == (0, 1, 1)
    assert len(host.disk.scan_keys(Table.BATCHES, b"", b"\xff")) == 1
    assert len(host.disk.scan_keys(Table.TIMES, host.part.pid + b"\x00", host.part.pid + b"\x01")) == 1


# ------------------------------------------------------------------------------------------------ 6, 7
def test_rule_06_an_append_of_an_older_epoch_is_refused() -> None:
    host = follower()
    host.advance(1)
    host.elect(PEER_A)  # the same node leads on, and what epoch 1 committed would fit
    append(host, stored(batch(), 0, 1), epoch=1)
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    assert (host.live.log.appended_end, acks(host)) == (0, [])


def test_rule_06_an_append_by_another_than_the_leader_is_refused() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1), peer=PEER_B)
    host.live.on_probe(PEER_B, wire.Probe(host.part.pid, Epoch(1), 2))
    assert (host.live.log.appended_end, acks(host)) == (0, [])


@pytest.mark.parametrize(("epoch", "count"), [(1, 2), (2, 1), (7, 1)], ids=["past its end", "before its start", "none"])
def test_rule_06_a_batch_outside_of_its_epochs_range_is_not_taken(epoch: int, count: int) -> None:
    host = follower()
    host.advance(1)
    host.elect(PEER_A)  # epoch 1 was [0, 1)
    append(host, stored(batch(count=count), 0, epoch), epoch=2)
    assert host.live.log.appended_end == 0
    assert [(a.resync, a.expect) for a in acks(host)] == [(True, 0)]


def test_rule_06_an_append_of_a_newer_epoch_is_dropped_and_answered_after_applying() -> None:
    host = follower()
    append(host, stored(batch(), 0, 2), epoch=2, peer=PEER_B)
    assert host.live.log.appended_end == 0
    host.sent.clear()
    host.elect(PEER_B)
    answers = [(peer, m.resync, m.epoch, m.expect) for peer, m in host.sent if isinstance(m, wire.Ack)]
    assert answers == [(PEER_B, True, 2, 0)]


def test_rule_06_an_append_that_leaves_a_gap_asks_the_leader_to_start_again_once() -> None:
    host = follower()
    append(host, stored(batch(), 5, 1))
    append(host, stored(batch(), 6, 1))
    assert host.live.log.appended_end == 0
    assert [(a.resync, a.expect) for a in acks(host)] == [(True, 0)]


def test_rule_07_nothing_is_acknowledged_before_it_is_on_disk() -> None:
    host = follower()
    append(host, stored(batch(count=4), 0, 1))
    assert acks(host) == []
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    assert [(a.end, a.expect) for a in acks(host)] == [(0, 4)]
    host.settle()
    assert acks(host)[-1].end == 4


def test_rule_07_a_write_that_completes_after_its_epoch_ended_acknowledges_nothing_of_it() -> None:
    host = follower()
    append(host, stored(batch(count=4), 0, 1))
    host.elect(PEER_B)  # at hwm 0: the append is wrong now
    host.sent.clear()
    host.settle()
    assert {(a.epoch, a.end) for a in acks(host)} <= {(2, 0)}


# ------------------------------------------------------------------------------------------------ 8, 9
def test_rule_08_the_mark_moves_when_a_majority_has_it_the_leader_counting_once_it_is_durable(host: Host) -> None:
    host.produce()
    host.ack(PEER_A, 1)
    assert hwm_advances(host.live) == []  # the leader's own write is not on disk yet
    host.settle()
    (advance,) = hwm_advances(host.live)
    assert (advance.hwm, advance.next_offset, advance.epoch) == (1, 1, 0)


def test_rule_08_an_acknowledgement_of_another_epoch_counts_for_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1, epoch=7)
    assert hwm_advances(host.live) == []


def test_rule_08_an_acknowledgement_beyond_the_leaders_log_is_clipped(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 99)
    host.ack(PEER_B, 99)
    (advance,) = hwm_advances(host.live)
    assert advance.hwm == 1


def test_rule_08_an_older_process_of_a_follower_counts_for_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0, incarnation=INCARNATION + 5)
    host.ack(PEER_A, 1, incarnation=INCARNATION)
    assert hwm_advances(host.live) == []


@pytest.mark.parametrize("incarnation", [INCARNATION, INCARNATION + 5])
def test_rule_08_a_follower_counts_for_what_it_or_its_new_process_said_last(host: Host, incarnation: int) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    assert host.live.majority_end() == 1
    host.ack(PEER_A, 0, incarnation=incarnation)
    assert host.live.majority_end() == 0


def test_rule_08_counts_restart_with_each_epoch(host: Host) -> None:
    host.disk.latency_ms = (60_000, 60_000)
    host.produce(batch(b"X"))
    host.ack(PEER_A, 1)
    host.elect(ME)  # re-elected at hwm 0: X is gone
    host.produce(batch(b"Y"))
    host.ack(PEER_B, 1)
    assert host.live.majority_end() == host.live.known_commit_point() == 0


def test_rule_09_a_proposal_carries_epoch_mark_next_offset_and_time(host: Host) -> None:
    host.elect(ME)
    host.produce()
    host.produce(batch(count=3))
    host.settle()
    host.ack(PEER_A, 1)
    (advance,) = hwm_advances(host.live)
    assert (advance.epoch, advance.hwm, advance.next_offset) == (1, 1, 4)
    assert advance.ts_ns == host.live.log.last_ts_ns >= host.hardware.wall_offset_ns


def test_rule_09_one_proposal_at_a_time_and_one_without_an_answer_is_made_again(host: Host) -> None:
    proposed: list[tuple[Command, int, DoneFn[Reply]]] = []
    advancer = Proposals(
        host.clock,
        lambda *proposal: proposed.append(proposal),
        hwm_advances,
        lambda items: AdvanceHwms(items=items),
    )
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    advancer.mark_due(host.live)
    host.settle(100)
    [(command, timeout_ms, done)] = proposed
    assert timeout_ms > 0, "it has a deadline"
    done(SmqError(ErrorCode.TIMED_OUT, "no answer"))
    host.settle(100)
    [_, (again, _, done)] = proposed
    assert again == command
    advancer.mark_due(host.live)
    host.settle(100)
    assert len(proposed) == 2
    host.apply(command)
    done(HwmsAdvanced(accepted=(True,)))
    host.settle(100)
    assert len(proposed) == 2, "nothing is left to propose"


def test_rule_09_a_leader_of_a_past_epoch_proposes_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    host.elect(PEER_A)
    assert hwm_advances(host.live) == []


# ------------------------------------------------------------------------------------------------ 10
def test_rule_10_a_producer_is_answered_when_the_mark_passes_its_batch(host: Host) -> None:
    first, second = host.produce(batch(count=3)), host.produce()
    host.settle()
    assert first.result is None
    host.advance(3, next_offset=4)
    host.settle()
    assert first.offsets == (0, 2)
    assert second.result is None


def test_rule_10_a_mark_of_a_later_epoch_does_not_acknowledge_what_was_replaced(host: Host) -> None:
    lost = host.produce(batch(b"X"))
    host.settle()
    host.elect(ME)  # re-elected at hwm 0: X is gone
    kept = host.produce(batch(b"Y"))
    host.settle()
    host.advance(1)
    host.settle()
    assert lost.error == "APPEND_LOST"
    assert kept.offsets == (0, 0)


def test_rule_10_an_epoch_change_settles_what_was_committed_before_it(host: Host) -> None:
    answer = host.produce()
    host.advance(1)
    host.elect(PEER_A)
    host.settle()
    assert answer.offsets == (0, 0)


def test_rule_10_a_batch_that_no_majority_stores_times_out_indefinitely(host: Host) -> None:
    answer = host.produce(timeout_ms=50)
    host.settle()
    assert answer.error == "TIMED_OUT"
    assert not ErrorCode[answer.error].is_definite
    host.live.close(SmqError(ErrorCode.SHUTTING_DOWN, "stopping"))
    host.settle()  # and it is not answered again


def test_rule_10_an_epoch_that_a_jump_has_forgotten_leaves_the_outcome_open(host: Host) -> None:
    answer = host.produce(batch(b"X"))
    host.settle()
    with host.cut_off():
        host.elect(PEER_A)  # at hwm 0: X is gone
        host.advance(1)  # by another record at the same offset
        host.move_log_start(1)
        assert host.part.epoch_range(Epoch(0)) is None
    host.settle()
    assert answer.error == "TIMED_OUT"


# ------------------------------------------------------------------------------------------------ 11, 12
def test_rule_21_a_seal_is_durable_verified_and_of_the_epoch_asked_for(host: Host) -> None:
    host.produce()
    assert host.live.seal(Epoch(1)) is None
    assert host.live.leading == 0
    assert host.live.seal(Epoch(0)) == (host.part.pid, 0, 0)  # not on disk yet
    host.settle()
    assert host.live.seal(Epoch(0)) == (host.part.pid, 1, 1)
    waits = behind()
    assert waits.live.seal(Epoch(1)) == (waits.part.pid, 0, 0), "what is newer than the applied epoch is not verified"


def test_rule_12_an_appointed_leader_whose_log_is_short_does_not_lead() -> None:
    host = follower()
    host.advance(5)  # the others have 5 records, this node none
    host.elect(ME, end=5)  # on a false report
    assert host.live.leading is None
    assert host.resigned == [(host.part.pid, 2)]


def test_rule_12_an_appointed_leader_whose_log_holds_newer_epochs_does_not_lead() -> None:
    host = behind(epoch=0)
    host.apply(register(ME, host.identity.incarnation))
    host.elect(ME, host.identity.incarnation)
    assert host.live.leading is None
    assert host.resigned == [(host.part.pid, 1)]


# ------------------------------------------------------------------------------------------------ 13-16
def test_rule_13_nothing_is_readable_beyond_the_mark(host: Host) -> None:
    host.produce()
    host.produce()
    host.settle()
    assert (host.live.readable_end, host.live.durable_verified_end) == (0, 2)
    host.advance(1)
    assert host.live.readable_end == 1


def test_rule_13_what_the_others_have_committed_is_readable_before_it_is_on_this_disk(host: Host) -> None:
    host.produce()
    host.produce()
    host.advance(1)
    assert (host.live.readable_end, host.live.durable_verified_end) == (1, 0)
    assert [v.base for v in host.live.log.read(Offset(0), Offset(1), 1 << 20)] == [0]


def test_rule_13_unverified_batches_are_not_readable() -> None:
    host = behind()
    host.advance(1)
    assert host.live.readable_end == 0


def send_producers(host: Host, at: int) -> None:
    """A leader without idempotent producers answers a log that jumped (rule 16)."""
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(at), 0, 1, b""))
    host.settle()


def test_rule_14_a_log_that_ends_below_the_log_start_is_emptied_and_can_be_elected() -> None:
    host = follower()
    host.advance(5)
    host.move_log_start(5)
    host.settle()
    assert (host.live.log.log_start, host.live.log.appended_end) == (5, 5)
    send_producers(host, 5)
    assert host.live.seal(Epoch(1)) == (host.part.pid, 5, 5)


def test_rule_14_an_empty_log_takes_the_batch_that_contains_the_log_start() -> None:
    host = follower()
    host.advance(10)
    host.move_log_start(5)
    send_producers(host, 5)
    append(host, stored(batch(count=8), 2, 1))
    host.settle()
    assert host.live.durable_verified_end == 10


def test_rule_15_append_time_never_goes_back_though_the_clock_does(host: Host) -> None:
    host.produce()
    host.hardware.wall_offset_ns = -3_600 * 10**9
    host.produce()
    host.settle()
    first, second = host.live.log.read(Offset(0), Offset(2), 1 << 20)
    assert second.ts_ns == first.ts_ns + 1


def test_rule_15_a_new_leader_starts_above_the_replicated_time(host: Host) -> None:
    far = host.clock.wall_ns() + 10**12
    host.produce()
    host.settle()
    host.advance(1, ts_ns=far)
    host.elect(ME)
    host.produce()
    host.settle()
    assert host.live.log.read(Offset(1), Offset(2), 1 << 20)[0].ts_ns == far + 1


@pytest.mark.parametrize("committed", [0, 1])
def test_rule_16_a_truncated_batch_may_be_sent_again_with_its_sequence(host: Host, committed: int) -> None:
    *before, data = (
        batch(producer_id=7, producer_epoch=0, base_sequence=sequence) for sequence in range(committed + 1)
    )
    for earlier in before:
        host.produce(earlier)
    lost = host.produce(data)
    host.settle()
    host.advance(committed)
    host.elect(ME)
    again = host.produce(data)
    host.settle()
    host.advance(committed + 1)
    host.settle()
    assert lost.error == "APPEND_LOST"
    assert again.offsets == (committed, committed)
    assert not again.is_duplicate


@pytest.mark.parametrize(
    ("producer_epoch", "sequence", "code"),
    [
        (1, 2, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (1, 0, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (0, 1, ErrorCode.PRODUCER_FENCED),
    ],
)
def test_rule_16_a_batch_that_does_not_follow_its_producers_last_is_refused(
    host: Host, producer_epoch: int, sequence: int, code: ErrorCode
) -> None:
    host.produce(batch(producer_id=7, producer_epoch=1, base_sequence=0))
    with pytest.raises(SmqError) as e:
        host.produce(batch(producer_id=7, producer_epoch=producer_epoch, base_sequence=sequence, count=2))
    assert e.value.code is code
    assert host.live.log.appended_end == 1


def test_rule_16_a_duplicate_waits_for_the_mark_like_its_first_attempt(host: Host) -> None:
    data = batch(producer_id=7, producer_epoch=0, base_sequence=0, count=2)
    first, again = host.produce(data), host.produce(data)
    host.settle()
    assert (first.result, again.result) == (None, None)
    host.advance(2)
    host.settle()
    assert first.offsets == again.offsets == (0, 1)
    assert again.is_duplicate
    late = host.produce(data)
    host.settle()
    assert (late.offsets, late.is_duplicate) == ((0, 1), True)


def test_an_incarnation_is_part_of_every_acknowledgement() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1))
    host.settle()
    assert {a.incarnation for a in acks(host)} == {Incarnation(INCARNATION)}


# ------------------------------------------------------------------------------------------------ 17, 19
def test_rule_17_nothing_changes_a_partitions_replicas_in_this_version(host: Host) -> None:
    before = host.part.replicas
    host.apply(register(NodeId(4)))
    host.apply(AddPartitions(name="t", partition_count=4))
    host.elect(PEER_A)
    assert host.part.replicas == before


def test_rule_19_topic_that_keeps_its_records_cannot_become_one_that_does_not(host: Host) -> None:
    with pytest.raises(SmqError) as e:
        host.configure(storage="external")
    assert e.value.code is ErrorCode.INVALID_CONFIG
