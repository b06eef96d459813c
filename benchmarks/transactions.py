"""Transactions of librdkafka over the Kafka port: how many per second, how long a commit takes, and what they add.

Owns these figures, for one record of 100 bytes to each of 1, 10 and 100 partitions of three nodes. The same records
without a transaction take turns with it on the same cluster, so compare the two by their ratio within one run.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import confluent_kafka

from benchmarks.kafka import TIMEOUT_S, bootstrap_of
from benchmarks.report import Report, percentile
from smq.testing.cluster import Cluster

PARTITIONS: Final = (1, 10, 100)
MANY: Final = 100  # partitions: a transaction takes so long that a quarter of them must do
PRODUCERS: Final = 10  # at the same time, for the rate
TURN: Final = 10  # transactions before the other way has its turn
VALUE: Final = b"v" * 100


@dataclass(slots=True)
class _Taken:
    """Milliseconds of each."""

    transaction: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)  # after all records were acknowledged
    plain: list[float] = field(default_factory=list)  # the same records without a transaction


def measure(cluster: Cluster, report: Report, *, count: int) -> None:
    """`count` transactions at each number of partitions, by one producer and then by several."""
    for partitions in PARTITIONS:
        topic = cluster.make_topic(partitions)
        label = f"{partitions} partition{'s' if partitions > 1 else ''}"
        transactions = count if partitions < MANY else count // 4
        _report(report, label, _in_turns(cluster, topic, partitions, transactions))
        rate = _together(cluster, topic, partitions, transactions)
        text = f"{rate:,.0f} transactions/s, {rate * partitions:,.0f} records/s"
        report.add(f"transactions, {label}, {PRODUCERS} producers", text, transactions_per_s=rate)


def _report(report: Report, label: str, taken: _Taken) -> None:
    lines = {
        f"transaction, {label}, one producer": taken.transaction,
        f"its commit, {label}": taken.commit,
        f"the same records without one, {label}": taken.plain,
    }
    for what, ms in lines.items():
        p50, p99 = percentile(ms, 50), percentile(ms, 99)
        text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, {1_000 * len(ms) / sum(ms):,.0f} per second"
        report.add(what, text, p50_ms=p50, p99_ms=p99, per_s=1_000 * len(ms) / sum(ms), count=len(ms))
    ratio = percentile(taken.transaction, 50) / percentile(taken.plain, 50)
    report.add(f"with a transaction to without, {label}, p50", f"ratio {ratio:.2f}", ratio=ratio)


def _in_turns(cluster: Cluster, topic: str, partitions: int, count: int) -> _Taken:
    """The first turn of each way warms up."""
    transactional, plain = _producer(cluster, f"bench-{topic}"), _producer(cluster)
    taken = _Taken()
    for turn in range(1 + count // TURN):
        now = _Taken()
        for _ in range(TURN):
            whole, commit = _transact(transactional, topic, partitions)
            now.transaction.append(whole)
            now.commit.append(commit)
        for _ in range(TURN):
            began = time.perf_counter()
            _send(plain, topic, partitions)
            now.plain.append((time.perf_counter() - began) * 1_000)
        if turn:
            taken.transaction += now.transaction
            taken.commit += now.commit
            taken.plain += now.plain
    return taken


def _together(cluster: Cluster, topic: str, partitions: int, count: int) -> float:
    """Transactions per second of all producers together."""
    producers = [_producer(cluster, f"bench-{topic}-{n}") for n in range(PRODUCERS)]
    each = max(1, count // PRODUCERS)

    def run(producer: confluent_kafka.Producer, transactions: int) -> None:
        for _ in range(transactions):
            _transact(producer, topic, partitions)

    with ThreadPoolExecutor(PRODUCERS) as pool:
        list(pool.map(run, producers, [2] * PRODUCERS))  # connections and the first transactions
        began = time.perf_counter()
        list(pool.map(run, producers, [each] * PRODUCERS))
        return PRODUCERS * each / (time.perf_counter() - began)


def _producer(cluster: Cluster, transactional_id: str | None = None) -> confluent_kafka.Producer:
    settings = {"bootstrap.servers": bootstrap_of(cluster), "enable.idempotence": True, "linger.ms": 0}
    if transactional_id is None:
        return confluent_kafka.Producer(settings)
    producer = confluent_kafka.Producer(settings | {"transactional.id": transactional_id})
    producer.init_transactions(TIMEOUT_S)
    return producer


def _transact(producer: confluent_kafka.Producer, topic: str, partitions: int) -> tuple[float, float]:
    """Milliseconds of a whole transaction, and of its commit alone."""
    began = time.perf_counter()
    producer.begin_transaction()
    _send(producer, topic, partitions)
    sent = time.perf_counter()
    producer.commit_transaction(TIMEOUT_S)
    ended = time.perf_counter()
    return (ended - began) * 1_000, (ended - sent) * 1_000


def _send(producer: confluent_kafka.Producer, topic: str, partitions: int) -> None:
    """One record to each partition; returns when all are acknowledged."""
    failed: list[str] = []

    def on_delivery(error: confluent_kafka.KafkaError | None, _message: confluent_kafka.Message) -> None:
        if error is not None:
            failed.append(str(error))

    for partition in range(partitions):
        producer.produce(topic, VALUE, partition=partition, on_delivery=on_delivery)
    if producer.flush(TIMEOUT_S) or failed:
        raise RuntimeError(f"a record was not acknowledged: {failed[:1]}")
