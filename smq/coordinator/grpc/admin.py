"""The Admin service: topics, settings, users, rules, groups and transactions, and views of cluster and node.

Owns no state: changes are proposed as commands or handed to the coordinator of a group or transactional id, and views
are read from what the node has applied. Only the composition root imports it.
"""

import enum
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeAlias, TypeVar

from smq import __version__
from smq.clients import scram
from smq.clients.lag_totals import LagTotal, lags_by_member, total_of
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.protocols import subscriptions
from smq.coordinator.grpc.required import check_fields
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, request_id_of
from smq.coordinator.limits import COMMIT_ITEMS_MAX, STATUS_EVENTS_MAX
from smq.coordinator.service.audience import Audience, told_of
from smq.coordinator.service.authorizer import Authorizer, host_fault
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_lag import GroupPosition, Lag, assigned_partitions, lags_of, positions, state_of
from smq.coordinator.service.name_lookup import find_group, find_partition, find_topic, has_leader, known_ranges
from smq.coordinator.service.quotas import quota_of
from smq.coordinator.service.request_checks import check_count
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.transaction_states import open_ms, state_name
from smq.coordinator.service.transactions import Transactions, producer_of
from smq.coordinator.service.turns import Turns
from smq.coordinator.tls.contexts import NodeTls
from smq.raft_state.cluster_config import CLUSTER_CONFIG, cluster_value, offsets_retention_ms
from smq.raft_state.commands import (
    Acl,
    AddPartitions,
    AdvanceLogStart,
    AlterAcls,
    AlterClusterConfig,
    AlterQuotas,
    AlterTopicConfig,
    AlterUser,
    CreateTopic,
    DeleteTopic,
    DeleteUser,
    Quota,
    ScramCredential,
    SetNodeDrained,
)
from smq.raft_state.config_keys import known_at
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.acls import PRINCIPAL, Operation, Pattern, Permission, Resource
from smq.raft_state.handlers.quotas import CLIENT_ID, IP, THOUSAND, USER
from smq.raft_state.ids import NO_REQUEST, NodeId, Offset, TopicId, split_partition_id
from smq.raft_state.limits import DECOY_SECRET_BYTES, TOPIC_PARTITIONS_MAX
from smq.raft_state.replies import TopicCreated
from smq.raft_state.state import (
    AppState,
    ClusterState,
    GroupState,
    NodeState,
    PartitionState,
    TopicState,
    TransactionOutcome,
    TransactionPhase,
    TransactionState,
    UserState,
)
from smq.raft_state.topic_config import is_external
from smq.replication.api import NodeApi, PartitionRange

_ENTITIES: Final = {"user": USER, "client_id": CLIENT_ID, "ip": IP}  # by field of a quota, as Kafka names them
DELETE_ATTEMPTS: Final = 3  # the members of a group seldom change twice within one call
Ends: TypeAlias = Mapping[tuple[str, int], PartitionRange]


