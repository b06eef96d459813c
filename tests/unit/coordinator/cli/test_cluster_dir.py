"""A cluster's directory: the same directory is the same cluster, on the ports asked for."""

import json
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from smq.coordinator.cli.cluster_dir import Ports, find_nodes, free_ports, hold_directory, prepare_cluster
from smq.coordinator.cli.root import cli
from smq.coordinator.cli.starting import remove_ready_file, write_ready_file
from smq.coordinator.config.node_toml import ServerConfig, load_config
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.cluster_config import AUTO_CREATE, GROUP_INITIAL_DELAY_MS
from smq.replication.net.listening import bind_listener


def prepared(directory: Path, nodes: int = 3, **ports: int) -> list[ServerConfig]:
    return [load_config(path) for path in prepare_cluster(directory, nodes, Ports(**ports))]


def test_a_new_cluster_gets_one_id_and_default_ports_ten_apart(tmp_path: Path) -> None:
    configs = prepared(tmp_path)
    assert [c.node_id for c in configs] == [1, 2, 3]
    assert len({c.cluster_id for c in configs}) == 1
    assert [c.grpc_address[1] for c in configs] == [7401, 7411, 7421]
    assert [c.http_address[1] for c in configs] == [7402, 7412, 7422]
    assert all(c.peers == configs[0].peers for c in configs)
    assert len({port for _, port in configs[0].peers.values()}) == 3
    assert [c.data_dir for c in configs] == [tmp_path / f"node-{n}" / "data" for n in (1, 2, 3)]
    assert [p.parent.name for p in find_nodes(tmp_path)] == ["node-1", "node-2", "node-3"]


def test_every_node_gets_a_kafka_port_and_creates_topics_on_first_use(tmp_path: Path) -> None:
    configs = prepared(tmp_path / "default")
    assert [c.kafka_address for c in configs] == [("127.0.0.1", port) for port in (9092, 9102, 9112)]
    assert all(c.settings == {AUTO_CREATE: "true", GROUP_INITIAL_DELAY_MS: "0"} for c in configs)
    moved = prepared(tmp_path / "default", kafka=9500)
    assert [c.kafka_address for c in moved] == [("127.0.0.1", port) for port in (9500, 9510, 9520)]


def test_settings_given_once_stay_and_others_can_follow(tmp_path: Path) -> None:
    def settings(**given: str) -> dict[str, str]:
        changes = {key.replace("_", "."): value for key, value in given.items()}
        (path,) = prepare_cluster(tmp_path, 1, Ports(), settings=changes)
        return load_config(path).settings

    first = settings(num_partitions="4", group_initial_rebalance_delay_ms="3000")
    assert first == {AUTO_CREATE: "true", GROUP_INITIAL_DELAY_MS: "3000", "num.partitions": "4"}
    assert settings() == first
    assert settings(num_partitions="2") == first | {"num.partitions": "2"}
    with pytest.raises(ConfigError, match=r"num\.partitions must be .*, not '0'"):
        settings(num_partitions="0")
    with pytest.raises(ConfigError, match="the same on all nodes"):
        settings(offsets_retention_minutes="1")
    assert settings() == first | {"num.partitions": "2"}


def test_kafka_ports_are_free_ones_if_the_others_are(tmp_path: Path) -> None:
    ports = [c.kafka_address[1] for c in prepared(tmp_path, grpc=0, http=0) if c.kafka_address]
    assert len(set(ports)) == 3
    assert not {0, 9092, 9102, 9112} & set(ports)
    assert [c.kafka_address[1] for c in prepared(tmp_path) if c.kafka_address] == ports


def test_a_directory_from_before_gets_a_kafka_port(tmp_path: Path) -> None:
    for path in prepare_cluster(tmp_path, 1, Ports()):
        path.write_text("\n".join(line for line in path.read_text().splitlines() if "kafka" not in line))
    assert load_config(find_nodes(tmp_path)[0]).kafka_address is None
    assert prepared(tmp_path, 1)[0].kafka_address == ("127.0.0.1", 9092)


def test_racks_are_one_per_node_and_stay_until_others_are_named(tmp_path: Path) -> None:
    def racks(*named: str) -> list[str]:
        return [load_config(path).rack for path in prepare_cluster(tmp_path, 3, Ports(), racks=named)]

    assert racks() == ["", "", ""]
    assert racks("a", "b", "b") == ["a", "b", "b"]
    assert racks() == ["a", "b", "b"]
    with pytest.raises(ConfigError, match="--racks names 2: name one for each of the 3 nodes"):
        racks("a", "b")
    for wrong, says in (("x" * 256, "rack has 256 bytes"), ("\udcff", "must be valid Unicode")):
        with pytest.raises(ConfigError, match=says):
            racks("a", "b", wrong)
    assert racks() == ["a", "b", "b"]


def test_the_same_directory_is_the_same_cluster_on_the_same_ports(tmp_path: Path) -> None:
    first = prepared(tmp_path, grpc=0, http=0)
    assert prepared(tmp_path) == first


