"""A large topic that is deleted right after a node's own registration: its logs are deleted once, slice by slice."""

from typing import Any

import pytest

from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.command_codec import decode_command
from smq.raft_state.commands import CreateTopic, DeleteTopic, RegisterNode
from smq.raft_state.ids import Offset, RequestId, TopicId
from smq.raft_state.replies import Done, TopicCreated
from smq.replication.raft.raft import Raft

BIG = CreateTopic(
    request_id=RequestId(b"a" * 16),
    name="big",
    topic_id=TopicId(b"t" * 16),
    partition_count=200,  # more than a slice
    replication_factor=3,
    config=(),
    start_offset=Offset(0),
    created_ms=1,
)


def test_no_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    hosts = simulation.cluster.hosts
    (leader,) = [host for host in hosts.values() if host.api.engine.is_leader]
    replies: list[object] = []
    leader.api.propose(BIG, 5_000, replies.append)
    assert simulation.scheduler.run_for_ms(5_000, stop=lambda: bool(replies))
    simulation.scheduler.run_for_ms(1_000)
    for node in hosts:
        simulation.cluster.crash(node, power=False, why="test")

    propose = Raft.propose
    deleted: list[object] = []

    def spy(self: Raft, command: bytes, done: Any) -> None:
        propose(self, command, done)
        made = decode_command(command)
        if isinstance(made, RegisterNode) and made.node == self._node_id and self.is_leader and len(replies) == 1:
            replies.append(made)  # a client's deletion that arrives in the same turn
            delete = DeleteTopic(request_id=RequestId(b"d" * 16), name="big")
            hosts[made.node].api.propose(delete, 5_000, deleted.append)

    errors: list[BaseException] = []
    end = Cluster._end

    def ended(self: Cluster, host: SimHost, error: BaseException) -> None:
        errors.append(error)
        end(self, host, error)

    monkeypatch.setattr(Raft, "propose", spy)
    monkeypatch.setattr(Cluster, "_end", ended)
    for node in hosts:
        simulation.cluster.start(node)
    assert simulation.scheduler.run_for_ms(6_000, stop=lambda: bool(deleted))
    simulation.scheduler.run_for_ms(1_000)
    assert isinstance(replies[0], TopicCreated)
    assert deleted == [Done()]
    assert errors == []
