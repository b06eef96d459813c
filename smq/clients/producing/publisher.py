"""The sending side of the producer: sends every batch that is due, and handles every answer.

Owns the I/O around `accumulator`: one PublishRecord stream per node, the timer, metadata refreshes, producer ids.
`accumulator` and `retry` decide which batch goes when, and what an error means. Only `producer` imports it.
"""

import asyncio
import logging
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.errors import build, error_from_detail
from smq.clients.pb import smq_pb2 as pb
from smq.clients.producing.accumulator import Accumulator, BatchingSettings, Polled, ProducerIdentity
from smq.clients.producing.delivery import deliver, end_mark, fail, fail_token
from smq.clients.producing.partition_queue import Batch, PartitionQueue
from smq.clients.producing.producer_transactions import Phase, Transactions
from smq.clients.producing.publish_stream import PublishStream
from smq.clients.retry import Backoff, Verdict, needs_refresh
from smq.raft_state.errors import ErrorCode, SmqError

log = logging.getLogger(__name__)

_OF_THE_USER: Final = frozenset({ErrorCode.NOT_AUTHORIZED, ErrorCode.AUTHENTICATION_FAILED})  # waiting helps neither
# One refresh per 150 ms while a leader is missing: a failover takes half a second to three, so this adds little.
PRODUCER_BACKOFF: Final = Backoff(first_ms=10.0, max_ms=150.0)
# No answer for this long: ask the cluster whether the leader is still the leader. A node that hangs instead of dying
# keeps its connection. It is fenced after 1.5 s, and its batches need not wait for the request's timeout.
SLOW_ANSWER_MS: Final = 1_000.0
IDENTITY_TIMEOUT_MS: Final = 10_000.0


@dataclass(slots=True, kw_only=True)
class ProducerStats:
    """Counters since the start; `leader_changes` counts partitions whose leader became another node."""

    records_acked: int = 0
    records_failed: int = 0
    batches_acked: int = 0
    bytes_acked: int = 0
    duplicates: int = 0  # batches whose earlier attempt had been stored
    retries: int = 0  # batches sent again
    leader_changes: int = 0
    streams_broken: int = 0
    identity_resets: int = 0


