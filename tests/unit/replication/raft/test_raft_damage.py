"""A node whose Raft data has rotted rejoins as a replaced disk, and keeps its records and what it could not read."""

import random
from dataclasses import dataclass

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.node import Node
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.identity import DISK_KEY, REPLACED_KEY, VOTERS_KEY
from smq.replication.ports import Channel, NetworkHandler, Table
from smq.replication.raft.journal import RaftDamaged
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.compute import LoopCompute
from smq.testing.virtual.disk import DiskImage, FakeDisk
from tests.unit.replication.support import born

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


RUNS = list(range(100, 0, -1))  # seeds, each used once: every process has another source of disk ids


class NoNetwork:
    def start(self, handler: NetworkHandler) -> None: ...

    def send(self, peer: NodeId, channel: Channel, parts: object) -> bool:
        return False

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return False

    def is_at_address(self, peer: NodeId) -> bool:
        return False

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return 0

    def close(self) -> None: ...


@dataclass
class Ran:
    node: Node
    fatal: list[BaseException]
    image: DiskImage


def run(image: DiskImage, peers: tuple[NodeId, ...]) -> Ran:
    """A process of node 1 on this disk, for two seconds."""
    scheduler = Scheduler()
    fatal: list[BaseException] = []
    clock = SimClock(Process(scheduler, "n", fatal.append), Machine())
    disk = FakeDisk(clock, random.Random(1), image=image, on_fatal=fatal.append)
    config = NodeConfig(node_id=ONE, cluster_id="c", peers=dict.fromkeys(peers, ("", 0)))
    node = Node(
        config,
        clock=clock,
        rng=random.Random(RUNS.pop()),
        network=NoNetwork(),
        disk=disk,
        compute=LoopCompute(clock),
        on_fatal=fatal.append,
    )
    node.allow_first_start()
    node.start()
    scheduler.run_for_ms(2_000)
    return Ran(node, fatal, disk.crash())


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
