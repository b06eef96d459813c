"""Refused batches of idempotent producers: those that were sent after them wait until they have come again."""

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.records import INT32_MAX, BatchHeader, parse_header
from smq.replication.api import Acks, Produced
from smq.replication.log.producers import ProducerTable
from smq.replication.partition import admission
from smq.replication.partition.admission import AWAITED_NS_MAX, SendOrder
from smq.replication.partition.intake import Intake
from smq.testing.virtual.clock import Scheduler
from tests.unit.replication.log.support import fold
from tests.unit.replication.support import PEER_A, PEER_B, Host, batch, process_clock

PID, OTHER = PartitionId(b"p" * 20), PartitionId(b"q" * 20)


def sent(sequence: int, *, producer: int = 7, epoch: int = 0) -> bytes:
    return batch(producer_id=producer, producer_epoch=epoch, base_sequence=sequence)


def header(sequence: int, *, producer: int = 7, epoch: int = 0) -> BatchHeader:
    return parse_header(sent(sequence, producer=producer, epoch=epoch))


class World:
    """A memory of refused batches, and the table of a log that knows no producer yet."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.order = SendOrder(process_clock(self.scheduler))
        self.table = ProducerTable()

    def is_refused(self, sequence: int, pid: PartitionId = PID, *, producer: int = 7, epoch: int = 0) -> bool:
        try:
            self.order.check(pid, header(sequence, producer=producer, epoch=epoch), self.table, Offset(0))
        except SmqError as e:
            if e.code is not ErrorCode.OVERLOADED:
                raise
            return True
        return False

    def append(self, sequence: int) -> None:
        """In the log of PID."""
        assert not self.is_refused(sequence)
        fold(self.table, header(sequence), ts_ns=1)  # type: ignore[arg-type]  # any time
        self.order.came(PID, header(sequence))


@pytest.fixture
def world() -> World:
    return World()


def test_later_batches_wait_until_the_refused_one_is_in_the_log(world: World) -> None:
    world.order.expect(PID, sent(0))
    assert [world.is_refused(n) for n in (1, 2, 1)] == [True] * 3
    world.append(0)
    world.append(1)
    assert world.order._awaited == {}


def test_the_first_of_several_refused_batches_is_remembered(world: World) -> None:
    for sequence in (3, 2, 4):
        world.order.expect(PID, sent(sequence))
    assert [world.is_refused(n) for n in (1, 2, 3)] == [False, False, True]


def test_others_are_not_concerned(world: World) -> None:
    world.order.expect(PID, sent(0))
    assert not world.is_refused(1, OTHER)
    assert not world.is_refused(1, producer=8)
    assert not world.is_refused(0, epoch=1)
    assert not world.is_refused(1), "under its new epoch the producer has begun again"


def test_batches_without_a_producer_and_bytes_that_are_none_are_not_remembered(world: World) -> None:
    for data in (batch(), b"", b"short", b"\0" * 61):
        world.order.expect(PID, data)
    assert world.order._awaited == {}


def test_a_batch_that_another_leader_took_is_no_longer_awaited(world: World) -> None:
    world.order.expect(PID, sent(0))
    for sequence in (0, 1, 2):
        fold(world.table, header(sequence), ts_ns=1)  # type: ignore[arg-type]  # any time
    assert not world.is_refused(3)


def test_a_known_producers_gap_is_retriable_while_the_missing_batch_is_awaited(world: World) -> None:
    world.append(0)
    world.order.expect(PID, sent(1))
    assert world.is_refused(2)
    world.append(1)
    with pytest.raises(SmqError, match="OUT_OF_ORDER_SEQUENCE"):
        world.is_refused(3)


def test_sequences_wrap(world: World) -> None:
    world.order.expect(PID, sent(INT32_MAX))
    assert world.is_refused(0)
    assert not world.is_refused(INT32_MAX - 1)


def test_a_producer_that_never_comes_again_is_forgotten(world: World) -> None:
    world.order.expect(PID, sent(0))
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 2e6)
    assert world.is_refused(1), "a later batch does not make it wait longer"
    world.order.expect(PID, sent(1))
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 2e6)
    assert not world.is_refused(1)


def test_when_too_many_are_refused_unknown_producers_begin_at_0(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AWAITED_MAX", 2)
    for producer in (1, 2, 3):
        world.order.expect(PID, sent(0, producer=producer))
    assert len(world.order._awaited) == 2
    assert [world.is_refused(n, producer=3) for n in (1, 0)] == [True, False]
    assert world.is_refused(5, producer=99)
    world.scheduler.run_for_ms(AWAITED_NS_MAX / 1e6)
    assert not world.is_refused(5, producer=99)


def test_batches_for_a_name_that_is_unknown_yet_are_awaited_under_its_id(world: World) -> None:
    world.order.expect_by_name("t", 0, sent(0))
    world.order.place("t", 1, OTHER)
    assert not world.is_refused(1, OTHER)
    world.order.place("t", 0, PID)
    assert world.is_refused(1)
    assert world.order._unplaced == {}


def test_names_that_never_come_into_being_are_not_collected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "AWAITED_MAX", 2)
    for i in range(3):
        world.order.expect_by_name(f"t{i}", 0, sent(0))
    assert sum(map(len, world.order._unplaced.values())) == 1
    assert world.is_refused(1)


# ---------------------------------------------------------------------------------------------- one replica
def test_a_lost_append_is_awaited(host: Host) -> None:
    lost = host.produce(sent(0))
    host.settle()
    host.elect(PEER_A)
    host.elect(1, end=0)  # type: ignore[arg-type]  # this node
    host.settle(0)
    assert lost.error == "APPEND_LOST"
    with pytest.raises(SmqError, match="OVERLOADED"):
        host.produce(sent(1))
    again, after = host.produce(sent(0)), host.produce(sent(1))
    host.settle()
    host.ack(PEER_A, 2)
    host.advance(2)
    host.settle(0)
    assert (again.offsets, after.offsets) == ((0, 0), (1, 1))


def test_a_timed_out_append_that_is_there_delays_no_other(host: Host) -> None:
    first = host.produce(sent(0), timeout_ms=10)
    host.settle()
    assert first.error == "TIMED_OUT"
    assert host.produce(sent(1)).result is None


def test_a_batch_parked_by_a_hand_over_that_is_refused_in_the_end_is_awaited(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_B, 0)
    assert host.live.transfer(PEER_B)
    parked = host.produce(sent(0))
    full, host.intake = host.intake, Intake(host.disk, 0)
    host.settle(2_000)
    assert parked.error == "OVERLOADED"
    host.intake = full
    with pytest.raises(SmqError, match="has to come first"):
        host.produce(sent(1))
    host.produce(sent(0))
    assert host.produce(sent(1)).result is None


def test_without_acknowledgements_nothing_is_awaited(host: Host) -> None:
    host.produce()
    host.settle()
    host.ack(PEER_B, 0)
    assert host.live.transfer(PEER_B)
    host.produce(sent(0), acks=Acks.NONE)
    full, host.intake = host.intake, Intake(host.disk, 0)
    host.settle(2_000)
    host.intake = full
    answer = host.produce(sent(1), acks=Acks.NONE)
    host.settle(0)
    assert isinstance(answer.result, Produced)
