"""Rule 25: a partition's end is what its leader knows, after a read index that began after the question; also for
ranges by name, and for look-ups by time."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import AdvanceExternalHwms, AdvanceLogStart, CreateTopic, DeleteTopic, ExternalAdvance
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionId, TopicId, TsNs
from smq.raft_state.state import PartitionState
from smq.records import NewRecord, encode_batch
from smq.replication.api import Cancel, PartitionEnd, PartitionRange, TimeKind, TimeOffset
from smq.replication.commands.coalescing import Barriers
from smq.replication.log.reader import LogReader
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.net import wire
from smq.replication.partition import exact_ends
from smq.replication.partition import log_search as look_ups_module
from smq.replication.partition.by_name import Lookup, RangesRequest
from smq.replication.partition.exact_ends import ATTEMPT_MS, RETRY_MS, Ends, ExactEnds, end_at_leader
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.repair import Outcome
from tests.unit.replication.partition.test_reads import HeldBarriers
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch

# ---------------------------------------------------------------------------------------------------------- exact ends
# Rule 25: a partition's end is what its leader knows, after a read index that began after the question.
TOPIC_B = TopicId(b"b" * 16)
PASSED = LogIndex(1)


class World:
    """This node has a replica of `t`'s partition, and none of the three of `many`."""

    def __init__(self) -> None:
        self.host = Host()
        self.host.create_partition()
        self.host.apply(
            CreateTopic(name="many", topic_id=TOPIC_B, partition_count=3, replication_factor=3, created_ms=0)
        )
        for part, leader in zip(self.many, (PEER_A, PEER_B, PEER_A), strict=True):
            part.leader = leader
        self.barriers = HeldBarriers()
        barriers = cast(Barriers, self.barriers)
        self.ends = ExactEnds(self.host.node_host(), barriers, {self.pid: self.host.live}.get)
        self.answers: list[Ends] = []

    @property
    def many(self) -> list[PartitionState]:
        return self.host.state.topics["many"].partitions

    @property
    def pid(self) -> PartitionId:
        return self.host.live.pid

    def ask(self, *pids: PartitionId, timeout_ms: int = 5_000, at_leader: bool = False) -> None:
        self.ends.ask(pids, timeout_ms, self.answers.append, at_leader=at_leader)

    def run(self, ms: int = 1) -> None:
        for _ in range(max(1, ms // 10)):
            self.host.settle(min(ms, 10))

    @property
    def questions(self) -> list[tuple[NodeId, wire.EndsQuery]]:
        return self.host.sent_of(wire.EndsQuery)

    @property
    def reports(self) -> list[tuple[NodeId, wire.EndsReport]]:
        return self.host.sent_of(wire.EndsReport)

    def pass_read_index(self) -> None:
        self.barriers.release(PASSED)
        self.run()

    def report(self, question: tuple[NodeId, wire.EndsQuery], *ends: wire.End) -> None:
        peer, asked = question
        self.ends.on_report(peer, wire.EndsReport(asked.request, asked.incarnation, ends))
        self.run()

    def answer(self) -> Ends:
        (answer,) = self.answers
        return answer

    def error(self, pid: PartitionId) -> ErrorCode:
        found = self.answer()[pid]
        assert isinstance(found, SmqError)
        return found.code


@pytest.fixture
def world() -> World:
    return World()


def known(pid: PartitionId, hwm: int, epoch: int = 0) -> wire.End:
    return wire.End(pid, wire.EndOutcome.KNOWN, Epoch(epoch), Offset(0), Offset(hwm), Offset(hwm), Offset(hwm))


def commit(host: Host, count: int) -> None:
    host.commit(batch(count=count))


# ------------------------------------------------------------------------------------------- as the leader
def test_rule_25_the_leader_answers_only_after_a_read_index_that_began_after_the_question(world: World) -> None:
    commit(world.host, 3)
    world.host.produce(batch(count=2))
    world.host.settle()
    world.ask(world.pid)
    world.run()
    assert world.answers == []
    world.host.advance(5)  # what other nodes know by now
    world.pass_read_index()
    assert world.answer()[world.pid] == PartitionEnd(Epoch(0), ME, Offset(0), Offset(5), Offset(5), Offset(5))


def test_the_log_end_counts_what_is_not_committed(world: World) -> None:
    commit(world.host, 3)
    world.host.produce(batch(count=4))
    world.host.apply(AdvanceLogStart(partition=world.pid, offset=Offset(2)))
    world.ask(world.pid)
    world.run()
    world.pass_read_index()
    assert world.answer()[world.pid] == PartitionEnd(Epoch(0), ME, Offset(2), Offset(3), Offset(3), Offset(7))


def test_the_end_of_an_empty_partition_is_its_start() -> None:
    host = Host()
    replica = host.create_partition(start=40)
    assert end_at_leader(replica)[1:] == (wire.EndOutcome.KNOWN, 0, 40, 40, 40, 40)


def test_rule_25_a_new_leader_that_does_not_know_the_end_of_the_last_epoch_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(world.host, 3)
    world.host.elect(PEER_A)
    world.host.elect(ME)
    monkeypatch.setattr(type(world.host.live), "known_commit_point", lambda _self: Offset(2))
    world.ask(world.pid)
    for _ in range(3):
        world.run(RETRY_MS + 20)
        world.barriers.release(PASSED)
    assert world.answers == []
    monkeypatch.undo()
    world.run(RETRY_MS + 20)
    world.pass_read_index()
    end = world.answer()[world.pid]
    assert isinstance(end, PartitionEnd)
    assert (end.epoch, end.hwm) == (2, 3)


@pytest.mark.parametrize(
    ("lose", "code"),
    [
        (lambda host: host.elect(PEER_A), ErrorCode.NOT_LEADER),
        (lambda host: host.live.resign(), ErrorCode.LEADER_UNAVAILABLE),  # it is still appointed
    ],
    ids=["another is elected", "it resigns"],
)
def test_rule_25_one_that_stops_leading_during_the_read_index_does_not_answer(
    world: World, lose: Callable[[Host], None], code: ErrorCode
) -> None:
    world.ask(world.pid, at_leader=True)
    world.run()
    lose(world.host)
    world.pass_read_index()
    assert world.error(world.pid) is code


def test_another_node_s_question_costs_one_read_index_for_all_its_partitions(world: World) -> None:
    commit(world.host, 3)
    gone = PartitionId(bytes(20))
    asked = (world.pid, world.many[0].pid, gone)
    world.ends.on_query(PEER_B, wire.EndsQuery(7, Incarnation(8), 500, asked))
    assert len(world.barriers.waiting) == 1
    assert world.reports == []
    world.barriers.release(PASSED)
    ((peer, report),) = world.reports
    assert (peer, report.request, report.incarnation) == (PEER_B, 7, 8)
    outcomes = [end.outcome for end in report.ends]
    assert outcomes == [wire.EndOutcome.KNOWN, wire.EndOutcome.NOT_LEADER, wire.EndOutcome.NO_PARTITION]
    assert report.ends[0].hwm == 3


def test_the_leader_waits_for_one_read_index_as_long_as_its_callers(world: World) -> None:
    world.ask(world.pid, timeout_ms=3_000)
    world.ask(world.pid, timeout_ms=9_000)
    world.run(5 * ATTEMPT_MS)
    assert len(world.barriers.waiting) == 1
    assert world.barriers.timeouts == [pytest.approx(9_000, abs=100)]
    world.pass_read_index()
    assert [type(ends[world.pid]) for ends in world.answers] == [PartitionEnd, PartitionEnd]


def test_a_repeated_question_of_another_node_waits_for_the_same_read_index(world: World) -> None:
    for wait_ms in (9_000, 8_500):
        world.ends.on_query(PEER_B, wire.EndsQuery(7, INCARNATION, wait_ms, (world.pid,)))
    assert world.barriers.timeouts == [9_000]
    world.ends.on_query(PEER_B, wire.EndsQuery(7, Incarnation(INCARNATION + 1), 500, (world.pid,)))
    world.ends.on_query(PEER_A, wire.EndsQuery(7, INCARNATION, 500, (world.pid,)))
    assert len(world.barriers.waiting) == 3, "another process, and another node"
    world.barriers.release(PASSED)
    assert len(world.reports) == 3
    world.ends.on_query(PEER_B, wire.EndsQuery(7, INCARNATION, 8_000, (world.pid,)))
    world.barriers.release(PASSED)
    assert len(world.reports) == 4, "the report before may be lost"


def test_without_a_read_index_another_node_gets_no_answer(world: World) -> None:
    world.ends.on_query(PEER_B, wire.EndsQuery(7, INCARNATION, 500, (world.pid,)))
    world.barriers.release(SmqError(ErrorCode.NO_QUORUM, "m"))
    assert world.reports == []


def test_questions_of_others_are_bounded_and_their_room_is_freed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_ends, "ANSWERING_MAX", 3)
    query = wire.EndsQuery(7, INCARNATION, 500, (world.pid,) * 2)
    world.ends.on_query(PEER_B, query)
    world.ends.on_query(PEER_A, query)
    world.barriers.release(PASSED)
    assert [peer for peer, _ in world.reports] == [PEER_B]
    world.ends.on_query(PEER_A, query)
    world.barriers.release(PASSED)
    assert [peer for peer, _ in world.reports] == [PEER_B, PEER_A]


# ------------------------------------------------------------------------------------------- asking others
def test_each_leader_is_asked_once_for_all_its_partitions(world: World) -> None:
    a, b, c = (part.pid for part in world.many)
    world.ask(a, b, c, world.pid)
    world.ask(c)
    world.run()
    assert {peer: asked.partitions for peer, asked in world.questions} == {PEER_A: (a, c), PEER_B: (b,)}
    assert len(world.questions) == 2
    assert len(world.barriers.waiting) == 1
    world.barriers.release(PASSED)
    first, second = world.questions
    world.report(second, known(b, 8))
    assert world.answers == [], "not before all are known"
    world.report(first, known(a, 7), known(c, 9))
    assert [list(ends) for ends in world.answers] == [[world.pid, b, a, c], [c]]
    assert world.answers[1][c] == PartitionEnd(Epoch(0), PEER_A, Offset(0), Offset(9), Offset(9), Offset(9))


def test_a_question_has_a_bounded_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ENDS_MAX", 1)
    world.ask(*(part.pid for part in world.many))
    world.run()
    assert sorted(peer for peer, _ in world.questions) == [PEER_A, PEER_A, PEER_B]


def test_one_that_came_after_a_question_waits_for_the_next(world: World) -> None:
    pid = world.many[0].pid
    world.ask(pid)
    world.run()
    world.ask(pid)
    world.run()
    first, second = world.questions
    world.report(first, known(pid, 7))
    assert len(world.answers) == 1
    world.report(second, known(pid, 8))
    assert len(world.answers) == 2


@pytest.mark.parametrize("outcome", [o for o in wire.EndOutcome if o is not wire.EndOutcome.KNOWN])
def test_a_node_that_does_not_know_is_asked_again_or_its_successor_is(world: World, outcome: wire.EndOutcome) -> None:
    pid = world.many[0].pid
    world.ask(pid)
    world.run()
    world.report(world.questions[0], wire.End(pid, outcome))
    world.many[0].leader = PEER_B
    world.run(RETRY_MS + 20)
    assert world.answers == []
    assert [peer for peer, _ in world.questions] == [PEER_A, PEER_B]
    world.report(world.questions[1], known(pid, 7))
    assert isinstance(world.answer()[pid], PartitionEnd)


def test_an_answer_without_the_partition_is_no_answer(world: World) -> None:
    a, _, c = (part.pid for part in world.many)
    world.ask(a, c)
    world.run()
    world.report(world.questions[0], known(a, 7), known(world.many[1].pid, 1))
    world.run(RETRY_MS + 20)
    assert world.questions[1][1].partitions == (c,)


def test_a_silent_leader_is_asked_again_and_a_closed_session_at_once(world: World) -> None:
    pid = world.many[0].pid
    world.ask(pid)
    world.run(ATTEMPT_MS + RETRY_MS + 40)
    assert len(world.questions) == 2
    world.ends.on_session_close(PEER_B)
    world.run(RETRY_MS + 20)
    assert len(world.questions) == 2, "another node's session"
    world.ends.on_session_close(PEER_A)
    world.run(RETRY_MS + 20)
    assert len(world.questions) == 3
    world.report(world.questions[0], known(pid, 7))
    assert world.answers == [], "an attempt that has been given up"


@pytest.mark.parametrize("delay_ms", [ATTEMPT_MS - 100, ATTEMPT_MS + 20, 3 * ATTEMPT_MS + 100])
def test_a_question_is_answered_however_late_and_by_its_first_answer(world: World, delay_ms: int) -> None:
    pid = world.many[0].pid
    world.ask(pid, timeout_ms=30_000)
    world.run(delay_ms)
    assert world.answers == []
    assert (len(world.questions) > 1) == (delay_ms > ATTEMPT_MS)
    world.report(world.questions[0], known(pid, 7))
    assert isinstance(world.answer()[pid], PartitionEnd)
    asked = world.questions
    world.ask(pid)
    world.run()
    for question in asked:
        world.report(question, known(pid, 6))  # older than the second caller
    assert len(world.answers) == 1


def test_a_late_answer_counts_for_the_partitions_whose_leader_is_the_same(world: World) -> None:
    moving, _, staying = (part.pid for part in world.many)
    world.ask(moving, staying)
    world.run()
    world.many[0].leader = PEER_B
    world.run(ATTEMPT_MS + RETRY_MS + 40)
    assert [(peer, asked.partitions) for peer, asked in world.questions] == [
        (PEER_A, (moving, staying)),
        (PEER_A, (staying,)),
        (PEER_B, (moving,)),
    ]
    first, _, third = world.questions
    world.report(first, known(moving, 7), known(staying, 8))
    world.report(third, known(moving, 9, epoch=1))
    ends = world.answer()
    assert [end.hwm for pid in (moving, staying) if isinstance(end := ends[pid], PartitionEnd)] == [9, 8]


def test_nothing_is_kept_of_a_question_without_callers(world: World) -> None:
    withdraw = world.ends.ask([world.pid, world.many[0].pid], 60_000, world.answers.append)
    world.run()
    assert len(world.barriers.waiting) == 1
    withdraw()
    world.run(ATTEMPT_MS + 20)
    assert (world.ends._questions, world.barriers.waiting) == ({}, [])


def test_only_the_node_that_was_asked_and_only_this_process_is_answered(world: World) -> None:
    pid = world.many[0].pid
    world.ask(pid)
    world.run()
    ((_, asked),) = world.questions
    world.ends.on_report(PEER_B, wire.EndsReport(asked.request, asked.incarnation, (known(pid, 7),)))
    former = Incarnation(asked.incarnation - 1)
    world.ends.on_report(PEER_A, wire.EndsReport(asked.request, former, (known(pid, 7),)))
    world.run()
    assert world.answers == []


def test_at_the_deadline_what_is_known_is_told_and_the_rest_is_not_available(world: World) -> None:
    a, b, _ = (part.pid for part in world.many)
    world.ask(a, b, timeout_ms=300)
    world.run()
    world.report(next(q for q in world.questions if q[0] == PEER_B), known(b, 8))
    world.run(400)
    assert isinstance(world.answer()[b], PartitionEnd)
    assert world.error(a) is ErrorCode.OFFSET_NOT_AVAILABLE
    found = world.answer()[a]
    assert isinstance(found, SmqError)
    assert f"node {PEER_A}" in found.message
    sent = len(world.questions)
    world.run(ATTEMPT_MS + RETRY_MS + 40)
    assert len(world.questions) == sent, "no caller waits any more"


def test_with_at_leader_no_other_node_is_asked(world: World) -> None:
    pid = world.many[0].pid
    world.ask(pid, at_leader=True)
    world.run()
    world.pass_read_index()
    assert world.error(pid) is ErrorCode.NOT_LEADER
    assert world.questions == []


# ------------------------------------------------------------------------------------------- without a leader
def test_rule_19_external_offsets_need_no_leader(world: World) -> None:
    topic = CreateTopic(
        name="x",
        topic_id=TopicId(b"x" * 16),
        partition_count=1,
        replication_factor=0,
        config=(("storage", "external"),),
        start_offset=Offset(0),
        created_ms=0,
    )
    world.host.apply(topic)
    part = world.host.state.topics["x"].partitions[0]
    part.next_offset = Offset(9)
    world.host.apply(AdvanceExternalHwms(items=(ExternalAdvance(partition=part.pid, offset=Offset(6)),)))
    world.ask(part.pid)
    world.run()
    assert world.questions == []
    world.pass_read_index()
    end = world.answer()[part.pid]
    assert isinstance(end, PartitionEnd)
    assert (end.hwm, end.log_end) == (6, 9)


def test_a_partition_is_unknown_only_after_a_read_index_of_this_node(world: World) -> None:
    pid = world.many[0].pid
    world.host.apply(DeleteTopic(name="many"))
    world.ask(pid)
    world.run()
    assert (world.answers, world.questions) == ([], [])
    world.pass_read_index()
    assert world.error(pid) is ErrorCode.UNKNOWN_TOPIC


def test_without_a_quorum_the_end_is_not_available(world: World) -> None:
    world.ask(world.pid, timeout_ms=300)
    for _ in range(10):
        world.run(RETRY_MS)
        world.barriers.release(SmqError(ErrorCode.NO_QUORUM, "m"))
    assert world.error(world.pid) is ErrorCode.OFFSET_NOT_AVAILABLE


def test_a_read_index_that_is_refused_for_good_is_the_answer(world: World) -> None:
    world.ask(world.pid)
    world.run()
    world.barriers.release(SmqError(ErrorCode.OVERLOADED, "m"))
    world.run()
    assert world.error(world.pid) is ErrorCode.OVERLOADED


def test_what_waits_is_bounded_and_its_room_is_freed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_ends, "WAITING_MAX", 3)
    world.ask(*(part.pid for part in world.many), timeout_ms=100)
    world.ask(world.pid)
    world.run()
    assert world.error(world.pid) is ErrorCode.OVERLOADED
    world.run(200)
    world.ask(world.pid)
    world.run()
    world.pass_read_index()
    assert isinstance(world.answers[-1][world.pid], PartitionEnd)


