"""The numbered rules of replication, each under its number, on one replica.

What a rule demands of the state machine alone is tested with the state machine; what it demands of several nodes
at once, in the simulation.
"""

import pytest

from smq.raft_state.commands import AddPartitions, AdvanceLogStart, AlterTopicConfig
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, TsNs
from smq.records import parse_header
from smq.replication import handover, wire
from smq.replication.api import Acks
from smq.replication.log_codec import StoredValue, parse_value
from smq.replication.ports import Table
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register


@pytest.fixture
def host() -> Host:
    """A host whose replica leads epoch 0 of an empty partition."""
    host = Host()
    host.create_partition()
    return host


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


def append(host: Host, *values: bytes, epoch: int = 1, stream: int = 1, peer: NodeId = PEER_A) -> None:
    host.live.on_append(peer, wire.Append(host.part.pid, Epoch(epoch), stream, values))


def acks(host: Host) -> list[wire.Ack]:
    return [m for _, m in host.sent if isinstance(m, wire.Ack)]


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


def test_rule_02_a_restarted_process_does_not_go_on_leading(host: Host) -> None:
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
    host.apply(register(ME, host.incarnation))
    host.elect(ME, host.incarnation)
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


# ------------------------------------------------------------------------------------------------ 5
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
    host.elect(PEER_B)
    append(host, stored(batch(), 0, 1), epoch=1)
    assert host.live.log.appended_end == 0


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
    assert host.live.hwm_advance() is None  # the leader's own write is not on disk yet
    host.settle()
    advance = host.live.hwm_advance()
    assert advance is not None
    assert (advance.hwm, advance.next_offset, advance.epoch) == (1, 1, 0)


def test_rule_08_two_followers_outvote_a_slow_leader_disk(host: Host) -> None:
    host.produce()
    host.ack(PEER_A, 1)
    host.ack(PEER_B, 1)
    advance = host.live.hwm_advance()
    assert advance is not None
    assert advance.hwm == 1


def test_rule_08_an_acknowledgement_of_another_epoch_counts_for_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1, epoch=7)
    assert host.live.hwm_advance() is None


def test_rule_08_an_acknowledgement_beyond_the_leaders_log_is_clipped(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 99)
    advance = host.live.hwm_advance()
    assert advance is not None
    assert advance.hwm == 1


def test_rule_08_an_older_process_of_a_follower_counts_for_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0, incarnation=INCARNATION + 5)
    host.ack(PEER_A, 1, incarnation=INCARNATION)
    assert host.live.hwm_advance() is None


def test_rule_09_a_leader_of_a_past_epoch_proposes_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    host.elect(PEER_A)
    assert host.live.hwm_advance() is None


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


# ------------------------------------------------------------------------------------------------ 11, 12
def test_rule_11_an_election_report_is_durable_verified_and_of_the_epoch_asked_for(host: Host) -> None:
    host.produce()
    assert host.live.election_end(Epoch(0)) == 0  # not on disk yet
    host.settle()
    assert host.live.election_end(Epoch(0)) == 1
    assert host.live.election_end(Epoch(1)) is None


def test_rule_11_a_hand_over_waits_until_the_target_has_everything_and_all_is_committed(host: Host) -> None:
    before = host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    assert not host.live.transfer(PEER_B), "one at a time"
    meanwhile = host.produce()
    host.ack(PEER_A, 1)
    assert host.proposed == [], "the new epoch would begin at the mark and cut what is above it"
    host.advance(1)
    assert [type(c).__name__ for c in host.proposed] == ["ElectLeader"]
    host.elect(PEER_A, end=1)
    host.settle()
    assert before.offsets == (0, 0)
    assert meanwhile.error == "NOT_LEADER"
    assert host.live.log.appended_end == 1, "nothing of it was appended"


def test_rule_11_a_hand_over_that_takes_too_long_is_given_up_and_who_waited_is_taken(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    waiting = [host.produce(), host.produce()]
    host.settle(ms=3_000)
    after = host.produce()
    host.settle()
    host.ack(PEER_A, 4)
    host.advance(4)
    host.settle()
    assert [w.offsets for w in (*waiting, after)] == [(1, 1), (2, 2), (3, 3)]


def test_rule_11_producers_that_wait_for_a_hand_over_are_bounded(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    for _ in range(handover.PARKED_MAX):
        host.produce()
    with pytest.raises(SmqError) as e:
        host.produce()
    assert e.value.code is ErrorCode.LEADER_UNAVAILABLE


def test_rule_11_a_stopping_node_tells_who_waits_for_a_hand_over_that_nothing_was_stored(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    waiting = host.produce()
    host.live.close(SmqError(ErrorCode.SHUTTING_DOWN, "stopping"))
    host.settle()
    assert waiting.error == "SHUTTING_DOWN"


def test_rule_12_an_appointed_leader_whose_log_is_short_does_not_lead() -> None:
    host = follower()
    host.advance(5)  # the others have 5 records, this node none
    host.elect(ME, end=5)  # on a false report
    assert host.live.leading is None
    assert host.resigned == [(host.part.pid, 2)]


# ------------------------------------------------------------------------------------------------ 13-16
def test_rule_13_nothing_is_readable_beyond_the_mark_or_the_own_disk(host: Host) -> None:
    host.produce()
    host.produce()
    host.advance(1)
    assert host.live.readable_end == 0  # committed by the others, not on this disk
    host.settle()
    assert host.live.readable_end == 1  # on this disk, not committed


def tell_producers(host: Host, at: int) -> None:
    """A leader without idempotent producers answers a log that jumped (rule 16)."""
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(at), b""))
    host.settle()


def test_rule_14_a_log_that_ends_below_the_log_start_is_emptied_and_can_be_elected() -> None:
    host = follower()
    host.advance(5)
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(5)))
    host.settle()
    assert (host.live.log.log_start, host.live.log.appended_end) == (5, 5)
    tell_producers(host, 5)
    assert host.live.election_end(Epoch(1)) == 5


