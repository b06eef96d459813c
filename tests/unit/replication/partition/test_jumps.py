"""One replica after a jump of the applied state, or in a stopping process: it continues, and reports nothing that it
does not know."""

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.records import parse_header
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.net import wire
from tests.unit.replication.partition.test_damage import advance_log_start, idempotent
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch
from tests.unit.replication.test_rules import acks, append, follower, stored


def jump(host: Host, *, hwm: int, log_start: int) -> None:
    """A snapshot reaches a replica that was cut off: PEER_A led epoch 1, ME leads epoch 2; it learns of both
    together."""
    with host.cut_off():
        host.elect(PEER_A)
        host.advance(hwm)
        host.elect(ME, end=hwm)
        advance_log_start(host, log_start)


def leader_with_a_sequence() -> Host:
    """Sequence 0 is committed, in epoch 0."""
    host = Host()
    host.create_partition()
    host.produce(idempotent(0))
    host.settle()
    host.advance(1)
    return host


def leader_with_an_uncommitted_sequence() -> Host:
    """It led epoch 0: sequence 0 is committed, sequence 1 never left this node."""
    host = leader_with_a_sequence()
    host.produce(idempotent(1))
    host.settle()
    return host


def test_a_jump_over_an_epoch_and_the_log_start_leaves_no_sequence_that_was_never_committed() -> None:
    host = leader_with_an_uncommitted_sequence()
    jump(host, hwm=2, log_start=2)
    assert (host.live.log.log_start, host.live.log.appended_end) == (2, 2)
    assert host.live.log.producers.check(parse_header(idempotent(1)), Offset(0)) is None


def test_a_jump_within_what_is_here_keeps_the_sequences_that_were_committed() -> None:
    host = leader_with_an_uncommitted_sequence()
    with host.cut_off():
        host.elect(ME)
        advance_log_start(host, 1)
    assert host.produce(idempotent(1)).result is None, "it was dropped with its epoch: this is a new batch"
    host.settle()
    assert (host.live.log.log_start, host.live.log.appended_end) == (1, 2)


def jumped() -> Host:
    """A follower of which DeleteRecords up to 9 has removed sequences 1 to 8 before it ever saw them."""
    host = follower()
    append(host, stored(idempotent(0), 0, 1))
    host.settle()
    host.advance(9)
    advance_log_start(host, 9)
    host.settle()
    return host


def send_producers(host: Host, at: int) -> None:
    """What a leader says whose log holds sequence 8 at offset 8."""
    table = ProducerTable()
    cached = CachedBatch(Epoch(1), Offset(8), Offset(9), Sequence(8), Sequence(8), TsNs(88))
    table.note(ProducerId(7), ProducerEpoch(0), cached)
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(at), 0, 1, table.snapshot()))
    host.settle()


def test_a_log_that_jumped_counts_for_nothing_until_it_has_the_producers() -> None:
    host = jumped()
    assert host.live.durable_verified_end == 0
    assert acks(host)[-1].needs_producers
    append(host, stored(idempotent(9), 9, 1))
    assert host.live.log.appended_end == 9, "what follows waits for them, too"
    send_producers(host, 9)
    assert host.live.durable_verified_end == 9
    assert not acks(host)[-1].needs_producers


def test_rule_16_a_log_that_jumped_seals_and_is_no_candidate_until_it_has_the_producers() -> None:
    host = jumped()
    assert host.live.seal(Epoch(1)) == (host.part.pid, 9, wire.NO_CANDIDATE)
    host.elect(PEER_B)
    table = wire.Producers(host.part.pid, Epoch(2), 1, Offset(9), 0, 1, b"")
    host.live.on_producers(PEER_B, table)
    host.settle()
    assert host.live.seal(Epoch(2)) == (host.part.pid, 9, 9)


def test_a_leader_whose_log_had_jumped_answers_the_repetition_of_a_batch_it_never_held() -> None:
    host = jumped()
    send_producers(host, 9)
    host.elect(ME, end=9)
    answer = host.produce(idempotent(8))
    host.settle(10)
    assert answer.is_duplicate
    assert answer.offsets == (8, 8)


