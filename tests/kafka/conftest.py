"""Fixtures of the Kafka tests: one cluster of three processes for all tests that leave it unchanged."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.kafka_client import RawKafka
from tests.live import _faulty, cluster, fault_cluster, new_topic

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A running cluster for one test alone."""
    with live_cluster(tmp_path) as made:
        yield made


@pytest.fixture
def bootstrap(cluster: Cluster) -> str:
    return ",".join(node.kafka for node in cluster.nodes.values())


@pytest.fixture
def coordinator(cluster: Cluster) -> Iterator[Callable[[str], RawKafka]]:
    """A connection to the node that coordinates a group."""
    opened = []

    def connect(group: str) -> RawKafka:
        opened.append(RawKafka(cluster.nodes[1].kafka))
        requested = {"key_type": 0, "coordinator_keys": [group]}
        (found,) = opened[-1].call(ApiKey.FIND_COORDINATOR, 4, **requested)["coordinators"]
        opened.append(RawKafka(f"{found['host']}:{found['port']}"))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.close()


@pytest.fixture
def leader(cluster: Cluster) -> Iterator[Callable[[str], RawKafka]]:
    """A connection to the node that leads partition 0 of a topic."""
    opened = []

    def connect(topic: str) -> RawKafka:
        opened.append(RawKafka(cluster.nodes[cluster.wait_leader(topic, 0)].kafka))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.close()


@pytest.fixture
def owner(cluster: Cluster) -> Iterator[Callable[[str], RawKafka]]:
    """A connection to the node that coordinates a transactional id."""
    opened: list[RawKafka] = []

    def connect(name: str) -> RawKafka:
        opened.append(RawKafka(cluster.nodes[1].kafka))
        (found,) = opened[-1].call(ApiKey.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=[name])["coordinators"]
        opened.append(RawKafka(f"{found['host']}:{found['port']}"))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.close()
