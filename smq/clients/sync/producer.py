"""The blocking producer: records are handed to the event loop in batches, and each send() gives a handle.

Owns the hand-over between the caller's thread and the loop, and its bound. A send() costs no future and no wake-up of
the loop while records are already waiting. Users import it through `smq.clients`.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Unpack

from smq.clients.arguments import Instant
from smq.clients.metadata import Servers
from smq.clients.producer import Producer, ProducerOptions, ProducerStats
from smq.clients.producing.delivery import BatchMetadata, Delivery, Intercepted, Settled, fail_token
from smq.clients.producing.outgoing import ProducerRecord, checked_record
from smq.clients.sync.background_loop import BlockingClient, documented_as
from smq.clients.types import CommittedOffset, GroupMembership, TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import Headers

HANDED_RECORDS_MAX: Final = 5_000  # handed over and not taken by the loop: about 20 ms of its work
HANDED_BYTES_MAX: Final = 4 << 20  # beside the producer's own buffer
EXIT_TIMEOUT_S: Final = 30.0  # an election takes a second or two; close() waits longer
EXIT_SILENCE_S: Final = 2.0  # then it says what it waits for
WAITING: Final = "waiting for the acknowledgement of %d records, at most %.0f s (Ctrl-C gives them up)"
LOST: Final = (
    "%d records were not acknowledged when the program ended, and may be lost: call close(), "
    "or use `with SyncProducer(...)`, which wait as long as `delivery_timeout_ms`"
)
TAKEN_AT_ONCE: Final = 500  # then the loop turns to answers: about 2 ms

log = logging.getLogger(__name__)

_Record = tuple[str, bytes | None, bytes | None, Headers, int | None, int, Delivery | Intercepted]


@documented_as(Producer)
class SyncProducer(BlockingClient):
    """`with SyncProducer("host:port") as p: p.send("t", b"v").result()`. Options as Producer's."""

    def __init__(self, bootstrap: Servers | None = None, **options: Unpack[ProducerOptions]) -> None:
        super().__init__()
        self._settled = Settled()
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._handed: list[_Record] = []  # bounded by HANDED_RECORDS_MAX and HANDED_BYTES_MAX
        self._handed_bytes = 0
        self._taking_count = 0  # of records that the taker holds
        self._has_taker = False  # then it looks at what is handed over before it ends
        self._is_closed = False
        self._run(self._make(bootstrap, options))
        # A reference to the producer, too: one that its program has dropped still has records to deliver.
        self._runner.before_stop[self._leave] = None

    async def _make(self, bootstrap: Servers | None, options: ProducerOptions) -> None:
        self._taker: asyncio.Task[None] | None = None
        self._producer = Producer(bootstrap, **options)
        await self._producer.__aenter__()

    @property
    def stats(self) -> ProducerStats:
        """Counters since the start."""
        return self._producer.stats

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: Instant | None = None,
    ) -> Delivery:
        """Takes the record and returns immediately; waits only while the producer's buffer is full. `timestamp_ms`: its
        create time, now if it is None. INVALID_REQUEST names a wrong argument.

        The Delivery's `result()` waits for the acknowledgement and gives its RecordMetadata, or raises the SmqError
        that ended it. A record whose Delivery is dropped is delivered all the same: flush() or close() waits for it,
        and `stats.records_failed` counts failures."""
        when, headers, size = checked_record(topic, value, key, headers, partition, timestamp_ms)
        delivery = Delivery(self._settled)
        self._settled.check_owner()
        chain = self._producer.interceptors
        if chain is None:
            self._hand_over((topic, value, key, headers, partition, when, delivery), size)
        else:
            record, token = chain.begin(ProducerRecord(topic, value, key, headers, partition, when), delivery)
            try:
                self._hand_over((*record, token), len(record.value or b"") + len(record.key or b""))
            except SmqError as e:
                token.failed(e)  # each record that on_send has seen has one outcome
                raise
        return delivery

    def _hand_over(self, record: _Record, size: int) -> None:
        with self._lock:
            while len(self._handed) >= HANDED_RECORDS_MAX or self._handed_bytes >= HANDED_BYTES_MAX:
                if not self._has_taker:  # after Ctrl-C in the send of the record before: nothing else would make room
                    self._call_taker()
                self._has_room.wait()
            if self._is_closed:
                raise SmqError(ErrorCode.CLIENT_CLOSED, "the producer is closed")
            self._handed.append(record)
            self._handed_bytes += size
            if not self._has_taker:
                self._call_taker()

    def _call_taker(self) -> None:
        self._runner.loop.call_soon_threadsafe(self._taking)
        self._has_taker = True  # not before: Ctrl-C may come in between, and then the next record asks again

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: Instant | Sequence[Instant] | None = None,
    ) -> list[BatchMetadata]:
        """Sends all and waits until all are acknowledged. Returns where they are, one BatchMetadata per run.
        `timestamp_ms`: the create time of all, or one for each. INVALID_REQUEST names a wrong argument, before any
        record is sent; UNKNOWN_TOPIC. Otherwise raises the first record's error after all are settled."""

        async def work() -> list[BatchMetadata]:
            await self._take_all()
            delivery = await self._producer.send_many(
                topic, values, keys=keys, partition=partition, timestamp_ms=timestamp_ms
            )
            return await delivery

        return self._run(work())

    def flush(self) -> None:
        """Waits until every record sent before is acknowledged or failed. Errors are in the records' Deliveries;
        CLIENT_CLOSED is raised here."""

        async def work() -> None:
            await self._take_all()
            await self._producer.flush()

        self._run(work())

    def begin(self) -> None:
        async def work() -> None:
            await self._take_all()  # what was sent before is no part of it
            self._producer.begin()

        self._run(work())

    def send_offsets(
        self, group: str | GroupMembership, offsets: Mapping[TopicPartition, int | CommittedOffset]
    ) -> None:
        self._run(self._producer.send_offsets(group, offsets))

    def commit(self) -> None:
        async def work() -> None:
            await self._take_all()
            await self._producer.commit()

        self._run(work())

    def abort(self) -> None:
        async def work() -> None:
            await self._take_all()
            await self._producer.abort()

        self._run(work())

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """`with producer.transaction(): ...` commits at the end of the block, and aborts if it raises. Raises what
        begin() and commit() raise, such as INVALID_TRANSACTION_STATE."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:  # also on Ctrl-C: an open transaction holds every committed reader back
            with contextlib.suppress(SmqError):  # the error of the block is the one to see
                self.abort()
            raise

    def close(self) -> None:
        """Delivers everything sent so far, within `delivery_timeout_ms`; what is not acknowledged by then fails. A
        transaction that is still open is aborted. Then every call raises CLIENT_CLOSED."""

        with self._lock:
            self._is_closed = True
        self._run(self._close())
        self._runner.before_stop.pop(self._leave, None)

    async def _close(self) -> None:
        await self._take_all()
        await self._producer.close()

    def _leave(self) -> None:
        """At the interpreter's exit, for a producer that was not closed."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(KeyboardInterrupt):  # of someone who does not want to wait
            self._run(self._close_in_time())

    async def _close_in_time(self) -> None:
        stats, producer = self._producer.stats, self._producer
        count, acked = len(self._handed) + self._taking_count + producer.unsettled, stats.records_acked
        hint = self._runner.loop.call_later(EXIT_SILENCE_S, log.warning, WAITING, count, EXIT_TIMEOUT_S)
        try:
            with contextlib.suppress(TimeoutError, SmqError):
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self._close()
        finally:
            hint.cancel()
            lost = count - (stats.records_acked - acked)
            if lost > 0:
                log.warning(LOST, lost)

    # -- on the loop

    def _taking(self) -> asyncio.Task[None]:
        """One task takes, so that records keep their order."""
        if self._taker is None or self._taker.done():
            self._taker = asyncio.create_task(self._take_handed())
        return self._taker

    async def _take_all(self) -> None:
        """Returns once everything that was handed over before is taken. Ctrl-C ends the wait, but not the task, which
        holds records that are in no list any more."""
        await asyncio.shield(self._taking())

    async def _take_handed(self) -> None:
        """Moves everything that was handed over into the producer's buffer, waiting while that is full."""
        try:
            while records := self._next_handed():
                for start in range(0, len(records), TAKEN_AT_ONCE):
                    await self._take(records[start : start + TAKEN_AT_ONCE])
                    await asyncio.sleep(0)
        finally:
            self._has_taker = False  # if a send() has called one meanwhile, the next call is one too many: no harm

    def _next_handed(self) -> list[_Record]:
        with self._lock:
            records, self._handed, self._handed_bytes = self._handed, [], 0
            self._has_taker, self._taking_count = bool(records), len(records)
            self._has_room.notify_all()
        return records

    async def _take(self, records: Sequence[_Record]) -> None:
        producer = self._producer
        for topic, value, key, headers, partition, when, token in records:
            if producer.is_full:
                await producer.wait_room()
            try:
                producer.take(topic, value, key, headers, partition, when, token)
            except SmqError as e:
                producer.refused(e)
                fail_token(token, 1, e)
            self._taking_count -= 1
