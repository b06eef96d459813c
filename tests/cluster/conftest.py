"""Fixtures of the live tests. Faults that heal share one cluster; a test that damages a directory starts its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from tests.live import _faulty, cluster, fault_cluster, new_topic

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test alone, which may damage it. Not started yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def leader_of(cluster: Cluster) -> Callable[..., RawNode]:
    """The raw node that leads a partition now."""

    def find(topic: str, partition: int = 0) -> RawNode:
        return cluster.nodes[cluster.wait_leader(topic, partition)].raw

    return find
