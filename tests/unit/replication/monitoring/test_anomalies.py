"""The node's own watch: each kind is noted where production code breaks the rule, and nothing else is noted.

Bugs are planted as the simulation plants them in whole clusters (chaos_tests/sim/planted), or as a fault of its own.
"""

from dataclasses import replace as replaced

import pytest

from chaos_tests.sim.planted.partitions import EPOCH_STARTS_AT_THE_MARK, MARK_AS_GIVEN
from chaos_tests.sim.planted.state import LOG_START_AS_REQUESTED
from chaos_tests.sim.planted.transactions import OPEN_IS_STABLE
from chaos_tests.sim.replacement import Fault, planted, replace
from smq.raft_state.commands import CommitOffsets, Coordinated
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset
from smq.raft_state.replies import Applied
from smq.raft_state.state import ClusterState
from smq.replication.monitoring import anomalies
from smq.replication.monitoring.anomalies import Anomalies, CommitWatch, Kind, StateWatch
from smq.replication.monitoring.measures import NodeMeasures
from smq.replication.net import wire
from smq.testing.virtual.clock import Scheduler
from tests.unit.raft_state.support import (
    Driver,
    add,
    commit,
    coordinated,
    delete_offsets,
    end,
    init_transactions,
    pid,
    rid,
    stage,
)
from tests.unit.replication.partition.test_one_round import elect
from tests.unit.replication.partition.test_transactions import World
from tests.unit.replication.support import INCARNATION, PEER_A, PEER_B, Host, batch, process_clock
from tests.unit.replication.test_rules import acks, append, follower, stored

PID = pid(1)


def noted(watch: Anomalies) -> list[Kind]:
    return [seen.kind for seen in watch.recent]


def texts(watch: Anomalies) -> str:
    return "\n".join(seen.text for seen in watch.recent)


# ------------------------------------------------------------------------------------------------ the marks
def test_a_high_water_mark_that_is_moved_back_is_noted() -> None:
    host = Host()
    host.create_partition()
    host.advance(5)
    host.advance(3)
    assert noted(host.anomalies) == []
    with MARK_AS_GIVEN.planted():
        host.advance(3)
    assert noted(host.anomalies) == [Kind.HWM_BACK]
    assert texts(host.anomalies) == "t/0: its high water mark was 5, and is 3"


def test_an_epoch_that_starts_below_what_was_committed_is_noted() -> None:
    """Raft's mark does not know of the record yet: only this process does."""
    for faults, expected in (((), []), ((EPOCH_STARTS_AT_THE_MARK,), [Kind.HWM_BACK])):
        host = Host()
        host.create_partition()
        answer = host.produce()
        host.settle()
        host.ack(PEER_A, 1)
        host.settle(0)
        assert (answer.offsets, host.part.hwm) == ((0, 0), 0)
        with planted(faults):
            elect(host, PEER_B, 1)
        assert noted(host.anomalies) == expected
    assert texts(host.anomalies) == "t/0: epoch 1 starts at 0, 1 had been known as committed"


def test_an_election_that_takes_an_unconfirmed_tail_away_is_no_anomaly() -> None:
    host = Host()
    host.create_partition()
    host.produce()
    host.settle()
    elect(host, PEER_B, 0)
    assert host.live.log.appended_end == 0
    assert noted(host.anomalies) == []


def test_a_log_start_that_is_moved_back_is_noted() -> None:
    host = Host()
    host.create_partition()
    host.advance(9)
    for faults, expected in (((), []), ((LOG_START_AS_REQUESTED,), [Kind.LOG_START_BACK])):
        with planted(faults):
            for start in (7, 4):
                host.move_log_start(start)
        assert noted(host.anomalies) == expected


def test_a_last_stable_offset_that_goes_back_is_noted_by_the_leader() -> None:
    world = World()
    world.begin()
    world.write()
    world.commit_all()
    live, watch = world.host.live, world.host.anomalies
    assert (live.stable_end, noted(watch)) == (0, [])
    with OPEN_IS_STABLE.planted():
        assert live.stable_end == 1
    assert (live.stable_end, noted(watch)) == (0, [Kind.LSO_BACK])


# --------------------------------------------------------------------------------------- what groups have committed
class Committing:
    """A state machine that is watched as AppliedState watches it."""

    def __init__(self) -> None:
        self.driver: Driver = coordinated()
        clock = process_clock(Scheduler())
        self.watch = Anomalies(clock, NodeMeasures(), lambda: self.driver.machine.state)
        self.commits = CommitWatch(self.watch)

    def apply(self, *commands: Coordinated) -> None:
        for command in commands:
            state, proposal = self.driver.machine.state, self.driver.proposed(command)
            watched = self.commits.before(state, proposal)
            self.driver.apply(proposal)
            if watched is not None:
                self.commits.after(state, watched)


def test_groups_that_go_back_delete_repeat_and_use_transactions_are_no_anomaly() -> None:
    world = Committing()
    first = world.driver.proposed(commit("g", (PID, 9), (pid(1, 1), 5), request=rid(1)))
    world.apply(first, commit("g", (PID, 4)))  # back: a client, or an operator
    world.apply(first)  # repeated: its first answer, and no effect
    world.apply(delete_offsets("g", 0, PID), commit("g", (PID, 1)))
    world.apply(init_transactions("t"), add("t", 0, 0, PID, groups=("g",)))
    world.apply(stage("t", 0, 0, "g", (PID, 0)), commit("g", (PID, 3)), end("t", 0, 0, commit=True), first)
    assert world.driver.machine.state.groups["g"].offsets[PID].offset == 3  # committed after the staging
    world.apply(commit("g", (PID, 2)), commit("other", (PID, 2)))
    assert noted(world.watch) == []


