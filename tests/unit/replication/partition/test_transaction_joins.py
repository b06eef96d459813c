"""Partitions join the transactions of their batches: one command for many, and nothing overtakes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import Command, JoinTransactions
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId
from smq.raft_state.replies import Reply
from smq.records import NewRecord, encode_batch, parse_header
from smq.replication.api import DoneFn
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host
from smq.replication.partition.transaction_joins import ENDING_MS_MAX, TransactionJoins
from smq.replication.runtime.deadlines import Deadlines
from smq.testing.virtual.clock import Scheduler
from tests.unit.raft_state.support import coordinated, end, init_transactions, pid, topic, written
from tests.unit.replication.support import process_clock

LATE = SmqError(ErrorCode.TIMED_OUT, "late")


def batch(producer: int = 0, epoch: int = 0, sequence: int = 0) -> bytes:
    return encode_batch(
        [NewRecord(None, b"v", 1)],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )


class World:
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
        self.joins = TransactionJoins(cast(Host, host), cast(Proposer, proposer))
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
def world() -> World:
    return World()


def test_all_that_begin_in_one_turn_share_a_command_and_each_gets_its_own_result(world: World) -> None:
    world.start(pid(1), batch(), "a")
    world.start(pid(2), batch(epoch=3), "b")
    world.start(pid(1), batch(producer=1), "c")
    world.pass_ms()
    assert [len(command.items) for command, _ in world.proposed] == [3]
    world.answer()
    assert world.results == ["a", "b: PRODUCER_FENCED", "c"]
    assert world.driver.machine.state.transactions["t"].partitions == {pid(1)}
    assert not world.joins.behind


def test_what_comes_meanwhile_waits_behind_in_its_order_and_others_do_not(world: World) -> None:
    world.start(pid(1), batch(), "first")
    world.pass_ms()
    assert [world.joins.hold(pid(1), batch(sequence=n), world.note(f"behind {n}")) for n in (1, 2)] == [True, True]
    assert not world.joins.hold(pid(2), batch(), world.note("elsewhere"))
    assert not world.joins.hold(pid(1), batch(producer=1), world.note("of another producer"))
    assert not world.joins.hold(pid(1), b"garbled", world.note("garbled"))
    world.answer()
    assert world.results == ["first", "behind 1", "behind 2"]


def test_after_a_refusal_the_others_are_let_in_to_be_judged_themselves(world: World) -> None:
    world.start(pid(1), batch(epoch=1), "first")
    world.pass_ms()
    world.joins.hold(pid(1), batch(epoch=1, sequence=1), world.note("behind"))
    world.answer()
    assert world.results == ["first: PRODUCER_FENCED", "behind"]


def test_one_that_is_let_in_may_have_to_join_again_and_holds_the_rest_back(world: World) -> None:
    world.start(pid(1), batch(epoch=1), "first")
    world.pass_ms()
    world.joins.hold(pid(1), batch(), lambda: world.start(pid(1), batch(), "second"))
    world.joins.hold(pid(1), batch(sequence=1), lambda: world.results.append(str(len(world.joins.behind))))
    world.answer()
    world.answer()
    assert world.results == ["first: PRODUCER_FENCED", "1", "second"]


def test_the_next_transaction_waits_for_the_markers_of_the_last_one(world: World) -> None:
    world.start(pid(1), batch(), "first")
    world.pass_ms()
    world.answer()
    world.end()
    world.start(pid(1), batch(epoch=1), "next")
    world.pass_ms()
    world.answer()
    assert (world.results, world.proposed) == (["first"], []), "it waits"
    world.complete()
    world.answer()
    assert world.results == ["first", "next"]


def test_markers_that_are_complete_before_the_answer_comes_are_not_missed(world: World) -> None:
    world.start(pid(1), batch(), "first")
    world.pass_ms()
    world.answer()
    world.end()
    world.start(pid(1), batch(epoch=1), "next")
    world.pass_ms()
    command, done = world.proposed.pop(0)
    reply = world.driver.apply(command).reply
    world.complete()
    done(reply)
    world.pass_ms()
    world.answer()
    assert world.results == ["first", "next"]


def test_markers_that_do_not_come_are_not_waited_for_without_end(world: World) -> None:
    world.start(pid(1), batch(), "first")
    world.pass_ms()
    world.answer()
    world.end()
    world.start(pid(1), batch(epoch=1), "next")
    for _ in range(2 * ENDING_MS_MAX // 100):
        world.pass_ms(100)
        while world.proposed:
            world.answer()
    assert world.results == ["first", "next: TRANSACTION_ENDING"]


def test_a_join_ends_with_its_deadline_and_with_its_node(world: World) -> None:
    world.start(pid(1), batch(), "late", timeout_ms=50)
    world.pass_ms(60)
    assert world.results == ["late: TIMED_OUT"]
    world.start(pid(1), batch(), "first")
    world.pass_ms()
    world.joins.hold(pid(1), batch(sequence=1), world.note("behind"))
    world.start(pid(2), batch(), "second")
    world.joins.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    assert "second: SHUTTING_DOWN" in world.results
