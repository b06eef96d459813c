"""The rights that each key needs: every key has a row, and without rights no version of it does or reveals anything."""

from collections.abc import Iterator
from typing import Any

import pytest

from smq.coordinator.kafka.api_keys import SERVED, ApiKey, request_decoder, request_message, response_message
from smq.coordinator.kafka.authorization import MAY_CREATE, RULES, Access, Refusal, check
from smq.coordinator.kafka.cluster_view import NO_TOPIC_ID
from smq.coordinator.kafka.codec import Struct, compile_decoder, compile_encoder
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.authorizer import Authorizer
from smq.raft_state.commands import Acl
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource
from smq.raft_state.ids import TopicId
from smq.raft_state.state import ClusterState, TopicState
from smq.testing.kafka_client import _filled

FREE = {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.DESCRIBE_CLUSTER}
IN_ANSWER = {ApiKey.METADATA, ApiKey.LIST_GROUPS, ApiKey.LIST_TRANSACTIONS}  # what may not be seen is left out
REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.OPERATION_NOT_ATTEMPTED,
}
SILENT = {(ApiKey.DESCRIBE_LOG_DIRS, 1), (ApiKey.DESCRIBE_LOG_DIRS, 2)}  # no field says so: the answer is empty
SECRET_ID = TopicId(b"s" * 16)
KNOWN_ID = TopicId(b"o" * 16)


def asked(key: int, version: int, name: str = "secret", topic_id: bytes = SECRET_ID) -> Struct:
    """A request that names one of everything, as a handler gets it."""
    resource = {"resource_type": 2, "resource_name": name, "configs": [], "configuration_keys": None}
    partitions: dict[int, list[Any]] = {
        ApiKey.FETCH: [{"partition": 0, "partition_max_bytes": 1}],
        ApiKey.OFFSET_FOR_LEADER_EPOCH: [{"partition": 0}],
        ApiKey.ADD_PARTITIONS_TO_TXN: [0],
        ApiKey.ELECT_LEADERS: [0],
        ApiKey.CONSUMER_GROUP_HEARTBEAT: [0],
        ApiKey.DESCRIBE_LOG_DIRS: [0],
    }
    indexed = partitions.get(key, [{"partition_index": 0}])
    topic = {"name": name, "topic": name, "topic_id": topic_id, "partitions": indexed, "partition_indexes": [0]}
    topic |= {"partition_data": [{"index": 0, "records": [b"r"]}], "topic_name": name}
    if key in (ApiKey.METADATA, ApiKey.DELETE_TOPICS):
        topic |= {"topic_id": NO_TOPIC_ID}
    groups: list[Any] = [name]
    if key == ApiKey.OFFSET_FETCH:
        groups = [{"group_id": name, "topics": [topic]}]
    credential = {"name": name, "mechanism": 1, "iterations": 4_096, "salt": b"s", "salted_password": b"p"}
    values: Struct = {
        "topics": [topic],
        "topic_data": [topic],
        "topic_names": [name],
        "topic_partitions": [topic],
        "v3_and_below_topics": [topic],
        "v3_and_below_transactional_id": name,
        "transactional_id": name,
        "transactional_ids": [name],
        "group_id": name,
        "groups": groups,
        "groups_names": [name],
        "group_ids": [name],
        "key": name,
        "coordinator_keys": [name],
        "resources": [resource],
        "deletions": [{"name": name, "mechanism": 1}],
        "upsertions": [credential],
        "entries": [{"entity": [], "ops": []}],
        "creations": [{"resource_name": name, "principal": "User:x", "host": "*"}],
        "filters": [{"resource_name_filter": None, "principal_filter": None, "host_filter": None}],
    }
    message = request_message(key)
    body = b"".join(compile_encoder(message, version)(_filled(values, message.fields, version)))
    return request_decoder(key, version)(memoryview(body), 0)


def access_of(*rules: tuple[Operation, Resource, str], user: str = "alice") -> Access:
    acls = [Acl(resource, 3, name, "User:alice", "*", operation, 3) for operation, resource, name in rules]
    names = {SECRET_ID: "secret", KNOWN_ID: "open"}
    common: Struct = {"replication_factor": 1, "config": {}, "created_ms": 0, "partitions": []}
    topics = {name: TopicState(name=name, topic_id=topic_id, **common) for topic_id, name in names.items()}
    state = ClusterState(acls=tuple(sorted(acls)), topic_names=names, topics=topics)
    return Access(Authorizer(lambda: state, ("root",)), user, "h", lambda: state)


