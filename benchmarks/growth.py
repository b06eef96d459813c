"""What changes when the data or the partitions grow tenfold, and tenfold again.

Owns these figures. Data: one partition of three nodes is filled with records of 100 bytes, in batches of 1,000. At each
size: a publish, a seek to an offset and to a time until the first record, a new consumer until its first record, the
nodes' memory, and the time until all nodes are ready again after they were killed together. Partitions: the same for
topics with more and more of them, each with a record.
"""

import datetime
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.latency import WARM_UP, Publisher
from benchmarks.pages import blank, markdown, rewrite, svg
from benchmarks.report import Report, commit, percentile
from benchmarks.usage import usage_of
from smq.clients import SyncAdmin, SyncConsumer, SyncProducer
from smq.clients.positions import Start
from smq.testing.cluster import Cluster
from smq.testing.node_client import batch_of

COMMAND: Final = "python -m benchmarks --only growth --write"
RECORDS_PER_BATCH: Final = 1_000
VALUES: Final = [b"v" * 100] * RECORDS_PER_BATCH
CONSUMERS: Final = 20
PATIENCE_MS: Final = 30_000
FIGURES: Final = {
    "publish_ms": "a publish, p50",
    "offset_ms": "seek to an offset until its record, p50",
    "time_ms": "seek to a time until its record, p50",
    "consumer_ms": "a new consumer until its first record, p50",
    "create_s": "creating them",
    "private_mb": "private memory of three nodes",
    "ready_s": "all killed and ready again",
}

_AXES: Final = {"records": "records of 100 bytes in the partition", "partitions": "partitions with a record each"}

_Row = dict[str, float]


def measure(
    cluster: Cluster, report: Report, *, records: Sequence[int], partitions: Sequence[int], rounds: int
) -> None:
    """`rounds` is how often each latency is measured."""
    _measure_records(cluster, report, records, rounds)
    cluster.stop()
    wide = Cluster(cluster.root / "wide")
    try:
        _measure_partitions(wide.start(), report, partitions, rounds)
    finally:
        wide.stop()


def _measure_records(cluster: Cluster, report: Report, sizes: Sequence[int], rounds: int) -> None:
    topic = cluster.make_topic()
    batch, count, rng = batch_of(VALUES), 0, random.Random(1)
    began = datetime.datetime.now(datetime.UTC)
    for size in sizes:
        leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
        while count < size:
            leader.publish_batch(topic, 0, batch)
            count += RECORDS_PER_BATCH
        filled_s = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
        publisher = Publisher(leader, topic)
        row = {"publish_ms": _p50(publisher.publish, rounds)}
        publisher.close()
        seconds = [rng.uniform(0, filled_s) for _ in range(rounds + WARM_UP)]
        row["offset_ms"] = _seeks(cluster, topic, [rng.randrange(count) for _ in seconds])
        row["time_ms"] = _seeks(cluster, topic, [began + datetime.timedelta(seconds=s) for s in seconds])
        row["consumer_ms"] = _firsts(cluster, topic, [rng.randrange(count) for _ in range(CONSUMERS)])
        _add(report, f"{size:,} records", row | _restart(cluster), records=size)


def _measure_partitions(cluster: Cluster, report: Report, counts: Sequence[int], rounds: int) -> None:
    before = 0
    for number, count in enumerate(counts):
        topic, more = f"t{number}", count - before
        with SyncAdmin(cluster.servers) as admin:
            began = time.monotonic()
            admin.create_topic(topic, more)
            row = {"create_s": time.monotonic() - began}
        with SyncProducer(cluster.servers) as producer:
            for sent in [producer.send(topic, VALUES[0], partition=partition) for partition in range(more)]:
                sent.result()
        publisher = Publisher(cluster.nodes[cluster.wait_leader(topic, 0)].raw, topic)
        row["publish_ms"] = _p50(publisher.publish, rounds)
        publisher.close()
        row["consumer_ms"] = _firsts(cluster, topic, [0] * CONSUMERS)
        _add(report, f"{count:,} partitions", row | _restart(cluster), partitions=count)
        before = count


def _p50(action: Callable[[], object], count: int, *, warm_up: int = WARM_UP) -> float:
    taken = []
    for _ in range(warm_up + count):
        began = time.perf_counter()
        action()
        taken.append((time.perf_counter() - began) * 1000)
    return percentile(taken[warm_up:], 50)


def _seeks(cluster: Cluster, topic: str, starts: Sequence[Start]) -> float:
    with SyncConsumer(cluster.servers) as consumer:
        consumer.assign([(topic, 0)])
        left = iter(starts)

        def seek() -> None:
            consumer.seek(topic, 0, next(left))
            assert consumer.getmany(1, timeout_ms=PATIENCE_MS)

        return _p50(seek, len(starts) - WARM_UP)


def _firsts(cluster: Cluster, topic: str, offsets: Sequence[int]) -> float:
    """Of a new consumer each."""
    left = iter(offsets)

    def read() -> None:
        with SyncConsumer(cluster.servers) as consumer:
            consumer.assign([(topic, 0)], start=next(left))
            assert consumer.getmany(1, timeout_ms=PATIENCE_MS)

    return _p50(read, len(offsets) - 1, warm_up=1)


def _restart(cluster: Cluster) -> _Row:
    private_mb = usage_of(node.pid for node in cluster.nodes.values()).private_bytes / 1e6
    cluster.kill(*cluster.nodes)
    began = time.monotonic()
    cluster.restart(*cluster.nodes)
    return {"private_mb": private_mb, "ready_s": time.monotonic() - began}


def _add(report: Report, what: str, row: _Row, **size: int) -> None:
    text = ", ".join(f"{FIGURES[name]} {_shown(name, value)}" for name, value in row.items())
    report.add(what, text, kind="growth", **size, **row)


def _shown(name: str, value: float) -> str:
    unit = name.rpartition("_")[2]
    return f"{value:,.0f} MB" if unit == "mb" else f"{value:.2f} {unit}"


def write_growth(report: Report) -> None:
    """Rewrites the tables and the picture of docs/performance.md."""
    rows = [row for row in report.rows if row.get("kind") == "growth"]
    parts = [f"At {commit()}: one run, three nodes."]
    for size in _AXES:
        found = [row for row in rows if size in row]
        names = [name for name in FIGURES if name in found[0]]
        cells = [[FIGURES[name], *(_shown(name, row[name]) for row in found)] for name in names]
        parts.append(markdown([size, *(f"{row[size]:,}" for row in found)], cells))
    parts.append(
        "![Each figure by the number of records, and of partitions, as a multiple of the first](performance/growth.svg)"
    )
    rewrite("growth", COMMAND, "\n\n".join(parts), picture=_picture(rows), results={"commit": commit(), "rows": rows})


def _picture(rows: list[dict[str, Any]]) -> str:
    """One drawing per kind of growth, side by side."""
    figure, both = blank(13, 4, columns=2)
    for axes, (size, label) in zip(both, _AXES.items(), strict=True):
        found = [row for row in rows if size in row]
        for name, text in FIGURES.items():
            if name in found[0]:
                axes.plot([r[size] for r in found], [r[name] / found[0][name] for r in found], marker="o", label=text)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.1, 1_000)
        axes.set_xlabel(label)
        axes.set_ylabel("times the first figure")
        axes.legend(fontsize=7)
    return svg(figure)
