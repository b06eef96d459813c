"""Fixtures of the live tests. Faults that heal share one cluster; a test that damages a directory starts its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_client import RawNode

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for all tests that leave them unchanged. Package scope: they end before the next suite starts."""
    with live_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="package")
def _faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with live_cluster(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture
def fault_cluster(_faulty: Cluster) -> Cluster:
    """Three nodes for faults that heal, repaired whatever the previous test left behind."""
    _faulty.heal()
    return _faulty


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test alone, which may damage it. Not started yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def new_topic(cluster: Cluster) -> Callable[..., str]:
    """Makes a topic on the shared cluster: `Cluster.make_topic`."""
    return cluster.make_topic


@pytest.fixture
def leader_of(cluster: Cluster) -> Callable[..., RawNode]:
    """The raw node that leads a partition now."""

    def find(topic: str, partition: int = 0) -> RawNode:
        return cluster.nodes[cluster.wait_leader(topic, partition)].raw

    return find
