"""Damaged and shared data directories: the node says what is wrong and does not start; the others go on."""

import dataclasses
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos_tests.live.load.traffic import Traffic
from smq.coordinator.config.node_toml import load_config, write_config
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import SERVE, wait_for
from tests.cluster.faults.store import environment, opened


@pytest.fixture(scope="module")
def damaged_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each test leaves it whole again."""
    with live_cluster(tmp_path_factory.mktemp("damaged")) as made:
        yield made


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


def _bystander(cluster: Cluster, topic: str) -> int:
    """A node that leads neither the topic nor Raft."""
    busy = {cluster.wait_leader(topic, 0), cluster.raft_leader()}
    return next(node for node in cluster.nodes if node not in busy)


def test_a_node_with_a_flipped_byte_in_its_journal_rejoins_as_a_replaced_disk_and_keeps_its_records(
    damaged_cluster: Cluster,
) -> None:
    topic = damaged_cluster.make_topic()
    with Traffic(damaged_cluster, topic) as traffic:
        victim = _bystander(damaged_cluster, topic)
        damaged_cluster.kill(victim)
        _flip_byte_of_last_raft_entry(damaged_cluster.nodes[victim].data_dir)
        damaged_cluster.restart(victim)
        warnings = damaged_cluster.nodes[victim].raw.status().warnings
        assert "raft_log" in warnings[0]
        assert "as a replaced disk" in warnings[0]
        traffic.wait_acks(10)
    traffic.verify()


def _truncate(directory: Path) -> str:
    """The index, of which the log no longer has everything: its first file is gone."""
    (directory / "log" / "0000000001.log").unlink(missing_ok=True)  # the collection may have been there before
    file = directory / "data.mdb"
    os.truncate(file, file.stat().st_size // 2 // 4096 * 4096)
    return str(directory)


def _scramble(directory: Path) -> str:
    file = max((directory / "log").glob("*.log"))
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 4096):  # one of these pages begins the first round that the index does not have
        data[at : at + 64] = bytes(byte ^ 0xFF if byte else 0 for byte in data[at : at + 64])
    file.write_bytes(data)
    return f"{file} is damaged"


@pytest.mark.parametrize("damage", [_truncate, _scramble])
def test_a_damaged_file_is_refused_at_start_and_the_others_go_on_and_fill_an_emptied_directory(
    damaged_cluster: Cluster, damage: Callable[[Path], str]
) -> None:
    topic = damaged_cluster.make_topic()
    with Traffic(damaged_cluster, topic) as traffic:
        traffic.wait_acks(20)
        victim = damaged_cluster.nodes[_bystander(damaged_cluster, topic)]
        damaged_cluster.kill(victim.id)
        says = damage(environment(victim.data_dir))
        ended = _serve_to_its_end(victim.config)
        assert ended.returncode not in (0, None)
        assert says in ended.stdout + ended.stderr
        traffic.wait_acks(10)
        victim.data_dir.rename(victim.data_dir.with_name(f"before-{topic}"))  # as docs/operations.md says
        damaged_cluster.restart(victim.id)
        traffic.wait_acks(5)
    traffic.verify()


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


def test_directory_and_files_are_the_owners_alone(cluster: Cluster) -> None:
    for node in cluster.alive():
        directory = environment(node.data_dir)
        assert directory.stat().st_mode & 0o077 == 0
        assert (directory / "log").stat().st_mode & 0o077 == 0
        assert all(file.stat().st_mode & 0o177 == 0 for file in (directory / "log").iterdir())
        assert (directory / "data.mdb").stat().st_mode & 0o177 == 0


def test_damaged_batch_of_a_follower_is_fetched_again_and_never_served(damaged_cluster: Cluster) -> None:
    topic = damaged_cluster.make_topic()
    leader = damaged_cluster.wait_leader(topic, 0)
    for i in range(20):
        damaged_cluster.nodes[leader].raw.publish_values(topic, 0, [b"value-%d" % i])
    damaged_cluster.wait_converged(topic, 1)
    victim = next(node for node in damaged_cluster.nodes if node != leader)
    damaged_cluster.kill(victim)
    with opened(damaged_cluster.nodes[victim].data_dir):
        pass  # the index has everything
    logs = (environment(damaged_cluster.nodes[victim].data_dir) / "log").iterdir()
    found = [log for log in logs if b"value-7" in log.read_bytes()]  # one more if the collection has copied it
    assert found
    for file in found:
        data = bytearray(file.read_bytes())
        data[data.index(b"value-7") + 3] ^= 0x04
        file.write_bytes(data)
    damaged_cluster.restart(victim)
    raw = damaged_cluster.nodes[victim].raw
    wait_for("the damaged replica has fetched its bytes again", lambda: list(raw.fetch(topic, 0, 7).batches))
    assert raw.read_all(topic, 0) == {i: b"value-%d" % i for i in range(20)}
