"""The settings of the whole cluster: which changes are valid, and that they are replicated."""

import pytest

from smq.raft_state.cluster_config import (
    CLUSTER_CONFIG,
    IN_NODE_TOML,
    NUM_PARTITIONS,
    REPLICATION_FACTOR,
    cluster_value,
)
from smq.raft_state.commands import AlterClusterConfig
from smq.raft_state.errors import ErrorCode
from smq.raft_state.machine import Machine
from tests.unit.raft_state.support import Driver, cluster, settings


@pytest.fixture
def driver() -> Driver:
    return cluster()


def test_every_default_is_valid_and_every_row_says_what_it_takes() -> None:
    for key, row in CLUSTER_CONFIG.items():
        assert row.accepts(row.default), key
        assert not row.accepts(""), key
        assert row.meaning, key
        assert row.values, key
    assert set(IN_NODE_TOML) <= set(CLUSTER_CONFIG)


def test_settings_are_set_and_reset_and_the_rest_stays(driver: Driver) -> None:
    driver.ok(settings(num_partitions=4, default_replication_factor=2))
    driver.ok(settings(NUM_PARTITIONS, auto_create_topics_enable="true"))
    config = driver.machine.state.config
    assert config == {REPLICATION_FACTOR: "2", "auto.create.topics.enable": "true"}
    assert cluster_value(config, NUM_PARTITIONS) == "1"


def test_a_value_that_equals_the_default_is_kept(driver: Driver) -> None:
    """Because it takes precedence over a node.toml, which the default does not."""
    driver.ok(settings(num_partitions=1))
    assert driver.machine.state.config == {NUM_PARTITIONS: "1"}


def test_settings_survive_a_snapshot(driver: Driver) -> None:
    before = driver.machine.digest()
    driver.ok(settings(num_partitions=7))
    restored = Machine.restore(driver.machine.snapshot())
    assert restored.state.config == {NUM_PARTITIONS: "7"}
    assert restored.digest() == driver.machine.digest() != before


@pytest.mark.parametrize(
    "command",
    [
        settings(no_such_key=1),
        settings("no.such.key"),
        settings(num_partitions=0),
        settings(num_partitions="x"),
        settings(num_partitions="٣"),
        settings(default_replication_factor=0),
        settings(default_replication_factor=-2),
        settings(auto_create_topics_enable="yes"),
        settings(NUM_PARTITIONS, num_partitions=2),
        settings(num_partitions=2, no_such_key=1),
        AlterClusterConfig(set_=((NUM_PARTITIONS, "2"), (NUM_PARTITIONS, "3"))),
    ],
    ids=str,
)
def test_a_change_that_cannot_be_made_changes_nothing(driver: Driver, command: AlterClusterConfig) -> None:
    driver.ok(settings(num_partitions=9))
    driver.refused(command, ErrorCode.INVALID_CONFIG)
    assert driver.machine.state.config == {NUM_PARTITIONS: "9"}


def test_the_refusal_says_what_is_valid(driver: Driver) -> None:
    unknown = driver.refused(settings(num_partition=1), ErrorCode.INVALID_CONFIG)
    assert all(key in unknown.message for key in CLUSTER_CONFIG)
    for key in ("num.io.threads", "log.segment.bytes"):
        of_kafka = driver.refused(AlterClusterConfig(set_=((key, "1048576"),)), ErrorCode.INVALID_CONFIG)
        assert "Kafka's brokers that has no effect here" in of_kafka.message
    invalid = driver.refused(settings(num_partitions=0), ErrorCode.INVALID_CONFIG)
    assert CLUSTER_CONFIG[NUM_PARTITIONS].values in invalid.message
