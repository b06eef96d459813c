"""Topics: names, sizes, placement, configuration, deletion."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from smq.raft_state.commands import AddPartitions, AlterTopicConfig, CreateTopic, DeleteTopic, FenceNode, SetNodeDrained
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Incarnation, NodeId, Offset, TopicId
from smq.raft_state.limits import MESSAGE_BYTES_CAP, MESSAGE_BYTES_DEFAULT, START_OFFSET_MAX, default_init
from smq.raft_state.replies import Done, TopicCreated
from smq.raft_state.state import EpochStart
from smq.raft_state.topic_config import TOPIC_CONFIG, batch_rules, config_value, shown_value
from tests.unit.raft_state.support import Driver, advance, advances, cluster, commit, pid, register, tid, topic


def small_cluster(**limits: Any) -> Driver:
    driver = Driver()
    driver.ok(replace(default_init("small"), **limits))
    driver.ok(register(1))
    return driver


def add(name: str, count: int) -> AddPartitions:
    return AddPartitions(name=name, partition_count=count)


def fence(node: int) -> FenceNode:
    return FenceNode(node=NodeId(node), incarnation=Incarnation(1))


@pytest.fixture
def driver() -> Driver:
    return cluster()


# ------------------------------------------------------------------------------------------------ creation
def test_created_topic_has_its_partitions_empty_in_epoch_0(driver: Driver) -> None:
    applied = driver.apply(topic(1, "flights", partitions=2))
    assert applied.reply == TopicCreated(topic_id=tid(1))
    assert applied.touched == (pid(1, 0), pid(1, 1))
    p = driver.partition(pid(1, 1))
    assert (p.epoch, p.log_start, p.hwm, p.next_offset, p.ts_ns) == (0, 0, 0, 0, 0)
    assert p.leader == p.replicas[0]
    assert driver.machine.state.partition(pid(1, 2)) is None


def test_topic_may_start_at_a_large_offset(driver: Driver) -> None:
    driver.ok(topic(1, start=2**40))
    p = driver.partition(pid(1))
    assert (p.log_start, p.hwm, p.next_offset) == (2**40, 2**40, 2**40)
    assert p.history == [EpochStart(p.epoch, Offset(2**40))]


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "kafka-cg-x"])
def test_valid_names_are_accepted(name: str) -> None:
    cluster().ok(topic(1, name))


BAD_CREATIONS = [
    *(
        (replace(topic(1), name=name), ErrorCode.INVALID_TOPIC_NAME)
        for name in ("", ".", "..", "x" * 250, "a b", "a/b", "naïve", "a\n", "a\u0661")
    ),
    (topic(1, "old"), ErrorCode.TOPIC_EXISTS),
    (topic(9, "new"), ErrorCode.INVALID_REQUEST),  # another topic has its id
    (replace(topic(1), topic_id=TopicId(b"short")), ErrorCode.INVALID_REQUEST),
    *((topic(1, partitions=count), ErrorCode.INVALID_PARTITION_COUNT) for count in (0, -1)),
    *((topic(1, replicas=replicas), ErrorCode.INVALID_REPLICATION_FACTOR) for replicas in (0, -1, 4)),
    *((topic(1, start=start), ErrorCode.INVALID_OFFSET) for start in (-1, START_OFFSET_MAX + 1)),
]


@pytest.mark.parametrize(("command", "code"), BAD_CREATIONS)
def test_a_topic_that_cannot_be_made_is_refused(driver: Driver, command: CreateTopic, code: ErrorCode) -> None:
    driver.ok(topic(9, "old"))
    reply = driver.refused(command, code)
    assert len(command.topic_id) == 16 or "topic_id" in reply.message
    assert list(driver.machine.state.topics) == ["old"]


def test_topics_and_partitions_have_limits() -> None:
    driver = small_cluster(topics_max=2, partitions_max=5)
    driver.refused(topic(1, partitions=6, replicas=1), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(topic(1, partitions=3, replicas=1))
    driver.refused(topic(2, partitions=3, replicas=1), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(topic(2, partitions=1, replicas=1))
    driver.refused(topic(3, partitions=1, replicas=1), ErrorCode.LIMIT_EXCEEDED)
    driver.refused(add("t1", 5), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(add("t1", 4))
    driver.ok(DeleteTopic(name="t1"))
    driver.ok(topic(3, partitions=4, replicas=1))


# ------------------------------------------------------------------------------------------------ placement
def leaders(driver: Driver, name: str) -> list[int]:
    return [p.leader for p in driver.machine.state.topics[name].partitions]


def replica_counts(driver: Driver, *names: str) -> Counter[int]:
    topics = driver.machine.state.topics
    return Counter(node for name in names for p in topics[name].partitions for node in p.replicas)


def test_leaders_and_replicas_of_a_topic_are_spread_evenly() -> None:
    driver = cluster(5)
    driver.ok(topic(1, partitions=20, replicas=3))
    assert Counter(leaders(driver, "t1")) == dict.fromkeys(range(1, 6), 4)
    assert replica_counts(driver, "t1") == dict.fromkeys(range(1, 6), 12)


def test_many_small_topics_are_spread_evenly_too() -> None:
    driver = cluster(3)
    for n in range(1, 10):
        driver.ok(topic(n, replicas=1))
    assert Counter(leader for n in range(1, 10) for leader in leaders(driver, f"t{n}")) == {1: 3, 2: 3, 3: 3}


def test_new_node_does_not_get_all_leaders_of_the_next_topic() -> None:
    driver = cluster(3)
    driver.ok(topic(1, partitions=30))
    driver.ok(register(4))
    driver.ok(topic(2, partitions=8))
    assert Counter(leaders(driver, "t2")) == {1: 2, 2: 2, 3: 2, 4: 2}


def test_partitions_of_a_dead_leader_have_different_first_followers() -> None:
    driver = cluster(3)
    driver.ok(topic(1, partitions=12))
    partitions = driver.machine.state.topics["t1"].partitions
    assert Counter(p.replicas[1] for p in partitions if p.replicas[0] == 1) == {2: 2, 3: 2}


@pytest.mark.parametrize("is_drained", [False, True])
def test_fenced_and_drained_nodes_are_chosen_last_and_do_not_lead(is_drained: bool) -> None:
    driver = cluster(4)
    driver.ok(SetNodeDrained(node=NodeId(1), drained=True) if is_drained else fence(1))
    driver.ok(topic(1, partitions=6, replicas=3))
    assert 1 not in replica_counts(driver, "t1")
    driver.ok(topic(2, partitions=6, replicas=4))
    assert replica_counts(driver, "t2")[1] == 6
    assert 1 not in leaders(driver, "t2")


def test_topic_created_while_all_nodes_are_fenced_gets_its_preferred_leader() -> None:
    driver = cluster(2)
    driver.ok(fence(1))
    driver.ok(fence(2))
    driver.ok(topic(1, replicas=2))
    p = driver.partition(pid(1))
    assert p.leader == p.replicas[0]


def test_leader_incarnation_is_the_registered_one() -> None:
    driver = cluster(1)
    driver.ok(register(1, incarnation=42))
    driver.ok(topic(1, replicas=1))
    assert driver.partition(pid(1)).leader_incarnation == 42


def test_placement_is_the_same_whatever_the_order_in_which_nodes_registered() -> None:
    drivers = []
    for order in ([1, 2, 3, 4], [1, 4, 2, 3]):
        driver = cluster(0)
        for node in order:
            driver.ok(register(node, kafka="host:1" if node == 1 else ""))  # it gets all slots of coordinators
        driver.ok(topic(1, partitions=7, replicas=2))
        drivers.append(driver)
    assert drivers[0].machine.digest() == drivers[1].machine.digest()


# ------------------------------------------------------------------------------------------------ more partitions
def test_added_partitions_start_at_0_and_leave_the_old_ones_alone(driver: Driver) -> None:
    driver.ok(topic(1, partitions=1, start=100))
    driver.ok(advances(advance(pid(1), 0, hwm=105)))
    applied = driver.apply(add("t1", 3))
    assert applied.reply == Done()
    assert applied.touched == (pid(1, 1), pid(1, 2))
    assert driver.partition(pid(1)).hwm == 105
    assert driver.partition(pid(1, 2)).next_offset == 0
    assert sorted(leaders(driver, "t1")) == [1, 2, 3]


def test_same_number_of_partitions_changes_nothing(driver: Driver) -> None:
    driver.ok(topic(1, partitions=2))
    assert driver.apply(add("t1", 2)).touched == ()


def test_fewer_partitions_is_an_invalid_partition_count(driver: Driver) -> None:
    driver.ok(topic(1, partitions=2))
    driver.refused(add("t1", 1), ErrorCode.INVALID_PARTITION_COUNT)


# ------------------------------------------------------------------------------------------------ deletion
def test_deletion_of_a_topic_removes_its_partitions_and_commits(driver: Driver) -> None:
    driver.ok(topic(1, "a", partitions=2))
    driver.ok(topic(2, "b"))
    driver.ok(commit("only-a", (pid(1, 0), 3)))
    driver.ok(commit("both", (pid(1, 1), 3), (pid(2), 4)))
    applied = driver.apply(DeleteTopic(name="a"))
    assert applied.reply == Done()
    assert applied.touched == (pid(1, 0), pid(1, 1))
    state = driver.machine.state
    assert state.partition(pid(1)) is None
    assert state.groups["only-a"].is_unused
    assert list(state.groups["both"].offsets) == [pid(2)]


def test_name_is_free_after_deletion_and_the_new_topic_starts_over(driver: Driver) -> None:
    driver.ok(topic(1, "a"))
    driver.ok(advances(advance(pid(1), 0, hwm=9)))
    driver.ok(DeleteTopic(name="a"))
    driver.ok(topic(2, "a"))
    assert driver.partition(pid(2)).hwm == 0


@pytest.mark.parametrize(
    "command", [DeleteTopic(name="no"), add("no", 3), AlterTopicConfig(name="no")], ids=lambda c: type(c).__name__
)
def test_commands_on_an_unknown_topic_are_rejected(command: DeleteTopic | AddPartitions | AlterTopicConfig) -> None:
    reply = cluster().refused(command, ErrorCode.UNKNOWN_TOPIC)
    assert "'no'" in reply.message


# ------------------------------------------------------------------------------------------------ configuration
def with_config(*config: tuple[str, str]) -> CreateTopic:
    return replace(topic(1), config=config)


def config_of(driver: Driver) -> dict[str, str]:
    return driver.machine.state.topics["t1"].config


def test_only_values_that_differ_from_the_default_are_stored(driver: Driver) -> None:
    driver.ok(with_config(("max.message.bytes", str(MESSAGE_BYTES_DEFAULT)), ("storage", "log")))
    assert config_of(driver) == {}
    assert batch_rules(config_of(driver)).bytes_max == MESSAGE_BYTES_DEFAULT
    assert config_value(config_of(driver), "storage") == "log"


def test_unknown_key_is_refused_and_the_known_ones_are_named() -> None:
    reply = cluster().refused(with_config(("colour", "1")), ErrorCode.INVALID_CONFIG)
    assert "colour" in reply.message
    assert all(key in reply.message for key in TOPIC_CONFIG)


@pytest.mark.parametrize("value", ["0", "-1", "007", "1e3", "", " 5", "1_000", "\u0665", str(MESSAGE_BYTES_CAP + 1)])
def test_impossible_message_size_is_an_invalid_config(value: str) -> None:
    cluster().refused(with_config(("max.message.bytes", value)), ErrorCode.INVALID_CONFIG)


@pytest.mark.parametrize("value", ["1", "1000000", str(MESSAGE_BYTES_CAP)])
def test_possible_message_size_is_accepted(driver: Driver, value: str) -> None:
    driver.ok(with_config(("max.message.bytes", value)))
    assert batch_rules(config_of(driver)).bytes_max == int(value)


def test_storage_that_is_neither_log_nor_external_is_refused_naming_them() -> None:
    reply = cluster().refused(with_config(("storage", "tape")), ErrorCode.INVALID_CONFIG)
    assert '"log"' in reply.message
    assert '"external"' in reply.message


def test_external_storage_with_replicas_is_refused() -> None:
    cluster().refused(with_config(("storage", "external")), ErrorCode.INVALID_REPLICATION_FACTOR)


def test_repeated_key_is_an_invalid_config() -> None:
    twice = with_config(("max.message.bytes", "5"), ("max.message.bytes", "6"))
    cluster().refused(twice, ErrorCode.INVALID_CONFIG)


def test_lags_of_compaction_that_contradict_each_other_are_refused_in_one_step_or_in_two(driver: Driver) -> None:
    least, most = ("min.compaction.lag.ms", "10"), ("max.compaction.lag.ms", "9")
    driver.refused(with_config(least, most), ErrorCode.INVALID_CONFIG)
    driver.ok(with_config(most))
    reply = driver.refused(AlterTopicConfig(name="t1", set_=(least,)), ErrorCode.INVALID_CONFIG)
    assert "min.compaction.lag.ms is 10, above max.compaction.lag.ms, which is 9" in reply.message
    assert config_of(driver) == {"max.compaction.lag.ms": "9"}


def test_config_is_altered_and_reset_to_the_default(driver: Driver) -> None:
    driver.ok(topic(1))
    driver.ok(AlterTopicConfig(name="t1", set_=(("max.message.bytes", "5"),)))
    assert config_of(driver) == {"max.message.bytes": "5"}
    driver.ok(AlterTopicConfig(name="t1", unset=("max.message.bytes",)))
    assert config_of(driver) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"set_": (("storage", "log"), ("nope", "1"))},
        {"unset": ("nope",)},
        {"set_": (("storage", "log"),), "unset": ("storage",)},
        {"set_": (("max.message.bytes", "x"),)},
    ],
)
def test_alteration_with_one_bad_key_changes_nothing(driver: Driver, change: dict[str, Any]) -> None:
    driver.ok(with_config(("max.message.bytes", "7")))
    driver.refused(AlterTopicConfig(name="t1", **change), ErrorCode.INVALID_CONFIG)
    assert config_of(driver) == {"max.message.bytes": "7"}


def test_every_row_accepts_its_default_and_says_what_it_takes() -> None:
    for key, row in TOPIC_CONFIG.items():
        assert row.accepts(row.default), key
        assert row.accepts("") == (row.default == ""), key
        assert row.meaning, key
        assert row.values, key
        assert bool(row.why) == row.is_fixed, key


FIXED = tuple((key, row.default) for key, row in TOPIC_CONFIG.items() if row.is_fixed)


def test_what_smq_does_anyway_is_accepted_and_not_stored(driver: Driver) -> None:
    driver.ok(with_config(*FIXED))
    assert config_of(driver) == {}
    driver.ok(AlterTopicConfig(name="t1", set_=(("flush.messages", "9000"), ("max.message.bytes", "5"))))
    assert config_of(driver) == {"max.message.bytes": "5"}


@pytest.mark.parametrize(("replicas", "majority"), [(1, 1), (2, 2), (3, 2)])
def test_replicas_in_sync_may_be_demanded_up_to_the_majority(driver: Driver, replicas: int, majority: int) -> None:
    driver.ok(replace(topic(1, replicas=replicas), config=(("min.insync.replicas", str(majority)),)))
    assert shown_value(config_of(driver), "min.insync.replicas", replicas) == str(majority)
    too_many = ("min.insync.replicas", str(majority + 1))
    reply = driver.refused(AlterTopicConfig(name="t1", set_=(too_many,)), ErrorCode.INVALID_CONFIG)
    assert f"from 1 to {majority}" in reply.message
    driver.refused(replace(topic(2, replicas=replicas), config=(too_many,)), ErrorCode.INVALID_CONFIG)


# ------------------------------------------------------------------------------------------- replica assignments
def assigned(*assignments: tuple[int, ...], replicas: int = 2) -> CreateTopic:
    nodes = tuple(tuple(map(NodeId, assignment)) for assignment in assignments)
    return replace(topic(1, partitions=len(nodes), replicas=replicas), assignments=nodes)


def grown(count: int, *assignments: tuple[int, ...]) -> AddPartitions:
    nodes = tuple(tuple(map(NodeId, assignment)) for assignment in assignments)
    return AddPartitions(name="t1", partition_count=count, assignments=nodes)


def test_replicas_are_where_the_command_assigns_them_and_the_first_one_leads(driver: Driver) -> None:
    driver.ok(assigned((3, 1), (2, 3)))
    driver.ok(grown(4, (2, 1), (2, 3)))
    driver.ok(add("t1", 5))
    found = [driver.partition(pid(1, index)) for index in range(5)]
    assert [p.replicas for p in found[:4]] == [(3, 1), (2, 3), (2, 1), (2, 3)]
    assert [p.leader for p in found[:4]] == [3, 2, 2, 2]
    assert len(found[4].replicas) == 2


def test_a_fenced_preferred_leader_does_not_lead_at_first(driver: Driver) -> None:
    driver.ok(FenceNode(node=NodeId(3), incarnation=Incarnation(1)))
    driver.ok(assigned((3, 1)))
    assert (driver.partition(pid(1)).replicas, driver.partition(pid(1)).leader) == ((3, 1), 1)


@pytest.mark.parametrize(
    "command",
    [
        assigned((1, 1)),
        assigned((1, 9)),
        assigned((1, 2), (3,)),
        assigned((), replicas=0),
        replace(assigned((1, 2)), partition_count=2),
        replace(assigned((1, 2), (2, 3)), partition_count=1),
    ],
    ids=["twice", "unknown", "lengths", "none", "too few", "too many"],
)
def test_an_assignment_that_cannot_be_made_is_refused(command: CreateTopic) -> None:
    cluster().refused(command, ErrorCode.INVALID_REPLICA_ASSIGNMENT)


@pytest.mark.parametrize(
    "command",
    [grown(3, (1, 2)), grown(2, (1, 2), (2, 3)), grown(2, (1, 1)), grown(2, (1, 9)), grown(2, (1,)), grown(1, (1, 2))],
    ids=["too few", "too many", "twice", "unknown", "length", "no new partition"],
)
def test_new_partitions_need_valid_assignments(driver: Driver, command: AddPartitions) -> None:
    driver.ok(assigned((1, 2)))
    driver.refused(command, ErrorCode.INVALID_REPLICA_ASSIGNMENT)
    assert len(driver.machine.state.topics["t1"].partitions) == 1


def test_offsets_without_records_have_no_replicas_to_assign() -> None:
    external = replace(assigned((1, 2)), config=(("storage", "external"),))
    cluster().refused(external, ErrorCode.INVALID_REPLICATION_FACTOR)
