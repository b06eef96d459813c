"""The Raft leader's watch: which nodes are fenced and when, which are queried and elected."""

from dataclasses import replace
from typing import cast

import pytest

from smq.raft_state.commands import (
    Command,
    CreateTopic,
    ElectLeader,
    FenceNode,
    InitCluster,
    RaiseFeatureLevel,
    SetNodeDrained,
    UnfenceNode,
)
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionId, Term, TopicId
from smq.raft_state.limits import default_init
from smq.raft_state.replies import Reply
from smq.raft_state.state import PartitionState
from smq.replication.api import DoneFn
from smq.replication.net import wire
from smq.replication.nodes import controller as controller_module
from smq.replication.nodes.controller import Controller
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replicas import Replicas, has_majority
from smq.replication.ports import Channel
from tests.unit.raft_state.support import elect, marked
from tests.unit.replication.commands.test_proposer import ScriptedEngine
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, NodeParts, register
from tests.unit.replication.test_turns import World as NodeWorld

STEP_MS = 100
TOPIC_OF_MANY = CreateTopic(
    name="many", topic_id=TopicId(b"m" * 16), partition_count=1, replication_factor=3, created_ms=0
)


class ScriptedLiveness(Liveness):
    """Hears what the test lets it hear; which disks and which nodes that leave it knows is the test's, too."""

    def __init__(self, world: "World") -> None:
        super().__init__(
            world.config,
            clock=world.clock,
            applied=world,
            engine=world.engine,
            own_disk=lambda: world.disk_of(ME),
            is_connected=lambda peer: world.links.is_open(peer, Channel.CONTROL),
        )
        self._world = world

    def disk(self, node: NodeId) -> wire.DiskCondition:
        return self._world.disk_of(node)

    def is_leaving(self, node: NodeId, incarnation: Incarnation) -> bool:
        return node in self._world.leaving


