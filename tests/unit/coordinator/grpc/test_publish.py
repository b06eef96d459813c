"""PublishRecord and its sessions over gRPC, against a real node: offsets, pipelining, idempotence, typed errors."""

import asyncio

import grpc
import pytest

from smq.clients import InvalidBatch, Producer
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.raft_state.errors import ErrorCode
from smq.records import CONTROL_MASK, CRC_START, TRANSACTIONAL_MASK, NewRecord, decode_batch, encode_batch, restamped
from smq.testing.served import PATIENCE_S, Served, fails, publish_request


def offsets(answers: list[pb.PublishRecordResponse]) -> list[tuple[int, int]]:
    return [(a.base_offset, a.last_offset) for a in answers]


def codes(answers: list[pb.PublishRecordResponse]) -> list[str]:
    return [a.error.name if a.HasField("error") else "" for a in answers]


def records(*values: bytes, **fields: object) -> pb.PublishRecordRequest:
    new = pb.NewRecords(records=[pb.NewRecord(value=v) for v in values])
    return pb.PublishRecordRequest(records=new, **{"partition": 0, "base_sequence": 0, **fields})  # type: ignore[arg-type] # the tests name the fields


async def start_session(served: Served, session_id: str = "s", **fields: object) -> pb.StartPublishSessionResponse:
    request = pb.StartPublishSessionRequest(**{"session_id": session_id, "topic": "t", **fields})  # type: ignore[arg-type] # as above
    response: pb.StartPublishSessionResponse = await served.agent.StartPublishSession(request)
    return response


async def test_batches_of_5_then_3_get_0_to_4_and_5_to_7_and_hwm_8(served: Served) -> None:
    await served.create()
    answers = await served.publish(
        publish_request([b"x"] * 5, correlation_id=1), publish_request([b"x"] * 3, correlation_id=2)
    )
    assert offsets(answers) == [(0, 4), (5, 7)]
    assert answers[0].ts_ns < answers[1].ts_ns
    info = await served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(partition=0, topic="t"))
    assert (info.log_start, info.hwm, info.next_offset) == (0, 8, 8)


async def test_a_thousand_requests_in_flight_get_exactly_0_to_999_in_order(served: Served) -> None:
    await served.create()
    answers = await served.publish(*(publish_request([b"x"], correlation_id=i) for i in range(1000)))
    assert offsets(answers) == [(i, i) for i in range(1000)]


async def test_ten_concurrent_streams_of_100_get_exactly_0_to_999(served: Served) -> None:
    await served.create()
    streams = (served.publish(*(publish_request([b"x"], correlation_id=i) for i in range(100))) for _ in range(10))
    answers = await asyncio.gather(*streams)
    assert sorted(a.base_offset for stream in answers for a in stream) == list(range(1000))


async def test_acks_leader_and_none_are_answered_as_they_promise(served: Served) -> None:
    await served.create()
    answers = await served.publish(
        publish_request([b"x"], correlation_id=1, acks=pb.ACKS_LEADER),
        publish_request([b"x"], correlation_id=2, acks=pb.ACKS_NONE),
    )
    assert offsets(answers) == [(0, 0), (-1, -1)]


async def test_records_are_encoded_with_the_sessions_producer(served: Served) -> None:
    await served.create()
    session = await start_session(served)
    record = pb.NewRecord(
        key=b"", value=b"v", timestamp_ms=123, headers=[pb.Header(key="h", value=b"1"), pb.Header(key="n")]
    )
    request = pb.PublishRecordRequest(
        partition=0,
        session_id="s",
        correlation_id=1,
        base_sequence=0,
        records=pb.NewRecords(records=[record, pb.NewRecord(timestamp_ms=124)]),
    )
    assert offsets(await served.publish(request)) == [(0, 1)]
    fetched = await served.broker.Fetch(
        pb.FetchRequest(partitions=[pb.FetchPartition(partition=0, topic="t", offset=0)], max_wait_ms=9)
    )
    (batch,) = fetched.partitions[0].batches
    first, second = decode_batch(batch.data)
    assert (first.key, first.value, first.timestamp_ms) == (b"", b"v", 123)
    assert list(first.headers) == [("h", b"1"), ("n", None)]
    assert (second.key, second.value) == (None, None)
    assert session.producer_id >= 0


async def test_a_retry_is_stored_once_and_answered_with_the_first_offsets(served: Served) -> None:
    await served.create()
    await start_session(served)
    first = await served.publish(records(b"a", b"b", session_id="s", correlation_id=1, base_sequence=0))
    again = await served.publish(records(b"a", b"b", session_id="s", correlation_id=1, base_sequence=0))
    after = await served.publish(records(b"c", session_id="s", correlation_id=2, base_sequence=2))
    assert offsets(first) == offsets(again) == [(0, 1)]
    assert (first[0].duplicate, again[0].duplicate) == (False, True)
    assert offsets(after) == [(2, 2)]


