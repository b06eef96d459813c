"""The asyncio admin client: topics, users, deletion of records, offsets, group commits, and views of cluster and nodes.

Owns the calls and nothing else. Every change carries one request id per call, so that its retries, at any node, take
effect once. Users, `sync` and the command line import it.
"""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TypedDict, TypeVar

from google.protobuf.message import Message

from smq.clients import scram
from smq.clients.arguments import (
    INT32_MAX,
    Duration,
    check_choice,
    check_flag,
    check_int,
    check_name,
    check_partition,
    invalid,
    milliseconds,
    names,
    partitions_of,
    settings,
    shown,
)
from smq.clients.channels import NodeStubs
from smq.clients.cluster import CallFn, ClusterClient, T
from smq.clients.errors import build
from smq.clients.lifecycle import Lifecycle
from smq.clients.login import Login
from smq.clients.metadata import Servers
from smq.clients.pb import smq_pb2 as pb
from smq.clients.positions import Start, parse_starts, resolve_starts
from smq.clients.tls import Tls
from smq.clients.types import (
    ISOLATIONS,
    Acl,
    AclDecision,
    AppSummary,
    ClusterDescription,
    ClusterSetting,
    CommittedOffset,
    GroupDescription,
    GroupPosition,
    GroupSummary,
    Isolation,
    ListedOffset,
    NodeStatus,
    PartitionRange,
    Quota,
    TopicDescription,
    TopicPartition,
    TransactionDescription,
    TransactionSummary,
    User,
    acl_from_message,
    app_from_message,
    cluster_from_message,
    group_from_message,
    group_summary_from_message,
    node_status_from_message,
    quota_from_message,
    range_from_message,
    transaction_from_message,
    transaction_summary_from_message,
)
from smq.raft_state.errors import ErrorCode, SmqError

M = TypeVar("M", bound=Message)
REPLICATION_DEFAULT = 0  # the server chooses: its default.replication.factor (if not set: 3, or all nodes if fewer)


class AdminOptions(TypedDict, total=False):
    """The options of Admin and of OffsetAssigner, for their blocking versions."""

    servers: Servers | None
    timeout_ms: Duration
    connect_timeout_ms: Duration
    tls: Tls | None
    login: Login | None


