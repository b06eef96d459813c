"""Transactions at a partition's leader: which batches it takes, its control batches, and what committed readers get."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import (
    AdvanceLogStart,
    Command,
    CompleteTransactions,
    Coordinated,
    JoinTransactions,
    WrittenMarker,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, Offset, PartitionId, ProducerEpoch, ProducerId
from smq.raft_state.limits import PRODUCER_EPOCH_RETIRED
from smq.raft_state.replies import Reply
from smq.raft_state.state import TransactionPhase
from smq.records import CONTROL_MASK, NewRecord, encode_batch, is_commit_marker, parse_header
from smq.replication.api import DoneFn, Fetched
from smq.replication.commands.coalescing import Barriers
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host as NodeHost
from smq.replication.partition.admission import NotYetKnown
from smq.replication.partition.exact_ends import ExactEnds, end_at_leader
from smq.replication.partition.markers import Markers
from smq.replication.partition.reads import Poll, Reads
from smq.replication.partition.replica import status_of
from smq.replication.partition.transaction_joins import ENDING_MS_MAX, TransactionJoins
from smq.replication.runtime.deadlines import Deadlines
from smq.testing.virtual.clock import Scheduler
from tests.unit.raft_state.support import add, coordinated, end, init_transactions, pid, proposed, topic, written
from tests.unit.raft_state.support import end as end_transaction
from tests.unit.replication.support import INCARNATION, ME, PEER_A, Host, process_clock, register


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


# --------------------------------------------------------------------------------------------------- transaction joins
# Partitions join the transactions of their batches: one command for many, and nothing overtakes.
LATE = SmqError(ErrorCode.TIMED_OUT, "late")


def batch(producer: int = 0, epoch: int = 0, sequence: int = 0) -> bytes:
    return encode_batch(
        [NewRecord(None, b"v", 1)],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )


class Joins:
    """A node whose Raft the test plays: producer 0 of "t" and producer 1 of "u" are in epoch 0."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        clock = process_clock(self.scheduler)
        self.driver = coordinated()
        self.driver.ok(topic(2, partitions=1, replicas=1))
        self.driver.ok(init_transactions("t"))
        self.driver.ok(init_transactions("u"))
        self.proposed: list[tuple[JoinTransactions, DoneFn[Reply]]] = []
        self.deadlines, self.clock = Deadlines(), clock
        host = SimpleNamespace(clock=clock, deadlines=self.deadlines, deliver=lambda fn: fn(), state=self.state)
        proposer = SimpleNamespace(propose=self._propose, late=lambda: LATE)
        self.joins = TransactionJoins(cast(NodeHost, host), cast(Proposer, proposer))
        self.results: list[str] = []

    @property
    def state(self) -> object:
        return self.driver.machine.state

    def _propose(self, command: Command, _timeout_ms: int, done: DoneFn[Reply], /, *, send_until_ns: int) -> None:
        assert isinstance(command, JoinTransactions)
        assert send_until_ns > 0
        self.proposed.append((command, done))

    def start(self, at: PartitionId, data: bytes, name: str, timeout_ms: int = 5_000) -> None:
        self.joins.start(at, parse_header(data), timeout_ms, self.note(name))

    def note(self, name: str) -> Callable[..., None]:
        def done(result: SmqError | None = None) -> None:
            self.results.append(name if result is None else f"{name}: {result.code.name}")

        return done

    def pass_ms(self, ms: int = 0) -> None:
        self.scheduler.run_for_ms(ms)
        self.deadlines.run(self.clock.monotonic_ns())

    def answer(self) -> None:
        """The oldest command is applied, and answered."""
        command, done = self.proposed.pop(0)
        done(self.driver.apply(command).reply)
        self.pass_ms()

    def end(self, epoch: int = 0) -> None:
        self.driver.ok(end("t", 0, epoch, commit=True, bumping=True))

    def complete(self) -> None:
        """The markers of "t" are written, and this node has applied it."""
        transaction = self.driver.machine.state.transactions["t"]
        items = [(p, 0, 0, transaction.changes) for p in sorted(transaction.partitions)]
        self.driver.ok(written(*items))
        self.joins.on_completions()
        self.pass_ms()


@pytest.fixture
def joining() -> Joins:
    return Joins()


