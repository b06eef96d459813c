"""`smq produce`: sends records from a file or standard input to a topic, with a progress bar.

Owns the command and its reading thread. `cli.input` owns the formats. `cli.main` loads it when it is used.
"""

import asyncio
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError as FutureCancelled
from contextlib import contextmanager
from typing import Final, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from smq.clients import BatchMetadata, Producer, RecordMetadata
from smq.coordinator.cli.common import CONNECT_TIMEOUT_MS, counted, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.input import FORMATS, InputError, InputRecord, LineSource, format_of, read_records
from smq.coordinator.cli.waiting import Waiting
from smq.records import CODECS

CHUNKS_AHEAD: Final = 4  # read and not sent yet: bounds memory, and keeps the reader busy
PROGRESS_INTERVAL_S: Final = 0.1
DELIVERIES_MAX: Final = 64  # chunks sent and not yet acknowledged; beyond, wait for the oldest

Delivery = asyncio.Future[list[BatchMetadata]] | asyncio.Future[RecordMetadata]


@click.command()
@click.argument("topic")
@click.argument("file", default="-", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    help="lines: one record per line. jsonl: one JSON value per line. csv: one record per row, as a JSON object. "
    "records: as `smq consume --json` writes them. Default: by the file's suffix, otherwise lines.",
)
@click.option("--key-column", metavar="NAME", help="The CSV column or JSON field with the record's key.")
@click.option("--partition", type=int, help="Send all records there. Default: by key, or spread evenly.")
@click.option("--compression", type=click.Choice(sorted(CODECS)), default="lz4", show_default=True)
@click.option("--acks", type=click.Choice(["all", "leader", "none"]), default="all", show_default=True)
@bootstrap_option
def produce(
    topic: str,
    file: str,
    format_name: str | None,
    key_column: str | None,
    partition: int | None,
    compression: str,
    acks: Literal["all", "leader", "none"],
    bootstrap: str,
) -> None:
    """Sends the records of FILE (default: standard input) to TOPIC.

    Every record is stored once, and in order per partition, whatever fails on the way.
    """
    fd = sys.stdin.fileno() if file == "-" else os.open(file, os.O_RDONLY)
    source = LineSource(fd, "standard input" if file == "-" else file)
    chunks = _ChunkReader(source, format_of(file, format_name), key_column)

    async def work() -> int:
        producer = Producer(bootstrap, acks=acks, compression=compression, connect_timeout_ms=CONNECT_TIMEOUT_MS)
        with _progress(fd, source, producer):
            async with producer:
                await _send_all(producer, topic, chunks, partition)
        if not producer.stats.records_acked:
            await _check_topic(bootstrap, topic)  # no record was sent, so nothing has checked the topic yet
        return producer.stats.records_acked

    try:
        count = run(work(), bootstrap)
    finally:
        if file != "-":
            os.close(fd)
    click.echo(f"stored {counted(count, 'record')} in {topic}", err=True)


async def _check_topic(bootstrap: str, topic: str) -> None:
    async with open_admin(bootstrap) as admin:
        await admin.describe_topic(topic)


async def _send_all(producer: Producer, topic: str, chunks: "_ChunkReader", partition: int | None) -> None:
    deliveries: list[Delivery] = []
    try:
        async for chunk in chunks.read():
            deliveries += await _send_chunk(producer, topic, chunk, partition)
            while len(deliveries) > DELIVERIES_MAX:
                await deliveries.pop(0)
        await _settle(producer, deliveries)
    except InputError as e:
        await _settle(producer, deliveries)
        stored = counted(producer.stats.records_acked, "record")
        raise InputError(f"{e}; stored {stored} before it: correct it and send the rest") from e
    finally:
        for delivery in deliveries:
            delivery.cancel()  # one has failed and is being reported; the others have the same error


async def _settle(producer: Producer, deliveries: list[Delivery]) -> None:
    await producer.flush()
    while deliveries:
        await deliveries.pop(0)


async def _send_chunk(
    producer: Producer, topic: str, chunk: list[InputRecord], partition: int | None
) -> list[Delivery]:
    if any(r.headers or r.timestamp_ms is not None for r in chunk):
        sent: list[Delivery] = []
        for r in chunk:
            await producer.wait_room()
            sent.append(producer.send(topic, r.value, r.key, r.headers, partition, r.timestamp_ms))
        return sent
    keys = [r.key for r in chunk] if any(r.key is not None for r in chunk) else None
    return [await producer.send_many(topic, [r.value for r in chunk], keys=keys, partition=partition)]


class _ChunkReader:
    """Reads and parses in its own thread, so that neither a slow pipe nor a large file blocks the event loop."""

    def __init__(self, source: LineSource, format_name: str, key_column: str | None) -> None:
        self._source = source
        self._format_name = format_name
        self._key_column = key_column

    async def read(self) -> AsyncIterator[list[InputRecord]]:
        queue: asyncio.Queue[list[InputRecord] | Exception | None] = asyncio.Queue(CHUNKS_AHEAD)
        loop = asyncio.get_running_loop()

        def put(item: list[InputRecord] | Exception | None) -> None:
            asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

        def work() -> None:
            try:
                try:
                    for chunk in read_records(self._source, self._format_name, self._key_column):
                        put(chunk)
                    put(None)
                except (InputError, OSError) as e:
                    put(e)
            except (RuntimeError, FutureCancelled):
                pass  # the command ended before its input did

        # A daemon thread: a read from a terminal cannot be interrupted, and must not keep the process alive.
        threading.Thread(target=work, name="smq-produce-input", daemon=True).start()
        while True:
            item = await queue.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item if isinstance(item, InputError) else InputError(f"{self._source.name}: {item}")
            yield item


@contextmanager
def _progress(fd: int, source: LineSource, producer: Producer) -> Iterator[None]:
    """Standard error gets a line for what the command waits for and, if it is a terminal, a bar: bytes read of the
    file, and records acknowledged."""
    with _bar(fd) as (progress, task):
        waiting = Waiting(lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True))

        def look() -> None:
            waiting.look(producer.waits_for, producer.stats.records_acked, time.monotonic())

        async def watch() -> None:
            while True:
                look()
                progress.update(task, completed=source.bytes_read, acked=producer.stats.records_acked)
                await asyncio.sleep(PROGRESS_INTERVAL_S)

        watcher = asyncio.create_task(watch())
        try:
            yield
            look()  # the last wait may have ended since
        finally:
            watcher.cancel()


@contextmanager
def _bar(fd: int) -> Iterator[tuple[Progress, TaskID]]:
    """Hidden if standard error is no terminal, or if the user types the records."""
    console = Console(stderr=True)
    is_hidden = not console.is_terminal or (fd == sys.stdin.fileno() and sys.stdin.isatty())
    about = os.fstat(fd)
    total = about.st_size if stat.S_ISREG(about.st_mode) else None
    columns = (
        TextColumn("{task.percentage:>3.0f}%") if total else TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.fields[acked]:,} records stored"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        yield progress, progress.add_task("produce", total=total, acked=0)