class Admin(Lifecycle):
    """`async with Admin("host:port") as a: await a.create_topic("t", 6)`.

    `timeout_ms` bounds each call, retries included; `connect_timeout_ms` bounds start(). Beside its own errors every
    call raises INVALID_REQUEST for a wrong argument, and NO_QUORUM, TIMED_OUT or UNREACHABLE if the cluster has not
    answered in time. A change has one request id, so its retries take effect once."""

    def __init__(
        self,
        bootstrap: Servers | None = None,
        *,
        servers: Servers | None = None,
        timeout_ms: Duration = 30_000.0,
        connect_timeout_ms: Duration = 10_000.0,
        tls: Tls | None = None,
        login: Login | None = None,
    ) -> None:
        self._cluster = ClusterClient(
            bootstrap, servers=servers, connect_timeout_ms=connect_timeout_ms, tls=tls, login=login
        )
        self._timeout_ms = milliseconds("timeout_ms", timeout_ms)

    async def start(self) -> None:
        """Finds the cluster, within `connect_timeout_ms`. UNREACHABLE. `async with` calls it."""
        await self._cluster.start()

    async def close(self) -> None:
        """Closes the connections. Every later call raises CLIENT_CLOSED."""
        await self._cluster.close()

    async def _call(self, run: CallFn[T]) -> T:
        return await self._cluster.call(run, timeout_ms=self._timeout_ms)

    # -- topics

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replication_factor: int = REPLICATION_DEFAULT,
        config: Mapping[str, str] | None = None,
        start_offset: int = 0,
    ) -> bytes:
        """Creates a topic and returns its id (16 bytes). `replication_factor` 0: 3, or the number of nodes if there are
        fewer. `config` has Kafka's keys, with their values as text. All partitions begin at `start_offset`.
        TOPIC_EXISTS, INVALID_TOPIC_NAME, INVALID_PARTITION_COUNT, INVALID_REPLICATION_FACTOR, INVALID_CONFIG."""
        request_id, wanted = _new_request_id(), settings("config", config)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> bytes:
            request = build(
                pb.CreateTopicRequest,
                name=name,
                partition_count=partitions,
                replication_factor=replication_factor,
                config=wanted,
                start_offset=start_offset,
                request_id=request_id,
                timeout_ms=node_ms,
            )
            return (await node.admin.CreateTopic(request, timeout=call_s)).topic_id

        return await self._call(run)

    async def delete_topic(self, name: str) -> None:
        """Deletes the topic with all its records and the groups' offsets in it. UNKNOWN_TOPIC."""
        request_id = _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.DeleteTopicRequest, name=name, request_id=request_id, timeout_ms=node_ms)
            await node.admin.DeleteTopic(request, timeout=call_s)

        await self._call(run)
        self._cluster.metadata.forget_topic(name)

    async def add_partitions(self, name: str, partition_count: int) -> None:
        """`partition_count` is the new total. A new count moves keys between partitions. UNKNOWN_TOPIC,
        INVALID_PARTITION_COUNT."""
        request_id = _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.AddPartitionsRequest,
                name=name,
                partition_count=partition_count,
                request_id=request_id,
                timeout_ms=node_ms,
            )
            await node.admin.AddPartitions(request, timeout=call_s)

        await self._call(run)

    async def alter_topic(self, name: str, *, set: Mapping[str, str] | None = None, unset: Iterable[str] = ()) -> None:
        """Sets and resets settings of the topic: all or none. UNKNOWN_TOPIC, INVALID_CONFIG."""
        request_id, wanted, gone = _new_request_id(), settings("set", set), names("unset", unset)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.AlterTopicRequest,
                name=name,
                set=wanted,
                unset=gone,
                request_id=request_id,
                timeout_ms=node_ms,
            )
            await node.admin.AlterTopic(request, timeout=call_s)

        await self._call(run)

    async def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Deletes everything below `before_offset` (-1: the high water mark). Returns the new log start.
        UNKNOWN_TOPIC, UNKNOWN_PARTITION, OFFSET_OUT_OF_RANGE."""
        request_id = _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> int:
            request = build(
                pb.DeleteRecordsRequest,
                topic=topic,
                partition=partition,
                before_offset=before_offset,
                request_id=request_id,
                timeout_ms=node_ms,
            )
            return (await node.admin.DeleteRecords(request, timeout=call_s)).log_start

        return await self._call(run)

    # -- nodes

    async def set_node_drained(self, node: int, drained: bool) -> None:
        """A drained node leads no partition that another replica can lead, until it is undrained. UNKNOWN_NODE."""
        request_id = _new_request_id()

        async def run(stubs: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.SetNodeDrainedRequest, node=node, drained=drained, request_id=request_id, timeout_ms=node_ms
            )
            await stubs.admin.SetNodeDrained(request, timeout=call_s)

        await self._call(run)

    # -- views

    async def describe_cluster(self, topics: Iterable[str] = (), *, is_linearizable: bool = True) -> ClusterDescription:
        """Nodes and topics (all if none is named). UNKNOWN_TOPIC; NO_QUORUM unless a majority of the nodes answers. Not
        linearizable: as any one node knows them, without a majority."""
        wanted = names("topics", topics)
        check_flag("is_linearizable", is_linearizable)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.DescribeClusterResponse:
            request = build(pb.DescribeClusterRequest, topics=wanted, linearizable=is_linearizable, timeout_ms=node_ms)
            return await node.admin.DescribeCluster(request, timeout=call_s)

        return cluster_from_message(await self._call(run))

    async def list_topics(self) -> list[TopicDescription]:
        """All topics, in order of name, with their partitions' leaders and offsets as of the call. NO_QUORUM."""
        return sorted((await self.describe_cluster()).topics, key=lambda t: t.name)

    async def describe_topic(self, name: str) -> TopicDescription:
        """UNKNOWN_TOPIC if there is none."""
        check_name("name", name)
        for topic in (await self.describe_cluster([name])).topics:
            if topic.name == name:
                return topic
        raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {name!r}")

    async def node_status(
        self, node: int | str, *, with_digest: bool = False, with_replicas: bool = True
    ) -> NodeStatus:
        """One node's own view, by its id or gRPC address, without a majority. UNREACHABLE if it does not answer: not
        retried, and no other node is asked. INVALID_REQUEST for an id that no node has."""
        check_flag("with_digest", with_digest)
        check_flag("with_replicas", with_replicas)
        if isinstance(node, str):
            check_name("node", node)
        else:
            check_int("node", node, 0, INT32_MAX)
        address = node if isinstance(node, str) else await self._address_of(node)

        async def run(stubs: NodeStubs, node_ms: int, call_s: float) -> pb.NodeStatusResponse:
            request = pb.NodeStatusRequest(with_digest=with_digest, without_replicas=not with_replicas)
            return await stubs.admin.NodeStatus(request, timeout=call_s)

        outcome = await self._cluster.attempt(run, address, self._timeout_ms)
        if isinstance(outcome, SmqError):
            raise outcome
        return node_status_from_message(outcome[0])

    async def _address_of(self, node: int) -> str:
        if self._cluster.metadata.address(node) is None:
            await self._cluster.refresh(())
        address = self._cluster.metadata.address(node)
        if address is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"there is no node {node}: `smq status` lists the nodes")
        return address

    async def partition_range(self, topic: str, partition: int) -> PartitionRange:
        """Where the partition begins and ends, as of the call, from its leader. UNKNOWN_TOPIC, UNKNOWN_PARTITION."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.GetPartitionRangeInfoResponse:
            request = build(pb.GetPartitionRangeInfoRequest, topic=topic, partition=partition, timeout_ms=node_ms)
            return await node.broker.GetPartitionRangeInfo(request, timeout=call_s)

        return range_from_message(await self._call(run))

    async def list_offsets(
        self,
        starts: Mapping[TopicPartition, Start],
        *,
        group: str | None = None,
        reset_if_gone: bool = False,
        isolation: Isolation = "read_committed",
    ) -> dict[TopicPartition, ListedOffset]:
        """The position that each start means now, for a reader of this isolation: "latest" and `hi` are its end.
        UNKNOWN_TOPIC, UNKNOWN_PARTITION; OFFSET_OUT_OF_RANGE (lo, hi) if one has no position, unless `reset_if_gone`:
        then retention has passed it, and it means the log start."""
        check_choice("isolation", isolation, ISOLATIONS)
        if group is not None:
            check_name("group", group)
        return await resolve_starts(
            self._cluster,
            parse_starts(starts, group=group),
            group=group,
            reset_if_gone=reset_if_gone,
            isolation=isolation,
            timeout_ms=self._timeout_ms,
        )

    # -- settings of the cluster

    async def cluster_config(self) -> list[ClusterSetting]:
        """All settings of the cluster, under Kafka's names. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.DescribeClusterConfigResponse:
            request = pb.DescribeClusterConfigRequest(timeout_ms=node_ms)
            return await node.admin.DescribeClusterConfig(request, timeout=call_s)

        return [ClusterSetting(s.key, s.value, s.is_set) for s in (await self._call(run)).settings]

    async def alter_cluster_config(self, *, set: Mapping[str, str] | None = None, unset: Iterable[str] = ()) -> None:
        """Applies to the whole cluster. Keys in `unset` go back to their defaults. All or none; INVALID_CONFIG."""
        request_id, wanted, gone = _new_request_id(), settings("set", set), names("unset", unset)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.AlterClusterConfigRequest, set=wanted, unset=gone, request_id=request_id, timeout_ms=node_ms
            )
            await node.admin.AlterClusterConfig(request, timeout=call_s)

        await self._call(run)

    # -- users

    async def list_users(self) -> list[User]:
        """All users, in order of name. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListUsersResponse:
            return await node.admin.ListUsers(pb.ListUsersRequest(timeout_ms=node_ms), timeout=call_s)

        users = (await self._call(run)).users
        return [User(u.name, dict(zip(u.mechanisms, u.iterations, strict=True))) for u in users]

    async def create_user(self, name: str, password: str) -> None:
        """With credentials for every mechanism. The password stays in this process: its keys are derived here.
        USER_EXISTS, INVALID_CREDENTIAL, LIMIT_EXCEEDED."""
        await self._set_password(name, password, must_be_new=True)

    async def change_password(self, name: str, password: str) -> None:
        """The user's connections that came in by the old password end. UNKNOWN_USER."""
        await self._set_password(name, password, must_exist=True)

    async def _set_password(
        self, name: str, password: str, *, must_be_new: bool = False, must_exist: bool = False
    ) -> None:
        check_name("name", name)
        if not isinstance(password, str) or not password:  # the error must not show it
            raise invalid("password must be a str that is not empty")
        keys, request_id = await asyncio.to_thread(scram.new_keys, password), _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.AlterUserRequest,
                name=name,
                credentials=[
                    pb.ScramCredential(
                        mechanism=k.mechanism.name,
                        iterations=k.iterations,
                        salt=k.salt,
                        stored_key=k.stored_key,
                        server_key=k.server_key,
                    )
                    for k in keys
                ],
                must_be_new=must_be_new,
                must_exist=must_exist,
                request_id=request_id,
                timeout_ms=node_ms,
            )
            await node.admin.AlterUser(request, timeout=call_s)

        await self._call(run)

    async def delete_user(self, name: str) -> None:
        """Its open connections end. UNKNOWN_USER."""
        check_name("name", name)
        request_id = _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.DeleteUserRequest, name=name, request_id=request_id, timeout_ms=node_ms)
            await node.admin.DeleteUser(request, timeout=call_s)

        await self._call(run)

    # -- rules about users

    async def list_acls(self) -> list[Acl]:
        """All rules. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListAclsResponse:
            return await node.admin.ListAcls(pb.ListAclsRequest(timeout_ms=node_ms), timeout=call_s)

        return [acl_from_message(acl) for acl in (await self._call(run)).acls]

    async def alter_acls(self, *, add: Iterable[Acl] = (), remove: Iterable[Acl] = ()) -> None:
        """Adds rules and removes others, all or none. In force on each node once it has applied that. What is there
        already, or gone already, is no error. LIMIT_EXCEEDED."""
        request_id, added, removed = (
            _new_request_id(),
            _rows("add", add, Acl, pb.Acl),
            _rows("remove", remove, Acl, pb.Acl),
        )

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.AlterAclsRequest, add=added, remove=removed, request_id=request_id, timeout_ms=node_ms)
            await node.admin.AlterAcls(request, timeout=call_s)

        await self._call(run)

    async def test_acl(
        self, user: str, operation: str, resource: str, name: str, *, host: str = "127.0.0.1"
    ) -> AclDecision:
        """Whether a user at that address may do this, and by which rule. NO_QUORUM."""
        given = {"user": user, "operation": operation, "resource": resource, "name": name, "host": host}
        for argument, value in given.items():
            check_name(argument, value)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.TestAclResponse:
            return await node.admin.TestAcl(pb.TestAclRequest(**given, timeout_ms=node_ms), timeout=call_s)

        answer = await self._call(run)
        rule = acl_from_message(answer.rule) if answer.HasField("rule") else None
        return AclDecision(is_allowed=answer.allowed, is_super_user=answer.super_user, rule=rule)

    # -- quotas

    async def list_quotas(self) -> list[Quota]:
        """All quotas. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListQuotasResponse:
            return await node.admin.ListQuotas(pb.ListQuotasRequest(timeout_ms=node_ms), timeout=call_s)

        return [quota_from_message(quota) for quota in (await self._call(run)).quotas]

    async def alter_quotas(self, quotas: Iterable[Quota]) -> None:
        """Sets quotas, all or none, and removes those of 0. In force on each node once it has applied that. What is
        gone already is no error. INVALID_REQUEST, LIMIT_EXCEEDED."""
        request_id, given = _new_request_id(), _rows("quotas", quotas, Quota, pb.Quota)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.AlterQuotasRequest, quotas=given, request_id=request_id, timeout_ms=node_ms)
            await node.admin.AlterQuotas(request, timeout=call_s)

        await self._call(run)

    # -- groups

    async def list_groups(self) -> list[GroupSummary]:
        """All groups, in order of name. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListGroupsResponse:
            return await node.admin.ListGroups(pb.ListGroupsRequest(timeout_ms=node_ms), timeout=call_s)

        return [group_summary_from_message(g) for g in (await self._call(run)).groups]

    async def describe_group(self, name: str, *, with_sizes: bool = False) -> GroupDescription:
        """UNKNOWN_GROUP if there is none. `with_sizes` also measures the lag in bytes and in time."""
        check_name("name", name)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.DescribeGroupResponse:
            request = build(pb.DescribeGroupRequest, group=name, timeout_ms=node_ms, with_sizes=with_sizes)
            return await node.admin.DescribeGroup(request, timeout=call_s)

        found = group_from_message(await self._call(run))
        return await with_all_sizes(self._cluster, found, self._timeout_ms) if with_sizes else found

    async def delete_group(self, name: str) -> None:
        """Deletes its committed offsets, too. GROUP_NOT_EMPTY while it has members, UNKNOWN_GROUP if there is none."""
        check_name("name", name)
        request_id = _new_request_id()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.DeleteGroupRequest, group=name, request_id=request_id, timeout_ms=node_ms)
            await node.admin.DeleteGroup(request, timeout=call_s)

        await self._call(run)

    # -- transactions

    async def list_transactions(self) -> list[TransactionSummary]:
        """All transactional ids, in their order. NO_QUORUM."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListTransactionsResponse:
            return await node.admin.ListTransactions(pb.ListTransactionsRequest(timeout_ms=node_ms), timeout=call_s)

        return [transaction_summary_from_message(t) for t in (await self._call(run)).transactions]

    async def describe_transaction(self, transactional_id: str) -> TransactionDescription:
        """UNKNOWN_TRANSACTIONAL_ID if there is none."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.DescribeTransactionResponse:
            request = build(pb.DescribeTransactionRequest, transactional_id=transactional_id, timeout_ms=node_ms)
            return await node.admin.DescribeTransaction(request, timeout=call_s)

        return transaction_from_message(await self._call(run))

    async def abort_transaction(self, transactional_id: str) -> None:
        """Aborts the open transaction, and fences its producer. INVALID_TRANSACTION_STATE if none is open,
        UNKNOWN_TRANSACTIONAL_ID if there is no such id."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(pb.AbortTransactionRequest, transactional_id=transactional_id, timeout_ms=node_ms)
            await node.admin.AbortTransaction(request, timeout=call_s)

        await self._call(run)

    async def list_apps(self) -> list[AppSummary]:
        """The apps that commit batches, as Spark's queries do, by name. NO_QUORUM if none can be asked for."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.ListAppsResponse:
            return await node.admin.ListApps(pb.ListAppsRequest(timeout_ms=node_ms), timeout=call_s)

        return [app_from_message(app) for app in (await self._call(run)).apps]

    # -- groups' offsets

    async def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        """Commits the group's next offsets: all or none; linearizable once it returns. UNKNOWN_TOPIC,
        UNKNOWN_PARTITION, INVALID_OFFSET; UNKNOWN_MEMBER while the group has members."""
        await commit_offsets(self._cluster, group, offsets, self._timeout_ms)

    async def delete_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """Forgets what the group has committed there. GROUP_SUBSCRIBED if a member subscribes to one's topic."""
        check_name("group", group)
        checked = partitions_of("partitions", partitions)
        request_id, items = _new_request_id(), [build(pb.TopicPartition, topic=t, partition=p) for t, p in checked]

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.DeleteOffsetsRequest, group=group, partitions=items, request_id=request_id, timeout_ms=node_ms
            )
            await node.admin.DeleteOffsets(request, timeout=call_s)

        await self._call(run)

    async def fetch_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """The group's next offsets. Partitions without a commit are absent; None: every partition that the group has
        committed. Linearizable: NO_QUORUM unless a majority of the nodes answers."""
        return await fetch_offsets(self._cluster, group, partitions, self._timeout_ms)


