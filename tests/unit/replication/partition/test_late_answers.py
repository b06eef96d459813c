"""An answer that was right when it was given, and is late: it decides nothing."""

from smq.raft_state.commands import DeleteTopic, ElectLeader
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, LogIndex, Offset
from smq.replication.api import Fetched
from smq.replication.net import wire
from smq.replication.partition.exact_ends import ATTEMPT_MS, RETRY_MS
from tests.unit.replication.commands.test_proposer import World as Proposals
from tests.unit.replication.nodes.test_controller import World
from tests.unit.replication.partition.test_reads import Reader
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B


def test_a_report_that_judged_its_log_by_an_older_epoch_elects_no_node() -> None:
    world = World()
    world.create()
    world.run(300)
    part = world.part()
    others = [n for n in part.replicas if n != part.leader]
    part.hwm = part.next_offset = Offset(5)
    world.ends = {ME: 0, PEER_A: 0, PEER_B: 0}
    resigned = wire.Resign(((part.pid, part.epoch),))
    world.controller.on_resign(part.leader, resigned, world.clock.monotonic_ns())
    world.run(200)
    assert world.made(ElectLeader) == []
    # The partition moves on by another way, and is in need again: what was said of epoch 0 is said of nothing now.
    late = max(m.query for _, m in world.sent if isinstance(m, wire.ElectionQuery))
    end = Offset(5)
    world.apply(
        ElectLeader(
            partition=part.pid,
            expected_epoch=part.epoch,
            candidate=part.leader,
            incarnation=INCARNATION,
            end=end,
        )
    )
    resigned = wire.Resign(((part.pid, part.epoch),))
    world.controller.on_resign(part.leader, resigned, world.clock.monotonic_ns())
    world.run(100)
    report = wire.ElectionReport(late, INCARNATION, (wire.SealedLog(part.pid, end, end),))
    world.controller.on_report(others[0], report, world.clock.monotonic_ns())
    world.run(200)
    assert part.epoch == Epoch(1)


def test_a_reader_that_was_in_range_once_gets_out_of_range_only_after_an_answer_of_its_own() -> None:
    reader = Reader()
    reader.host.elect(PEER_A)
    reader.host.advance(2, next_offset=10)
    reader.fetch(7, max_wait_ms=1_000)
    assert reader.questions == []
    reader.host.elect(PEER_B, end=2)  # the log end falls to the mark; this node may not know the newest yet
    reader.host.settle(1_500)
    assert reader.results == []
    reader.report(0, hwm=8, log_end=8)
    (result,) = reader.results
    assert isinstance(result, Fetched)


def test_what_the_leader_has_said_to_one_fetch_says_nothing_to_the_next() -> None:
    reader = Reader()
    reader.host.elect(PEER_A)
    reader.fetch(7, max_wait_ms=1_000)
    reader.report(0, hwm=2, log_end=10)  # in range after all: the poll waits
    reader.host.elect(PEER_B, end=2)
    reader.host.settle(1_500)
    (result,) = reader.results
    assert isinstance(result, Fetched)
    reader.results.clear()
    reader.fetch(7, max_wait_ms=1_000)
    assert reader.results == []
    reader.report(0, hwm=2, log_end=2)
    assert reader.error.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_callers_of_a_barrier_are_answered_when_the_node_stops() -> None:
    world = Proposals()
    world.engine.leader = ME
    barriers = world.barriers()
    answers: list[LogIndex | SmqError] = []
    barriers.wait(60_000, answers.append)
    world.proposer.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    barriers.wait(60_000, answers.append)
    assert [a.code.name for a in answers if isinstance(a, SmqError)] == ["SHUTTING_DOWN", "SHUTTING_DOWN"]


def test_a_topic_deleted_while_a_reader_waits_for_confirmation_is_unknown_and_not_out_of_range() -> None:
    reader = Reader()
    reader.host.elect(PEER_A)
    reader.fetch(7, max_wait_ms=1_000)
    reader.host.replica = None  # as the node forgets it
    reader.host.apply(DeleteTopic(name="t"))
    reader.host.settle(ATTEMPT_MS + RETRY_MS + 20)  # the former leader does not answer: this node asks itself
    reader.host.settle(RETRY_MS + 20)
    reader.barriers.release(LogIndex(1))
    reader.host.settle(1)
    (result,) = reader.results
    assert isinstance(result, SmqError)
    assert result.code is ErrorCode.UNKNOWN_TOPIC
