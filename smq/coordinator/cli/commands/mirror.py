"""`smq mirror ...`: another cluster's topics, copied here with their offsets, and the end of that.

Owns what these commands print. `cli.root` loads it when it is used.
"""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from smq.clients import Admin
from smq.clients.cluster import ClusterClient
from smq.clients.types import TopicDescription
from smq.coordinator.cli.common import CONNECT_TIMEOUT_MS, answered, counted, done, json_option, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.export import progress
from smq.coordinator.cli.mirror.comparing import Behind, Compared, behind, compare
from smq.coordinator.cli.mirror.copying import Copy, Mirror, lag_of
from smq.coordinator.cli.mirror.kafka_side import KafkaSide
from smq.coordinator.cli.mirror.returning import end_transactions, give_back, give_commits_back, source_producer
from smq.coordinator.cli.mirror.settings import KafkaSettings, MirrorSettings, load
from smq.coordinator.cli.mirror.target import Target
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.operators.formats import age_text, size_text
from smq.coordinator.user_errors import ConfigError, UserError
from smq.raft_state.topic_config import MIRRORED, is_compacted

F = TypeVar("F", bound=Callable[..., Any])
CALL_MS: Final = 30_000.0  # no person waits: an election more or less is no reason to end
REPORT_S: Final = 5.0
SETTLE_S: Final = 30.0

config_option = click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="mirror.toml: the source, and its topics.",
)


@click.group()
def mirror() -> None:
    """Copies topics of another cluster with their offsets, compares them, and ends the copy."""


@asynccontextmanager
async def _opened(settings: MirrorSettings, bootstrap: str) -> AsyncIterator[tuple[KafkaSide, Admin]]:
    async with _admin(bootstrap) as admin, KafkaSide(settings.source, "source") as source:
        yield source, admin


def _admin(bootstrap: str) -> Admin:
    return Admin(bootstrap, timeout_ms=CALL_MS, connect_timeout_ms=CONNECT_TIMEOUT_MS)


@asynccontextmanager
async def _own_side(settings: MirrorSettings, admin: Admin) -> AsyncIterator[KafkaSide]:
    """This cluster by Kafka's protocol. ConfigError if nothing says where that is."""
    way = settings.target_kafka
    if way is None:
        addresses = [n.kafka_address for n in (await admin.describe_cluster()).nodes if n.kafka_address]
        if not addresses:
            message = "the nodes name no Kafka address to this client: give theirs in mirror.toml, as [target_kafka]"
            raise ConfigError(message)
        way = KafkaSettings(bootstrap=",".join(addresses))
    async with KafkaSide(way, "copy") as here:
        yield here


@asynccontextmanager
async def _target(bootstrap: str) -> AsyncIterator[Target]:
    cluster = ClusterClient(bootstrap)
    await cluster.start()
    try:
        yield Target(cluster)
    finally:
        await cluster.close()


@mirror.command("run")
@config_option
@click.option("--once", is_flag=True, help="End when nothing is left to copy.")
@click.option(
    "--share", metavar="I/N", default="1/1", show_default=True, help="Copy only this share of the partitions."
)
@click.option("--metrics-port", type=click.IntRange(1, 65_535), help="Serve Prometheus metrics at 127.0.0.1.")
@json_option
@bootstrap_option
def mirror_run(path: Path, once: bool, share: str, metrics_port: int | None, as_json: bool, bootstrap: str) -> None:
    """Copies topics, their settings, records and the commits of groups, until Ctrl-C.

    It can be killed and started again at any time: it goes on at the end of the copy. Several with different shares
    copy side by side.

    Example: smq mirror run --config mirror.toml
    """
    settings, part = load(path), _share(share)

    async def work() -> Mirror:
        async with _mirror(settings, bootstrap, part) as made:
            if metrics_port is not None:
                _serve_metrics(made, metrics_port)
            answered()
            async with _reported(made, as_json=as_json):
                await made.run(once=once)
            return made

    try:
        made = run(work(), bootstrap, (signal.SIGINT, signal.SIGTERM))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return
    _check(made)
    records = sum(copy.records for copy in made.copies.values())
    text = f"copied {counted(records, 'record')} of {counted(len(made.copies), 'partition')}; nothing is left"
    done(text, as_json=as_json, **_figures(made))


@asynccontextmanager
async def _mirror(settings: MirrorSettings, bootstrap: str, share: tuple[int, int]) -> AsyncIterator[Mirror]:
    async with (
        _opened(settings, bootstrap) as (source, admin),
        _own_side(settings, admin) as here,
        _target(bootstrap) as target,
    ):
        yield Mirror(settings, source, here, admin, target, lambda text: click.echo(text, err=True), share)


def _check(made: Mirror) -> None:
    if made.problems:
        raise UserError(f"not everything was copied, and what was copied is kept: {'; '.join(made.problems)}")


def _share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise click.UsageError(f"--share is 1/3, 2/3 or 3/3 for example, not {text}")
    return int(part) - 1, int(parts)


