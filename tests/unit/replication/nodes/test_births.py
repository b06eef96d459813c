"""Rule 18, the birth of a cluster: whole nodes over the simulated network, as operators treat them."""

import pytest

from smq.raft_state.ids import NO_BIRTH, BirthId, DiskId, NodeId
from smq.replication.monitoring.anomalies import Kind
from smq.replication.net import wire
from smq.replication.nodes.births import BirthDiffers
from smq.replication.nodes.identity import BIRTH_KEY, birth_row
from smq.replication.ports import Table
from smq.testing.virtual.disk import DiskImage
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from tests.unit.replication.virtual_nodes import ALL, ONE, THREE, TWO, VirtualNodes

NOTHING_MS = 10_000  # in which a wrong cluster would begin


class Port(SimPort):
    """Some peers' addresses lead nowhere from here."""

    strangers: frozenset[NodeId] = frozenset()

    def is_at_address(self, peer: NodeId) -> bool:
        return peer not in self.strangers and super().is_at_address(peer)


class World(VirtualNodes):
    port_type = Port
    ports: dict[NodeId, Port]  # type: ignore[assignment]  # of the port type above

    def births(self) -> set[BirthId]:
        return {node.status().birth for node in self.nodes.values()}

    def warnings(self, node: NodeId) -> str:
        return " | ".join(self.nodes[node].status().warnings)


def begun(nodes: tuple[NodeId, ...] = ALL, seed: int = 1) -> World:
    world = World(nodes, seed=seed)
    world.start(first_start=nodes)
    assert world.are_ready()
    world.run(1_000)  # every node knows that all are registered
    return world


def test_rule_18_a_cluster_is_born_once_with_one_id_in_every_directory_and_in_the_state() -> None:
    world = begun()
    (birth,) = world.births()
    assert birth != NO_BIRTH
    assert {node.state.birth for node in world.nodes.values()} == {birth}
    world.crash(*ALL)
    world.start()
    assert world.are_ready(), "a restart needs no first start"
    assert world.births() == {birth}


@pytest.mark.parametrize("asked", [(ONE,), (TWO,), (TWO, THREE), ALL])
def test_rule_18_one_node_that_is_asked_is_enough_and_all_of_them_are_one_birth(asked: tuple[NodeId, ...]) -> None:
    """Two operators do it on different nodes, at the same time."""
    world = World()
    world.start(first_start=asked)
    assert world.are_ready()
    assert len(world.births()) == 1


def test_rule_18_empty_nodes_form_no_cluster_by_themselves_and_say_what_to_do() -> None:
    world = World()
    world.start()
    world.run(NOTHING_MS)
    assert world.births() == {NO_BIRTH}
    assert {node.engine.term for node in world.nodes.values()} == {0}
    assert "run `smq first-start` on one of them" in world.warnings(TWO)
    world.processes[TWO].soon(world.nodes[TWO].allow_first_start)
    assert world.are_ready(), "later is as good"


@pytest.mark.parametrize("missing", ALL)
def test_rule_18_a_first_start_waits_for_every_node_because_the_one_that_is_away_may_have_data(missing: NodeId) -> None:
    world = World()
    there = [node for node in ALL if node != missing]
    world.start(*there, first_start=there)
    world.run(NOTHING_MS)
    assert world.births() == {NO_BIRTH}
    assert f"nodes {missing} are not connected" in world.warnings(there[0])
    world.start(missing)
    assert world.are_ready()


def test_rule_18_an_empty_disk_rejoins_without_a_first_start_and_has_no_vote_before() -> None:
    for victim in ALL:
        world = begun(seed=victim)
        (birth,) = world.births()
        before = world.nodes[victim].identity.disk
        world.wipe(victim)
        world.start(victim)
        assert world.wait(lambda: "no vote" in world.warnings(victim))  # noqa: B023  # it is called here
        assert world.are_ready()
        assert world.births() == {birth}
        assert world.nodes[victim].identity.disk != before
        assert world.warnings(victim) == ""


