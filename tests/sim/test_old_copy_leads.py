"""A leader learns that its disk is an old copy: it gives up its leaderships and comes back as another disk."""

import pytest

from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.ids import NodeId
from smq.replication.net import wire
from smq.replication.net.disk_marks import Mark
from smq.replication.nodes.identity import DISK_KEY
from smq.replication.ports import Table


def report_old_copy(simulation: Simulation, host: SimHost, reporter: NodeId) -> None:
    """By the heartbeat of a peer that was away until now."""
    own, peer = host.api.engine.marks.own, simulation.cluster.hosts[reporter].api
    evidence = Mark(host.node, own.disk, b"earlier.", 0, own.writes + 1)
    host.api.heartbeats.on_heartbeat(reporter, wire.Heartbeat(peer.incarnation, (peer.engine.marks.own, evidence)))


@pytest.mark.parametrize("crashes_before_it_is_durable", [False, True])
def test_it_gives_up_all_leaderships_and_is_readmitted_by_the_others(
    monkeypatch: pytest.MonkeyPatch, crashes_before_it_is_durable: bool
) -> None:
    errors: list[BaseException] = []
    monkeypatch.setattr(Cluster, "_end", lambda _self, _host, error: errors.append(error))
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    hosts = simulation.cluster.hosts
    (host,) = [host for host in hosts.values() if host.api.engine.is_leader]
    reporter = next(node for node in hosts if node != host.node)
    before, incarnation = host.api.identity.disk, host.api.incarnation
    report_old_copy(simulation, host, reporter)
    assert not host.api.engine.is_leader
    assert host.api.replicas.led() == []
    assert not host.api.is_ready
    if crashes_before_it_is_durable:
        monkeypatch.setattr("smq.testing.virtual.disk.TORN", 0.0)
        image = host.image.copy()
        simulation.cluster.crash(host.node, power=True, why="test")
        host.image = image
        simulation.cluster.start(host.node)
        simulation.scheduler.run_for_ms(5)
        assert host.image.tables[Table.META][DISK_KEY] == before
        assert simulation.scheduler.run_for_ms(8_000, stop=simulation._are_all_ready)
        report_old_copy(simulation, host, reporter)
    assert simulation.scheduler.run_for_ms(8_000, stop=simulation._are_all_ready)
    simulation.scheduler.run_for_ms(1_000)
    disk = host.image.tables[Table.META][DISK_KEY]
    assert disk != before
    assert {node.api.state.nodes[host.node].disk for node in hosts.values()} == {disk}
    assert host.api.state.nodes[host.node].incarnation == host.api.incarnation > incarnation
    assert "has rejoined as a replaced disk" in host.api.status().warnings[0]
    assert errors == []
    topics = host.api.state.topics.values()
    led = {(part.leader, part.leader_incarnation) for topic in topics for part in topic.partitions}
    assert led
    assert led <= {(node, other.api.incarnation) for node, other in hosts.items()}


def test_a_heartbeat_that_speaks_for_another_node_is_refused() -> None:
    simulation = Simulation(find("calm"), 1)
    assert simulation._boot()
    one, two, three = (host.api for host in simulation.cluster.hosts.values())
    beat = wire.Heartbeat(two.incarnation, (three.engine.marks.own,))
    with pytest.raises(wire.WireError, match="speaks of itself as node"):
        one.heartbeats.on_heartbeat(two.node_id, beat)
