"""Long passes of a node's event loop, at 10,000 partitions and 1,000 groups, through all kinds of events.

Owns the phases. The nodes run under `stretches`, which records how much of each long pass was CPU time of the loop
itself. On a machine with fewer cores than busy processes, nothing else shows what the node itself causes. Kafka
requests come from librdkafka.
"""

import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # it is documented

from benchmarks.many_partitions import stretches
from benchmarks.many_partitions.snapshot import (
    COMMITS,
    GROUPS,
    PARTITIONS,
    REPLIES,
    SETTLE_S,
    SNAPSHOT_ENTRIES,
    TOPICS,
    commit,
)
from benchmarks.many_partitions.stretches import LONG_NS, Stretch
from benchmarks.report import Report
from smq.clients import SyncAdmin, SyncProducer
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

AIM_MS = 50.0
KAFKA_GROUPS = 300
TRANSACTIONAL_ID = "passes"
ELECTIONS_S = 6.0  # elections after the death of a node are over by then
REBALANCED_S = 20.0  # leaderships come back some dozens at a time
TIMEOUT_S = 60.0


@dataclass
class Watched(Cluster):
    """Nodes that record their passes."""

    serve: tuple[str, ...] = stretches.COMMAND

    def environment(self, node: int) -> dict[str, str]:
        return {stretches.FILE: str(self.root / f"passes-{node}")}

    def passes(self) -> dict[int, list[Stretch]]:
        return {node: stretches.read(self.root / f"passes-{node}") for node in self.nodes}


class Phases:
    """What the passes since the last phase were like, phase by phase."""

    def __init__(self, cluster: Watched, report: Report) -> None:
        self._cluster = cluster
        self._report = report
        self._seen = {node: len(passes) for node, passes in cluster.passes().items()}
        self.all: list[Stretch] = []

    def run(self, what: str, work: Callable[[], object], settle_s: float = SETTLE_S) -> None:
        work()
        time.sleep(settle_s)
        new = list[Stretch]()
        for node, passes in self._cluster.passes().items():
            new += islice(passes, self._seen[node], None)
            self._seen[node] = len(passes)
        self.all += new
        worst = max(new, key=lambda p: p.cpu_ms, default=None)
        if worst is None:
            self._report.add(what, f"no pass of {LONG_NS / 1e6:.0f} ms", cpu_max_ms=0.0)
            return
        above = sum(p.cpu_ms > AIM_MS for p in new)
        parts = ", ".join(f"{name} {ms:.0f}" for name, ms in worst.parts[:3])
        text = f"{worst.cpu_ms:.0f} ms of CPU at most, {above} above {AIM_MS:.0f} ms ({parts})"
        self._report.add(what, text, cpu_max_ms=worst.cpu_ms, above=above)

    def report_causes(self) -> None:
        """Splits the passes above the aim by cause."""
        long = [p for p in self.all if p.wall_ms > AIM_MS]
        wall = sum(p.wall_ms for p in long) or 1.0
        shares = {
            "CPU of the loop": sum(p.cpu_ms for p in long) / wall,
            "no core was free": sum(p.no_core_ms for p in long) / wall,
            "waiting (lock, page, disk)": sum(p.waited_ms for p in long) / wall,
        }
        text = ", ".join(f"{what} {share:.0%}" for what, share in shares.items())
        worst = max((p.waited_ms for p in self.all), default=0.0)
        self._report.add(
            f"{len(long)} passes took above {AIM_MS:.0f} ms by the clock",
            f"{text}; the longest wait {worst:.0f} ms",
            passes=len(long),
            waited_max_ms=worst,
            **{f"share_{n}": share for n, share in enumerate(shares.values())},
        )


