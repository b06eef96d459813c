"""What the node may rely on, scenario by scenario: proposals, leadership, snapshots, damage, time."""

import pickle
from collections.abc import Callable

import pytest

from chaos_tests.sim.raft import planted
from chaos_tests.sim.raft.group import Host, Plan, World
from smq.raft_state.ids import LogIndex, NodeId
from smq.raft_state.replies import Applied, Done
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Buffer, Channel, Committed, DataDamaged, ProposalLost, Table
from smq.replication.raft import applier
from smq.replication.raft import core as raft_core
from smq.replication.raft import follower as raft_follower
from smq.replication.raft.messages import (
    COMMAND_BYTES_MAX,
    NO_ANSWER,
    Append,
    Message,
    SnapshotChunk,
    TimeoutNow,
    decode,
)
from smq.replication.raft.pysyncobj_adapter import COMMANDS_QUEUED_MAX
from smq.replication.raft.timing import RaftTiming
from tests.unit.replication.raft.test_roles import DISK, SNAPSHOT, A, View, installing, leading, success

ELECTED_MS = 3_000


def calm(nodes: int = 3, *, tick_ms: float = 20.0, snapshot_entries: int = 5000, seed: int = 1) -> World:
    """A group without faults, before its first election."""
    timing = RaftTiming(snapshot_entries=snapshot_entries)
    return World(Plan(seed=seed, nodes=nodes, calm=True, tick_ms=tick_ms, timing=timing, disk_latency_ms=(0.1, 1.0)))


def elected(world: World) -> Host:
    """The leader, once all nodes have applied its first entry."""

    def is_settled() -> bool:
        leader = world.leader()
        hosts = [host for host in world.hosts.values() if host.is_running]
        return leader is not None and all(
            host.engine.leader == leader.node
            and host.engine.commit_index == leader.engine.commit_index == leader.engine.journal.last_index
            for host in hosts
        )

    assert world.run_ms(ELECTED_MS, stop=is_settled)
    leader = world.leader()
    assert leader is not None
    return leader


def followers(world: World, leader: Host) -> list[Host]:
    return [host for host in world.hosts.values() if host is not leader]


def propose(host: Host, command: str) -> list[Committed | ProposalLost]:
    """Where the answer will appear."""
    answers: list[Committed | ProposalLost] = []
    host.engine.propose(command.encode(), answers.append)
    return answers


def commit(world: World, leader: Host, command: str) -> Committed:
    answers = propose(leader, command)
    assert world.run_ms(1_000, stop=lambda: bool(answers))
    assert isinstance(answers[0], Committed)
    return answers[0]


def isolate(world: World, host: Host) -> None:
    for peer in world.nodes:
        if peer != host.node:
            world.network.cut(host.node, peer)
            world.network.cut(peer, host.node)


def commands(host: Host) -> list[str]:
    return [command for _, command in host.history.entries]


def wait(world: World, condition: Callable[[], bool], ms: float = 3_000) -> None:
    assert world.run_ms(ms, stop=condition)


@pytest.fixture
def world() -> World:
    """Three nodes without faults."""
    return calm()


@pytest.fixture
def leader(world: World) -> Host:
    return elected(world)


# ---------------------------------------------------------------------------------------------------- proposals
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_a_proposal_is_committed_and_applied_everywhere(nodes: int) -> None:
    world = calm(nodes)
    leader = elected(world)
    outcome = commit(world, leader, "a")
    assert outcome == Committed(leader.engine.applied_index, Applied(reply=Done()))
    wait(world, lambda: all(commands(host) == ["a"] for host in world.hosts.values()))


def test_a_proposal_at_a_follower_is_refused_for_good_and_not_from_within_the_call(world: World) -> None:
    follower = followers(world, elected(world))[0]
    answers = propose(follower, "a")
    assert answers == []
    world.run_ms(1)
    assert answers == [ProposalLost.NOT_LEADER]
    world.run_ms(200)
    assert commands(follower) == []


