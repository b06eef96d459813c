"""Kafka's own command-line tools see and change configurations and groups, and Kafka's own table of topic keys is
ours."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.raft_state.cluster_config import CLUSTER_CONFIG, TOPIC_ONLY, broker_name
from smq.raft_state.config_keys import ConfigType
from smq.raft_state.topic_config import TOPIC_CONFIG
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import run_cli
from tests.kafka.client_adapters import bootstrap
from tests.kafka.foreign.clients import Missing, copied, run
from tests.kafka.members import ConfluentMember, SmqMember, drive
from tests.kafka.test_groups import RECORDS, places, write
from tests.kafka.transactions.raw import fresh
from tests.kafka.transactions.test_clients import transactional

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TOOL_S = 120
OF_COMPACTION = {"delete.retention.ms", "max.compaction.lag.ms", "min.cleanable.dirty.ratio", "min.compaction.lag.ms"}
# What smq does by default although Kafka does otherwise.
OTHER_DEFAULTS = {"flush.messages": "1", "flush.ms": "0", "retention.ms": "-1"}
Tool = Callable[..., str]


@pytest.fixture(scope="module")
def jars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied("tools", tmp_path_factory.mktemp("java"))
    try:
        run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
        run(directory, "javac", "-d", "classes", "-cp", "jars/*", "Keys.java")
    except Missing as e:
        pytest.skip(str(e))
    return directory


def java(jars: Path, *command: str) -> str:
    path = f"{jars}/classes:{jars}/jars/*"
    ran = subprocess.run(
        ["java", "-Xmx256m", "-cp", path, *command], check=False, capture_output=True, text=True, timeout=TOOL_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def configs(cluster: Cluster, jars: Path) -> Iterator[Tool]:
    """kafka-configs.sh. The settings of the cluster are reset afterwards."""

    def tool(*arguments: str) -> str:
        return java(jars, "kafka.admin.ConfigCommand", "--bootstrap-server", bootstrap(cluster), *arguments)

    yield tool
    keys = ",".join(CLUSTER_CONFIG)
    tool("--entity-type", "brokers", "--entity-default", "--alter", "--delete-config", keys)


def test_every_key_of_kafkas_own_table_is_known_with_its_type_and_default(jars: Path) -> None:
    lines = [line.split("|") for line in java(jars, "Keys").splitlines()]
    assert len(lines) > 30
    unknown = {key for key, *_ in lines if key not in TOPIC_CONFIG}
    assert unknown <= OF_COMPACTION
    for key, type_, name, default in lines:
        row = TOPIC_CONFIG.get(key)
        if row is None:
            continue
        assert row.type is ConfigType[type_], key
        assert row.default == OTHER_DEFAULTS.get(key, default), key
        assert row.accepts(default), key
        assert (key in TOPIC_ONLY) == (not name and key != "remote.storage.enable"), key
        assert not name or broker_name(key) == name, key


def test_defaults_of_new_topics_are_set_and_shown(configs: Tool, jars: Path, cluster: Cluster) -> None:
    brokers = ("--entity-type", "brokers")
    configs(*brokers, "--entity-default", "--alter", "--add-config", "log.retention.ms=5000000,compression.type=lz4")
    shown = configs(*brokers, "--entity-default", "--describe")
    assert "log.retention.ms=5000000 " in shown
    assert "DYNAMIC_DEFAULT_BROKER_CONFIG:log.retention.ms=5000000, DEFAULT_CONFIG:log.retention.ms=-1" in configs(
        *brokers, "--entity-name", "2", "--describe", "--all"
    )
    topics = ("org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap(cluster), "--topic", "by-tool")
    java(jars, *topics, "--create", "--config", "segment.bytes=52428800", "--config", "compression.type=zstd")
    assert "Configs: compression.type=zstd,retention.ms=5000000\n" in java(jars, *topics, "--describe")
    of_topic = ("--entity-type", "topics", "--entity-name", "by-tool")
    configs(*of_topic, "--alter", "--delete-config", "compression.type", "--add-config", "segment.ms=1000")
    assert "compression.type=lz4 " in configs(*of_topic, "--describe")
    assert "segment.ms=604800000 " in configs(*of_topic, "--describe", "--all")


def test_every_node_shows_its_data_directory(cluster: Cluster, jars: Path, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    raw = RawKafka(cluster.nodes[cluster.wait_leader(topic, 0)].kafka)
    raw.produce(topic, batch(b"x" * 10_000))
    raw.close()
    tool = ("org.apache.kafka.tools.LogDirsCommand", "--bootstrap-server", bootstrap(cluster), "--describe")
    (line,) = [line for line in java(jars, *tool, "--topic-list", topic).splitlines() if line.startswith("{")]
    found = {broker["broker"]: broker["logDirs"] for broker in json.loads(line)["brokers"]}
    assert set(found) == set(cluster.nodes)
    for node, directories in found.items():
        (directory,) = directories
        (partition,) = directory["partitions"]
        assert (directory["error"], directory["logDir"]) == (None, str(cluster.nodes[node].data_dir))
        assert (partition["partition"], partition["isFuture"]) == (f"{topic}-0", False)
        assert partition["size"] > 10_000 or partition["offsetLag"] > 0


def test_transactions_are_listed_by_a_pattern(cluster: Cluster, jars: Path) -> None:
    """kafka-transactions.sh"""
    names = [fresh(color) for color in ("blue", "blue", "red")]
    for name in names:
        transactional(bootstrap(cluster), name)
    servers = ("--bootstrap-server", bootstrap(cluster))
    tool = ("org.apache.kafka.tools.TransactionsCommand", *servers, "list", "--transactional-id-pattern")
    listed = java(jars, *tool, "blue-.*").split()
    assert [name in listed for name in names] == [True, True, False]
    with pytest.raises(AssertionError, match="Failed to list transactions"):
        java(jars, *tool, "blue(")


@pytest.fixture
def groups(cluster: Cluster, jars: Path) -> Tool:
    """kafka-consumer-groups.sh"""

    def tool(*arguments: str) -> str:
        command = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
        return java(jars, command, "--bootstrap-server", bootstrap(cluster), *arguments)

    return tool


def of_partitions(shown: str) -> list[dict[str, str]]:
    """The tool's table, by its head."""
    head, *rows = [line.split() for line in shown.splitlines() if line.strip()]
    return [dict(zip(head, row, strict=False)) for row in rows]