def measure(plain: Cluster, report: Report, *, quick: bool) -> None:
    """Measures in its own cluster; `plain` is stopped."""
    topics = 1 if quick else TOPICS
    groups, replies = (GROUPS // 10, REPLIES // 10) if quick else (GROUPS, REPLIES)
    with recorded_cluster(plain) as cluster, SyncAdmin(cluster.servers) as admin:
        _measure(cluster, admin, Phases(cluster, report), topics, groups, replies)


@contextmanager
def recorded_cluster(plain: Cluster) -> Iterator[Watched]:
    """A cluster of its own beside `plain`, which is stopped."""
    plain.stop()
    cluster = Watched(plain.root / "watched")
    try:
        cluster.start()
        for node in cluster.nodes:  # started by `smq cluster`; restarted one by one with recording
            cluster.kill(node)
            cluster.restart(node)
        yield cluster
    finally:
        cluster.stop()


def _measure(cluster: Watched, admin: SyncAdmin, phases: Phases, topics: int, groups: int, replies: int) -> None:
    run = phases.run
    run(f"creating {topics * PARTITIONS:,} partitions", lambda: _create(admin, topics))
    run(f"{groups:,} commits of {COMMITS} offsets each", lambda: commit(admin, groups, each=COMMITS, groups=groups))
    run(f"{replies:,} commits, with snapshots", lambda: commit(admin, replies, each=1, groups=groups))
    run("the digest, on each node", lambda: [node.raw.status(with_digest=True) for node in cluster.alive()])
    run("a scrape of /metrics, on each node", lambda: [len(scrape(node.http)) for node in cluster.alive()])
    _transact(cluster)
    run("the console's pages, on each node", lambda: [_browse(node.http) for node in cluster.alive()])
    run("DescribeCluster and NodeStatus", lambda: (admin.describe_cluster(), [n.raw.status() for n in cluster.alive()]))
    run("ListGroups and DescribeGroup", lambda: (admin.list_groups(), admin.describe_group("g0")))
    _measure_kafka(cluster, run, topics)
    _measure_faults(cluster, admin, run)
    run(f"deleting {topics * PARTITIONS:,} partitions", lambda: _delete(admin, topics))
    phases.report_causes()


def _create(admin: SyncAdmin, topics: int) -> None:
    for topic in range(topics):
        admin.create_topic(f"t{topic}", PARTITIONS)


def _delete(admin: SyncAdmin, topics: int) -> None:
    for topic in range(topics):
        admin.delete_topic(f"t{topic}")


def scrape(http: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://{http}/metrics") as answer:
        return str(answer.read().decode())


def _transact(cluster: Watched) -> None:
    """So that there is a transactional id to show."""
    with SyncProducer(cluster.servers, transactional_id=TRANSACTIONAL_ID) as producer, producer.transaction():
        producer.send("t0", b"v", partition=0)


def _browse(http: str) -> int:
    """Every kind of page of the console, at this node."""
    open_page = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    topics = ("topics", "topics/t0", "topics/t0/messages")
    transactions = ("transactions", f"transactions/{TRANSACTIONAL_ID}")
    pages = ("", *topics, "groups", "groups/g0", *transactions, "settings", "events")
    return sum(len(open_page(f"http://{http}/console/{page}").read()) for page in pages)


def _measure_kafka(cluster: Watched, run: Callable[..., None], topics: int) -> None:
    client = AdminClient({"bootstrap.servers": next(iter(cluster.nodes.values())).kafka})
    names = [f"k{n}" for n in range(KAFKA_GROUPS)]
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call] # confluent_kafka has few types
    ends = {confluent_kafka.TopicPartition(f"t{t}", p): latest for t in range(topics) for p in range(PARTITIONS)}
    run(f"Kafka: {KAFKA_GROUPS} groups commit {COMMITS} offsets each", lambda: _kafka_commits(cluster, names))
    run("Kafka: metadata of all topics", lambda: client.list_topics(timeout=TIMEOUT_S))
    run("Kafka: ListGroups", lambda: client.list_consumer_groups().result(TIMEOUT_S))
    run("Kafka: DescribeGroups", lambda: _results(client.describe_consumer_groups(names)))
    run("Kafka: ListOffsets of all partitions", lambda: _results(client.list_offsets(ends)))


def _results(futures: dict[Any, Any]) -> list[Any]:
    return [future.result(TIMEOUT_S) for future in futures.values()]


def _kafka_commits(cluster: Watched, groups: list[str]) -> None:
    server = next(iter(cluster.nodes.values())).kafka
    offsets = [confluent_kafka.TopicPartition("t0", p, 0) for p in range(COMMITS)]

    def of(group: str) -> None:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": server, "group.id": group})
        consumer.commit(offsets=offsets, asynchronous=False)
        consumer.close()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(of, groups))


def _measure_faults(cluster: Watched, admin: SyncAdmin, run: Callable[..., None]) -> None:
    victim = min(node for node in cluster.nodes if node != cluster.raft_leader())
    run("a node dies: elections", lambda: cluster.kill(victim), ELECTIONS_S)
    run("it starts, and gets its leaderships back", lambda: cluster.restart(victim), REBALANCED_S)
    leader = cluster.raft_leader()
    run("the Raft leader dies: elections", lambda: cluster.kill(leader), ELECTIONS_S)
    run("it starts, and gets its leaderships back", lambda: cluster.restart(leader), REBALANCED_S)
    run("a node takes a snapshot over", lambda: _install(cluster, admin))
    run("a node ends on SIGTERM", lambda: cluster.terminate(victim))
    run("it starts, and gets its leaderships back", lambda: cluster.restart(victim), REBALANCED_S)


def _install(cluster: Watched, admin: SyncAdmin) -> None:
    """A node is frozen until the others' journals no longer hold the entries that it lacks; it gets a snapshot."""
    away = min(node for node in cluster.nodes if node != cluster.raft_leader())
    cluster.signal(away, signal.SIGSTOP)
    commit(admin, SNAPSHOT_ENTRIES + 2_000, each=1, groups=10)
    target = max(node.raw.status().applied_index for node in cluster.alive() if node.id != away)
    cluster.signal(away, signal.SIGCONT)
    wait_for("the node caught up", lambda: cluster.nodes[away].raw.status().applied_index >= target, 120)
