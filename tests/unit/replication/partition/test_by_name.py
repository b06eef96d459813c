"""Exact ranges by name: an unknown name is looked up again, in the state that does not have its partition."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import CreateTopic, DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, LogIndex, Offset, PartitionId, TopicId
from smq.replication.api import PartitionEnd, PartitionRange
from smq.replication.commands.coalescing import Barriers
from smq.replication.partition.by_name import Lookup, RangesRequest
from smq.replication.partition.exact_ends import Ends, ExactEnds
from tests.unit.replication.partition.test_reads import HeldBarriers
from tests.unit.replication.support import PEER_A, Host

NAMES = [("a", 1), ("a", 0)]


class World:
    """Questions for ends are answered by the test."""

    def __init__(self) -> None:
        self.host = Host()
        self.barriers = HeldBarriers()
        self.asked: list[tuple[list[PartitionId], Callable[[Ends], None]]] = []
        self.answers: list[list[PartitionRange | SmqError] | SmqError] = []
        self.create(b"1")

    def create(self, mark: bytes) -> None:
        topic_id = TopicId(mark * 16)
        self.host.apply(CreateTopic(name="a", topic_id=topic_id, partition_count=2, replication_factor=3, created_ms=0))

    def pids(self) -> list[PartitionId]:
        parts = self.host.state.topics["a"].partitions
        return [parts[index].pid for _, index in NAMES]

    def ask(self, names: list[tuple[str, int]]) -> None:
        host, barriers = self.host.node_host(), cast(Barriers, self.barriers)
        ends = cast(ExactEnds, SimpleNamespace(ask=self._ask))
        lookup = Lookup(host, barriers)
        RangesRequest(host, lookup, ends, names, 5_000, self.answers.append, False).start()
        self.host.settle(1)

    def _ask(self, pids: Iterable[PartitionId], _ms: int, done: Callable[[Ends], None], *, at_leader: bool) -> None:
        self.asked.append((list(pids), done))

    def answer(self, end: PartitionEnd | SmqError) -> None:
        pids, done = self.asked[-1]
        done(dict.fromkeys(pids, end))

    def found(self) -> list[PartitionRange | SmqError]:
        (answer,) = self.answers
        assert not isinstance(answer, SmqError)
        return answer


@pytest.fixture
def world() -> World:
    return World()


END = PartitionEnd(Epoch(4), PEER_A, Offset(1), Offset(4), Offset(5), Offset(7))
GONE = SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")


def test_known_names_are_asked_for_together_and_answered_in_order(world: World) -> None:
    world.ask(NAMES)
    assert world.asked[0][0] == world.pids()
    assert world.barriers.waiting == []
    world.answer(END)
    first, second = world.found()
    assert isinstance(first, PartitionRange)
    assert isinstance(second, PartitionRange)
    assert (first.partition, second.partition) == (1, 0)
    assert (first.log_start, first.lso, first.hwm, first.next_offset, first.epoch, first.leader) == (1, 4, 5, 7, 4, 2)


def test_one_error_does_not_cost_the_others_their_answer(world: World) -> None:
    world.ask(NAMES)
    pids, done = world.asked[0]
    late = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "m")
    done({pids[0]: late, pids[1]: END})
    assert world.found()[0] is late
    assert isinstance(world.found()[1], PartitionRange)


def test_an_unknown_name_is_unknown_only_after_a_barrier(world: World) -> None:
    world.ask([*NAMES, ("b", 0), ("a", 2)])
    assert world.asked == []
    world.barriers.release(LogIndex(1))
    assert world.asked[0][0] == world.pids()
    world.answer(END)
    codes = [f.code for f in world.found() if isinstance(f, SmqError)]
    assert codes == [ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION]


def test_without_a_barrier_nothing_is_called_unknown(world: World) -> None:
    world.ask([("b", 0)])
    world.barriers.release(SmqError(ErrorCode.NO_QUORUM, "m"))
    world.host.settle(1)
    (answer,) = world.answers
    assert isinstance(answer, SmqError)
    assert answer.code is ErrorCode.NO_QUORUM


def test_a_topic_that_was_created_again_is_asked_for_under_its_new_id(world: World) -> None:
    world.ask(NAMES)
    world.host.apply(DeleteTopic(name="a"))
    world.create(b"2")
    world.answer(GONE)
    assert world.asked[1][0] == world.pids()
    world.answer(END)
    assert [isinstance(f, PartitionRange) for f in world.found()] == [True, True]


def test_a_topic_that_was_deleted_meanwhile_is_unknown(world: World) -> None:
    world.ask(NAMES)
    world.host.apply(DeleteTopic(name="a"))
    world.answer(END)  # of a moment before
    world.asked[-1][1]({})
    assert [f.code for f in world.found() if isinstance(f, SmqError)] == [ErrorCode.UNKNOWN_TOPIC] * 2
