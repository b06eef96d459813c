"""Rule 18, the part of Raft: a node that comes back with an empty disk is no voter until the log says so."""

from dataclasses import dataclass

import pytest

from chaos_tests.sim.raft import planted
from chaos_tests.sim.raft.group import Host, Violation, World, registration
from smq.raft_state.ids import DiskId, NodeId
from smq.replication.node import Node
from smq.replication.nodes.identity import DISK_KEY, REPLACED_KEY, VOTERS_KEY
from smq.replication.ports import Table
from smq.replication.raft.journal import RaftDamaged
from smq.replication.raft.voters import Voters
from smq.testing.virtual.disk import DiskImage
from tests.unit.replication.raft.test_raft import calm, commands, commit, elected, followers, isolate, propose, wait
from tests.unit.replication.raft.test_roles import ANOTHER, DISK, ME, A, B, leading, success
from tests.unit.replication.support import born
from tests.unit.replication.virtual_nodes import ONE, THREE, TWO, VirtualNodes

OLD_COPY = DiskId(b"o" * 16)
NO_ELECTION_MS = 3_000  # five of the longest election time-outs


def registered(nodes: int = 3, *, snapshot_entries: int = 5000) -> tuple[World, Host, list[Host]]:
    """A group in which every disk is registered, its leader and its followers."""
    world = calm(nodes, snapshot_entries=snapshot_entries)
    leader = elected(world)
    for host in world.hosts.values():
        commit(world, leader, registration(host))
    wait(world, lambda: all(len(host.history.disks()) == nodes for host in world.hosts.values()))
    world.run_ms(20)  # the last answers reach the leader
    return world, leader, followers(world, leader)


def replaced(host: Host) -> None:
    """Its machine comes back with an empty disk."""
    host.crash(silently=False)
    host.replace_disk()
    host.start()


def histories_after_a_vote_by_a_replaced_disk() -> list[list[str]]:
    """B acknowledged, with A, what C never got. B's disk is replaced, A is away: B and C are two of three."""
    world, a, (b, c) = registered()
    isolate(world, c)
    commit(world, a, "acked")
    a.crash(silently=False)
    b.crash(silently=False)
    b.replace_disk()
    world.network.heal_all()
    b.start()
    world.run_ms(NO_ELECTION_MS)
    propose(c, "other")
    world.run_ms(100)
    a.start()
    world.run_ms(NO_ELECTION_MS)
    return [commands(host) for host in world.hosts.values()]


def test_rule_18_a_replaced_disk_does_not_elect_a_leader_without_what_was_acknowledged() -> None:
    assert all("acked" in history for history in histories_after_a_vote_by_a_replaced_disk())


def test_a_vote_of_a_replaced_disk_that_counts_is_found() -> None:
    with planted.BUGS["vote-of-a-replaced-disk"].planted():
        assert not any("acked" in history for history in histories_after_a_vote_by_a_replaced_disk())


def vote_again_in_a_term_of_which_the_disk_is_gone() -> World:
    """B votes for A, which leads and commits. B's disk is replaced: C, which heard nothing of that term, asks B."""
    world, c, _ = registered()
    isolate(world, c)
    wait(world, lambda: world.leader() not in (None, c) and not c.engine.is_leader)
    a = world.leader()
    assert a is not None
    b = next(host for host in world.hosts.values() if host not in (a, c))
    commit(world, a, "acked")
    a.crash(silently=False)  # with all it has underway to C
    replaced(b)
    world.network.heal_all()
    world.run_ms(NO_ELECTION_MS)
    propose(c, "other")
    world.run_ms(100)
    a.start()
    world.run_ms(NO_ELECTION_MS)
    return world


def test_rule_18_a_vote_that_is_forgotten_with_the_disk_is_not_given_again() -> None:
    world = vote_again_in_a_term_of_which_the_disk_is_gone()
    assert all("acked" in commands(host) for host in world.hosts.values())


def test_a_vote_given_twice_by_two_disks_is_found() -> None:
    with planted.BUGS["vote-of-a-replaced-disk"].planted(), pytest.raises(Violation, match="votes twice"):
        vote_again_in_a_term_of_which_the_disk_is_gone()


