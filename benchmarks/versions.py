"""The produce path of this tree beside that of another commit, in one run: neither may have become slower unnoticed.

Owns these figures: librdkafka without transactions, acks=all, idempotent, 100 bytes, three partitions, on two clusters
of three nodes that take turns. The other commit's nodes run from its own files, in a temporary directory. On a busy
machine, believe the nodes' CPU time for a record: it does not count what other programs do.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.kafka import PARTITIONS, bootstrap_of, nodes_cpu_s, one_at_a_time, produce
from benchmarks.other_commits import started_from
from benchmarks.report import Report, commit, percentile
from smq.testing.cluster import Cluster

BEFORE_TRANSACTIONS: Final = "a221b02"  # the last commit of the main line without them
SIZE: Final = 100  # bytes
SINGLES: Final = 100


@dataclass(slots=True)
class _Taken:
    """Of each turn; `ms` of each record that was sent alone."""

    cpu_us_per_record: list[float] = field(default_factory=list)
    records_per_s: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)


def measure(cluster: Cluster, report: Report, *, against: str, turns: int, records: int) -> None:
    """In each turn, a cluster gets `records` at full rate and then SINGLES one at a time."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as name:
        before = started_from(against, Path(name))
        try:
            taken = _take_turns({"now": cluster, "before": before}, turns, records)
        finally:
            before.stop()
    versions = {"now": commit(), "before": against}
    for which, figures in taken.items():
        _report(report, versions[which], figures)
    _report_ratio(report, f"{versions['now']} to {against}", taken["now"], taken["before"])


def _take_turns(clusters: dict[str, Cluster], turns: int, records: int) -> dict[str, _Taken]:
    topics = {which: one.make_topic(PARTITIONS) for which, one in clusters.items()}
    taken = {which: _Taken() for which in clusters}
    for which, one in clusters.items():
        _turn(one, topics[which], _Taken(), records)  # warms up
    for turn in range(turns):
        for which in ("now", "before") if turn % 2 else ("before", "now"):  # neither is always the first
            _turn(clusters[which], topics[which], taken[which], records)
    return taken


def _turn(cluster: Cluster, topic: str, taken: _Taken, records: int) -> None:
    cpu, began = nodes_cpu_s(cluster), time.perf_counter()
    produce(bootstrap_of(cluster), topic, records, SIZE)
    elapsed = time.perf_counter() - began
    taken.records_per_s.append(records / elapsed)
    taken.cpu_us_per_record.append((nodes_cpu_s(cluster) - cpu) / records * 1e6)
    taken.ms += one_at_a_time(cluster, topic, SINGLES, SIZE)


def _report(report: Report, version: str, taken: _Taken) -> None:
    rate, cpu_us = median(taken.records_per_s), median(taken.cpu_us_per_record)
    p50, p99 = percentile(taken.ms, 50), percentile(taken.ms, 99)
    report.add(
        f"produce 100 B without a transaction, {version}",
        f"{rate:,.0f} records/s, nodes {cpu_us:.2f} us of CPU a record; one at a time p50 {p50:.2f}, p99 {p99:.2f} ms",
        records_per_s=rate,
        nodes_cpu_us_per_record=cpu_us,
        p50_ms=p50,
        p99_ms=p99,
        turns=len(taken.records_per_s),
    )


def _report_ratio(report: Report, what: str, now: _Taken, before: _Taken) -> None:
    """Of each pair of turns, in the middle."""
    rate = median(a / b for a, b in zip(now.records_per_s, before.records_per_s, strict=True))
    cpu = median(a / b for a, b in zip(now.cpu_us_per_record, before.cpu_us_per_record, strict=True))
    p50 = percentile(now.ms, 50) / percentile(before.ms, 50)
    text = f"records/s {rate:.2f}, CPU of a record {cpu:.2f}, p50 {p50:.2f}"
    report.add(f"ratios, {what}", text, records_per_s=rate, cpu=cpu, p50=p50)
