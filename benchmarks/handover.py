"""The time that producers wait when a node is stopped gracefully, compared with a kill.

Owns the hand-over figures: the longest pause between two acknowledgements of any partition, while our own idempotent
producer sends record after record, from the signal until another node has acknowledged in every partition; and the
longest pause during a rolling restart of all nodes, including the return of leaderships.
"""

import asyncio
import itertools
import signal
import statistics
import threading
import time
from concurrent.futures import Future

from benchmarks import loop
from benchmarks.report import Report
from smq.clients import Producer
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

PARTITIONS = 6  # two led by each node
SETTLE_S = 1.5  # after a signal, pauses count for this long; the longest failover measured took 1.1 s
BALANCED_S = 60.0  # until leaderships have come back to a healthy node


class Senders:
    """One sender per partition. Each waits for its acknowledgement before it sends the next record."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._bootstrap = ",".join(node.grpc for node in cluster.alive())
        self._topic = topic
        self.acks: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self._stopping = threading.Event()
        self._work: Future[None] | None = None

    def __enter__(self) -> "Senders":
        self._work = loop.start(self._run())
        wait_for("the first acknowledgements", lambda: all(len(acks) > 20 for acks in self.acks))
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._work is not None:
            self._work.result(60)

    async def _run(self) -> None:
        async with Producer(self._bootstrap, linger_ms=0) as producer:
            await asyncio.gather(*(self._send(producer, partition) for partition in range(PARTITIONS)))

    async def _send(self, producer: Producer, partition: int) -> None:
        while not self._stopping.is_set():
            await producer.send(self._topic, b"x" * 100, partition=partition)
            self.acks[partition].append(time.monotonic())

    def longest_pause_ms(self, since: float, partitions: list[int]) -> float:
        """The longest time between two acknowledgements of one partition, the second of them after `since`."""
        longest = 0.0
        for partition in partitions:
            acks = self.acks[partition]
            pauses = [b - max(a, since) for a, b in itertools.pairwise(acks) if b > since]
            longest = max([longest, *pauses])
        return longest * 1000


def measure(cluster: Cluster, report: Report, *, rounds: int) -> None:
    """Stops every node in turn, so that each kind of stop also hits the Raft leader."""
    topic = cluster.make_topic(PARTITIONS)
    with Senders(cluster, topic) as senders:
        taken = {how: _stops(cluster, senders, topic, how, rounds) for how in (signal.SIGTERM, signal.SIGKILL)}
        rolling = _rolling_restart(cluster, senders)
    for how, what in ((signal.SIGTERM, "stopped (SIGTERM)"), (signal.SIGKILL, "killed (SIGKILL)")):
        _add(report, f"longest pause of a partition, its leader {what}, {rounds} times", taken[how])
    report.add("longest pause of any partition in a rolling restart", f"{rolling:.0f} ms", max_ms=rolling)


def _add(report: Report, what: str, taken: list[float]) -> None:
    smallest, middle, largest = min(taken), statistics.median(taken), max(taken)
    report.add(
        what,
        f"min {smallest:.0f} ms, median {middle:.0f} ms, max {largest:.0f} ms",
        min_ms=smallest,
        median_ms=middle,
        max_ms=largest,
        all_ms=[round(ms, 1) for ms in taken],
    )


def _stops(cluster: Cluster, senders: Senders, topic: str, how: signal.Signals, rounds: int) -> list[float]:
    taken = []
    for number in range(rounds):
        victim = 1 + number % cluster.size
        _wait_leads(cluster, topic, victim)
        led = [p for p in range(PARTITIONS) if cluster.wait_leader(topic, p) == victim]
        since = time.monotonic()
        _stop(cluster, victim, how)
        time.sleep(max(0.0, since + SETTLE_S - time.monotonic()))
        taken.append(senders.longest_pause_ms(since, led))
        cluster.restart(victim)
    return taken


def _stop(cluster: Cluster, node: int, how: signal.Signals) -> None:
    cluster.signal(node, how)
    cluster.wait_dead(node)


def _wait_leads(cluster: Cluster, topic: str, node: int) -> None:
    def leads() -> bool:
        return any(cluster.wait_leader(topic, partition) == node for partition in range(PARTITIONS))

    wait_for(f"the return of leaderships to node {node}", leads, BALANCED_S)


def _rolling_restart(cluster: Cluster, senders: Senders) -> float:
    """The longest pause in ms. Nodes restart as docs/operations.md says: each is ready again before the next stops."""
    since = time.monotonic()
    for node in sorted(cluster.nodes):
        _stop(cluster, node, signal.SIGTERM)
        cluster.restart(node)
        time.sleep(SETTLE_S)
    time.sleep(2 * SETTLE_S)
    return senders.longest_pause_ms(since, list(range(PARTITIONS)))
