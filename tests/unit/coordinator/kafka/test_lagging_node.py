"""Requests that name a topic which another node created a moment ago: none of them may say that it is unknown."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.cluster_view import NO_TOPIC_ID
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.handlers import HANDLERS
from smq.coordinator.kafka.produce import ProduceCall
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings
from smq.raft_state.ids import LogIndex, TopicId
from smq.replication.api import DoneFn
from smq.testing.kafka_client import batch
from tests.unit.coordinator.kafka.gateways import fetch_of
from tests.unit.coordinator.lagging import NO_QUORUM, TOPIC, TOPIC_ID, LaggingNode, state_with

GONE = TopicId(bytes(15) + b"g")
# As clients see it: they ask again, after they have found the leader or the coordinator.
RETRIABLE = {
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_OR_FOLLOWER,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}


class Groups:
    """This node coordinates every group, and commits whatever it is asked to."""

    def refusal(self, _group: str) -> Outcome:
        return Outcome.OK

    def commit(self, *arguments: Any) -> Callable[[], None]:
        arguments[-1](None)
        return lambda: None

    delete_offsets = commit


def gateway_of(node: LaggingNode) -> Gateway:
    return Gateway(
        calls=NodeCalls(node.api),
        groups=cast(GroupCoordinator, Groups()),
        settings=Settings({}),
        request_bytes_max=MIB,
        response_bytes_max=MIB,
        data_dir="/data",
        inflight=InflightBytes(),
    )


def ask(node: LaggingNode, key: ApiKey, version: int, request: Struct) -> list[KafkaError]:
    """All error codes in the answer."""
    gateway = gateway_of(node)

    async def call() -> Struct:
        if key is not ApiKey.PRODUCE:
            return await HANDLERS[key](gateway, version, request)
        answers: list[Struct | None] = []
        ProduceCall(gateway, version, answers.append, pytest.fail).start(request)
        (answer,) = answers
        assert answer is not None
        return answer

    return list(codes_in(asyncio.run(call())))


def codes_in(answer: Any) -> list[KafkaError]:
    if isinstance(answer, list):
        return [code for item in answer for code in codes_in(item)]
    if not isinstance(answer, dict):
        return []
    own = [answer["error_code"]] if "error_code" in answer else []
    return own + [code for item in answer.values() for code in codes_in(item)]


Named = Callable[[str, bytes], tuple[ApiKey, int, Struct]]


def _produce(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    data = [{"index": 0, "records": memoryview(batch(b"v"))}]
    topics = [{"name": name, "topic_id": topic_id, "partition_data": data}]
    request = {"acks": -1, "timeout_ms": 1_000, "transactional_id": None, "topic_data": topics}
    return ApiKey.PRODUCE, 9 if name else 13, request


def _fetch(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    return ApiKey.FETCH, 12 if name else 13, fetch_of(name, topic_id)


def _metadata(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    topics = [{"name": name or None, "topic_id": topic_id}]
    fields = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
    return ApiKey.METADATA, 12, {"topics": topics, "include_cluster_authorized_operations": False} | fields


def _offset_commit(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    part = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": None}
    request = {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": name, "topic_id": topic_id, "partitions": [part]}],
    }
    return ApiKey.OFFSET_COMMIT, 9 if name else 10, request


def _offset_fetch(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    topics = [{"name": name, "topic_id": topic_id, "partition_indexes": [0]}]
    return (
        ApiKey.OFFSET_FETCH,
        9 if name else 10,
        {"groups": [{"group_id": "g", "topics": topics}], "require_stable": False},
    )


def _delete_topics(name: str, topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    return ApiKey.DELETE_TOPICS, 6, {"timeout_ms": 1_000, "topics": [{"name": name or None, "topic_id": topic_id}]}


def _list_offsets(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    topics = [{"name": name, "partitions": [part]}]
    return ApiKey.LIST_OFFSETS, 5, {"isolation_level": 0, "timeout_ms": 1_000, "topics": topics}


def _offset_for_leader_epoch(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    part = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 1}
    return ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, {"topics": [{"topic": name, "partitions": [part]}]}


def _delete_records(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    topics = [{"name": name, "partitions": [{"partition_index": 0, "offset": 0}]}]
    return ApiKey.DELETE_RECORDS, 2, {"timeout_ms": 1_000, "topics": topics}


def _offset_delete(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    topics = [{"name": name, "partitions": [{"partition_index": 0}]}]
    return ApiKey.OFFSET_DELETE, 0, {"group_id": "g", "topics": topics}


def _create_partitions(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    topics = [{"name": name, "count": 2, "assignments": None}]
    return ApiKey.CREATE_PARTITIONS, 3, {"timeout_ms": 1_000, "validate_only": False, "topics": topics}


def _resource(name: str) -> Struct:
    return {"resource_type": 2, "resource_name": name, "configuration_keys": None, "configs": []}


def _describe_configs(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    request = {"include_synonyms": False, "include_documentation": False, "resources": [_resource(name)]}
    return ApiKey.DESCRIBE_CONFIGS, 4, request


def _alter_configs(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    return ApiKey.ALTER_CONFIGS, 2, {"validate_only": False, "resources": [_resource(name)]}


def _incremental_alter_configs(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    return ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"validate_only": False, "resources": [_resource(name)]}


def _describe_topic_partitions(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    request = {"topics": [{"name": name}], "response_partition_limit": 10, "cursor": None}
    return ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request


def _describe_producers(name: str, _topic_id: bytes) -> tuple[ApiKey, int, Struct]:
    return ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": name, "partition_indexes": [0]}]}


BY_NAME_OR_ID: tuple[Named, ...] = (_produce, _fetch, _metadata, _offset_commit, _offset_fetch, _delete_topics)
BY_NAME: tuple[Named, ...] = (
    *BY_NAME_OR_ID,
    _list_offsets,
    _offset_for_leader_epoch,
    _delete_records,
    _offset_delete,
    _create_partitions,
    _describe_configs,
    _alter_configs,
    _incremental_alter_configs,
    _describe_topic_partitions,
    _describe_producers,
)
COMMANDS = (_create_partitions, _alter_configs, _incremental_alter_configs)  # the state machine says what is unknown


@pytest.mark.parametrize("named", BY_NAME)
def test_a_topic_created_through_another_node_is_found_by_name(named: Named) -> None:
    assert set(ask(LaggingNode(), *named(TOPIC, NO_TOPIC_ID))) == {KafkaError.NONE}


def test_the_leader_of_a_topic_created_through_another_node_is_known() -> None:
    request = {"election_type": 0, "topic_partitions": [{"topic": TOPIC, "partitions": [0]}], "timeout_ms": 1_000}
    codes = ask(LaggingNode(), ApiKey.ELECT_LEADERS, 2, request)
    assert codes == [KafkaError.NONE, KafkaError.ELECTION_NOT_NEEDED]


@pytest.mark.parametrize("named", BY_NAME_OR_ID)
def test_a_topic_created_through_another_node_is_found_by_id(named: Named) -> None:
    assert set(ask(LaggingNode(), *named("", TOPIC_ID))) == {KafkaError.NONE}


@pytest.mark.parametrize("named", BY_NAME_OR_ID)
def test_an_id_that_is_unknown_after_a_barrier_is_refused(named: Named) -> None:
    node = LaggingNode()
    assert KafkaError.UNKNOWN_TOPIC_ID in ask(node, *named("", GONE))
    assert node.barriers == 1


class SlowBarriers(LaggingNode):
    """It applies the topic before the barriers that wait for it end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[DoneFn[LogIndex]] = []

    def barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self.waiting.append(done)

    def apply(self, *topics: tuple[str, TopicId]) -> None:
        self.state = state_with(*topics)


