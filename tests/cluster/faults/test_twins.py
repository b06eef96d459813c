"""Two real processes with one node id: the mistaken one ends and says why, also if it came first."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.config.node_toml import load_config, write_config
from smq.coordinator.user_errors import EXIT_FATAL
from smq.raft_state.ids import NodeId
from smq.testing.cluster import Cluster
from smq.testing.node_process import SERVE, end, wait_for


def _twin_config(config: Path, directory: Path) -> Path:
    """As the node's, written for another machine: all addresses are that machine's, and the disk is new."""
    known = load_config(config)
    nodes, grpc, http, kafka = (("127.0.0.1", port) for port in free_ports(4))
    peers: dict[NodeId, Address] = {**known.peers, known.node_id: nodes}
    directory.mkdir()
    path = directory / "node.toml"
    twin = replace(known, peers=peers, grpc_address=grpc, http_address=http, kafka_address=kafka, data_dir=Path("data"))
    write_config(twin, path)
    return path


@contextmanager
def _running(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    with config.with_name("log").open("wb") as log:
        process = subprocess.Popen(
            [*SERVE, str(config), "--first-start"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def _assert_refused(twin: subprocess.Popen[bytes], config: Path, node: int, home: str) -> None:
    wait_for("the end of the twin", lambda: twin.poll() is not None)
    log = config.with_name("log").read_text()
    assert twin.returncode == EXIT_FATAL, log
    assert f"refuses this process of node {node}: another process is node {node}, at {home}, where node" in log
    assert "and this one connects from 127.0.0.1:" in log


@pytest.mark.parametrize("node", [1, 3])
def test_a_twin_that_starts_before_all_nodes_on_fresh_disks_ends_and_they_serve(
    own_cluster: Cluster, tmp_path: Path, node: int
) -> None:
    """Node 1 dials all others, and node 3 none."""
    own_cluster.start()
    own_cluster.kill(*own_cluster.nodes)
    for each in own_cluster.nodes.values():
        each.data_dir.rename(each.data_dir.with_name("before"))
    own_cluster.ask_first_start()
    config = _twin_config(own_cluster.nodes[node].config, tmp_path / "twin")
    home = format_address(load_config(own_cluster.nodes[node].config).peers[NodeId(node)])
    with _running(config) as twin:
        wait_for("the twin serves", lambda: '"serving"' in config.with_name("log").read_text())
        own_cluster.restart(node, wait=False)
        own_cluster.restart(*(n for n in own_cluster.nodes if n != node))
        _assert_refused(twin, config, node, home)
    topic = own_cluster.make_topic()
    leader = own_cluster.nodes[own_cluster.wait_leader(topic, 0)].raw
    assert leader.publish_values(topic, 0, [b"one"]).base_offset == 0
    own_cluster.wait_digests_equal()

    logs = {n: len(each.log.read_bytes()) for n, each in own_cluster.nodes.items()}
    with _running(config) as twin:  # now it comes later
        _assert_refused(twin, config, node, home)
    for n, each in own_cluster.nodes.items():
        assert b"session_replaced" not in each.log.read_bytes()[logs[n] :], f"node {n}"
    assert leader.publish_values(topic, 0, [b"two"]).base_offset == 1