class World(NodeParts):
    """A controller on node 1, which leads Raft; its proposals are applied immediately. The test decides which peers are
    heard."""

    def __init__(self, *, is_initialised: bool = True, known: int = 1, level_max: int = 0) -> None:
        super().__init__(known_level=known)
        peers = dict.fromkeys((ME, PEER_A, PEER_B), ("h", 1))
        self.config = replace(
            self.config,
            peers=peers,
            feature_level_known=known,
            feature_level_max=level_max,
            tick_interval_ms=STEP_MS,
        )
        self.engine = ScriptedEngine()
        self.engine.leader = ME
        self.in_flight = self.in_flight_max = 0  # of the proposals
        self.is_stalled = False  # proposals are neither applied nor answered
        self.disks: dict[NodeId, wire.DiskCondition] = {}
        self.silent: set[NodeId] = set()
        self.delay_ms = 0  # of the peers' reports for elections
        self.ends: dict[NodeId, int] = {ME: 0, PEER_A: 0, PEER_B: 0}
        self.transferred: list[NodeId] = []
        self.leaving: set[NodeId] = set()
        self.warnings: list[str] = []
        self.liveness = ScriptedLiveness(self)
        self.controller = Controller(
            self.node_host(), self.liveness, cast(Replicas, self), lambda event, **_: self.warnings.append(event)
        )
        if is_initialised:
            self.register_all()

    # ---- what a controller uses of Replicas, and what Liveness reports
    def disk_of(self, node: NodeId) -> wire.DiskCondition:
        return self.disks.get(node, wire.DiskCondition.FINE)

    def on_sent(self, peer: NodeId, message: wire.Message) -> None:
        super().on_sent(peer, message)
        if isinstance(message, wire.ElectionQuery) and peer not in self.silent:
            report = wire.ElectionReport(message.query, INCARNATION, self._logs(peer, message.partitions))
            self.clock.call_later(
                self.delay_ms, lambda: self.controller.on_report(peer, report, self.clock.monotonic_ns())
            )

    def propose(self, command: Command, _timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.proposed.append(command)
        if self.is_stalled:
            return
        result: Reply | SmqError
        try:
            result = self.apply(command)
        except SmqError as e:
            result = e
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)

        def answer() -> None:
            self.in_flight -= 1
            done(result)

        self.clock.call_soon(answer)

    def seal(self, partitions: tuple[tuple[PartitionId, Epoch], ...]) -> tuple[wire.SealedLog, ...]:
        return self._logs(ME, partitions)

    def _logs(self, node: NodeId, partitions: tuple[tuple[PartitionId, Epoch], ...]) -> tuple[wire.SealedLog, ...]:
        """A negative end is that of a log that must not lead."""
        end = self.ends[node]
        good = wire.NO_CANDIDATE if end < 0 else Offset(end)
        return tuple(wire.SealedLog(pid, Offset(abs(end)), good) for pid, _ in partitions)

    def transfer(self, pid: PartitionId, epoch: Epoch, target: NodeId) -> None:
        self.transferred.append(target)

    # ---- the test's hands
    def run(self, ms: int, step_ms: int = STEP_MS) -> None:
        for _ in range(ms // step_ms):
            for peer in (PEER_A, PEER_B):
                if peer not in self.silent:
                    is_leaving = peer in self.leaving
                    self.liveness.on_heartbeat(peer, INCARNATION, is_leaving=is_leaving, disk=self.disk_of(peer))
            self.controller.on_tick(self.clock.monotonic_ns())
            self.scheduler.run_for_ms(step_ms)

    def made(self, kind: type[Command]) -> list[Command]:
        return [c for c in self.proposed if type(c) is kind]

    def part(self, index: int = 0) -> PartitionState:
        return self.state.topics["t"].partitions[index]


@pytest.fixture
def world() -> World:
    world = World()
    world.create_topic(3)
    world.run(300)
    return world


def test_a_new_cluster_is_initialised_once() -> None:
    world = World(is_initialised=False)
    world.run(1_000)
    assert len(world.made(InitCluster)) == 1


def test_nothing_is_proposed_while_all_nodes_are_healthy(world: World) -> None:
    world.run(10_000)
    assert world.proposed == []


def test_the_level_is_raised_once_every_node_knows_the_next_one() -> None:
    world = World(known=2)
    for node in (ME, PEER_A):
        world.apply(register(node, incarnation=INCARNATION + 1, level=2))
    world.run(2_000)
    assert world.made(RaiseFeatureLevel) == []  # node 3 is still old, running or not
    world.apply(register(PEER_B, incarnation=INCARNATION + 1, level=2))
    world.run(300)
    assert world.made(RaiseFeatureLevel) == [RaiseFeatureLevel(level=2)]
    assert world.state.feature_level == 2


def test_the_level_is_not_raised_before_every_node_has_registered() -> None:
    """A node of the configuration that has not been started yet may be old."""
    world = World(is_initialised=False, known=2)
    world.apply(default_init("c"))
    for node in (ME, PEER_A):
        world.apply(register(node, level=2))
    world.run(2_000)
    assert world.made(RaiseFeatureLevel) == []


def test_an_operator_holds_the_level_back() -> None:
    world = World(known=2, level_max=1)
    assert world.config.feature_level == 1  # what the node registers
    for node in (ME, PEER_A, PEER_B):
        world.apply(register(node, incarnation=INCARNATION + 1, level=2))
    world.run(2_000)
    assert world.made(RaiseFeatureLevel) == []


def test_a_silent_node_is_fenced_after_the_session_timeout_and_not_before(world: World) -> None:
    world.silent.add(PEER_A)
    world.run(world.config.session_timeout_ms - STEP_MS)
    assert world.made(FenceNode) == []
    world.run(3 * STEP_MS)
    assert world.made(FenceNode) == [FenceNode(node=PEER_A, incarnation=INCARNATION)]


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_judge_that_slept_fences_nobody_before_it_has_listened(world: World, is_connected: bool) -> None:
    if not is_connected:
        world.network.disconnected.update((PEER_A, PEER_B))
    world.scheduler.run_for_ms(10 * world.config.session_timeout_ms)
    world.controller.on_tick(world.clock.monotonic_ns())  # timers run before sockets are read
    world.run(2 * world.config.session_timeout_ms)
    assert world.made(FenceNode) == []


def test_a_silent_node_is_proposed_and_logged_once_until_the_proposal_is_answered(world: World) -> None:
    """Sessions that flap wake the controller many times per second, and hold the proposal up."""
    world.silent.add(PEER_A)
    world.is_stalled = True
    world.run(world.config.session_timeout_ms + 10 * STEP_MS)
    assert world.made(FenceNode) == [FenceNode(node=PEER_A, incarnation=INCARNATION)]
    assert world.warnings == ["node fenced"]


def test_a_silent_node_whose_connection_is_gone_is_fenced_sooner(world: World) -> None:
    world.silent.add(PEER_A)
    world.network.disconnected.add(PEER_A)
    world.run(500 + 2 * STEP_MS)
    assert len(world.made(FenceNode)) == 1


def test_a_fenced_leaders_partitions_get_leaders_whose_logs_reach_the_mark(world: World) -> None:
    led = [i for i in range(3) if world.part(i).leader == PEER_A]
    world.silent.add(PEER_A)
    world.run(2 * world.config.session_timeout_ms)
    assert len(led) == 1
    part = world.part(led[0])
    assert part.epoch == 1
    assert part.leader == next(n for n in part.replicas if n != PEER_A)


def test_a_replica_whose_log_is_short_is_passed_over(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    part = world.part(led)
    short, long = [n for n in part.replicas if n != PEER_A]
    part.hwm = part.next_offset = Offset(5)
    world.ends.update({short: 4, long: 5})
    world.silent.add(PEER_A)
    world.run(2 * world.config.session_timeout_ms)
    assert part.leader == long


def test_rule_20_a_partition_without_a_log_that_reaches_the_mark_stays_leaderless_and_says_why(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    world.part(led).hwm = world.part(led).next_offset = Offset(5)
    world.silent.add(PEER_A)
    world.run(5_000)
    assert world.made(ElectLeader) == []
    assert "no replica of the partition reaches what may be committed and a majority of the others" in world.warnings


def test_a_node_that_speaks_again_is_unfenced(world: World) -> None:
    world.silent.add(PEER_A)
    world.run(2 * world.config.session_timeout_ms)
    world.silent.clear()
    world.run(500)
    assert world.made(UnfenceNode) == [UnfenceNode(node=PEER_A, incarnation=INCARNATION)]
    assert not world.state.nodes[PEER_A].fenced


def test_a_restarted_leader_needs_a_new_epoch(world: World) -> None:
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    world.apply(register(PEER_A, Incarnation(INCARNATION + 1)))
    world.controller.wake()
    world.run(500)
    assert world.part(led).epoch == 1


def test_rule_20_a_resigned_leader_is_replaced_by_another(world: World) -> None:
    part = next(world.part(i) for i in range(3) if world.part(i).leader == PEER_A)
    world.controller.on_resign(PEER_A, wire.Resign(((part.pid, part.epoch),)), world.clock.monotonic_ns())
    world.run(500)
    assert part.epoch == 1
    assert part.leader != PEER_A


def test_a_resignation_of_a_past_epoch_or_by_another_changes_nothing(world: World) -> None:
    part = world.part()
    stranger = next(n for n in part.replicas if n != part.leader)
    now_ns = world.clock.monotonic_ns()
    world.controller.on_resign(stranger, wire.Resign(((part.pid, part.epoch),)), now_ns)
    world.run(500)
    assert world.proposed == []
    world.controller.on_resign(part.leader, wire.Resign(((part.pid, Epoch(7)),)), now_ns)
    world.run(500)
    assert world.proposed == []


def test_a_node_that_does_not_lead_raft_proposes_nothing(world: World) -> None:
    world.engine.leader = PEER_B
    world.silent.add(PEER_A)
    world.run(5_000)
    assert world.proposed == []


def test_a_new_raft_leader_gives_all_nodes_a_whole_session_before_it_fences(world: World) -> None:
    world.engine.leader = PEER_B
    world.silent.add(PEER_A)
    world.run(5_000)
    world.engine.leader = ME
    world.controller.on_leader_change()
    world.run(world.config.session_timeout_ms - STEP_MS)
    assert world.made(FenceNode) == []


def test_a_leaving_node_is_fenced_when_its_connection_ends_and_not_before(world: World) -> None:
    world.leaving.add(PEER_A)
    world.run(500)
    assert world.made(FenceNode) == []
    world.network.disconnected.add(PEER_A)
    world.run(100)
    assert world.made(FenceNode) == [FenceNode(node=PEER_A, incarnation=INCARNATION)]


def test_a_leaving_node_that_has_fenced_itself_stays_fenced(world: World) -> None:
    world.leaving.add(PEER_A)
    world.apply(FenceNode(node=PEER_A, incarnation=INCARNATION))
    world.run(2_000)
    assert world.made(UnfenceNode) == []
    assert all(world.part(i).leader != PEER_A for i in range(3))


def test_a_drained_node_is_elected_only_if_no_other_can_be(world: World) -> None:
    world.apply(SetNodeDrained(node=PEER_B, drained=True))
    world.silent.add(PEER_A)
    world.run(2 * world.config.session_timeout_ms)
    assert all(world.part(i).leader == ME for i in range(3) if world.part(i).epoch)
    world.ends.update({ME: -1, PEER_B: 1})  # its own log must not lead any more
    led = next(i for i in range(3) if world.part(i).leader == ME)
    world.controller.on_resign(
        ME, wire.Resign(((world.part(led).pid, world.part(led).epoch),)), world.clock.monotonic_ns()
    )
    world.run(2_000)
    assert world.part(led).leader == PEER_B


@pytest.mark.parametrize("condition", [wire.DiskCondition.FULL, wire.DiskCondition.HANGS])
def test_a_node_with_a_full_or_hung_disk_is_elected_only_if_no_other_can_be(
    world: World, condition: wire.DiskCondition
) -> None:
    world.disks[PEER_B] = condition
    world.silent.add(PEER_A)
    led = next(i for i in range(3) if world.part(i).leader == PEER_A)
    world.part(led).replicas = (PEER_A, PEER_B, ME)
    world.run(2 * world.config.session_timeout_ms)
    assert world.part(led).leader == ME
    world.ends.update({ME: -1, PEER_B: 1})  # its own log must not lead any more
    resigned = wire.Resign(((world.part(led).pid, world.part(led).epoch),))
    world.controller.on_resign(ME, resigned, world.clock.monotonic_ns())
    world.run(2_000)
    assert world.part(led).leader == PEER_B


def test_few_elections_are_proposed_together_and_all_in_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "ELECTIONS_MAX", 2)
    world.apply(replace(TOPIC_OF_MANY, partition_count=30))
    world.silent.add(PEER_A)
    world.run(4_000)
    parts = world.state.topics["many"].partitions
    assert all(part.leader != PEER_A for part in parts)
    assert sum(part.epoch == 1 for part in parts) == 10
    assert world.in_flight_max == 2


@pytest.mark.parametrize(
    ("reachable", "has_it"),
    [(set(), False), ({PEER_A}, True), ({PEER_A, PEER_B}, True), ({NodeId(9)}, False)],
)
def test_rule_20_majority_is_of_the_partitions_replicas_with_this_node(
    world: World, reachable: set[NodeId], has_it: bool
) -> None:
    """A node without it reports nothing for an election: elected, it would only resign again."""
    assert has_majority(world.part(), ME, frozenset(reachable)) is has_it


def test_rule_20_a_leader_that_reaches_no_majority_for_a_while_resigns_and_is_no_candidate() -> None:
    world = NodeWorld().started()
    world.populate()
    node, isolation_ms = world.node, world.node.config.leader_isolation_ms
    node.liveness.on_answer(PEER_A)
    led = node.replicas.led()
    requested = tuple((replica.pid, replica.part.epoch) for replica in led)
    assert len(requested) > 100
    world.scheduler.run_for_ms(isolation_ms / 2)
    assert node.replicas.led() == led
    world.scheduler.run_for_ms(isolation_ms)
    assert node.replicas.led() == []
    assert {log.partition: log.good for log in node.replicas.seal(requested)} == {
        pid: wire.NO_CANDIDATE for pid, _ in requested
    }
    node.liveness.on_answer(PEER_A)
    assert {log.good for log in node.replicas.seal(requested)} == {0}


# ---------------------------------------------------------------------------------------------- seals
def ask(world: World, part: PartitionState) -> None:
    resigned = wire.Resign(((part.pid, part.epoch),))
    world.controller.on_resign(part.leader, resigned, world.clock.monotonic_ns())


def test_rule_11_the_longest_log_is_elected_with_the_seals_of_all_complete_replicas(world: World) -> None:
    part = world.part()
    world.ends = {ME: 3, PEER_A: 5, PEER_B: 7}
    ask(world, part)
    world.run(1_000)
    (command,) = world.made(ElectLeader)
    assert isinstance(command, ElectLeader)
    assert (command.candidate, command.end, command.by_leader) == (PEER_B, 7, False)
    assert [(s.node, s.end) for s in command.seals] == [(ME, 3), (PEER_A, 5), (PEER_B, 7)]
    assert (part.leader, part.history[-1].start) == (PEER_B, 7)


def test_rule_11_a_log_that_may_not_lead_seals_all_the_same(world: World) -> None:
    part = world.part()
    world.ends = {ME: 3, PEER_A: -7, PEER_B: 5}
    world.silent.add(PEER_B)
    ask(world, part)
    world.run(1_000)
    assert world.made(ElectLeader) == [], "node 2 has more than node 1, and a majority may have it"
    assert world.warnings == ["no replica of the partition reaches what may be committed and a majority of the others"]
    world.silent.clear()
    world.run(2_000)
    assert (part.leader, part.history[-1].start) == (PEER_B, 5)


def test_rule_20_too_few_complete_replicas_leave_a_partition_unavailable_and_the_log_says_so(world: World) -> None:
    part = world.part()
    world.apply(marked(PEER_B, part.pid, incarnation=INCARNATION))
    world.ends = {ME: 3, PEER_A: 3, PEER_B: 3}
    world.silent.add(PEER_A)
    ask(world, part)
    world.run(1_000)
    assert world.made(ElectLeader) == []
    assert world.warnings == ["too few replicas with complete logs can be asked what may be committed"]
    world.silent.clear()
    world.run(2_000)
    assert part.epoch == 1


@pytest.mark.parametrize("delay_ms", [450, 510, 900, 3_000])
def test_an_election_ends_however_long_a_needed_seal_takes(world: World, delay_ms: int) -> None:
    part = world.part()
    world.delay_ms = delay_ms
    world.silent.add(PEER_A)
    ask(world, part)
    world.run(delay_ms + 400)
    assert part.epoch == 1


def test_a_round_that_elects_no_node_is_decided_again_only_when_something_is_new(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them would keep the loop of the Raft leader busy."""
    part = world.part()
    part.hwm = part.next_offset = Offset(5)  # no log reaches it
    ask(world, part)
    world.run(1_000)
    now_ns = world.clock.monotonic_ns()
    world.controller.on_tick(now_ns)
    decided: list[PartitionId] = []
    monkeypatch.setattr(world.controller, "_decide", lambda pid, *_: decided.append(pid))
    for _ in range(10):
        world.controller.on_tick(now_ns)
    assert decided == []
    world.controller.wake()
    world.scheduler.run_for_ms(1)
    assert set(decided) == {part.pid}


def test_rule_18_the_seal_of_a_disk_that_may_be_an_old_copy_does_not_count(world: World) -> None:
    part = world.part()
    world.ends = {ME: 3, PEER_A: 3, PEER_B: 1}
    world.silent.add(PEER_A)
    world.engine.doubted = {PEER_B}
    ask(world, part)
    world.run(1_000)
    assert world.made(ElectLeader) == []
    world.engine.doubted = set()
    world.run(1_000)
    assert part.epoch == 1


def test_rule_21_an_election_is_seen_through_although_the_leader_is_back(world: World) -> None:
    """What has sealed acknowledges nothing more, so the epoch must end."""
    part = world.part(1)
    assert part.leader == PEER_A
    part.hwm = part.next_offset = Offset(5)  # so that no node can be elected yet
    world.silent.add(PEER_A)
    world.run(10_000)
    assert world.state.nodes[PEER_A].fenced
    world.silent.clear()
    world.run(100)
    assert (world.state.nodes[PEER_A].fenced, part.epoch) == (False, 0)
    world.ends = dict.fromkeys(world.ends, 5)
    world.run(2_000)
    assert part.epoch == 1


def test_rule_21_a_question_of_an_older_term_seals_nothing() -> None:
    world = NodeWorld().started()
    world.populate()
    node = world.node
    led = node.replicas.led()
    requested = tuple((replica.pid, replica.part.epoch) for replica in led)

    def ask_in(term: int) -> None:
        query = wire.ElectionQuery(1, Term(term), requested)
        node.dispatcher.on_message(PEER_A, Channel.CONTROL, memoryview(b"".join(wire.encode(query))))

    ask_in(node.engine.term - 1)
    assert node.replicas.led() == led
    ask_in(node.engine.term)
    assert node.replicas.led() == []


def test_a_report_that_judged_its_log_by_an_older_epoch_elects_no_node(world: World) -> None:
    part = world.part()
    others = [n for n in part.replicas if n != part.leader]
    part.hwm = part.next_offset = Offset(5)
    ask(world, part)
    world.run(200)
    assert world.made(ElectLeader) == []
    # The partition moves on by another way, and is in need again: what was said of epoch 0 is said of nothing now.
    late = max(m.query for _, m in world.sent if isinstance(m, wire.ElectionQuery))
    world.apply(elect(part.pid, part.epoch, part.leader, end=5, incarnation=INCARNATION, by_leader=True))
    assert part.epoch == 1
    ask(world, part)
    world.run(100)
    report = wire.ElectionReport(late, INCARNATION, (wire.SealedLog(part.pid, Offset(5), Offset(5)),))
    world.controller.on_report(others[0], report, world.clock.monotonic_ns())
    world.run(200)
    assert part.epoch == 1
