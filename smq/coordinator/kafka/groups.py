"""FindCoordinator, OffsetCommit and OffsetFetch.

Owns the names: group g of Kafka is group kafka-cg-g of the cluster, with one set of offsets for both. Offsets are
linearizable, and read at any node. They are committed at the group's coordinator, for members and for nobody: a client
that hears nothing commits again, at the next coordinator, and what the former one still has under way must not come
behind that. A member's commit is a sign of life, too; whether it may is for the state machine to say.
"""

from typing import Final

from smq.coordinator.groups.types import Identity
from smq.coordinator.grpc.broker import check_count
from smq.coordinator.kafka.cluster import Gateway, endpoint, find_known, topic_named
from smq.coordinator.kafka.compiler import Struct
from smq.coordinator.kafka.errors import KafkaError, group_code_of
from smq.coordinator.limits import COMMIT_ITEMS_MAX, KAFKA_CONFIRM_MS, TIMEOUT_MS_DEFAULT
from smq.coordinator.service.calls import Answer
from smq.raft_state.commands import OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST, Offset, PartitionId, split_partition_id
from smq.raft_state.limits import GROUP_NAME_BYTES_MAX, METADATA_BYTES_MAX
from smq.raft_state.replies import Reply
from smq.raft_state.state import PartitionState

PREFIX: Final = "kafka-cg-"
BY_ID_VERSION: Final = 10  # of both OffsetCommit and OffsetFetch
_BATCHED_VERSION: Final = 8  # OffsetFetch for several groups
_MANY_KEYS_VERSION: Final = 4  # FindCoordinator for several groups
_KEY_OF_GROUP: Final = 0


# -------------------------------------------------------------------------------------------- FindCoordinator
async def find_coordinator(gateway: Gateway, version: int, request: Struct) -> Struct:
    if version >= _MANY_KEYS_VERSION:
        found = [_coordinator(gateway, key, request["key_type"]) for key in request["coordinator_keys"]]
        return {"throttle_time_ms": 0, "coordinators": found}
    return {"throttle_time_ms": 0} | _coordinator(gateway, request["key"], request["key_type"])


def _coordinator(gateway: Gateway, key: str, key_type: int) -> Struct:
    answer: Struct = {"key": key, "error_code": KafkaError.NONE, "error_message": None}
    nobody = {"node_id": -1, "host": "", "port": -1}
    if key_type != _KEY_OF_GROUP:
        message = "only groups have coordinators here: there are no transactions"
        return answer | nobody | {"error_code": KafkaError.INVALID_REQUEST, "error_message": message}
    if not is_group(key):
        return answer | nobody | {"error_code": KafkaError.INVALID_GROUP_ID}
    slot = coordinator_of(gateway.state, PREFIX + key)
    node = gateway.state.nodes.get(slot.node)
    address = endpoint(node) if node is not None and not node.fenced else None
    if address is None:
        return answer | nobody | {"error_code": KafkaError.COORDINATOR_NOT_AVAILABLE}
    return answer | {"node_id": slot.node, "host": address[0], "port": address[1]}


# ----------------------------------------------------------------------------------------------- OffsetCommit
async def offset_commit(gateway: Gateway, version: int, request: Struct) -> Struct:
    """All partitions that exist in one command; those that do not are told so one by one."""
    items: list[OffsetCommit] = []
    committed: list[Struct] = []  # their answers
    topics = []
    await _know(gateway, request["topics"], version)
    for topic in request["topics"]:
        name = topic_named(gateway.state, topic.get("name", ""), topic["topic_id"], by_id=version >= BY_ID_VERSION)
        answers: list[Struct] = []
        topics.append({"name": topic["name"], "topic_id": topic["topic_id"], "partitions": answers})
        for asked in topic["partitions"]:
            part = find_known(gateway.state, name, asked["partition_index"]) if name is not None else None
            code = _commit_refusal(request, asked, name, part)
            answer: Struct = {"partition_index": asked["partition_index"], "error_code": code}
            answers.append(answer)
            if part is not None and code is KafkaError.NONE:
                committed.append(answer)
                offset, metadata = Offset(asked["committed_offset"]), asked["committed_metadata"] or ""
                items.append(OffsetCommit(partition=part.pid, offset=offset, metadata=metadata))
    code = await _commit(gateway, request, items)
    for answer in committed:
        answer["error_code"] = code
    return {"throttle_time_ms": 0, "topics": topics}


