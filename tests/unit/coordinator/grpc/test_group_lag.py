"""A group's lag in records, bytes and time, by gRPC and in the metrics: one calculation for both."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.service import lag_monitor
from smq.coordinator.service.group_lag import age_ms
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import TsNs
from smq.replication.api import Backlog, Cancel, DoneFn
from smq.testing.served import Served
from tests.unit.coordinator.grpc.test_groups_service import join, sync_request
from tests.unit.coordinator.http.test_endpoints import get
from tests.unit.coordinator.service.test_group_lag import assignment

GROUP = "g"


async def commit(served: Served, offset: int, topic: str = "t", partition: int = 0) -> None:
    place = pb.PartitionOffset(topic=topic, partition=partition, offset=offset)
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=GROUP, offsets=[place]))


async def described(served: Served, *, with_sizes: bool = True) -> dict[tuple[str, int], pb.GroupOffset]:
    answer = await served.admin.DescribeGroup(pb.DescribeGroupRequest(group=GROUP, with_sizes=with_sizes))
    return {(o.topic, o.partition): o for o in answer.offsets}


async def stored_sizes(served: Served) -> list[int]:
    """The size of the log after each batch that is published."""
    sizes = []
    for count in (3, 4, 5):
        await served.fill([count])
        status = await served.admin.NodeStatus(pb.NodeStatusRequest())
        sizes.append(next(r.size_bytes for r in status.replicas if r.partition == 0))
    return sizes


async def test_lag_counts_the_whole_batches_from_the_one_with_the_next_record(served: Served) -> None:
    await served.create()
    first, second, third = await stored_sizes(served)
    expected = {0: third, 2: third, 3: third - first, 6: third - first, 7: third - second, 12: 0}
    ages = []
    for offset, size in expected.items():
        await commit(served, offset)
        found = (await described(served))["t", 0]
        assert (found.lag, found.lag_records, found.lag_bytes) == (12 - offset, 12 - offset, size), offset
        ages.append(found.lag_ms)
    assert ages[-1] == 0, "nothing is left to read"
    assert all(age >= 0 for age in ages)
    assert not (await described(served, with_sizes=False))["t", 0].HasField("lag_bytes"), "it was not asked for"


async def test_records_that_retention_has_deleted_count_as_offsets_only(served: Served) -> None:
    """A group that was away for long: it has 12 offsets before it, and 5 records that it can still read."""

    await served.create()
    _, second, third = await stored_sizes(served)
    await commit(served, 0)
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", partition=0, before_offset=7))
    found = (await described(served))["t", 0]
    assert (found.log_start, found.lag, found.lag_records) == (7, 12, 5)
    assert found.lag_bytes == third - second


async def test_records_stored_elsewhere_have_offsets_and_no_sizes(served: Served) -> None:
    await served.admin.CreateTopic(pb.CreateTopicRequest(name="x", partition_count=1, config={"storage": "external"}))
    await commit(served, 0, "x")
    found = (await described(served))["x", 0]
    assert found.lag == 0
    assert not any(found.HasField(name) for name in ("lag_records", "lag_bytes", "lag_ms"))


async def test_backlogs_are_measured_one_by_one_and_an_error_affects_its_own_only(served: Served) -> None:
    await served.create()
    first, _, third = await stored_sizes(served)
    places = [("t", 0, 3), ("t", 0, 12), ("t", 0, -1), ("nowhere", 0, 0), ("t", 7, 0)]
    asked = [pb.PartitionOffset(topic=t, partition=p, offset=o) for t, p, o in places]
    answer = await served.broker.MeasureBacklogs(pb.MeasureBacklogsRequest(offsets=asked))
    good, at_end, *bad = answer.backlogs
    assert (good.offset, good.end, good.size_bytes) == (3, 12, third - first)
    assert (at_end.offset, at_end.end, at_end.size_bytes, at_end.age_ms) == (12, 12, 0, 0)
    assert [b.error.name for b in bad] == ["INVALID_OFFSET", "UNKNOWN_TOPIC", "UNKNOWN_PARTITION"]


async def test_a_backlog_that_is_not_known_is_an_error_and_never_zero(served: Served) -> None:
    """The log may change between the question for its end and the measurement."""

    def unknown(topic: str, partition: int, offset: int, end: int, timeout_ms: int, done: DoneFn[Backlog]) -> Cancel:
        done(Backlog(0, TsNs(-1)))
        return lambda: None

    await served.create()
    await served.fill([3])
    served.server.node.backlog = unknown  # type: ignore[method-assign]  # as a log that has changed answers
    places = [pb.PartitionOffset(topic="t", partition=0, offset=offset) for offset in (0, 3)]
    answer = await served.broker.MeasureBacklogs(pb.MeasureBacklogsRequest(offsets=places))
    assert [b.error.name for b in answer.backlogs] == ["OFFSET_NOT_AVAILABLE", ""]
    assert answer.backlogs[0].error.retriable
    await commit(served, 0)
    found = (await described(served))["t", 0]
    assert (found.lag, found.HasField("lag_bytes"), found.HasField("lag_ms")) == (3, False, False)


async def assigned(served: Served, *partitions: int) -> str:
    """A member of the group with these partitions of t. Returns its id."""
    await served.admin.AlterClusterConfig(pb.AlterClusterConfigRequest(set={"group.initial.rebalance.delay.ms": "0"}))
    joined = await join(served)
    assign = assignment(("t", partitions))
    await served.groups.SyncGroup(sync_request(joined, assign=assign))
    return joined.member_id


async def test_an_assigned_partition_without_a_commit_counts_from_the_log_start(served: Served) -> None:
    await served.create(partitions=2)
    _, second, third = await stored_sizes(served)
    await assigned(served, 0, 1)
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", partition=0, before_offset=7))
    found = (await described(served))["t", 0]
    assert (found.HasField("offset"), found.lag, found.lag_records) == (False, 5, 5)
    assert found.lag_bytes == third - second
    assert found.HasField("lag_ms")


async def test_totals_and_each_members_lag_are_in_the_answer(served: Served) -> None:
    await served.create(partitions=2)
    *_, third = await stored_sizes(served)
    member = await assigned(served, 1)
    await served.broker.CommitOffsets(commit_of(member, partition=1, offset=0))
    request = pb.DescribeGroupRequest(group=GROUP, with_sizes=True)
    answer = await served.admin.DescribeGroup(request)
    (info,) = answer.members
    assert (info.lag.lag, info.lag.lag_records, info.lag.lag_bytes, info.lag.lag_ms) == (0, 0, 0, 0)
    await served.broker.CommitOffsets(commit_of(member, partition=0, offset=2))
    answer = await served.admin.DescribeGroup(request)
    assert (answer.lag.lag, answer.lag.lag_records, answer.lag.lag_bytes) == (10, 10, third)
    assert answer.members[0].lag.lag == 0
    request.with_sizes = False
    total = (await served.admin.DescribeGroup(request)).lag
    assert (total.lag, total.HasField("lag_bytes"), total.HasField("lag_ms")) == (10, False, False)


def commit_of(member_id: str, *, partition: int, offset: int) -> pb.CommitOffsetsRequest:
    place = pb.PartitionOffset(topic="t", partition=partition, offset=offset)
    member = pb.GroupMember(member_id=member_id, generation=1)
    return pb.CommitOffsetsRequest(group=GROUP, offsets=[place], member=member)


async def test_metrics_show_the_lag_of_the_last_pass(served: Served) -> None:
    await served.create(partitions=2)
    first, _, third = await stored_sizes(served)
    await commit(served, 3)
    await commit(served, 0, partition=1)
    await served.server._lags.measure_all()
    status, text = await get(served, "/metrics")
    assert status == 200
    values = {
        (family.name, sample.labels["partition"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("group") == GROUP and "partition" in sample.labels
    }
    assert values["smq_group_lag", "0"] == 9
    assert values["smq_group_lag_bytes", "0"] == third - first
    assert values["smq_group_lag_seconds", "0"] >= 0
    assert values["smq_group_lag_bytes", "1"] == values["smq_group_lag_seconds", "1"] == 0
    assert values["smq_group_committed_offset", "0"] == 3


async def test_what_a_pass_could_not_measure_is_absent_and_never_zero(served: Served) -> None:
    await served.create()
    await served.fill([3])
    await commit(served, 1)
    monitor, node = served.server._lags, served.server.node
    await monitor.measure_all()
    assert len(monitor.backlogs.found) == 1
    real = node.replica_status
    node.replica_status = lambda partition: None  # type: ignore[method-assign]  # another node leads now
    await monitor.measure_all()
    assert monitor.backlogs.found == {}
    node.replica_status = real  # type: ignore[method-assign]  # as above
    await monitor.measure_all()
    assert len(monitor.backlogs.found) == 1


async def test_a_pass_measures_the_groups_that_have_series_and_counts_what_a_limit_leaves_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.create(partitions=2)
    await served.fill([3])
    for group in ("a", "b", "c"):
        places = [pb.PartitionOffset(topic="t", partition=p, offset=0) for p in range(2)]
        await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=group, offsets=places))
    monitor = served.server._lags
    await monitor.measure_all()
    assert (len(monitor.backlogs.found), monitor.backlogs.omitted) == (6, 0)
    monkeypatch.setattr(lag_monitor, "METRICS_GROUPS_MAX", 2)
    await monitor.measure_all()
    assert {group for group, _ in monitor.backlogs.found} == {"a", "b"}
    monkeypatch.setattr(lag_monitor, "METRICS_PARTITIONS_MAX", 3)
    await monitor.measure_all()
    assert (len(monitor.backlogs.found), monitor.backlogs.omitted) == (3, 1)
    _, text = await get(served, "/metrics")
    assert 'smq_metrics_omitted{of="groups"} 1' in text
    assert 'smq_metrics_omitted{of="group_backlogs"} 1' in text


async def test_metrics_show_an_assigned_partition_without_a_commit(served: Served) -> None:
    await served.create()
    *_, third = await stored_sizes(served)
    await assigned(served, 0)
    await served.server._lags.measure_all()
    _, text = await get(served, "/metrics")
    place = f'{{group="{GROUP}",topic="t",partition="0"}}'
    assert f"smq_group_lag{place} 12\n" in text
    assert f"smq_group_lag_bytes{place} {third}\n" in text
    assert f"smq_group_committed_offset{place}" not in text


@pytest.mark.parametrize(("ts_ns", "age"), [(0, 2_592_000_000), (2_591_999_999_000_000, 1), (2_592_001_000_000_000, 0)])
def test_the_age_is_whole_milliseconds_and_never_negative_if_a_clock_is_ahead(ts_ns: int, age: int) -> None:
    thirty_days_ns = 30 * 86_400 * 1_000_000_000
    assert age_ms(ts_ns, thirty_days_ns) == age


async def test_an_unknown_group_has_no_lag(served: Served) -> None:
    from smq.testing.served import fails

    error = await fails(served.admin.DescribeGroup(pb.DescribeGroupRequest(group="unknown", with_sizes=True)))
    assert error.code == ErrorCode.UNKNOWN_GROUP.number