async def commit_offsets(
    cluster: ClusterClient,
    group: str,
    offsets: Mapping[TopicPartition, int | CommittedOffset],
    timeout_ms: float,
    *,
    member: pb.GroupMember | None = None,
) -> None:
    """Commits all or none, for a member or for a group without any; linearizable once it returns."""
    check_name("group", group)
    request_id, items = _new_request_id(), offset_items(offsets)

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
        request = build(
            pb.CommitOffsetsRequest,
            group=group,
            offsets=items,
            request_id=request_id,
            timeout_ms=node_ms,
            member=member,
        )
        await node.broker.CommitOffsets(request, timeout=call_s)

    await cluster.call(run, timeout_ms=timeout_ms)


def offset_items(offsets: Mapping[TopicPartition, int | CommittedOffset]) -> list[pb.PartitionOffset]:
    """As they are sent. INVALID_REQUEST names what is wrong."""
    if not isinstance(offsets, Mapping):
        raise invalid(f"offsets must be a mapping of (topic, partition) to offsets, not {shown(offsets)}")
    items = []
    for tp in offsets:
        check_partition("offsets", tp)
    for (topic, partition), given in offsets.items():
        o = given if isinstance(given, CommittedOffset) else CommittedOffset(offset=given, metadata="")
        items.append(build(pb.PartitionOffset, topic=topic, partition=partition, offset=o.offset, metadata=o.metadata))
    return items