class AdminService(Service, smq_pb2_grpc.AdminServicer):
    def __init__(
        self,
        node: NodeApi,
        groups: GroupCoordinator,
        settings: Settings,
        tls: NodeTls | None,
        own_warnings: Callable[[], list[str]],
        events: Callable[[], Iterable[tuple[float, str, str]]],
        authorizer: Authorizer,
    ) -> None:
        self.audience = Audience(node=node)
        self._calls = NodeCalls(node)
        self._groups = groups
        self._settings = settings
        self._tls = tls
        self._own_warnings = own_warnings
        self._events = events
        self._authorizer = authorizer

    @property
    def _state(self) -> ClusterState:
        return self._calls.node.state

    # ------------------------------------------------------------------------------------------------- topics
    @guarded
    async def CreateTopic(self, request: pb.CreateTopicRequest, context: Context) -> pb.CreateTopicResponse:
        if not 1 <= request.partition_count <= TOPIC_PARTITIONS_MAX:
            raise SmqError(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"partition_count is {request.partition_count}: it must be 1 to {TOPIC_PARTITIONS_MAX}",
            )
        if request.start_offset < 0:
            raise SmqError(ErrorCode.INVALID_OFFSET, f"start_offset is {request.start_offset}: it must be >= 0")
        self._settings.check_topic(request.config)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        factor = request.replication_factor
        if not factor and not is_external(request.config):
            factor = self._settings.replication_factor(self._state)
        command = CreateTopic(
            request_id=request_id_of(request.request_id),
            name=request.name,
            topic_id=TopicId(secrets.token_bytes(16)),
            partition_count=request.partition_count,
            replication_factor=factor,
            config=_sorted_items(request.config),
            start_offset=Offset(request.start_offset),
            created_ms=time.time_ns() // 1_000_000,
        )
        reply = await self._calls.propose(command, timeout_ms)
        # A retry with the same request id gets the first attempt's answer, and so its topic id.
        return pb.CreateTopicResponse(topic_id=reply.topic_id if isinstance(reply, TopicCreated) else b"")

    @guarded
    async def DeleteTopic(self, request: pb.DeleteTopicRequest, context: Context) -> pb.DeleteTopicResponse:
        command = DeleteTopic(request_id=request_id_of(request.request_id), name=request.name)
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.DeleteTopicResponse()

    @guarded
    async def AddPartitions(self, request: pb.AddPartitionsRequest, context: Context) -> pb.AddPartitionsResponse:
        if not 1 <= request.partition_count <= TOPIC_PARTITIONS_MAX:
            raise SmqError(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"partition_count is {request.partition_count}: it must be 1 to {TOPIC_PARTITIONS_MAX}",
            )
        command = AddPartitions(
            request_id=request_id_of(request.request_id), name=request.name, partition_count=request.partition_count
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AddPartitionsResponse()

    @guarded
    async def AlterTopic(self, request: pb.AlterTopicRequest, context: Context) -> pb.AlterTopicResponse:
        _check_change(request)
        self._settings.check_topic(request.set)
        command = AlterTopicConfig(
            request_id=request_id_of(request.request_id),
            name=request.name,
            set_=_sorted_items(request.set),
            unset=tuple(sorted(set(request.unset))),
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AlterTopicResponse()

    @guarded
    async def DeleteRecords(self, request: pb.DeleteRecordsRequest, context: Context) -> pb.DeleteRecordsResponse:
        if request.before_offset < -1:
            raise SmqError(
                ErrorCode.INVALID_OFFSET,
                f"before_offset is {request.before_offset}: it must be >= 0, or -1 for the hwm",
            )
        timeout_ms = deadline_ms(request.timeout_ms, context)
        state = await find_partition(self._calls, request.topic, request.partition, timeout_ms)
        before = request.before_offset
        if before < 0:
            before = (await self._calls.partition_range(request.topic, request.partition, timeout_ms)).hwm
        command = AdvanceLogStart(
            request_id=request_id_of(request.request_id), partition=state.pid, offset=Offset(before)
        )
        await self._calls.propose(command, timeout_ms)
        after = self._state.partition(state.pid)
        return pb.DeleteRecordsResponse(log_start=after.log_start if after is not None else before)

    # -------------------------------------------------------------------------------------------------- nodes
    @guarded
    async def SetNodeDrained(self, request: pb.SetNodeDrainedRequest, context: Context) -> pb.SetNodeDrainedResponse:
        command = SetNodeDrained(
            request_id=request_id_of(request.request_id), node=NodeId(request.node), drained=request.drained
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.SetNodeDrainedResponse()

    # ----------------------------------------------------------------------------------------------- settings
    @guarded
    async def DescribeClusterConfig(
        self, request: pb.DescribeClusterConfigRequest, context: Context
    ) -> pb.DescribeClusterConfigResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        config = self._state.config
        known = known_at(CLUSTER_CONFIG, self._state.feature_level)
        settings = [pb.ClusterSetting(key=key, value=cluster_value(config, key), is_set=key in config) for key in known]
        return pb.DescribeClusterConfigResponse(settings=settings)

    @guarded
    async def AlterClusterConfig(
        self, request: pb.AlterClusterConfigRequest, context: Context
    ) -> pb.AlterClusterConfigResponse:
        _check_change(request)
        command = AlterClusterConfig(
            request_id=request_id_of(request.request_id),
            set_=_sorted_items(request.set),
            unset=tuple(sorted(set(request.unset))),
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AlterClusterConfigResponse()

    # -------------------------------------------------------------------------------------------------- users
    @guarded
    async def ListUsers(self, request: pb.ListUsersRequest, context: Context) -> pb.ListUsersResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        users = self._state.users
        return pb.ListUsersResponse(users=[_user_info(users[name]) for name in sorted(users)])

    @guarded
    async def AlterUser(self, request: pb.AlterUserRequest, context: Context) -> pb.AlterUserResponse:
        command = AlterUser(
            request_id=request_id_of(request.request_id),
            name=request.name,
            set_=tuple(map(_credential, request.credentials)),
            may_create=not request.must_exist,
            may_replace=not request.must_be_new,
            decoy_secret=secrets.token_bytes(DECOY_SECRET_BYTES),
            administrators=self._authorizer.super_users,
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AlterUserResponse()

    @guarded
    async def DeleteUser(self, request: pb.DeleteUserRequest, context: Context) -> pb.DeleteUserResponse:
        command = DeleteUser(
            request_id=request_id_of(request.request_id),
            name=request.name,
            administrators=self._authorizer.super_users,
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.DeleteUserResponse()

    # --------------------------------------------------------------------------------------------------- acls
    @guarded
    async def ListAcls(self, request: pb.ListAclsRequest, context: Context) -> pb.ListAclsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        return pb.ListAclsResponse(acls=map(_acl_info, self._state.acls))

    @guarded
    async def AlterAcls(self, request: pb.AlterAclsRequest, context: Context) -> pb.AlterAclsResponse:
        if not request.add and not request.remove:
            raise SmqError(ErrorCode.INVALID_REQUEST, "add and remove are empty: name at least one rule")
        for given in request.add:
            if (fault := host_fault(given.host)) is not None:
                raise SmqError(ErrorCode.INVALID_REQUEST, fault)
        command = AlterAcls(
            request_id=request_id_of(request.request_id),
            add=tuple(map(_acl, request.add)),
            remove=tuple(map(_acl, request.remove)),
        )
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AlterAclsResponse()

    @guarded
    async def TestAcl(self, request: pb.TestAclRequest, context: Context) -> pb.TestAclResponse:
        operation, resource = _word(Operation, request.operation), _word(Resource, request.resource)
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        allowed, rule = self._authorizer.why(request.user, request.host, operation, resource, request.name)
        is_super = self._authorizer.is_super(request.user)
        shown = _acl_info(rule) if rule is not None else None
        return pb.TestAclResponse(allowed=allowed, super_user=is_super, rule=shown)

    # ------------------------------------------------------------------------------------------------- quotas
    @guarded
    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Context) -> pb.ListQuotasResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        return pb.ListQuotasResponse(quotas=map(_quota_info, self._state.quotas))

    @guarded
    async def AlterQuotas(self, request: pb.AlterQuotasRequest, context: Context) -> pb.AlterQuotasResponse:
        if not request.quotas:
            raise SmqError(ErrorCode.INVALID_REQUEST, "quotas is empty: name at least one")
        quotas = tuple(quota_of(_entity(given), given.key, given.value) for given in request.quotas)
        command = AlterQuotas(request_id=request_id_of(request.request_id), quotas=quotas)
        await self._calls.propose(command, deadline_ms(request.timeout_ms, context))
        return pb.AlterQuotasResponse()

    # -------------------------------------------------------------------------------------------------- views
    @guarded
    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Context) -> pb.DescribeClusterResponse:
        timeout_ms = deadline_ms(request.timeout_ms, context)
        status = self._calls.node.status()
        if status.waiting:
            raise SmqError(ErrorCode.UPGRADE_NEEDED, status.waiting)  # its state is not the cluster's
        if status.unborn:
            raise SmqError(ErrorCode.NODE_NOT_READY, f"node {status.node} belongs to no cluster yet: {status.unborn}")
        if request.linearizable:
            await self._calls.barrier(timeout_ms)
        topics = await self._named_topics(request, timeout_ms)
        ends: Ends | None = None
        if request.linearizable:
            names = [(t.name, p.index) for t in topics for p in t.partitions if not p.is_external]
            ends = await known_ranges(self._calls, names, timeout_ms)
            topics = [self._state.topics.get(t.name, t) for t in topics]
        turns = Turns()
        return pb.DescribeClusterResponse(
            cluster_id=self._state.cluster_id,
            feature_level=self._state.feature_level,
            raft_leader=self._calls.node.status().raft_leader,
            nodes=[_node_info(n, self.audience.listener) for _, n in sorted(self._state.nodes.items())],
            topics=[await _topic_info(t, self._calls.node, ends, turns) for t in topics],
        )

    async def _named_topics(self, request: pb.DescribeClusterRequest, timeout_ms: int) -> list[TopicState]:
        if request.topics:
            return [await find_topic(self._calls, name, timeout_ms) for name in request.topics]
        return [self._state.topics[name] for name in sorted(self._state.topics)]

    @guarded
    async def NodeStatus(self, request: pb.NodeStatusRequest, context: Context) -> pb.NodeStatusResponse:
        digest = await self._calls.digest(deadline_ms(0, context)) if request.with_digest else None
        status = self._calls.node.status()
        out = pb.NodeStatusResponse(
            node=status.node,
            incarnation=status.incarnation,
            is_ready=status.is_ready,
            raft_leader=status.raft_leader,
            raft_term=status.raft_term,
            applied_index=status.applied_index if digest is None else digest[0],
            commit_index=status.commit_index,
            digest="" if digest is None else digest[1],
            warnings=(*status.warnings, *self._own_warnings()),
            certificate_ends_ms=int(self._tls.ends_s * 1000) if self._tls is not None else None,
            disk_free_bytes=status.storage.free_bytes,
            disk_total_bytes=status.storage.total_bytes,
            now_ms=time.time_ns() // 1_000_000,
            version=__version__,
            events=[
                pb.NodeEvent(at_ms=int(at_s * 1000), kind=kind, text=text)
                for at_s, kind, text in list(self._events())[-STATUS_EVENTS_MAX:]
            ],
        )
        shown = () if request.without_replicas else self._calls.node.replica_statuses()
        async for r in Turns().over(shown):
            topic_id, index = split_partition_id(r.pid)
            out.replicas.append(
                pb.ReplicaInfo(
                    topic=self._state.topic_names.get(topic_id, ""),
                    partition=index,
                    is_leader=r.is_leader,
                    epoch=r.epoch,
                    log_start=r.log_start,
                    hwm=r.hwm,
                    appended_end=r.appended_end,
                    durable_end=r.durable_end,
                    verified_end=r.verified_end,
                    size_bytes=r.size_bytes,
                )
            )
        return out

    # ----------------------------------------------------------------------------------------------------------- groups
    @guarded
    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        groups = self._calls.node.state.groups
        return pb.ListGroupsResponse(groups=[_group_summary(group) for _, group in sorted(groups.items())])

    @guarded
    async def DescribeGroup(self, request: pb.DescribeGroupRequest, context: Context) -> pb.DescribeGroupResponse:
        timeout_ms = deadline_ms(request.timeout_ms, context)
        group = await find_group(self._calls, request.group, timeout_ms)
        state = self._calls.node.state
        slot = coordinator_of(state, group.name)
        out = pb.DescribeGroupResponse(
            group=_group_summary(group), protocol=group.protocol, coordinator=slot.node if slot.node else None
        )
        assigned = {m.member.member_id: sorted(assigned_partitions(state, group, m)) for m in group.members.values()}
        for m in group.members.values():
            out.members.append(
                pb.GroupMemberInfo(
                    member_id=m.member.member_id,
                    instance_id=m.member.instance_id or None,
                    client_id=m.member.client_id,
                    client_host=m.member.client_host,
                    session_timeout_ms=m.member.session_timeout_ms,
                    assignment=m.assignment,
                    partitions=[pb.TopicPartition(topic=t, partition=p) for t, p in assigned[m.member.member_id]],
                )
            )
        places = [at async for at in Turns().over(positions(state, group))]
        lags = await lags_of(self._calls, places, timeout_ms, with_sizes=request.with_sizes, now_ns=time.time_ns())
        async for at, lag in Turns().over(zip(places, lags, strict=True)):
            out.offsets.append(_offset(at, lag))
        figures = {(at.topic, int(at.part.index)): lag.figures for at, lag in zip(places, lags, strict=True)}
        by_member = lags_by_member(assigned, figures)
        for info in out.members:
            info.lag.CopyFrom(_total(by_member[info.member_id]))
        out.lag.CopyFrom(_total(total_of(figures.values())))
        return out

    @guarded
    async def DeleteGroup(self, request: pb.DeleteGroupRequest, context: Context) -> pb.DeleteGroupResponse:
        request_id, timeout_ms = request_id_of(request.request_id), deadline_ms(request.timeout_ms, context)
        await self._calls.change(
            lambda done: self._groups.delete_group(request.group, request_id, timeout_ms, done), timeout_ms
        )
        return pb.DeleteGroupResponse()

    @guarded
    async def DeleteOffsets(self, request: pb.DeleteOffsetsRequest, context: Context) -> pb.DeleteOffsetsResponse:
        check_count("partitions", request.partitions, COMMIT_ITEMS_MAX)
        request_id, timeout_ms = request_id_of(request.request_id), deadline_ms(request.timeout_ms, context)
        group = await find_group(self._calls, request.group, timeout_ms)
        pids = tuple(
            [(await find_partition(self._calls, p.topic, p.partition, timeout_ms)).pid for p in request.partitions]
        )
        for attempt in range(DELETE_ATTEMPTS):
            _check_not_subscribed(group, {p.topic for p in request.partitions})
            begin = partial(self._groups.delete_offsets, group.name, group.generation, pids, request_id, timeout_ms)
            try:
                await self._calls.change(begin, timeout_ms)
                return pb.DeleteOffsetsResponse()
            except SmqError as e:
                if e.code is not ErrorCode.ILLEGAL_GENERATION or attempt + 1 == DELETE_ATTEMPTS:
                    raise
            # The members have changed. The refusal is remembered under the id, so the next attempt has none.
            request_id, group = NO_REQUEST, await find_group(self._calls, request.group, timeout_ms)
        raise AssertionError("the last attempt returns or raises")

    # ----------------------------------------------------------------------------------------------------- transactions
    @guarded
    async def ListTransactions(
        self, request: pb.ListTransactionsRequest, context: Context
    ) -> pb.ListTransactionsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        found = [transaction for _, transaction in sorted(state.transactions.items())]
        shown = [_transaction_summary(state, t) async for t in Turns().over(found)]
        return pb.ListTransactionsResponse(transactions=shown)

    @guarded
    async def DescribeTransaction(
        self, request: pb.DescribeTransactionRequest, context: Context
    ) -> pb.DescribeTransactionResponse:
        transaction = await self._find_transaction(request.transactional_id, deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        slot = coordinator_of(state, transaction.transactional_id)
        out = pb.DescribeTransactionResponse(
            transaction=_transaction_summary(state, transaction),
            coordinator=slot.node if slot.node else None,
            groups=sorted(transaction.offsets),
        )
        for pid in sorted(transaction.partitions):
            topic_id, index = split_partition_id(pid)
            out.partitions.append(pb.TopicPartition(topic=state.topic_names.get(topic_id, ""), partition=index))
        return out

    @guarded
    async def AbortTransaction(
        self, request: pb.AbortTransactionRequest, context: Context
    ) -> pb.AbortTransactionResponse:
        """A repetition finds the transaction aborted, and is answered as the first. A caller that names the producer
        ends no later transaction of the id."""
        is_named = request.HasField("producer_id") or request.HasField("producer_epoch")
        if is_named:
            check_fields(request, ("producer_id", "producer_epoch"))
        timeout_ms = deadline_ms(request.timeout_ms, context)
        transaction = await self._find_transaction(request.transactional_id, timeout_ms)
        if transaction.phase is not TransactionPhase.ONGOING:
            if transaction.outcome is TransactionOutcome.ABORTED:
                return pb.AbortTransactionResponse()
            name = transaction.transactional_id
            raise SmqError(ErrorCode.INVALID_TRANSACTION_STATE, f"transactional id {name!r} has no open transaction")
        producer = producer_of(transaction)
        if is_named and (request.producer_id, request.producer_epoch) != (
            producer.producer_id,
            producer.producer_epoch,
        ):
            raise SmqError(
                ErrorCode.PRODUCER_FENCED,
                f"the open transaction of {transaction.transactional_id!r} is that of producer {producer.producer_id}"
                f" in epoch {producer.producer_epoch}, not of {request.producer_id} in {request.producer_epoch}",
            )
        await Transactions(self._calls, self._groups).abort(producer, timeout_ms)
        return pb.AbortTransactionResponse()

    @guarded
    async def ListApps(self, request: pb.ListAppsRequest, context: Context) -> pb.ListAppsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        state = self._calls.node.state
        apps = sorted(state.apps.items())
        return pb.ListAppsResponse(apps=[_app(state, name, app) async for name, app in Turns().over(apps)])

    async def _find_transaction(self, name: str, timeout_ms: int) -> TransactionState:
        await self._calls.barrier(timeout_ms)
        transaction = self._calls.node.state.transactions.get(name)
        if transaction is None:
            raise SmqError(ErrorCode.UNKNOWN_TRANSACTIONAL_ID, f"there is no transactional id {name!r}")
        return transaction


def _check_change(request: pb.AlterTopicRequest | pb.AlterClusterConfigRequest) -> None:
    if not request.set and not request.unset:
        raise SmqError(ErrorCode.INVALID_REQUEST, "set and unset are empty: name at least one setting")


def _sorted_items(config: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(config.items()))


def _credential(given: pb.ScramCredential) -> ScramCredential:
    mechanism = scram.BY_NAME.get(given.mechanism)
    if mechanism is None:
        known = ", ".join(scram.BY_NAME)
        raise SmqError(ErrorCode.INVALID_CREDENTIAL, f"mechanism {given.mechanism[:80]!r} is none of {known}")
    return ScramCredential(
        mechanism=mechanism.number,
        iterations=given.iterations,
        salt=given.salt,
        stored_key=given.stored_key,
        server_key=given.server_key,
    )


K = TypeVar("K", bound=enum.IntEnum)


def _word(kinds: type[K], word: str) -> K:
    try:
        return kinds[word.upper().replace("-", "_")]
    except KeyError:
        known = ", ".join(kind.name.lower() for kind in kinds)
        message = f"{kinds.__name__.lower()} {word[:80]!r} is none of {known}"
        raise SmqError(ErrorCode.INVALID_REQUEST, message) from None


def _acl(given: pb.Acl) -> Acl:
    return Acl(
        resource=_word(Resource, given.resource),
        pattern=_word(Pattern, given.pattern),
        name=given.name,
        principal=PRINCIPAL + given.user,
        host=given.host,
        operation=_word(Operation, given.operation),
        permission=_word(Permission, given.permission),
    )


def _acl_info(acl: Acl) -> pb.Acl:
    return pb.Acl(
        resource=Resource(acl.resource).name.lower(),
        pattern=Pattern(acl.pattern).name.lower(),
        name=acl.name,
        user=acl.principal.removeprefix(PRINCIPAL),
        host=acl.host,
        operation=Operation(acl.operation).name.lower(),
        permission=Permission(acl.permission).name.lower(),
    )


def _entity(given: pb.Quota) -> dict[str, str]:
    return {_ENTITIES[field.name]: name for field, name in given.ListFields() if field.name in _ENTITIES}


def _quota_info(quota: Quota) -> pb.Quota:
    named = {name: dict(quota.entity)[kind] for name, kind in _ENTITIES.items() if kind in dict(quota.entity)}
    return pb.Quota(key=quota.key, value=quota.thousandths / THOUSAND, **named)


def _user_info(user: UserState) -> pb.UserInfo:
    return pb.UserInfo(
        name=user.name,
        mechanisms=[scram.BY_NUMBER[credential.mechanism].name for credential in user.credentials],
        iterations=[credential.iterations for credential in user.credentials],
    )


def _node_info(node: NodeState, listener: str) -> pb.NodeInfo:
    told = told_of(node, listener)
    return pb.NodeInfo(
        node=node.node,
        grpc_address=told.grpc_address,
        http_address=node.http_address,
        kafka_address=told.kafka_address,
        fenced=node.fenced,
        incarnation=node.incarnation,
        drained=node.drained,
        rack=node.rack,
        feature_level=node.feature_level,
    )


async def _topic_info(topic: TopicState, node: NodeApi, ends: Ends | None, turns: Turns) -> pb.TopicInfo:
    """`ends`: as the leaders have reported them, if they were asked."""
    out = pb.TopicInfo(
        name=topic.name,
        topic_id=topic.topic_id,
        replication_factor=topic.replication_factor,
        config=topic.config,
        created_ms=topic.created_ms,
    )
    async for partition in turns.over(topic.partitions):
        info = out.partitions.add()
        info.CopyFrom(_partition_info(partition, node))
        if ends is not None and not partition.is_external:
            _set_end(info, ends.get((topic.name, partition.index)))
    return out


def _set_end(info: pb.PartitionInfo, end: PartitionRange | None) -> None:
    if end is None:
        info.end_unknown = True
        return
    info.log_start, info.hwm, info.next_offset, info.lso = end.log_start, end.hwm, end.next_offset, end.lso


def _partition_info(partition: PartitionState, node: NodeApi) -> pb.PartitionInfo:
    hwm = node.known_hwm(partition)
    return pb.PartitionInfo(
        partition=partition.index,
        leader=partition.leader,
        leader_available=has_leader(partition, node.state),
        epoch=partition.epoch,
        replicas=partition.replicas,
        log_start=partition.log_start,
        hwm=hwm,
        next_offset=max(partition.next_offset, hwm),
        lso=hwm,
    )


def _check_not_subscribed(group: GroupState, topics: set[str]) -> None:
    subscribed = subscriptions(group)
    if subscribed is None:
        message = f"group {group.name!r} has members that are no consumers: what they read is not known"
        raise SmqError(ErrorCode.GROUP_NOT_EMPTY, message)
    if still_read := sorted(topics & subscribed):
        names = ", ".join(repr(topic) for topic in still_read[:5])
        raise SmqError(ErrorCode.GROUP_SUBSCRIBED, f"members of group {group.name!r} subscribe to {names}")


def _offset(at: GroupPosition, lag: Lag) -> pb.GroupOffset:
    committed = at.committed
    return pb.GroupOffset(
        topic=at.topic,
        partition=at.part.index,
        offset=committed.position if committed is not None else None,
        log_start=lag.log_start,
        hwm=lag.end,
        lag=lag.offsets,
        end_unknown=not lag.is_end_known,
        committed_ms=committed.committed_ms if committed is not None else 0,
        metadata=committed.metadata if committed is not None else "",
        lag_records=lag.records,
        lag_bytes=lag.size_bytes,
        lag_ms=lag.age_ms,
    )


def _total(total: LagTotal) -> pb.GroupLag:
    return pb.GroupLag(
        lag=total.offsets.value,
        lag_records=total.records.value,
        lag_bytes=total.size_bytes.value,
        lag_ms=total.age_ms.value,
        lag_at_least=total.offsets.at_least,
    )


def _group_summary(group: GroupState) -> pb.GroupSummary:
    return pb.GroupSummary(
        group=group.name,
        state=state_of(group),
        protocol_type=group.protocol_type,
        members=len(group.members),
        generation=group.generation,
    )


def _app(state: ClusterState, name: str, app: AppState) -> pb.App:
    idle_ms, retention_ms = state.expiry_clock_ms - app.used_ms, offsets_retention_ms(state.config)
    return pb.App(
        app=name,
        batch_id=app.batch_id,
        idle_ms=idle_ms,
        expires_ms=max(retention_ms - idle_ms, 0) if retention_ms else None,
    )


def _transaction_summary(state: ClusterState, transaction: TransactionState) -> pb.TransactionSummary:
    return pb.TransactionSummary(
        transactional_id=transaction.transactional_id,
        state=state_name(transaction),
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        transaction_timeout_ms=transaction.timeout_ms,
        open_ms=open_ms(state, transaction),
    )