def commit_in_a_term_that_is_over() -> World:
    """C hands over to A, which B elects, but neither A's answers nor B reach C any more. B's disk is replaced, and
    with it went that it had promised to take nothing more of C's term. A leads the next; C must commit nothing."""
    world, c, (a, b) = registered()
    assert a.process is not None
    network = world.network
    for src, dst in ((a, c), (b, c), (c, b)):
        network.cut(src.node, dst.node)
    c.engine.transfer_leadership(a.node)
    wait(world, lambda: a.engine.is_leader, 400)
    a.process.pause()
    for src, dst in ((b, c), (c, b)):
        network.heal(src.node, dst.node)
    replaced(b)
    wait(world, lambda: commands(b) == commands(c), 1_000)
    world.run_ms(world.plan.timing.election_timeout_min_ms)  # the hand-over is given up
    answers = propose(c, "of the old term")
    world.run_ms(300)
    assert c.engine.is_leader
    if answers:
        raise Violation(f"committed in a term that is over: {answers}")
    network.heal_all()
    a.process.resume()
    network.resumed(a.node)
    wait(world, lambda: a.engine.term == c.engine.term and not (a.engine.is_leader and c.engine.is_leader))
    commit(world, elected(world), "of a newer term")
    wait(world, lambda: all(commands(host)[-1] == "of a newer term" for host in world.hosts.values()))
    return world


def test_rule_18_an_acknowledgement_by_a_disk_that_forgot_its_promise_is_not_counted() -> None:
    commit_in_a_term_that_is_over()


def test_an_acknowledgement_of_a_replaced_disk_that_counts_is_found() -> None:
    with planted.BUGS["ack-of-a-replaced-disk"].planted(), pytest.raises(Violation, match="a term that is over"):
        commit_in_a_term_that_is_over()


def test_rule_18_a_replaced_disk_catches_up_registers_and_counts_then() -> None:
    world, a, (b, c) = registered()
    commit(world, a, "before")
    replaced(b)
    wait(world, lambda: commands(b) == commands(a))
    isolate(world, c)
    pending = propose(a, "two disks of three, but one of them is unknown")
    world.run_ms(300)
    assert pending == []
    world.network.heal_all()
    wait(world, lambda: bool(pending))
    leader = elected(world)
    commit(world, leader, registration(b))
    commit(world, leader, "behind the registration")
    wait(world, lambda: commands(b) == commands(leader))
    other = next(host for host in world.hosts.values() if host not in (leader, b))
    isolate(world, other)
    commit(world, leader, "b counts")
    leader.crash(silently=False)
    world.network.heal_all()
    wait(world, lambda: b.engine.is_leader)
    commit(world, b, "b leads")


def test_rule_18_a_node_whose_disk_was_replaced_does_not_stand() -> None:
    world, a, (b, c) = registered()
    replaced(b)
    wait(world, lambda: commands(b) == commands(a))
    a.crash(silently=False)
    isolate(world, c)
    term = b.engine.term
    world.run_ms(NO_ELECTION_MS)
    world.network.heal_all()
    world.run_ms(NO_ELECTION_MS)
    assert (b.engine.term, b.engine.leader, c.engine.leader) == (term, None, None)
    a.start()
    assert elected(world) is not b


def test_rule_18_a_replaced_disk_is_brought_up_by_a_snapshot() -> None:
    world, a, (b, _) = registered(snapshot_entries=20)
    for n in range(60):
        commit(world, a, f"{n}")
    replaced(b)
    wait(world, lambda: commands(b) == commands(a))
    assert b.engine.journal.first_index > 1
    assert not b.engine.voters.may_stand
    commit(world, a, registration(b))
    wait(world, lambda: b.engine.voters.is_admitted)


def test_rule_18_restarts_on_the_same_disks_elect_immediately() -> None:
    world, _, _ = registered()
    for host in world.hosts.values():
        host.crash(silently=True)
    for host in world.hosts.values():
        host.start()
    elected(world)


def test_rule_18_one_of_two_nodes_may_lose_its_disk_for_the_other_has_all_there_is() -> None:
    world, a, (b,) = registered(2)
    commit(world, a, "acked")
    replaced(b)
    leader = elected(world)
    commit(world, leader, "after")
    wait(world, lambda: all(commands(host)[-2:] == ["acked", "after"] for host in world.hosts.values()))