def codes(value: Any) -> Iterator[int]:
    """Every error code in an answer."""
    if isinstance(value, list):
        for item in value:
            yield from codes(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key.endswith("error_code") and key != "topic_config_error_code":  # which is of a topic that was made
                yield item
            else:
                yield from codes(item)


def encoded(key: int, version: int, answer: Struct) -> Struct:
    """As the client reads it."""
    body = b"".join(bytes(part) for part in compile_encoder(response_message(key), version)(answer))
    return compile_decoder(response_message(key), version)(memoryview(body), 0)


def test_every_key_has_a_row() -> None:
    assert RULES.keys() == SERVED.keys()


EACH = [(key, v) for key, row in SERVED.items() for v in range(row.versions.lo, row.versions.hi + 1)]


@pytest.mark.parametrize(("key", "version"), EACH, ids=[f"{ApiKey(key).name}-{version}" for key, version in EACH])
def test_without_rights_nothing_is_done_and_the_answer_says_so(key: int, version: int) -> None:
    if key in FREE | IN_ANSWER:
        return
    with pytest.raises(Refusal) as refused:
        check(access_of(), key, version, asked(key, version))
    found = set(codes(encoded(key, version, refused.value.answer)))
    assert found & REFUSED or (key, version) in SILENT
    assert found <= REFUSED | {KafkaError.NONE}
    everything = [(Operation.ALL, kind, CLUSTER_NAME if kind is Resource.CLUSTER else "secret") for kind in Resource]
    for access in (access_of(*everything), access_of(user="root")):
        request = asked(key, version)
        before = repr(request)
        check(access, key, version, request)
        request.pop("may_see", None)  # what a pattern may find
        assert repr(request) == before


TOPIC_KEYS = [
    (ApiKey.PRODUCE, 9, "topic_data", "responses", Operation.WRITE),
    (ApiKey.PRODUCE, 13, "topic_data", "responses", Operation.WRITE),
    (ApiKey.FETCH, 12, "topics", "responses", Operation.READ),
    (ApiKey.FETCH, 13, "topics", "responses", Operation.READ),
    (ApiKey.LIST_OFFSETS, 7, "topics", "topics", Operation.DESCRIBE),
    (ApiKey.METADATA, 12, "topics", "topics", Operation.DESCRIBE),
    (ApiKey.OFFSET_COMMIT, 10, "topics", "topics", Operation.READ),
    (ApiKey.TXN_OFFSET_COMMIT, 3, "topics", "topics", Operation.READ),
    (ApiKey.CREATE_TOPICS, 7, "topics", "topics", Operation.CREATE),
    (ApiKey.DELETE_TOPICS, 6, "topics", "responses", Operation.DELETE),
    (ApiKey.DELETE_RECORDS, 2, "topics", "topics", Operation.DELETE),
    (ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, "topics", "topics", Operation.DESCRIBE),
    (ApiKey.CREATE_PARTITIONS, 3, "topics", "results", Operation.ALTER),
    (ApiKey.DESCRIBE_PRODUCERS, 0, "topics", "topics", Operation.READ),
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, "topics", "topics", Operation.DESCRIBE),
]


@pytest.mark.parametrize(("key", "version", "field", "answered", "operation"), TOPIC_KEYS)
def test_of_several_topics_those_are_served_that_the_user_has_a_right_to(
    key: int, version: int, field: str, answered: str, operation: Operation
) -> None:
    rest = [(Operation.ALL, Resource.TRANSACTIONAL_ID, "secret"), (Operation.ALL, Resource.GROUP, "secret")]
    request = asked(key, version)
    request[field] += asked(key, version, "open", KNOWN_ID)[field]
    complete = check(access_of((operation, Resource.TOPIC, "open"), *rest), key, version, request)
    assert complete is not None
    (left,) = request[field]
    assert (left.get("name") or left.get("topic") or "open", left.get("topic_id", KNOWN_ID)) in (
        ("open", NO_TOPIC_ID),
        ("open", KNOWN_ID),
    )
    served = {"name": "open", "topic": "open", "topic_id": KNOWN_ID, "error_code": 0, "partitions": []}
    served |= {"topic_authorized_operations": -(2**31)}
    handled = _filled({answered: [served]}, response_message(key).fields, version)
    found = encoded(key, version, complete(handled))[answered]
    assert [KafkaError.TOPIC_AUTHORIZATION_FAILED in set(codes(row)) for row in found] == [False, True]