def test_a_withdrawn_question_is_not_repeated_and_its_room_is_freed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_ends, "WAITING_MAX", 3)
    withdraw = world.ends.ask([part.pid for part in world.many], 60_000, world.answers.append)
    world.run()
    sent = len(world.questions)
    withdraw()
    withdraw()
    world.run(ATTEMPT_MS + RETRY_MS + 40)
    assert (world.answers, len(world.questions)) == ([], sent)
    world.ask(*(part.pid for part in world.many))
    world.run()
    assert (world.answers, len(world.questions)) == ([], 2 * sent)


def test_all_callers_are_answered_when_the_node_stops(world: World) -> None:
    world.ask(world.pid, world.many[0].pid)
    world.run()
    world.ends.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    world.ask(world.pid)
    world.run()
    codes = [e.code for ends in world.answers for e in ends.values() if isinstance(e, SmqError)]
    assert codes == [ErrorCode.SHUTTING_DOWN] * 3
    world.pass_read_index()
    assert len(world.answers) == 2


def test_no_partitions_are_no_question(world: World) -> None:
    world.ask()
    world.run()
    assert world.answers == [{}]


# ------------------------------------------------------------------------------------------------------------- by name
# Exact ranges by name: an unknown name is looked up again, in the state that does not have its partition.
NAMES = [("a", 1), ("a", 0)]


