"""Transactions at a partition's leader: which batches it takes, its control batches, and what committed readers get."""

from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import AdvanceLogStart, CompleteTransactions, Coordinated, WrittenMarker
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, Offset, ProducerEpoch, ProducerId
from smq.raft_state.limits import PRODUCER_EPOCH_RETIRED
from smq.raft_state.state import TransactionPhase
from smq.records import CONTROL_MASK, NewRecord, encode_batch, is_commit_marker, parse_header
from smq.replication.api import Fetched
from smq.replication.commands.coalescing import Barriers
from smq.replication.partition.admission import NotYetKnown
from smq.replication.partition.exact_ends import ExactEnds, end_at_leader
from smq.replication.partition.markers import Markers
from smq.replication.partition.reads import Poll, Reads
from smq.replication.partition.replica import status_of
from tests.unit.raft_state.support import add, init_transactions, proposed
from tests.unit.raft_state.support import end as end_transaction
from tests.unit.replication.support import INCARNATION, ME, PEER_A, Host, register


class World:
    """Producer 0 in epoch 0 has started under the transactional id "t". The partition has one replica that leads."""

    def __init__(self, replication: int = 1) -> None:
        self.host = Host()
        self.host.create_partition(replication=replication)
        self.pid = self.host.part.pid
        self.change(init_transactions("t"))
        self.start()

    def start(self) -> None:
        """The parts of one process."""
        host = self.host.node_host()
        self.endings = Markers(host, host.propose)
        passed = SimpleNamespace(wait=lambda _timeout_ms, done: done(LogIndex(1)))
        self.reads = Reads(
            host, ExactEnds(host, cast(Barriers, passed), {self.pid: self.host.live}.get), self.host.repairs
        )

    def change(self, command: Coordinated) -> None:
        self.host.apply(proposed(self.host.state, command))

    def begin(self, epoch: int = 0) -> None:
        self.change(add("t", 0, epoch, self.pid))

    def end(self, *, commit: bool, epoch: int = 0, fencing: bool = False, bumping: bool = False) -> None:
        self.change(end_transaction("t", 0, epoch, commit=commit, fencing=fencing, bumping=bumping))
        self.drive()

    def drive(self) -> None:
        self.endings.drive(self.host.live)
        self.host.settle()

    def write(self, sequence: int = 0, epoch: int = 0, *, producer: int = 0, is_transactional: bool = True) -> str:
        """The error's name, or "" if the batch was appended."""
        try:
            self.host.produce(self.data(sequence, epoch, producer=producer, is_transactional=is_transactional))
        except SmqError as e:
            return e.code.name
        self.host.settle()
        return ""

    @staticmethod
    def data(sequence: int, epoch: int, *, producer: int = 0, is_transactional: bool = True) -> bytes:
        return encode_batch(
            [NewRecord(None, b"v", 1_000)],
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            is_transactional=is_transactional,
        )

    def commit_all(self) -> None:
        """What is on disk is committed."""
        self.host.commit()
        self.drive()

    @property
    def batches(self) -> list[str]:
        """Of the log: a letter each, "." for data, "C" and "A" for markers."""
        log = self.host.live.log
        found = log.read(log.log_start, log.appended_end, 1 << 20)
        kinds = []
        for stored in found:
            is_control = parse_header(stored.batch).attributes & CONTROL_MASK
            kinds.append(("C" if is_commit_marker(stored.batch) else "A") if is_control else ".")
        return kinds

    @property
    def reports(self) -> list[WrittenMarker]:
        commands = [c for c in self.host.proposed if isinstance(c, CompleteTransactions)]
        return [item for command in commands for item in command.items]

    def accept_reports(self) -> None:
        """Applies the last proposed report, and answers it."""
        command = self.host.proposed[-1]
        assert isinstance(command, CompleteTransactions)
        reply = self.host.apply(command)
        self.host.answers[-1](reply)
        self.host.settle()

    @property
    def phase(self) -> TransactionPhase:
        return self.host.state.transactions["t"].phase

    def fetch(self, offset: int, *, is_committed: bool = True) -> list[Fetched | SmqError]:
        results: list[Fetched | SmqError] = []
        deadline_ns = self.host.clock.monotonic_ns() + 60_000_000_000
        self.reads.fetch(Poll(self.host.live, Offset(offset), 1 << 20, deadline_ns, results.append, is_committed))
        self.host.settle(10)
        return results