async def fetch_offsets(
    cluster: ClusterClient, group: str, partitions: Iterable[TopicPartition] | None, timeout_ms: float
) -> dict[TopicPartition, CommittedOffset]:
    check_name("group", group)
    if partitions is not None:
        partitions = partitions_of("partitions", partitions)
    requested = [build(pb.TopicPartition, topic=t, partition=p) for t, p in partitions or ()]
    if partitions is not None and not requested:
        return {}

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.FetchOffsetsResponse:
        request = build(pb.FetchOffsetsRequest, group=group, partitions=requested, timeout_ms=node_ms)
        return await node.broker.FetchOffsets(request, timeout=call_s)

    answer = await cluster.call(run, timeout_ms=timeout_ms)
    return {(o.topic, o.partition): CommittedOffset(offset=o.offset, metadata=o.metadata) for o in answer.offsets}


def _rows(argument: str, given: Iterable[object], kind: type[Acl | Quota], message: type[M]) -> list[M]:
    found = list(given) if isinstance(given, Iterable) else [given]
    rows = [row for row in found if isinstance(row, kind)]
    if len(rows) < len(found):
        raise invalid(f"{argument} must be a list of {kind.__name__}, not {shown(given)}")
    return [build(message, **asdict(row)) for row in rows]


def _new_request_id() -> bytes:
    return uuid.uuid4().bytes


