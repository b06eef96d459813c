"""A whole node whose replicated state has reached its bound, and whose user makes room again."""

from dataclasses import replace
from typing import Any

import pytest

from smq.raft_state.commands import Command, CommitOffsets, CreateTopic, DeleteGroup, GroupChange, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.fencing import changes_before
from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionIndex, TopicId, partition_id
from smq.raft_state.replies import Done, TopicCreated
from smq.replication import state_quota
from smq.replication.config import NodeConfig
from smq.replication.node import Node
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.disk import DiskImage, FakeDisk
from smq.testing.virtual.network import LinkProfile, SimNetwork, SimPort
from smq.testing.virtual.rng import Streams

pytestmark = pytest.mark.sim

ME = NodeId(1)
TOPIC = TopicId(b"t" * 16)


class World:
    """One node, with a snapshot every 10 entries."""

    def __init__(self) -> None:
        self.scheduler, streams = Scheduler(), Streams(seed=7)
        process = Process(self.scheduler, "node", self.fail)
        clock = SimClock(process, Machine())
        self.node = Node(
            NodeConfig(node_id=ME, cluster_id="c", peers={ME: ("", 0)}, raft_snapshot_entries=10),
            clock=clock,
            rng=streams.stream("node"),
            network=SimPort(SimNetwork(self.scheduler, streams, [ME], LinkProfile()), ME, process),
            disk=FakeDisk(clock, streams.stream("disk"), image=DiskImage(), on_fatal=self.fail),
            on_fatal=self.fail,
        )
        process.soon(self.node.start)
        self.until(lambda: self.node.is_ready)

    def fail(self, error: BaseException) -> None:
        raise error

    def until(self, is_so: Any) -> None:
        assert self.scheduler.run_for_ms(20_000, stop=is_so)

    def propose(self, command: Command) -> Any:
        replies: list[Any] = []
        self.node.propose(command, 5_000, replies.append)
        self.until(lambda: bool(replies))
        return replies[0]

    def create(self, name: str, topic_id: TopicId) -> Any:
        command = CreateTopic(name=name, topic_id=topic_id, partition_count=1, replication_factor=1, created_ms=0)
        return self.propose(command)

    def commit(self, group: str, metadata: str) -> Any:
        pid = partition_id(TOPIC, PartitionIndex(0))
        item = OffsetCommit(partition=pid, offset=Offset(0), metadata=metadata)
        return self.change(CommitOffsets(group=group, coordinator_epoch=Epoch(0), items=(item,), committed_ms=1))

    def change(self, command: GroupChange) -> Any:
        """As the group's coordinator."""
        state = self.node.state
        epoch = coordinator_of(state, command.group).epoch
        return self.propose(replace(command, coordinator_epoch=epoch, changes_seen=changes_before(state, command)))


def test_a_full_state_takes_nothing_more_until_a_group_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    assert isinstance(world.create("t", TOPIC), TopicCreated)
    for n in range(5):
        assert world.commit(f"g{n}", "x" * 4_000) == Done()
    assert world.node.status().warnings == ()
    monkeypatch.setattr(state_quota, "STATE_BYTES_MAX", 20_000)
    for _ in range(20):
        world.commit("g0", "y" * 4_000)  # until there is a snapshot
    refused = world.create("u", TopicId(b"u" * 16))
    assert isinstance(refused, SmqError)
    assert refused.code is ErrorCode.LIMIT_EXCEEDED
    assert "delete groups" in world.node.status().warnings[0]
    assert world.commit("g0", "z" * 4_000) == Done()
    assert world.change(DeleteGroup(group="g1", coordinator_epoch=Epoch(0))) == Done()
    assert isinstance(world.create("u", TopicId(b"u" * 16)), TopicCreated)