@pytest.fixture
def world() -> World:
    return World()


# -------------------------------------------------------------------------------------------- what is taken
def test_rule_29_a_batch_is_taken_into_an_open_transaction_with_this_partition_only(world: World) -> None:
    assert world.write() == "INVALID_TRANSACTION_STATE"
    assert world.write(producer=7) == "UNKNOWN_TRANSACTIONAL_ID"
    world.change(add("t", 0, 0, groups=("g",)))
    assert world.write() == "INVALID_TRANSACTION_STATE", "the partition was not added"
    world.begin()
    assert world.write() == ""
    world.end(commit=True)
    assert world.write(1) == "INVALID_TRANSACTION_STATE"
    assert world.batches == [".", "C"]


def test_rule_29_a_zombies_batch_is_refused_in_an_open_transaction_and_outside(world: World) -> None:
    world.change(init_transactions("t"))
    assert world.write() == "PRODUCER_FENCED"
    world.begin(epoch=1)
    assert world.write() == "PRODUCER_FENCED"
    assert world.write(epoch=2) == "PRODUCER_FENCED", "no epoch that was ever given"
    assert world.write(epoch=1) == ""


@pytest.mark.parametrize("sequence", [0, 7])
def test_rule_29_only_an_older_epoch_is_certain_without_a_barrier(world: World, sequence: int) -> None:
    """The state may be behind, so it may lack the producer, its epoch or its transaction. That a batch is also out of
    order is said last."""
    world.change(init_transactions("t"))
    world.begin(epoch=1)
    world.write(epoch=1)
    assert refusal(world, epoch=0, sequence=sequence) == ("PRODUCER_FENCED", True)
    assert refusal(world, epoch=2, sequence=sequence) == ("PRODUCER_FENCED", False)
    assert refusal(world, epoch=0, producer=9, sequence=sequence) == ("UNKNOWN_TRANSACTIONAL_ID", False)
    world.end(commit=True, epoch=1)
    assert refusal(world, epoch=1, sequence=sequence + 1) == ("INVALID_TRANSACTION_STATE", False)


def refusal(
    world: World, *, epoch: int, sequence: int, producer: int = 0, named: str | None = None
) -> tuple[str, bool]:
    """The error's name, and whether it is certain."""
    with pytest.raises(SmqError) as caught:
        world.host.produce(world.data(sequence, epoch, producer=producer), named=named)
    return caught.value.code.name, not isinstance(caught.value, NotYetKnown)


@pytest.mark.parametrize("sequence", [1, 7])
def test_a_batch_is_not_taken_into_the_transaction_of_an_id_that_its_request_does_not_name(
    world: World, sequence: int
) -> None:
    """A producer keeps its transactional id, so that is certain, unless the state may lack the producer."""
    world.begin()
    assert world.write() == ""
    assert refusal(world, epoch=0, sequence=sequence, named="other") == ("UNKNOWN_TRANSACTIONAL_ID", True)
    with pytest.raises(SmqError) as caught:
        world.host.produce(world.data(sequence, 0), named="x" * 32_767)
    assert len(caught.value.message) < 1_000, "Kafka's answers have no room for a name of any length"
    assert refusal(world, epoch=0, sequence=sequence, producer=1, named="other") == ("UNKNOWN_TRANSACTIONAL_ID", False)
    world.change(init_transactions("other"))
    assert refusal(world, epoch=0, sequence=0, producer=1, named="other") == ("INVALID_TRANSACTION_STATE", False)
    world.host.produce(world.data(1, 0), named="t")
    assert world.batches == [".", "."]