BACKLOGS_MAX = 1_000  # of one request; the node's own limit


async def with_all_sizes(cluster: ClusterClient, found: GroupDescription, timeout_ms: float) -> GroupDescription:
    """The description with the sizes that its node could not measure. What no leader reports stays None."""
    missing = [p for p in found.positions if p.lag and p.lag_bytes is None]
    if not missing:
        return found
    try:
        await cluster.refresh({p.topic for p in missing}, timeout_ms=timeout_ms)
    except SmqError:
        pass  # what is known of the leaders must do
    by_leader: dict[str, list[GroupPosition]] = defaultdict(list)
    for p in missing:
        view = cluster.metadata.partition(p.topic, p.partition)
        leader = cluster.metadata.leader_address(p.topic, p.partition)
        if leader is not None and view is not None and view.replicas:  # without replicas there are no bytes
            by_leader[leader].append(p)
    answers = await asyncio.gather(
        *(_measured(cluster, leader, positions, timeout_ms) for leader, positions in by_leader.items())
    )
    known = {place: backlog for answer in answers for place, backlog in answer.items()}
    return replace(found, positions=tuple(_completed(p, known.get((p.topic, p.partition))) for p in found.positions))


def _completed(position: GroupPosition, measured: pb.MeasuredBacklog | None) -> GroupPosition:
    if measured is None:
        return position
    return replace(position, lag_bytes=measured.size_bytes, lag_ms=measured.age_ms)


async def _measured(
    cluster: ClusterClient, address: str, positions: Iterable[GroupPosition], timeout_ms: float
) -> dict[TopicPartition, pb.MeasuredBacklog]:
    asked = [
        build(
            pb.PartitionOffset,
            topic=p.topic,
            partition=p.partition,
            offset=p.offset if p.offset is not None else p.log_start,
        )
        for p in positions
    ]
    found: dict[TopicPartition, pb.MeasuredBacklog] = {}
    for first in range(0, len(asked), BACKLOGS_MAX):
        some = asked[first : first + BACKLOGS_MAX]

        async def run(
            node: NodeStubs, node_ms: int, call_s: float, some: list[pb.PartitionOffset] = some
        ) -> pb.MeasureBacklogsResponse:
            request = build(pb.MeasureBacklogsRequest, offsets=some, timeout_ms=node_ms)
            return await node.broker.MeasureBacklogs(request, timeout=call_s)

        outcome = await cluster.attempt(run, address, timeout_ms)
        if isinstance(outcome, SmqError):
            break
        found |= {(b.topic, b.partition): b for b in outcome[0].backlogs if not b.HasField("error")}
    return found
