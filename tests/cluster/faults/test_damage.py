"""Damaged and shared data directories: the node says what is wrong and does not start; the others go on."""

import dataclasses
import os
import socket
import subprocess
from pathlib import Path

import pytest

from chaos_tests.live.load.traffic import Traffic
from smq.coordinator.config.node_toml import load_config, write_config
from smq.testing.cluster import Cluster
from smq.testing.node_process import SERVE, wait_for
from tests.cluster.faults.store import environment, opened


def _serve_to_its_end(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVE, str(config)], check=False, capture_output=True, text=True, timeout=30)


def _flip_byte_of_last_raft_entry(data_dir: Path) -> None:
    with opened(data_dir) as env:
        table = env.open_db(b"raft_log", create=False)
        with env.begin(write=True, db=table) as txn:
            cursor = txn.cursor()
            assert cursor.last()
            key, value = bytes(cursor.key()), bytearray(cursor.value())
            value[len(value) // 2] ^= 0x10
            txn.put(key, bytes(value))


def test_a_node_with_a_flipped_byte_in_its_journal_rejoins_as_a_replaced_disk_and_keeps_its_records(
    own_cluster: Cluster,
) -> None:
    own_cluster.start()
    topic = own_cluster.make_topic()
    with Traffic(own_cluster, topic) as traffic:
        victim = next(node for node in own_cluster.nodes if node != own_cluster.wait_leader(topic, 0))
        own_cluster.kill(victim)
        _flip_byte_of_last_raft_entry(own_cluster.nodes[victim].data_dir)
        own_cluster.restart(victim)
        warnings = own_cluster.nodes[victim].raw.status().warnings
        assert "raft_log" in warnings[0]
        assert "as a replaced disk" in warnings[0]
        traffic.wait_acks(10)
    traffic.verify()


def test_truncated_data_file_is_refused_at_start_and_the_others_go_on(own_cluster: Cluster) -> None:
    own_cluster.start()
    topic = own_cluster.make_topic()
    with Traffic(own_cluster, topic) as traffic:
        victim = next(node for node in own_cluster.nodes if node != own_cluster.wait_leader(topic, 0))
        own_cluster.kill(victim)
        file = environment(own_cluster.nodes[victim].data_dir) / "data.mdb"
        os.truncate(file, file.stat().st_size // 2 // 4096 * 4096)
        ended = _serve_to_its_end(own_cluster.nodes[victim].config)
        assert ended.returncode not in (0, None)
        assert str(file.parent) in ended.stdout + ended.stderr
        traffic.wait_acks(10)


def test_a_damaged_write_ahead_file_is_refused_at_start_and_the_others_go_on(own_cluster: Cluster) -> None:
    own_cluster.start()
    topic = own_cluster.make_topic()
    with Traffic(own_cluster, topic) as traffic:
        victim = next(node for node in own_cluster.nodes if node != own_cluster.wait_leader(topic, 0))
        traffic.wait_acks(20)
        own_cluster.kill(victim)
        file = environment(own_cluster.nodes[victim].data_dir) / "data.wal"
        with file.open("r+b") as f:
            first = f.read(64)
            f.seek(0)
            f.write(bytes(byte ^ 0xFF for byte in first))
        ended = _serve_to_its_end(own_cluster.nodes[victim].config)
        assert ended.returncode not in (0, None)
        assert f"{file} is damaged" in ended.stdout + ended.stderr
        traffic.wait_acks(10)


def test_second_process_with_one_configuration_is_refused_and_the_first_goes_on(cluster: Cluster) -> None:
    node = cluster.nodes[2]
    ended = _serve_to_its_end(node.config)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stdout + ended.stderr
    assert node.raw.status().is_ready


def test_second_process_on_one_directory_is_refused_by_its_name_and_the_first_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Other ports, so that nothing but the directory is in the way."""
    node = cluster.nodes[2]
    config = load_config(node.config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = dataclasses.replace(
        config,
        peers={**config.peers, config.node_id: ("127.0.0.1", port)},
        grpc_address=("127.0.0.1", 0),
        http_address=("127.0.0.1", 0),
    )
    write_config(other, tmp_path / "node.toml")
    ended = _serve_to_its_end(tmp_path / "node.toml")
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert str(node.data_dir) in output
    assert "Traceback" not in output
    assert node.raw.status().is_ready


@pytest.mark.parametrize("file", ["data.mdb", "data.wal"])
def test_directory_and_files_are_the_owners_alone(cluster: Cluster, file: str) -> None:
    for node in cluster.alive():
        directory = environment(node.data_dir)
        assert directory.stat().st_mode & 0o077 == 0
        assert (directory / file).stat().st_mode & 0o177 == 0


def test_damaged_batch_of_a_follower_is_fetched_again_and_never_served(own_cluster: Cluster) -> None:
    own_cluster.start()
    topic = own_cluster.make_topic()
    leader = own_cluster.wait_leader(topic, 0)
    for i in range(20):
        own_cluster.nodes[leader].raw.publish_values(topic, 0, [b"value-%d" % i])
    own_cluster.wait_converged(topic, 1)
    victim = next(node for node in own_cluster.nodes if node != leader)
    own_cluster.kill(victim)
    with opened(own_cluster.nodes[victim].data_dir) as env:
        table = env.open_db(b"batches", create=False)
        with env.begin(write=True, db=table) as txn:
            cursor = txn.cursor()
            found = [(bytes(key), bytearray(value)) for key, value in cursor if b"value-7" in bytes(value)]
            ((key, value),) = found
            value[-3] ^= 0x04
            txn.put(key, bytes(value))
    own_cluster.restart(victim)
    raw = own_cluster.nodes[victim].raw
    wait_for("the damaged replica has fetched its bytes again", lambda: list(raw.fetch(topic, 0, 7).batches))
    assert raw.read_all(topic, 0) == {i: b"value-%d" % i for i in range(20)}


def test_follower_with_an_emptied_directory_is_filled_again_by_the_others(own_cluster: Cluster) -> None:
    """What docs/operations.md says to do with a node whose journal is damaged, while both others are up."""
    own_cluster.start()
    topic = own_cluster.make_topic()
    with Traffic(own_cluster, topic) as traffic:
        busy = {own_cluster.wait_leader(topic, 0), own_cluster.raft_leader()}
        victim = next(node for node in own_cluster.nodes if node not in busy)
        own_cluster.kill(victim)
        data_dir = own_cluster.nodes[victim].data_dir
        data_dir.rename(data_dir.with_name("data.damaged"))
        own_cluster.restart(victim)
        traffic.wait_acks(5)
    traffic.verify()
