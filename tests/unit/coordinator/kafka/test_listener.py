"""A node's Kafka port under hostile or idle clients: its memory is bounded, and other clients are served."""

import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from smq.coordinator.config.addresses import format_address
from smq.coordinator.kafka import connection as connection_module
from smq.coordinator.kafka import listener as listener_module
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.limits import KAFKA_INFLIGHT_BYTES_PER_NODE_MAX, MIB
from smq.coordinator.service import byte_budget as byte_budget_module
from smq.coordinator.service.byte_budget import InflightBytes
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.loops import in_thread
from smq.testing.served import Served, served_node

SOON_S = 0.3  # in place of the seconds that a real node is patient
LARGE = batch(b"x" * 900_000)


class Counted(InflightBytes):
    """It remembers the most that was ever in flight: polling now and then would miss it."""

    largest = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_used":
            self.largest = max(self.largest, value)


class Port:
    """The Kafka port of a real node that runs in another thread's loop."""

    def __init__(self, address: str, inflight: Counted) -> None:
        self.address = address
        self.inflight = inflight
        self._opened: list[RawKafka] = []

    def connect(self) -> RawKafka:
        self._opened.append(RawKafka(self.address))
        return self._opened[-1]

    def close(self) -> None:
        for raw in self._opened:
            raw.close()

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, f"{what}; in flight: {self.inflight.used_bytes}"
            time.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_SWEEP_S", 0.05)


@asynccontextmanager
async def with_topic(directory: Path) -> AsyncIterator[Served]:
    async with served_node(directory, kafka_address=("127.0.0.1", 0)) as served:
        await served.create("t")
        yield served


@pytest.fixture
def port(tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    """Of a node with one topic, t, which runs in another thread."""
    inflight = Counted()
    monkeypatch.setattr(listener_module, "InflightBytes", lambda: inflight)
    with in_thread(with_topic(tmp_path), uvloop.new_event_loop) as served:
        address = served.server.kafka_address
        assert address is not None
        found = Port(format_address(address), inflight)
        yield found
        found.close()


def _send_fetch(raw: RawKafka, *, times: int = 1, offset: int = 0, max_wait_ms: int = 0) -> None:
    requested = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 8 * MIB}
    raw.send(
        ApiKey.FETCH,
        12,
        times=times,
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=64 * MIB,
        topics=[{"topic": "t", "partitions": [requested]}],
        forgotten_topics_data=[],
    )