def test_proposals_are_answered_in_order_and_hold_their_index(world: World, leader: Host) -> None:
    answers: list[Committed | ProposalLost] = []
    for n in range(100):
        leader.engine.propose(f"{n}".encode(), answers.append)
    wait(world, lambda: len(answers) == 100)
    indexes = [answer.index for answer in answers if isinstance(answer, Committed)]
    assert indexes == list(range(indexes[0], indexes[0] + 100))
    assert commands(leader) == [f"{n}" for n in range(100)]


def test_a_proposal_made_from_an_answer_is_committed_too(world: World, leader: Host) -> None:
    second: list[Committed | ProposalLost] = []
    leader.engine.propose(b"1", lambda _: leader.engine.propose(b"2", second.append))
    wait(world, lambda: bool(second))
    assert commands(leader) == ["1", "2"]


def read(host: Host) -> list[LogIndex | ProposalLost]:
    """Where the index will appear."""
    answers: list[LogIndex | ProposalLost] = []
    host.engine.read_index(answers.append)
    return answers


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_a_read_index_covers_what_was_committed_and_writes_nothing(nodes: int) -> None:
    world = calm(nodes)
    leader = elected(world)
    outcome = commit(world, leader, "a")
    last = leader.engine.journal.last_index
    answers = read(leader)
    assert answers == [], "not from within the call"
    wait(world, lambda: bool(answers))
    assert answers == [outcome.index]
    assert leader.engine.journal.last_index == last


def test_a_read_index_does_not_wait_for_the_next_heartbeat(world: World, leader: Host) -> None:
    world.run_ms(leader.engine.timing.heartbeat_ms + 1)
    answers = read(leader)
    assert world.run_ms(leader.engine.timing.heartbeat_ms / 5, stop=lambda: bool(answers))


def test_a_read_index_does_not_wait_for_the_disk_of_a_follower(world: World, leader: Host) -> None:
    for host in followers(world, leader):
        host.disk.stall(10_000)
    propose(leader, "a")
    world.run_ms(10)
    answers = read(leader)
    assert world.run_ms(leader.engine.timing.heartbeat_ms / 5, stop=lambda: bool(answers))
    assert leader.engine.commit_index < leader.engine.journal.last_index


def test_a_read_index_at_a_follower_is_refused(world: World) -> None:
    answers = read(followers(world, elected(world))[0])
    world.run_ms(1)
    assert answers == [ProposalLost.NOT_LEADER]


def test_an_isolated_leader_gives_no_read_index(world: World) -> None:
    """It leads on for half a second, and the others have elected and committed meanwhile."""
    old = elected(world)
    isolate(world, old)
    answers = read(old)
    wait(world, lambda: world.leader() not in (None, old) and bool(answers))
    assert answers == [ProposalLost.NOT_LEADER]


def test_a_command_above_the_limit_is_refused_with_the_limit() -> None:
    world = calm(1)
    leader = elected(world)
    with pytest.raises(ValueError, match=str(COMMAND_BYTES_MAX)):
        leader.engine.propose(bytes(COMMAND_BYTES_MAX + 1), lambda _: None)


def test_the_largest_command_is_committed_everywhere(world: World, leader: Host) -> None:
    big = "x" * COMMAND_BYTES_MAX
    commit(world, leader, big)
    wait(world, lambda: all(commands(host) == [big] for host in world.hosts.values()))


def test_more_proposals_than_the_queue_holds_are_refused_for_good() -> None:
    world = calm(1)
    leader = elected(world)
    answers: list[Committed | ProposalLost] = []
    for _ in range(COMMANDS_QUEUED_MAX + 3):
        leader.engine.propose(b"", answers.append)
    wait(world, lambda: len(answers) == COMMANDS_QUEUED_MAX + 3)
    assert answers.count(ProposalLost.NOT_LEADER) == 3
    assert len(leader.history.entries) == COMMANDS_QUEUED_MAX