class Names:
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
def names() -> Names:
    return Names()


END = PartitionEnd(Epoch(4), PEER_A, Offset(1), Offset(4), Offset(5), Offset(7))
GONE = SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")


def test_known_names_are_asked_for_together_and_answered_in_order(names: Names) -> None:
    names.ask(NAMES)
    assert names.asked[0][0] == names.pids()
    assert names.barriers.waiting == []
    names.answer(END)
    first, second = names.found()
    assert isinstance(first, PartitionRange)
    assert isinstance(second, PartitionRange)
    assert (first.partition, second.partition) == (1, 0)
    assert (first.log_start, first.lso, first.hwm, first.next_offset, first.epoch, first.leader) == (1, 4, 5, 7, 4, 2)


def test_one_error_does_not_cost_the_others_their_answer(names: Names) -> None:
    names.ask(NAMES)
    pids, done = names.asked[0]
    late = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "m")
    done({pids[0]: late, pids[1]: END})
    assert names.found()[0] is late
    assert isinstance(names.found()[1], PartitionRange)


def test_an_unknown_name_is_unknown_only_after_a_barrier(names: Names) -> None:
    names.ask([*NAMES, ("b", 0), ("a", 2)])
    assert names.asked == []
    names.barriers.release(LogIndex(1))
    assert names.asked[0][0] == names.pids()
    names.answer(END)
    codes = [f.code for f in names.found() if isinstance(f, SmqError)]
    assert codes == [ErrorCode.UNKNOWN_TOPIC, ErrorCode.UNKNOWN_PARTITION]


