"""The clusters that the tests of a live suite share: the conftests of cluster, kafka and spark import these fixtures.

The scope is the package. Pytest takes it for the session if a folder has no `__init__.py`, so nodes may outlive their
suite. A test that needs nodes of its own, because it depends on how often they have gone or damages them, starts them
itself.
"""

from collections.abc import Callable, Iterator

import pytest

from smq.testing.cluster import Cluster, live_cluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for all tests that leave them unchanged. They soon look for what is to be compacted: by default it
    takes them up to 15 s."""
    with live_cluster(tmp_path_factory.mktemp("cluster"), compaction_check_ms=500) as made:
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
def new_topic(cluster: Cluster) -> Callable[..., str]:
    """Makes a topic on the shared cluster: `Cluster.make_topic`."""
    return cluster.make_topic
