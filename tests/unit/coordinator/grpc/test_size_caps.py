"""Sizes of batches and requests on gRPC and Kafka: below, at and above each limit, and the effect on other clients."""

import asyncio
import struct
from pathlib import Path

import grpc
import pytest

from smq.clients import BatchTooLarge, Producer
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator import limits
from smq.coordinator.config.addresses import format_address
from smq.coordinator.grpc.open_streams import AnswerBudget
from smq.coordinator.kafka.api_keys import ApiKey, request_message, response_message
from smq.coordinator.kafka.codec import compile_decoder, compile_encoder
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.limits import MIB
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.limits import MESSAGE_BYTES_DEFAULT
from smq.records import NewRecord, encode_batch
from smq.testing.served import PATIENCE_S, Served, fails, served_node

KAFKA = ("127.0.0.1", 0)


def batch_of_size(size: int) -> bytes:
    """A valid batch of exactly this many bytes."""
    value = size - 100
    while True:
        batch = encode_batch([NewRecord(key=None, value=bytes(value), timestamp_ms=1)])
        if len(batch) == size:
            return bytes(batch)
        value += size - len(batch)


@pytest.mark.parametrize("excess", [-1, 0, 1])
async def test_a_batch_up_to_the_limit_is_stored_and_one_byte_more_is_refused(served: Served, excess: int) -> None:
    await served.create()
    batch = batch_of_size(MESSAGE_BYTES_DEFAULT + excess)
    small = encode_batch([NewRecord(key=None, value=b"x", timestamp_ms=1)])
    first, second = await served.publish(
        pb.PublishRecordRequest(partition=0, topic="t", batch=batch, correlation_id=1),
        pb.PublishRecordRequest(partition=0, topic="t", batch=small, correlation_id=2),
    )
    assert first.error.name == ("BATCH_TOO_LARGE" if excess > 0 else "")
    assert not second.HasField("error"), "the stream goes on"


