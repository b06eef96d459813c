"""OffsetCommit, OffsetFetch and OffsetDelete: the positions that groups have committed.

Owns the way from Kafka's requests to commands. Offsets are linearizable, and every node can read them. The group's
coordinator alone commits them, also for a group without members: a client that gets no answer commits again at the next
coordinator, and a command that the former one still has under way must not take effect after that. A member's commit is
a sign of life, too; the state machine decides whether the member may commit.
"""

from functools import partial
from typing import Final

from smq.coordinator.groups.member_requests import Identity
from smq.coordinator.groups.protocols import subscriptions
from smq.coordinator.kafka.cluster_view import (
    PREFIX,
    barrier_failure,
    confirmation_failure,
    coordinator_refusal,
    is_group,
    topic_names,
)
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, group_code_of, offset_fetch_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import COMMIT_ITEMS_MAX, GROUP_ANSWER_MS
from smq.coordinator.service.name_lookup import staged_partitions
from smq.coordinator.service.request_checks import check_count
from smq.raft_state.commands import OffsetCommit
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, Offset, PartitionId, split_partition_id
from smq.raft_state.limits import METADATA_BYTES_MAX
from smq.raft_state.state import ClusterState, CommittedOffset, GroupKind, GroupState, PartitionState

BY_ID_VERSION: Final = 10  # of both OffsetCommit and OffsetFetch
MEMBER_EPOCH_VERSION: Final = 9  # of both: members of consumer groups name their epochs
_UNKNOWN: Final = (KafkaError.UNKNOWN_TOPIC_ID, KafkaError.UNKNOWN_TOPIC_OR_PARTITION)
_GROUP_ERROR_VERSION: Final = 2  # OffsetFetch has a field for an error of the whole group; before, only of a partition
_STABLE_VERSION: Final = 7  # OffsetFetch can ask for it
_BATCHED_VERSION: Final = 8  # OffsetFetch for several groups
_NO_COMMIT: Final = CommittedOffset(offset=Offset(-1), metadata="", committed_ms=0)
_DELETE_ATTEMPTS: Final = 3  # one more each time the group has rebalanced meanwhile


