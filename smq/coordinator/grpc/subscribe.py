"""One SubscribeRecord stream: the records of one partition from a position on, with seeks and acknowledgements.

Owns the position of one reader. What it has read is in the node's memory for readers, and may be taken back while its
client does not read: it then holds one response, and reads the rest again. It must never send a record at or beyond the
end of its reader: the last stable offset, or the high water mark if it reads what is not committed, too. `grpc.agent`
alone imports it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.record_chunks import Chunk, NeedsRoom, Reading
from smq.coordinator.grpc.required import check_offset_value, check_required
from smq.coordinator.limits import (
    SUBSCRIBE_BYTES_DEFAULT,
    SUBSCRIBE_BYTES_MAX,
    SUBSCRIBE_OPENED_BYTES,
    SUBSCRIBE_POLL_MS,
    TIMEOUT_MS_DEFAULT,
)
from smq.coordinator.service.byte_budget import overloaded
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import StartAsk, start_position
from smq.coordinator.service.reader_memory import STREAMS, Lease, ReaderMemory, on_thread
from smq.coordinator.service.start_positions import Position, parse_offset_type, resolve_seek
from smq.coordinator.service.visibility import is_committed_reader
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.replication.api import Fetched, PartitionRange
from smq.replication.log.decoding import DECODED_BATCH_BYTES_MAX

Context = grpc.aio.ServicerContext[pb.SubscribeRecordRequest, pb.SubscribeRecordResponse]

_NEVER: Final = Offset(2**63 - 1)


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of memory for the next read, as far as the last one has shown."""

    room: int = 0
    opened_bytes: int = SUBSCRIBE_OPENED_BYTES  # of one batch
    is_large: bool = False  # its next record is


class Window:
    """Bytes sent and not yet acknowledged; a bound of 0 means that they are not counted."""

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._sent: deque[tuple[int, int]] = deque()  # (next offset, bytes); bounded by the window
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return 0 < self._max <= self._bytes

    def sent(self, next_offset: int, size: int) -> None:
        if self._max:
            self._sent.append((next_offset, size))
            self._bytes += size

    def acknowledged(self, next_offset: int) -> None:
        while self._sent and self._sent[0][0] <= next_offset:
            self._bytes -= self._sent.popleft()[1]

    def reset(self) -> None:
        self._sent.clear()
        self._bytes = 0


