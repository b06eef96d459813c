"""What the answer to a Kafka Fetch costs, counted: writes to the socket, and copies of batches."""

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, cast

from smq.coordinator.kafka.api_keys import ApiKey, request_message
from smq.coordinator.kafka.codec import compile_encoder
from smq.coordinator.kafka.connection import Connection
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.records import NewRecord, encode_batch
from smq.replication.log.stored_batch import batch_key
from smq.replication.ports import Buffer, Table
from tests.unit.coordinator.kafka.gateways import fetch_of, gateway_to
from tests.unit.replication.hot_path import LARGE_BYTES, NODES, TOPIC, HotPath

LEADER = NODES[0]
VERSION = 12
BATCHES = 24


class Wire:
    """A client's socket: keeps what each write was given."""

    def __init__(self) -> None:
        self.writes: list[list[Buffer]] = []

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def writelines(self, parts: Sequence[Buffer]) -> None:
        self.writes.append(list(parts))


def fetched(partition: int) -> bytes:
    """The request."""
    fields = fetch_of(TOPIC, b"") | {"session_epoch": -1, "forgotten_topics_data": []}
    fields["topics"][0]["partitions"][0]["partition"] = partition
    body = compile_encoder(request_message(ApiKey.FETCH), VERSION)(fields)
    frame = struct.pack(">hhihB", ApiKey.FETCH, VERSION, 7, -1, 0) + b"".join(body)
    return struct.pack(">i", len(frame)) + frame


def connected(world: HotPath, wire: Wire) -> Connection:
    connection = Connection(
        gateway_to(NodeCalls(world.nodes[LEADER]), InflightBytes()), on_open=lambda _: None, on_close=lambda _: None
    )
    connection.connection_made(cast(Any, wire))
    return connection


async def test_an_answer_is_one_write_of_the_objects_that_the_log_keeps() -> None:
    world, wire = HotPath(partitions=3), Wire()
    (partition,) = world.led_by(LEADER)
    world.produce(LEADER, BATCHES * [(partition, encode_batch([NewRecord(None, b"v" * 16_000, 1_000)]))])
    connected(world, wire).data_received(fetched(partition))
    for _ in range(50):
        await asyncio.sleep(0)
        world.scheduler.run_for_ms(1)
    (write,) = wire.writes
    sent = [cast(memoryview, part).obj for part in write if len(part) >= LARGE_BYTES]
    pid = world.nodes[LEADER].state.topics[TOPIC].partitions[partition].pid
    kept = [world.disks[LEADER].get(Table.BATCHES, batch_key(pid, base)) for base in range(BATCHES)]
    assert all(part is stored for part, stored in zip(sent, kept, strict=True))
