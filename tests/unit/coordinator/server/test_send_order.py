"""A pipelining producer whose first batch is refused, by Kafka and by gRPC: none of the others overtakes it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.coordinator.grpc.publish import PublishStream
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.byte_budget import overloaded
from smq.raft_state.ids import Offset
from smq.records import NewRecord, encode_batch, parse_header
from smq.replication.partition.intake import Intake
from smq.testing.kafka_client import RawKafka
from smq.testing.served import Served, served_node

BATCHES = 5  # as many as librdkafka's idempotent producer has in flight
PRODUCER = 4711


def sent(sequence: int) -> bytes:
    record = NewRecord(key=None, value=b"%d" % sequence, timestamp_ms=1)
    return encode_batch([record], producer_id=PRODUCER, producer_epoch=0, base_sequence=sequence)


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's queue is full when the first batch comes, and has room when the second does."""
    looks: list[None] = []

    def has_room(_self: Intake) -> bool:
        looks.append(None)
        return len(looks) > 1

    monkeypatch.setattr(Intake, "has_room", property(has_room))


def stored(served: Served) -> list[int]:
    """The sequences in the log."""
    (replica,) = served.server.node.replicas.all()
    values = replica.log.read(Offset(0), replica.log.appended_end, 1 << 20)
    return [parse_header(value.batch).base_sequence for value in values]


async def test_on_the_kafka_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipeline(address: str) -> list[list[KafkaError]]:
        """Sends everything without waiting, then everything from the first refused batch on, until none is left."""
        raw, left = RawKafka(address), list(range(BATCHES))
        rounds: list[list[KafkaError]] = []
        try:
            while left and len(rounds) < 9:
                for sequence in left:
                    data: Any = [{"name": "t", "partition_data": [{"index": 0, "records": [sent(sequence)]}]}]
                    raw.send(ApiKey.PRODUCE, 9, acks=-1, timeout_ms=10_000, topic_data=data)
                answers = [raw.receive(ApiKey.PRODUCE, 9)[1] for _ in left]
                codes = [KafkaError(a["responses"][0]["partition_responses"][0]["error_code"]) for a in answers]
                left = [n for n, code in zip(left, codes, strict=True) if code is not KafkaError.NONE]
                rounds.append(codes)
        finally:
            raw.close()
        return rounds

    async with served_node(tmp_path, kafka_address=("127.0.0.1", 0)) as served:
        await served.create()
        refuse_once(monkeypatch)
        address = served.server.kafka_address
        assert address is not None
        rounds = await asyncio.to_thread(pipeline, format_address(address))
        assert rounds == [[KafkaError.NOT_ENOUGH_REPLICAS] * BATCHES, [KafkaError.NONE] * BATCHES]
        assert stored(served) == list(range(BATCHES))


def requests(sequences: range) -> list[pb.PublishRecordRequest]:
    return [pb.PublishRecordRequest(partition=0, topic="t", correlation_id=n, batch=sent(n)) for n in sequences]


@pytest.mark.parametrize("where", ["the node", "the stream"])
async def test_over_grpc(served: Served, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    await served.create()
    if where == "the node":
        refuse_once(monkeypatch)
    else:
        admit, asked = PublishStream._admit, []

        async def admit_later(self: PublishStream, size: int, timeout_ms: int) -> None:
            asked.append(size)
            if len(asked) == 1:
                raise overloaded("the node had no room")
            await admit(self, size, timeout_ms)

        monkeypatch.setattr(PublishStream, "_admit", admit_later)
    answers = await served.publish(*requests(range(BATCHES)))
    assert [a.error.name for a in answers] == ["OVERLOADED"] * BATCHES
    answers = await served.publish(*requests(range(BATCHES)))
    assert [(a.error.name, a.base_offset) for a in answers] == [("", n) for n in range(BATCHES)]
    assert stored(served) == list(range(BATCHES))