def test_without_a_barrier_nothing_is_called_unknown(names: Names) -> None:
    names.ask([("b", 0)])
    names.barriers.release(SmqError(ErrorCode.NO_QUORUM, "m"))
    names.host.settle(1)
    (answer,) = names.answers
    assert isinstance(answer, SmqError)
    assert answer.code is ErrorCode.NO_QUORUM


def test_a_topic_that_was_created_again_is_asked_for_under_its_new_id(names: Names) -> None:
    names.ask(NAMES)
    names.host.apply(DeleteTopic(name="a"))
    names.create(b"2")
    names.answer(GONE)
    assert names.asked[1][0] == names.pids()
    names.answer(END)
    assert [isinstance(f, PartitionRange) for f in names.found()] == [True, True]


def test_a_topic_that_was_deleted_meanwhile_is_unknown(names: Names) -> None:
    names.ask(NAMES)
    names.host.apply(DeleteTopic(name="a"))
    names.answer(END)  # of a moment before
    names.asked[-1][1]({})
    assert [f.code for f in names.found() if isinstance(f, SmqError)] == [ErrorCode.UNKNOWN_TOPIC] * 2


# ---------------------------------------------------------------------------------------------------------- log search
# Look-ups by time: a record that is here needs no leader, and that there is none is said for the exact end only.

