"""Which value of a setting is in effect at a node."""

from dataclasses import replace

from smq.coordinator.service.settings import Settings, Source
from smq.raft_state.cluster_config import NUM_PARTITIONS
from tests.unit.raft_state.support import cluster, settings, topic


def test_the_cluster_precedes_the_file_which_precedes_the_default() -> None:
    driver = cluster()
    state = driver.machine.state
    assert Settings({}).layers(state, NUM_PARTITIONS) == [("1", Source.DEFAULT)]
    own = Settings({NUM_PARTITIONS: "5"})
    assert own.num_partitions(state) == 5
    driver.ok(settings(num_partitions=7))
    assert own.num_partitions(state) == 7
    assert own.layers(state, NUM_PARTITIONS) == [("7", Source.CLUSTER), ("5", Source.NODE_TOML), ("1", Source.DEFAULT)]
    driver.ok(settings(NUM_PARTITIONS))
    assert own.num_partitions(state) == 5


def test_a_change_takes_effect_without_a_restart() -> None:
    driver = cluster()
    node = Settings({})
    assert not node.auto_create(driver.machine.state)
    assert node.group_initial_delay_ms(driver.machine.state) == 3_000
    driver.ok(settings(auto_create_topics_enable="true", group_initial_rebalance_delay_ms=0))
    assert node.auto_create(driver.machine.state)
    assert node.group_initial_delay_ms(driver.machine.state) == 0


def test_the_replicas_of_a_topic_depend_on_the_nodes_unless_a_number_is_set() -> None:
    driver = cluster()
    state = driver.machine.state
    assert Settings({}).replication_factor(state) == min(3, len(state.nodes))
    driver.ok(settings(default_replication_factor=1))
    assert Settings({}).replication_factor(state) == 1
    driver.ok(settings(default_replication_factor=-1))
    assert Settings({"default.replication.factor": "2"}).replication_factor(state) == min(3, len(state.nodes))


def test_topics_whose_batches_no_request_holds_are_found() -> None:
    """As after a lower request_bytes_max."""
    driver = cluster()
    for n, config in enumerate([(("max.message.bytes", "1000"),), (("max.message.bytes", "3000"),), ()]):
        driver.ok(replace(topic(n, f"t{n}"), config=config))
    assert Settings({}, 2_000_000).topics_beyond(driver.machine.state) == []
    assert Settings({}, 2_000).topics_beyond(driver.machine.state) == ["t1"]