def produced(node: LaggingNode, version: int, *topics: tuple[str, bytes, bytes]) -> list[Struct | None]:
    """Starts one request with a batch for each (name, id, value); its answer once there is one."""
    request: Struct = {"acks": -1, "timeout_ms": 1_000, "transactional_id": None}
    request["topic_data"] = [
        {"name": name, "topic_id": id_, "partition_data": [{"index": 0, "records": memoryview(value)}]}
        for name, id_, value in topics
    ]
    answers: list[Struct | None] = []
    ProduceCall(gateway_of(node), version, answers.append, pytest.fail).start(request)
    return answers


BY_NAME_AND_BY_ID = [(9, TOPIC, NO_TOPIC_ID), (13, "", TOPIC_ID)]


@pytest.mark.parametrize(("version", "name", "id_"), BY_NAME_AND_BY_ID)
def test_a_batch_is_not_overtaken_while_its_topic_is_looked_up(version: int, name: str, id_: bytes) -> None:
    node = SlowBarriers()
    answers = [produced(node, version, (name, id_, value)) for value in (b"1", b"2")]
    assert node.appended == []
    node.apply((TOPIC, TOPIC_ID))
    answers.append(produced(node, version, (name, id_, b"3")))
    assert node.appended == [b"1", b"2", b"3"]
    for done in node.waiting:
        done(LogIndex(1))
    assert node.appended == [b"1", b"2", b"3"]
    assert [codes_in(answer) for answer in answers] == [[KafkaError.NONE]] * 3


def test_a_batch_does_not_wait_for_the_other_topics_of_its_request() -> None:
    node = SlowBarriers()
    node.apply((TOPIC, TOPIC_ID))
    first = produced(node, 13, ("", TOPIC_ID, b"1"), ("", GONE, b"x"))
    second = produced(node, 13, ("", TOPIC_ID, b"2"))
    assert node.appended == [b"1", b"2"]
    assert (first, codes_in(second)) == ([], [KafkaError.NONE])
    node.waiting[0](LogIndex(1))
    assert codes_in(first) == [KafkaError.NONE, KafkaError.UNKNOWN_TOPIC_ID]