@pytest.mark.parametrize("version", [0, 3, 12])
def test_metadata_of_topics_without_a_right_still_names_the_nodes(version: int) -> None:
    request = asked(ApiKey.METADATA, version)
    complete = check(access_of(), ApiKey.METADATA, version, request)
    assert complete is not None
    assert request["topics"] == []  # with version 0 the handler answers about all
    row = {"name": "open", "topic_id": KNOWN_ID, "topic_authorized_operations": 0}
    handled = {"brokers": [{"node_id": 1}], "topics": [row] if version == 0 else []}
    fields = response_message(ApiKey.METADATA).fields
    found = encoded(ApiKey.METADATA, version, complete(_filled(handled, fields, version)))
    assert [node["node_id"] for node in found["brokers"]] == [1]  # without them Java's clients drop the answer
    assert [(row["name"], row["error_code"]) for row in found["topics"]] == [("secret", 29)]


def test_the_id_of_no_topic_is_answered_before_it_may_become_one() -> None:
    request = asked(ApiKey.PRODUCE, 13, topic_id=b"?" * 16)
    request["transactional_id"] = None
    with pytest.raises(Refusal) as refused:
        check(access_of((Operation.ALL, Resource.TOPIC, "*")), ApiKey.PRODUCE, 13, request)
    assert set(codes(refused.value.answer)) == {KafkaError.UNKNOWN_TOPIC_ID}


def test_a_name_and_an_id_in_one_request_need_both_rights() -> None:
    access = access_of((Operation.ALL, Resource.TOPIC, "open"))
    for topic in ({"name": "open", "topic_id": SECRET_ID}, {"name": "secret", "topic_id": KNOWN_ID}):
        request = {"topics": [topic]}
        with pytest.raises(Refusal):
            check(access, ApiKey.DELETE_TOPICS, 6, request)


def test_lists_of_everything_leave_out_what_the_user_may_not_see() -> None:
    rights = (
        (Operation.READ, Resource.TOPIC, "open"),
        (Operation.DESCRIBE, Resource.GROUP, "open"),
        (Operation.WRITE, Resource.TRANSACTIONAL_ID, "open"),
    )
    names = ("open", "secret")
    topics = [{"error_code": 0, "name": n, "topic_id": NO_TOPIC_ID, "topic_authorized_operations": 0} for n in names]
    offsets = [{"name": n, "partitions": [{"partition_index": 0, "committed_offset": 5}]} for n in names]
    group = {"group_id": "open", "topics": None}
    named = {"group_id": "open", "topics": []}  # the same group again must not change what is shown of it
    for key, version, request, field, rows in (
        (ApiKey.METADATA, 12, {"topics": None}, "topics", topics),
        (ApiKey.METADATA, 0, {"topics": []}, "topics", topics),
        (ApiKey.LIST_GROUPS, 5, {}, "groups", [{"group_id": n} for n in names]),
        (ApiKey.LIST_TRANSACTIONS, 1, {}, "transaction_states", [{"transactional_id": n} for n in names]),
        (ApiKey.OFFSET_FETCH, 7, group, "topics", offsets),
        (ApiKey.OFFSET_FETCH, 8, {"groups": [group, named]}, "groups", [{"group_id": "open", "topics": offsets}] * 2),
    ):
        complete = check(access_of(*rights), key, version, dict(request))
        assert complete is not None
        shown = complete({field: [dict(row) for row in rows]})[field]
        if "topics" in shown[0]:
            shown = shown[0]["topics"]
        assert [row.get("name") or row.get("group_id") or row.get("transactional_id") for row in shown] == ["open"]