async def test_a_gap_in_the_sequence_is_refused(served: Served) -> None:
    await served.create()
    await start_session(served)
    answers = await served.publish(
        records(b"a", session_id="s", correlation_id=1, base_sequence=0),
        records(b"b", session_id="s", correlation_id=2, base_sequence=5),
    )
    assert codes(answers) == ["", "OUT_OF_ORDER_SEQUENCE"]


@pytest.mark.parametrize("flag", [TRANSACTIONAL_MASK, CONTROL_MASK], ids=["transactional", "control"])
async def test_a_batch_of_a_transaction_or_of_the_log_itself_is_refused(served: Served, flag: int) -> None:
    data = bytearray(encode_batch([NewRecord(key=None, value=b"v", timestamp_ms=1)]))
    data[CRC_START + 1] |= flag
    flagged = restamped(data, producer_id=-1, producer_epoch=-1, base_sequence=-1)  # with a new CRC

    await served.create()
    answers = await served.publish(pb.PublishRecordRequest(partition=0, topic="t", batch=flagged))
    assert codes(answers) == ["INVALID_BATCH"]
    info = await served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(partition=0, topic="t"))
    assert info.next_offset == 0


async def test_a_bad_request_gets_its_own_error_and_harms_no_other(served: Served) -> None:
    good = encode_batch([NewRecord(key=None, value=b"v", timestamp_ms=1)])
    damaged = good[:-1] + bytes([good[-1] ^ 1])
    bad = [
        pb.PublishRecordRequest(partition=0, topic="t", batch=damaged),
        pb.PublishRecordRequest(partition=0, topic="t", batch=b""),
        pb.PublishRecordRequest(partition=0, topic="t", batch=good + b"x"),
        pb.PublishRecordRequest(partition=0, topic="t"),
        pb.PublishRecordRequest(topic="t", batch=good, partition=1),
        pb.PublishRecordRequest(topic="t", batch=good, partition=-1),
        pb.PublishRecordRequest(partition=0, topic="absent", batch=good),
        pb.PublishRecordRequest(partition=0, session_id="absent", batch=good),
        pb.PublishRecordRequest(partition=0, topic="t", batch=good, timeout_ms=-1),
        pb.PublishRecordRequest(partition=0, topic="t", batch=good, acks=7),  # type: ignore[arg-type] # an enum of the future
        pb.PublishRecordRequest(partition=0, topic="t", records=pb.NewRecords(records=[pb.NewRecord(value=b"v")])),
        pb.PublishRecordRequest(partition=0, topic="t", batch=b"x" * (2 << 20)),
    ]
    expected = [
        "CORRUPT_BATCH",
        "CORRUPT_BATCH",
        "CORRUPT_BATCH",
        "INVALID_REQUEST",
        "UNKNOWN_PARTITION",
        "UNKNOWN_PARTITION",
        "UNKNOWN_TOPIC",
        "UNKNOWN_SESSION",
        "INVALID_REQUEST",
        "INVALID_REQUEST",
        "INVALID_REQUEST",
        "BATCH_TOO_LARGE",
    ]

    await served.create()
    requests = []
    for i, request in enumerate(bad):
        request.correlation_id = 2 * i
        requests += [request, publish_request([b"x"], correlation_id=2 * i + 1)]
    answers = await served.publish(*requests)
    assert codes(answers)[::2] == expected
    assert offsets(answers)[1::2] == [(i, i) for i in range(len(bad))]
    assert all(a.error.message and a.base_offset == -1 for a in answers[::2])


async def test_the_sender_of_a_bad_record_learns_why_and_those_of_the_others_that_it_was_not_theirs(
    served: Served,
) -> None:
    await served.create(config={"cleanup.policy": "compact"})
    async with Producer(format_address(served.server.grpc_address), linger_ms=1_000) as producer:
        sent = [producer.send("t", b"v", key) for key in (b"k", None, b"k")]
        await producer.flush()
        errors = [future.exception() for future in sent]
        with pytest.raises(InvalidBatch, match=r"record 1 of the batch: it has no key.*, and 1 more of its 3 records"):
            await (await producer.send_many("t", [b"v"] * 3, keys=[b"k", None, None]))
        assert (await producer.send("t", b"v", b"k")).offset == 0
    assert all(isinstance(error, InvalidBatch) for error in errors)
    texts = [str(error) for error in errors]
    assert "it has no key" in texts[1]
    assert all("another record of its batch was refused, so send it again (record 1 " in texts[n] for n in (0, 2))


async def test_an_empty_record_list_is_an_error(served: Served) -> None:
    await served.create()
    await start_session(served)
    assert codes(await served.publish(records(session_id="s"))) == ["INVALID_BATCH"]
    negative = records(b"v", session_id="s", base_sequence=-1)
    assert codes(await served.publish(negative)) == ["INVALID_REQUEST"]


