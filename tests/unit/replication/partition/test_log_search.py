"""Look-ups by time: a record that is here needs no leader, and that there is none is said for the exact end only."""

from collections.abc import Callable
from typing import cast

import pytest

from smq.raft_state.commands import DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, NodeId, Offset, TsNs
from smq.records import NewRecord, encode_batch
from smq.replication.api import Cancel, TimeKind, TimeOffset
from smq.replication.commands.coalescing import Barriers
from smq.replication.log.reader import LogReader
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.net import wire
from smq.replication.partition import log_search as look_ups_module
from smq.replication.partition.exact_ends import ATTEMPT_MS, RETRY_MS, ExactEnds
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.repair import Outcome
from tests.unit.replication.partition.test_reads import HeldBarriers
from tests.unit.replication.support import ME, PEER_A, Host

PASSED = LogIndex(1)
TIMEOUT_MS = 5_000


class World:
    """A replica whose batches are on the disk only, its look-ups, and a leader that answers when the test says so."""

    def __init__(self) -> None:
        self.host = Host()
        self.host.store = LogStore(self.host.disk, tail_bytes_kept=0)
        self.host.create_partition()
        self.barriers = HeldBarriers()
        node = self.host.node_host()
        self.ends = ExactEnds(node, cast(Barriers, self.barriers), lambda _pid: self.host.replica)
        self.look_ups = LookUps(node, self.ends, self.host.repairs)
        self.answers: list[TimeOffset | SmqError] = []

    def commit(self, *created_ms: int) -> None:
        """A batch of one record each."""
        for ms in created_ms:
            self.host.produce(encode_batch([NewRecord(None, b"v", ms)]))
        self.run()
        self.host.advance(self.host.live.log.appended_end)

    def ask(self, value: int, kind: TimeKind = TimeKind.TIMESTAMP_MS, timeout_ms: int = TIMEOUT_MS) -> Cancel:
        cancel = self.look_ups.time(self.host.live, kind, value, timeout_ms, self.answers.append)
        self.run()
        return cancel

    def run(self, ms: int = 50) -> None:
        self.host.settle(ms)

    @property
    def questions(self) -> list[tuple[NodeId, wire.EndsQuery]]:
        """To other nodes."""
        return self.host.sent_of(wire.EndsQuery)

    def report(self, hwm: int) -> None:
        """The leader answers the last question."""
        peer, asked = self.questions[-1]
        known = wire.EndOutcome.KNOWN
        end = wire.End(
            self.host.part.pid, known, self.host.part.epoch, Offset(0), Offset(hwm), Offset(hwm), Offset(hwm)
        )
        self.ends.on_report(peer, wire.EndsReport(asked.request, asked.incarnation, (end,)))
        self.run()

    @property
    def offset(self) -> int:
        (answer,) = self.answers
        assert isinstance(answer, TimeOffset), answer
        return answer.offset

    @property
    def code(self) -> ErrorCode:
        (answer,) = self.answers
        assert isinstance(answer, SmqError), answer
        return answer.code


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def follower(world: World) -> World:
    """It has two records, the leader perhaps more."""
    world.commit(10, 20)
    world.host.elect(PEER_A)
    return world


def test_a_record_that_is_there_needs_no_leader(follower: World) -> None:
    follower.ask(11)
    assert follower.offset == 1
    assert (follower.questions, follower.barriers.waiting) == ([], [])


def test_rule_25_that_there_is_none_is_said_for_the_end_that_the_leader_reports(world: World) -> None:
    world.commit(10, 20)
    world.ask(21)
    assert world.answers == []
    world.barriers.release(PASSED)
    world.run()
    assert world.answers == [TimeOffset(Offset(2), TsNs(-1), -1)]


def test_what_has_been_searched_up_to_the_end_is_not_searched_again(follower: World) -> None:
    follower.ask(21)
    follower.host.disk.stall_reads(60_000)
    follower.report(2)
    assert follower.answers == [TimeOffset(Offset(2), TsNs(-1), -1)]


@pytest.mark.parametrize("kind", TimeKind)
def test_a_replica_that_does_not_reach_the_exact_end_does_not_say_what_is_the_last_record(
    follower: World, kind: TimeKind
) -> None:
    follower.ask(1 << 62, kind)
    assert follower.answers == []
    follower.report(3)
    assert follower.code is ErrorCode.NOT_LEADER


@pytest.mark.parametrize(("created_ms", "hwm"), [((30, 40), 4), ((30,), 9)], ids=["all", "not up to the end"])
def test_what_comes_while_the_leader_is_asked_is_searched_too(
    follower: World, created_ms: tuple[int, ...], hwm: int
) -> None:
    follower.ask(25)
    follower.host.elect(ME)
    follower.commit(*created_ms)
    follower.report(hwm)
    assert follower.offset == 2