@pytest.mark.parametrize("kind", [ConfluentMember, SmqMember])
def test_kafkas_tool_and_ours_report_the_same_lag(
    kind: type[ConfluentMember] | type[SmqMember], cluster: Cluster, groups: Tool, new_topic: Callable[..., str]
) -> None:
    topic, group = new_topic(2), f"lag-{kind.__name__}"
    write(bootstrap(cluster), topic, 2)
    servers = cluster.servers if kind is SmqMember else bootstrap(cluster)
    member = kind(servers, group, [topic])
    drive("it reads all", [member], lambda: len(member.seen) >= 2 * RECORDS and member.assigned() == places((topic, 2)))
    member.commit()
    write(bootstrap(cluster), topic, 2, first=RECORDS, count=3)
    write(bootstrap(cluster), topic, 1, first=RECORDS + 3, count=1)
    try:
        shown = of_partitions(groups("--describe", "--group", group))
    finally:
        member.close()
    lags = {int(row["PARTITION"]): int(row["LAG"]) for row in shown}
    assert lags == {0: 4, 1: 3}
    assert {row["CURRENT-OFFSET"] for row in shown} == {str(RECORDS)}
    described = json.loads(
        run_cli("group", "describe", f"kafka-cg-{group}", "--json", "--bootstrap", cluster.servers).stdout
    )
    assert {p["partition"]: p["lag"] for p in described["positions"]} == lags


def test_kafkas_tool_resets_and_deletes_the_offsets_of_a_native_group(
    cluster: Cluster, groups: Tool, new_topic: Callable[..., str]
) -> None:
    topic, group = new_topic(1), "reset-by-tool"
    write(bootstrap(cluster), topic, 1)
    member = SmqMember(cluster.servers, group, [topic])
    drive("it reads all", [member], lambda: len(member.seen) >= RECORDS)
    member.commit()
    of_topic = ("--group", group, "--topic", topic)
    assert "Assignments can only be reset if the group" in groups(
        "--reset-offsets", *of_topic, "--to-earliest", "--execute"
    )
    member.close()
    (row,) = of_partitions(groups("--reset-offsets", *of_topic, "--shift-by", "-2", "--execute"))
    assert row["NEW-OFFSET"] == str(RECORDS - 2)
    assert [row["LAG"] for row in of_partitions(groups("--describe", "--group", group))[-1:]] == ["2"]
    groups("--delete-offsets", *of_topic)
    assert topic not in groups("--describe", "--group", group)
    groups("--delete", "--group", group)
    assert group not in groups("--list").split()
