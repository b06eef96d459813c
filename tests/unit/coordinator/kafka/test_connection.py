"""A connection's bounds: when reading stops, which connections are closed, and in which order answers leave."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from smq.coordinator.kafka import connection as connection_module
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.connection import Connection, Request, _Slot
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.metadata import api_versions
from smq.coordinator.limits import (
    KAFKA_FETCHES_PER_CONNECTION_MAX,
    KAFKA_FRAME_S_MAX,
    KAFKA_IDLE_S_MAX,
    KAFKA_INFLIGHT_BYTES_PER_NODE_MAX,
    KAFKA_INFLIGHT_PER_CONNECTION_MAX,
    KAFKA_STUCK_S_MAX,
    LOGIN_S_MAX,
    MIB,
)
from smq.coordinator.service import byte_budget as byte_budget_module
from smq.coordinator.service.byte_budget import ByteBudget, InflightBytes
from smq.raft_state.errors import ErrorCode, SmqError
from tests.unit.coordinator.kafka.gateways import gateway_to

NOTHING_FETCHED: Struct = {"throttle_time_ms": 0, "responses": []}
REQUEST = struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 0, 7, -1)


class Wire:
    """What the connection does to its transport."""

    def __init__(self) -> None:
        self.sent = b""
        self.on_write: Callable[[], None] = lambda: None
        self._is_reading = True
        self._is_closed = False

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def writelines(self, parts: list[bytes]) -> None:
        self.sent += b"".join(parts)
        self.on_write()

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True

    def abort(self) -> None:
        self._is_closed = True

    # Methods, not fields: a type checker takes a field to be what the line before asserted.
    def is_reading(self) -> bool:
        return self._is_reading

    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def correlation_ids(self) -> list[int]:
        found, rest = [], self.sent
        while rest:
            size, correlation = struct.unpack_from(">ii", rest)
            found.append(correlation)
            rest = rest[4 + size :]
        return found


class Rig:
    """A connection on a fake transport; requests are answered when `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, inflight: InflightBytes | None = None) -> None:
        self.wire = Wire()
        self.release = asyncio.Event()
        self.started = self.cancelled = 0

        async def answer(_gateway: Gateway, request: Request) -> Struct:
            self.started += 1
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return api_versions() if request.key == ApiKey.API_VERSIONS else NOTHING_FETCHED

        monkeypatch.setattr(connection_module, "answer", answer)
        inflight = inflight or InflightBytes()
        gateway = gateway_to(None, inflight)
        self.connection = Connection(
            gateway,
            on_open=lambda _: None,
            on_close=lambda _: None,
        )
        self.connection.connection_made(cast(Any, self.wire))

    def sweep(self, after_s: float) -> bool:
        """Whether a sweep that much later closes the connection."""
        self.connection.sweep(asyncio.get_running_loop().time() + after_s)
        return self.wire.is_closed()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()

    asyncio.run(whole())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_an_unfinished_request_is_closed_and_a_finished_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.connection.data_received(REQUEST[:9])
    assert not rig.sweep(KAFKA_FRAME_S_MAX - 1)
    rig.connection.data_received(REQUEST[9:])
    assert not rig.sweep(KAFKA_FRAME_S_MAX + 1)
    rig.connection.data_received(REQUEST[:3])
    assert rig.sweep(KAFKA_FRAME_S_MAX + 1)


async def test_half_a_login_is_closed_and_a_finished_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        """A login as the connection sees it."""

        is_open = False

    rig, login = Rig(monkeypatch), Half()
    rig.connection._login = cast(Any, login)
    assert not rig.sweep(LOGIN_S_MAX - 1)
    login.is_open = True
    assert not rig.sweep(LOGIN_S_MAX + 1)
    login.is_open = False
    assert rig.sweep(LOGIN_S_MAX + 1)


async def test_an_idle_connection_is_closed_but_not_one_that_waits_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    assert not rig.sweep(KAFKA_IDLE_S_MAX - 1)
    rig.connection.data_received(REQUEST)
    assert not rig.sweep(KAFKA_IDLE_S_MAX + 1)
    rig.release.set()
    await settle()
    assert rig.wire.correlation_ids == [7]
    assert rig.sweep(KAFKA_IDLE_S_MAX + 1)


async def test_a_client_that_waits_for_its_quota_is_closed_like_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is not read, so the node does not hear that it has gone."""
    rig = Rig(monkeypatch)
    rig.connection._throttle(_Slot(0), 10 * KAFKA_IDLE_S_MAX)
    assert not rig.sweep(KAFKA_IDLE_S_MAX - 1)
    assert rig.sweep(KAFKA_IDLE_S_MAX + 1)


async def test_a_client_that_does_not_read_is_not_read_and_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.release.set()
    rig.connection.pause_writing()
    assert not rig.wire.is_reading()
    rig.connection.data_received(REQUEST)
    await settle()
    assert rig.started == 0
    assert not rig.sweep(KAFKA_STUCK_S_MAX - 1)
    rig.connection.resume_writing()
    await settle()
    assert rig.wire.correlation_ids == [7]
    assert rig.wire.is_reading()
    assert not rig.sweep(KAFKA_STUCK_S_MAX + 1)
    rig.connection.pause_writing()
    assert rig.sweep(KAFKA_STUCK_S_MAX + 1)


async def test_requests_beyond_the_bound_wait_in_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    count = KAFKA_INFLIGHT_PER_CONNECTION_MAX + 10
    frames = [struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 0, i, -1) for i in range(count)]
    rig.connection.data_received(b"".join(frames))
    assert not rig.wire.is_reading()
    rig.release.set()
    for _ in range(count):
        await settle()
    assert rig.wire.correlation_ids == list(range(count))
    await settle()
    assert rig.wire.is_reading()


async def test_a_full_node_stops_reading_all_and_continues_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = InflightBytes(15)
    first, second = Rig(monkeypatch, shared), Rig(monkeypatch, shared)
    first.connection.data_received(REQUEST + REQUEST)
    await settle()
    second.connection.data_received(REQUEST)
    await settle()
    assert not first.wire.is_reading()
    assert not second.wire.is_reading()
    first.connection.connection_lost(None)
    second.release.set()
    await settle()
    assert second.wire.correlation_ids == [7]
    assert second.wire.is_reading()


async def test_large_requests_that_arrive_leave_room_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KAFKA_LARGE_REQUEST_BYTES", 1_000)
    shared = InflightBytes()
    shared.arriving = ByteBudget(1_500, may_overshoot=True)
    large = struct.pack(">ihhih", 1_400, ApiKey.API_VERSIONS, 0, 7, -1).ljust(1_404, b"\0")
    first, second, third, other = (Rig(monkeypatch, shared) for _ in range(4))
    for rig in (first, second, third):
        rig.connection.data_received(large[:20])
    assert [rig.wire.is_reading() for rig in (first, second, third)] == [True, True, False]
    other.release.set()
    other.connection.data_received(REQUEST)
    await settle()
    assert other.wire.correlation_ids == [7]
    first.connection.data_received(large[20:])
    await settle()
    assert third.wire.is_reading()
    for rig in (first, second, third):
        rig.connection.connection_lost(None)
    assert shared.arriving.used_bytes == shared.used_bytes == 0


async def test_a_lost_connection_gives_back_all_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = InflightBytes()
    rig = Rig(monkeypatch, shared)
    rig.connection.data_received(REQUEST * 5)
    await settle()
    assert rig.started == 1  # one after another
    rig.connection.connection_lost(None)
    await settle()
    assert rig.cancelled == 1
    rig.release.set()
    await settle()
    assert rig.started == 1
    assert shared.used_bytes == 0
    assert rig.wire.sent == b""


async def test_answers_wait_and_count_while_the_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = InflightBytes()
    rig = Rig(monkeypatch, shared)
    rig.wire.on_write = rig.connection.pause_writing  # the socket's buffer is full with the first
    rig.release.set()
    rig.connection.data_received(REQUEST + REQUEST)
    await settle()
    assert rig.wire.correlation_ids == [7]
    assert shared.used_bytes == 2 * len(rig.wire.sent)
    rig.wire.on_write = lambda: None
    rig.connection.resume_writing()
    assert rig.wire.correlation_ids == [7, 7]
    assert shared.used_bytes == 0


async def test_no_more_fetches_of_a_connection_than_its_share_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    count = 3 * KAFKA_FETCHES_PER_CONNECTION_MAX
    nothing = struct.pack(">iiiibi", -1, 0, 1, 1, 0, 0)
    for i in range(count):
        head = struct.pack(">hhih", ApiKey.FETCH, 4, i, -1)
        rig.connection.data_received(struct.pack(">i", len(head + nothing)) + head + nothing)
    await settle()
    assert rig.started == KAFKA_FETCHES_PER_CONNECTION_MAX
    rig.release.set()
    await settle()
    assert rig.wire.correlation_ids == list(range(count))


async def test_room_that_is_granted_in_the_moment_of_a_cancellation_is_given_back() -> None:
    shared = InflightBytes(10)

    async def read() -> None:
        async with shared.reserved(5):
            await asyncio.Event().wait()

    shared.take(10)
    reading = asyncio.create_task(read())
    await settle()
    shared.release(10)
    await asyncio.sleep(0)
    assert shared.used_bytes == 5  # granted, and not yet taken
    reading.cancel()
    await settle()
    assert (reading.cancelled(), shared.used_bytes) == (True, 0)


async def test_answers_that_a_slow_disk_holds_up_do_not_stop_the_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = InflightBytes()

    async def read() -> None:
        async with shared.reserved(8 * MIB):
            await asyncio.Event().wait()

    reading = [asyncio.create_task(read()) for _ in range(2 * KAFKA_INFLIGHT_BYTES_PER_NODE_MAX // (8 * MIB))]
    await settle()
    assert shared.used_bytes == KAFKA_INFLIGHT_BYTES_PER_NODE_MAX // 2
    rig = Rig(monkeypatch, shared)
    rig.release.set()
    rig.connection.data_received(REQUEST)
    await settle()
    assert rig.wire.correlation_ids == [7]
    assert rig.wire.is_reading()
    for task in reading:
        task.cancel()
    await settle()
    assert shared.used_bytes == 0
    async with shared.reserved(8 * MIB):  # its share was given back, too
        assert shared.used_bytes == 8 * MIB


async def test_no_answer_is_read_while_others_that_were_read_fill_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_budget_module, "KAFKA_BUDGET_WAIT_S_MAX", 0)

    shared = InflightBytes()
    shared.take(KAFKA_INFLIGHT_BYTES_PER_NODE_MAX)
    for _ in range(100):  # those that are refused keep nothing of the share
        with pytest.raises(SmqError) as refused:
            async with shared.reserved(8 * MIB):
                pass
        assert refused.value.code is ErrorCode.OVERLOADED
    shared.release(KAFKA_INFLIGHT_BYTES_PER_NODE_MAX)
    await settle()
    async with shared.reserved(8 * MIB):
        assert shared.used_bytes == 8 * MIB
