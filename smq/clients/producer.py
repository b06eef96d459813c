"""The asyncio producer: takes records, returns futures of their offsets.

Owns the public interface and the way of records into the accumulator. `publisher` sends and handles answers;
`accumulator` and `retry` decide which batch goes when, and what an error means. Users and `sync` import it.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Literal, TypeAlias, TypedDict

from smq.clients.arguments import (
    INT32_MAX,
    Duration,
    Instant,
    check_choice,
    check_flag,
    check_int,
    check_name,
    invalid,
    milliseconds,
)
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.forked import check_owner
from smq.clients.interceptors import ProducerChain, ProducerInterceptor
from smq.clients.login import Login
from smq.clients.metadata import Servers
from smq.clients.pb import smq_pb2 as pb
from smq.clients.producing.accumulator import IN_FLIGHT_MAX, BatchingSettings
from smq.clients.producing.delivery import BatchMetadata as BatchMetadata
from smq.clients.producing.delivery import BulkDelivery, Delivery, FlushMark, Intercepted, is_over
from smq.clients.producing.delivery import RecordMetadata as RecordMetadata
from smq.clients.producing.outgoing import ProducerRecord, checked_record, checked_times
from smq.clients.producing.partition_queue import PartitionQueue
from smq.clients.producing.partitioner import TopicQueues
from smq.clients.producing.producer_transactions import CLOSE_TIMEOUT_S, TRANSACTION_TIMEOUT_MS, Phase, Transactions
from smq.clients.producing.publisher import PRODUCER_BACKOFF, Publisher
from smq.clients.producing.publisher import ProducerStats as ProducerStats
from smq.clients.retry import RandomFn
from smq.clients.tls import Tls
from smq.clients.types import CommittedOffset, GroupMembership, TopicPartition
from smq.raft_state.errors import ErrorCode, ProducerFenced, SmqError
from smq.records import CODECS, Headers

AcksName: TypeAlias = Literal["all", "leader", "none"]
_ACKS: Final = {"all": pb.ACKS_ALL, "leader": pb.ACKS_LEADER, "none": pb.ACKS_NONE}

YIELD_EVERY_RECORDS: Final = 4096  # send_many lets the event loop run this often (about 1 ms)


class ProducerOptions(TypedDict, total=False):
    """The options of Producer, for its blocking version."""

    servers: Servers | None
    acks: AcksName
    linger_ms: Duration
    batch_bytes: int
    compression: str
    idempotent: bool
    request_timeout_ms: Duration
    delivery_timeout_ms: Duration
    max_in_flight: int
    transactional_id: str | None
    transaction_timeout_ms: Duration
    buffer_bytes: int
    connect_timeout_ms: Duration
    tls: Tls | None
    login: Login | None
    interceptors: Iterable[ProducerInterceptor]
    random_source: RandomFn


class Producer:
    """`async with Producer("host:port") as p: await p.send("topic", b"value")`.

    send() returns a future immediately; it is cheap, and fails with OVERLOADED while the buffer is full (await
    wait_room()). send_many() is the fast way for many records. A record waits up to `linger_ms` for others to share its
    batch, but only while batches are in flight: an idle producer sends immediately. With `idempotent` (the default)
    every record is stored once and in order, whatever fails; without it a retry may store records twice. `acks="none"`
    implies idempotent=False. `batch_bytes` bounds a batch before compression, `buffer_bytes` all records that wait.

    `delivery_timeout_ms` bounds all attempts for a record together, `request_timeout_ms` one attempt, and
    `connect_timeout_ms` start(). A record that is not acknowledged by then fails with its last refusal, or with
    TIMED_OUT if it may have been stored; UNKNOWN_TOPIC, BATCH_TOO_LARGE and other final errors end it earlier.
    After PRODUCER_FENCED every call raises it.

    With a `transactional_id` every record is part of a transaction: `async with producer.transaction(): ...`, or
    begin(), commit() and abort(). Readers get all of its records or none. start() fences other producers of the id. The
    cluster aborts a transaction that is open for longer than `transaction_timeout_ms`.

    `interceptors` see every record before it is sent and learn its outcome, in this order: see ProducerInterceptor.
    """

    def __init__(
        self,
        bootstrap: Servers | None = None,
        *,
        servers: Servers | None = None,
        acks: AcksName = "all",
        linger_ms: Duration = 5.0,
        batch_bytes: int = 128 << 10,
        compression: str = "none",
        idempotent: bool = True,
        request_timeout_ms: Duration = 30_000.0,
        delivery_timeout_ms: Duration = 120_000.0,
        max_in_flight: int = IN_FLIGHT_MAX,
        transactional_id: str | None = None,
        transaction_timeout_ms: Duration = TRANSACTION_TIMEOUT_MS,
        buffer_bytes: int = 32 << 20,
        connect_timeout_ms: Duration = 10_000.0,
        tls: Tls | None = None,
        login: Login | None = None,
        interceptors: Iterable[ProducerInterceptor] = (),
        random_source: RandomFn = random.random,
    ) -> None:
        check_choice("acks", acks, _ACKS)
        check_choice("compression", compression, CODECS)
        check_flag("idempotent", idempotent)
        check_int("batch_bytes", batch_bytes, 1, INT32_MAX)
        check_int("buffer_bytes", buffer_bytes, 1)
        check_int("max_in_flight", max_in_flight, 1, IN_FLIGHT_MAX)  # a leader remembers so many batches
        linger, delivery = milliseconds("linger_ms", linger_ms, lo=0), _delivery_ms(delivery_timeout_ms, linger_ms)
        idempotent = idempotent and acks != "none"
        # Without sequences, a resent batch keeps its place only if one batch is in flight at a time.
        in_flight_max = max_in_flight if idempotent or acks == "none" else 1
        self._request_timeout_ms = milliseconds("request_timeout_ms", request_timeout_ms)
        self._interceptors = ProducerChain.of(interceptors)
        self._cluster = ClusterClient(
            bootstrap,
            servers=servers,
            connect_timeout_ms=connect_timeout_ms,
            random_source=random_source,
            tls=tls,
            login=login,
        )
        self._transactions: Transactions | None = None
        if transactional_id is not None:
            check_name("transactional_id", transactional_id)
            if not idempotent or acks != "all":
                raise invalid("a transactional_id needs acks='all' and idempotent=True: leave both out")
            timeout_ms = milliseconds("transaction_timeout_ms", transaction_timeout_ms)
            self._transactions = Transactions(self._cluster, transactional_id, timeout_ms, self._request_timeout_ms)
        settings = BatchingSettings(
            batch_bytes=batch_bytes,
            linger_ms=linger,
            compression=compression,
            buffer_bytes_max=buffer_bytes,
            in_flight_max=in_flight_max,
            delivery_timeout_ms=delivery,
            is_idempotent=idempotent,
            acks_all=acks == "all",
            is_transactional=transactional_id is not None,
            backoff=PRODUCER_BACKOFF,
        )
        self._publisher = Publisher(
            self._cluster,
            settings,
            acks=_ACKS[acks],
            request_timeout_ms=self._request_timeout_ms,
            transactions=self._transactions,
        )
        self._accumulator = self._publisher.accumulator
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    # -- life

    async def start(self) -> None:
        """Finds the cluster, within `connect_timeout_ms`. Fences other producers of the id. UNREACHABLE,
        INVALID_TRANSACTION_TIMEOUT. `async with` calls it."""
        self._loop = asyncio.get_running_loop()
        self._publisher.start()
        await self._cluster.start()
        if self._transactions is not None:
            await self._transactions.start()

    async def __aenter__(self) -> "Producer":
        try:
            await self.start()
        except BaseException:  # cancellation included: __aexit__ is not called if __aenter__ fails
            await self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancelled user (Ctrl-C) does not want to wait for a cluster that may be down.
        await self.close(deliver=kind is None or not issubclass(kind, asyncio.CancelledError))

    async def close(self, *, deliver: bool = True) -> None:
        """With `deliver`, first delivers all records sent so far (within `delivery_timeout_ms`). Then releases
        everything: records that were not sent fail with SHUTTING_DOWN, those under way with TIMED_OUT. A transaction
        that is still open is aborted. Every later call raises CLIENT_CLOSED."""
        check_flag("deliver", deliver)
        if self._publisher.is_closing:
            return
        try:
            if self._transactions is not None:
                await self._leave_transaction(self._transactions)
            elif deliver and self._loop is not None:
                await self.flush()
        finally:
            await self._publisher.close()
            await self._release()

    async def _release(self) -> None:
        await self._cluster.close()
        if self._interceptors is not None:
            self._interceptors.close()

    @property
    def interceptors(self) -> ProducerChain | None:
        """None if there are none. For the blocking producer."""
        return self._interceptors

    @property
    def stats(self) -> ProducerStats:
        """Counters since the start."""
        return self._publisher.stats

    @property
    def waits_for(self) -> str | None:
        """In words for a person: what start() waits for, then what the oldest records do. None if nothing waits."""
        return self._publisher.waits_for()

    @property
    def unsettled(self) -> int:
        """The number of records that are neither acknowledged nor failed. For the blocking producer."""
        return self._accumulator.unsettled()

    @property
    def is_full(self) -> bool:
        """Whether `send` would raise OVERLOADED now."""
        return self._accumulator.is_full

    # -- records

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: Instant | None = None,
    ) -> "asyncio.Future[RecordMetadata]":
        """Takes the record. The future gives its offset once it is acknowledged, or the SmqError that ended it.

        `timestamp_ms`: its create time, now if it is None. Raised here: OVERLOADED while the buffer is full (`await
        wait_room()` and send again), INVALID_REQUEST for a wrong argument, and, with a `transactional_id`,
        INVALID_TRANSACTION_STATE unless a transaction is open: not before begin(), and not from commit() or abort() on.
        """
        when, headers, _ = checked_record(topic, value, key, headers, partition, timestamp_ms)
        token: asyncio.Future[RecordMetadata] = self._usable().create_future()
        if self._interceptors is None:
            self.take(topic, value, key, headers, partition, when, token)
        else:
            record = ProducerRecord(topic, value, key, headers, partition, when)
            self._take_watched(*self._interceptors.begin(record, token))
        return token

    def _take_watched(self, record: ProducerRecord, token: Intercepted, transaction: int | None = None) -> None:
        try:
            self.take(*record, token, transaction)
        except SmqError as e:
            token.failed(e)  # each record that on_send has seen has one outcome
            raise

    def take(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int,
        token: "asyncio.Future[RecordMetadata] | Delivery | Intercepted",
        transaction: int | None = None,
    ) -> None:
        """As send() of a `checked_record` created at `timestamp_ms`, with the caller's own token. `transaction`: the
        number of the one that the record is part of, if that was open before. For the blocking producer."""
        self._usable()
        if self._transactions is not None:
            self._transactions.check_open(transaction)
        accumulator = self._accumulator
        accumulator.add(self._topic(topic), key, value, headers, partition, timestamp_ms, token, now_ms())
        if accumulator.needs_poll:
            self._publisher.wake()

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: Instant | Sequence[Instant] | None = None,
    ) -> "asyncio.Future[list[BatchMetadata]]":
        """The bulk path. Returns once all records are buffered (waiting for space if necessary), with a future of
        their offsets: one BatchMetadata per run of adjacent records. Records of one partition keep their order. The
        future fails with the first error once all records are settled. `timestamp_ms`: the create time of all, or one
        for each. INVALID_REQUEST names a wrong argument, before any record is buffered; UNKNOWN_TOPIC. Without an open
        transaction, as send(); a commit() waits until all are buffered, and an abort() refuses the rest."""
        loop = self._usable()
        with self._taking() as transaction:
            when = checked_times(values, keys, timestamp_ms)
            if partition is not None:
                check_int("partition", partition, 0, INT32_MAX)
            queues = await self._known_topic(topic)
            bulk = BulkDelivery(loop.create_future(), len(values), transaction)
            try:
                if self._interceptors is not None:
                    await self._add_watched(self._interceptors, topic, values, keys, when, partition, bulk)
                elif keys is None:
                    await self._add_unkeyed(queues, values, when, partition, bulk)
                else:
                    await self._add_keyed(queues, values, keys, when, partition, bulk)
            except SmqError as e:
                bulk.refused(e)
                raise
        return bulk.future

    def _taking(self) -> contextlib.AbstractContextManager[int | None]:
        return contextlib.nullcontext() if self._transactions is None else self._transactions.taking()

    async def _add_watched(
        self,
        chain: ProducerChain,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        when: int | Sequence[int],
        partition: int | None,
        bulk: BulkDelivery,
    ) -> None:
        """Record by record, as interceptors see them. They may send one elsewhere."""
        for index, value in enumerate(values):
            if self._accumulator.is_full:
                await self.wait_room()
            elif index % YIELD_EVERY_RECORDS == YIELD_EVERY_RECORDS - 1:
                await asyncio.sleep(0)
            key, created = None if keys is None else keys[index], when if isinstance(when, int) else when[index]
            record = ProducerRecord(topic, value, key, (), partition, created)
            self._take_watched(*chain.begin(record, bulk), bulk.transaction)

    async def _add_unkeyed(
        self,
        topic: TopicQueues,
        values: Sequence[bytes | None],
        when: int | Sequence[int],
        partition: int | None,
        bulk: BulkDelivery,
    ) -> None:
        taken = 0
        while taken < len(values):
            queue = topic.sticky() if partition is None else topic.explicit(partition)
            taken += await self._add_some(queue, None, values, when, taken, bulk)

    async def _add_keyed(
        self,
        topic: TopicQueues,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None],
        when: int | Sequence[int],
        partition: int | None,
        bulk: BulkDelivery,
    ) -> None:
        for start in range(0, len(values), YIELD_EVERY_RECORDS):
            groups: dict[PartitionQueue, list[int]] = {}
            fixed = None if partition is None else topic.explicit(partition)
            for index in range(start, min(start + YIELD_EVERY_RECORDS, len(values))):
                key = keys[index]
                queue = fixed or (topic.sticky() if key is None else topic.for_key(key))
                groups.setdefault(queue, []).append(index)
            for queue, indexes in groups.items():
                some_keys, some_values = [keys[i] for i in indexes], [values[i] for i in indexes]
                times = when if isinstance(when, int) else [when[i] for i in indexes]
                taken = 0
                while taken < len(indexes):
                    taken += await self._add_some(queue, some_keys, some_values, times, taken, bulk)

    async def _add_some(
        self,
        queue: PartitionQueue,
        keys: Sequence[bytes | None] | None,
        values: Sequence[bytes | None],
        when: int | Sequence[int],
        start: int,
        bulk: BulkDelivery,
    ) -> int:
        """Fills at most one batch; returns how many records it took."""
        await self.wait_room()
        self._usable()
        if self._transactions is not None and bulk.transaction is not None:
            self._transactions.check_same(bulk.transaction)
        taken = self._accumulator.add_run(queue, keys, values, when, start, YIELD_EVERY_RECORDS, bulk, now_ms())
        if self._accumulator.needs_poll:
            self._publisher.wake()
        await asyncio.sleep(0)
        return taken

    async def wait_room(self) -> None:
        """Waits until the buffer has space for at least one record, which send() then takes without OVERLOADED. Returns
        also once the producer is closed."""
        while self._accumulator.is_full and not self._publisher.is_closing:
            self._publisher.not_full.clear()
            await self._publisher.not_full.wait()

    async def flush(self) -> None:
        """Waits until every record sent before is acknowledged or failed. Errors are in the records' own futures;
        CLIENT_CLOSED is raised here."""
        loop = self._usable(even_if_fatal=True)
        records, batches = self._accumulator.waiting(), self._accumulator.mark_due()
        self._publisher.wake()
        if records or batches:
            # A mark of its own: a sender's future may be cancelled long before its record is settled.
            mark = FlushMark(loop.create_future(), len(records) + len(batches))
            for record in records:
                record.marks = (*(old for old in record.marks if not is_over(old)), mark)
            for batch in batches:
                while is_over(batch.tokens[-1][2]):
                    batch.tokens.pop()
                batch.tokens.append((0, 0, mark))
            await mark.ended

    # -- transactions

    def begin(self) -> None:
        """Opens a transaction. INVALID_TRANSACTION_STATE if one is open; INVALID_REQUEST without a transactional_id."""
        self._usable()
        self._transactional().begin()

    async def send_offsets(
        self, group: str | GroupMembership, offsets: Mapping[TopicPartition, int | CommittedOffset]
    ) -> None:
        """The group's next offsets, committed with the transaction: what is read is done once what is written is. With
        a subscribed consumer's `membership()` in place of the group's name, they are refused if the group has gone on
        without that member: UNKNOWN_MEMBER, ILLEGAL_GENERATION, FENCED_INSTANCE. INVALID_TRANSACTION_STATE if none is
        open, UNKNOWN_TOPIC, UNKNOWN_PARTITION, INVALID_OFFSET; after any error the transaction must be aborted."""
        self._usable()
        transactions = self._transactional()
        with transactions.taking():
            await transactions.stage_offsets(group, offsets)

    async def commit(self) -> None:
        """Returns once all records are stored and the decision is made; no more are taken meanwhile. Raises the error
        of the first record that was not stored: then nothing is committed, and the transaction must be aborted. After
        an error that is not definite it is open whether it was committed: commit() again says so. Until then, and
        after a commit() that was cancelled, it takes no records. INVALID_TRANSACTION_STATE if none has begun, or it is
        being aborted; PRODUCER_FENCED if the cluster has aborted it or another producer has the id."""
        self._usable()
        transactions = self._transactional()
        number = transactions.begin_commit()
        await transactions.all_taken()
        await self.flush()  # without the lock: an abort() ends this wait
        async with transactions.deciding:
            self._usable()  # another call may have learned that it is fenced
            if transactions.has_committed(number):
                return  # by another call
            transactions.check_same(number)
            if self._accumulator.failure is not None:
                transactions.fail(self._accumulator.failure)  # the publisher reports it in the loop's next turn
            if transactions.failure is not None:
                raise transactions.failure
            await transactions.commit()
            self._accumulator.end_transaction()

    async def abort(self) -> None:
        """Records that are not stored yet fail, no more are taken, and no reader gets the others. If it fails or is
        cancelled, nothing but abort() is allowed: call it again. INVALID_TRANSACTION_STATE if the transaction has been
        committed (by another task, or by a commit() before that had no answer), or none has begun. PRODUCER_FENCED if
        another producer has the id: then every later call says so."""
        self._usable()
        transactions = self._transactional()
        number = transactions.begin_abort()
        async with transactions.deciding:
            self._usable()
            if not transactions.has_ended(number):
                await self._publisher.drop_transaction(_aborted())
                try:
                    await transactions.abort()
                except ProducerFenced as e:
                    self._publisher.fatal = e  # it gets no further epoch, however often it asks
                    raise
                self._accumulator.end_transaction()
            if transactions.has_committed(number):
                message = "the transaction has been committed, by another call or by a commit() that had no answer"
                raise SmqError(ErrorCode.INVALID_TRANSACTION_STATE, message)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """`async with producer.transaction(): ...` commits at the end of the block, and aborts if it raises. Raises
        what begin() and commit() raise, such as INVALID_TRANSACTION_STATE: also if the last block's abort failed."""
        self.begin()
        try:
            yield
            await self.commit()
        except BaseException:  # also if it is cancelled: an open transaction holds every committed reader back
            if self._publisher.fatal is None:
                with contextlib.suppress(SmqError):  # the error of the block is the one to see
                    await self.abort()
            raise

    async def _leave_transaction(self, transactions: Transactions) -> None:
        if transactions.phase is Phase.NONE or self._loop is None:
            return
        transactions.begin_abort()
        await self._publisher.drop_transaction(_aborted())
        with contextlib.suppress(SmqError, TimeoutError):  # otherwise its time-out does it
            async with asyncio.timeout(CLOSE_TIMEOUT_S), transactions.deciding:
                await transactions.decide_abort()

    def refused(self, error: SmqError) -> None:
        """A record was refused without its sender's knowledge: a transaction must not be committed without it, unless
        its commit had begun before. For the blocking producer."""
        if self._transactions is not None and self._transactions.phase is Phase.OPEN:
            self._transactions.fail(error)

    def _transactional(self) -> Transactions:
        if self._transactions is None:
            raise invalid("the producer has no transactions: give it a transactional_id")
        return self._transactions

    def _usable(self, *, even_if_fatal: bool = False) -> asyncio.AbstractEventLoop:
        fatal = self._publisher.fatal
        if fatal is not None and not even_if_fatal:
            raise SmqError(fatal.code, fatal.message, fatal.details)
        if self._loop is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the producer is not started: await start() first")
        if self._publisher.is_closing:
            raise SmqError(ErrorCode.CLIENT_CLOSED, "the producer is closed")
        check_owner(self._pid)
        return self._loop

    def _topic(self, name: str) -> TopicQueues:
        topic = self._accumulator.topic(name)
        if not topic.queues:
            count = self._cluster.metadata.partition_count(name)
            if count:
                self._accumulator.set_partition_count(name, count)
        return topic

    async def _known_topic(self, name: str) -> TopicQueues:
        if not self._topic(name).queues:
            missing = await self._cluster.refresh((name,), timeout_ms=self._request_timeout_ms)
            if missing:
                raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {name!r}")
        return self._topic(name)


def _aborted() -> SmqError:
    return SmqError(ErrorCode.INVALID_TRANSACTION_STATE, "the transaction of the record was aborted")


def _delivery_ms(delivery_timeout_ms: Duration, linger_ms: Duration) -> float:
    delivery = milliseconds("delivery_timeout_ms", delivery_timeout_ms)
    if delivery <= milliseconds("linger_ms", linger_ms, lo=0):
        raise invalid(
            f"linger_ms must be below delivery_timeout_ms, and they are {linger_ms} and {delivery_timeout_ms}"
        )
    return delivery