def test_an_isolated_leaders_proposal_is_answered_unknown_once_another_leads(world: World) -> None:
    old = elected(world)
    isolate(world, old)
    answers = propose(old, "lost")
    wait(world, lambda: world.leader() not in (None, old) and not old.engine.is_leader)
    assert answers == []
    new = world.leader()
    assert new is not None
    commit(world, new, "kept")
    world.network.heal_all()
    wait(world, lambda: commands(old) == ["kept"])
    assert answers == [ProposalLost.UNKNOWN]


def test_an_entry_of_a_deposed_leader_that_was_committed_after_all_is_applied_once(world: World) -> None:
    """It has reached the disk of one follower, which votes for no node without it."""
    old = elected(world)
    last = old.engine.journal.last_index
    answers = propose(old, "travels")
    wait(world, lambda: any(host.engine.journal.durable_index > last for host in followers(world, old)))
    old.crash(silently=False)
    new = elected(world)
    old.start()
    commit(world, new, "next")
    wait(world, lambda: commands(old) == commands(new))
    assert answers == []
    assert commands(new) == ["travels", "next"]


# ------------------------------------------------------------------------------------------------------- fatal
def test_a_raising_state_machine_ends_the_engine_once_and_answers_nothing(
    world: World, leader: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("a broken invariant")

    def apply(_index: LogIndex, _command: bytes) -> Applied:
        raise error

    monkeypatch.setattr(leader.history, "apply", apply)
    answers = propose(leader, "a") + propose(leader, "b")
    wait(world, lambda: leader.fatal != [])
    world.run_ms(500)
    assert leader.fatal == [error]
    assert answers == []
    elected_again = followers(world, leader)
    wait(world, lambda: any(host.engine.is_leader for host in elected_again))


def test_a_raising_answer_ends_the_engine(world: World, leader: Host) -> None:
    error = RuntimeError("a bug above")

    def done(_outcome: object) -> None:
        raise error

    leader.engine.propose(b"a", done)
    wait(world, lambda: leader.fatal == [error])


@pytest.mark.parametrize("table", [Table.RAFT_LOG, Table.RAFT_META])
def test_a_node_with_damaged_raft_data_refuses_to_start(world: World, leader: Host, table: Table) -> None:
    commit(world, leader, "a")
    leader.crash(silently=False)
    leader.disk.flip_bit(table, world.rng)
    leader.start()
    with pytest.raises(DataDamaged, match=table.value):
        world.run_ms(1)


@pytest.mark.parametrize("payload", [pickle.dumps({"type": "append_entries", "term": 99}), b"", b"\x07", b"\xff" * 99])
def test_bytes_that_are_no_message_are_dropped_and_change_nothing(world: World, leader: Host, payload: bytes) -> None:
    follower = followers(world, leader)[0]
    term = follower.engine.term
    for _ in range(3):
        follower.engine.on_message(leader.node, memoryview(payload))
    commit(world, leader, "a")
    assert (follower.engine.term, follower.fatal) == (term, [])


# --------------------------------------------------------------------------------------------------- leadership
@pytest.mark.parametrize("nodes", [1, 3])
def test_nodes_that_start_elect_a_leader_before_the_election_timeout(nodes: int) -> None:
    world = calm(nodes)
    before_ns = world.scheduler.now_ns
    elected(world)
    assert world.scheduler.now_ns - before_ns < world.plan.timing.election_timeout_min_ms * 1_000_000


def test_a_killed_leader_is_replaced_before_the_election_timeout(world: World, leader: Host) -> None:
    leader.crash(silently=False)
    before_ns = world.scheduler.now_ns
    wait(world, lambda: world.leader() is not None)
    assert world.scheduler.now_ns - before_ns < 300 * 1_000_000


def test_a_leader_without_power_is_replaced_although_its_sessions_stay_open(world: World, leader: Host) -> None:
    leader.crash(silently=True)
    wait(world, lambda: world.leader() is not None, ms=1_000)


def test_an_isolated_leader_steps_down_within_its_fallback_and_has_voted_in_its_term_nevertheless(
    world: World, leader: Host
) -> None:
    term = leader.engine.term
    isolate(world, leader)
    wait(world, lambda: not leader.engine.is_leader, ms=600)
    assert leader.engine.leader is None
    assert (leader.engine.journal.term, leader.engine.journal.voted_for) == (term, leader.node)


def test_a_leader_stays_while_the_disks_of_all_followers_hang(world: World, leader: Host) -> None:
    term = leader.engine.term
    for host in followers(world, leader):
        host.disk.stall(1_500)
    answers = propose(leader, "a")
    world.run_ms(1_400)
    assert leader.engine.is_leader
    assert answers == []
    wait(world, lambda: bool(answers), ms=300)
    assert leader.engine.term == term


@pytest.mark.parametrize("late", ["leader", "followers"])
def test_less_than_a_second_without_a_processor_costs_no_term_with_the_default_time_outs(late: str) -> None:
    peers = {NodeId(node): ("127.0.0.1", 7400 + node) for node in (1, 2, 3)}
    timing = RaftTiming.of(NodeConfig(node_id=NodeId(1), cluster_id="x", peers=peers))
    world = World(Plan(seed=1, calm=True, timing=timing, disk_latency_ms=(0.1, 1.0)))
    leader = elected(world)
    term = leader.engine.term
    for host in [leader] if late == "leader" else followers(world, leader):
        assert host.process is not None
        host.process.pause()
        world.scheduler.after_ms(800, host.process.resume)
    world.run_ms(3_000)
    assert leader.engine.is_leader
    assert leader.engine.term == term


def paused_follower_returns(world: World) -> tuple[int, int]:
    """Terms before and after a follower slept for a second and, before its backlog is read, timed out."""
    leader = elected(world)
    follower = followers(world, leader)[0]
    term = leader.engine.term
    isolate(world, follower)
    world.run_ms(5_000)
    world.network.heal_all()
    wait(world, lambda: follower.engine.leader is not None)
    world.run_ms(1_000)
    return term, elected(world).engine.term


def test_a_follower_that_was_away_does_not_depose_the_leader_as_it_would_without_pre_votes() -> None:
    before, after = paused_follower_returns(calm())
    assert after == before
    with planted.BUGS["no-pre-vote"].planted():
        before, after = paused_follower_returns(calm())
    assert after > before


def test_leadership_is_handed_over_without_waiting_for_a_timeout(world: World, leader: Host) -> None:
    to, term = followers(world, leader)[1], leader.engine.term
    leader.engine.transfer_leadership(to.node)
    wait(world, lambda: to.engine.is_leader, ms=50)
    assert to.engine.term == term + 1


def test_leadership_is_handed_over_under_load(world: World, leader: Host) -> None:
    world.start_client()
    world.run_ms(200)
    leader.engine.transfer_leadership(None)
    wait(world, lambda: not leader.engine.is_leader and world.leader() is not None, ms=300)


def test_leadership_is_not_handed_to_a_node_that_cannot_be_reached_and_work_goes_on(world: World, leader: Host) -> None:
    away = followers(world, leader)[0]
    isolate(world, away)
    propose(leader, "a")
    leader.engine.transfer_leadership(away.node)
    world.run_ms(400)
    assert leader.engine.is_leader
    commit(world, leader, "b")


# ---------------------------------------------------------------------------------------- catching up, snapshots
def test_a_damaged_snapshot_is_refused_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm(snapshot_entries=20)
    leader = elected(world)
    away = followers(world, leader)[0]
    away.crash(silently=False)
    for n in range(100):
        commit(world, leader, f"{n}")
    damaged = 0
    deliver = away.on_message

    def on_message(peer: NodeId, channel: Channel, payload: memoryview) -> None:
        nonlocal damaged
        if isinstance(decode(payload), SnapshotChunk) and damaged < 3:
            damaged += 1
            payload = memoryview(bytes(payload[:-1]) + bytes([payload[-1] ^ 1]))
        deliver(peer, channel, payload)

    monkeypatch.setattr(away, "on_message", on_message)
    away.start()
    wait(world, lambda: damaged == 3)
    assert commands(away) == []
    wait(world, lambda: commands(away) == commands(leader))


def test_a_former_leader_with_entries_of_its_own_catches_up_in_a_few_messages(world: World) -> None:
    """Finding 9: stock pysyncobj steps back one entry per round and sends the whole backlog each time."""
    old = elected(world)
    isolate(world, old)
    for n in range(50):
        propose(old, f"divergent {n}")
    wait(world, lambda: world.leader() not in (None, old) and not old.engine.is_leader)
    new = world.leader()
    assert new is not None
    for n in range(300):
        commit(world, new, f"{n}")
    appends = 0
    deliver = old.on_message

    def on_message(peer: NodeId, channel: Channel, payload: memoryview) -> None:
        nonlocal appends
        message = decode(payload)
        appends += isinstance(message, Append) and bool(message.entries)
        deliver(peer, channel, payload)

    old.on_message = on_message  # type: ignore[method-assign]  # to observe this one host
    world.network.heal_all()
    wait(world, lambda: commands(old) == commands(new))
    assert appends <= 3


def test_everything_acknowledged_survives_a_power_failure_of_all_nodes() -> None:
    world = calm(snapshot_entries=20)
    leader = elected(world)
    for n in range(30):
        commit(world, leader, f"{n}")
    for host in world.hosts.values():
        host.crash(silently=True)
    for host in world.hosts.values():
        host.start()
    leader = elected(world)
    wait(world, lambda: commands(leader) == [f"{n}" for n in range(30)])


def test_a_restarted_node_applies_what_it_knows_to_be_committed_before_it_hears_of_a_leader(
    world: World, leader: Host
) -> None:
    for n in range(30):
        commit(world, leader, f"{n}")
    for host in world.hosts.values():
        host.crash(silently=True)
    leader.start()
    world.run_ms(10)
    assert leader.engine.leader is None
    assert commands(leader)[:28] == [f"{n}" for n in range(28)]


# --------------------------------------------------------------------------------------------------------- time
@pytest.mark.parametrize("nodes", [1, 3])
def test_no_commit_waits_for_a_tick(nodes: int) -> None:
    world = calm(nodes, tick_ms=100.0)
    leader = elected(world)
    world.run_ms(1)
    for n in range(20):
        before_ns = world.scheduler.now_ns
        commit(world, leader, f"{n}")
        assert world.scheduler.now_ns - before_ns < 5 * 1_000_000  # two commits, two messages; a tick is 100 ms


def test_a_burst_of_proposals_is_one_write_and_one_message_per_follower(world: World, leader: Host) -> None:
    world.run_ms(1)
    before = leader.disk.submitted_seq
    sent: list[NodeId] = []
    send = leader.port.send

    def spy(peer: NodeId, channel: Channel, parts: list[Buffer]) -> bool:
        message = decode(b"".join(parts))
        if isinstance(message, Append) and message.entries:
            sent.append(peer)
        return send(peer, channel, parts)

    leader.port.send = spy  # type: ignore[method-assign,assignment]  # to observe this one port
    answers = [propose(leader, f"{n}") for n in range(200)]
    wait(world, lambda: all(answers))
    assert leader.disk.submitted_seq == before + 1
    assert sorted(sent) == [host.node for host in followers(world, leader)]


def test_an_idle_group_writes_nothing_and_sends_heartbeats_only(world: World) -> None:
    elected(world)
    world.run_ms(500)
    commits = [host.disk.commits for host in world.hosts.values()]
    executed = world.scheduler.executed
    world.run_ms(1_000)
    assert [host.disk.commits for host in world.hosts.values()] == commits
    assert world.scheduler.executed - executed < 400  # 150 ticks, 2 x 17 heartbeats and their answers


def test_a_follower_behind_an_unread_session_costs_the_leader_a_window_only() -> None:
    world = calm(snapshot_entries=100_000)
    leader = elected(world)
    slow = followers(world, leader)[0]
    world.network.cut(slow.node, leader.node)  # it receives, its answers do not arrive
    sent = 0
    send = leader.port.send

    def spy(peer: NodeId, channel: Channel, parts: list[Buffer]) -> bool:
        nonlocal sent
        if peer == slow.node:
            sent += sum(len(part) for part in parts)
        return send(peer, channel, parts)

    leader.port.send = spy  # type: ignore[method-assign,assignment]  # to observe this one port
    for _ in range(12):
        commit(world, leader, "x" * 1_000_000)
    assert sent < 6 << 20


# ----------------------------------------------------------------------------------------------- votes on the disk
def leads_with_one_vote_of_four() -> bool:
    """Two of five nodes are up, and every vote is delivered twice. Without pre-votes: they would need a third node."""
    world = World(Plan(seed=1, nodes=5, calm=True, repeats_votes=True))
    for host in list(world.hosts.values())[2:]:
        host.crash(silently=True)
    with planted.BUGS["no-pre-vote"].planted():
        leads = world.run_ms(ELECTED_MS, stop=lambda: world.leader() is not None)
    assert any(voter != candidate for (voter, _), candidate in world.votes.items()), "no node has voted for another"
    return leads


def test_a_repeated_vote_counts_once() -> None:
    assert not leads_with_one_vote_of_four()
    with planted.BUGS["duplicate-votes"].planted():
        assert leads_with_one_vote_of_four()


# --------------------------------------------------------------------------------------------------------- engine turns
# How much one turn of the engine does, and when the next snapshot is due.
def test_a_node_that_took_a_snapshot_over_counts_what_its_journal_grows_by_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applier, "SNAPSHOT_JOURNAL_BYTES", 2_000)
    monkeypatch.setattr(raft_core, "JOURNAL_KEPT_BYTES", 0)
    world = calm(snapshot_entries=100_000)  # only the bytes count
    leader = elected(world)
    away = followers(world, leader)[0]
    commit(world, leader, "x" * 10_000)  # still in its journal, as it had not been applied, when that was cut
    wait(world, lambda: away.engine.journal.snapshot is not None)
    away.engine.journal._bytes_at_snapshot = 10_000
    isolate(world, away)
    for n in range(30):
        commit(world, leader, f"{n}" + "x" * 200)
    world.network.heal_all()
    wait(world, lambda: commands(away) == commands(leader))
    installed = away.engine.journal.snapshot
    assert installed is not None
    for n in range(30):
        commit(world, leader, f"{n}" + "y" * 200)
    wait(world, lambda: commands(away) == commands(leader))
    wait(world, lambda: away.engine.journal.snapshot.index > installed.index)  # type: ignore[union-attr]  # there is one


