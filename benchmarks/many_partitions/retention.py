"""Long passes of a node's event loop while retention examines 10,000 partitions, and then deletes from all of them.

Owns the figures of retention. The nodes run under `stretches`, as for `passes`.
"""

import time

import confluent_kafka

from benchmarks.many_partitions.passes import Phases, Watched, recorded_cluster
from benchmarks.many_partitions.snapshot import PARTITIONS, TOPICS
from benchmarks.report import Report
from smq.clients import SyncAdmin
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

RECORDS = 4  # in each partition, each a batch of its own
KEPT = 1
IDLE_S = 10.0
FLUSH_S = 300.0
EXAMINED_S = 30.0
LOOK_S = 1.0  # each look describes all partitions
PATIENCE_S = 600.0


def measure(plain: Cluster, report: Report, *, quick: bool) -> None:
    """Measures in its own cluster; `plain` is stopped."""
    topics = [f"t{n}" for n in range(1 if quick else TOPICS)]
    with recorded_cluster(plain) as cluster, SyncAdmin(cluster.servers) as admin:
        for topic in topics:
            admin.create_topic(topic, PARTITIONS)
        _fill(cluster, topics)
        phases = Phases(cluster, report)
        count = f"{len(topics) * PARTITIONS:,} partitions"
        phases.run(f"{count} without limits", lambda: time.sleep(IDLE_S))
        day = {"retention.ms": str(86_400_000)}
        phases.run(f"{count} get a limit of a day, all are examined", lambda: _alter(admin, topics, day), EXAMINED_S)
        examined = {"retention.records": str(RECORDS), "retention.bytes": str(1 << 30)}
        phases.run(f"{count} are examined every second", lambda: _alter(admin, topics, examined), EXAMINED_S)
        took = list[float]()
        phases.run(f"{count} delete", lambda: took.append(_delete(cluster, admin, topics)))
        report.add(f"until {count} have deleted", f"{took[0]:.1f} s", seconds=took[0])
        phases.report_causes()


def _alter(admin: SyncAdmin, topics: list[str], config: dict[str, str]) -> None:
    for topic in topics:
        admin.alter_topic(topic, set=config)


def _fill(cluster: Watched, topics: list[str]) -> None:
    servers = ",".join(node.kafka for node in cluster.alive())
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "linger.ms": 5})
    for _ in range(RECORDS):
        for topic in topics:
            for partition in range(PARTITIONS):
                producer.produce(topic, b"v" * 100, partition=partition)
                producer.poll(0)
        if producer.flush(FLUSH_S):
            raise RuntimeError("not all records were acknowledged")


def _delete(cluster: Watched, admin: SyncAdmin, topics: list[str]) -> float:
    """Returns the seconds until all log starts have moved."""
    began = time.monotonic()
    _alter(admin, topics, {"retention.records": str(KEPT)})
    node = next(iter(cluster.nodes.values())).raw

    def is_deleted() -> bool:
        time.sleep(LOOK_S)
        described = node.describe(*topics).topics
        return all(part.log_start == RECORDS - KEPT for topic in described for part in topic.partitions)

    wait_for("all partitions have deleted", is_deleted, PATIENCE_S)
    return time.monotonic() - began
