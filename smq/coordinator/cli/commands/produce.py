"""`smq produce`: sends records from a file or standard input to a topic, with a progress bar.

Owns the command and its reading thread. `cli.input` owns the formats. `cli.root` loads it when it is used.
"""

import asyncio
import json
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import click

from smq.clients import BatchMetadata, Producer, RecordMetadata
from smq.coordinator.cli.common import CONNECT_TIMEOUT_MS, answered, counted, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.input import FORMATS, InputError, InputRecord, LineSource, Shape, format_of, read_records
from smq.coordinator.cli.parameters import SPAN, TOPIC
from smq.coordinator.cli.record_format import parse_headers
from smq.coordinator.user_errors import Interrupted
from smq.raft_state.errors import SmqError
from smq.records import CODECS

FIRST_S: Final = 0.7  # with the time between two looks, within a second; a healthy cluster answers in milliseconds
AGAIN_S: Final = 5.0  # often enough to show that the command lives, seldom enough to be read


class Waiting:
    """Call `look` several times per second. `say` gets the lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._done = 0
        self._since_s: float | None = None  # when the present wait began
        self._said_s: float | None = None  # its last line

    def look(self, what: str | None, done: int, now_s: float) -> None:
        """`what` is waited for, None for nothing; `done` grows with each progress."""
        if what is None or self._since_s is None or done != self._done:
            self._over(now_s)
            self._done, self._said_s = done, None
            self._since_s = None if what is None else now_s
            return
        waited_s = now_s - self._since_s
        if self._said_s is None and waited_s >= FIRST_S:
            self._say(f"waiting for {what}")
        elif self._said_s is not None and now_s - self._said_s >= AGAIN_S:
            self._say(f"waiting for {what}, for {waited_s:.0f} s so far")
        else:
            return
        self._said_s = now_s

    def _over(self, now_s: float) -> None:
        if self._said_s is not None and self._since_s is not None:
            self._say(f"going on after {now_s - self._since_s:.1f} s")


CHUNKS_AHEAD: Final = 4  # read and not sent yet: bounds memory, and keeps the reader busy
PROGRESS_INTERVAL_S: Final = 0.1
REQUEST_TIMEOUT_MS: Final = 30_000.0  # of one attempt, as the client's own default
DELIVERIES_MAX: Final = 64  # chunks sent and not yet acknowledged; beyond, wait for the oldest

_Item = tuple[list[InputRecord], int] | Exception | None
Delivery = asyncio.Future[list[BatchMetadata]] | asyncio.Future[RecordMetadata]


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("file", default="-", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    help="lines: one record per line. jsonl: one JSON value per line. csv: one record per row, as a JSON object. "
    "records: as `smq consume --json` writes them. Default: by the file's suffix, otherwise lines.",
)
@click.option("--key-column", metavar="NAME", help="The CSV column or JSON field with the record's key.")
@click.option("--key", "-k", help="The key of every record.")
@click.option("--key-separator", metavar="TEXT", help="Lines are key, TEXT, value: a:1 with ':' has the key a.")
@click.option(
    "--header", "-H", "headers", metavar="NAME=VALUE", multiple=True, help="On every record; may be repeated."
)
@click.option(
    "--from-line",
    type=click.IntRange(min=1),
    default=1,
    help="Leave out the lines before this one. A run that failed says where to go on.",
)
@click.option("--partition", "-p", type=int, help="Send all records there. Default: by key, or spread evenly.")
@click.option("--compression", type=click.Choice(sorted(CODECS)), default="lz4", show_default=True)
@click.option("--acks", type=click.Choice(["all", "leader", "none"]), default="all", show_default=True)
@click.option(
    "--delivery-timeout",
    "delivery_ms",
    type=SPAN,
    default="2m",
    show_default=True,
    help="Give up a record that is not acknowledged within this, such as 30s.",
)
@json_option
@bootstrap_option
def produce(
    topic: str,
    file: str,
    format_name: str | None,
    key_column: str | None,
    key: str | None,
    key_separator: str | None,
    headers: tuple[str, ...],
    from_line: int,
    partition: int | None,
    compression: str,
    acks: Literal["all", "leader", "none"],
    delivery_ms: float,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Sends the records of FILE (default: standard input) to TOPIC.

    Every record is stored once, and in order per partition, whatever fails on the way. An error or Ctrl-C
    says how far it got.

    \b
    Examples:
      echo hello | smq produce greetings
      smq produce users --key-separator : < users.txt
      smq produce events events.csv --key-column user --header source=import
    """
    shape = Shape(
        format_name=format_of(file, format_name),
        key_column=key_column,
        key=None if key is None else key.encode(errors="surrogateescape"),
        key_separator=None if key_separator is None else key_separator.encode(errors="surrogateescape"),
        headers=parse_headers(headers),
        from_line=from_line,
    )
    fd = sys.stdin.fileno() if file == "-" else os.open(file, os.O_RDONLY)
    source = LineSource(fd, "standard input" if file == "-" else file)
    chunks = _ChunkReader(source, shape)
    sending: list[_Sending] = []

    async def work() -> int:
        answered()  # `Waiting` says the reasons
        producer = Producer(
            bootstrap,
            acks=acks,
            compression=compression,
            delivery_timeout_ms=delivery_ms,
            request_timeout_ms=min(delivery_ms, REQUEST_TIMEOUT_MS),
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
        )
        with _progress(fd, source, producer):
            async with producer:
                sending.append(_Sending(producer, topic, chunks, partition))
                await sending[0].run()
        if not producer.stats.records_acked:
            await _check_topic(bootstrap, topic)  # no record was sent, so nothing has checked the topic yet
        return producer.stats.records_acked

    try:
        count = run(work(), bootstrap)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {sending[0].progress()}" if sending else "interrupted: sent nothing") from None
    except InputError as e:
        raise InputError(f"{e}; {sending[0].progress()} once it is correct" if sending else str(e)) from e
    except SmqError as e:
        raise SmqError(e.code, f"{e.message}; {sending[0].progress()}", e.details) if sending else e from e
    finally:
        if file != "-":
            os.close(fd)
    if as_json:
        click.echo(json.dumps({"topic": topic, "stored": count}))
    else:
        click.echo(f"stored {counted(count, 'record')} in {topic}", err=True)