async def test_a_stream_that_names_nothing_gets_an_error_that_says_what_to_name(served: Served) -> None:
    await served.create()
    (answer,) = await served.publish(pb.PublishRecordRequest(partition=0, batch=b"x"))
    assert answer.error.name == "INVALID_REQUEST"
    assert "session_id" in answer.error.message


async def test_session_and_topic_stay_in_force_on_their_stream(served: Served) -> None:
    await served.create()
    await start_session(served)
    answers = await served.publish(
        records(b"a", session_id="s", correlation_id=1, base_sequence=0),
        records(b"b", correlation_id=2, base_sequence=1),
        publish_request([b"c"], topic="t", correlation_id=3),
        publish_request([b"d"], topic="", correlation_id=4),
    )
    assert offsets(answers) == [(0, 0), (1, 1), (2, 2), (3, 3)]


async def test_a_duplicate_session_is_an_error_and_a_retry_of_the_same_request_is_not(served: Served) -> None:
    await served.create()
    first = await start_session(served, request_id=b"r" * 16)
    again = await start_session(served, request_id=b"r" * 16)
    assert again.producer_id == first.producer_id
    for request_id in (b"", b"s" * 16):
        assert (await fails(start_session(served, request_id=request_id))).name == "SESSION_EXISTS"
    other = await start_session(served, "other")
    assert other.producer_id != first.producer_id
    assert (await fails(start_session(served, "other"))).name == "SESSION_EXISTS", "no id of a request is no retry"
    assert (first.partition_count, first.batch_bytes_max) == (1, 1_048_588)


async def test_closing_a_session_deactivates_it(served: Served) -> None:
    await served.create()
    await start_session(served)
    await served.agent.ClosePublishSession(pb.ClosePublishSessionRequest(session_id="s"))
    assert codes(await served.publish(records(b"v", session_id="s"))) == ["UNKNOWN_SESSION"]
    closing = served.agent.ClosePublishSession(pb.ClosePublishSessionRequest(session_id="s"))
    assert (await fails(closing)).name == "UNKNOWN_SESSION"
    await start_session(served)


async def test_resuming_a_producer_bumps_its_epoch_and_fences_the_old_one(served: Served) -> None:
    await served.create()
    old = await start_session(served)
    await served.publish(records(b"a", session_id="s", base_sequence=0))
    new = await start_session(served, "s2", resume=True, producer_id=old.producer_id, producer_epoch=old.producer_epoch)
    assert (new.producer_id, new.producer_epoch) == (old.producer_id, old.producer_epoch + 1)
    await served.publish(records(b"b", session_id="s2", base_sequence=0))
    assert codes(await served.publish(records(b"c", session_id="s", base_sequence=1))) == ["PRODUCER_FENCED"]
    stale = start_session(served, "s3", resume=True, producer_id=old.producer_id, producer_epoch=old.producer_epoch)
    assert (await fails(stale)).name == "PRODUCER_FENCED"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"topic": "absent"}, "UNKNOWN_TOPIC"),
        ({"session_id": ""}, "INVALID_REQUEST"),
        ({"request_id": b"short"}, "INVALID_REQUEST"),
    ],
)
async def test_a_session_that_cannot_be_opened_is_a_typed_error_and_leaves_its_id_free(
    served: Served, fields: dict[str, object], name: str
) -> None:
    await served.create()
    detail = await fails(start_session(served, **{"session_id": "s", **fields}))  # type: ignore[arg-type] # the cases name the fields
    assert (detail.name, detail.definite) == (name, True)
    await start_session(served)


async def test_a_client_that_goes_away_leaves_its_batches_and_a_healthy_node(served: Served) -> None:
    await served.create()
    call = served.agent.PublishRecord()
    for i in range(50):
        await call.write(publish_request([b"x"], correlation_id=i))
    await call.read()
    call.cancel()
    (answer,) = await served.publish(publish_request([b"after"]))
    assert 1 <= answer.base_offset <= 50


async def test_more_requests_than_may_be_in_flight_are_all_answered(served: Served) -> None:
    await served.create()
    answers = await served.publish(*(publish_request([b"x" * 1000], correlation_id=i) for i in range(3000)))
    assert offsets(answers) == [(i, i) for i in range(3000)]


async def test_a_request_to_a_node_that_is_stopping_ends(served: Served) -> None:
    await served.create()
    served.server.node.stop()
    async with asyncio.timeout(PATIENCE_S):
        try:
            (answer,) = await served.publish(publish_request([b"x"], timeout_ms=200))
        except grpc.aio.AioRpcError:
            return
    assert ErrorCode[answer.error.name].is_retriable