TIMEOUT_MS = 5_000


class Searching:
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
def searching() -> Searching:
    return Searching()


@pytest.fixture
def behind(searching: Searching) -> Searching:
    """It has two records, the leader perhaps more."""
    searching.commit(10, 20)
    searching.host.elect(PEER_A)
    return searching


def test_a_record_that_is_there_needs_no_leader(behind: Searching) -> None:
    behind.ask(11)
    assert behind.offset == 1
    assert (behind.questions, behind.barriers.waiting) == ([], [])


def test_rule_25_that_there_is_none_is_said_for_the_end_that_the_leader_reports(searching: Searching) -> None:
    searching.commit(10, 20)
    searching.ask(21)
    assert searching.answers == []
    searching.barriers.release(PASSED)
    searching.run()
    assert searching.answers == [TimeOffset(Offset(2), TsNs(-1), -1)]


def test_what_has_been_searched_up_to_the_end_is_not_searched_again(behind: Searching) -> None:
    behind.ask(21)
    behind.host.disk.stall_reads(60_000)
    behind.report(2)
    assert behind.answers == [TimeOffset(Offset(2), TsNs(-1), -1)]


@pytest.mark.parametrize("kind", TimeKind)
def test_a_replica_that_does_not_reach_the_exact_end_does_not_say_what_is_the_last_record(
    behind: Searching, kind: TimeKind
) -> None:
    behind.ask(1 << 62, kind)
    assert behind.answers == []
    behind.report(3)
    assert behind.code is ErrorCode.NOT_LEADER


