"""A group that is behind, on a fake cluster, and the command line on it."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.root import cli
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

Smq = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with cluster_in_thread(1, t=2) as found:
        offsets = [
            pb.GroupOffset(
                topic="t", partition=0, offset=5, hwm=9, lag=4, lag_records=4, lag_bytes=2_048, lag_ms=90_000
            ),
            pb.GroupOffset(topic="t", partition=1, offset=3, hwm=3, lag=0, lag_records=0, lag_bytes=0, lag_ms=0),
        ]
        summary = pb.GroupSummary(group="g", state="Stable", protocol_type="consumer", members=1, generation=1)
        member = pb.GroupMemberInfo(member_id="m", partitions=[pb.TopicPartition(topic="t", partition=0)])
        found.groups["g"] = pb.DescribeGroupResponse(group=summary, members=[member], offsets=offsets)
        yield found


@pytest.fixture
def smq(cluster: FakeCluster) -> Smq:
    environment = {"SMQ_BOOTSTRAP": cluster.nodes[1].address}
    return lambda *arguments: CliRunner(env=environment).invoke(cli, [str(a) for a in arguments])


@pytest.fixture
def without_leader(cluster: FakeCluster) -> None:
    """The leader of t/1 does not answer; t/0 and t/1 are one member's."""
    description = cluster.groups["g"]
    description.offsets[1].CopyFrom(pb.GroupOffset(topic="t", partition=1, offset=3, hwm=3, end_unknown=True))
    description.members[0].partitions.add(topic="t", partition=1)