class Publisher:
    """Runs on one event loop, from `start` to `close`. `wake` it whenever the accumulator needs a poll."""

    def __init__(
        self,
        cluster: ClusterClient,
        settings: BatchingSettings,
        *,
        acks: "pb.Acks.ValueType",
        request_timeout_ms: float,
        transactions: Transactions | None = None,
    ) -> None:
        self._transactions = transactions
        self.accumulator = Accumulator(settings, cluster.random)
        self.fatal: SmqError | None = None
        self.is_closing = False
        self.not_full = asyncio.Event()  # set whenever the buffer is not full
        self._cluster = cluster
        self._acks = acks
        self._request_timeout_ms = request_timeout_ms
        self._delivery_timeout_ms = settings.delivery_timeout_ms
        self._stats = ProducerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._not_closed: weakref.finalize[..., Publisher] | None = None
        self._streams: dict[str, PublishStream] = {}
        self._closing_streams: set[asyncio.Task[None]] = set()  # one per broken stream
        self._pump_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_attempts = 0
        self._slow_checked_ms = 0.0
        self._refresh_error: SmqError | None = None  # of the last look-up; None if it succeeded
        self._identity_task: asyncio.Task[None] | None = None
        self._identity_error: SmqError | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._not_closed = weakref.finalize(self, _warn_of_loss, self.accumulator, self._loop)

    async def close(self) -> None:
        """Undelivered records fail; those in flight fail with an indefinite error."""
        self.accumulator.fail_all(SmqError(ErrorCode.SHUTTING_DOWN, "the producer was closed before the send"))
        self._report(self.accumulator.poll(now_ms(), lambda _topic, _partition: None))
        self.is_closing = True
        if self._not_closed is not None:
            self._not_closed.detach()
        self.not_full.set()
        for handle in (self._pump_handle, self._timer):
            if handle is not None:
                handle.cancel()
        tasks = [t for t in (self._refresh_task, self._identity_task) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing_streams, return_exceptions=True)
        for stream in list(self._streams.values()):
            await stream.close()

    @property
    def stats(self) -> ProducerStats:
        self._stats.retries = self.accumulator.retries
        self._stats.identity_resets = self.accumulator.identity_resets
        self._stats.leader_changes = self._cluster.metadata.leader_changes
        return self._stats

    def waits_for(self) -> str | None:
        """What the producer waits for, with the last error on the way there; None if it is connected and no record
        waits."""
        if not self._cluster.metadata.cluster_id:
            return f"a node of the cluster at {', '.join(self._cluster.any_node())}"
        batch, topic = self.accumulator.oldest(), self.accumulator.unknown_topic()
        if topic is not None:
            return f"the partitions of topic {topic!r}{_because(self._refresh_error)}"
        if batch is None:
            return None
        where = f"{batch.topic}/{batch.partition}"
        if batch.in_flight:
            address = next((s.address for s in self._streams.values() if batch in s.unanswered()), "?")
            return f"the node at {address} to acknowledge records of {where}{_because(batch.last_error)}"
        if self._identity_task is not None:
            return f"a producer id{_because(self._identity_error)}"
        if self._cluster.metadata.leader_address(batch.topic, batch.partition) is None:
            return f"a leader of {where}{_because(self._refresh_error or batch.last_error)}"
        return f"the next attempt at {where}{_because(batch.last_error)}"

    def wake(self) -> None:
        if self._pump_handle is None and self._loop is not None and not self.is_closing:
            self._pump_handle = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        if self.is_closing:
            return
        accumulator, now = self.accumulator, now_ms()
        accumulator.needs_poll = False
        self._check_streams(now)
        polled = accumulator.poll(now, self._cluster.metadata.leader_address)
        for address, batch in polled.sends:
            self._stream(address).submit(batch, self._time_left(batch, now), now)
        self._report(polled)
        if self._transactions is not None and accumulator.failure is not None:
            self._fail_transaction(accumulator.failure)
        if polled.unrouted:
            self._request_refresh(polled.unrouted)
        else:
            self._refresh_attempts = 0
        if polled.need_identity:
            self._request_identity(polled.need_identity)
        self._set_timer(now)
        if not accumulator.is_full:
            self.not_full.set()

    def _check_streams(self, now: float) -> None:
        """Gives up streams that are overdue, or whose batches have another leader now."""
        slow: set[str] = set()
        for stream in list(self._streams.values()):
            deadline, sent = stream.deadline_ms(), stream.oldest_sent_ms()
            if deadline is None or sent is None:
                continue
            if deadline <= now:
                stream.give_up(SmqError(ErrorCode.TIMED_OUT, f"the node at {stream.address} gave no answer in time"))
            elif sent + SLOW_ANSWER_MS <= now:
                batches = stream.unanswered()
                leaders = [self._cluster.metadata.leader_address(b.topic, b.partition) for b in batches]
                if any(leader not in (None, stream.address) for leader in leaders):
                    message = f"the node at {stream.address} does not answer and is no longer the leader"
                    stream.give_up(SmqError(ErrorCode.TIMED_OUT, message))
                elif self._slow_checked_ms + SLOW_ANSWER_MS <= now:
                    slow |= {b.topic for b in batches}
                    self._cluster.metadata.node_failed(stream.address, now)  # ask another node
        if slow:
            self._slow_checked_ms = now
            self._request_refresh(slow)

    def _time_left(self, batch: Batch, now: float) -> float:
        return min(self._request_timeout_ms, max(batch.created_ms + self._delivery_timeout_ms - now, 1.0))

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [d for d in (s.deadline_ms() for s in self._streams.values()) if d is not None]
        sent = [t for t in (s.oldest_sent_ms() for s in self._streams.values()) if t is not None]
        times += [max(t, self._slow_checked_ms) + SLOW_ANSWER_MS for t in sent]
        wakeup = self.accumulator.next_wakeup_ms(now)
        due = min([*times, wakeup] if wakeup is not None else times, default=None)
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(due - now, 0.0) / 1000.0, self.wake)

    def _stream(self, address: str) -> PublishStream:
        found = self._streams.get(address)
        if found is None:
            node = self._cluster.channels.node(address)
            found = PublishStream(address, node, self._acks, self._answered, self._broken)
            self._streams[address] = found
        return found

    # -- answers

    def _answered(self, batch: Batch, answer: pb.PublishRecordResponse) -> None:
        if answer.HasField("error"):
            self._refused(batch, error_from_detail(answer.error))
        elif self.accumulator.acked(batch):
            stats = self._stats
            stats.records_acked += batch.count
            stats.batches_acked += 1
            stats.bytes_acked += len(batch.data)
            stats.duplicates += answer.duplicate
            deliver(batch, answer.base_offset, answer.ts_ns)
        self.wake()

    def _refused(self, batch: Batch, error: SmqError) -> None:
        metadata, details = self._cluster.metadata, error.details
        is_hinted = (
            error.code is ErrorCode.NOT_LEADER
            and details.leader is not None
            and metadata.hint(batch.topic, batch.partition, details.leader, details.leader_address)
        )
        if needs_refresh(error) and not is_hinted:
            metadata.suspect(batch.topic, batch.partition)
        if self.accumulator.refused(batch, error, now_ms()) is Verdict.FENCED:
            self.fatal = error
            self.accumulator.fail_all(error)
        self.wake()

    def _broken(self, stream: PublishStream, returned: list[tuple[Batch, SmqError]]) -> None:
        if self._streams.get(stream.address) is stream:
            del self._streams[stream.address]
        if self.is_closing:
            return
        self._stats.streams_broken += 1
        self._cluster.metadata.node_failed(stream.address, now_ms())
        self._cluster.metadata.suspect_node(stream.address)
        for batch, error in returned:
            self._refused(batch, error)
        closing = asyncio.ensure_future(stream.close())
        self._closing_streams.add(closing)
        closing.add_done_callback(self._closing_streams.discard)

    def _report(self, polled: Polled) -> None:
        for batch, error in polled.failed:
            self._stats.records_failed += batch.count
            fail(batch, error)
        for token, error in polled.failed_waiting:
            self._stats.records_failed += 1
            fail_token(token, 1, error)
        for mark in polled.ended_marks:
            end_mark(mark)

    # -- metadata and identity

    def _request_refresh(self, topics: Iterable[str]) -> None:
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._refresh(sorted(topics)))

    async def _refresh(self, topics: list[str]) -> None:
        """One refresh, after a pause that grows with each failure; the pump requests the next."""
        if self._refresh_attempts:
            pause_ms = PRODUCER_BACKOFF.delay_ms(self._refresh_attempts, self._cluster.random)
            await asyncio.sleep(pause_ms / 1000.0)
        self._refresh_attempts += 1
        try:
            missing = await self._cluster.refresh(topics)
            self._refresh_error = None
        except SmqError as e:
            self._refresh_error, missing = e, frozenset()  # repeated until the records' delivery timeout
            if e.code in _OF_THE_USER:
                await self._fail_refused(topics)
        for topic in missing:
            self.accumulator.fail_all(SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}"), topic)
        for topic in topics:
            count = self._cluster.metadata.partition_count(topic)
            if count:
                self.accumulator.set_partition_count(topic, count)
        self._refresh_task = None
        self.wake()

    async def _fail_refused(self, topics: list[str]) -> None:
        """One topic without a right to it costs the others nothing."""
        for topic in topics:
            try:
                await self._cluster.refresh((topic,))
            except SmqError as e:
                if e.code in _OF_THE_USER:
                    self.accumulator.fail_all(e, topic)

    def _request_identity(self, queues: list[PartitionQueue]) -> None:
        if self._identity_task is None or self._identity_task.done():
            work = self._allocate_identity(queues) if self._transactions is None else self._add_to_transaction(queues)
            self._identity_task = asyncio.create_task(work)

    async def _add_to_transaction(self, queues: list[PartitionQueue]) -> None:
        """Their partitions are part of the transaction, before their first batches go out."""
        assert self._transactions is not None
        try:
            identity = await self._transactions.add([(q.topic, q.partition) for q in queues])
        except SmqError as e:
            self._fail_transaction(e)
        else:
            for queue in queues:
                self.accumulator.give_identity(queue, identity)
        self._identity_task = None
        self.wake()

    def _fail_transaction(self, error: SmqError) -> None:
        """The rest of it goes nowhere: it can only be aborted."""
        assert self._transactions is not None
        if error.code is ErrorCode.PRODUCER_FENCED:
            self.fatal = error
        self._transactions.fail(error)
        self.accumulator.fail_all(error)
        self._report(self.accumulator.poll(now_ms(), lambda _topic, _partition: None))
        if self._transactions.phase is Phase.NONE:
            self.accumulator.failure = None  # none of the next transaction's

    async def drop_transaction(self, error: SmqError) -> None:
        """Gives up every record that is not acknowledged, and what is under way for them."""
        task, self._identity_task = self._identity_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.accumulator.fail_all(error)
        self._report(self.accumulator.poll(now_ms(), lambda _topic, _partition: None))
        self.wake()  # a send_many() that waits for room is to learn of it

    async def _allocate_identity(self, queues: list[PartitionQueue]) -> None:
        """A new producer id: first the shared one, later one for partitions that abandoned theirs."""
        topic, request_id = queues[0].topic, uuid.uuid4().bytes

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> ProducerIdentity:
            session = str(uuid.uuid4())
            request = build(pb.StartPublishSessionRequest, session_id=session, topic=topic, request_id=request_id)
            answer = await node.agent.StartPublishSession(request, timeout=call_s)
            if answer.batch_bytes_max > 0:
                self.accumulator.limit_batch_bytes(answer.batch_bytes_max)
            # Only the id is needed: each batch names its topic itself, at any node.
            await node.agent.ClosePublishSession(pb.ClosePublishSessionRequest(session_id=session), timeout=call_s)
            return ProducerIdentity(producer_id=answer.producer_id, producer_epoch=answer.producer_epoch)

        try:
            identity = await self._cluster.call(run, timeout_ms=IDENTITY_TIMEOUT_MS)
        except SmqError as e:
            self._identity_error = e
            if not e.code.is_retriable:
                self.accumulator.fail_all(e, topic)
            await asyncio.sleep(PRODUCER_BACKOFF.max_ms / 1000.0)
        else:
            self._identity_error = None
            self._take_identity(identity, queues)
        self._identity_task = None
        self.wake()

    def _take_identity(self, identity: ProducerIdentity, queues: list[PartitionQueue]) -> None:
        shared = [q for q in queues if not q.needs_own_identity]
        if shared:
            self.accumulator.set_identity(identity)
        for queue in queues if not shared else ():
            self.accumulator.give_identity(queue, identity)


def _because(error: SmqError | None) -> str:
    return "" if error is None else f" ({error.code.name}: {error.message})"


def _warn_of_loss(accumulator: Accumulator, loop: asyncio.AbstractEventLoop) -> None:
    """For a producer that was never closed: nothing can be sent any more once its event loop has ended."""
    count = 0 if loop.is_running() else accumulator.unsettled()
    if count:
        log.warning(
            "%d records were not acknowledged, because the event loop ended before the producer was closed: "
            "use `async with Producer(...)`, or await close()",
            count,
        )