def test_the_same_directory_moves_to_new_ports_if_asked(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    second = prepared(tmp_path, grpc=9000)
    assert [c.grpc_address[1] for c in second] == [9000, 9010, 9020]
    assert [c.http_address for c in second] == [c.http_address for c in first]
    assert [c.cluster_id for c in second] == [c.cluster_id for c in first]
    third = prepared(tmp_path, grpc=0, http=0)
    assert {c.cluster_id for c in third} == {first[0].cluster_id}
    taken = (
        [c.grpc_address[1] for c in third]
        + [c.http_address[1] for c in third]
        + [port for _, port in third[0].peers.values()]
    )
    assert len(set(taken)) == 9


def test_a_directory_may_be_moved(tmp_path: Path) -> None:
    first = prepared(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    second = prepared(tmp_path / "b")
    assert second[0].data_dir == tmp_path / "b" / "node-1" / "data"
    assert second[0].cluster_id == first[0].cluster_id


@pytest.mark.parametrize(
    ("nodes", "ports", "says"),
    [
        (0, {}, "1 to 9"),
        (10, {}, "1 to 9"),
        (3, {"grpc": -1}, "--grpc-port is -1"),
        (3, {"http": 65535}, "--http-port is 65535"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(
    tmp_path: Path, nodes: int, ports: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path / "d", nodes, **ports)
    assert not (tmp_path / "d").exists()


def test_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    with pytest.raises(ConfigError, match=r"cluster of 3 nodes, not 1.*--nodes 3"):
        prepared(tmp_path, 1)


def test_a_directory_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    with hold_directory(tmp_path / "d"):
        second = hold_directory(tmp_path / "d")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            second.__enter__()
    with hold_directory(tmp_path / "d"):
        pass


def test_a_refusal_takes_a_new_directory_away_again_and_leaves_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for directory in (tmp_path / "new" / "d", tmp_path / "old"):
        with pytest.raises(ConfigError, match="--grpc-port is -1"), hold_directory(directory):
            prepared(directory, 3, grpc=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    prepared(tmp_path / "kept")
    with pytest.raises(ConfigError, match="--nodes 3"), hold_directory(tmp_path / "kept"):
        prepared(tmp_path / "kept", 1)
    prepared(tmp_path / "kept")


def test_free_ports_are_distinct_and_for_a_listener_alone() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as another choice does
        bind_listener("127.0.0.1", port).close()


def test_a_ready_file_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    remove_ready_file(path)
    assert not path.exists()
    write_ready_file(path, [{"id": 1, "pid": os.getpid()}])
    assert json.loads(path.read_text()) == {"nodes": [{"id": 1, "pid": os.getpid()}]}
    assert os.listdir(tmp_path) == ["ready.json"]
    write_ready_file(None, [])


# ------------------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--config", "absent.toml"], 2, "cannot read absent.toml"),
        (["serve"], 2, "--config"),
        (["cluster"], 2, "--data-dir"),
        (["cluster", "--nodes", "0", "--data-dir", "d"], 2, "--nodes"),
        (["cluster", "--nodes", "3", "--data-dir", "d", "--grpc-port", "-2"], 2, "--grpc-port is -2"),
        (["dev", "--http-port", "70000"], 2, "--http-port is 70000"),
        (["fly"], 2, "No such command 'fly'."),
        (["staus"], 2, "No such command 'staus': did you mean 'status'?"),
        (["topics"], 2, "did you mean 'topic'?"),
        (["topic", "lst"], 2, "did you mean 'list'?"),
        (["topic", "list", "--bootstrap", "a.invalid:7401"], 1, "the name 'a.invalid' cannot be resolved"),
    ],
)
def test_a_users_error_is_a_sentence_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert "Traceback" not in result.output


def test_a_config_that_others_could_reach_is_refused_with_the_reason(tmp_path: Path) -> None:
    (path, *_) = prepare_cluster(tmp_path, 1, Ports())
    path.write_text(path.read_text().replace("127.0.0.1", "0.0.0.0"))
    result = CliRunner().invoke(cli, ["serve", "--config", str(path)])
    assert result.exit_code == 2
    assert "without TLS any client that reaches that port could read and delete everything" in result.output
    assert "--insecure" in result.output


def test_a_port_that_is_taken_is_reported_with_advice(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["dev", "--data-dir", str(tmp_path), "--http-port", str(port), "--grpc-port", "0"]
        result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 98
    assert f"cannot listen on 127.0.0.1:{port} for HTTP" in result.output
    assert "choose another port" in result.output


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.output.partition("Commands:")[2].splitlines() if line.strip()}
    known = "cert cluster consume dev disk group node offsets produce serve status topic"
    assert listed >= set(known.split())


def test_a_later_start_keeps_listeners_and_the_files_that_an_operator_has_named(tmp_path: Path) -> None:
    prepared(tmp_path, 1)
    (path,) = find_nodes(tmp_path)
    more = """
[http]
metrics = "token"
token_file = "token"
[listeners.outside]
kafka_address = "127.0.0.1:9494"
kafka_advertised = "kafka.example.org:9094"
certificate = "out/tls.crt"
key = "out/tls.key"
[tls]
ca = "../tls/ca.crt"
certificate = "../tls/tls.crt"
key = "/etc/smq/tls.key"
"""
    path.write_text(path.read_text() + more)
    before = load_config(path)
    prepared(tmp_path, 1)
    after = load_config(path)
    assert after.listeners["outside"].kafka_advertised == ("kafka.example.org", 9094)
    for config in (before, after):
        assert config.http.token_file is not None
        assert config.http.token_file.resolve() == path.parent / "token"
        certificate = config.listeners["outside"].certificate
        assert certificate is not None
        assert certificate.resolve() == path.parent / "out/tls.crt"
        assert config.tls is not None
        assert (config.tls.ca.resolve(), config.tls.key.resolve()) == (
            tmp_path / "tls/ca.crt",
            Path("/etc/smq/tls.key"),
        )
