"""Raw batches: one fetch of them from an offset on, without an assignment, and the records in one.

Owns that request and its answer. It must never retry by rules of its own (`cluster` does), or know a position. Only
`consumer` imports it.
"""

from smq.clients.arguments import check_place
from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient
from smq.clients.errors import build, error_from_detail
from smq.clients.fetch_planner import FetchSettings
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import ISOLATIONS, ConsumerRecord, FetchedRange, RawBatch, TopicPartition
from smq.records import decode_batch


async def fetch_range(
    cluster: ClusterClient,
    settings: FetchSettings,
    place: TopicPartition,
    offset: int,
    *,
    bytes_max: int,
    max_wait_ms: int,
    timeout_ms: float,
) -> FetchedRange:
    topic, partition = place
    check_place(topic, partition)
    item = build(pb.FetchPartition, topic=topic, partition=partition, offset=offset, max_bytes=bytes_max)
    request = build(
        pb.FetchRequest,
        partitions=[item],
        max_wait_ms=max_wait_ms,
        max_bytes=settings.response_bytes_max,
        isolation=ISOLATIONS[settings.isolation],
    )

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.FetchedPartition:
        answer = (await node.broker.Fetch(request, timeout=call_s + max_wait_ms / 1000.0)).partitions[0]
        if answer.HasField("error"):
            raise error_from_detail(answer.error)
        return answer

    part = await cluster.call_replica(run, topic, partition, only_node=settings.only_node, timeout_ms=timeout_ms)
    batches = tuple(RawBatch(topic, partition, b.base_offset, b.last_offset, b.ts_ns, b.data) for b in part.batches)
    return FetchedRange(log_start=part.log_start, hwm=part.hwm, lso=part.lso, batches=batches)


def records_of(batch: RawBatch, lo: int, hi: int) -> list[ConsumerRecord]:
    """Those with offsets in [lo, hi). Raises BatchCorrupt."""
    topic, partition, ts_ns_of_0 = batch.topic, batch.partition, batch.ts_ns - batch.base_offset
    return [
        ConsumerRecord(topic, partition, r.offset, ts_ns_of_0 + r.offset, r.timestamp_ms, r.key, r.value, r.headers)
        for r in decode_batch(batch.data)
        if lo <= r.offset < hi
    ]
