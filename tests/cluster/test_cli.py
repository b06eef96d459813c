"""The `smq` command on real nodes: what a newcomer types, and what a script relies on."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.coordinator.cli.cluster_dir import Ports, find_nodes, free_ports, prepare_cluster
from smq.testing.cluster import Cluster
from smq.testing.node_process import CLI, end, run_cli, tail, wait_for

SECONDS = 60  # for a node to be ready on a busy machine


class Foreground:
    """`smq ARGUMENTS` in the foreground, with a ready file."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.ready = directory / "ready.json"
        self.log = directory / "foreground.log"
        command = [*CLI, *arguments, "--ready-file", str(self.ready)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=directory, start_new_session=True)

    def nodes(self) -> list[dict[str, object]]:
        def found() -> list[dict[str, object]]:
            assert self.process.poll() is None, tail(self.log)
            return list(json.loads(self.ready.read_text())["nodes"]) if self.ready.exists() else []

        return wait_for("the ready file", found, SECONDS)

    def stop(self) -> int:
        """Sends Ctrl-C and returns the exit code. Removes the ready file, so that the next start's is not mistaken."""
        end(self.process)
        self.ready.unlink(missing_ok=True)
        return self.process.returncode


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Foreground]:
    running = Foreground(tmp_path, "dev", "--grpc-port", "0", "--http-port", "0")
    yield running
    running.stop()


def test_dev_takes_and_gives_records_as_a_newcomer_types_it_and_keeps_them_over_a_restart(
    dev: Foreground, tmp_path: Path
) -> None:
    bootstrap = ("--bootstrap", str(dev.nodes()[0]["grpc"]))
    assert run_cli("topic", "create", "greetings", *bootstrap).returncode == 0
    sent = run_cli("produce", "greetings", *bootstrap, input="hello\nworld\n")
    assert sent.returncode == 0, sent.stderr
    exact = ("--json", "--offset-type", "exact_offset", "--offset-value", "1")
    (record,) = map(json.loads, run_cli("consume", "greetings", *exact, *bootstrap).stdout.splitlines())
    assert (record["offset"], record["value"]) == (1, "world")
    assert "greetings" in run_cli("topic", "list", *bootstrap).stdout
    status = run_cli("status", *bootstrap)
    assert (status.returncode, str(dev.nodes()[0]["kafka"]) in status.stdout) == (0, True)
    assert (tmp_path / "smq-data").is_dir()
    assert dev.stop() == 0
    again = Foreground(tmp_path, "dev", "--grpc-port", "0", "--http-port", "0")
    try:
        read = run_cli("consume", "greetings", "--bootstrap", str(again.nodes()[0]["grpc"]))
        assert (read.returncode, read.stdout) == (0, "hello\nworld\n")
    finally:
        again.stop()


def test_ephemeral_dev_leaves_nothing_behind(tmp_path: Path) -> None:
    running = Foreground(tmp_path, "dev", "--ephemeral", "--grpc-port", "0", "--http-port", "0")
    data_dir = Path(str(running.nodes()[0]["data_dir"]))
    assert data_dir.is_dir()
    assert running.stop() == 0
    assert not data_dir.exists()
    assert not (tmp_path / "smq-data").exists()


def test_cluster_on_the_same_directory_is_the_same_cluster_on_new_ports(tmp_path: Path) -> None:
    arguments = ("cluster", "--nodes", "3", "--data-dir", "D", "--grpc-port", "0", "--http-port", "0")
    first = Foreground(tmp_path, *arguments)
    try:
        nodes = first.nodes()
        assert [node["id"] for node in nodes] == [1, 2, 3]
        assert all((tmp_path / "D" / f"node-{n}" / "node.toml").is_file() for n in (1, 2, 3))
        bootstrap = ",".join(str(node["grpc"]) for node in nodes)
        run_cli("topic", "create", "same", "--bootstrap", bootstrap)
        run_cli("produce", "same", "--bootstrap", bootstrap, input="stays\n")
    finally:
        assert first.stop() == 0
    again = Foreground(tmp_path, *arguments)
    try:
        moved = again.nodes()
        assert not {node["pid"] for node in moved} & {node["pid"] for node in nodes}
        read = run_cli("consume", "same", "--bootstrap", str(moved[0]["grpc"]))
        assert read.stdout == "stays\n"
    finally:
        assert again.stop() == 0


def test_stale_ready_file_is_removed_at_start(tmp_path: Path) -> None:
    """The start fails, so no new file takes its place: a script that waits for a node must not find the old one."""
    stale = tmp_path / "ready.json"
    stale.write_text("stale")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failed = run_cli("dev", "--ephemeral", "--grpc-port", port, "--http-port", "0", "--ready-file", str(stale))
    assert failed.returncode != 0
    assert not stale.exists()