def test_rule_14_an_empty_log_takes_the_batch_that_contains_the_log_start() -> None:
    host = follower()
    host.advance(10)
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(5)))
    tell_producers(host, 5)
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


def test_rule_16_a_truncated_batch_may_be_sent_again_with_its_sequence(host: Host) -> None:
    data = batch(producer_id=7, producer_epoch=0, base_sequence=0)
    lost = host.produce(data)
    host.settle()
    host.elect(ME)
    again = host.produce(data)
    host.settle()
    host.advance(1)
    host.settle()
    assert lost.error == "APPEND_LOST"
    assert again.offsets == (0, 0)


def test_rule_16_a_duplicate_waits_for_the_mark_like_its_first_attempt(host: Host) -> None:
    data = batch(producer_id=7, producer_epoch=0, base_sequence=0, count=2)
    first, again = host.produce(data), host.produce(data)
    host.settle()
    assert (first.result, again.result) == (None, None)
    host.advance(2)
    host.settle()
    assert first.offsets == again.offsets == (0, 1)
    assert again.is_duplicate


# ------------------------------------------------------------------------------------------------ streams
def test_a_follower_is_probed_then_sent_what_it_lacks_from_where_its_log_ends(host: Host) -> None:
    for value in (b"a", b"b", b"c"):
        host.produce(batch(value))
    host.settle()
    probe = next(m for peer, m in host.sent if peer == PEER_A and isinstance(m, wire.Probe))
    assert host.messages(wire.Append) == []
    answer = wire.Ack(host.part.pid, Epoch(0), INCARNATION, Offset(1), Offset(1), probe.stream, True)
    host.live.on_ack(PEER_A, answer)
    (sent,) = [m for peer, m in host.sent if peer == PEER_A and isinstance(m, wire.Append)]
    assert [parse_value(bytes(v)).base for v in sent.values] == [1, 2]


def test_a_lost_stream_is_probed_again(host: Host) -> None:
    before = len(host.messages(wire.Probe))
    host.settle(ms=500)
    host.live.on_tick(host.clock.monotonic_ns())
    assert len(host.messages(wire.Probe)) == before + 2


def test_acks_leader_is_answered_by_the_own_disk_and_acks_none_at_once(host: Host) -> None:
    none, leader, every = (host.produce(acks=a) for a in (Acks.NONE, Acks.LEADER, Acks.ALL))
    host.settle()
    assert none.offsets == (-1, -1)
    assert leader.offsets == (1, 1)
    assert every.result is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (batch()[:40], ErrorCode.CORRUPT_BATCH),
        (batch()[:-1] + b"?", ErrorCode.CORRUPT_BATCH),
        (batch(b"x" * (1 << 20)), ErrorCode.BATCH_TOO_LARGE),
        (batch()[:16] + b"\x01" + batch()[17:], ErrorCode.INVALID_BATCH),
    ],
)
def test_a_bad_batch_is_refused_and_stores_nothing(host: Host, data: bytes, code: ErrorCode) -> None:
    with pytest.raises(SmqError) as e:
        host.produce(data)
    assert e.value.code is code
    assert host.live.log.appended_end == 0


def test_a_follower_names_the_leader(host: Host) -> None:
    host.elect(PEER_A)
    with pytest.raises(SmqError) as e:
        host.produce()
    assert e.value.code is ErrorCode.NOT_LEADER
    assert (e.value.details.leader, e.value.details.leader_address) == (PEER_A, "n2:1")


def test_a_fenced_leader_is_not_named(host: Host) -> None:
    host.elect(PEER_A)
    host.machine.state.nodes[PEER_A].fenced = True
    with pytest.raises(SmqError) as e:
        host.produce()
    assert e.value.code is ErrorCode.LEADER_UNAVAILABLE


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
        host.apply(AlterTopicConfig(name="t", set_=(("storage", "external"),)))
    assert e.value.code is ErrorCode.INVALID_CONFIG
