"""A leader on one replica: what it streams, which requests it refuses, and how it hands over (rule 11)."""

import pytest

from smq.raft_state.commands import CompleteReplicas, ElectLeader
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import DiskId, Epoch, Offset
from smq.records import NewRecord, encode_batch
from smq.replication.api import Acks
from smq.replication.log.stored_batch import ENVELOPE_BYTES, parse_value
from smq.replication.net import wire
from smq.replication.partition import handover, streams
from smq.replication.partition.high_water_mark import hwm_advances
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register
from tests.unit.replication.test_rules import acks, append, follower, stored


# ------------------------------------------------------------------------------------------------ streams
def test_a_follower_is_probed_then_sent_the_records_after_its_log_end(host: Host) -> None:
    for value in (b"a", b"b", b"c"):
        host.produce(batch(value))
    host.settle()
    assert host.messages(wire.Append) == []
    host.answer_probe(PEER_A, 1)
    (sent,) = host.appends_to(PEER_A)
    assert [parse_value(host.part.pid, bytes(v)).base for v in sent.values] == [1, 2]


def test_many_small_batches_go_in_several_appends(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower handles an append in one turn of its loop."""
    monkeypatch.setattr(streams, "APPEND_BATCHES_MAX", 2)
    for value in (b"a", b"b", b"c", b"d", b"e"):
        host.produce(batch(value))
    host.settle()
    host.answer_probe(PEER_A, 0)
    sent = [m.values for m in host.appends_to(PEER_A)]
    assert [[parse_value(host.part.pid, bytes(v)).base for v in values] for values in sent] == [[0, 1], [2, 3], [4]]


def test_what_follows_a_small_append_goes_with_its_answer_in_one_frame_and_carries_the_commit_point(host: Host) -> None:
    for peer in (PEER_A, PEER_B):
        host.ack(peer, 0)
    for value in (b"a", b"b", b"c"):
        host.produce(batch(value))
    host.settle()
    assert [len(m.values) for m in host.appends_to(PEER_A)] == [1]
    host.ack(PEER_A, 1)
    assert [(len(m.values), m.commit) for m in host.appends_to(PEER_A)] == [(1, 0), (2, 1)]
    assert [len(m.values) for m in host.appends_to(PEER_B)] == [1], "its disk is slower"


def test_large_appends_wait_for_no_answer(host: Host) -> None:
    host.ack(PEER_A, 0)
    for _ in range(3):
        host.produce(batch(bytes(streams.SMALL_BYTES)))
    assert [len(m.values) for m in host.appends_to(PEER_A)] == [1, 1, 1]


def test_a_follower_that_never_answers_a_small_append_is_asked_again(host: Host) -> None:
    host.ack(PEER_A, 0)
    for value in (b"a", b"b"):
        host.produce(batch(value))
    host.settle(ms=2_000)
    host.live.on_tick(host.clock.monotonic_ns())
    host.ack(PEER_A, 0)  # it never got the append
    assert [len(m.values) for m in host.appends_to(PEER_A)] == [1, 1, 2]


def test_a_lost_stream_is_probed_again(host: Host) -> None:
    before = len(host.messages(wire.Probe))
    host.settle(ms=500)
    host.live.on_tick(host.clock.monotonic_ns())
    assert len(host.messages(wire.Probe)) == before + 2


def test_acks_leader_is_answered_by_the_own_disk_and_acks_none_immediately(host: Host) -> None:
    host.disk.latency_ms = (50, 50)
    none, leader, every = (host.produce(acks=a) for a in (Acks.NONE, Acks.LEADER, Acks.ALL))
    host.live.on_applied()
    host.settle(0)
    assert leader.result is None, "not on disk yet"
    host.settle()
    assert none.offsets == (-1, -1)
    assert leader.offsets == (1, 1)
    assert every.result is None


def test_acks_leader_of_a_sole_replica_is_answered_once_a_reader_sees_the_record() -> None:
    host = Host()
    host.create_partition(replication=1)
    host.disk.latency_ms = (50, 50)
    answer = host.produce(acks=Acks.LEADER)
    host.settle(10)
    assert (answer.result, host.live.readable_end) == (None, 0)
    host.settle()
    assert (answer.offsets, host.live.readable_end) == ((0, 0), 1)


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


# ------------------------------------------------------------------------------------------------ handing over
def hand_over_to_one_behind(host: Host, data: bytes | None = None) -> None:
    """To PEER_A, which lacks the only batch."""
    host.produce(data)
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)


def test_rule_26_a_hand_over_waits_until_the_target_has_everything(host: Host) -> None:
    before = host.produce()
    host.settle()
    for peer in (PEER_A, PEER_B):
        host.ack(peer, 0)
    assert host.live.transfer(PEER_A)
    assert not host.live.transfer(PEER_B), "one at a time"
    meanwhile = host.produce()
    assert host.proposed == []
    host.ack(PEER_A, 1)
    assert [type(c).__name__ for c in host.proposed] == ["ElectLeader"]
    host.elect(PEER_A, end=1)
    host.settle()
    assert before.offsets == (0, 0)
    assert meanwhile.error == "NOT_LEADER"
    assert host.live.log.appended_end == 1, "nothing of it was appended"


def test_rule_11_a_hand_over_waits_for_the_target_though_all_is_committed_without_it(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    host.ack(PEER_B, 1)
    host.advance(1)
    assert host.live.transfer(PEER_A)
    assert host.proposed == []
    host.ack(PEER_A, 1)
    assert [type(c).__name__ for c in host.proposed] == ["ElectLeader"]


def test_rule_11_a_handover_to_a_follower_that_lags_far_does_not_begin(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.ack(PEER_A, 0)
    for _ in range(3):
        host.produce()
    host.settle()
    monkeypatch.setattr(handover, "LAG_BYTES_MAX", 2 * (len(batch()) + ENVELOPE_BYTES))
    assert not host.live.transfer(PEER_A)
    host.ack(PEER_A, 1)
    assert host.live.transfer(PEER_A)


def test_rule_11_a_handover_that_takes_too_long_is_abandoned_and_parked_batches_are_taken(host: Host) -> None:
    hand_over_to_one_behind(host)
    waiting = [host.produce(), host.produce()]
    host.settle(ms=3_000)
    after = host.produce()
    host.settle()
    host.ack(PEER_A, 4)
    host.advance(4)
    host.settle()
    assert [w.offsets for w in (*waiting, after)] == [(1, 1), (2, 2), (3, 3)]


def test_a_parked_batch_is_not_refused_for_what_only_a_barrier_makes_certain(host: Host) -> None:
    """A leader that has been deposed meanwhile lacks the batches before it, or has not applied its transaction."""
    hand_over_to_one_behind(host, batch(producer_id=7, producer_epoch=0, base_sequence=0))
    later = batch(producer_id=7, producer_epoch=0, base_sequence=5)
    in_transaction = encode_batch(
        [NewRecord(b"k", b"v", 1)], producer_id=8, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    waiting = [host.produce(later), host.produce(in_transaction)]
    host.settle(ms=3_000)
    assert [w.error for w in waiting] == ["LEADER_UNAVAILABLE"] * 2


@pytest.mark.parametrize("bound", ["PARKED_MAX", "PARKED_BYTES_MAX"])
def test_rule_11_producers_that_wait_for_a_hand_over_are_bounded(
    host: Host, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(handover, bound, 10 if bound == "PARKED_MAX" else 10 * len(batch()))
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    for _ in range(2):  # what the first has let go leaves its room to the second
        assert host.live.transfer(PEER_A)
        for _ in range(10):
            host.produce()
        with pytest.raises(SmqError) as e:
            host.produce()
        assert e.value.code is ErrorCode.LEADER_UNAVAILABLE
        host.settle(ms=2 * handover.PAUSE_MS_MAX)


def test_rule_11_a_stopping_node_answers_that_nothing_of_a_parked_batch_was_stored(host: Host) -> None:
    hand_over_to_one_behind(host)
    waiting = host.produce()
    host.live.close(SmqError(ErrorCode.SHUTTING_DOWN, "stopping"))
    host.settle()
    assert waiting.error == "SHUTTING_DOWN"


# ------------------------------------------------------------------------------------------------------------- sealing
# A replica that has sealed an epoch, and a leader that ends its epoch itself (rules 8, 21, 22, 26 and 27).
def elections(host: Host) -> list[ElectLeader]:
    return [command for command in host.proposed if isinstance(command, ElectLeader)]


# ------------------------------------------------------------------------------------------------ rule 21
def test_rule_06_a_follower_that_has_sealed_takes_no_append_of_that_epoch() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1))
    assert host.live.seal(Epoch(1)) == (host.part.pid, 0, 0)
    append(host, stored(batch(), 1, 1))
    host.settle()
    assert host.live.log.appended_end == 1


def test_rule_07_a_follower_that_has_sealed_acknowledges_nothing_that_becomes_durable_later() -> None:
    host = follower()
    append(host, stored(batch(), 0, 1))
    host.live.seal(Epoch(1))
    host.settle()
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    host.live.on_turn()
    assert host.live.log.durable_end == 1
    assert acks(host) == []


def test_rule_21_a_leader_that_has_sealed_leads_no_more(host: Host) -> None:
    waiting = host.produce()
    host.live.seal(Epoch(0))
    assert host.live.leading is None
    with pytest.raises(SmqError) as e:
        host.produce()
    assert e.value.code is ErrorCode.LEADER_UNAVAILABLE
    host.settle()
    host.ack(PEER_A, 1)
    assert hwm_advances(host.live) == []
    assert waiting.result is None


def test_rule_21_a_seal_is_of_one_epoch_only() -> None:
    host = follower()
    host.live.seal(Epoch(1))
    host.elect(PEER_B)
    append(host, stored(batch(), 0, 2), epoch=2, peer=PEER_B)
    host.settle()
    assert [(ack.epoch, ack.end) for ack in acks(host)][-1] == (2, 1)


def test_rule_21_the_next_process_of_a_follower_has_sealed_nothing() -> None:
    """Its promise ended with it: a leader that counts the new process has applied that it is another one."""
    host = follower()
    host.live.seal(Epoch(1))
    host.reopen(INCARNATION + 1)
    append(host, stored(batch(), 0, 1))
    host.settle()
    assert [ack.end for ack in acks(host)] == [1]


def test_rule_21_what_is_applied_and_not_judged_yet_is_not_reported() -> None:
    host = follower()
    with host.cut_off() as replica:
        host.elect(PEER_B)
        assert replica.seal(Epoch(2)) is None
    assert replica.seal(Epoch(2)) == (host.part.pid, 0, 0)


# ------------------------------------------------------------------------------------------------ rule 8
def test_rule_08_a_process_that_is_not_registered_counts_only_once_it_is(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1, incarnation=INCARNATION + 1)
    assert hwm_advances(host.live) == []
    assert host.live.follower_ends() == {}
    host.apply(register(PEER_A, INCARNATION + 1))
    host.live.on_tick(host.clock.monotonic_ns())
    (advance,) = hwm_advances(host.live)
    assert advance.hwm == 1


def test_rule_08_a_process_that_is_registered_no_more_does_not_count(host: Host) -> None:
    host.disk.latency_ms = (50, 50)
    host.produce()
    host.ack(PEER_A, 1)
    host.apply(register(PEER_A, INCARNATION + 1))
    host.settle()
    assert (host.live.durable_verified_end, hwm_advances(host.live)) == (1, [])


# ------------------------------------------------------------------------------------------------ rule 22
def replaced(host: Host) -> None:
    """PEER_A starts on another disk."""
    command = register(PEER_A, INCARNATION + 1)
    host.apply(type(command)(**{f: getattr(command, f) for f in command.__slots__} | {"disk": DiskId(b"x" * 16)}))


def caught_up(host: Host) -> list[tuple[int, int]]:
    return [(item.node, item.incarnation) for item in host.live.caught_up()]


def test_rule_22_a_follower_is_complete_once_it_has_what_the_log_had_at_its_first_report(host: Host) -> None:
    host.produce(batch(count=3))
    host.settle()
    host.ack(PEER_A, 3)
    host.produce()  # what its former process may have acknowledged, too
    replaced(host)
    assert host.part.incomplete == {PEER_A}
    host.ack(PEER_A, 3, incarnation=INCARNATION + 1)
    assert caught_up(host) == []
    host.produce()
    host.ack(PEER_A, 4, incarnation=INCARNATION + 1)
    assert caught_up(host) == [(PEER_A, INCARNATION + 1)]
    host.apply(CompleteReplicas(items=tuple(host.live.caught_up())))
    assert (host.part.incomplete, host.live.caught_up()) == (frozenset(), [])


def test_rule_22_what_a_former_process_reported_completes_nothing(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 1)
    replaced(host)
    assert caught_up(host) == []


def test_rule_22_a_leader_that_is_marked_late_completes_itself(host: Host) -> None:
    host.machine.state.topics["t"].partitions[0].incomplete = frozenset({ME})
    assert caught_up(host) == [(ME, INCARNATION)]
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.noted["caught_up"] == 1
    host.live.resign()
    assert caught_up(host) == []


# ------------------------------------------------------------------------------------------------ rules 26, 27
def test_rule_27_a_follower_that_has_sealed_says_so_to_its_leader() -> None:
    host = follower()
    host.live.seal(Epoch(1))
    host.sent.clear()
    append(host, stored(batch(), 0, 1))
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    assert host.sent == [(PEER_A, wire.Sealed(host.part.pid, Epoch(1)))] * 2


def test_rule_27_a_leader_that_hears_of_a_seal_has_itself_elected_again(host: Host) -> None:
    waiting = host.produce()
    host.settle()
    host.live.on_sealed(wire.Sealed(host.part.pid, Epoch(1)))
    assert not host.live.is_handing_over, "not of the epoch that it leads"
    host.live.on_sealed(wire.Sealed(host.part.pid, Epoch(0)))
    parked = host.produce()
    (command,) = elections(host)
    assert (command.candidate, command.incarnation, command.end, command.by_leader) == (ME, INCARNATION, 1, True)
    host.apply(command)
    host.settle()
    assert (host.live.leading, waiting.result, parked.error) == (1, None, "LEADER_UNAVAILABLE")
    host.ack(PEER_B, 1)
    host.settle(0)
    assert waiting.offsets == (0, 0)
    assert host.produce().result is None


def test_rule_27_a_leader_whose_disk_does_not_write_resigns_instead(host: Host) -> None:
    host.disk.latency_ms = (60_000, 60_000)
    host.produce()
    host.live.on_sealed(wire.Sealed(host.part.pid, Epoch(0)))
    host.settle(ms=2 * handover.PAUSE_MS_MAX)
    assert (elections(host), host.resigned) == ([], [(host.part.pid, Epoch(0))])


def test_rule_26_after_a_successor_was_proposed_nothing_is_appended_in_the_epoch(host: Host) -> None:
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    assert [(c.candidate, c.by_leader) for c in elections(host)] == [(PEER_A, True)]
    parked = host.produce()
    host.settle(ms=2 * handover.PAUSE_MS_MAX)
    assert (host.live.log.appended_end, parked.result) == (0, None)
    host.answers.pop()(SmqError(ErrorCode.TIMED_OUT, "no answer"))  # it may be applied all the same
    assert [c.candidate for c in elections(host)] == [PEER_A, ME]
    host.answers.pop()(SmqError(ErrorCode.TIMED_OUT, "no answer"))
    host.settle()
    assert (host.resigned, parked.error) == ([(host.part.pid, Epoch(0))], "LEADER_UNAVAILABLE")
    assert host.live.log.appended_end == 0


def test_rule_26_a_hand_over_turns_into_a_renewal_if_its_target_has_sealed(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_A, 0)
    assert host.live.transfer(PEER_A)
    host.live.on_sealed(wire.Sealed(host.part.pid, Epoch(0)))
    host.ack(PEER_B, 1)
    host.advance(1)
    assert [c.candidate for c in elections(host)] == [ME]
    assert Offset(1) == host.part.hwm
