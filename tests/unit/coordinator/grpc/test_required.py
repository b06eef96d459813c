"""Fields that a request must set, because 0 would mean something."""

from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.required import REQUIRED, check_required, is_number, requests
from smq.raft_state.errors import SmqError
from smq.testing.served import Served, fails

# The other numbers and flags of requests: what an absent one means, and why that is harmless.
DEFAULTS = {
    "timeout_ms": "30 s",
    "with_sizes": "the lag in records only",
    "max_wait_ms": "no wait",
    "isolation": "what is committed",
    "max_bytes": "the node's limit",
    "window_bytes": "no acknowledgements",
    "stop_offset": "never",
    "stop_at_end": "never",
    "correlation_id": "the caller's own mark: a single request needs none",
    "acks": "all, the safest",
    "resume": "a new producer id",
    "temporary": "an id that stays",
    "linearizable": "a view, and no change",
    "with_digest": "no digest",
    "without_replicas": "with the replicas",
    "stable": "the offset that is committed now",
    "reset_if_gone": "an error, the safest",
    "offset_type": "refused: it has no type 0",
    "partition_count": "refused: at least 1",
    "replication_factor": "the cluster's default",
    "start_offset": "a new topic begins at 0",
    "count": "refused: at least 1",
    "transaction_timeout_ms": "refused: at least 1",
    "session_timeout_ms": "refused: at least 1 s",
    "rebalance_timeout_ms": "the session's timeout",
    "timestamp_ms": "optional: the node's clock, or no look-up by time",
    "not_before": "optional: no bound",
    "end_offset": "optional: the present end",
    "max_records": "500",
    "from_ms": "optional: no bound",
    "until_ms": "optional: no bound",
    "iterations": "refused: at least 4,096",
    "salt": "refused: at least a byte",
    "stored_key": "refused: 32 or 64 bytes",
    "server_key": "refused: 32 or 64 bytes",
    "must_be_new": "a user that may be there",
    "must_exist": "a user that may be new",
}
# Required in some cases only, which the services check: with `resume`, with `records`, with a type that has a value,
# without a cursor.
SOMETIMES = {"producer_id", "producer_epoch", "base_sequence", "offset_value", "SearchRecordsRequest.offset"}


def test_every_number_and_flag_of_every_request_is_required_or_has_a_harmless_default() -> None:
    for kind in requests():
        required = REQUIRED.get(kind.name, ())
        for field in kind.fields:
            names = {field.name, f"{kind.name}.{field.name}"}
            if is_number(field) and field.name not in required and not names & SOMETIMES:
                assert field.name in DEFAULTS, f"{kind.name}.{field.name}: what does an absent one mean?"


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in REQUIRED.items() for n in names])
def test_a_message_without_a_required_field_is_refused_and_zero_is_not_absent(kind: str, name: str) -> None:
    made: Any = getattr(pb, kind)(**dict.fromkeys(REQUIRED[kind], 0))
    check_required(made)
    made.ClearField(name)
    with pytest.raises(SmqError, match=f"{kind} has no {name}"):
        check_required(made)


async def test_nothing_changes_by_requests_that_forget_a_field(served: Served) -> None:
    await served.create("t", partitions=1)
    await served.fill([5])
    admin, broker, agent = served.admin, served.broker, served.agent
    forgotten = pb.PartitionOffset(topic="t", offset=3)
    calls = [
        (admin.SetNodeDrained(pb.SetNodeDrainedRequest(node=1)), "drained"),
        (admin.SetNodeDrained(pb.SetNodeDrainedRequest(drained=True)), "node"),
        (admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", before_offset=-1)), "partition"),
        (admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", partition=0)), "before_offset"),
        (admin.AlterTopic(pb.AlterTopicRequest(name="t")), "set and unset"),
        (admin.AlterClusterConfig(pb.AlterClusterConfigRequest()), "set and unset"),
        (broker.CommitOffsets(pb.CommitOffsetsRequest(group="g", offsets=[forgotten])), "partition"),
        (broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(topic="t")), "partition"),
        (broker.Fetch(pb.FetchRequest(partitions=[pb.FetchPartition(topic="t", partition=0)])), "offset"),
    ]
    for call, name in calls:
        detail = await fails(call)
        assert (detail.name, name in detail.message) == ("INVALID_REQUEST", True), detail
    session = pb.StartPublishSessionRequest(session_id="s", topic="t", resume=True)
    assert "producer_id" in (await fails(agent.StartPublishSession(session))).message
    asked = pb.ListOffsetsPartition(topic="t", partition=0, offset_type=pb.EXACT_OFFSET)
    listed = (await broker.ListOffsets(pb.ListOffsetsRequest(partitions=[asked]))).offsets[0]
    assert "offset_value" in listed.error.message
    (answer,) = await served.publish(pb.PublishRecordRequest(topic="t", batch=b"x"))
    assert "partition" in answer.error.message
    found = await broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(topic="t", partition=0))
    assert (found.log_start, found.hwm) == (0, 5)
