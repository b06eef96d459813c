"""node.toml: a written file reads back the same, and mistakes are named."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from smq.coordinator.config.node_toml import ServerConfig, dump_config, load_config, parse_config, write_config
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.ids import NodeId
from tests.pages import claimed

GOOD = """
node_id = 1
cluster_id = "c"
data_dir = "data"
[peers]
1 = "127.0.0.1:9001"
2 = "127.0.0.1:9002"
"""


def parse(text: str) -> ServerConfig:
    return parse_config(text, base_dir=Path("/d"))


def test_a_minimal_file_gets_loopback_addresses_and_defaults() -> None:
    config = parse(GOOD)
    assert config.peers == {1: ("127.0.0.1", 9001), 2: ("127.0.0.1", 9002)}
    assert config.data_dir == Path("/d/data")
    assert (config.grpc_address, config.http_address) == (("127.0.0.1", 0), ("127.0.0.1", 0))


def test_without_a_kafka_address_there_is_no_listener_and_topics_are_not_created_on_use() -> None:
    config = parse(GOOD)
    assert (config.kafka_address, config.settings) == (None, {})
    assert config.node_config(grpc_address=("a", 1), http_address=("a", 2)).kafka_address == ""


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = ServerConfig(
        node_id=NodeId(3),
        cluster_id='a "quoted" \\ name',
        data_dir=tmp_path / "data",
        peers={NodeId(3): ("::1", 9003), NodeId(1): ("localhost", 9001)},
        grpc_address=("127.0.0.1", 7401),
        kafka_address=("::1", 9092),
        rack='a "quoted" place',
        settings={"num.partitions": "4", "auto.create.topics.enable": "true", "default.replication.factor": "-1"},
        request_bytes_max=2 << 20,
        tuning={"session_timeout_ms": 900},
    )
    path = tmp_path / "node.toml"
    write_config(config, path)
    assert load_config(path) == config
    assert parse_config(dump_config(config), base_dir=tmp_path) == config


def test_settings_have_kafkas_names_with_or_without_quotes() -> None:
    expected = {"num.partitions": "4", "auto.create.topics.enable": "true"}
    assert parse(GOOD + "[settings]\nnum.partitions = 4\nauto.create.topics.enable = true\n").settings == expected
    quoted = '[settings]\n"num.partitions" = 4\n"auto.create.topics.enable" = true\n'
    assert parse(GOOD + quoted).settings == expected
    assert parse(GOOD + '[settings]\nnum.partitions = "4"\n').settings == {"num.partitions": "4"}


def test_rack_reaches_the_node() -> None:
    ports: dict[str, Any] = {"grpc_address": ("127.0.0.1", 1), "http_address": ("127.0.0.1", 2)}
    assert parse('rack = "a"\n' + GOOD).node_config(**ports).rack == "a"
    assert parse(GOOD).node_config(**ports).rack == ""


def test_tuning_reaches_the_node() -> None:
    node = parse(GOOD + "[tuning]\nsession_timeout_ms = 900\n").node_config(
        grpc_address=("127.0.0.1", 1), http_address=("127.0.0.1", 2)
    )
    assert (node.session_timeout_ms, node.grpc_address, node.http_address) == (900, "127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 1\n" + GOOD, "unknown settings: colour; known are audit, cluster_id, data_dir"),
        (GOOD + "[tuning]\nspeed = 9\n", r"unknown settings under \[tuning\]: speed; known are .*session_timeout_ms"),
        (GOOD + "[tuning]\nsession_timeout_ms = true\n", "whole number"),
        (GOOD.replace("node_id = 1", ""), "node_id is missing"),
        (GOOD.replace("node_id = 1", "node_id = 0"), "must be 1 to"),
        (GOOD.replace("node_id = 1", 'node_id = "1"'), "whole number"),
        (GOOD.replace("node_id = 1", "node_id = 7"), "must name this node too"),
        (GOOD.replace('cluster_id = "c"', 'cluster_id = ""'), "must not be empty"),
        (GOOD.replace("127.0.0.1:9001", "127.0.0.1"), "host:port"),
        (GOOD.replace("127.0.0.1:9001", "127.0.0.1:99999"), "host:port"),
        (GOOD.replace("127.0.0.1:9001", "127.0.0.1:0"), "needs a fixed port"),
        (GOOD.replace("1 = ", "one = "), "keys are node ids"),
        ('grpc_address = "0.0.0.0:7401"\n' + GOOD, "not a loopback address.*insecure"),
        ('kafka_address = "0.0.0.0:9092"\n' + GOOD, "not a loopback address"),
        ('http_address = "example.org:80"\n' + GOOD, "not a loopback address"),
        (GOOD.replace("127.0.0.1:9001", "10.0.0.1:9001"), "peers.1 is 10.0.0.1:9001, which is not a loopback"),
        ("request_bytes_max = 1\n" + GOOD, "request_bytes_max"),
        ('insecure = "yes"\n' + GOOD, "true or false"),
        ("rack = 1\n" + GOOD, "rack is 1: it must be a string"),
        (f'rack = "{"x" * 256}"\n' + GOOD, "rack has 256 bytes: it must have at most 255"),
        ("this is not toml", "not valid TOML"),
        ("peers = 3\n" + GOOD.split("[peers]")[0], "must be a table"),
        (GOOD + "[settings]\nnum.partitions = 0\n", "num.partitions must be a whole number from 1 to 10000, not '0'"),
        (GOOD + "[settings]\nauto.create.topics.enable = 1\n", "auto.create.topics.enable must be true or false, not"),
        (GOOD + "[settings]\nno.such = 1\n", "unknown setting 'no.such': known are num.partitions"),
        (GOOD + "[settings]\noffsets.retention.minutes = 1\n", "the same on all nodes: set it with `smq config set"),
    ],
)
def test_wrong_settings_are_refused_and_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


TLS = '\n[tls]\nca = "tls/ca.crt"\ncertificate = "tls/tls.crt"\nkey = "/k/tls.key"\n'
OPEN = {
    "grpc_address": 'grpc_address = "0.0.0.0:7401"\ngrpc_advertised = "a:7401"\n' + GOOD,
    "http_address": 'http_address = "[::]:7402"\nhttp_advertised = "a:7402"\n' + GOOD,
    "kafka_address": 'kafka_address = "10.1.2.3:9092"\n' + GOOD,
    "peers.1": GOOD.replace("127.0.0.1:9001", "example.org:9001"),
}


@pytest.mark.parametrize("listener", OPEN)
def test_every_listener_refuses_other_machines_without_tls(listener: str) -> None:
    says = f"{listener} is .*not a loopback address: without TLS any client .*smq cert.*insecure = true"
    with pytest.raises(ConfigError, match=says):
        parse(OPEN[listener])
    parse("insecure = true\n" + OPEN[listener])
    parse(OPEN[listener] + TLS)


@pytest.mark.parametrize("listener", OPEN)
def test_tls_without_client_certificates_opens_only_the_port_of_the_nodes(listener: str) -> None:
    text = OPEN[listener] + TLS + "client_certificates = false\n"
    if listener.startswith("peers."):
        parse(text)  # between nodes both sides show a certificate, whatever clients do
        return
    with pytest.raises(ConfigError, match=f"{listener} is .*admits any client.*client_certificates = true"):
        parse(text)
    parse("insecure = true\n" + text)


def test_tls_files_are_relative_to_the_configuration() -> None:
    tls = parse(GOOD + TLS).tls
    assert tls is not None
    assert (tls.ca, tls.key) == (Path("/d/tls/ca.crt"), Path("/k/tls.key"))
    assert tls.client_certificates


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('[tls]\nca = "a"\nkey = "k"\n', "tls.certificate is missing"),
        (TLS + "verify = false\n", r"unknown settings under \[tls\]: verify"),
        (TLS + 'client_certificates = "no"\n', "true or false"),
        ("tls = 1\n" + GOOD, r"must be a table"),
    ],
)
def test_wrong_tls_settings_are_refused_and_named(table: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(table if table.startswith("tls =") else GOOD + "\n" + table)


def test_insecure_allows_addresses_that_others_reach() -> None:
    text = GOOD.replace("127.0.0.1:9001", "10.0.0.1:9001")
    assert parse("insecure = true\n" + text).peers[NodeId(1)] == ("10.0.0.1", 9001)
    assert parse_config(text, base_dir=Path("/d"), insecure=True).insecure


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml.*--config"):
        load_config(tmp_path / "absent.toml")


PAGES = {"docs/addresses.md": 3, "docs/security.md": 3, "deploy/README.md": 1}


@pytest.mark.parametrize(("page", "number"), [(page, i) for page, count in PAGES.items() for i in range(count)])
def test_the_files_of_the_pages_are_read(page: str, number: int) -> None:
    """Some show a part of a file: the rest of it is added."""
    found = claimed(page, __file__)
    assert len(found) == PAGES[page]
    given = tomllib.loads(found[number])
    rest = {"insecure": "true", "node_id": "1", "cluster_id": '"c"', "data_dir": '"data"'}
    rest["kafka_address"] = '"127.0.0.1:9092"'
    missing = "".join(f"{key} = {value}\n" for key, value in rest.items() if key not in given)
    config = parse(missing + found[number] + ("" if "peers" in given else '\n[peers]\n1 = "127.0.0.1:9001"\n'))
    assert config.node_id == 1
