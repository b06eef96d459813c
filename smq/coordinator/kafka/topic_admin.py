"""CreateTopics, DeleteTopics and CreatePartitions: topics as an administrator changes them.

Owns the way from their requests to commands. Each topic is a command of its own, as in Kafka: a refused topic does not
hold up the others.
"""

from collections import Counter

from smq.coordinator.kafka.cluster_view import NO_TOPIC_ID, new_topic, refusals_as_errors
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_view import topic_entries
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, topic_error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.name_lookup import find_topic
from smq.raft_state.commands import AddPartitions, CreateTopic, DeleteTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, NodeId, TopicId
from smq.raft_state.limits import NODES_MAX, TOPIC_PARTITIONS_MAX
from smq.raft_state.replies import TopicCreated
from smq.raft_state.topic_rules import check_creation, check_growth


# ----------------------------------------------------------------------------------------------- CreateTopics
async def create_topics(gateway: Gateway, _version: int, request: Struct) -> Struct:
    counts = Counter(topic["name"] for topic in request["topics"])
    answers = [
        await _create(gateway, topic, request, is_twice=counts[topic["name"]] > 1) for topic in request["topics"]
    ]
    return {"throttle_time_ms": 0, "topics": answers}


async def _create(gateway: Gateway, requested: Struct, request: Struct, *, is_twice: bool) -> Struct:
    answer: Struct = {
        "name": requested["name"],
        "topic_id": NO_TOPIC_ID,
        "error_code": KafkaError.NONE,
        "error_message": None,
    }
    try:
        if is_twice:
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, f"the request names topic {requested['name']!r} twice")
        command = await _creation(gateway, requested)
        if request["validate_only"]:
            await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
            with refusals_as_errors():
                config = check_creation(gateway.state, command)
        else:
            gateway.mutate(command.partition_count)
            reply = await gateway.calls.propose(command, max(request["timeout_ms"], 1))
            answer["topic_id"] = reply.topic_id if isinstance(reply, TopicCreated) else NO_TOPIC_ID
            made = gateway.state.topics.get(command.name)  # None if it has been deleted in this moment
            config = made.config if made is not None else {}
    except (SmqError, KafkaRefusal) as e:
        return answer | topic_error_fields(e)
    return answer | {
        "num_partitions": command.partition_count,
        "replication_factor": command.replication_factor,
        "configs": topic_entries(config, command.replication_factor, gateway.state.config, gateway.state.feature_level),
    }


async def _creation(gateway: Gateway, requested: Struct) -> CreateTopic:
    """The command. If it cannot be made, the topic may exist: then that is the reason, as clients rely on it."""
    try:
        return _requested_creation(gateway, requested)
    except (SmqError, KafkaRefusal):
        name = requested["name"]
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
        if name in gateway.state.topics:
            raise SmqError(ErrorCode.TOPIC_EXISTS, f"topic {name!r} exists") from None
        raise


def _requested_creation(gateway: Gateway, requested: Struct) -> CreateTopic:
    partitions, replicas = requested["num_partitions"], requested["replication_factor"]
    assignments = requested["assignments"]
    if assignments and (partitions, replicas) != (-1, -1):
        message = "with a replica assignment, the numbers of partitions and of replicas must be -1"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    _check_count(partitions, default=-1)
    config = {c["name"]: c["value"] for c in requested["configs"]}
    if len(config) < len(requested["configs"]):
        raise KafkaRefusal(KafkaError.INVALID_CONFIG, "the request gives a configuration key twice")
    kept = sorted((key, value) for key, value in config.items() if value is not None)
    return new_topic(
        gateway,
        requested["name"],
        partitions=partitions,
        replicas=replicas,
        config=tuple(kept),
        assignments=_assignments_by_index(assignments),
    )


def _assignments_by_index(requested: list[Struct]) -> tuple[tuple[NodeId, ...], ...]:
    """In the order of the partitions, whatever the order of the request."""
    _check_assignment_count(len(requested))
    by_index = {a["partition_index"]: a["broker_ids"] for a in requested}
    if sorted(by_index) != list(range(len(requested))):
        message = "the assigned partitions must be 0, 1, 2 and so on, each once"
        raise KafkaRefusal(KafkaError.INVALID_REPLICA_ASSIGNMENT, message)
    return tuple(_replicas(by_index[index]) for index in range(len(requested)))


