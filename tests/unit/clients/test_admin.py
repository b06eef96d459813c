"""The asyncio admin client and the retried calls under it, over real gRPC."""

import asyncio
from typing import Any

import pytest

from smq.clients import Admin, SmqError
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import CommittedOffset
from smq.raft_state.errors import ErrorCode, ErrorDetails
from smq.raft_state.ids import NodeId
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of


def admin_of(cluster: FakeCluster, **options: Any) -> Admin:
    return Admin(cluster.servers, **options)


async def test_life_of_a_topic() -> None:
    async with cluster_of(3) as cluster, admin_of(cluster) as admin:
        assert len(await admin.create_topic("t", 2, config={"max.message.bytes": "1000"})) == 16
        await admin.add_partitions("t", 3)
        await admin.alter_topic("t", set={"a": "b"}, unset=["c"])
        assert [t.name for t in await admin.list_topics()] == ["t"]
        assert [p.partition for p in (await admin.describe_topic("t")).partitions] == [0, 1, 2]
        await admin.delete_topic("t")
        with pytest.raises(SmqError) as caught:
            await admin.describe_topic("t")
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC
        assert cluster.applied == ["create", "add partitions", "alter", "delete"]


async def test_definite_refusal_is_raised_immediately_with_the_servers_message() -> None:
    async with cluster_of(1, t=1) as cluster, admin_of(cluster) as admin:
        with pytest.raises(SmqError, match="topic 't' is there") as caught:
            await admin.create_topic("t")
        assert caught.value.code is ErrorCode.TOPIC_EXISTS
        assert cluster.nodes[1].seen.count("CreateTopic") == 1


async def test_change_with_a_lost_answer_takes_effect_once() -> None:
    async with cluster_of(2) as cluster, admin_of(cluster) as admin:
        losses = iter(range(2))

        def create() -> pb.CreateTopicResponse:
            cluster.create("t", 1)
            return pb.CreateTopicResponse(topic_id=b"i" * 16)

        def lose(name: str, request: Any) -> None:
            if name == "CreateTopic" and next(losses, None) is not None:
                cluster.once(request.request_id, "create", create)
                raise SmqError(ErrorCode.TIMED_OUT, "the answer was lost")

        for node in cluster.nodes.values():
            node.hook = lose
        assert await admin.create_topic("t") == b"i" * 16
        assert cluster.applied == ["create"]


async def test_call_continues_at_another_node_when_one_is_down_or_not_ready() -> None:
    async with cluster_of(3, t=1) as cluster, admin_of(cluster) as admin:
        await cluster.nodes[1].stop()

        def not_ready(_name: str, _request: object) -> None:
            raise SmqError(ErrorCode.NODE_NOT_READY, "starting")

        cluster.nodes[2].hook = not_ready
        assert (await admin.describe_topic("t")).name == "t"


async def test_deletion_of_a_group_goes_on_to_its_coordinator_which_says_what_is_wrong() -> None:
    async with cluster_of(3) as cluster, admin_of(cluster) as admin:
        coordinator = cluster.nodes[3]
        details = ErrorDetails(leader=NodeId(3), leader_address=coordinator.address)

        def refuse(_name: str, _request: object) -> None:
            raise SmqError(ErrorCode.NOT_COORDINATOR, "node 3 coordinates it", details)

        cluster.nodes[1].hook = cluster.nodes[2].hook = refuse
        summary, member = pb.GroupSummary(group="g", members=1), pb.GroupMemberInfo(member_id="m")
        cluster.groups["g"] = pb.DescribeGroupResponse(group=summary, members=[member])
        with pytest.raises(SmqError, match="group 'g' has members") as caught:
            await admin.delete_group("g")
        assert caught.value.code is ErrorCode.GROUP_NOT_EMPTY
        assert coordinator.seen.count("DeleteGroup") == 1


async def test_lost_quorum_is_reported_within_the_timeout() -> None:
    async with cluster_of(2, t=1) as cluster, admin_of(cluster, timeout_ms=200) as admin:

        def no_quorum(_name: str, _request: object) -> None:
            raise SmqError(ErrorCode.NO_QUORUM, "no majority")

        for node in cluster.nodes.values():
            node.hook = no_quorum
        with pytest.raises(SmqError) as caught:
            await admin.create_topic("u")
        assert caught.value.code is ErrorCode.NO_QUORUM


async def test_hanging_node_does_not_hang_the_caller() -> None:
    async with cluster_of(1, t=1) as cluster, admin_of(cluster, timeout_ms=200) as admin:
        stuck = asyncio.Event()
        cluster.nodes[1].hook = lambda _name, _request: stuck.wait()
        with pytest.raises(SmqError) as caught:
            await admin.describe_topic("t")
        assert caught.value.code is ErrorCode.TIMED_OUT
        stuck.set()


async def test_offsets_and_ranges() -> None:
    async with cluster_of(3, t=3) as cluster, admin_of(cluster) as admin:
        cluster.topics["t"][1].hwm = 40
        found = await admin.list_offsets({("t", p): "RESET_TO_LATEST" for p in range(3)})
        assert [found["t", p].offset for p in range(3)] == [0, 40, 0]
        assert await admin.delete_records("t", 1, 10) == 10
        listed = (await admin.list_offsets({("t", 1): ("RESET_TO_OFFSET", 3)}))["t", 1]
        assert (listed.offset, listed.clamped, listed.lo, listed.hi) == (10, True, 10, 40)
        info = await admin.partition_range("t", 1)
        assert (info.range_start, info.range_stop, info.log_start, info.hwm) == (32, 64, 10, 40)


async def test_offsets_are_looked_up_at_another_replica_when_the_leader_is_down() -> None:
    async with cluster_of(2, t=2) as cluster, admin_of(cluster) as admin:
        await admin.describe_topic("t")
        await cluster.nodes[2].stop()
        found = await admin.list_offsets({("t", 0): "RESET_TO_LATEST", ("t", 1): "RESET_TO_LATEST"})
        assert len(found) == 2


async def test_group_offsets() -> None:
    async with cluster_of(1, t=2) as cluster, admin_of(cluster) as admin:
        await admin.commit_offsets("g", {("t", 0): 5, ("t", 1): CommittedOffset(offset=7, metadata="m")})
        assert await admin.fetch_offsets("g", []) == {}
        assert await admin.fetch_offsets("g", [("t", 1)]) == {("t", 1): CommittedOffset(offset=7, metadata="m")}
        assert len(await admin.fetch_offsets("g")) == 2
        assert await admin.fetch_offsets("unknown") == {}


async def test_node_status_comes_from_that_node() -> None:
    async with cluster_of(2, t=1) as cluster, admin_of(cluster) as admin:
        status = await admin.node_status(2, with_digest=True)
        assert (status.node, status.digest, status.replicas[0].topic) == (2, "d", "t")
        assert (await admin.node_status(cluster.nodes[1].address)).node == 1
        with pytest.raises(SmqError, match="no node 9"):
            await admin.node_status(9)


async def test_server_that_is_not_an_smq_node_is_named() -> None:
    import grpc

    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    admin = Admin(f"127.0.0.1:{port}")
    with pytest.raises(SmqError, match="not an smq node"):
        await admin.start()
    await admin.close()
    await server.stop(None)
