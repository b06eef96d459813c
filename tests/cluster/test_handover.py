"""Leaving on purpose: SIGTERM, drain and undrain of live nodes under a producer that counts its failures.

They have a cluster of their own: the more often a node has gone lately, the longer it waits for its leaderships, and
the shared cluster's nodes have been killed by other tests. Here the longest wait, 16 intervals, is 16 s.
"""

from collections.abc import Iterator

import pytest

from chaos_tests.live.load.traffic import Traffic
from smq.clients import SyncAdmin
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import wait_for
from tests.cluster.test_external_offsets import bootstrap

PARTITIONS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with live_cluster(tmp_path_factory.mktemp("handover"), rebalance_interval_ms=1_000) as made:
        yield made


def leads(cluster: Cluster, topic: str, node: int) -> list[int]:
    return [p for p in range(PARTITIONS) if cluster.wait_leader(topic, p) == node]


def test_sigterm_hands_everything_over_and_leaderships_come_back(cluster: Cluster) -> None:
    topic = cluster.make_topic(PARTITIONS)
    victim = cluster.wait_leader(topic, 0)
    with Traffic(cluster, topic, PARTITIONS) as traffic:
        log = cluster.end_on_purpose(victim, topic)
        traffic.wait_acks(3)
        cluster.restart(victim)
        wait_for("leaderships that come back", lambda: leads(cluster, topic, victim))
        traffic.wait_acks(3)
    assert "stopped" in log
    assert "drain_timed_out" not in log
    traffic.verify()


def test_drained_node_leads_nothing_even_after_a_restart_until_it_is_undrained(cluster: Cluster) -> None:
    topic = cluster.make_topic(PARTITIONS)
    victim = cluster.wait_leader(topic, 0)
    with Traffic(cluster, topic, PARTITIONS) as traffic, SyncAdmin(bootstrap(cluster)) as admin:
        admin.set_node_drained(victim, True)
        wait_for("a drained node that leads nothing", lambda: not leads(cluster, topic, victim) or None)
        cluster.kill(victim)
        cluster.restart(victim)
        assert [n.node for n in admin.describe_cluster().nodes if n.drained] == [victim]
        admin.create_topic(f"{topic}-new", 6)
        new = admin.describe_topic(f"{topic}-new")
        assert all(p.leader != victim for p in new.partitions)
        traffic.wait_acks(3)
        assert leads(cluster, topic, victim) == []
        admin.set_node_drained(victim, False)
        wait_for("leaderships that come back", lambda: leads(cluster, topic, victim))
        traffic.wait_acks(3)
    traffic.verify()