def test_the_largest_create_time_is_always_a_question_for_the_leader(world: World) -> None:
    world.commit(10, 30, 20)
    world.ask(0, TimeKind.MAX_TIMESTAMP)
    assert world.answers == []
    world.commit(40)
    world.barriers.release(PASSED)
    world.run()
    assert world.offset == 3


def test_an_empty_partition_has_no_largest_create_time(world: World) -> None:
    world.ask(0, TimeKind.MAX_TIMESTAMP)
    world.barriers.release(PASSED)
    world.run()
    assert world.answers == [TimeOffset(Offset(0), TsNs(-1), -1)]


def test_one_timeout_holds_for_all_steps(follower: World) -> None:
    disk = follower.host.disk
    disk.stall_reads(700)
    follower.ask(25, timeout_ms=1_000)
    follower.run(750)
    assert len(follower.questions) == 1
    follower.run(400)
    assert follower.code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_the_second_search_has_what_is_left_of_the_timeout(follower: World) -> None:
    follower.ask(25, timeout_ms=1_000)
    follower.host.elect(ME)
    follower.commit(30)
    follower.run(300)
    follower.host.disk.stall_reads(60_000)
    follower.report(3)
    follower.run(400)
    assert follower.answers == []
    follower.run(200)
    assert (follower.code, follower.host.disk.reads) == (ErrorCode.NODE_NOT_READY, {})


def test_a_caller_that_has_gone_is_not_answered_whatever_step_it_waits_for(follower: World) -> None:
    disk = follower.host.disk
    disk.stall_reads(200)
    first = follower.ask(25)
    assert len(disk.reads) == 1
    first()
    assert disk.reads == {}
    follower.run(400)
    assert follower.questions == []

    second = follower.ask(25)
    assert len(follower.questions) == 1
    second()
    follower.run(ATTEMPT_MS)
    follower.run(RETRY_MS + 20)
    assert len(follower.questions) == 1, "it is not asked again"

    third = follower.ask(25)
    follower.host.elect(ME)
    follower.commit(30)
    disk.stall_reads(200)
    follower.report(3)
    assert len(disk.reads) == 1
    third()
    assert disk.reads == {}
    follower.run(TIMEOUT_MS + 1_000)
    assert follower.answers == []


@pytest.mark.parametrize("is_search", [True, False])
def test_an_answer_that_is_on_its_way_does_not_reach_a_caller_that_goes(follower: World, is_search: bool) -> None:
    host, cancels = follower.host, list[Cancel]()
    if is_search:
        host.disk.reads_max = 0  # every search is refused

    def done(answer: TimeOffset | SmqError) -> None:
        follower.answers.append(answer)
        cancels[1]()

    for _ in range(2):
        kind = TimeKind.TS_NS if is_search else TimeKind.MAX_TIMESTAMP
        cancels.append(follower.look_ups.time(host.live, kind, 1 << 62, TIMEOUT_MS, done))
    follower.run()
    if not is_search:
        assert len(follower.questions) == 1, "both wait for the same answer"
        follower.report(3)
    assert len(follower.answers) == 1


def test_a_topic_that_goes_while_its_leader_is_asked_is_unknown(world: World) -> None:
    world.ask(25)
    world.host.replica = None  # as the node forgets it
    world.host.apply(DeleteTopic(name="t"))
    world.barriers.release(PASSED)
    world.run()
    assert world.code is ErrorCode.UNKNOWN_TOPIC


class Repaired:
    """Every damage is repaired immediately."""

    def __init__(self) -> None:
        self.count = 0

    def request(self, _replica: object, _damage: BatchDamaged, done: Callable[[Outcome], None]) -> None:
        self.count += 1
        done(Outcome.REPAIRED)


@pytest.mark.parametrize("searches_before", [0, 1])
def test_damage_is_repaired_in_either_search(
    follower: World, monkeypatch: pytest.MonkeyPatch, searches_before: int
) -> None:
    repairs, searches = Repaired(), 0
    find_time = look_ups_module.find_time

    def find(log: LogReader, *, end: Offset, kind: TimeKind, value: int) -> object:
        nonlocal searches
        searches += 1
        if searches == searches_before + 1:
            raise BatchDamaged(log.pid, Offset(0), "its bytes do not match")
        return find_time(log, end=end, kind=kind, value=value)

    monkeypatch.setattr(look_ups_module, "find_time", find)
    follower.look_ups = LookUps(follower.host.node_host(), follower.ends, repairs)  # type: ignore[arg-type]  # the part that look-ups use
    follower.ask(25)
    follower.host.elect(ME)
    follower.commit(30)
    follower.report(3)
    assert (follower.offset, repairs.count, searches) == (2, 1, 3)
