"""The pytest plugin: fixtures for a broker, a cluster and its faults, for tests of any program that uses smq or Kafka.

Owns the fixtures and their scopes. pytest imports this module in every project that has smq installed, so it imports
nothing of smq before a fixture is used. docs/testing.md shows how to use them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from smq.testing.broker import Broker
    from smq.testing.faults import Faults, FaultyCluster


@pytest.fixture(scope="session")
def smq_broker(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Broker]":
    """A real broker in this process, for all tests: `smq_broker.kafka` is its address for Kafka clients."""
    from smq.testing.broker import running_broker

    with running_broker(tmp_path_factory.mktemp("smq-broker")) as broker:
        yield broker


@pytest.fixture
def smq_topic(smq_broker: "Broker") -> str:
    """The name of a fresh topic with one partition on `smq_broker`."""
    return smq_broker.create_topic()


@pytest.fixture
def smq_make_topic(smq_broker: "Broker") -> Callable[..., str]:
    """Makes topics on `smq_broker`: `smq_make_topic(partitions=3)` returns the name of a fresh one."""
    return smq_broker.create_topic


@pytest.fixture(scope="session")
def _smq_cluster(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[FaultyCluster]":
    from smq.testing.faults import FaultyCluster

    cluster = FaultyCluster(tmp_path_factory.mktemp("smq-cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def smq_faults(_smq_cluster: "FaultyCluster") -> "Iterator[Faults]":
    """Faults for `smq_cluster`. They end with the test, whatever it leaves behind."""
    from smq.testing.faults import Faults

    faults = Faults(_smq_cluster)
    try:
        yield faults
    finally:
        faults.heal()


@pytest.fixture
def smq_cluster(_smq_cluster: "FaultyCluster", smq_faults: "Faults") -> "FaultyCluster":
    """Three real nodes, whole at the start of each test: `smq_cluster.kafka` has their addresses for Kafka clients."""
    return _smq_cluster
