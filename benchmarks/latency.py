"""The latency of one synchronous acks=all publish of 100 bytes at a time, and its lower bound.

Owns the latency figures: the whole publish, and the parts that no design can avoid on this machine (a gRPC round trip
through Python, an fsync).
"""

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Report, percentile
from smq.clients import SyncProducer
from smq.clients.pb import smq_pb2 as pb
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode, batch_of

VALUE = b"x" * 100
PAGE = b"\0" * 4096  # the least that LMDB writes
WARM_UP = 100  # calls that are not measured: imports, connections and the first pages


def measure(cluster: Cluster, report: Report, *, count: int) -> None:
    """Reports p50 and p99 of the publish, then of its parts."""
    topic = cluster.make_topic()
    leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
    publisher = Publisher(leader, topic)
    _report(report, "publish 100 B, acks=all, one at a time, one stream", _timed(publisher.publish, count))
    publisher.close()
    with SyncProducer(leader.address) as producer:
        taken = _timed(lambda: producer.send(topic, VALUE).result(), count)
    _report(report, "the same through the Python producer, as it is by default", taken)
    _report(report, "its parts: a gRPC round trip through Python", _timed(leader.status, count))
    _report(report, "its parts: 4 KiB written and fdatasync", _timed(_syncer(cluster.root / "sync"), count))


class Publisher:
    """One PublishRecord stream that stays open, as in a client."""

    def __init__(self, node: RawNode, topic: str) -> None:
        self._request = pb.PublishRecordRequest(partition=0, topic=topic, batch=batch_of([VALUE]), timeout_ms=10_000)
        self._requests: queue.SimpleQueue[pb.PublishRecordRequest | None] = queue.SimpleQueue()
        self._answers: Any = node.agent.PublishRecord(iter(self._requests.get, None))

    def publish(self) -> None:
        self._requests.put(self._request)
        answer: pb.PublishRecordResponse = next(self._answers)
        if answer.HasField("error"):
            raise RuntimeError(f"a publish failed: {answer.error.name}: {answer.error.message}")

    def close(self) -> None:
        self._requests.put(None)
        list(self._answers)


def _syncer(path: Path) -> Callable[[], None]:
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)

    def sync() -> None:
        os.pwrite(file, PAGE, 0)
        os.fdatasync(file)

    return sync


def _timed(action: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call."""
    for _ in range(WARM_UP):
        action()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def _report(report: Report, what: str, taken_ms: list[float]) -> None:
    p50, p99 = percentile(taken_ms, 50), percentile(taken_ms, 99)
    report.add(what, f"p50 {p50:.2f} ms, p99 {p99:.2f} ms", p50_ms=p50, p99_ms=p99, count=len(taken_ms))