# ----------------------------------------------------------------------------------------------- OffsetCommit
async def offset_commit(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Commits all partitions that exist by one command. Each of the others gets an error of its own."""
    by_id = version >= BY_ID_VERSION
    items: list[OffsetCommit] = []
    committed: list[Struct] = []  # the answers for `items`
    topics = []
    failure = await confirmation_failure(gateway, lambda state: _are_known(state, request["topics"], by_id=by_id))
    names = topic_names(gateway.state, request["topics"], "name", by_id=by_id)
    for topic, name in zip(request["topics"], names, strict=True):
        answers: list[Struct] = []
        topics.append({"name": topic["name"], "topic_id": topic["topic_id"], "partitions": answers})
        for requested in topic["partitions"]:
            part = gateway.state.partition_of(name, requested["partition_index"]) if name is not None else None
            code = _commit_refusal(request, requested, name, part)
            if failure is not None and code in _UNKNOWN:  # it may exist: the client should ask again
                code = group_code_of(failure)
            answer: Struct = {"partition_index": requested["partition_index"], "error_code": code}
            answers.append(answer)
            if part is not None and code is KafkaError.NONE:
                committed.append(answer)
                items.append(commit_of(part, requested))
    is_old = version < MEMBER_EPOCH_VERSION and request["generation_id_or_member_epoch"] >= 0
    if is_old and _is_consumers(gateway, PREFIX + request["group_id"]):
        code = KafkaError.UNSUPPORTED_VERSION
    else:
        code = await _commit(gateway, request, items)
    for answer in committed:
        answer["error_code"] = code
    return {"throttle_time_ms": 0, "topics": topics}


def _are_known(state: ClusterState, topics: list[Struct], *, by_id: bool) -> bool:
    for topic, name in zip(topics, topic_names(state, topics, "name", by_id=by_id), strict=True):
        if name is None or any(state.partition_of(name, p["partition_index"]) is None for p in topic["partitions"]):
            return False
    return True


def _commit_refusal(request: Struct, requested: Struct, name: str | None, part: PartitionState | None) -> KafkaError:
    if not is_group(request["group_id"]):
        return KafkaError.INVALID_GROUP_ID
    if name is None:
        return KafkaError.UNKNOWN_TOPIC_ID
    if is_metadata_too_large(requested):
        return KafkaError.OFFSET_METADATA_TOO_LARGE
    return KafkaError.NONE if part is not None else KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def is_metadata_too_large(requested: Struct) -> bool:
    return len((requested["committed_metadata"] or "").encode()) > METADATA_BYTES_MAX


def commit_of(part: PartitionState, requested: Struct) -> OffsetCommit:
    """Of a partition of OffsetCommit or TxnOffsetCommit."""
    return OffsetCommit(
        partition=part.pid,
        offset=Offset(requested["committed_offset"]),
        metadata=requested["committed_metadata"] or "",
        leader_epoch=requested["committed_leader_epoch"],
    )


async def _commit(gateway: Gateway, request: Struct, items: list[OffsetCommit]) -> KafkaError:
    if not items:
        return KafkaError.NONE
    group, generation = PREFIX + request["group_id"], request["generation_id_or_member_epoch"]
    who = Identity(member_id=request["member_id"], instance_id=request["group_instance_id"] or "")
    try:
        check_count("offsets", items, COMMIT_ITEMS_MAX)
        await gateway.calls.change(
            lambda done: gateway.groups.commit(group, who, generation, tuple(items), NO_REQUEST, GROUP_ANSWER_MS, done),
            GROUP_ANSWER_MS,
        )
    except SmqError as e:
        is_epoch = e.code is ErrorCode.ILLEGAL_GENERATION and _is_consumers(gateway, group)
        return KafkaError.STALE_MEMBER_EPOCH if is_epoch else group_code_of(e)
    return KafkaError.NONE


def _is_consumers(gateway: Gateway, name: str) -> bool:
    group = gateway.state.groups.get(name)
    return group is not None and group.kind is GroupKind.CONSUMER


# ------------------------------------------------------------------------------------------------ OffsetFetch
async def offset_fetch(gateway: Gateway, version: int, request: Struct) -> Struct:
    stable = version >= _STABLE_VERSION and request["require_stable"]
    if version >= _BATCHED_VERSION:
        groups = [await _fetch_group(gateway, version, requested, stable=stable) for requested in request["groups"]]
        return {"throttle_time_ms": 0, "groups": groups}
    answer = await _fetch_group(gateway, version, request, stable=stable)
    if version < _GROUP_ERROR_VERSION:
        for topic in answer["topics"]:
            for partition in topic["partitions"]:
                partition["error_code"] = answer["error_code"]
    return {"throttle_time_ms": 0} | answer


async def _fetch_group(gateway: Gateway, version: int, requested: Struct, *, stable: bool) -> Struct:
    """`topics` null asks for all that the group has committed. If the offsets must be `stable`, those that an open
    transaction may yet move are refused: a member that began with the present one would read twice."""
    answer: Struct = {"group_id": requested["group_id"], "error_code": KafkaError.NONE, "topics": []}
    name_of_group = PREFIX + requested["group_id"]
    commits: dict[PartitionId, CommittedOffset] = {}
    try:  # after a barrier, so what is unknown afterwards is confirmed
        await gateway.calls.barrier(GROUP_ANSWER_MS)
    except SmqError as e:
        answer["error_code"] = offset_fetch_code_of(e)
        if version >= _GROUP_ERROR_VERSION:
            return answer  # a client that looks at a partition first would take it for one without a commit
    else:
        group = gateway.state.groups.get(name_of_group)
        commits = {} if group is None else group.offsets
        if version >= MEMBER_EPOCH_VERSION:
            answer["error_code"] = _fetch_refusal(group, requested)
            if answer["error_code"] is not KafkaError.NONE:
                return answer
    # Of the same state as the commits: a transaction that ended in between would show neither its offsets nor its end.
    unstable = staged_partitions(gateway.state, name_of_group) if stable else frozenset()
    if requested["topics"] is None:
        answer["topics"] = _all_commits(gateway, commits, unstable)
        return answer
    names = topic_names(gateway.state, requested["topics"], "name", by_id=version >= BY_ID_VERSION)
    for topic, name in zip(requested["topics"], names, strict=True):
        topic_id, partitions = topic.get("topic_id", b""), []
        for index in topic["partition_indexes"]:
            part = gateway.state.partition_of(name, index) if name is not None else None
            found = commits.get(part.pid) if part is not None else None
            code = KafkaError.UNKNOWN_TOPIC_ID if name is None else KafkaError.NONE
            if part is not None and part.pid in unstable:
                found, code = None, KafkaError.UNSTABLE_OFFSET_COMMIT
            partitions.append(_committed(index, found, code))
        answer["topics"].append({"name": topic["name"], "topic_id": topic_id, "partitions": partitions})
    return answer


def _fetch_refusal(group: GroupState | None, requested: Struct) -> KafkaError:
    """A member of a consumer group that names itself must be in the epoch that it names."""
    if group is None or group.kind is not GroupKind.CONSUMER:
        return KafkaError.NONE
    member_id, epoch = requested["member_id"], requested["member_epoch"]
    if not member_id and epoch < 0:
        return KafkaError.NONE
    member = group.members.get(member_id or "")
    if member is None:
        return KafkaError.UNKNOWN_MEMBER_ID
    return KafkaError.NONE if member.epoch == epoch else KafkaError.STALE_MEMBER_EPOCH


def _all_commits(
    gateway: Gateway, commits: dict[PartitionId, CommittedOffset], unstable: frozenset[PartitionId]
) -> list[Struct]:
    topics: dict[str, Struct] = {}
    for pid in sorted(commits.keys() | unstable):
        topic_id, index = split_partition_id(pid)
        name = gateway.state.topic_names.get(topic_id)
        if name is not None:
            topic = topics.setdefault(name, {"name": name, "topic_id": topic_id, "partitions": []})
            code = KafkaError.UNSTABLE_OFFSET_COMMIT if pid in unstable else KafkaError.NONE
            topic["partitions"].append(_committed(index, None if pid in unstable else commits[pid], code))
    return list(topics.values())


def _committed(index: int, found: CommittedOffset | None, code: KafkaError) -> Struct:
    """A negative offset is returned as it was committed: clients take it as none."""
    found = found or _NO_COMMIT
    return {
        "partition_index": index,
        "committed_offset": found.offset,
        "committed_leader_epoch": found.leader_epoch,
        "metadata": found.metadata,
        "error_code": code,
    }


# ----------------------------------------------------------------------------------------------- OffsetDelete
async def offset_delete(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Deletes what a group has committed for partitions that none of its members subscribes to."""
    name, answer = request["group_id"], {"error_code": KafkaError.INVALID_GROUP_ID, "throttle_time_ms": 0, "topics": []}
    if not is_group(name):
        return answer
    answer["error_code"] = coordinator_refusal(gateway, PREFIX + name) or await barrier_failure(gateway)
    for _ in range(_DELETE_ATTEMPTS):
        group = gateway.state.groups.get(PREFIX + name)
        if group is None:
            answer["error_code"] = answer["error_code"] or KafkaError.GROUP_ID_NOT_FOUND
        if group is None or answer["error_code"] is not KafkaError.NONE:
            return answer
        subscribed = subscriptions(group)
        if subscribed is None:
            return answer | {"error_code": KafkaError.NON_EMPTY_GROUP}
        pids, answer["topics"] = _deletable(gateway, request["topics"], subscribed)
        try:
            begin = partial(
                gateway.groups.delete_offsets, group.name, group.generation, tuple(pids), NO_REQUEST, GROUP_ANSWER_MS
            )
            await gateway.calls.change(begin, GROUP_ANSWER_MS)
        except SmqError as e:
            if e.code is ErrorCode.ILLEGAL_GENERATION:
                continue
            return answer | {"error_code": group_code_of(e), "topics": []}
        return answer
    return answer | {"error_code": KafkaError.REBALANCE_IN_PROGRESS, "topics": []}


def _deletable(
    gateway: Gateway, requested: list[Struct], subscribed: frozenset[str]
) -> tuple[list[PartitionId], list[Struct]]:
    """The partitions to delete, and the answers for all."""
    pids: list[PartitionId] = []
    topics = []
    for topic in requested:
        answers = []
        for partition in topic["partitions"]:
            index = partition["partition_index"]
            part = gateway.state.partition_of(topic["name"], index)
            code = KafkaError.NONE
            if part is None:
                code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            elif topic["name"] in subscribed:
                code = KafkaError.GROUP_SUBSCRIBED_TO_TOPIC
            elif len(pids) < COMMIT_ITEMS_MAX:
                pids.append(part.pid)
            else:
                code = KafkaError.POLICY_VIOLATION
            answers.append({"partition_index": index, "error_code": code})
        topics.append({"name": topic["name"], "partitions": answers})
    return pids, topics