def _check_assignment_count(count: int) -> None:
    if count > TOPIC_PARTITIONS_MAX:
        message = f"{count} partitions: a topic has at most {TOPIC_PARTITIONS_MAX}"
        raise KafkaRefusal(KafkaError.INVALID_PARTITIONS, message)


def _replicas(broker_ids: list[int]) -> tuple[NodeId, ...]:
    """As many as there can be nodes: a longer list is refused as it is, so the command stays small."""
    return tuple(NodeId(broker) for broker in broker_ids[: NODES_MAX + 1])


def _check_count(count: int, *, default: int | None = None) -> None:
    if count != default and not 1 <= count <= TOPIC_PARTITIONS_MAX:
        raise KafkaRefusal(KafkaError.INVALID_PARTITIONS, f"{count} partitions: it must be 1 to {TOPIC_PARTITIONS_MAX}")


# ----------------------------------------------------------------------------------------------- DeleteTopics
async def delete_topics(gateway: Gateway, version: int, request: Struct) -> Struct:
    requested = (
        request["topics"] if version >= 6 else [{"name": n, "topic_id": NO_TOPIC_ID} for n in request["topic_names"]]
    )
    timeout_ms = max(request["timeout_ms"], 1)
    return {"throttle_time_ms": 0, "responses": [await _delete(gateway, topic, timeout_ms) for topic in requested]}


async def _delete(gateway: Gateway, requested: Struct, timeout_ms: int) -> Struct:
    answer: Struct = {
        "name": requested["name"],
        "topic_id": requested["topic_id"],
        "error_code": KafkaError.NONE,
        "error_message": None,
    }
    try:
        name = requested["name"]
        if name is None:
            name = await _name_of(gateway, requested["topic_id"], timeout_ms)
            answer["name"] = name
        else:
            answer["topic_id"] = (await find_topic(gateway.calls, name, timeout_ms)).topic_id
        found = gateway.state.topics.get(name)
        gateway.mutate(len(found.partitions) if found is not None else 0)
        await gateway.calls.propose(DeleteTopic(request_id=NO_REQUEST, name=name), timeout_ms)
    except (SmqError, KafkaRefusal) as e:
        return answer | topic_error_fields(e)
    return answer


async def _name_of(gateway: Gateway, topic_id: bytes, timeout_ms: int) -> str:
    """After a barrier: another topic may have the name by now. The command names no id, so one that is created under
    that name between the barrier and the command would still be deleted."""
    await gateway.calls.barrier(timeout_ms)
    name = gateway.state.topic_names.get(TopicId(topic_id))
    if name is None:
        raise KafkaRefusal(KafkaError.UNKNOWN_TOPIC_ID, f"there is no topic with the id {topic_id.hex()}")
    return name


# ------------------------------------------------------------------------------------------- CreatePartitions
async def create_partitions(gateway: Gateway, _version: int, request: Struct) -> Struct:
    results = [await _grow(gateway, topic, request) for topic in request["topics"]]
    return {"throttle_time_ms": 0, "results": results}


async def _grow(gateway: Gateway, requested: Struct, request: Struct) -> Struct:
    answer: Struct = {"name": requested["name"], "error_code": KafkaError.NONE, "error_message": None}
    timeout_ms = max(request["timeout_ms"], 1)
    try:
        _check_count(requested["count"])
        current = len((await find_topic(gateway.calls, requested["name"], timeout_ms)).partitions)
        if requested["count"] <= current:
            raise KafkaRefusal(
                KafkaError.INVALID_PARTITIONS, f"topic {requested['name']!r} already has {current} partitions"
            )
        assignments = requested["assignments"] or []
        _check_assignment_count(len(assignments))
        command = AddPartitions(
            request_id=NO_REQUEST,
            name=requested["name"],
            partition_count=requested["count"],
            assignments=tuple(_replicas(assignment["broker_ids"]) for assignment in assignments),
        )
        if request["validate_only"]:
            with refusals_as_errors():
                check_growth(gateway.state, command)
        else:
            gateway.mutate(requested["count"] - current)
            await gateway.calls.propose(command, timeout_ms)
    except (SmqError, KafkaRefusal) as e:
        return answer | topic_error_fields(e)
    return answer