# ----------------------------------------------------------------------------------------------------- by the role
def test_rule_18_a_leader_counts_the_registered_disk_only() -> None:
    view, lead = leading(1, 1, term=1)
    view.disks = {A: ANOTHER, B: DISK}
    lead.on_reply(A, success(view, 1, 3))
    assert lead.committable_index() == 0
    lead.on_reply(B, success(view, 1, 2))
    assert lead.committable_index() == 2
    view.disks[A] = DISK
    assert lead.committable_index() == 3


def voters(disks: dict[NodeId, DiskId], born: dict[NodeId, DiskId]) -> Voters:
    return Voters(ME, (A, B), lambda: DISK, disks.get, lambda _node, disk: disk == OLD_COPY, born.get)


BORN = {ME: DISK, A: DISK, B: DISK}
NONE: dict[NodeId, DiskId] = {}


def is_elected_by_a_twin(*, was_there_at_the_birth: bool) -> bool:
    """Before any disk is registered, two nodes elect a leader. The third one meets another process of the voter, on a
    disk of its own, which knows of no vote."""
    world = calm()
    voter, leader, third = world.hosts[NodeId(1)], *(world.hosts[NodeId(n)] for n in (2, 3))
    isolate(world, third)
    wait(world, lambda: any(host.engine.is_leader for host in (voter, leader)))
    if voter.engine.is_leader:
        voter, leader = leader, voter
    replaced(voter)
    if was_there_at_the_birth:
        world.born[voter.node] = voter.disk_id
    isolate(world, leader)
    for source, target in ((voter, third), (third, voter)):
        world.network.heal(source.node, target.node)
    wait_ms = 10 * NO_ELECTION_MS if was_there_at_the_birth else NO_ELECTION_MS
    return world.run_ms(wait_ms, stop=lambda: third.engine.is_leader or voter.engine.is_leader)


def test_rule_18_a_fresh_disk_that_was_not_there_at_the_birth_has_no_vote_though_none_is_registered() -> None:
    assert not is_elected_by_a_twin(was_there_at_the_birth=False)


def test_rule_18_with_its_vote_it_would_give_a_second_leader_to_one_term_and_the_simulation_says_so() -> None:
    with pytest.raises(Violation, match=r"votes twice in term|two leaders in term"):
        is_elected_by_a_twin(was_there_at_the_birth=True)


def test_rule_18_a_directory_without_a_birth_counts_no_vote_not_even_its_own() -> None:
    unborn = voters({}, {})
    assert not unborn.may_stand
    assert not unborn.counts(A, DISK)
    assert not unborn.may_be_elected(A, DISK, is_admitted=False)
    assert not Voters(ME, (A,), lambda: DISK, NONE.get, lambda _node, _disk: False, NONE.get).may_stand


def test_rule_18_a_disk_of_the_birth_counts_until_another_one_is_registered() -> None:
    assert voters({}, BORN).counts(A, DISK)
    assert voters({}, BORN).may_stand
    assert not voters({}, BORN).is_admitted
    assert not voters({}, BORN).counts(A, ANOTHER)
    assert voters({A: ANOTHER}, BORN).counts(A, ANOTHER)
    assert not voters({A: ANOTHER}, BORN).counts(A, DISK)


def test_rule_18_a_candidate_of_another_disk_is_refused_unless_it_has_been_admitted() -> None:
    """It may have applied its registration before this node did."""
    for known in (voters({A: DISK}, BORN), voters({}, BORN)):
        assert not known.may_be_elected(A, ANOTHER, is_admitted=False)
        assert known.may_be_elected(A, ANOTHER, is_admitted=True)


@pytest.mark.parametrize("disks", [{}, {A: OLD_COPY}])
def test_rule_18_an_old_copy_neither_counts_nor_is_elected_though_its_disk_is_registered(
    disks: dict[NodeId, DiskId],
) -> None:
    known = voters(disks, {A: OLD_COPY})
    assert not known.counts(A, OLD_COPY)
    assert not known.may_be_elected(A, OLD_COPY, is_admitted=True)