def test_a_plain_batch_of_a_producer_with_an_open_transaction_is_refused(world: World) -> None:
    world.begin()
    assert world.write() == ""
    assert world.write(1, is_transactional=False) == "INVALID_TRANSACTION_STATE"


def test_a_repeated_batch_of_an_ended_transaction_gets_its_offset(world: World) -> None:
    world.begin()
    world.write()
    world.commit_all()
    world.end(commit=True)
    assert world.write() == ""
    assert world.batches == [".", "C"]


# ----------------------------------------------------------------------------------------------- markers
@pytest.mark.parametrize("is_commit", [True, False])
def test_rule_29_the_leader_appends_one_marker_and_reports_it_once_it_is_committed(
    is_commit: bool,
) -> None:
    world = World(replication=3)
    world.begin()
    world.write()
    world.end(commit=is_commit)
    world.drive()
    assert world.batches == [".", "C" if is_commit else "A"]
    assert world.reports == []
    world.commit_all()
    assert world.reports == [WrittenMarker(partition=world.pid, epoch=Epoch(0), producer_id=ProducerId(0), changes=3)]
    world.accept_reports()
    assert world.phase is TransactionPhase.EMPTY
    world.drive()
    assert world.batches == [".", "C" if is_commit else "A"]


def test_a_partition_without_records_of_the_transaction_needs_no_marker(world: World) -> None:
    world.begin()
    world.end(commit=True)
    assert world.batches == []
    world.accept_reports()
    assert world.phase is TransactionPhase.EMPTY


def test_a_new_process_appends_the_marker_if_the_log_lacks_it(world: World) -> None:
    world.begin()
    world.write()
    world.commit_all()
    world.change(end_transaction("t", 0, 0, commit=True))
    world.host.reopen()
    world.start()
    world.drive()
    assert world.batches == ["."], "it does not lead"
    restart(world)
    world.drive()
    assert world.batches == [".", "C"]


def test_a_new_leader_does_not_repeat_a_marker_that_is_in_its_log(world: World) -> None:
    world.begin()
    world.write()
    world.end(commit=False)
    assert world.batches == [".", "A"]
    world.host.advance(2)
    world.host.reopen()
    restart(world)
    world.drive()
    assert world.batches == [".", "A"]
    assert [item.epoch for item in world.reports] == [1]


def restart(world: World) -> None:
    """The reopened process is elected."""
    incarnation = Incarnation(INCARNATION + 1)
    world.host.apply(register(ME, incarnation))
    world.host.elect(ME, incarnation, end=world.host.live.log.appended_end)
    world.start()


def test_a_marker_waits_for_room_and_comes_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.begin()
    world.write()
    monkeypatch.setattr(type(world.host.space), "admits", lambda *_: False)
    world.end(commit=True)
    assert world.batches == ["."]
    monkeypatch.undo()
    world.drive()
    assert world.batches == [".", "C"]


def test_a_follower_appends_no_marker() -> None:
    world = World(replication=3)
    world.begin()
    world.write()
    world.host.advance(1)
    world.host.elect(PEER_A)
    world.end(commit=True)
    assert world.batches == ["."]


def test_a_fencing_marker_makes_the_log_refuse_the_older_epoch(world: World) -> None:
    world.begin()
    world.write()
    world.end(commit=False, fencing=True)
    assert world.batches == [".", "A"]
    log = world.host.live.log
    assert [p.producer_epoch for p in log.producers.entries(Offset(0))] == [1]


