"""What a Kafka request costs above the node, counted: the same each time, so that the way in cannot grow in silence.

Three nodes of `hot_path` with a Kafka connection per client on a fake transport. A figure here may fall: then write
down the new one. It rises only with a reason.
"""

import asyncio
import gc
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from smq.coordinator.kafka.api_keys import ApiKey, request_message, response_message
from smq.coordinator.kafka.codec import compile_decoder, compile_encoder
from smq.coordinator.kafka.connection import Connection
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch
from tests.unit.coordinator.kafka.gateways import gateway_to
from tests.unit.replication.hot_path import NODES, TOPIC, HotPath

ALL = NodeId(0)
LEADER, *FOLLOWERS = NODES
VERSION = 9
CLIENTS = 33
SETTLE_MS = 4


class Wire:
    """A client's socket: counts what the connection gives to it."""

    def __init__(self) -> None:
        self.writes = 0
        self.sent = b""

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def writelines(self, parts: list[bytes]) -> None:
        self.writes += 1
        self.sent += b"".join(parts)


class Clients:
    """Many connections to one node."""

    def __init__(self, world: HotPath, node_id: NodeId) -> None:
        self._world = world
        self._process = world.processes[node_id]
        self._request = produced(world.led_by(node_id)[0], encode_batch([NewRecord(None, b"v" * 100, 1_000)]))
        gateway = gateway_to(NodeCalls(world.nodes[node_id]), InflightBytes())
        self.wires = [Wire() for _ in range(CLIENTS)]
        self._connections = [Connection(gateway, on_open=lambda _: None, on_close=lambda _: None) for _ in self.wires]
        for connection, wire in zip(self._connections, self.wires, strict=True):
            connection.connection_made(cast(Any, wire))

    def produce(self) -> None:
        """One record of each client, all in one turn of the node's loop; waits for the answers."""
        for wire in self.wires:
            wire.writes, wire.sent = 0, b""

        def hand_over() -> None:
            for connection in self._connections:
                connection.data_received(self._request)

        self._process.soon(hand_over)
        assert self._world.scheduler.run_for_ms(1_000, stop=lambda: all(wire.sent for wire in self.wires))

    def base_offsets(self) -> list[int]:
        return sorted(answered(wire.sent) for wire in self.wires)


def produced(partition: int, batch: bytes) -> bytes:
    body = compile_encoder(request_message(ApiKey.PRODUCE), VERSION)(
        {
            "transactional_id": None,
            "acks": -1,
            "timeout_ms": 5_000,
            "topic_data": [{"name": TOPIC, "partition_data": [{"index": partition, "records": [batch]}]}],
        }
    )
    frame = struct.pack(">hhihB", ApiKey.PRODUCE, VERSION, 7, -1, 0) + b"".join(body)
    return struct.pack(">i", len(frame)) + frame


def answered(data: bytes) -> int:
    """The base offset in the one answer."""
    size, correlation = struct.unpack_from(">ii", data)
    assert (size, correlation) == (len(data) - 4, 7)
    body = compile_decoder(response_message(ApiKey.PRODUCE), VERSION)(memoryview(data), 9)
    ((answer,),) = [topic["partition_responses"] for topic in body["responses"]]
    assert answer["error_code"] == KafkaError.NONE
    return int(answer["base_offset"])


def with_clients(scenario: Callable[[HotPath, Clients], None]) -> None:
    """Connections belong to a loop of asyncio's, though nothing here waits for it."""

    async def whole() -> None:
        world = HotPath(partitions=9)
        clients = Clients(world, LEADER)
        clients.produce()
        world.scheduler.run_for_ms(505)  # in between two beats of the nodes
        scenario(world, clients)

    asyncio.run(whole())


def costs(world: HotPath, clients: Clients) -> dict[NodeId, Counter[str]]:
    with world.counted() as found:
        clients.produce()
        world.scheduler.run_for_ms(SETTLE_MS)
    return found


def test_what_a_record_of_each_of_many_clients_costs() -> None:
    def scenario(world: HotPath, clients: Clients) -> None:
        found = costs(world, clients)
        assert clients.base_offsets() == list(range(CLIENTS, 2 * CLIENTS))
        assert found[ALL]["all calls"] / CLIENTS < 189
        assert all(wire.writes == 1 for wire in clients.wires)

    with_clients(scenario)


def test_what_a_record_leaves_in_memory() -> None:
    """On three nodes and their disks, which are dicts here: the batch, its row and its keys. No object of a request
    outlives its answer."""

    def scenario(world: HotPath, clients: Clients) -> None:
        gc.collect()
        blocks = [sys.getallocatedblocks()]
        for _ in range(3):  # tables that grow count in the first
            clients.produce()
            world.scheduler.run_for_ms(SETTLE_MS)
            blocks.append(sys.getallocatedblocks())
        assert (blocks[-1] - blocks[-2]) / CLIENTS < 25

    with_clients(scenario)


def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    def scenario(world: HotPath, clients: Clients) -> None:
        gc.collect()
        gc.disable()
        try:
            clients.produce()
            world.scheduler.run_for_ms(SETTLE_MS)
            assert gc.collect() == 0
        finally:
            gc.enable()

    with_clients(scenario)
