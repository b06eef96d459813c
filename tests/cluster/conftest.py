"""Fixtures of the live tests. Faults that heal share one cluster; what damages a directory starts its own."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for all tests that leave them as they were. Of the package: gone before the next suite starts."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="package")
def _faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("faults"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def fault_cluster(_faulty: Cluster) -> Cluster:
    """Three nodes for faults that heal, whole again whatever the test before left behind."""
    _faulty.heal()
    return _faulty


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes of one test, which may do with them as it likes. Not started yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.stop()


_numbers = itertools.count(1)


@pytest.fixture
def new_topic(cluster: Cluster, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Creates a topic of a fresh name on the shared cluster; returns once every node knows it and it has leaders."""

    def create(partitions: int = 1, **fields: Any) -> str:
        return make_topic(cluster, partitions, **fields)

    return create


def make_topic(cluster: Cluster, partitions: int = 1, **fields: Any) -> str:
    name = f"t{next(_numbers)}"
    cluster.alive()[0].raw.create_topic(name, partitions, **fields)
    for partition in range(partitions):
        cluster.wait_leader(name, partition)
    return name


@pytest.fixture
def leader_of(cluster: Cluster) -> Callable[..., RawNode]:
    """The raw node that leads a partition now."""

    def find(topic: str, partition: int = 0) -> RawNode:
        return cluster.nodes[cluster.wait_leader(topic, partition)].raw

    return find
