"""A group's sizes come from the node that describes it, and from the leaders of what it holds no copy of."""

from smq.clients import Admin
from smq.clients.pb import smq_pb2 as pb
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of


def add_group(cluster: FakeCluster, *offsets: pb.GroupOffset) -> None:
    cluster.groups["g"] = pb.DescribeGroupResponse(group=pb.GroupSummary(group="g", state="Empty"), offsets=offsets)


async def test_what_the_describing_node_has_no_copy_of_is_measured_by_the_leaders() -> None:
    async with cluster_of(3, t=3) as cluster, Admin(cluster.servers) as admin:
        for partition in range(3):
            cluster.append("t", partition, [NewRecord(None, b"v", 1)] * 4)
        add_group(
            cluster,
            pb.GroupOffset(topic="t", partition=0, offset=1, hwm=4, lag=3, lag_records=3),
            pb.GroupOffset(topic="t", partition=1, offset=1, hwm=4, lag=3, lag_records=3, lag_bytes=9, lag_ms=8),
            pb.GroupOffset(topic="t", partition=2, offset=4, hwm=4, lag=0, lag_records=0, lag_bytes=0, lag_ms=0),
        )
        found = await admin.describe_group("g", with_sizes=True)
        size = len(cluster.partition("t", 0).stored[0].data)
        sizes = [(p.lag_bytes, p.lag_ms) for p in found.positions]
        assert sizes == [(size, 3_000), (9, 8), (0, 0)]
        calls = {number: node.seen.count("MeasureBacklogs") for number, node in cluster.nodes.items()}
        leader = cluster.partition("t", 0).leader
        assert calls == {number: int(number == leader) for number in cluster.nodes}


async def test_sizes_that_no_leader_tells_stay_unknown() -> None:
    async with cluster_of(2, t=1) as cluster, Admin(cluster.servers, timeout_ms=1_000) as admin:
        cluster.append("t", 0, [NewRecord(None, b"v", 1)])
        add_group(cluster, pb.GroupOffset(topic="t", partition=0, offset=0, hwm=1, lag=1, lag_records=1))
        await cluster.nodes[cluster.partition("t", 0).leader].stop()
        (position,) = (await admin.describe_group("g", with_sizes=True)).positions
        assert (position.lag, position.lag_bytes, position.lag_ms) == (1, None, None)


async def test_a_description_without_sizes_asks_no_leader() -> None:
    async with cluster_of(1, t=1) as cluster, Admin(cluster.servers) as admin:
        add_group(cluster, pb.GroupOffset(topic="t", partition=0, offset=0, hwm=1, lag=1, lag_records=1))
        await admin.describe_group("g")
        assert "MeasureBacklogs" not in cluster.nodes[1].seen
