"""A replica that has sealed an epoch, and a leader that ends its epoch itself (rules 8, 21, 22, 26 and 27)."""

import pytest

from smq.raft_state.commands import CompleteReplicas, ElectLeader
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import DiskId, Epoch, Offset
from smq.replication.net import wire
from smq.replication.partition import handover
from smq.replication.partition.high_water_mark import hwm_advances
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register
from tests.unit.replication.test_rules import acks, append, follower, stored


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
