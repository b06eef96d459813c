"""What a user of this port may do: the rights that each rpc needs, and what of an answer it may see.

Owns the table from rpcs to rights, which are those of Kafka's requests for the same thing. A request that names
something without a right to it is refused whole, with an error that does not say whether that exists; a list of
everything leaves it out. An rpc without a row is refused. It must never decide: the authorizer does. `service` asks it
before a handler runs, and completes the handler's answer by it; streams ask for each request.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import KAFKA_GROUP_PREFIX
from smq.coordinator.grpc.gate import Caller
from smq.raft_state.handlers.acls import CLUSTER_NAME, Operation, Resource

Complete: TypeAlias = Callable[[Any], None]  # takes out of an answer what the user may not see
Rule: TypeAlias = Callable[[Caller, Any], Complete | None]  # NOT_AUTHORIZED


def check(caller: Caller, method: str, request: object) -> Complete | None:
    """NOT_AUTHORIZED if nothing of the request may be done. KeyError for an rpc that no row has."""
    return None if caller.may_all else RULES[method](caller, request)


# ---------------------------------------------------------------------------------------------------- resources
def on_topic(caller: Caller, operation: Operation, name: str) -> None:
    caller.require(operation, Resource.TOPIC, name)


def on_group(caller: Caller, operation: Operation, name: str) -> None:
    """A Kafka client's group g is kafka-cg-g here, and g in rules."""
    caller.require(operation, Resource.GROUP, name.removeprefix(KAFKA_GROUP_PREFIX))


def _sees_group(caller: Caller, name: str) -> bool:
    return caller.may(Operation.DESCRIBE, Resource.GROUP, name.removeprefix(KAFKA_GROUP_PREFIX))


def _sees_topic(caller: Caller, name: str) -> bool:
    return caller.may(Operation.DESCRIBE, Resource.TOPIC, name)


def _sees_id(caller: Caller, name: str) -> bool:
    return caller.may(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, name)


def _keep(rows: Any, may: Callable[[Any], bool]) -> None:
    """Of a repeated field."""
    kept = [row for row in rows if may(row)]
    if len(kept) < len(rows):
        del rows[:]
        rows.extend(kept)


# -------------------------------------------------------------------------------------------------------- kinds
def _free(_caller: Caller, _request: object) -> None:
    """For every user; or each request of a stream is judged, by what is below."""


def _topic(operation: Operation, field: str = "topic") -> Rule:
    return lambda caller, request: on_topic(caller, operation, getattr(request, field))


def _group(operation: Operation) -> Rule:
    return lambda caller, request: on_group(caller, operation, request.group)


def _id(operation: Operation) -> Rule:
    return lambda caller, request: caller.require(operation, Resource.TRANSACTIONAL_ID, request.transactional_id)


def _cluster(operation: Operation) -> Rule:
    return lambda caller, _request: caller.require(operation, Resource.CLUSTER, CLUSTER_NAME)


def _topics(operation: Operation, field: str) -> Rule:
    """Of a list of partitions."""

    def rule(caller: Caller, request: Any) -> None:
        _each_topic(caller, operation, getattr(request, field))

    return rule


def _each_topic(caller: Caller, operation: Operation, parts: Iterable[Any]) -> None:
    for name in {part.topic for part in parts}:
        on_topic(caller, operation, name)


def _all(*rules: Rule) -> Rule:
    def rule(caller: Caller, request: object) -> None:
        for each in rules:
            each(caller, request)

    return rule


def _listed(field: str, may: Callable[[Caller, Any], bool]) -> Rule:
    """A list of everything."""

    def rule(caller: Caller, _request: object) -> Complete:
        return lambda answer: _keep(getattr(answer, field), lambda row: may(caller, row))

    return rule


# ------------------------------------------------------------------------------------------------------ streams
def may_subscribe(caller: Caller, init: pb.SubscribeInit) -> None:
    on_topic(caller, Operation.READ, init.topic)
    if init.group:
        on_group(caller, Operation.DESCRIBE, init.group)


# ------------------------------------------------------------------------------------------ what needs more words
def _start_session(caller: Caller, request: pb.StartPublishSessionRequest) -> None:
    """As in Kafka: an id has no owner, and its next epoch would fence the producer that has it. So it gets a new
    one."""
    on_topic(caller, Operation.WRITE, request.topic)
    for field in ("resume", "producer_id", "producer_epoch"):
        request.ClearField(field)


def _list_offsets(caller: Caller, request: pb.ListOffsetsRequest) -> None:
    _each_topic(caller, Operation.DESCRIBE, request.partitions)
    for group in {part.group for part in request.partitions if part.group}:
        on_group(caller, Operation.DESCRIBE, group)


def _fetch_offsets(caller: Caller, request: pb.FetchOffsetsRequest) -> Complete:
    on_group(caller, Operation.DESCRIBE, request.group)
    _each_topic(caller, Operation.DESCRIBE, request.partitions)
    return lambda answer: _keep(answer.offsets, lambda row: _sees_topic(caller, row.topic))


def _add_to_transaction(caller: Caller, request: pb.AddToTransactionRequest) -> None:
    _id(Operation.WRITE)(caller, request)
    _each_topic(caller, Operation.WRITE, request.partitions)
    for group in request.groups:
        on_group(caller, Operation.READ, group)


def _commit_batch(caller: Caller, request: pb.CommitBatchRequest) -> None:
    """An app is a name among transactional ids."""
    for name in {request.app, *(staged.transactional_id for staged in request.transactions)} - {""}:
        caller.require(Operation.WRITE, Resource.TRANSACTIONAL_ID, name)