async def _check_topic(bootstrap: str, topic: str) -> None:
    async with open_admin(bootstrap) as admin:
        await admin.describe_topic(topic)


class _Sending:
    """One run of the command: what was sent, and how far it is stored."""

    def __init__(self, producer: Producer, topic: str, chunks: "_ChunkReader", partition: int | None) -> None:
        self._producer = producer
        self._topic = topic
        self._chunks = chunks
        self._partition = partition
        self._unsettled: deque[_Sent] = deque()  # bounded by DELIVERIES_MAX
        self._stored_line = chunks.from_line - 1  # every record up to this line is stored
        self._stored_count = 0  # of those

    async def run(self) -> None:
        try:
            async for chunk, line in self._chunks.read():
                sent = _Sent(line, len(chunk))
                self._unsettled.append(sent)
                await self._send(chunk, sent.deliveries)
                sent.is_complete = True
                while len(self._unsettled) > DELIVERIES_MAX:
                    await self._settle_one()
        except InputError:
            await self._settle_all()
            raise
        await self._settle_all()

    async def _send(self, chunk: list[InputRecord], deliveries: list[Delivery]) -> None:
        producer, topic, partition = self._producer, self._topic, self._partition
        if any(r.headers or r.timestamp_ms is not None for r in chunk):
            for r in chunk:
                await producer.wait_room()
                deliveries.append(producer.send(topic, r.value, r.key, r.headers, partition, r.timestamp_ms))
        else:
            keys = [r.key for r in chunk] if any(r.key is not None for r in chunk) else None
            deliveries.append(await producer.send_many(topic, [r.value for r in chunk], keys=keys, partition=partition))

    async def _settle_all(self) -> None:
        await self._producer.flush()
        while self._unsettled:
            await self._settle_one()

    async def _settle_one(self) -> None:
        for delivery in self._unsettled[0].deliveries:
            await delivery
        self._note_stored()

    def _note_stored(self) -> None:
        sent = self._unsettled.popleft()
        self._stored_line, self._stored_count = sent.line, self._stored_count + sent.count

    def progress(self) -> str:
        """For a person whose command has ended early: what is stored, and how to go on."""
        while self._unsettled and self._unsettled[0].is_stored():
            self._note_stored()
        others = [
            sent.is_uncertain() for sent in self._unsettled
        ]  # of all: asyncio reports an error that is not looked at
        acked = self._producer.stats.records_acked
        later = acked - self._stored_count
        text = f"stored {counted(acked, 'record')} in {self._topic}"
        if not acked and not any(others):
            return text
        if self._stored_count:
            text += f", all up to line {self._stored_line:,}" + (f" and {later:,} of later lines" if later else "")
        text += "; others may be stored, too" if any(others) else ""
        again = ", and some again" if later or any(others) else ""
        return f"{text}. `--from-line {self._stored_line + 1}` sends the rest{again}"