@pytest.mark.parametrize("hidden", ["subscribed", "assignment", "target_assignment", ""])
def test_a_consumer_group_with_a_hidden_topic_does_not_show_its_members(hidden: str) -> None:
    access = access_of((Operation.DESCRIBE, Resource.GROUP, "g"), (Operation.READ, Resource.TOPIC, "open"))
    member: Struct = {"subscribed_topic_names": ["secret" if hidden == "subscribed" else "open"]}
    for name in ("assignment", "target_assignment"):
        member[name] = {"topic_partitions": [{"topic_name": "secret" if hidden == name else "open"}]}
    group = {"group_id": "g", "error_code": 0, "members": [member], "authorized_operations": 0}
    complete = check(access, ApiKey.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": ["g"]})
    assert complete is not None
    (shown,) = complete({"groups": [group]})["groups"]
    code = KafkaError.TOPIC_AUTHORIZATION_FAILED if hidden else KafkaError.NONE
    assert (shown["error_code"], shown["members"]) == (code, [] if hidden else [member])


def test_a_named_topic_of_a_groups_offsets_has_an_error() -> None:
    access = access_of((Operation.READ, Resource.GROUP, "secret"))
    request = asked(ApiKey.OFFSET_FETCH, 7)
    complete = check(access, ApiKey.OFFSET_FETCH, 7, request)
    assert complete is not None
    part = {"partition_index": 0, "committed_offset": 5, "metadata": "m", "error_code": 0}
    (topic,) = complete({"topics": [{"name": "secret", "partitions": [part]}]})["topics"]
    (row,) = topic["partitions"]
    assert (row["error_code"], row["committed_offset"], row["metadata"]) == (29, -1, "")


def test_authorized_operations_are_the_users_own() -> None:
    access = access_of((Operation.READ, Resource.TOPIC, "open"), (Operation.READ, Resource.GROUP, "secret"))
    both = 1 << Operation.READ | 1 << Operation.DESCRIBE
    complete = check(access, ApiKey.METADATA, 12, {"topics": None})
    assert complete is not None
    row = {"error_code": 0, "name": "open", "topic_id": KNOWN_ID, "topic_authorized_operations": 4095}
    answer = complete({"topics": [row], "cluster_authorized_operations": 4095})
    assert answer["topics"][0]["topic_authorized_operations"] == both
    assert answer["cluster_authorized_operations"] == 0
    complete = check(access, ApiKey.DESCRIBE_GROUPS, 5, {"groups": ["secret"]})
    assert complete is not None
    answer = complete({"groups": [{"group_id": "secret", "authorized_operations": 4095}]})
    assert answer["groups"][0]["authorized_operations"] == both


def test_a_topic_is_not_created_by_asking_for_it_without_the_right_to() -> None:
    access = access_of((Operation.DESCRIBE, Resource.TOPIC, "*"), (Operation.CREATE, Resource.TOPIC, "mine"))
    request: Struct = {"topics": [{"name": name, "topic_id": NO_TOPIC_ID} for name in ("new", "mine")]}
    check(access, ApiKey.METADATA, 3, request)
    assert [(topic["name"], topic[MAY_CREATE]) for topic in request["topics"]] == [("new", False), ("mine", True)]


def test_pages_of_all_topics_are_pages_of_those_that_the_user_sees() -> None:
    """Otherwise the cursor to the next page would name a hidden topic."""
    request: Struct = {"topics": [], "cursor": None}
    check(access_of((Operation.READ, Resource.TOPIC, "open")), ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request)
    assert request["topics"] == [{"name": "open"}]
    with pytest.raises(Refusal) as refused:
        check(access_of(), ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [], "cursor": None})
    assert encoded(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, refused.value.answer)["topics"] == []


def test_a_user_gets_a_producer_id_of_its_own_and_fences_nobody() -> None:
    request = {"transactional_id": None, "producer_id": 7, "producer_epoch": 0}
    check(access_of((Operation.WRITE, Resource.TOPIC, "open")), ApiKey.INIT_PRODUCER_ID, 5, request)
    assert (request["producer_id"], request["producer_epoch"]) == (-1, -1)


def test_the_settings_of_a_new_topic_need_a_right_of_their_own() -> None:
    create, describe = (Operation.CREATE, Resource.TOPIC, "open"), (Operation.DESCRIBE_CONFIGS, Resource.TOPIC, "open")
    row = {"name": "open", "error_code": 0, "num_partitions": 1, "configs": [{"name": "retention.ms"}]}
    for rights, code, names in (((create,), 29, []), ((create, describe), 0, ["retention.ms"])):
        complete = check(access_of(*rights), ApiKey.CREATE_TOPICS, 7, asked(ApiKey.CREATE_TOPICS, 7, "open"))
        assert complete is not None
        fields = response_message(ApiKey.CREATE_TOPICS).fields
        (topic,) = encoded(ApiKey.CREATE_TOPICS, 7, complete(_filled({"topics": [row]}, fields, 7)))["topics"]
        assert (topic["error_code"], topic["topic_config_error_code"]) == (0, code)
        assert [config["name"] for config in topic["configs"]] == names
