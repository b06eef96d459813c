"""What a node counts while it works, as a scrape shows it; and the page that lists all metrics."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs.generate.metrics import names as names_of_page
from smq.clients import Consumer
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.coordinator.http.collectors import family_of
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.gateway import TURNS_PER_SAMPLE
from smq.coordinator.server.pauses import PROBE_S, HeapKeeper, LoopLag
from smq.records import NewRecord, encode_batch
from smq.replication.monitoring.measures import Counter, Histogram, ProcessMeasures, sized
from smq.replication.partition.producing import BATCHES_PER_SAMPLE
from smq.testing.kafka_client import RawKafka
from smq.testing.served import Served, publish_request, served_node
from tests.unit.coordinator.http.test_endpoints import get


def test_buckets_are_cumulative_and_durations_are_in_seconds() -> None:
    histogram = Histogram("smq_x_seconds", "Text.", "kind", bounds=(1_000_000, 2_500_000_000))
    for ns in (1_000_000, 2_000_000_000, 9_000_000_000):
        histogram.observe(ns, "a")
    samples = {(s.name, s.labels.get("le")): s.value for s in family_of(histogram).samples}
    assert samples == {
        ("smq_x_seconds_bucket", "0.001"): 1,
        ("smq_x_seconds_bucket", "2.5"): 2,
        ("smq_x_seconds_bucket", "+Inf"): 3,
        ("smq_x_seconds_count", None): 3,
        ("smq_x_seconds_sum", None): 11.001,
    }


def test_instruments_without_labels_show_zeros_before_the_first_event() -> None:
    """Otherwise the first event would be invisible to `rate`."""
    assert [s.value for s in family_of(Counter("smq_x", "Text.")).samples] == [0]
    assert {s.value for s in family_of(sized("smq_y", "Text.", bounds=(1,))).samples} == {0}


async def families(served: Served) -> dict[str, Metric]:
    status, text = await get(served, "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def reader(found: dict[str, Metric]) -> Callable[..., float]:
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in found.values() for s in family.samples}
    return lambda name, **labels: samples.get((name, frozenset(labels.items())), 0)


async def test_batches_are_counted_by_what_became_of_them_and_timed_by_stage(served: Served) -> None:
    await served.create()
    stored = 2 * BATCHES_PER_SAMPLE
    await served.fill([2, 3] + [1] * (stored - 2))  # two of them are timed
    bad = publish_request([b"v"])
    (refused,) = await served.publish(pb.PublishRecordRequest(topic="t", partition=0, batch=bad.batch[:-1] + b"x"))
    assert refused.error.name == "CORRUPT_BATCH"
    value = reader(await families(served))
    assert value("smq_produce_batches_total", result="stored") == stored
    assert value("smq_produce_batches_total", result="CORRUPT_BATCH") == 1
    assert value("smq_produce_records_total") == stored + 3
    assert value("smq_produce_bytes_total") == value("smq_partition_produced_bytes_total", topic="t", partition="0")
    assert value("smq_produce_bytes_total") > 100
    assert value("smq_produce_seconds_count", acks="all") == 2
    for stage in ("queue", "append"):
        assert value("smq_produce_stage_seconds_count", stage=stage) == 2, stage
    for stage in ("fsync", "replicate", "commit", "answer"):
        assert 1 <= value("smq_produce_stage_seconds_count", stage=stage) <= 2, stage


async def test_reads_are_counted_by_what_they_found(served: Served) -> None:
    await served.create()
    await served.fill([2, 3])
    for offset in (0, 5):
        wanted = pb.FetchPartition(topic="t", partition=0, offset=offset)
        await served.broker.Fetch(pb.FetchRequest(partitions=[wanted], max_wait_ms=20))
    value = reader(await families(served))
    assert value("smq_fetches_total", result="data") == 1
    assert value("smq_fetches_total", result="empty") >= 1
    assert value("smq_fetch_records_total") == 5
    assert value("smq_fetch_batches_total") == 2
    assert value("smq_fetch_bytes_total") == value("smq_partition_fetched_bytes_total", topic="t", partition="0")
    timed = [value("smq_fetch_seconds_count", waited=waited) for waited in ("yes", "no")]
    assert sum(timed) == value("smq_fetches_total", result="data") + value("smq_fetches_total", result="empty")
    assert all(timed)


async def test_writes_of_the_disk_raft_and_groups_are_counted(served: Served) -> None:
    await served.create()
    before = reader(await families(served))
    assert before("smq_raft_leader_changes_total") == 1
    offset = pb.PartitionOffset(topic="t", partition=0, offset=0)
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group="g", offsets=[offset]))
    after = reader(await families(served))
    assert after("smq_group_changes_total", command="CommitOffsets", result="done") == 1
    assert after("smq_group_change_seconds_count", command="CommitOffsets") == 1
    assert after("smq_group_committed_offset", group="g", topic="t", partition="0") == 0
    name = "smq_raft_proposals_total"
    assert after(name, result="committed") > before(name, result="committed") > 0
    assert after("smq_raft_commit_seconds_count") == after(name, result="committed")
    writes = "smq_disk_write_seconds_count"
    assert after(writes, to="log") > before(writes, to="log") > 0
    assert after("smq_disk_write_submissions_count") > 0


async def test_requests_of_kafka_clients_are_timed_by_api(tmp_path: Path) -> None:
    async with served_node(tmp_path, kafka_address=("127.0.0.1", 0)) as served:
        assert served.server.kafka_address is not None
        client = RawKafka(format_address(served.server.kafka_address))
        await asyncio.to_thread(client.call, ApiKey.API_VERSIONS, 0)
        client.close()
        value = reader(await families(served))
        assert value("smq_kafka_request_seconds_count", api="ApiVersions") == 1


async def test_of_produce_requests_those_of_one_turn_in_seven_are_timed(tmp_path: Path) -> None:
    async with served_node(tmp_path, kafka_address=("127.0.0.1", 0)) as served:
        await served.create()
        assert served.server.kafka_address is not None
        client = RawKafka(format_address(served.server.kafka_address))
        records = encode_batch([NewRecord(None, b"v", 1)])
        for _ in range(2 * TURNS_PER_SAMPLE):  # each waits for its answer, so each is read in a turn of its own
            await asyncio.to_thread(client.produce, "t", records)
        client.close()
        value = reader(await families(served))
        assert value("smq_kafka_request_seconds_count", api="Produce") == 2
        assert 0 < value("smq_kafka_request_seconds_sum", api="Produce") < 600


async def test_calls_over_grpc_are_timed_and_counted_by_method_and_result(served: Served) -> None:
    await served.create()
    for offset in (0, 7):
        wanted = pb.FetchPartition(topic="t", partition=0, offset=offset)
        await served.broker.Fetch(pb.FetchRequest(partitions=[wanted], max_wait_ms=0))
    with pytest.raises(grpc.aio.AioRpcError):
        await served.broker.CommitOffsets(pb.CommitOffsetsRequest())
    value = reader(await families(served))
    assert value("smq_grpc_requests_total", method="Fetch", result="ok") == 2
    assert value("smq_grpc_request_seconds_count", method="Fetch") == 2
    assert value("smq_grpc_requests_total", method="CommitOffsets", result="INVALID_REQUEST") == 1
    assert value("smq_grpc_requests_total", method="CreateTopic", result="ok") == 1
    assert value("smq_grpc_request_seconds_sum", method="Fetch") > 0


async def test_a_rebalance_is_counted_as_the_generation_that_it_forms(served: Served) -> None:
    await served.create()
    await served.fill([1])
    async with Consumer(format_address(served.server.grpc_address), group="g") as consumer:
        await consumer.subscribe("t")
        assert await consumer.getmany(1, timeout_ms=30_000)
        value = reader(await families(served))
        assert value("smq_group_changes_total", command="FormGeneration", result="done") == 1
        assert value("smq_group_change_seconds_count", command="FormGeneration") == 1


def test_a_pass_of_the_garbage_collector_is_timed_by_its_generation() -> None:
    pauses = ProcessMeasures().gc_pause
    keeper = HeapKeeper(pauses)
    keeper.start()
    try:
        before = pauses.series("2").count
        gc.collect()
        assert pauses.series("2").count == before + 1
        assert pauses.series("2").total > 0
    finally:
        keeper.stop()


def test_a_blocked_loop_is_seen() -> None:
    lag = Histogram("smq_loop_lag_seconds", "Text.")

    async def body() -> None:
        import time

        probe = LoopLag(lag)
        probe.start()
        time.sleep(PROBE_S + 0.3)  # noqa: ASYNC251 - a callback that blocks is what the probe is for
        while not lag.series().count:  # noqa: ASYNC110 - a number, not an event
            await asyncio.sleep(0.01)
        probe.stop()

    asyncio.run(body())
    assert lag.series().total >= 250_000_000


async def test_the_page_of_metrics_lists_exactly_what_a_node_serves(served: Served) -> None:
    listed = {name for name in names_of_page() if not name.startswith("smq_tls_")}

    found = await families(served)
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in found.values()}
    assert {name for name in names if name.startswith("smq_")} == listed