@pytest.mark.parametrize("asked", [(), ALL])
@pytest.mark.parametrize("survivor", ALL)
def test_rule_18_two_empty_disks_of_three_form_no_cluster_whatever_they_are_asked(
    survivor: NodeId, asked: tuple[NodeId, ...]
) -> None:
    """With a survivor that is away, and then with it. The option may have been in their units for ever."""
    world = begun()
    (birth,) = world.births()
    empty = [node for node in ALL if node != survivor]
    world.crash(survivor)
    world.wipe(*empty)
    world.start(*empty, first_start=asked)
    world.run(NOTHING_MS)
    assert world.births() == {NO_BIRTH}
    world.start(survivor)
    world.run(NOTHING_MS)
    assert world.births() == {birth}
    assert not any(node.is_ready for node in world.nodes.values())
    assert {node.state.birth for number, node in world.nodes.items() if number != survivor} == {NO_BIRTH}
    assert set(world.nodes[survivor].state.nodes) == set(ALL)
    for node in ALL:
        assert "2 of 3 nodes run on disks that have no vote" in world.warnings(node)
    assert not world.fatal


def test_rule_18_two_lost_disks_that_are_put_back_make_the_cluster_whole() -> None:
    world = begun()
    world.crash(*ALL)
    kept = {node: world.images[node].copy() for node in (TWO, THREE)}
    world.wipe(TWO, THREE)
    world.start(first_start=ALL)
    world.run(NOTHING_MS)
    world.crash(*ALL)
    world.images.update(kept)
    world.start()
    assert world.are_ready()


@pytest.mark.parametrize("victim", ALL)
@pytest.mark.parametrize("at_ms", range(0, 60, 3))
def test_rule_18_a_first_start_that_loses_power_at_any_moment_ends_at_the_next_one(victim: NodeId, at_ms: int) -> None:
    """The same command, again, after one node or all of them went down. Also where one has lost its disk."""
    for lost, wiped in ((ALL, ()), ((victim,), ()), ((victim,), (victim,))):
        world = World(seed=at_ms + 1)
        world.start(first_start=ALL)
        world.run(at_ms)
        world.crash(*lost)
        world.wipe(*wiped)
        world.run(at_ms)
        world.start(*lost, first_start=lost)
        assert world.are_ready(), [world.warnings(node) for node in ALL]
        assert len(world.births() | {node.state.birth for node in world.nodes.values()}) == 1
        assert not world.fatal


@pytest.mark.parametrize("cut_off", ALL)
@pytest.mark.parametrize("at_ms", range(0, 60, 3))
def test_rule_18_a_first_start_that_is_cut_in_two_has_one_birth(cut_off: NodeId, at_ms: int) -> None:
    world = World(seed=at_ms + 1)
    world.start(first_start=ALL)
    world.run(at_ms)
    links = [pair for node in ALL if node != cut_off for pair in ((node, cut_off), (cut_off, node))]
    for pair in links:
        world.network.cut(*pair)
    world.run(NOTHING_MS)
    assert len(world.births() - {NO_BIRTH}) <= 1
    for pair in links:
        world.network.heal(*pair)
    assert world.are_ready()
    assert len(world.births()) == 1


def test_rule_18_all_disks_restored_from_a_backup_are_the_cluster_and_from_before_it_are_none() -> None:
    world = World()
    world.start()
    world.run(500)
    world.crash(*ALL)
    empty = {node: image.copy() for node, image in world.images.items()}
    world.start(first_start=ALL)
    assert world.are_ready()
    (birth,) = world.births()
    world.crash(*ALL)
    backup = {node: image.copy() for node, image in world.images.items()}
    for images, expected in ((backup, birth), (empty, NO_BIRTH)):
        world.images = {node: image.copy() for node, image in images.items()}
        world.start()
        world.run(NOTHING_MS)
        assert world.births() == {expected}
        world.crash(*ALL)


def test_rule_18_one_disk_restored_from_before_the_birth_is_an_old_copy_and_has_no_vote() -> None:
    """It has the disk id of the birth, and remembers nothing."""
    world = World()
    world.start()
    world.run(500)
    world.crash(*ALL)
    old = world.images[THREE].copy()
    world.start(first_start=ALL)
    assert world.are_ready()
    before = world.nodes[THREE].identity.disk
    world.crash(THREE)
    world.images[THREE] = old
    world.start(THREE)
    assert world.are_ready()
    assert world.nodes[THREE].identity.disk != before


