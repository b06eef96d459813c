"""Fixtures of the Kafka tests: one cluster of three processes for all tests that leave it unchanged."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.kafka_client import RawKafka
from tests.live import _faulty, cluster, fault_cluster, new_topic

HERE = Path(__file__).parent
Connect = Callable[[str], RawKafka]


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
def connect() -> Iterator[Connect]:
    """A connection to an address; it is closed after the test."""
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(closing(RawKafka(address)))


@pytest.fixture
def leader(cluster: Cluster, connect: Connect) -> Connect:
    """A connection to the node that leads partition 0 of a topic."""
    return lambda topic: connect(cluster.nodes[cluster.wait_leader(topic, 0)].kafka)


@pytest.fixture
def coordinator(cluster: Cluster, connect: Connect) -> Connect:
    """A connection to the node that coordinates a group."""
    return lambda group: _coordinator(cluster, connect, 0, group)


@pytest.fixture
def owner(cluster: Cluster, connect: Connect) -> Connect:
    """A connection to the node that coordinates a transactional id."""
    return lambda name: _coordinator(cluster, connect, 1, name)


def _coordinator(cluster: Cluster, connect: Connect, kind: int, name: str) -> RawKafka:
    asked = connect(cluster.nodes[1].kafka)
    (found,) = asked.call(ApiKey.FIND_COORDINATOR, 4, key_type=kind, coordinator_keys=[name])["coordinators"]
    return connect(f"{found['host']}:{found['port']}")