@dataclass(slots=True)
class _Sent:
    """A chunk."""

    line: int  # its last
    count: int  # of records
    deliveries: list[Delivery] = field(default_factory=list)
    is_complete: bool = False  # none of its records is still to be sent

    def is_stored(self) -> bool:
        ends = (d.done() and not d.cancelled() and d.exception() is None for d in self.deliveries)
        return self.is_complete and all(ends)

    def is_uncertain(self) -> bool:
        """Whether a record may be stored although no acknowledgement of it came."""
        ended = [d.exception() for d in self.deliveries if d.done() and not d.cancelled()]
        is_open = any(not d.done() or d.cancelled() for d in self.deliveries)
        return is_open or any(isinstance(e, SmqError) and not e.code.is_definite for e in ended)


class _ChunkReader:
    """Reads and parses in its own thread, so that neither a slow pipe nor a large file blocks the event loop."""

    def __init__(self, source: LineSource, shape: Shape) -> None:
        self.from_line = shape.from_line
        self._source = source
        self._shape = shape

    async def read(self) -> AsyncIterator[tuple[list[InputRecord], int]]:
        """Chunks, each with the number of its last line."""
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        room = threading.Semaphore(CHUNKS_AHEAD)  # bounds the queue
        loop = asyncio.get_running_loop()

        def put(item: _Item) -> None:
            room.acquire()
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def work() -> None:
            try:
                try:
                    for item in read_records(self._source, self._shape):
                        put(item)
                    put(None)
                except (InputError, OSError) as e:
                    put(e)
            except RuntimeError:
                pass  # the command ended before its input did

        # A daemon thread: a read from a terminal cannot be interrupted, and must not keep the process alive.
        threading.Thread(target=work, name="smq-produce-input", daemon=True).start()
        while True:
            item = await queue.get()
            room.release()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item if isinstance(item, InputError) else InputError(f"{self._source.name}: {item}")
            yield item


@contextmanager
def _progress(fd: int, source: LineSource, producer: Producer) -> Iterator[None]:
    """Standard error gets a line for what the command waits for and, if it is a terminal, a bar: bytes read of the
    file, and records acknowledged."""
    with _bar(fd) if _has_bar(fd) else nullcontext(_NO_BAR) as bar:
        waiting = Waiting(bar.say)

        def look() -> None:
            waiting.look(producer.waits_for, producer.stats.records_acked, time.monotonic())

        async def watch() -> None:
            while True:
                look()
                bar.update(source.bytes_read, producer.stats.records_acked)
                await asyncio.sleep(PROGRESS_INTERVAL_S)

        watcher = asyncio.create_task(watch())
        try:
            yield
            look()  # the last wait may have ended since
        finally:
            watcher.cancel()


class _Bar(NamedTuple):
    say: Callable[[str], None]  # a line
    update: Callable[[int, int], None]  # bytes read, records acknowledged


_NO_BAR: Final = _Bar(lambda line: click.echo(line, err=True), lambda _read, _acked: None)


def _has_bar(fd: int) -> bool:
    """Not if standard error is no terminal, or if the user types the records."""
    return sys.stderr.isatty() and not (fd == sys.stdin.fileno() and sys.stdin.isatty())


@contextmanager
def _bar(fd: int) -> Iterator[_Bar]:
    from rich.console import Console  # slow to import, and most calls show no bar
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    about = os.fstat(fd)
    total = about.st_size if stat.S_ISREG(about.st_mode) else None
    columns = (
        TextColumn("{task.percentage:>3.0f}%") if total else TextColumn("reading"),
        BarColumn(),
        TextColumn("{task.fields[acked]:,} records stored"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("produce", total=total, acked=0)
        yield _Bar(
            lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            lambda read, acked: progress.update(task, completed=read, acked=acked),
        )