def test_rule_18_nodes_of_another_birth_take_nothing_from_each_other_and_say_so() -> None:
    world, other = begun(), begun(seed=2)
    (birth,), (foreign,) = world.births(), other.births()
    other.crash(THREE)
    world.crash(THREE)
    world.images[THREE] = other.images[THREE]
    index = world.nodes[ONE].applied.index
    world.start(THREE)
    world.run(NOTHING_MS)
    assert [world.nodes[node].is_ready for node in ALL] == [True, True, False]
    assert [world.nodes[node].status().birth for node in ALL] == [birth, birth, foreign]
    assert world.nodes[ONE].applied.index >= index
    assert world.nodes[ONE].state.nodes[THREE].fenced
    assert world.nodes[THREE].engine.leader is None, "it takes nothing from their leader"
    for node, peer in ((ONE, THREE), (TWO, THREE), (THREE, ONE)):
        assert f"node {peer} is of another cluster with the same name" in world.warnings(node)
        assert [a.kind for a in world.nodes[node].anomalies() if f"node {peer} " in a.text] == [Kind.OTHER_BIRTH]
    world.wipe(THREE)
    world.start(THREE)
    assert world.are_ready(), "an empty directory instead of the wrong one"
    assert world.warnings(ONE) == ""


def test_rule_18_an_empty_disk_takes_no_birth_of_a_cluster_of_other_nodes() -> None:
    world = begun((ONE, TWO))
    world.network = SimNetwork(world.scheduler, world.streams, ALL, LinkProfile())
    world.crash(ONE, TWO)
    world.images[THREE] = DiskImage()
    world.start(ONE, TWO)
    world.start(THREE, peers=ALL, first_start=(THREE,))
    offer = birth_row(wire.Birth(BirthId(b"b" * 16), ((ONE, DiskId(b"d" * 16)), (TWO, DiskId(b"d" * 16)))))
    world.run(500)
    node = world.nodes[THREE]
    assert offer.key == BIRTH_KEY
    node.dispatcher._births.on_birth(ONE, wire.Birth(BirthId(b"b" * 16), ((ONE, DiskId(b"d" * 16)),)))
    assert "is of a cluster of the nodes 1, and [peers] names others" in world.warnings(THREE)
    assert node.status().birth == NO_BIRTH


def test_rule_18_a_birth_that_gives_a_vote_is_taken_from_the_process_at_the_founders_address_only() -> None:
    """Another one, with node 1's id by mistake, could make a second birth. Without a vote it does no harm."""
    world = World()
    world.start(first_start=ALL)
    for port in world.ports.values():
        port.strangers = frozenset({ONE})
    world.run(NOTHING_MS)
    assert [node.status().birth == NO_BIRTH for node in world.nodes.values()] == [False, True, True]
    world.ports[TWO].strangers = frozenset()
    assert world.are_ready(), "node 2 has it from node 1, and node 3 from node 2"
    world.wipe(THREE)
    world.start(THREE)
    world.ports[THREE].strangers = frozenset(ALL)
    assert world.are_ready(), "a replaced disk takes it from any node that has it"


@pytest.mark.parametrize("size", [1, 2])
def test_rule_18_a_small_cluster_is_born_as_explicitly(size: int) -> None:
    nodes = ALL[:size]
    world = World(nodes)
    world.start()
    world.run(NOTHING_MS)
    assert world.births() == {NO_BIRTH}
    assert {node.engine.term for node in world.nodes.values()} == {0}
    world.crash(*nodes)
    world.start(first_start=nodes[-1:])
    assert world.are_ready()
    if size == 2:
        (birth,) = world.births()
        world.wipe(ONE)
        world.start(ONE)
        assert world.are_ready(), "the other one has all there is"
        assert world.births() == {birth}


def test_rule_18_a_state_of_another_birth_than_the_directorys_ends_the_process() -> None:
    world, other = begun((ONE,)), begun((ONE,), seed=2)
    world.crash(ONE)
    world.images[ONE].tables[Table.META][BIRTH_KEY] = other.images[ONE].tables[Table.META][BIRTH_KEY]
    world.start()
    world.run(500)
    assert [type(error) for error in world.fatal] == [BirthDiffers]
    assert "put together from two clusters" in str(world.fatal[0])