def _create_topic(caller: Caller, request: pb.CreateTopicRequest) -> None:
    if not caller.may_cluster(Operation.CREATE):
        on_topic(caller, Operation.CREATE, request.name)


def _describe_group(caller: Caller, request: pb.DescribeGroupRequest) -> Complete:
    """Sums with a hidden part are not given."""
    on_group(caller, Operation.DESCRIBE, request.group)

    def complete(answer: pb.DescribeGroupResponse) -> None:
        for member in answer.members:
            if not all(_sees_topic(caller, part.topic) for part in member.partitions):
                _keep(member.partitions, lambda part: _sees_topic(caller, part.topic))
                member.assignment = b""
                member.ClearField("lag")
        if not all(_sees_topic(caller, offset.topic) for offset in answer.offsets):
            _keep(answer.offsets, lambda offset: _sees_topic(caller, offset.topic))
            answer.ClearField("lag")

    return complete


def _describe_transaction(caller: Caller, request: pb.DescribeTransactionRequest) -> Complete:
    _id(Operation.DESCRIBE)(caller, request)

    def complete(answer: pb.DescribeTransactionResponse) -> None:
        _keep(answer.partitions, lambda part: _sees_topic(caller, part.topic))
        _keep(answer.groups, lambda group: _sees_group(caller, group))

    return complete


def _describe_cluster(caller: Caller, request: pb.DescribeClusterRequest) -> Complete:
    """Every user finds the nodes."""
    for name in request.topics:
        on_topic(caller, Operation.DESCRIBE, name)
    return lambda answer: _keep(answer.topics, lambda topic: _sees_topic(caller, topic.name))


def _node_status(caller: Caller, request: object) -> Complete:
    """What a node says of itself in words names topics and groups, so it is for super users."""
    _cluster(Operation.DESCRIBE)(caller, request)

    def complete(answer: pb.NodeStatusResponse) -> None:
        _keep(answer.replicas, lambda replica: _sees_topic(caller, replica.topic))
        answer.ClearField("events")
        answer.ClearField("warnings")

    return complete


def _test_acl(caller: Caller, request: pb.TestAclRequest) -> None:
    """About itself every user may ask."""
    if request.user != caller.user:
        _cluster(Operation.DESCRIBE)(caller, request)


RULES: Final[Mapping[str, Rule]] = {
    "Login": _free,
    "StartPublishSession": _start_session,
    "ClosePublishSession": _free,  # of a session of its own
    "PublishRecord": _free,
    "MirrorRecord": _free,
    "SubscribeRecord": _free,
    "Fetch": _topics(Operation.READ, "partitions"),
    "SearchRecords": _topic(Operation.READ),
    "ListOffsets": _list_offsets,
    "GetPartitionRangeInfo": _topic(Operation.DESCRIBE),
    "CommitOffsets": _all(_group(Operation.READ), _topics(Operation.READ, "offsets")),
    "FetchOffsets": _fetch_offsets,
    "MeasureBacklogs": _topics(Operation.DESCRIBE, "offsets"),
    "AssignOffsets": _free,
    "AdvanceHighWaterMark": _free,
    "JoinGroup": _group(Operation.READ),
    "SyncGroup": _group(Operation.READ),
    "Heartbeat": _group(Operation.READ),
    "LeaveGroup": _group(Operation.READ),
    "StartProducer": _id(Operation.WRITE),
    "AddToTransaction": _add_to_transaction,
    "StageOffsets": _all(_id(Operation.WRITE), _group(Operation.READ), _topics(Operation.READ, "offsets")),
    "EndTransaction": _id(Operation.WRITE),
    "CommitBatch": _commit_batch,
    "CreateTopic": _create_topic,
    "DeleteTopic": _topic(Operation.DELETE, "name"),
    "AddPartitions": _topic(Operation.ALTER, "name"),
    "AlterTopic": _topic(Operation.ALTER_CONFIGS, "name"),
    "DeleteRecords": _topic(Operation.DELETE),
    "ListGroups": _listed(
        "groups", lambda caller, row: caller.may_cluster(Operation.DESCRIBE) or _sees_group(caller, row.group)
    ),
    "DescribeGroup": _describe_group,
    "DeleteGroup": _group(Operation.DELETE),
    "ListTransactions": _listed("transactions", lambda caller, row: _sees_id(caller, row.transactional_id)),
    "DescribeTransaction": _describe_transaction,
    "AbortTransaction": _id(Operation.WRITE),
    "ListApps": _listed("apps", lambda caller, row: _sees_id(caller, row.app)),
    "DeleteOffsets": _all(_group(Operation.DELETE), _topics(Operation.READ, "partitions")),
    "DescribeClusterConfig": _cluster(Operation.DESCRIBE_CONFIGS),
    "AlterClusterConfig": _cluster(Operation.ALTER_CONFIGS),
    "ListUsers": _cluster(Operation.DESCRIBE),
    "AlterUser": _cluster(Operation.ALTER),
    "DeleteUser": _cluster(Operation.ALTER),
    "ListAcls": _cluster(Operation.DESCRIBE),
    "AlterAcls": _cluster(Operation.ALTER),
    "TestAcl": _test_acl,
    "ListQuotas": _cluster(Operation.DESCRIBE_CONFIGS),
    "AlterQuotas": _cluster(Operation.ALTER_CONFIGS),
    "DescribeCluster": _describe_cluster,
    "NodeStatus": _node_status,
    "SetNodeDrained": _cluster(Operation.ALTER),
}
