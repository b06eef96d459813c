"""A cluster of nodes with SQLite for a store: what holds with LMDB holds with it, and a node may change its store."""

import signal
from pathlib import Path

from chaos_tests.live.load.traffic import Traffic
from smq.replication.storage.engine import Engine, engine_of
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli


def test_a_killed_node_of_a_cluster_on_sqlite_loses_nothing_and_comes_back_on_lmdb(own_cluster: Cluster) -> None:
    cluster = own_cluster.start("--storage-engine", "sqlite")
    assert {engine_of(node.data_dir) for node in cluster.nodes.values()} == {Engine.SQLITE}
    topic = cluster.make_topic()
    with Traffic(cluster, topic) as traffic:
        traffic.wait_acks(20)
        victim = cluster.wait_leader(topic, 0)
        cluster.kill(victim)
        cluster.wait_leader(topic, 0, other_than=victim)
        traffic.wait_acks(10)
        cluster.restart(victim)
        traffic.wait_acks(10)
        cluster.kill(victim)  # with rounds that only its write-ahead file has
        _change_store(cluster, victim)
        cluster.restart(victim)
        traffic.wait_acks(10)
    traffic.verify()
    cluster.wait_digests_equal()
    assert engine_of(cluster.nodes[victim].data_dir) is Engine.LMDB


def _change_store(cluster: Cluster, number: int) -> None:
    """As docs/operations.md says."""
    node = cluster.nodes[number]
    old = node.data_dir.rename(node.data_dir.with_name("old"))
    copied = run_cli("disk", "copy", str(old), str(node.data_dir), "--engine", "lmdb")
    assert copied.returncode == 0, copied.stderr
    config = Path(node.config)
    text = config.read_text()
    assert 'storage_engine = "sqlite"' in text
    cluster.run(number)  # with the old setting, it is refused
    assert node.process is not None
    assert node.process.wait(60) not in (0, -signal.SIGKILL)
    assert f"smq disk copy {node.data_dir}" in node.log.read_text()
    config.write_text(text.replace('storage_engine = "sqlite"', 'storage_engine = "lmdb"'))