def test_a_log_that_jumped_does_not_lead_without_the_producers() -> None:
    host = jumped()
    host.elect(ME, end=9)
    assert host.live.leading is None


def test_the_lack_of_producers_outlives_the_process() -> None:
    host = jumped()
    assert not host.reopen().log.has_producers
    send_producers(host, 9)
    assert host.reopen().log.has_producers


def test_the_only_replica_keeps_leading_without_producers_as_no_other_has_them() -> None:
    host = jumped()
    host.part.replicas = (ME,)
    host.elect(ME, end=9)
    assert host.live.leading is not None


def test_a_sole_replica_that_leads_without_producers_waits_for_none_if_it_gets_others() -> None:
    host = jumped()
    host.part.replicas = (ME,)
    host.elect(ME, end=9)
    host.part.replicas = (ME, PEER_A, PEER_B)
    assert host.live.durable_verified_end == 9
    host.settle()
    assert host.reopen().log.has_producers


def test_producers_of_another_offset_are_not_taken() -> None:
    host = jumped()
    send_producers(host, 8)
    assert not host.live.log.has_producers


@pytest.mark.parametrize(("peer", "epoch"), [(PEER_B, 1), (PEER_A, 0), (PEER_A, 2)])
def test_producers_are_taken_from_the_leader_in_its_epoch_alone(peer: NodeId, epoch: int) -> None:
    host = jumped()
    host.live.on_producers(peer, wire.Producers(host.part.pid, Epoch(epoch), 1, Offset(9), 0, 1, b""))
    assert not host.live.log.has_producers
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(9), 0, 1, b""))
    assert host.live.log.has_producers


def test_producers_that_do_not_decode_are_refused() -> None:
    host = jumped()
    with pytest.raises(wire.WireError, match="cannot be adopted"):
        host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(9), 0, 1, b"\x01"))


def test_a_leader_sends_its_producers_to_a_log_that_jumped() -> None:
    host = leader_with_a_sequence()
    advance_log_start(host, 1)
    probe = host.last_probe(PEER_B)
    ack = wire.Ack(host.part.pid, Epoch(0), INCARNATION, Offset(0), Offset(1), probe.stream, True, True)
    host.live.on_ack(PEER_B, ack)
    reported = host.messages(wire.Producers)[-1]
    assert isinstance(reported, wire.Producers)
    assert (reported.at, reported.table) == (1, host.live.log.producers.snapshot())


def test_the_log_start_reached_in_the_own_epoch_keeps_the_sequences() -> None:
    host = leader_with_a_sequence()
    advance_log_start(host, 1)
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.is_duplicate


def test_a_repetition_of_a_committed_batch_is_answered_when_its_epoch_has_been_pruned() -> None:
    host = leader_with_a_sequence()
    host.elect(ME)
    host.produce(batch())
    host.settle()
    host.advance(2)
    advance_log_start(host, 2)
    assert host.part.epoch_range(Epoch(0)) is None
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.offsets == (0, 0)
    assert answer.is_duplicate


def test_a_stream_number_of_an_earlier_epoch_does_not_silence_a_follower() -> None:
    host = follower()
    append(host, stored(batch(), 5, 1), stream=2)
    host.elect(PEER_B)
    before = len(acks(host))
    append(host, stored(batch(), 5, 2), epoch=2, stream=2, peer=PEER_B)
    assert len(acks(host)) == before + 1


def test_a_jump_to_the_epoch_after_the_one_it_was_judged_by_keeps_the_sequences_that_were_committed() -> None:
    host = leader_with_a_sequence()
    for _ in range(2):
        host.elect(ME)  # epochs in which nothing is appended
    with host.cut_off():
        host.elect(ME)
        advance_log_start(host, 1)
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.offsets == (0, 0)


# ------------------------------------------------------------------------------------------------- stopping
def test_a_node_that_stops_does_not_say_that_what_it_appended_is_lost(host: Host) -> None:
    answer = host.produce()
    host.settle(100)
    host.live.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    host.settle(10)
    assert answer.error == "TIMED_OUT"
    assert not ErrorCode.TIMED_OUT.is_definite