@pytest.mark.parametrize(("created_ms", "hwm"), [((30, 40), 4), ((30,), 9)], ids=["all", "not up to the end"])
def test_what_comes_while_the_leader_is_asked_is_searched_too(
    behind: Searching, created_ms: tuple[int, ...], hwm: int
) -> None:
    behind.ask(25)
    behind.host.elect(ME)
    behind.commit(*created_ms)
    behind.report(hwm)
    assert behind.offset == 2


def test_the_largest_create_time_is_always_a_question_for_the_leader(searching: Searching) -> None:
    searching.commit(10, 30, 20)
    searching.ask(0, TimeKind.MAX_TIMESTAMP)
    assert searching.answers == []
    searching.commit(40)
    searching.barriers.release(PASSED)
    searching.run()
    assert searching.offset == 3


def test_an_empty_partition_has_no_largest_create_time(searching: Searching) -> None:
    searching.ask(0, TimeKind.MAX_TIMESTAMP)
    searching.barriers.release(PASSED)
    searching.run()
    assert searching.answers == [TimeOffset(Offset(0), TsNs(-1), -1)]


def test_one_timeout_holds_for_all_steps(behind: Searching) -> None:
    disk = behind.host.disk
    disk.stall_reads(700)
    behind.ask(25, timeout_ms=1_000)
    behind.run(750)
    assert len(behind.questions) == 1
    behind.run(400)
    assert behind.code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_the_second_search_has_what_is_left_of_the_timeout(behind: Searching) -> None:
    behind.ask(25, timeout_ms=1_000)
    behind.host.elect(ME)
    behind.commit(30)
    behind.run(300)
    behind.host.disk.stall_reads(60_000)
    behind.report(3)
    behind.run(400)
    assert behind.answers == []
    behind.run(200)
    assert (behind.code, behind.host.disk.reads) == (ErrorCode.NODE_NOT_READY, {})