def test_with_two_voters_an_old_copy_counts_for_the_other_has_all_there_is() -> None:
    known = Voters(ME, (A,), lambda: DISK, NONE.get, lambda _node, _disk: True, BORN.get)
    assert known.counts(A, OLD_COPY)


# --------------------------------------------------------------------------------------------------------- raft damage
# A node whose Raft data has rotted rejoins as a replaced disk, and keeps its records and what it could not read.
SEEDS = list(range(100, 0, -1))  # each used once: every process has another source of disk ids


@dataclass
class Ran:
    node: Node
    fatal: list[BaseException]
    image: DiskImage


def run(image: DiskImage, peers: tuple[NodeId, ...]) -> Ran:
    """A process of node 1 on this disk, for two seconds, alone."""
    world = VirtualNodes(peers, seed=SEEDS.pop())
    world.images[ONE] = image
    world.start(ONE, first_start=(ONE,))
    world.run(2_000)
    return Ran(world.nodes[ONE], world.fatal, world.disks[ONE].crash())


def rot(image: DiskImage, table: Table, key: bytes) -> None:
    value = image.tables[table][key]
    image.tables[table][key] = value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize("key", [b"vote", b"journal"])
def test_a_node_with_a_damaged_journal_is_another_disk_says_so_and_does_not_stand(key: bytes) -> None:
    image = run(born(DiskImage()), (ONE, TWO, THREE)).image
    before = image.tables[Table.META][DISK_KEY]
    rot(image, Table.RAFT_META, key)
    damaged = dict(image.tables[Table.RAFT_META])
    ran = run(image, (ONE, TWO, THREE))
    assert ran.fatal == []
    meta = ran.image.tables[Table.META]
    assert meta[DISK_KEY] != before
    assert ran.node.engine.term == 0
    assert "raft_meta" in ran.node.status().warnings[0]
    assert "no vote" in ran.node.status().warnings[0]
    assert meta[b"damaged/raft_meta/" + key] == damaged[key], "kept until the others have let it in"


def test_raft_tables_that_are_suddenly_empty_are_damage_and_no_new_node() -> None:
    image = run(born(DiskImage()), (ONE, TWO, THREE)).image
    before = image.tables[Table.META][DISK_KEY]
    for table in (Table.RAFT_LOG, Table.RAFT_META):
        image.tables[table].clear()
    ran = run(image, (ONE, TWO, THREE))
    assert ran.image.tables[Table.META][DISK_KEY] != before
    assert "empty" in ran.node.status().warnings[0]


def test_a_damaged_journal_starts_over_with_nothing_of_the_old_one() -> None:
    alone = run(DiskImage(), (ONE,)).image  # it has a term and committed entries
    rot(alone, Table.RAFT_LOG, next(iter(alone.tables[Table.RAFT_LOG])))
    del alone.tables[Table.META][VOTERS_KEY]  # as one of three it gets no further before it is let in
    ran = run(alone, (ONE, TWO, THREE))
    assert ran.fatal == []
    assert (ran.node.engine.term, ran.node.engine.commit_index) == (0, 1)


def test_a_restart_before_it_was_let_in_remembers_why() -> None:
    image = run(born(DiskImage()), (ONE, TWO, THREE)).image
    rot(image, Table.RAFT_META, b"vote")
    first = run(image, (ONE, TWO, THREE))
    disk_id = first.image.tables[Table.META][DISK_KEY]
    second = run(first.image, (ONE, TWO, THREE))
    assert second.image.tables[Table.META][DISK_KEY] == disk_id, "once is enough"
    assert "raft_meta" in second.node.status().warnings[0]


def test_the_only_node_has_no_peer_to_ask_and_ends() -> None:
    alone = run(DiskImage(), (ONE,))
    assert alone.node.is_ready
    before = alone.image.tables[Table.META][DISK_KEY]
    rot(alone.image, Table.RAFT_META, b"vote")
    ran = run(alone.image, (ONE,))
    assert [type(error) for error in ran.fatal] == [RaftDamaged]
    assert "restore a backup" in str(ran.fatal[0])
    assert ran.image.tables[Table.META][DISK_KEY] == before
    assert REPLACED_KEY not in ran.image.tables[Table.META]