def test_all_that_begin_in_one_turn_share_a_command_and_each_gets_its_own_result(joining: Joins) -> None:
    joining.start(pid(1), batch(), "a")
    joining.start(pid(2), batch(epoch=3), "b")
    joining.start(pid(1), batch(producer=1), "c")
    joining.pass_ms()
    assert [len(command.items) for command, _ in joining.proposed] == [3]
    joining.answer()
    assert joining.results == ["a", "b: PRODUCER_FENCED", "c"]
    assert joining.driver.machine.state.transactions["t"].partitions == {pid(1)}
    assert not joining.joins.behind


def test_what_comes_meanwhile_waits_behind_in_its_order_and_others_do_not(joining: Joins) -> None:
    joining.start(pid(1), batch(), "first")
    joining.pass_ms()
    assert [joining.joins.hold(pid(1), batch(sequence=n), joining.note(f"behind {n}")) for n in (1, 2)] == [True, True]
    assert not joining.joins.hold(pid(2), batch(), joining.note("elsewhere"))
    assert not joining.joins.hold(pid(1), batch(producer=1), joining.note("of another producer"))
    assert not joining.joins.hold(pid(1), b"garbled", joining.note("garbled"))
    joining.answer()
    assert joining.results == ["first", "behind 1", "behind 2"]


def test_after_a_refusal_the_others_are_let_in_to_be_judged_themselves(joining: Joins) -> None:
    joining.start(pid(1), batch(epoch=1), "first")
    joining.pass_ms()
    joining.joins.hold(pid(1), batch(epoch=1, sequence=1), joining.note("behind"))
    joining.answer()
    assert joining.results == ["first: PRODUCER_FENCED", "behind"]


def test_one_that_is_let_in_may_have_to_join_again_and_holds_the_rest_back(joining: Joins) -> None:
    joining.start(pid(1), batch(epoch=1), "first")
    joining.pass_ms()
    joining.joins.hold(pid(1), batch(), lambda: joining.start(pid(1), batch(), "second"))
    joining.joins.hold(pid(1), batch(sequence=1), lambda: joining.results.append(str(len(joining.joins.behind))))
    joining.answer()
    joining.answer()
    assert joining.results == ["first: PRODUCER_FENCED", "1", "second"]


def test_the_next_transaction_waits_for_the_markers_of_the_last_one(joining: Joins) -> None:
    joining.start(pid(1), batch(), "first")
    joining.pass_ms()
    joining.answer()
    joining.end()
    joining.start(pid(1), batch(epoch=1), "next")
    joining.pass_ms()
    joining.answer()
    assert (joining.results, joining.proposed) == (["first"], []), "it waits"
    joining.complete()
    joining.answer()
    assert joining.results == ["first", "next"]


def test_markers_that_are_complete_before_the_answer_comes_are_not_missed(joining: Joins) -> None:
    joining.start(pid(1), batch(), "first")
    joining.pass_ms()
    joining.answer()
    joining.end()
    joining.start(pid(1), batch(epoch=1), "next")
    joining.pass_ms()
    command, done = joining.proposed.pop(0)
    reply = joining.driver.apply(command).reply
    joining.complete()
    done(reply)
    joining.pass_ms()
    joining.answer()
    assert joining.results == ["first", "next"]


def test_markers_that_do_not_come_are_not_waited_for_without_end(joining: Joins) -> None:
    joining.start(pid(1), batch(), "first")
    joining.pass_ms()
    joining.answer()
    joining.end()
    joining.start(pid(1), batch(epoch=1), "next")
    for _ in range(2 * ENDING_MS_MAX // 100):
        joining.pass_ms(100)
        while joining.proposed:
            joining.answer()
    assert joining.results == ["first", "next: TRANSACTION_ENDING"]


def test_a_join_ends_with_its_deadline_and_with_its_node(joining: Joins) -> None:
    joining.start(pid(1), batch(), "late", timeout_ms=50)
    joining.pass_ms(60)
    assert joining.results == ["late: TIMED_OUT"]
    joining.start(pid(1), batch(), "first")
    joining.pass_ms()
    joining.joins.hold(pid(1), batch(sequence=1), joining.note("behind"))
    joining.start(pid(2), batch(), "second")
    joining.joins.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    assert "second: SHUTTING_DOWN" in joining.results