def test_a_look_up_that_fails_fails_its_own_batch_only() -> None:
    node = SlowBarriers()
    first, second = (produced(node, 9, (TOPIC, NO_TOPIC_ID, value)) for value in (b"1", b"2"))
    node.waiting[0](NO_QUORUM)
    assert_asked_again(codes_in(first))
    assert second == []
    node.apply((TOPIC, TOPIC_ID))
    node.waiting[1](LogIndex(1))
    assert (node.appended, codes_in(second)) == ([b"2"], [KafkaError.NONE])


@pytest.mark.parametrize("named", BY_NAME_OR_ID)
def test_an_id_is_not_called_unknown_without_a_barrier(named: Named) -> None:
    assert_asked_again(ask(LaggingNode(failure=NO_QUORUM), *named("", TOPIC_ID)))


@pytest.mark.parametrize("named", [named for named in BY_NAME if named not in COMMANDS])
def test_a_name_is_not_called_unknown_without_a_barrier(named: Named) -> None:
    assert_asked_again(ask(LaggingNode(failure=NO_QUORUM), *named(TOPIC, NO_TOPIC_ID)))


def assert_asked_again(codes: list[KafkaError]) -> None:
    """Some error, and all of them retriable."""
    assert set(codes) - {KafkaError.NONE}
    assert set(codes) <= {KafkaError.NONE, *RETRIABLE}


def test_what_a_node_knows_it_describes_without_a_quorum() -> None:
    node = LaggingNode(failure=NO_QUORUM)
    node.state = state_with(("known", GONE))
    key, version, request = _metadata("known", NO_TOPIC_ID)
    request["topics"] += [{"name": name, "topic_id": NO_TOPIC_ID} for name in (TOPIC, "no/name")]
    request["topics"] += [{"name": None, "topic_id": GONE}]

    async def call() -> Struct:
        return await HANDLERS[key](gateway_of(node), version, request | {"allow_auto_topic_creation": True})

    answer = asyncio.run(call())
    assert [(t["name"], t["error_code"], len(t["partitions"])) for t in answer["topics"]] == [
        ("known", KafkaError.NONE, 1),
        (TOPIC, KafkaError.LEADER_NOT_AVAILABLE, 0),
        ("no/name", KafkaError.INVALID_TOPIC_EXCEPTION, 0),
        ("known", KafkaError.NONE, 1),
    ]
    assert node.barriers == 1


@pytest.mark.parametrize("version", [2, 7, 9])
def test_without_a_quorum_no_partition_seems_to_have_no_commit(version: int) -> None:
    """A client that looks at the partition first would begin at its reset policy, and skip records."""
    groups = [{"group_id": "g", "topics": [{"name": TOPIC, "partition_indexes": [0]}]}]
    request: Struct = {"require_stable": False, "groups": groups} | groups[0]

    async def call() -> Struct:
        return await HANDLERS[ApiKey.OFFSET_FETCH](gateway_of(LaggingNode(failure=NO_QUORUM)), version, request)

    answer = asyncio.run(call())
    (group,) = answer.get("groups", [answer])
    assert (group["error_code"], group["topics"]) == (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, [])


@pytest.mark.parametrize("named", [_produce, _fetch])
def test_a_known_topic_costs_no_barrier(named: Named) -> None:
    for name, topic_id in ((TOPIC, NO_TOPIC_ID), ("", TOPIC_ID)):
        node = LaggingNode()
        node.state = state_with((TOPIC, TOPIC_ID))
        assert set(ask(node, *named(name, topic_id))) == {KafkaError.NONE}
        assert node.barriers == 0


@pytest.mark.parametrize("named", [_list_offsets, _offset_for_leader_epoch, _delete_records, _metadata, _offset_commit])
def test_many_unknown_partitions_cost_one_barrier(named: Named) -> None:
    key, version, request = named("nowhere", NO_TOPIC_ID)
    request["topics"] *= 3
    for topic in request["topics"]:
        topic |= {"partitions": topic.get("partitions", []) * 4}
    node = LaggingNode()
    assert set(ask(node, key, version, request)) - {KafkaError.NONE} == {KafkaError.UNKNOWN_TOPIC_OR_PARTITION}
    assert node.barriers == 1


def test_many_unknown_ids_cost_a_fetch_one_barrier() -> None:
    key, version, request = _fetch("", GONE)
    request["topics"] += [*_fetch("", TOPIC_ID)[2]["topics"], *_fetch("", GONE)[2]["topics"]]
    node = LaggingNode()
    codes = ask(node, key, version, request)
    assert codes == [KafkaError.NONE, KafkaError.UNKNOWN_TOPIC_ID, KafkaError.NONE, KafkaError.UNKNOWN_TOPIC_ID]
    assert node.barriers == 1
