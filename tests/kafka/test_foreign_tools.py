"""Kafka's own admin client, in Java, asks what the administration tools ask."""

import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import Item, bootstrap
from tests.kafka.foreign.clients import Missing, start
from tests.kafka.foreign.driver import Client
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import fresh
from tests.kafka.transactions.test_clients import await_read, transactional

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def java(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    try:
        client = start("kafka-clients (Java)", bootstrap(cluster), tmp_path_factory.mktemp("java"))
    except Missing as e:
        pytest.skip(str(e))
    yield client
    client.close()


def test_the_admin_client_gets_what_its_tools_show(
    cluster: Cluster, java: Client, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(2, replication_factor=3)
    java.produce(topic, "none", [Item(b"k", b"x" * 10_000, 1_700_000_000_000)])
    found = java.tools(topic)
    nodes = sorted(cluster.nodes)
    assert sorted(found["nodes"]) == nodes
    assert found["partitions"] == 2
    assert {"READ", "WRITE", "DELETE"} < set(found["operations"])
    assert len(found["sizes"]) == len(nodes)
    assert max(found["sizes"]) > 10_000
    assert found["election"] == "ElectionNotNeededException"
    assert found["leader"] == cluster.raft_leader()
    assert found["voters"] == nodes
    assert found["last_sequences"] == [0]
    assert {topic, *map(str, nodes)} <= set(found["resources"])
    assert (found["reassigned"], found["quotas"]) == (0, 0)


def requests(cluster: Cluster, key: str, *, dead: int | None = None) -> int:
    """How many requests of this key the nodes that live have answered."""
    total = 0
    for node in [node for number, node in cluster.nodes.items() if number != dead]:
        with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=10) as response:
            found = re.search(rf'smq_kafka_request_seconds_count{{api="{key}"}} (\d+)', response.read().decode())
        total += int(found[1]) if found else 0
    return total


def test_a_transactional_producer_commits_aborts_and_is_fenced(
    java: Client, cluster: Cluster, coordinator: Callable[[str], RawKafka]
) -> None:
    """With its default settings it uses the second protocol: nothing is added before it is written."""
    topic = cluster.make_topic()
    keys = ("AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
    before = [requests(cluster, key) for key in keys]
    assert java.transact(topic) == "ProducerFencedException"
    added, groups_added, staged, ended = (requests(cluster, key) - n for key, n in zip(keys, before, strict=True))
    assert (added, groups_added) == (0, 0)
    assert (staged, ended) >= (3, 4)
    await_read(bootstrap(cluster), topic, [b"0", b"2"])
    group = f"group-{topic}"
    asked = [{"name": topic, "partition_indexes": [0]}]
    body = coordinator(group).call(ApiKey.OFFSET_FETCH, 7, group_id=group, topics=asked, require_stable=True)
    assert body["topics"][0]["partitions"][0]["committed_offset"] == 2


@pytest.mark.parametrize("name", ["kafka-clients (Java)", "franz-go"])
@pytest.mark.parametrize("victim", ["leader", "coordinator"])
def test_the_second_protocol_goes_on_through_the_death_of_a_node(
    own_cluster: Cluster, tmp_path: Path, victim: str, name: str
) -> None:
    """franz-go begins with the first protocol and moves on after one transaction."""
    topic = own_cluster.make_topic(3)
    addresses = bootstrap(own_cluster)
    try:
        client = start(name, addresses, tmp_path)
    except Missing as e:
        pytest.skip(str(e))
    number = leads = own_cluster.wait_leader(topic, 0)
    if victim == "coordinator":
        raw = RawKafka(own_cluster.nodes[1].kafka)
        asked = {"key_type": 1, "coordinator_keys": [f"tx-{topic}"]}
        number = raw.call(ApiKey.FIND_COORDINATOR, 4, **asked)["coordinators"][0]["node_id"]
        raw.close()
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(client.commits, topic, 3, 120)
        raw = RawKafka(own_cluster.nodes[leads].kafka)
        wait_for("some transactions", lambda: raw.list_offset(topic, -1)["offset"] > 40, PATIENCE_S)
        raw.close()
        own_cluster.kill(number)
        lost = set(failed.result(180))
    client.close()
    expected = [b"%d" % n for n in range(120) if n % 3 != 2 and n not in lost]
    await_read(addresses, topic, expected * 3, partitions=3)
    assert len(expected) > 40
    assert requests(own_cluster, "AddPartitionsToTxn", dead=number) <= 3


def test_librdkafka_stays_with_the_first_protocol(cluster: Cluster) -> None:
    topic = cluster.make_topic()
    before = requests(cluster, "AddPartitionsToTxn")
    producer = transactional(bootstrap(cluster), fresh("tx"))
    for n in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % n, partition=0)
        producer.commit_transaction(PATIENCE_S)
    await_read(bootstrap(cluster), topic, [b"0", b"1", b"2"])
    assert requests(cluster, "AddPartitionsToTxn") - before >= 3