def test_entries_are_applied_by_size_some_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 entries that commit 10,000 offsets each, applying takes seconds."""
    monkeypatch.setattr(applier, "APPLY_BYTES_MAX", 1_000)
    world = calm(snapshot_entries=100_000)
    leader = elected(world)
    away = followers(world, leader)[0]
    isolate(world, away)
    answers = [propose(leader, "x" * 100) for _ in range(300)]
    wait(world, lambda: all(answers))
    applied = away.history.apply
    in_a_turn, turns = 0, list[int]()

    def apply(index: LogIndex, command: bytes) -> Applied:
        nonlocal in_a_turn
        in_a_turn += 1
        return applied(index, command)

    turn = away.engine._turn

    def counted() -> None:
        nonlocal in_a_turn
        in_a_turn = 0
        turn()
        turns.append(in_a_turn)

    monkeypatch.setattr(away.history, "apply", apply)
    monkeypatch.setattr(away.engine, "_turn", counted)
    world.network.heal_all()
    wait(world, lambda: commands(away) == commands(leader))
    assert 1 < max(turns) <= 9  # of some 110 bytes each


def test_messages_that_came_during_an_installation_are_taken_in_slices_and_before_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raft_follower, "HELD_ENTRIES_PER_TURN", 10)
    view, follower = installing(SNAPSHOT)

    def come(first: int) -> None:
        for index in range(first, first + 3 * 20, 3):
            entries = [(5, index.to_bytes(2, "big")) for index in range(index, index + 3)]
            prev = {"prev_index": index - 1, "prev_term": 4 if index == 10 else 5}
            follower.on_append(A, Append(term=5, number=index, commit=9, **prev, entries=entries))

    come(10)
    view.finish_install()
    turns = list[int]()
    while follower.has_held:
        before = view.journal.last_index
        follower.take_held()
        turns.append(view.journal.last_index - before)
        if len(turns) == 1:
            come(70)  # a turn later: it must not overtake
    assert sum(turns) == 120
    assert max(turns) <= 10 + 3  # a message is taken as a whole
    entries = view.journal.entries_from(10, count_max=120)
    assert [entry for entry, _, _ in entries] == [index.to_bytes(2, "big") for index in range(10, 130)]


# ------------------------------------------------------------------------------------------------------------ hand over
# Handing over Raft's leadership: TimeoutNow goes again to a successor that was not ready for the first.
def words(view: View) -> int:
    """How many TimeoutNow the successor got."""
    return sum(peer == A and isinstance(message, TimeoutNow) for peer, message in view.sent)


def test_the_successor_is_told_once_it_has_all_and_again_with_each_heartbeat_until_the_time_is_over() -> None:
    view, lead = leading(1, 1, term=1)
    view.disks = {A: DISK}
    lead.on_reply(A, success(view, 1, 2))
    lead.hand_over(A)
    lead.send()
    assert words(view) == 0
    lead.on_reply(A, success(view, 2, 3))
    for told in (1, 2, 3):
        lead.send()
        lead.send()
        assert words(view) == told
        view.time += view.timing.heartbeat_ms / 1000
    view.time += view.timing.election_timeout_min_ms / 1000
    lead.send()
    assert words(view) == 3


def test_a_successor_stands_that_learns_of_a_commit_together_with_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm()
    leader = elected(world)
    world.run_ms(200)
    to, away = followers(world, leader)
    isolate(world, away)  # so that the successor's answer commits the entry
    assert to.engine._core is not None

    def is_due_for(_peer: object, message: Message) -> bool:
        """The commit index alone waits for the next message. In a node, one frame brings both."""
        return not (isinstance(message, Append) and message.number == NO_ANSWER)

    monkeypatch.setattr(to.engine._core, "is_due_for", is_due_for)
    propose(leader, "a")
    world.run_ms(0.05)
    leader.engine.transfer_leadership(to.node)
    wait(world, lambda: to.engine.is_leader, ms=300)


# --------------------------------------------------------------------------------------------------------- slow install
# A follower that takes longer to receive and install a snapshot than the leader takes for the next ones.
SNAPSHOT_ENTRIES = 20


class SlowFollower:
    """It lacks more than the leader's journal holds. From the snapshot on, it gets the leader's messages at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = calm(snapshot_entries=SNAPSHOT_ENTRIES)
        self.leader = elected(self.world)
        self.host: Host = followers(self.world, self.leader)[0]
        self.snapshots: set[int] = set()  # that it was sent
        self._held: list[tuple[NodeId, Channel, memoryview]] = []
        self._is_held = True
        self._deliver = self.host.on_message
        self.host.crash(silently=False)
        self.commit(100)
        monkeypatch.setattr(self.host, "on_message", self._on_message)
        self.host.start()
        wait(self.world, lambda: bool(self.snapshots))

    def _on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        message = decode(payload)
        if isinstance(message, SnapshotChunk):
            self.snapshots.add(message.index)
        if self.snapshots and self._is_held and peer == self.leader.node:
            self._held.append((peer, channel, memoryview(bytes(payload))))
        else:
            self._deliver(peer, channel, payload)

    @property
    def kept(self) -> int:
        return len(self.leader.engine.journal)

    def commit(self, count: int) -> None:
        for n in range(count):
            commit(self.world, self.leader, f"{n}")

    def catch_up(self, behind: int) -> None:
        """Until it lacks no more than that many entries."""
        while len(commands(self.host)) < len(commands(self.leader)) - behind:
            if self._held:
                self._deliver(*self._held.pop(0))
            self.world.run_ms(2)

    def go_on(self) -> None:
        self._is_held = False
        for message in self._held:
            self._deliver(*message)
        wait(self.world, lambda: commands(self.host) == commands(self.leader))