def test_a_request_in_drops_is_closed_and_others_are_served(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KAFKA_FRAME_S_MAX", SOON_S)
    slow, other = port.connect(), port.connect()
    slow.socket.settimeout(0.02)
    deadline = time.monotonic() + 20

    def is_closed(byte: int) -> bool:
        try:
            slow.socket.sendall(bytes((byte,)))
            return slow.is_closed_by_node()
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    drops = iter(struct.pack(">i", 2_000) + bytes(2_000))
    while not is_closed(next(drops)):  # their end would be an error
        assert other.produce("t", batch(b"v"))["error_code"] == KafkaError.NONE
        assert time.monotonic() < deadline
    assert other.produce("t", batch(b"v"))["error_code"] == KafkaError.NONE


def test_half_open_and_silent_connections_are_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KAFKA_IDLE_S_MAX", SOON_S)
    half, silent = port.connect(), port.connect()
    half.socket.shutdown(socket.SHUT_WR)
    assert half.is_closed_by_node()
    assert silent.is_closed_by_node()


def test_answers_that_no_client_reads_are_bounded_and_then_given_up(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client whose answers do not fill the node may take a minute. So each must fill it by itself, however slow the
    # machine is: all its fetches arrive together, and none of them gives up and ends empty behind an unread answer.
    monkeypatch.setattr(connection_module, "KAFKA_STUCK_FULL_S_MAX", SOON_S)
    monkeypatch.setattr(byte_budget_module, "KAFKA_BUDGET_WAIT_S_MAX", 60)
    other = port.connect()
    for _ in range(8):
        other.produce("t", LARGE)
    port.inflight._max = 16 * MIB
    port.inflight.largest = 0
    deaf = [port.connect() for _ in range(4)]
    for raw in deaf:
        raw.socket.settimeout(0.05)
        with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
            _send_fetch(raw, times=100)  # 700 MB of answers each
    port.wait("the node has been full", lambda: port.inflight.largest >= 16 * MIB)
    assert other.produce("t", batch(b"v"))["base_offset"] == 8
    port.wait("all is given back", lambda: port.inflight.used_bytes == 0)
    assert port.inflight.largest < (16 + 8 + 1) * MIB  # the bound, the answer that passed it, and the requests


def test_a_client_that_never_stops_sending_is_read_as_fast_as_it_is_served(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "KAFKA_INFLIGHT_BYTES_PER_CONNECTION_MAX", 2 * MIB)
    count = 40
    raw = port.connect()
    data = [{"name": "t", "partition_data": [{"index": 0, "records": [LARGE]}]}]
    for _ in range(count):  # 36 MB, and not one answer read
        raw.send(ApiKey.PRODUCE, 9, acks=-1, timeout_ms=15_000, topic_data=data)
    for i in range(count):
        body = raw.receive(ApiKey.PRODUCE, 9)[1]
        assert body["responses"][0]["partition_responses"][0]["base_offset"] == i
    assert MIB < port.inflight.largest < 4 * MIB  # the bound, what passed it, and the request that is coming
    port.wait("all is given back", lambda: port.inflight.used_bytes == 0)


def test_requests_that_never_end_fill_the_node_for_no_longer_than_they_may_take(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    port.inflight._max = MIB
    other, finishing = port.connect(), port.connect()
    request = struct.pack(">hhih", ApiKey.API_VERSIONS, 0, 7, -1).ljust(MIB, b"\0")
    finishing.socket.sendall(struct.pack(">i", MIB) + request[:10])
    port.wait("a request is counted when it begins", lambda: port.inflight.used_bytes > MIB)
    other.send(ApiKey.API_VERSIONS, 0)
    finishing.socket.sendall(request[10:])  # it was counted: it may end on a full node
    assert finishing.receive(ApiKey.API_VERSIONS, 0)[0] == 7
    assert other.receive(ApiKey.API_VERSIONS, 0)[0] == 1
    endless = [port.connect() for _ in range(3)]
    for raw in endless:
        raw.socket.sendall(struct.pack(">i", MIB - 1) + request[: MIB // 2])
    port.wait("the node is full", lambda: port.inflight.is_full)
    monkeypatch.setattr(connection_module, "KAFKA_FRAME_S_MAX", SOON_S)
    assert other.call(ApiKey.API_VERSIONS, 0)["error_code"] == KafkaError.NONE
    port.wait("all is given back", lambda: port.inflight.used_bytes == 0)


def test_fetches_that_wait_for_records_hold_nothing(port: Port) -> None:
    count = 2 * KAFKA_INFLIGHT_BYTES_PER_NODE_MAX // (8 * MIB)
    waiting = [port.connect() for _ in range(count)]
    for raw in waiting:
        _send_fetch(raw, max_wait_ms=60_000)  # longer than this test waits
    port.wait("they wait, and hold their requests alone", lambda: 64 * count < port.inflight.used_bytes < MIB)
    producer = port.connect()
    assert producer.produce("t", LARGE)["base_offset"] == 0  # which a full node would not read
    for raw in waiting:
        assert raw.receive(ApiKey.FETCH, 12)[1]["responses"][0]["partitions"][0]["high_watermark"] == 1
    port.wait("all is given back", lambda: port.inflight.used_bytes == 0)


def test_answers_after_one_that_waits_for_records_do_not_lock_the_node(port: Port) -> None:
    producer = port.connect()
    for _ in range(8):
        producer.produce("t", LARGE)
    port.inflight._max = 16 * MIB
    clients = [port.connect() for _ in range(3)]
    for raw in clients:  # the first waits at the end of the log, and the others' 7 MB each follow it
        _send_fetch(raw, offset=8, max_wait_ms=2_000)
        _send_fetch(raw)
        _send_fetch(raw)
    for raw in clients:
        for _ in range(3):
            assert raw.receive(ApiKey.FETCH, 12)[1]["responses"][0]["partitions"][0]["high_watermark"] == 8
    port.wait("all is given back", lambda: port.inflight.used_bytes == 0)
