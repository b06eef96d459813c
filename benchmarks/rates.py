"""Publish and consume rates of one partition and of six, with smq's own clients in one process.

Owns the rate figures: records of 100 bytes, acks=all, idempotent, uncompressed. The clients share the machine's cores
with the three nodes, so a rate here is that of the whole system, not of the server alone.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from benchmarks.report import Report
from smq.clients.consumer import Consumer
from smq.clients.producer import Producer
from smq.testing.cluster import Cluster

VALUE_BYTES = 100
CHUNK = 10_000  # records handed to the producer in one call


def measure(cluster: Cluster, report: Report, *, records: int) -> None:
    """Publishes records and consumes each of them, raw and decoded."""
    with asyncio.Runner() as runner:  # one loop for all: grpc.aio keeps a poller that outlives its first loop
        for partitions in (1, 6):
            _measure(runner, cluster, report, partitions, records)


def _measure(runner: asyncio.Runner, cluster: Cluster, report: Report, partitions: int, records: int) -> None:
    topic = cluster.make_topic(partitions)
    bootstrap = [node.grpc for node in cluster.alive()]
    label = f"{partitions} partition{'s' if partitions > 1 else ''}"
    _report(runner, report, f"publish, {label}", records, partial(_publish, bootstrap, topic, records))
    ends = {p: cluster.nodes[1].raw.range_info(topic, p).hwm for p in range(partitions)}
    assert sum(ends.values()) == records
    _report(runner, report, f"consume raw batches, {label}", records, partial(_raw, bootstrap, topic, ends))
    _report(runner, report, f"consume decoded records, {label}", records, partial(_records, bootstrap, topic, ends))


def _report(
    runner: asyncio.Runner, report: Report, what: str, records: int, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    began = time.perf_counter()
    runner.run(work())
    rate = records / (time.perf_counter() - began)
    report.add(what, f"{rate:,.0f} records/s, {rate * VALUE_BYTES / 1e6:.1f} MB/s", records_per_s=rate, records=records)


async def _publish(bootstrap: list[str], topic: str, records: int) -> None:
    values = [b"v" * VALUE_BYTES] * CHUNK
    async with Producer(bootstrap) as producer:
        waiting = [
            await producer.send_many(topic, values[: min(CHUNK, records - at)]) for at in range(0, records, CHUNK)
        ]
        await producer.flush()
        await asyncio.gather(*waiting)


async def _raw(bootstrap: list[str], topic: str, ends: dict[int, int]) -> None:
    left = dict(ends)
    async with Consumer(bootstrap) as consumer:
        await consumer.assign([(topic, partition) for partition in ends])
        while any(left.values()):
            batch = await consumer.getbatch(timeout_ms=10_000)
            if batch is None:
                raise RuntimeError(f"no batch for 10 s; left to read: {left}")
            left[batch.partition] -= batch.last_offset - batch.base_offset + 1


async def _records(bootstrap: list[str], topic: str, ends: dict[int, int]) -> None:
    left = sum(ends.values())
    async with Consumer(bootstrap) as consumer:
        await consumer.assign([(topic, partition) for partition in ends])
        while left:
            taken = await consumer.getmany(timeout_ms=10_000)
            if not taken:
                raise RuntimeError(f"no record for 10 s; left to read: {left}")
            left -= sum(len(records) for records in taken.values())
