"""Groups and transactions on a machine with far more to do than it has cores for: what is lost to load alone.

Owns these figures: new terms of Raft, fenced nodes, changes of groups that failed, proposals without an outcome, errors
of librdkafka's clients. No fault is injected, so each of them is one of smq. A group of three consumers reads 100,000
records per partition again and again and commits; one of them leaves and joins again; three producers carry records
from one topic to another in transactions with the offsets. CPU burners of the same priority keep the load up.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import confluent_kafka

from benchmarks.kafka import TIMEOUT_S, WITHOUT_PAUSES, bootstrap_of, produce
from benchmarks.many_partitions.passes import scrape
from benchmarks.report import Report
from smq.testing.cluster import Cluster

LOAD: Final = 30  # threads that want a core at any time, those of the nodes, of the clients and of others included
LOOK_S: Final = 2.0  # between two looks at that number: a burner is added or ended
PARTITIONS: Final = 6
CARRIERS: Final = 3  # producers of transactions
RECORDS: Final = 100_000  # per partition
SIZE: Final = 100  # bytes
READ: Final = 2_000  # records between two commits
CARRIED: Final = 200  # records of a transaction
STAYS_S: Final = 20  # a consumer that leaves and joins again
BURN: Final = "while True:\n pass"
LINES: Final = ("node fenced", "group_change_failed", "NO_QUORUM", "TIMED_OUT")


@dataclass(slots=True)
class _Work:
    """What the clients have done, and the errors that they met, by name."""

    cluster: Cluster
    topic: str
    until: float
    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def met(self, where: str, error: confluent_kafka.KafkaError) -> None:
        self.errors[f"{where}: {error.name()}"] += 1

    @contextmanager
    def noted(self, where: str) -> Iterator[None]:
        try:
            yield
        except confluent_kafka.KafkaException as e:
            self.met(where, e.args[0])

    def consumer(self, group: str) -> confluent_kafka.Consumer:
        settings = {
            "bootstrap.servers": bootstrap_of(self.cluster),
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            **WITHOUT_PAUSES,
            "error_cb": lambda error: self.met("connection", error),
        }
        consumer = confluent_kafka.Consumer(settings)
        consumer.subscribe([self.topic])
        return consumer

    def read(
        self, consumer: confluent_kafka.Consumer, count: int
    ) -> tuple[list[confluent_kafka.Message], list[confluent_kafka.TopicPartition]]:
        """Up to `count` records, and what is to be committed for them. A partition that has been read to its end begins
        again."""
        records, positions = [], []
        with self.noted("consume"):
            for record in consumer.consume(count, timeout=5):
                if (error := record.error()) is not None:
                    self.met("consume", error)
                else:
                    records.append(record)
        for partition, last in {record.partition() or 0: record.offset() or 0 for record in records}.items():
            position = confluent_kafka.TopicPartition(self.topic, partition, (last + 1) % RECORDS)
            positions.append(position)
            if not position.offset:
                with self.noted("seek"):
                    consumer.seek(position)
        self.done["records read"] += len(records)
        return records, positions


def measure(cluster: Cluster, report: Report, *, seconds: float) -> None:
    topic, copied = cluster.make_topic(PARTITIONS), cluster.make_topic(PARTITIONS)
    produce(bootstrap_of(cluster), topic, RECORDS * PARTITIONS, SIZE)
    before = _nodes(cluster)
    work = _Work(cluster, topic, time.monotonic() + seconds)
    clients: list[Callable[[], None]] = [
        lambda: _consume(work, seconds),
        lambda: _consume(work, seconds),
        lambda: _consume(work, STAYS_S),
        *(partial(_carry, work, copied, f"carrier-{n}") for n in range(CARRIERS)),
    ]
    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(client) for client in clients]
        load = _burn(work)
        for each in running:
            each.result()
    after = _nodes(cluster)
    _report(report, work, seconds, load, {name: after[name] - before[name] for name in after})


def _burn(work: _Work) -> float:
    """Keeps LOAD threads at work; returns how many there were on average."""
    burners: list[subprocess.Popen[bytes]] = []
    looks: list[int] = []
    try:
        while not work.is_over():
            looks.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
            wanted = len(burners) + LOAD - looks[-1] if len(looks) == 1 else len(burners) + (looks[-1] < LOAD) * 2 - 1
            while len(burners) < wanted:
                burners.append(subprocess.Popen([sys.executable, "-c", BURN]))
            while len(burners) > max(wanted, 0):
                _end(burners.pop())
            time.sleep(LOOK_S)
    finally:
        for burner in burners:
            _end(burner)
    return sum(looks[1:]) / max(1, len(looks) - 1)


def _end(burner: subprocess.Popen[bytes]) -> None:
    burner.kill()
    burner.wait()


def _consume(work: _Work, stays_s: float) -> None:
    while not work.is_over():
        consumer, until = work.consumer("readers"), time.monotonic() + stays_s
        while not work.is_over() and time.monotonic() < until:
            _, positions = work.read(consumer, READ)
            if positions:
                with work.noted("commit"):
                    consumer.commit(offsets=positions, asynchronous=False)
                    work.done["commits"] += 1
        with work.noted("close"):
            consumer.close()


def _carry(work: _Work, to: str, transactional_id: str) -> None:
    while not work.is_over():
        consumer = work.consumer("carriers")
        settings = {
            "bootstrap.servers": bootstrap_of(work.cluster),
            "transactional.id": transactional_id,
            "error_cb": lambda error: work.met("connection", error),
        }
        producer = confluent_kafka.Producer(settings)
        with work.noted("transaction"):
            producer.init_transactions(TIMEOUT_S)
            while not work.is_over():
                _transact(work, consumer, producer, to)
        with work.noted("close"):
            consumer.close()


def _transact(work: _Work, consumer: confluent_kafka.Consumer, producer: confluent_kafka.Producer, to: str) -> None:
    """An error that asks for it aborts the transaction. After any other a new producer begins."""
    records, positions = work.read(consumer, CARRIED)
    if not records:
        return
    try:
        producer.begin_transaction()
        for record in records:
            producer.produce(to, record.value(), partition=record.partition() or 0)
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), TIMEOUT_S)
        producer.commit_transaction(TIMEOUT_S)
        work.done["transactions"] += 1
    except confluent_kafka.KafkaException as e:
        if not e.args[0].txn_requires_abort():
            raise
        work.met("transaction, aborted", e.args[0])
        producer.abort_transaction(TIMEOUT_S)


def _nodes(cluster: Cluster) -> Counter[str]:
    """Terms, and what the nodes have logged and counted."""
    found: Counter[str] = Counter()
    for node in cluster.alive():
        samples = [line.rsplit(" ", 1) for line in scrape(node.http).splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, value in samples}
        found["terms"] = max(found["terms"], int(values["smq_raft_term"]))
        for code in ("NO_QUORUM", "TIMED_OUT"):
            found[f"proposals: {code}"] += int(values.get(f'smq_raft_proposals_total{{result="{code}"}}', 0))
        lag = 'smq_loop_lag_seconds_bucket{le="%s"}'
        found["loop later than 1 s"] += int(values[lag % "+Inf"] - values[lag % "1"])
        log = node.log.read_text(errors="replace")
        found |= Counter({f"lines: {line}": found[f"lines: {line}"] + log.count(line) for line in LINES})
    return found


def _report(report: Report, work: _Work, seconds: float, load: float, nodes: dict[str, int]) -> None:
    report.add("load", f"{load:.0f} for {seconds:.0f} s on {os.cpu_count()} cores", load=load, seconds=seconds)
    for name, count in (*nodes.items(), *work.done.items()):
        report.add(name, f"{count:,}", count=count)
    for name, count in work.errors.most_common():
        report.add(f"client error, {name}", f"{count:,}", count=count)
