"""Produce and consume rates of the Kafka port with librdkafka, and their cost to the nodes.

Owns the Kafka figures: records of 100 bytes and of 1 KB, acks=all, idempotent, uncompressed, three partitions, on three
nodes and on one. librdkafka runs in this process, on the same cores as the nodes. Beside each rate stands the CPU time
of all nodes, from /proc. Consuming is measured with librdkafka's default pause and then with a short one: compare the
two by their ratio within one run.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka

from benchmarks.report import Report, percentile
from smq.testing.cluster import Cluster

PARTITIONS = 3
CHUNK = 1_000  # records handed to librdkafka in one call
QUEUED_MAX = 200_000  # records that wait in librdkafka
VALUES = {"100 B": 100, "1 KB": 1_000}
TIMEOUT_S = 60.0
# When the queue between its fetcher and the program is full, librdkafka fetches nothing for 1,000 ms by default.
WITHOUT_PAUSES = {"fetch.queue.backoff.ms": 2}
CONSUMERS: dict[str, dict[str, int]] = {"": {}, ", fetch.queue.backoff.ms=2": WITHOUT_PAUSES}
_TICKS_S = os.sysconf("SC_CLK_TCK")


def measure(cluster: Cluster, report: Report, *, records: int, singles: int) -> None:
    """Sends `records` of 100 bytes, a third as many of 1 KB, and `singles` one at a time. The cluster is stopped before
    the single node starts, so that it takes no CPU time from it."""
    _measure(cluster, report, records, singles)
    cluster.stop()
    alone = Cluster(cluster.root / "one", 1)
    try:
        _measure(alone.start(), report, records, singles)
    finally:
        alone.stop()


def _measure(cluster: Cluster, report: Report, records: int, singles: int) -> None:
    for name, size in VALUES.items():
        _measure_size(cluster, report, name, size, records if size <= 100 else records // 3, singles)


def _measure_size(cluster: Cluster, report: Report, name: str, size: int, count: int, singles: int) -> None:
    topic = cluster.make_topic(PARTITIONS)
    label = f"{name}, {len(cluster.nodes)} node{'s' if len(cluster.nodes) > 1 else ''}"
    _rate(cluster, report, f"produce {label}", count, size, lambda: produce(bootstrap_of(cluster), topic, count, size))
    for suffix, settings in CONSUMERS.items():
        work = partial(consume, bootstrap_of(cluster), topic, count, settings)
        _rate(cluster, report, f"consume {label}{suffix}", count, size, work)
    taken = one_at_a_time(cluster, topic, singles, size)
    p50, p99 = percentile(taken, 50), percentile(taken, 99)
    text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    report.add(f"produce {label}, one at a time", text, p50_ms=p50, p99_ms=p99, count=singles)


def _rate(cluster: Cluster, report: Report, what: str, count: int, size: int, work: Callable[[], list[float]]) -> None:
    cpu, began = nodes_cpu_s(cluster), time.perf_counter()
    latencies = work()
    taken = time.perf_counter() - began
    share = (nodes_cpu_s(cluster) - cpu) / taken
    numbers: dict[str, Any] = {"records_per_s": count / taken, "records": count, "node_cores": share}
    text = f"{count / taken:,.0f} records/s, {count * size / taken / 1e6:.1f} MB/s, nodes {100 * share:.0f} % of a core"
    if latencies:
        numbers["p99_ms"] = percentile(latencies, 99)
        text += f", p99 {numbers['p99_ms']:.0f} ms"
    report.add(what, text, **numbers)


def nodes_cpu_s(cluster: Cluster) -> float:
    """CPU seconds of all nodes so far: fields 14 and 15 of stat, after the name in brackets."""
    ticks = 0
    for node in cluster.alive():
        fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_S


def bootstrap_of(cluster: Cluster) -> str:
    return ",".join(node.kafka for node in cluster.alive())


def _producer(bootstrap: str, linger_ms: float) -> confluent_kafka.Producer:
    return confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": linger_ms,
            "batch.size": 500_000,
            "queue.buffering.max.messages": QUEUED_MAX,
        }
    )


def produce(bootstrap: str, topic: str, count: int, size: int, linger_ms: float = 5) -> list[float]:
    """Produces as fast as the queue drains. Milliseconds until the last record of each chunk is acknowledged."""
    producer, taken, failed = _producer(bootstrap, linger_ms), list[float](), list[str]()

    def on_delivery(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            failed.append(str(error))
        else:
            taken.append((message.latency() or 0.0) * 1_000)

    value = b"v" * size
    for at in range(0, count, CHUNK):
        partition = at // CHUNK % PARTITIONS
        chunk = [{"value": value} for _ in range(min(CHUNK, count - at))]
        chunk[-1]["callback"] = on_delivery  # type: ignore[assignment] # a dict of values, and of this
        while True:
            producer.produce_batch(topic, chunk, partition=partition)
            chunk = [message for message in chunk if "_error" in message]
            if not chunk:
                break
            for message in chunk:
                del message["_error"]
            while len(producer) > QUEUED_MAX // 2:  # it was full; trying again immediately would take a core
                producer.poll(0.01)
        producer.poll(0)
    if producer.flush(TIMEOUT_S) or failed:
        raise RuntimeError(f"not all records were acknowledged: {failed[:3]}")
    return taken


def consume(bootstrap: str, topic: str, count: int, settings: dict[str, int]) -> list[float]:
    """Reads `count` records of PARTITIONS partitions from the beginning on. No latencies: an empty list."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, **settings}
    )
    consumer.assign(
        [confluent_kafka.TopicPartition(topic, p, confluent_kafka.OFFSET_BEGINNING) for p in range(PARTITIONS)]
    )
    left = count
    while left:
        found = consumer.consume(10_000, TIMEOUT_S)
        if not found or found[0].error():
            raise RuntimeError(f"{left} records are missing: {found[0].error() if found else 'nothing came'}")
        left -= len(found)
    consumer.close()
    return []


def one_at_a_time(cluster: Cluster, topic: str, count: int, size: int) -> list[float]:
    """Milliseconds from produce to acknowledgement, one record at a time."""
    producer, value, taken = _producer(bootstrap_of(cluster), 0), b"v" * size, list[float]()

    def on_delivery(error: confluent_kafka.KafkaError | None, _message: confluent_kafka.Message) -> None:
        if error is not None:
            raise RuntimeError(str(error))

    for i in range(count + count // 10):
        began = time.perf_counter()
        producer.produce(topic, value, partition=0, on_delivery=on_delivery)
        if producer.flush(TIMEOUT_S):
            raise RuntimeError("a record was not acknowledged")
        if i >= count // 10:  # the first tenth pays for connections and imports
            taken.append((time.perf_counter() - began) * 1_000)
    return taken
