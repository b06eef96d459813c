"""The fake cluster's admin service: topics, groups, nodes and their status.

Owns how the shared state is described and changed. What no test needs is left out, such as transactions, which the
fake log does not take. `runner` registers it.
"""

from google.protobuf.message import Message

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import AdminServicer
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import FakeNode, answering


class Admin(AdminServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @answering
    async def CreateTopic(self, request: pb.CreateTopicRequest) -> Message:
        cluster = self.node.cluster

        def change() -> Message:
            if request.name in cluster.topics:
                raise SmqError(ErrorCode.TOPIC_EXISTS, f"topic {request.name!r} is there")
            is_external = request.config.get("storage") == "external"
            cluster.create(
                request.name, request.partition_count, start_offset=request.start_offset, is_external=is_external
            )
            return pb.CreateTopicResponse(topic_id=cluster.topic_ids[request.name])

        return cluster.once(request.request_id, "create", change)

    @answering
    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> Message:
        def change() -> Message:
            self.node.cluster.partition(request.name, 0)
            self.node.cluster.delete(request.name)
            return pb.DeleteTopicResponse()

        return self.node.cluster.once(request.request_id, "delete", change)

    @answering
    async def AddPartitions(self, request: pb.AddPartitionsRequest) -> Message:
        def change() -> Message:
            self.node.cluster.grow(request.name, request.partition_count)
            return pb.AddPartitionsResponse()

        return self.node.cluster.once(request.request_id, "add partitions", change)

    @answering
    async def AlterTopic(self, request: pb.AlterTopicRequest) -> Message:
        return self.node.cluster.once(request.request_id, "alter", pb.AlterTopicResponse)

    @answering
    async def SetNodeDrained(self, request: pb.SetNodeDrainedRequest) -> Message:
        def change() -> Message:
            (self.node.cluster.drained.add if request.drained else self.node.cluster.drained.discard)(request.node)
            return pb.SetNodeDrainedResponse()

        return self.node.cluster.once(request.request_id, "drain", change)

    @answering
    async def DeleteRecords(self, request: pb.DeleteRecordsRequest) -> Message:
        def change() -> Message:
            log = self.node.cluster.partition(request.topic, request.partition)
            log.log_start = log.hwm if request.before_offset < 0 else request.before_offset
            return pb.DeleteRecordsResponse(log_start=log.log_start)

        return self.node.cluster.once(request.request_id, "delete records", change)

    @answering
    async def ListGroups(self, request: pb.ListGroupsRequest) -> Message:
        cluster = self.node.cluster
        groups = [cluster.groups[name].group for name in sorted(cluster.groups)]
        return pb.ListGroupsResponse(groups=groups)

    @answering
    async def DescribeGroup(self, request: pb.DescribeGroupRequest) -> Message:
        found = self.node.cluster.groups.get(request.group)
        if found is None:
            raise SmqError(ErrorCode.UNKNOWN_GROUP, f"there is no group {request.group!r}")
        return found

    @answering
    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> Message:
        def change() -> Message:
            if self.node.cluster.groups[request.group].members:
                raise SmqError(ErrorCode.GROUP_NOT_EMPTY, f"group {request.group!r} has members")
            del self.node.cluster.groups[request.group]
            return pb.DeleteGroupResponse()

        return self.node.cluster.once(request.request_id, "delete group", change)

    @answering
    async def DeleteOffsets(self, request: pb.DeleteOffsetsRequest) -> Message:
        def change() -> Message:
            for p in request.partitions:
                self.node.cluster.commits.pop((request.group, p.topic, p.partition), None)
            return pb.DeleteOffsetsResponse()

        return self.node.cluster.once(request.request_id, "delete offsets", change)

    @answering
    async def DescribeClusterConfig(self, request: pb.DescribeClusterConfigRequest) -> Message:
        config = self.node.cluster.config.items()
        settings = [pb.ClusterSetting(key=key, value=value, is_set=True) for key, value in config]
        return pb.DescribeClusterConfigResponse(settings=settings)

    @answering
    async def AlterClusterConfig(self, request: pb.AlterClusterConfigRequest) -> Message:
        def change() -> Message:
            self.node.cluster.config |= dict(request.set)
            for key in request.unset:
                self.node.cluster.config.pop(key, None)
            return pb.AlterClusterConfigResponse()

        return self.node.cluster.once(request.request_id, "alter the cluster's settings", change)

    @answering
    async def ListUsers(self, _request: pb.ListUsersRequest) -> Message:
        users = self.node.cluster.users
        return pb.ListUsersResponse(users=[users[name] for name in sorted(users)])

    @answering
    async def AlterUser(self, request: pb.AlterUserRequest) -> Message:
        """It keeps no keys."""
        users = self.node.cluster.users

        def change() -> Message:
            if request.must_be_new and request.name in users:
                raise SmqError(ErrorCode.USER_EXISTS, f"user {request.name!r} is there")
            if request.must_exist and request.name not in users:
                raise SmqError(ErrorCode.UNKNOWN_USER, f"there is no user {request.name!r}")
            credentials = request.credentials
            users[request.name] = pb.UserInfo(
                name=request.name,
                mechanisms=[c.mechanism for c in credentials],
                iterations=[c.iterations for c in credentials],
            )
            return pb.AlterUserResponse()

        return self.node.cluster.once(request.request_id, "alter user", change)

    @answering
    async def DeleteUser(self, request: pb.DeleteUserRequest) -> Message:
        def change() -> Message:
            if self.node.cluster.users.pop(request.name, None) is None:
                raise SmqError(ErrorCode.UNKNOWN_USER, f"there is no user {request.name!r}")
            return pb.DeleteUserResponse()

        return self.node.cluster.once(request.request_id, "delete user", change)

    @answering
    async def ListAcls(self, _request: pb.ListAclsRequest) -> Message:
        return pb.ListAclsResponse(acls=self.node.cluster.acls)

    @answering
    async def AlterAcls(self, request: pb.AlterAclsRequest) -> Message:
        cluster = self.node.cluster

        def change() -> Message:
            kept = [acl for acl in cluster.acls if acl not in (*request.remove, *request.add)]
            cluster.acls = [*kept, *request.add]
            return pb.AlterAclsResponse()

        return cluster.once(request.request_id, "alter acls", change)

    @answering
    async def ListQuotas(self, _request: pb.ListQuotasRequest) -> Message:
        return pb.ListQuotasResponse(quotas=self.node.cluster.quotas)

    @answering
    async def AlterQuotas(self, request: pb.AlterQuotasRequest) -> Message:
        cluster = self.node.cluster

        def place(quota: pb.Quota) -> bytes:
            copy = pb.Quota()
            copy.CopyFrom(quota)
            copy.value = 0
            return copy.SerializeToString(deterministic=True)

        def change() -> Message:
            changed = {place(quota) for quota in request.quotas}
            kept = [quota for quota in cluster.quotas if place(quota) not in changed]
            cluster.quotas = [*kept, *(quota for quota in request.quotas if quota.value)]
            return pb.AlterQuotasResponse()

        return cluster.once(request.request_id, "alter quotas", change)

    @answering
    async def TestAcl(self, request: pb.TestAclRequest) -> Message:
        """By name alone."""
        rules = [acl for acl in self.node.cluster.acls if (acl.user, acl.name) == (request.user, request.name)]
        return pb.TestAclResponse(allowed=bool(rules), rule=rules[0] if rules else None)

    @answering
    async def DescribeCluster(self, request: pb.DescribeClusterRequest) -> Message:
        cluster = self.node.cluster
        answer = pb.DescribeClusterResponse(cluster_id="fake", raft_leader=1)
        for number, node in cluster.nodes.items():
            answer.nodes.add(
                node=number,
                grpc_address=node.address,
                fenced=not node.is_up or number in cluster.fenced,
                drained=number in cluster.drained,
            )
        for name in request.topics or cluster.topics:
            cluster.partition(name, 0)
            is_external = name in cluster.external
            topic = answer.topics.add(
                name=name,
                topic_id=cluster.topic_ids[name],
                replication_factor=0 if is_external else 3,
                config={"storage": "external"} if is_external else {},
            )
            for index, log in enumerate(cluster.topics[name]):
                is_known = log.told_hwm is None
                hwm = log.hwm if log.told_hwm is None else log.told_hwm
                topic.partitions.add(
                    partition=index,
                    leader=log.leader,
                    leader_available=bool(log.leader) and cluster.nodes[log.leader].is_up,
                    epoch=log.epoch,
                    replicas=log.replicas,
                    log_start=log.log_start,
                    hwm=hwm,
                    next_offset=log.end if is_known else hwm,
                    lso=hwm,
                    end_unknown=request.linearizable and not is_known,
                )
        return answer

    @answering
    async def NodeStatus(self, request: pb.NodeStatusRequest) -> Message:
        digest = "d" if request.with_digest else ""
        answer = pb.NodeStatusResponse(node=self.node.number, is_ready=True, raft_leader=1, digest=digest)
        for name, logs in self.node.cluster.topics.items():
            for index, log in enumerate(logs):
                is_leader = log.leader == self.node.number
                answer.replicas.add(topic=name, partition=index, is_leader=is_leader, hwm=log.hwm, verified_end=log.end)
        return answer