def _commit_refusal(request: Struct, asked: Struct, name: str | None, part: PartitionState | None) -> KafkaError:
    if not is_group(request["group_id"]):
        return KafkaError.INVALID_GROUP_ID
    if name is None:
        return KafkaError.UNKNOWN_TOPIC_ID
    if len((asked["committed_metadata"] or "").encode()) > METADATA_BYTES_MAX:
        return KafkaError.OFFSET_METADATA_TOO_LARGE
    if asked["committed_offset"] < 0:
        return KafkaError.INVALID_REQUEST
    return KafkaError.NONE if part is not None else KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def is_group(name: str) -> bool:
    """Whether it can be the name of a group: a longer one need not travel through Raft to be refused."""
    return bool(name) and len((PREFIX + name).encode()) <= GROUP_NAME_BYTES_MAX


async def _commit(gateway: Gateway, request: Struct, items: list[OffsetCommit]) -> KafkaError:
    if not items:
        return KafkaError.NONE
    group, generation = PREFIX + request["group_id"], request["generation_id_or_member_epoch"]
    who = Identity(member_id=request["member_id"], instance_id=request["group_instance_id"] or "")
    try:
        check_count("offsets", items, COMMIT_ITEMS_MAX)
        code = gateway.groups.refusal(group)
        if code is KafkaError.NONE:
            answer = Answer[Reply](gateway.calls.patience)
            gateway.groups.commit(group, who, generation, tuple(items), NO_REQUEST, TIMEOUT_MS_DEFAULT, answer.done)
            await answer.result(TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return group_code_of(e)
    return code


async def _know(gateway: Gateway, topics: list[Struct], version: int) -> None:
    """One barrier where a topic is not known here yet; what is unknown afterwards does not exist."""
    state = gateway.state
    for topic in topics:
        name = topic_named(state, topic["name"], topic["topic_id"], by_id=version >= BY_ID_VERSION)
        if name is None or any(find_known(state, name, p["partition_index"]) is None for p in topic["partitions"]):
            try:
                await gateway.calls.barrier(KAFKA_CONFIRM_MS)
            except SmqError:
                pass  # "unknown" is retriable, and so the right answer of a node without a quorum
            return


# ------------------------------------------------------------------------------------------------ OffsetFetch
async def offset_fetch(gateway: Gateway, version: int, request: Struct) -> Struct:
    if version >= _BATCHED_VERSION:
        groups = [await _fetch_group(gateway, version, asked) for asked in request["groups"]]
        return {"throttle_time_ms": 0, "groups": groups}
    answer = await _fetch_group(gateway, version, request)
    if version < 2:  # there is no place for an error but with the partitions
        for topic in answer["topics"]:
            for partition in topic["partitions"]:
                partition["error_code"] = answer["error_code"]
    return {"throttle_time_ms": 0} | answer


async def _fetch_group(gateway: Gateway, version: int, asked: Struct) -> Struct:
    """`topics` null asks for all that the group has committed."""
    answer: Struct = {"group_id": asked["group_id"], "error_code": KafkaError.NONE, "topics": []}
    try:
        commits = await gateway.calls.fetch_offsets(PREFIX + asked["group_id"], None, TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        answer["error_code"] = group_code_of(e)
        commits = {}
    if asked["topics"] is None:
        answer["topics"] = _all_commits(gateway, commits)
        return answer
    for topic in asked["topics"]:
        by_id = version >= BY_ID_VERSION
        topic_id = topic.get("topic_id", b"")
        name = topic_named(gateway.state, topic["name"], topic_id, by_id=by_id)
        partitions = []
        for index in topic["partition_indexes"]:
            part = find_known(gateway.state, name, index) if name is not None else None
            found = commits.get(part.pid) if part is not None else None
            partitions.append(
                _committed(index, found, KafkaError.UNKNOWN_TOPIC_ID if name is None else KafkaError.NONE)
            )
        answer["topics"].append({"name": topic["name"], "topic_id": topic_id, "partitions": partitions})
    return answer


def _all_commits(gateway: Gateway, commits: dict[PartitionId, tuple[Offset, str]]) -> list[Struct]:
    topics: dict[str, Struct] = {}
    for pid, found in sorted(commits.items()):
        topic_id, index = split_partition_id(pid)
        name = gateway.state.topic_names.get(topic_id)
        if name is not None:
            topic = topics.setdefault(name, {"name": name, "topic_id": topic_id, "partitions": []})
            topic["partitions"].append(_committed(index, found, KafkaError.NONE))
    return list(topics.values())


def _committed(index: int, found: tuple[Offset, str] | None, code: KafkaError) -> Struct:
    offset, metadata = found if found is not None else (-1, "")
    return {"partition_index": index, "committed_offset": offset, "metadata": metadata, "error_code": code}