# ----------------------------------------------------------------------------------------------- readers
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_marker_of_the_second_protocol_fences_what_was_sent_before_it(world: World, is_commit: bool) -> None:
    world.begin()
    world.write()
    world.end(commit=is_commit, bumping=True)
    world.commit_all()
    assert world.write(1) == "PRODUCER_FENCED"
    world.accept_reports()
    assert world.phase is TransactionPhase.EMPTY
    world.begin(1)
    assert world.write(1) == "PRODUCER_FENCED", "of the first epoch, in the middle of the next transaction"
    assert world.write(0, 1) == "", "a new epoch begins with sequence 0"
    assert world.batches == [".", "C" if is_commit else "A", "."]


def test_a_producer_that_has_used_up_its_epochs_gets_its_marker_under_its_former_id(world: World) -> None:
    world.host.state.transactions["t"].producer_epoch = ProducerEpoch(PRODUCER_EPOCH_RETIRED - 1)
    world.begin(PRODUCER_EPOCH_RETIRED - 1)
    world.write(0, PRODUCER_EPOCH_RETIRED - 1)
    world.end(commit=True, epoch=PRODUCER_EPOCH_RETIRED - 1, bumping=True)
    assert world.write(1, PRODUCER_EPOCH_RETIRED - 1) == "PRODUCER_FENCED"
    world.commit_all()
    assert world.batches == [".", "C"]
    assert [(item.producer_id, item.partition) for item in world.reports] == [(0, world.pid)]
    world.accept_reports()
    assert world.phase is TransactionPhase.EMPTY
    world.change(add("t", 1, 0, world.pid))
    assert world.write(producer=1) == ""


def test_rule_30_a_committed_reader_waits_for_the_marker_and_then_gets_everything(world: World) -> None:
    world.begin()
    world.write()
    world.commit_all()
    assert len(world.fetch(0, is_committed=False)) == 1
    waiting = world.fetch(0)
    assert waiting == []
    world.end(commit=True)
    world.reads.wake(world.host.live)
    assert waiting == [], "the marker is not committed"
    world.commit_all()
    world.reads.wake(world.host.live)
    world.host.settle(10)
    (result,) = waiting
    assert isinstance(result, Fetched)
    assert [(b.base_offset, b.last_offset) for b in result.batches] == [(0, 0), (1, 1)]
    assert (result.lso, result.hwm, result.aborted) == (2, 2, [])


def test_a_committed_reader_gets_the_aborted_transactions_of_what_it_reads(world: World) -> None:
    world.begin()
    world.write()
    world.end(commit=False)
    world.commit_all()
    (result,) = world.fetch(0)
    assert isinstance(result, Fetched)
    assert [(a.producer_id, a.first, a.marker) for a in result.aborted] == [(0, 0, 1)]
    (raw,) = world.fetch(0, is_committed=False)
    assert isinstance(raw, Fetched)
    assert (raw.aborted, len(raw.batches)) == ([], 2)


def test_rule_30_the_leaders_end_has_the_last_stable_offset() -> None:
    world = World(replication=3)
    world.begin()
    world.write()
    world.commit_all()
    found = end_at_leader(world.host.live)
    assert (found.lso, found.hwm, found.log_end) == (0, 1, 1)
    world.end(commit=True)
    assert end_at_leader(world.host.live).lso == 0
    world.commit_all()
    found = end_at_leader(world.host.live)
    assert (found.lso, found.hwm, found.log_end) == (2, 2, 2)


def test_rule_30_the_last_stable_offset_is_not_below_the_log_start(world: World) -> None:
    world.begin()
    world.write()
    world.write(1)
    world.commit_all()
    world.host.apply(AdvanceLogStart(partition=world.pid, offset=Offset(1)))
    assert world.host.live.stable_end == 1


def test_rule_30_a_follower_that_lags_does_not_tell_a_last_stable_offset_beyond_its_log() -> None:
    """It does not know which transactions begin there."""
    world = World(replication=3)
    world.write(is_transactional=False)
    world.host.advance(1)
    world.host.elect(PEER_A, end=1)
    world.host.advance(9)
    assert world.host.live.known_commit_point() == 9
    assert world.host.live.stable_end == status_of(world.host.live).lso == 1