def test_a_commit_that_stores_something_else_is_noted() -> None:
    """The larger one stays: as if a group could not go back."""
    world = Committing()

    def larger(original: Fault, state: ClusterState, command: CommitOffsets) -> Applied:
        known = state.groups[command.group].offsets
        items = [replaced(i, offset=max(i.offset, known[i.partition].offset)) for i in command.items]
        applied: Applied = original(state, replaced(command, items=tuple(items)))
        return applied

    world.apply(commit("g", (PID, 9)))
    with replace("smq.raft_state.handlers.groups:_commit_items", by=larger).planted():
        world.apply(commit("g", (PID, 12)))
        assert noted(world.watch) == []
        world.apply(commit("g", (PID, 4)))
    assert noted(world.watch) == [Kind.COMMIT_CHANGED]
    assert texts(world.watch).endswith("4 was committed, and 12 is there")


def test_an_offset_that_moves_without_a_commit_is_noted_by_the_next_commit() -> None:
    world = Committing()
    world.apply(commit("g", (PID, 9)))
    world.driver.machine.state.groups["g"].offsets[PID].offset = Offset(8)
    world.apply(commit("g", (PID, 10)))
    assert noted(world.watch) == [Kind.COMMIT_CHANGED]
    world.driver.machine.state.groups["g"].offsets[PID].offset = Offset(8)
    world.commits.forget()  # a snapshot is newer than what this node has applied
    world.apply(commit("g", (PID, 11)))
    assert len(noted(world.watch)) == 1


def test_the_memory_of_commits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomalies, "COMMITS_MAX", 10)
    world = Committing()
    for number in range(20):
        world.apply(commit(f"g{number}", (PID, 1), (pid(1, 1), 1)))
    assert len(world.commits._last) == 10
    assert ("g19", PID) in world.commits._last


# ------------------------------------------------------------------------------------------------ other nodes
def test_another_state_after_the_same_entries_is_noted_once_per_digest_and_node() -> None:
    watch = Committing().watch
    states = StateWatch(watch)
    for index in (16, 32):
        states.computed((LogIndex(index), "ab" * 32))
    states.computed(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    assert states.latest == (32, b"\xab" * 8)
    states.heard(NodeId(2), LogIndex(0), bytes(8))  # it has computed none
    states.heard(NodeId(2), LogIndex(48), b"\xcd" * 8)  # this node has not
    states.heard(NodeId(2), LogIndex(16), b"\xab" * 8)
    assert noted(watch) == []
    for _beat in range(3):
        states.heard(NodeId(2), LogIndex(32), b"\xcd" * 8)
        states.heard(NodeId(3), LogIndex(32), b"\xcd" * 8)
    assert noted(watch) == [Kind.STATE_DIFFERS] * 2
    assert "after entry 32, the replicated state of node 2 has digest cdcdcdcdcdcdcdcd" in texts(watch)


def leading() -> tuple[Host, wire.Probe]:
    """A leader with batches [0] and [1], and its question to PEER_A."""
    host = Host()
    host.create_partition()
    host.produce(batch(b"a"))
    host.produce(batch(b"b"))
    host.settle()
    probe = next(m for peer, m in host.sent if peer == PEER_A and isinstance(m, wire.Probe))
    return host, probe


def test_a_follower_whose_last_batch_is_another_is_noted_by_its_leader() -> None:
    host, probe = leading()
    own = host.live.log.crc_before(Offset(1))
    assert own not in (0, host.live.log.crc_before(Offset(2)))
    zero, one, part = Offset(0), Offset(1), host.part
    stream = host.live.stream_to(PEER_A)
    assert stream is not None
    for end_, tail in ((zero, 0), (one, 0), (one, own)):  # it is empty, it does not know, it has the same
        ack = wire.Ack(part.pid, Epoch(0), INCARNATION, end_, end_, stream._stream, True, tail=tail)
        host.live.on_ack(PEER_A, ack)
        assert noted(host.anomalies) == []
    assert probe.stream < stream._stream
    host.live.on_ack(PEER_A, wire.Ack(part.pid, Epoch(0), INCARNATION, one, one, stream._stream, True, tail=own ^ 1))
    assert noted(host.anomalies) == [Kind.LOG_DIFFERS]
    assert texts(host.anomalies).startswith(f"t/0: offset 0 is in another batch on node {PEER_A}")


def test_a_follower_reports_the_crc_of_its_last_batch_where_a_stream_begins() -> None:
    host = follower()
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 1))
    append(host, stored(batch(b"a"), 0, 1), stream=1)
    host.settle()
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    empty, *progress, placed = acks(host)
    assert (empty.resync, empty.tail) == (True, 0)
    assert {(ack.resync, ack.tail) for ack in progress} <= {(False, 0), (True, 0)}
    assert (placed.resync, placed.tail) == (True, host.live.log.crc_before(Offset(1)))
    assert placed.tail > 0


# ------------------------------------------------------------------------------------------------ what is shown
def test_every_kind_is_counted_from_the_start_and_a_storm_is_bounded() -> None:
    scheduler, measures = Scheduler(), NodeMeasures()
    clock = process_clock(scheduler)
    watch = Anomalies(clock, measures, lambda: coordinated().machine.state)
    assert measures.anomalies.values == {(kind.value,): 0 for kind in Kind}
    for number in range(1_000):
        watch.note(Kind.LSO_BACK, f"number {number}")
    assert measures.anomalies.values[(Kind.LSO_BACK,)] == 1_000
    assert [seen.number for seen in watch.recent] == list(range(901, 1_001))
