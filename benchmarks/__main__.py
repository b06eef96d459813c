"""`make bench`: measures a three-node cluster on this machine, prints a table, writes JSON under benchmarks/results.

`python -m benchmarks peers` measures smq beside Kafka, etcd and NATS instead, `profile` shows where its nodes spend
their time under the same load, and `trend` shows how figures have changed from run to run. Owns the list of
measurements and their sizes. Nothing may import it.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    busy_machine,
    commands,
    compaction,
    failover,
    growth,
    handover,
    judging,
    kafka,
    latency,
    metrics,
    offsets,
    rates,
    recovery,
    transactions,
    trend,
    versions,
)
from benchmarks.many_partitions import passes, retention, snapshot
from benchmarks.peers import profile
from benchmarks.peers.comparison import compare
from benchmarks.peers.page import write_page
from benchmarks.peers.systems import SYSTEMS
from benchmarks.report import Report, machine
from benchmarks.spark import reads, sink, stages
from benchmarks.storage import offset_kinds, stores
from smq.testing.cluster import Cluster

Section = Callable[[Cluster, Report], None]


def _sections(quick: bool, against: str) -> dict[str, Section]:
    records = 50_000 if quick else 500_000
    return {
        "latency": lambda c, r: latency.measure(c, r, count=300 if quick else 3_000),
        "rates": lambda c, r: rates.measure(c, r, records=records),
        "kafka": lambda c, r: kafka.measure(c, r, records=records * 3, singles=300 if quick else 1_000),
        "failover": lambda c, r: failover.measure(c, r, kills=3 if quick else 20),
        "handover": lambda c, r: handover.measure(c, r, rounds=3 if quick else 9),
        "snapshot": lambda c, r: snapshot.measure(c, r, quick=quick),
        "passes": lambda c, r: passes.measure(c, r, quick=quick),
        "offsets": lambda c, r: offsets.measure(c, r, calls=500 if quick else 5_000),
        "spark": lambda c, r: reads.measure(c, r, records=4 * records),
        "spark-stages": lambda c, r: stages.measure(c, r, records=2 * records),
        "spark-sink": lambda c, r: sink.measure(c, r, records=records),
        "busy-machine": lambda c, r: busy_machine.measure(c, r, seconds=30 if quick else 600),
        "transactions": lambda c, r: transactions.measure(c, r, count=40 if quick else 400),
        "compaction": lambda c, r: compaction.measure(c, r, rounds=1 if quick else 5, versions=3 if quick else 10),
        "retention": lambda c, r: retention.measure(c, r, quick=quick),
        "recovery": lambda c, r: recovery.measure(c, r, sizes_mib=[16] if quick else [64, 256, 1_024]),
        "growth": lambda c, r: growth.measure(
            c,
            r,
            records=[10_000, 100_000] if quick else [10_000, 100_000, 1_000_000, 10_000_000],
            partitions=[10, 100] if quick else [10, 100, 1_000, 10_000],
            rounds=100 if quick else 1_000,
        ),
        "opening": lambda c, r: recovery.measure_alone(c, r, sizes_mib=[256] if quick else [100, 1_024, 10_240]),
        "versions": lambda c, r: versions.measure(c, r, against=against, turns=3 if quick else 9, records=records // 2),
    }


def _sections_alone(quick: bool) -> dict[str, Callable[[Report], None]]:
    """Sections that need no cluster."""
    return {
        "judging": lambda r: judging.measure(r, operations=100_000 if quick else 1_000_000),
        "commands": lambda r: commands.measure(r, times=3 if quick else 15),
        "metrics": lambda r: metrics.measure(r, pairs=20 if quick else 1000),
        "offset-kinds": lambda r: offset_kinds.measure(r, records=100_000 if quick else 1_000_000),
        "stores": lambda r: stores.measure(r, rounds=100 if quick else 1_000, stream_mib=32 if quick else 256),
    }


def main() -> None:
    """Runs the sections, each with its own cluster if it needs one, or what is named beside them."""
    arguments = _arguments()
    share = 0.2 if arguments.quick else 1.0
    lines, directory = arguments.line or [], arguments.directory
    if arguments.other == "trend":
        trend.show()
    elif arguments.other == "peers":
        names = arguments.system or []
        path = compare(arguments.rounds, share, names, lines, directory, arguments.against)
        print(f"written: {path}")
        if arguments.write:
            write_page(path)
    else:
        report = Report()
        print(f"smq benchmarks: {machine()}", flush=True)
        if arguments.other == "profile":
            profile.measure(report, share=share, lines=lines, directory=directory)
        else:
            _run_sections(arguments, report)
            trend.add(report)
        print(f"written: {report.write()}")
        if arguments.write:
            (profile.write_profile if arguments.other else growth.write_growth)(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures smq on this machine.")
    names = [*_sections(quick=True, against=""), *_sections_alone(quick=True)]
    parser.add_argument("--only", choices=names, action="append", help="one section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for trying it out")
    against = "a commit: versions compares with it (default: the last without transactions), peers has it as a system"
    parser.add_argument("--against", metavar="COMMIT", help=against)
    other = (
        "peers: compare smq with Kafka, etcd and NATS; profile: where its nodes spend their time under that load; "
        "trend: show how figures changed from run to run"
    )
    parser.add_argument("other", nargs="?", choices=["peers", "profile", "trend"], help=other)
    systems = [kind.name for kind in SYSTEMS]
    parser.add_argument("--system", choices=systems, action="append", help="peers: one system; may be repeated")
    line = "peers, profile: lines whose name contains this; may be repeated"
    parser.add_argument("--line", action="append", help=line)
    parser.add_argument("--rounds", type=int, default=3, help="peers: alternating runs (default: 3)")
    parser.add_argument("--write", action="store_true", help="peers, profile, growth: rewrite docs/performance.md")
    parser.add_argument("--directory", type=Path, help="where the clusters keep their data (default: a temporary one)")
    return parser.parse_args()


def _run_sections(arguments: argparse.Namespace, report: Report) -> None:
    against = arguments.against or versions.BEFORE_TRANSACTIONS
    for name, section in _sections(arguments.quick, against).items():
        if arguments.only and name not in arguments.only:
            continue
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="smq-bench-", dir=arguments.directory) as root:
            cluster = Cluster(Path(root))
            try:
                section(cluster.start(), report)
            finally:
                cluster.stop()
    for name, alone in _sections_alone(arguments.quick).items():
        if not arguments.only or name in arguments.only:
            print(f"{name}:", flush=True)
            alone(report)


if __name__ == "__main__":
    main()