def test_a_caller_that_has_gone_is_not_answered_whatever_step_it_waits_for(behind: Searching) -> None:
    disk = behind.host.disk
    disk.stall_reads(200)
    first = behind.ask(25)
    assert len(disk.reads) == 1
    first()
    assert disk.reads == {}
    behind.run(400)
    assert behind.questions == []

    second = behind.ask(25)
    assert len(behind.questions) == 1
    second()
    behind.run(ATTEMPT_MS)
    behind.run(RETRY_MS + 20)
    assert len(behind.questions) == 1, "it is not asked again"

    third = behind.ask(25)
    behind.host.elect(ME)
    behind.commit(30)
    disk.stall_reads(200)
    behind.report(3)
    assert len(disk.reads) == 1
    third()
    assert disk.reads == {}
    behind.run(TIMEOUT_MS + 1_000)
    assert behind.answers == []


@pytest.mark.parametrize("is_search", [True, False])
def test_an_answer_that_is_on_its_way_does_not_reach_a_caller_that_goes(behind: Searching, is_search: bool) -> None:
    host, cancels = behind.host, list[Cancel]()
    if is_search:
        host.disk.reads_max = 0  # every search is refused

    def done(answer: TimeOffset | SmqError) -> None:
        behind.answers.append(answer)
        cancels[1]()

    for _ in range(2):
        kind = TimeKind.TS_NS if is_search else TimeKind.MAX_TIMESTAMP
        cancels.append(behind.look_ups.time(host.live, kind, 1 << 62, TIMEOUT_MS, done))
    behind.run()
    if not is_search:
        assert len(behind.questions) == 1, "both wait for the same answer"
        behind.report(3)
    assert len(behind.answers) == 1


def test_a_topic_that_goes_while_its_leader_is_asked_is_unknown(searching: Searching) -> None:
    searching.ask(25)
    searching.host.replica = None  # as the node forgets it
    searching.host.apply(DeleteTopic(name="t"))
    searching.barriers.release(PASSED)
    searching.run()
    assert searching.code is ErrorCode.UNKNOWN_TOPIC


class Repaired:
    """Every damage is repaired immediately."""

    def __init__(self) -> None:
        self.count = 0

    def request(self, _replica: object, _damage: BatchDamaged, done: Callable[[Outcome], None]) -> None:
        self.count += 1
        done(Outcome.REPAIRED)


@pytest.mark.parametrize("searches_before", [0, 1])
def test_damage_is_repaired_in_either_search(
    behind: Searching, monkeypatch: pytest.MonkeyPatch, searches_before: int
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
    behind.look_ups = LookUps(behind.host.node_host(), behind.ends, repairs)  # type: ignore[arg-type]  # the part that look-ups use
    behind.ask(25)
    behind.host.elect(ME)
    behind.commit(30)
    behind.report(3)
    assert (behind.offset, repairs.count, searches) == (2, 1, 3)