class SubscribeStream:
    """`run` returns at the stop offset, and raises the SmqError that ends the stream. A client cancels it."""

    def __init__(
        self, calls: NodeCalls, init: pb.SubscribeInit, context: Context, memory: ReaderMemory[Reading]
    ) -> None:
        """INVALID_REQUEST for what can be refused without a look-up."""
        _check_init(init)
        self._calls = calls
        self._memory = memory
        self._needs = _Needs()
        self._init = init
        self._is_committed = is_committed_reader(init.isolation)
        self._context = context
        self._window = Window(init.window_bytes)
        self._bytes_max = min(init.max_bytes or SUBSCRIBE_BYTES_DEFAULT, SUBSCRIBE_BYTES_MAX)
        self._stop = Offset(init.stop_offset) if init.stop_offset else _NEVER
        self._seek: int | None = None  # the last one requested and not yet done
        self._control_error: SmqError | None = None
        self._poll: asyncio.Task[Fetched] | None = None
        self._wake = asyncio.Event()

    async def run(self, requests: AsyncIterable[pb.SubscribeRecordRequest]) -> None:
        control = asyncio.create_task(self._read_control(requests))
        try:
            await self._serve()
        finally:
            control.cancel()

    async def _serve(self) -> None:
        position = await self._start()
        while position < self._stop or self._seek is not None:
            if self._control_error is not None:
                raise self._control_error
            if self._seek is not None:
                position = await self._do_seek()
            elif self._window.is_full:
                self._wake.clear()
                await self._wake.wait()
            else:
                position = await self._send_next(position)

    # ------------------------------------------------------------------------------------------ where to read
    async def _start(self) -> Offset:
        init = self._init
        ask = StartAsk(
            topic=init.topic,
            partition=init.partition,
            type=parse_offset_type(init.offset_type),
            value=init.offset_value,
            group=init.group,
            reset_if_gone=init.reset_if_gone,
            is_committed=self._is_committed,
        )
        position, range_ = await start_position(self._calls, ask, TIMEOUT_MS_DEFAULT)
        if init.stop_at_end:
            self._stop = min(self._stop, range_.end_for(is_committed=self._is_committed))
        await self._send_start(position, range_)
        return position.offset

    async def _do_seek(self) -> Offset:
        offset, self._seek = self._seek or 0, None
        range_ = await self._calls.partition_range(self._init.topic, self._init.partition, TIMEOUT_MS_DEFAULT)
        position = resolve_seek(offset, range_.log_start, range_.end_for(is_committed=self._is_committed))
        self._window.reset()
        await self._send_start(position, range_)
        return position.offset

    async def _send_start(self, position: Position, range_: PartitionRange) -> None:
        end = range_.end_for(is_committed=self._is_committed)
        started = pb.StartedAt(offset=position.offset, clamped=position.clamped, lo=range_.log_start, hi=end)
        await self._context.write(self._response([], position.offset, range_.hwm, end, started))

    # ------------------------------------------------------------------------------------------------ records
    async def _send_next(self, position: Offset) -> Offset:
        """Waits for records at `position`, sends those of one fetch, and returns the position after them."""
        needs, self._needs = self._needs, _Needs()
        async with self._large_place(needs), self._memory.lease(needs.room) as lease:
            fetched = await self._fetch(position)
            if fetched is None:
                return position  # interrupted by a seek or an error
            reading = Reading(fetched, position, self._stop)
            if not self._memory.resize(lease, max(lease.size, reading.held_bytes)):
                self._needs = replace(needs, room=reading.held_bytes)
                return position
            hwm, end, lease.held = fetched.hwm, self._end(fetched), reading
            del fetched, reading  # while the client does not read, the lease alone has them
            return await self._send_all(lease, position, hwm, end, needs)

    async def _send_all(
        self, lease: Lease[Reading], position: Offset, hwm: Offset, end: Offset, needs: _Needs
    ) -> Offset:
        """Until there is no more, or something else is to be done: the rest is read again. `needs` is what this read
        was given; what the next one needs more is noted, and waited for with nothing in hand."""
        while lease.held is not None and not lease.held.is_over:
            opened_max = 0 if lease.held.is_open else needs.opened_bytes
            room = lease.held.held_bytes + opened_max
            if not self._memory.resize(lease, room):
                self._needs = replace(needs, room=room)
                break
            bytes_max = min(self._bytes_max, self._memory.response_bytes_max)
            try:
                chunk = await self._decoded(lease, partial(lease.held.next_chunk, bytes_max, opened_max))
            except NeedsRoom:
                room += DECODED_BATCH_BYTES_MAX - opened_max
                self._needs = replace(needs, room=room, opened_bytes=DECODED_BATCH_BYTES_MAX)
                break
            if chunk is None:
                break
            size = chunk.size
            if size > SUBSCRIBE_BYTES_MAX and not needs.is_large:
                self._needs = replace(needs, room=lease.size, is_large=True)
                break
            self._memory.resize(lease, lease.held.held_bytes)
            position = chunk.next_offset
            response = self._response(chunk.records, position, hwm, end)
            del chunk
            with self._memory.sending(size):
                await self._context.write(response)
            del response
            self._window.sent(position, size)
            if self._seek is not None or self._control_error is not None or self._window.is_full:
                break
        return position

    @asynccontextmanager
    async def _large_place(self, needs: _Needs) -> AsyncIterator[None]:
        if not needs.is_large:
            yield
            return
        try:
            async with asyncio.timeout(TIMEOUT_MS_DEFAULT / 1000):
                await self._memory.large.acquire(1)
        except TimeoutError:
            raise overloaded("other subscriptions have not taken their large records: fetch this one instead") from None
        try:
            yield
        finally:
            self._memory.large.release(1)

    async def _decoded(self, lease: Lease[Reading], job: Callable[[], Chunk | None]) -> Chunk | None:
        lease.is_busy = True
        try:
            return await on_thread(STREAMS, job)
        finally:
            lease.is_busy = False

    def _end(self, fetched: Fetched) -> Offset:
        """The reader's, as far as this replica knows. One that lags knows no better one than the high water mark."""
        is_stable = self._is_committed and fetched.readable_end >= fetched.hwm
        return fetched.lso if is_stable else fetched.hwm

    async def _fetch(self, position: Offset) -> Fetched | None:
        """A long poll; None if a control message has interrupted it."""
        call = self._calls.fetch(
            self._init.topic,
            self._init.partition,
            position,
            max_bytes=self._bytes_max,
            max_wait_ms=SUBSCRIBE_POLL_MS,
            answer_ms=SUBSCRIBE_POLL_MS + TIMEOUT_MS_DEFAULT,
            is_committed=self._is_committed,
        )
        poll = self._poll = asyncio.create_task(call)
        try:
            await asyncio.wait([poll])
            return None if poll.cancelled() else poll.result()
        finally:
            poll.cancel()
            self._poll = None

    def _response(
        self, records: list[pb.Record], position: Offset, hwm: Offset, end: Offset, started: pb.StartedAt | None = None
    ) -> pb.SubscribeRecordResponse:
        return pb.SubscribeRecordResponse(
            records=records,
            next_offset=position,
            hwm=hwm,
            lag=max(0, hwm - position),
            at_end=position >= end,
            started=started,
        )

    # ------------------------------------------------------------------------------------------------ control
    async def _read_control(self, requests: AsyncIterable[pb.SubscribeRecordRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            try:
                check_required(request.ack if kind == "ack" else request.seek if kind == "seek" else request)
            except SmqError as e:
                self._control_error = e
                self._interrupt()
                return
            if kind == "ack":
                self._window.acknowledged(request.ack.next_offset)
            elif kind == "seek":
                self._seek = request.seek.offset
                self._interrupt()
            else:
                what = "a second init" if kind == "init" else "an empty request"
                self._control_error = SmqError(ErrorCode.INVALID_REQUEST, f"{what}: only seek and ack may follow")
                self._interrupt()
                return
            self._wake.set()

    def _interrupt(self) -> None:
        self._wake.set()
        if self._poll is not None:
            self._poll.cancel()


def _check_init(init: pb.SubscribeInit) -> None:
    if init.stop_offset < 0 or init.max_bytes < 0 or init.window_bytes < 0:
        raise SmqError(ErrorCode.INVALID_REQUEST, "stop_offset, max_bytes and window_bytes must be 0 or more")
    check_required(init)
    check_offset_value(init, parse_offset_type(init.offset_type))
