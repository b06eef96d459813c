"""A node whose Raft data has rotted rejoins as a replaced disk, and keeps its records and what it could not read."""

from dataclasses import dataclass

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.node import Node
from smq.replication.nodes.identity import DISK_KEY, REPLACED_KEY, VOTERS_KEY
from smq.replication.ports import Table
from smq.replication.raft.journal import RaftDamaged
from smq.testing.virtual.disk import DiskImage
from tests.unit.replication.support import born
from tests.unit.replication.virtual_nodes import ONE, THREE, TWO, VirtualNodes

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