def _figures(made: Mirror) -> dict[str, object]:
    copies = made.copies.values()
    return {
        "partitions": len(copies),
        "records": sum(copy.records for copy in copies),
        "bytes": sum(copy.bytes for copy in copies),
        "lag": lag_of(copies),
        "commits": made.commits,
        "problems": made.problems,
    }


@asynccontextmanager
async def _reported(made: Mirror, *, as_json: bool) -> AsyncIterator[None]:
    """A bar on a terminal; with --json a line now and then."""

    async def report() -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        console, was = Console(stderr=True), 0.0
        columns = (TextColumn("{task.fields[lag]}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("mirror", total=None, lag="")
            while True:
                copied, left = sum(copy.bytes for copy in made.copies.values()), lag_of(made.copies.values())
                text = "lag not known yet" if left is None else f"lag {left:,} offsets"
                bar.update(task, completed=copied, lag=text)
                if as_json and time.monotonic() - was > REPORT_S:
                    was = time.monotonic()
                    click.echo(json.dumps(_figures(made)))
                await asyncio.sleep(0.5)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


def _serve_metrics(made: Mirror, port: int) -> None:
    from prometheus_client import start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector, CollectorRegistry

    class Figures(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            gauges: dict[str, tuple[str, Callable[[Copy], int | None]]] = {
                "smq_mirror_lag_offsets": ("Offsets of the source that are not here.", lambda copy: copy.lag),
                "smq_mirror_lag_ms": ("Age of the last copied record, if there is a lag.", _age_ms),
                "smq_mirror_copied_bytes": ("Bytes copied by this process.", lambda copy: copy.bytes),
                "smq_mirror_stopped": (
                    "1 if the partition is not copied any more.",
                    lambda copy: int(bool(copy.problem)),
                ),
            }
            for name, (text, value) in gauges.items():
                family = GaugeMetricFamily(name, text, labels=("topic", "partition"))
                for (topic, partition), copy in made.copies.items():
                    if (number := value(copy)) is not None:
                        family.add_metric((topic, str(partition)), number)
                yield family

    registry = CollectorRegistry()
    registry.register(Figures())
    start_http_server(port, "127.0.0.1", registry)


def _age_ms(copy: Copy) -> int:
    return max(0, int(time.time() * 1_000) - copy.newest_ms) if copy.lag and copy.newest_ms >= 0 else 0


# ---------------------------------------------------------------------------------------------- status, verify
@mirror.command("status")
@config_option
@json_option
@bootstrap_option
def mirror_status(path: Path, as_json: bool, bootstrap: str) -> None:
    """Shows how far each partition of the copy is behind, in offsets, bytes and time. Bytes are an estimate.

    Example: smq mirror status --config mirror.toml
    """
    settings = load(path)

    async def work() -> list[Behind]:
        async with _opened(settings, bootstrap) as (source, admin):
            places = await _mirrored(settings, source, admin)
            return [await behind(source, place, end) for place, (end, _) in places.items()]

    found = run(work(), bootstrap)
    now_ms = int(time.time() * 1_000)
    if as_json:
        rows = [
            {"topic": b.place[0], "partition": b.place[1], "source_end": b.source_end, "end": b.end}
            | {"lag": b.offsets, "bytes": b.bytes, "age_ms": now_ms - b.since_ms if b.since_ms >= 0 else None}
            for b in found
        ]
        click.echo(json.dumps(rows))
        return
    table = Table("topic", "partition", "source end", "end", "lag", "bytes", "time")
    for b in found:
        age = age_text(max(0, now_ms - b.since_ms)) if b.since_ms >= 0 else "-"
        numbers = (b.place[1], b.source_end, b.end, b.offsets)
        table.add_row(b.place[0], *map(str, numbers), size_text(b.bytes), age)
    print_table(table)


async def _mirrored(
    settings: MirrorSettings, source: KafkaSide, admin: Admin
) -> dict[tuple[str, int], tuple[int, bool]]:
    """The end of each partition that is on both sides, and whether its topic is compacted."""
    counts = {name: count for name, count in (await source.partitions()).items() if settings.wants_topic(name)}
    return {
        (topic.name, part.partition): (
            (await admin.partition_range(topic.name, part.partition)).next_offset,
            is_compacted(topic.config),
        )
        for topic in await admin.list_topics()
        if topic.name in counts
        for part in topic.partitions[: counts[topic.name]]
    }


@mirror.command("verify")
@config_option
@json_option
@bootstrap_option
def mirror_verify(path: Path, as_json: bool, bootstrap: str) -> None:
    """Reads both sides and compares them, range by range by digest, and record by record where those differ.

    It compares what both sides have. In a compacted topic, each side may have removed other records.

    Example: smq mirror verify --config mirror.toml
    """
    settings = load(path)

    async def work() -> list[Compared]:
        async with _opened(settings, bootstrap) as (source, admin):
            places = await _mirrored(settings, source, admin)
            answered()
            async with _own_side(settings, admin) as here:
                with progress(sum(end for end, _ in places.values())) as advance:
                    return [
                        await compare(source, here, place, is_compacted=compacted, advance=advance)
                        for place, (_, compacted) in places.items()
                    ]

    found = run(work(), bootstrap)
    bad = [c for c in found if not c.is_copy]
    if as_json:
        click.echo(json.dumps([_compared(c) for c in found]))
    else:
        table = Table(
            "topic",
            "partition",
            "from",
            "to",
            "ranges",
            "equal ranges",
            "equal records",
            "differing",
            "only there",
            "only here",
        )
        for c in found:
            numbers = (c.start, c.stop, c.ranges, c.equal_ranges, c.records, c.differing, c.only_there, c.only_here)
            table.add_row(c.place[0], str(c.place[1]), *map(str, numbers))
        print_table(table)
    if bad:
        where = "; ".join(f"{c.place[0]}/{c.place[1]} at {', '.join(map(str, c.shown))}" for c in bad)
        raise UserError(f"the copy differs: {where}")


def _compared(c: Compared) -> dict[str, object]:
    names = ("start", "stop", "ranges", "equal_ranges", "records", "differing", "only_there", "only_here", "is_copy")
    return {"topic": c.place[0], "partition": c.place[1], **{name: getattr(c, name) for name in names}}


# ------------------------------------------------------------------------------------------------------ cutover
@mirror.command("cutover")
@config_option
@click.option("--source-is-gone", is_flag=True, help="Copy nothing more, and abort the transactions that are open.")
@json_option
@bootstrap_option
def mirror_cutover(path: Path, source_is_gone: bool, as_json: bool, bootstrap: str) -> None:
    """Copies what is left and the commits of groups, and opens the topics here for producers.

    Stop the producers of the source first: what they send from then on is not copied. Interrupted, it can be run again;
    each topic is either a copy or open.

    Example: smq mirror cutover --config mirror.toml
    """
    settings = load(path)

    async def work() -> list[str]:
        async with _admin(bootstrap) as admin:
            found = await admin.list_topics()
            copies = [t for t in found if settings.wants_topic(t.name) and t.config.get(MIRRORED) == "true"]
            if not copies:
                raise UserError(f"no topic that {path} names is mirrored here: nothing was done")
            topics = [topic.name for topic in copies]
            answered()
            if source_is_gone:
                await _end_all(settings, bootstrap, admin, copies)
            else:
                left = replace(settings, topics=tuple(map(re.escape, topics)))
                async with _mirror(left, bootstrap, (0, 1)) as made:
                    await made.run(once=True)
                    _check(made)
            for topic in copies:
                for part in topic.partitions:
                    await _settled(admin, topic.name, part.partition)
            for name in topics:
                await admin.alter_topic(name, set={MIRRORED: "false"})
            return topics

    topics = run(work(), bootstrap)
    done(f"open for producers: {', '.join(topics)}", as_json=as_json, topics=topics)


async def _end_all(settings: MirrorSettings, bootstrap: str, admin: Admin, copies: list[TopicDescription]) -> None:
    """Aborts what the source can no longer end."""
    async with _own_side(settings, admin) as here, _target(bootstrap) as target:
        for topic in copies:
            for part in topic.partitions:
                found = await admin.partition_range(topic.name, part.partition)
                place = topic.name, part.partition
                count = await end_transactions(here, target, place, found.lso, found.next_offset)
                if count:
                    click.echo(f"{topic.name}/{part.partition}: aborted {counted(count, 'transaction')}", err=True)


async def _settled(admin: Admin, topic: str, partition: int) -> None:
    """No transaction is open."""
    until = time.monotonic() + SETTLE_S
    while True:
        found = await admin.partition_range(topic, partition)
        if found.lso == found.hwm == found.next_offset:
            return
        if time.monotonic() > until:
            raise UserError(
                f"{topic}/{partition} has a transaction from offset {found.lso} on that the source has not ended: end"
                " it there, and cut over again; no further topic was opened"
            )
        await asyncio.sleep(0.2)


@mirror.command("rollback")
@config_option
@json_option
@bootstrap_option
def mirror_rollback(path: Path, as_json: bool, bootstrap: str) -> None:
    """Closes the topics here for producers again, and sends the source what has arrived here since the cutover.

    The source gets the records at the same offsets, or the command ends with the offset at which it cannot: after a
    transaction or a compaction here, or if the source has another producer. Then `smq mirror run` goes on.

    Example: smq mirror rollback --config mirror.toml
    """
    settings = load(path)

    async def work() -> dict[str, object]:
        async with _opened(settings, bootstrap) as (source, admin), _own_side(settings, admin) as here:
            places = await _mirrored(settings, source, admin)
            topics = {topic for topic, _ in places}
            answered()
            for name in sorted(topics):
                await admin.alter_topic(name, set={MIRRORED: "true"})
            for topic, partition in places:
                await _settled(admin, topic, partition)
            records = 0
            async with source_producer(settings) as producer:
                for place in places:
                    records += await give_back(source, here, producer, place)
            commits = await give_commits_back(settings, source, admin, topics)
            return {"topics": sorted(topics), "records": records, "commits": commits}

    found = run(work(), bootstrap)
    done(f"the source has {found['records']} more records, and {found['commits']} commits", as_json=as_json, **found)
