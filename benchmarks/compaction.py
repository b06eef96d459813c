"""How fast a log is compacted, and what that costs a producer on the same nodes.

Owns the figures of compaction. A topic is filled with versions of the same keys, and then compacted: from the request
until the leader, and then every replica, has nothing left but the last of each. A second topic gets one record of 100
bytes at a time, first while nothing is compacted and then while the first topic is: the two alternate, so compare them
by their ratio within one run.
"""

import time
from statistics import median

from benchmarks.latency import Publisher
from benchmarks.report import Report, percentile
from smq.clients import SyncAdmin
from smq.records import NewRecord, encode_batch
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from smq.testing.node_process import wait_for

CHECK_MS = 100  # between two looks at what may be compacted: by default it begins up to 15 s later
KEYS, RECORD_BYTES, BATCH_RECORDS = 20_000, 1_000, 500
COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
DONE = 1.05  # of the bytes of one version; a batch without records stays where its offsets are
CHUNK = 100  # publishes between two looks
WARM_UP = 300
REST_S = 3.0  # the nodes write what they have buffered
PATIENCE_S = 300.0


def measure(cluster: Cluster, report: Report, *, rounds: int, versions: int) -> None:
    """Compacts a topic with so many versions of each key in every round."""
    cluster.tune(compaction_check_ms=CHECK_MS)
    produced = cluster.make_topic()
    leader = cluster.wait_leader(produced, 0)
    without, during = list[float](), list[float]()
    rates = list[float]()
    for _ in range(rounds):
        filled = _fill(cluster, leader, versions)
        publisher = Publisher(cluster.nodes[leader].raw, produced)
        _publish(publisher, WARM_UP)
        beside: list[float] = []
        size, took, settled = _compact(cluster, leader, filled, versions, publisher, beside)
        alone = _publish(publisher, len(beside))
        publisher.close()
        without.append(percentile(alone, 99))
        during.append(percentile(beside, 99))
        rates.append(size / took / 1e6)
        text = f"{took:.1f} s, {rates[-1]:.1f} MB/s; on every replica after {settled:.1f} s"
        report.add(f"compaction of {size / 1e6:.0f} MB", text, bytes=size, seconds=took, settled_s=settled)
        _report_pair(report, alone, beside)
    ratio = median(b / a for a, b in zip(without, during, strict=True))
    report.add(f"compaction, median of {rounds}", f"{median(rates):.1f} MB/s", mb_per_s=median(rates))
    text = f"p99 {median(without):.2f} ms without, {median(during):.2f} ms with compaction: ratio {ratio:.2f}"
    report.add(
        "publish 100 B, acks=all, one at a time",
        text,
        p99_ms=median(without),
        p99_during_ms=median(during),
        ratio=ratio,
    )


def _report_pair(report: Report, alone: list[float], beside: list[float]) -> None:
    for what, taken in (("without compaction", alone), ("during compaction", beside)):
        p50, p99 = percentile(taken, 50), percentile(taken, 99)
        text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, of {len(taken):,}"
        report.add(f"publish 100 B, {what}", text, p50_ms=p50, p99_ms=p99, count=len(taken))


def _fill(cluster: Cluster, leader: int, versions: int) -> str:
    """A topic led by this node, with every version of every key."""
    topic = cluster.make_topic()
    while cluster.wait_leader(topic, 0) != leader:
        topic = cluster.make_topic()
    value = b"v" * RECORD_BYTES
    batches = [
        encode_batch([NewRecord(b"key-%d" % n, value, 0) for n in range(first, first + BATCH_RECORDS)])
        for first in range(0, KEYS, BATCH_RECORDS)
    ]
    for _ in range(versions):
        for batch in batches:
            cluster.nodes[leader].raw.publish_batch(topic, 0, batch)
    cluster.wait_converged(topic, 1)
    time.sleep(REST_S)
    return topic


def _compact(
    cluster: Cluster, leader: int, topic: str, versions: int, publisher: Publisher, taken: list[float]
) -> tuple[int, float, float]:
    """The bytes that were there, and the seconds until the leader and until every replica has compacted them.
    Publishes until the leader has."""
    before = _size(cluster.nodes[leader].raw, topic)
    small = int(before / versions * DONE)
    with SyncAdmin(cluster.servers) as admin:
        admin.alter_topic(topic, set=COMPACT)
    began = time.monotonic()
    while _size(cluster.nodes[leader].raw, topic) > small:
        taken += _publish(publisher, CHUNK)
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"{topic} was not compacted within {PATIENCE_S:.0f} s")
    took = time.monotonic() - began

    def is_everywhere() -> bool:
        return all(_size(node.raw, topic) <= small for node in cluster.alive())

    wait_for("every replica is compacted", is_everywhere, PATIENCE_S)
    return before, took, time.monotonic() - began


def _size(node: RawNode, topic: str) -> int:
    (size,) = [replica.size_bytes for replica in node.status().replicas if replica.topic == topic]
    return size


def _publish(publisher: Publisher, count: int) -> list[float]:
    """Milliseconds of each."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        publisher.publish()
        taken.append((time.perf_counter() - began) * 1_000)
    return taken