def test_a_child_that_dies_is_reported_with_advice_and_not_restarted(own_cluster: Cluster) -> None:
    own_cluster.start()
    pid = own_cluster.nodes[2].pid
    own_cluster.kill(2)
    log = own_cluster.root / "cluster.log"
    wait_for("the report of the dead child", lambda: f"pid {pid}" in tail(log) and "SIGKILL" in tail(log))
    assert "smq serve --config" in tail(log)
    assert not own_cluster.nodes[2].is_alive()
    own_cluster.restart(2)  # by `serve`, as the report says
    own_cluster.signal(3, signal.SIGBUS)  # as LMDB's map over a failing disk ends a process
    own_cluster.wait_dead(3)
    wait_for("the report of the dead child", lambda: "SIGBUS" in tail(log))
    assert "move its data directory away" in tail(log)
    assert "Fatal Python error: Bus error" in own_cluster.nodes[3].log.read_text()


def test_serve_ends_cleanly_on_sigterm_also_if_it_comes_twice(fault_cluster: Cluster) -> None:
    """As timeout(1) sends it. The second one ended the node without its hand-over."""
    fault_cluster.kill(3)
    fault_cluster.restart(3)
    process = fault_cluster.nodes[3].process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


NODE_TOML = {
    "node_id": "1",
    "cluster_id": '"x"',
    "data_dir": '"deep/data"',
    "grpc_address": '"127.0.0.1:0"',
    "kafka_address": '"127.0.0.1:0"',
    "http_address": '"127.0.0.1:0"',
}


def write_node_toml(path: Path, tables: str = "", **changed: str) -> None:
    settings = "".join(f"{key} = {value}\n" for key, value in (NODE_TOML | changed).items())
    peers = "" if "[peers]" in tables else f'[peers]\n1 = "127.0.0.1:{free_ports(1)[0]}"\n'
    path.write_text(f"{settings}{peers}{tables}")


@pytest.mark.parametrize(
    ("changed", "tables", "says"),
    [
        ({"grpc_address": '"127.0.0.1:TAKEN"'}, "", "cannot listen"),
        ({"http_address": '"127.0.0.1:TAKEN"'}, "", "cannot listen"),
        ({"kafka_address": '"127.0.0.1:TAKEN"'}, "", "cannot listen"),
        ({}, '[peers]\n1 = "127.0.0.1:TAKEN"\n', "cannot listen"),
        ({}, '[tls]\nca = "no.pem"\ncertificate = "no.pem"\nkey = "no.pem"\n', "[tls]"),
        ({}, "[tuning]\nraft_heartbeat_ms = 1000\n", "contradict"),
    ],
)
def test_a_refused_serve_leaves_nothing_behind(
    tmp_path: Path, taken_port: int, changed: dict[str, str], tables: str, says: str
) -> None:
    changed = {key: value.replace("TAKEN", str(taken_port)) for key, value in changed.items()}
    write_node_toml(tmp_path / "node.toml", tables.replace("TAKEN", str(taken_port)), **changed)
    result = run_cli("serve", "--config", str(tmp_path / "node.toml"))
    assert result.returncode != 0
    assert says in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["node.toml"]


@pytest.mark.parametrize(
    ("command", "port", "tls"),
    [
        ("cluster", "--grpc-port", ()),
        ("cluster", "--http-port", ("--tls",)),
        ("dev", "--kafka-port", ("--tls",)),
    ],
)
def test_a_start_at_a_taken_port_leaves_nothing_behind(
    tmp_path: Path, taken_port: int, command: str, port: str, tls: tuple[str, ...]
) -> None:
    ports = {"--grpc-port": 0, "--http-port": 0, "--kafka-port": 0} | {port: taken_port}
    arguments = [str(word) for pair in ports.items() for word in pair]
    result = run_cli(command, "--data-dir", str(tmp_path / "deep" / "d"), *arguments, *tls)
    assert result.returncode == 98
    assert f"cannot listen on 127.0.0.1:{taken_port}" in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_refused_change_of_ports_leaves_the_cluster_where_it_was(tmp_path: Path, taken_port: int) -> None:
    before = [path.read_text() for path in prepare_cluster(tmp_path, 3, Ports(grpc=0, http=0, kafka=0))]
    result = run_cli("cluster", "--data-dir", str(tmp_path), "--http-port", str(taken_port))
    assert result.returncode == 98
    assert f"cannot listen on 127.0.0.1:{taken_port} for HTTP" in result.stderr
    assert [path.read_text() for path in find_nodes(tmp_path)] == before
    assert not list(tmp_path.glob("node-*/data"))
