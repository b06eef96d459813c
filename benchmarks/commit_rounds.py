"""One record at a time, with one round and with two: the latency of an acknowledgement, in turns on one cluster.

Owns these figures: librdkafka and a stream of PublishRecord, acks=all, 100 bytes, three nodes. The setting
`commit.rounds` changes between two turns, so that what else the machine does hits both.
"""

import time
from collections.abc import Callable
from typing import Final

import confluent_kafka

from benchmarks.latency import VALUE, Publisher
from benchmarks.report import Report, percentile
from smq.clients import SyncAdmin
from smq.testing.cluster import Cluster

TURN: Final = 50  # records of one way before the other has its turn
WARM_UP: Final = 20  # of each turn, not measured: the partition changes its mode meanwhile
CHANGE_S: Final = 0.5  # several times as long as a leader takes for that
ROUNDS: Final = ("1", "2")


def measure(cluster: Cluster, report: Report, *, count: int) -> None:
    """`count` records of each way, by each client."""
    topic = cluster.make_topic()
    leader = cluster.nodes[cluster.wait_leader(topic, 0)]
    publisher, producer = Publisher(leader.raw, topic), _Producer(leader.kafka, topic)
    clients: dict[str, Callable[[], None]] = {"librdkafka": producer.send, "gRPC, one stream": publisher.publish}
    taken: dict[tuple[str, str], list[float]] = {}
    with SyncAdmin(leader.raw.address) as admin:
        for _ in range(count // TURN):
            for rounds in ROUNDS:
                admin.alter_cluster_config(set={"commit.rounds": rounds})
                time.sleep(CHANGE_S)
                for name, send in clients.items():
                    taken.setdefault((name, rounds), []).extend(_turn(send))
        admin.alter_cluster_config(unset=["commit.rounds"])
    publisher.close()
    for (name, rounds), ms in sorted(taken.items()):
        p50, p99 = percentile(ms, 50), percentile(ms, 99)
        text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        report.add(f"commit.rounds={rounds}, 100 B, one at a time, {name}", text, p50_ms=p50, p99_ms=p99, count=len(ms))


def _turn(send: Callable[[], None]) -> list[float]:
    """Milliseconds of each record."""
    for _ in range(WARM_UP):
        send()
    taken = []
    for _ in range(TURN):
        began = time.perf_counter()
        send()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


class _Producer:
    """librdkafka, with one record in flight."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 0}
        )

    def send(self) -> None:
        answers: list[confluent_kafka.KafkaError | None] = []
        self._producer.produce(self._topic, VALUE, partition=0, on_delivery=lambda error, _: answers.append(error))
        while not answers:
            self._producer.poll(1)
        if answers[0] is not None:
            raise RuntimeError(f"a record was not acknowledged: {answers[0]}")
