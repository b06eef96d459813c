"""Kafka's own admin client, in Java, asks what the administration tools ask."""

from collections.abc import Callable, Iterator

import pytest

from smq.testing.cluster import Cluster
from tests.kafka.client_adapters import Item, bootstrap
from tests.kafka.foreign.clients import Missing, start
from tests.kafka.foreign.driver import Client
from tests.kafka.test_transactions import await_read

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


def test_a_transactional_producer_commits_aborts_and_is_fenced(java: Client, cluster: Cluster) -> None:
    topic = cluster.make_topic()
    assert java.transact(topic) == "ProducerFencedException"
    await_read(bootstrap(cluster), topic, [b"0", b"2"])