def test_it_needs_no_second_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)  # no entry is sent before the answer
    slow = SlowFollower(monkeypatch)
    taken = slow.leader.engine.snapshot
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.leader.engine.snapshot > taken
    slow.go_on()
    assert len(slow.snapshots) == 1


def test_once_it_has_caught_up_the_journal_is_cut_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowFollower(monkeypatch)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.kept > 10 * SNAPSHOT_ENTRIES
    slow.go_on()
    slow.commit(2 * SNAPSHOT_ENTRIES)
    assert slow.kept < 3 * SNAPSHOT_ENTRIES


def test_what_was_kept_for_it_does_not_count_once_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some entries stay before each snapshot, for followers that are a little behind, unless they are large."""
    monkeypatch.setattr(raft_core, "JOURNAL_KEPT_BYTES", 100)
    slow = SlowFollower(monkeypatch)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    slow.go_on()
    engine = slow.leader.engine
    taken = engine.snapshot[0]
    while engine.snapshot[0] == taken:
        slow.commit(1)
    assert engine.journal.first_index == engine.snapshot[0] - SNAPSHOT_ENTRIES // 4


@pytest.mark.parametrize(("bound", "most"), [("CATCH_UP_ENTRIES", 60), ("CATCH_UP_BYTES", 200)])
def test_it_gets_another_before_the_journal_grows_without_bound(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_core, bound, most)
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)
    slow = SlowFollower(monkeypatch)
    longest = 0
    for _ in range(10 * SNAPSHOT_ENTRIES):
        slow.commit(1)
        longest = max(longest, slow.kept)
    assert longest < 6 * SNAPSHOT_ENTRIES
    slow.go_on()
    assert len(slow.snapshots) > 1


@pytest.mark.parametrize(("bound", "most"), [("CATCH_UP_ENTRIES", 60), ("CATCH_UP_BYTES", 140)])
def test_what_it_has_does_not_count_towards_the_bound(bound: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that stays a few entries behind a busy leader: it needs few of those after its snapshot."""
    monkeypatch.setattr(raft_core, bound, most)
    monkeypatch.setattr("smq.replication.raft.leader.APPEND_BYTES_MAX", 1)  # one entry per message,
    monkeypatch.setattr("smq.replication.raft.leader.WINDOW_BYTES_MAX", 1)  # and none before the answer
    slow = SlowFollower(monkeypatch)
    slow.commit(50)
    for _ in range(2 * SNAPSHOT_ENTRIES):
        slow.commit(1)
        slow.catch_up(SNAPSHOT_ENTRIES // 2)
    slow.go_on()
    assert len(slow.snapshots) == 1


def test_nothing_is_kept_for_one_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowFollower(monkeypatch)
    isolate(slow.world, slow.host)
    leading = slow.leader.engine._core
    assert leading is not None
    wait(slow.world, lambda: not leading.is_connected(slow.host.node), ms=20_000)
    slow.commit(10 * SNAPSHOT_ENTRIES)
    assert slow.kept < 3 * SNAPSHOT_ENTRIES