@pytest.mark.parametrize("excess", [-1, 0, 1])
async def test_a_grpc_request_up_to_the_limit_is_taken_and_one_byte_more_is_refused(
    tmp_path: Path, excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic takes any batch: it is the request that is too large."""
    monkeypatch.setattr(limits, "ANSWER_BYTES_MAX", 2 * MIB)

    async with served_node(tmp_path) as served:
        await served.create(config={"max.message.bytes": str(100 * MIB)})
        request = pb.PublishRecordRequest(partition=0, topic="t", correlation_id=1, batch=bytes(2 * MIB - 100))
        around = request.ByteSize() - len(request.batch)
        request.batch = batch_of_size(2 * MIB + excess - around)
        assert request.ByteSize() == 2 * MIB + excess
        (answer,) = await served.publish(request)
        assert answer.error.name == ("BATCH_TOO_LARGE" if excess > 0 else "")


async def test_a_record_far_above_the_limit_says_which_limit_and_costs_no_other(tmp_path: Path) -> None:
    """It said "raise the cluster's limit", which is none."""

    async with served_node(tmp_path, request_bytes_max=2 * MIB) as served:
        await served.create()
        async with Producer(format_address(served.server.grpc_address)) as producer:
            with pytest.raises(BatchTooLarge, match=r"3145\d{3} bytes for t/0 .*request_bytes_max.*message\.bytes"):
                await producer.send("t", bytes(3 * MIB), partition=0)
            assert (await producer.send("t", b"small", partition=0)).offset == 0


async def test_a_grpc_message_far_above_the_limit_costs_its_own_stream_alone(tmp_path: Path) -> None:
    async with served_node(tmp_path, request_bytes_max=2 * MIB) as served:
        await served.create()
        waste = pb.PublishRecordRequest(partition=0, topic="t", batch=bytes(3 * MIB + limits.GRPC_RECEIVE_SLACK_BYTES))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.publish(waste)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.fill([3])


@pytest.mark.parametrize("excess", [-1, 0, 1])
async def test_a_kafka_request_up_to_the_limit_is_read_and_one_byte_more_closes_its_connection(
    tmp_path: Path, excess: int
) -> None:
    """ApiVersions 0, followed by bytes that a request may carry."""

    async with served_node(tmp_path, request_bytes_max=MIB, kafka_address=KAFKA) as served:
        assert served.server.kafka_address is not None
        size = MIB + excess
        request = struct.pack(">hhih", 18, 0, 1, -1).ljust(size, b"\0")
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*served.server.kafka_address)
            writer.write(struct.pack(">i", size) + request)
            try:
                answered = len(await reader.read(4)) == 4
            except ConnectionResetError:
                answered = False
        writer.close()
        assert answered is (excess <= 0)


def _produce(records: dict[int, bytes]) -> bytes:
    parts = [{"index": partition, "records": [data]} for partition, data in records.items()]
    body = {"acks": -1, "timeout_ms": 9_000, "topic_data": [{"name": "t", "partition_data": parts}]}
    encoded = b"".join(compile_encoder(request_message(ApiKey.PRODUCE), 9)(body))
    request = struct.pack(">hhih", ApiKey.PRODUCE, 9, 1, -1) + b"\0" + encoded
    return struct.pack(">i", len(request)) + request


async def _produced(served: Served, records: dict[int, bytes]) -> list[tuple[int, int]]:
    """Code and base offset of each partition. Another request of the connection is answered after that."""
    assert served.server.kafka_address is not None
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*served.server.kafka_address)
        writer.write(_produce(records) + struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 0, 2, -1))
        answer = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        assert int.from_bytes((await reader.readexactly(8))[4:], "big") == 2
    writer.close()
    body = compile_decoder(response_message(ApiKey.PRODUCE), 9)(memoryview(answer), 5)
    (topic,) = body["responses"]
    return [(part["error_code"], part["base_offset"]) for part in topic["partition_responses"]]


async def test_a_produce_request_beyond_the_limit_is_answered_and_its_connection_goes_on(tmp_path: Path) -> None:
    async with served_node(tmp_path, request_bytes_max=2 * MIB, kafka_address=KAFKA) as served:
        await served.create(partitions=2)
        small = encode_batch([NewRecord(None, b"v", 1)])
        too_large = (KafkaError.MESSAGE_TOO_LARGE, -1)
        assert await _produced(served, {0: bytes(3 * MIB), 1: small}) == [too_large] * 2
        assert await _produced(served, {0: small, 1: small}) == [(KafkaError.NONE, 0)] * 2


async def test_by_default_a_node_takes_the_batches_that_a_topic_may_have(tmp_path: Path) -> None:
    async with served_node(tmp_path, kafka_address=KAFKA) as served:
        await served.create(config={"max.message.bytes": "50000000"})
        assert await _produced(served, {0: batch_of_size(20 * MIB)}) == [(KafkaError.NONE, 0)]


async def test_a_setting_that_no_request_could_use_is_refused(tmp_path: Path) -> None:
    async with served_node(tmp_path, request_bytes_max=2 * MIB) as served:
        config = {"max.message.bytes": str(2 * MIB)}
        error = await fails(served.admin.CreateTopic(pb.CreateTopicRequest(name="t", partition_count=1, config=config)))
        assert (error.name, "request_bytes_max" in error.message) == ("INVALID_CONFIG", True)
        await served.create(config={"max.message.bytes": str(MIB)})
        error = await fails(served.admin.AlterTopic(pb.AlterTopicRequest(name="t", set=config)))
        assert error.name == "INVALID_CONFIG"


# ------------------------------------------------------------------------------------- answers to gRPC fetches
async def test_answers_of_one_connection_have_their_share_and_others_have_theirs() -> None:
    budget = AnswerBudget(connection_bytes_max=10, node_bytes_max=25)
    async with budget.reserved("a", 4, 1_000), budget.reserved("a", 6, 1_000):
        with pytest.raises(SmqError) as refused:
            async with budget.reserved("a", 1, 10):
                pass
        assert refused.value.code is ErrorCode.OVERLOADED
        async with budget.reserved("b", 10, 1_000), budget.reserved("c", 5, 1_000):
            assert budget.used_bytes == 25
            with pytest.raises(SmqError):
                async with budget.reserved("d", 1, 10):
                    pass
    assert budget.used_bytes == 0
    async with budget.reserved("d", 1_000, 1_000):
        pass  # larger than everything: alone
    assert budget._connections == {}, "a connection that holds nothing is forgotten"


async def test_an_answer_counts_until_its_call_has_ended_however_it_ends() -> None:
    budget = AnswerBudget(connection_bytes_max=10, node_bytes_max=100)
    sent = asyncio.Event()

    async def call() -> None:
        async with budget.reserved("a", 8, 10_000):
            pass
        budget.hold("a", 8)
        await sent.wait()

    calls = [asyncio.create_task(call()) for _ in range(2)]
    waiting = asyncio.create_task(_wait_in(budget))
    for _ in range(10):
        await asyncio.sleep(0)
    assert budget.used_bytes == 8, "the second has no room before the first is gone"
    calls[0].cancel()
    sent.set()
    ends = await asyncio.gather(*calls, waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, type(None), type(None)]
    assert budget.used_bytes == 0


async def _wait_in(budget: AnswerBudget) -> None:
    async with budget.reserved("a", 9, 10_000):
        pass
