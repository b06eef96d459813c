"""SubscribeRecord over gRPC, against a real node: positions, seeks, acknowledgements, ends, bounds."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc import agent
from smq.coordinator.grpc.subscribe import Window
from smq.coordinator.http.console.record_reads import Wish, read
from smq.coordinator.limits import SUBSCRIBE_COPIES
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.reader_memory import ReaderMemory
from smq.records import CODECS, NewRecord, encode_batch
from smq.replication.log import decoding
from smq.testing.served import PATIENCE_S, Served, fails, publish_request, served_node

T = TypeVar("T")
OPEN_BYTES_MAX: Final = 17 << 20
EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs do not know it


class Reader:
    """A subscription that a test drives by hand."""

    def __init__(self, served: Served, **init: Any) -> None:
        self._call = served.agent.SubscribeRecord()
        self._init = {
            "subscription_id": "sub",
            "topic": "t",
            "partition": 0,
            "offset_type": pb.RESET_TO_EARLIEST,
            **init,
        }

    async def __aenter__(self) -> "Reader":
        await self._call.write(pb.SubscribeRecordRequest(init=pb.SubscribeInit(**self._init)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    async def read(self) -> pb.SubscribeRecordResponse:
        async with asyncio.timeout(PATIENCE_S):
            response = await self._call.read()
        assert response is not EOF, await self._call.details()
        return response  # type: ignore[no-any-return] # the stub is Any

    async def read_records(self, count: int) -> list[int]:
        """Offsets of the next `count` records."""
        got: list[int] = []
        while len(got) < count:
            got += [r.offset for r in (await self.read()).records]
        return got

    async def seek(self, offset: int) -> None:
        await self._call.write(pb.SubscribeRecordRequest(seek=pb.SubscribeSeek(offset=offset)))

    async def ack(self, next_offset: int) -> None:
        await self._call.write(pb.SubscribeRecordRequest(ack=pb.SubscribeAck(next_offset=next_offset)))

    async def send(self, request: pb.SubscribeRecordRequest) -> None:
        await self._call.write(request)

    async def error(self) -> pb.ErrorDetail:
        """The detail of the error that ends the stream."""
        return await fails(self._read_to_the_end())

    async def _read_to_the_end(self) -> None:
        while await self._call.read() is not EOF:
            pass


async def store(served: Served, counts: list[int], **topic: Any) -> None:
    """Makes a topic "t" of one partition that holds batches of this many records."""
    await served.create(**topic)
    await served.fill(counts)


def records_of(responses: list[pb.SubscribeRecordResponse]) -> list[tuple[int, bytes]]:
    return [(r.offset, r.value) for response in responses for r in response.records]


# ------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("codec", CODECS)
async def test_what_streams_hold_that_are_not_read_is_given_back_and_read_again_later(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six streams, room for one of their batches, and clients that do not read until all streams are stuck."""
    value = bytes(10_000)
    memories = list[ReaderMemory[Any]]()

    class Small(ReaderMemory[T], Generic[T]):
        def __init__(self) -> None:
            super().__init__(open_bytes_max=OPEN_BYTES_MAX, lease_s=0.05)
            memories.append(self)

    monkeypatch.setattr(agent, "ReaderMemory", Small)

    async with served_node(tmp_path, request_bytes_max=32 << 20) as served:
        await served.create(config={"max.message.bytes": str(16 << 20)})
        batch = encode_batch([NewRecord(None, value, 0)] * 700, codec=codec)
        (answer,) = await served.publish(pb.PublishRecordRequest(topic="t", partition=0, batch=batch))
        assert not answer.HasField("error"), answer
        (memory,) = memories
        async with AsyncExitStack() as stack:
            readers = [
                await stack.enter_async_context(Reader(served, subscription_id=f"s{n}", max_bytes=1 << 20))
                for n in range(6)
            ]
            async with asyncio.timeout(PATIENCE_S):
                while memory._sending.used_bytes < len(readers) * SUBSCRIBE_COPIES << 20:  # noqa: ASYNC110 - as below
                    await asyncio.sleep(0.01)
            assert memory._open.used_bytes <= OPEN_BYTES_MAX
            for reader in readers:
                assert await reader.read_records(700) == list(range(700))
        async with asyncio.timeout(PATIENCE_S):
            while memory.used_bytes:  # noqa: ASYNC110 - memory is a state, not an event
                await asyncio.sleep(0.01)


async def test_no_record_is_decoded_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()
    plain = decoding._plain

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plain(*args)

    monkeypatch.setattr(decoding, "_plain", noted)

    async with served_node(tmp_path) as served:
        await store(served, [5])
        await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
        await served.broker.SearchRecords(pb.SearchRecordsRequest(topic="t", partition=0, offset=0))
        await read(NodeCalls(served.server.node), "t", 0, 0, Wish())
        assert [name.rpartition("_")[0] for name in threads] == ["smq-decode-streams", *["smq-decode-pages"] * 2]


# ---------------------------------------------------------------------------------------------------- positions
async def test_earliest_reads_every_record_once_and_stops_at_the_end_if_asked(served: Served) -> None:
    await store(served, [5, 3, 4])
    responses = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    assert records_of(responses) == [(i, b"%d" % i) for i in range(12)]
    started = responses[0].started
    assert (started.offset, started.clamped, started.lo, started.hi) == (0, False, 0, 12)
    assert all(not r.HasField("started") for r in responses[1:])
    assert (responses[-1].next_offset, responses[-1].hwm, responses[-1].lag, responses[-1].at_end) == (12, 12, 0, True)


async def test_records_carry_keys_values_headers_and_both_times(served: Served) -> None:
    new = [
        NewRecord(key=b"", value=None, timestamp_ms=7, headers=[("h", b"1"), ("n", None)]),
        NewRecord(key=None, value=b"", timestamp_ms=9),
    ]

    await served.create()
    for codec in CODECS:
        request = pb.PublishRecordRequest(partition=0, topic="t", batch=encode_batch(new, codec=codec))
        (answer,) = await served.publish(request)
        responses = await served.subscribe(
            offset_type=pb.EXACT_OFFSET, offset_value=answer.base_offset, stop_at_end=True
        )
        first, second = [r for response in responses for r in response.records]
        assert (first.HasField("key"), first.key, first.HasField("value"), first.timestamp_ms) == (True, b"", False, 7)
        assert [(h.key, h.HasField("value"), h.value) for h in first.headers] == [("h", True, b"1"), ("n", False, b"")]
        assert (second.HasField("key"), second.HasField("value"), second.value) == (False, True, b"")
        assert (first.ts_ns, second.ts_ns) == (answer.ts_ns, answer.ts_ns + 1)


async def test_latest_waits_at_the_end_and_gets_what_comes_after(served: Served) -> None:
    await store(served, [5])
    async with Reader(served, offset_type=pb.RESET_TO_LATEST) as reader:
        first = await reader.read()
        assert (first.started.offset, first.at_end, first.lag) == (5, True, 0)
        await served.publish(publish_request([b"new"]))
        assert await reader.read_records(1) == [5]


async def test_exact_ts_ns_starts_at_the_first_record_at_or_after(served: Served) -> None:
    await store(served, [])
    times = [a.ts_ns for a in await served.publish(*(publish_request([b"x"] * 2, correlation_id=i) for i in range(3)))]
    for value, expected in [(0, 0), (times[0], 0), (times[0] + 1, 1), (times[2], 4), (times[2] + 2, 6)]:
        async with Reader(served, offset_type=pb.EXACT_TS_NS, offset_value=value) as reader:
            assert (await reader.read()).started.offset == expected


BASE, LO, HI = 2**40 + 3, 2**40 + 8, 2**40 + 15  # two batches are written, and the first is deleted
Init = dict[str, Any]
STARTS: list[tuple[Init, tuple[int, bool] | None]] = [  # to (offset, clamped); None is OFFSET_OUT_OF_RANGE
    *(({"offset_type": pb.EXACT_OFFSET, "offset_value": value}, (value, False)) for value in (LO, LO + 3, HI - 1)),
    *(({"offset_type": pb.EXACT_OFFSET, "offset_value": value}, None) for value in (-1, LO - 1, HI, HI + 1)),
    ({"offset_type": pb.RESET_TO_OFFSET, "offset_value": -3}, (LO, True)),
    ({"offset_type": pb.RESET_TO_OFFSET, "offset_value": LO + 2}, (LO + 2, False)),
    ({"offset_type": pb.RESET_TO_OFFSET, "offset_value": HI}, (HI, False)),
    ({"offset_type": pb.RESET_TO_OFFSET, "offset_value": HI + 9}, (HI, True)),
    ({"offset_type": pb.RESUME_OR_EARLIEST, "group": "new"}, (LO, False)),
    ({"offset_type": pb.RESUME_OR_LATEST, "group": "new"}, (HI, False)),
    ({"offset_type": pb.RESUME_OR_EARLIEST, "group": "inside"}, (LO + 2, False)),
    ({"offset_type": pb.RESUME_OR_LATEST, "group": "inside"}, (LO + 2, False)),
    ({"offset_type": pb.RESUME_OR_EARLIEST, "group": "gone"}, None),
    ({"offset_type": pb.RESUME_OR_EARLIEST, "group": "gone", "reset_if_gone": True}, (LO, True)),
]


async def test_a_stream_starts_where_the_table_of_positions_says_and_reads_on_from_there(served: Served) -> None:
    await store(served, [5, 7], start_offset=BASE)
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=LO))
    for group, offset in (("inside", LO + 2), ("gone", LO - 3)):
        position = pb.PartitionOffset(partition=0, topic="t", offset=offset)
        await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=group, offsets=[position]))
    for number, (init, expected) in enumerate(STARTS):
        async with Reader(served, subscription_id=str(number), **init) as reader:
            if expected is None:
                error = await reader.error()
                assert (error.name, error.lo, error.hi) == ("OFFSET_OUT_OF_RANGE", LO, HI), init
            else:
                response = await reader.read()
                assert (response.started.offset, response.started.clamped) == expected, init
                first = [record.offset for record in response.records]
                rest = await reader.read_records(HI - expected[0] - len(first))
                assert first + rest == list(range(expected[0], HI)), init


# ------------------------------------------------------------------------------------------- seek, lag, window
async def test_seeks_backward_forward_and_to_the_end_are_followed(served: Served) -> None:
    await store(served, [5, 3, 4])
    async with Reader(served) as reader:
        assert await reader.read_records(12) == list(range(12))
        for target in (3, 8, 0, 12):
            await reader.seek(target)
            response = await reader.read()
            while not response.HasField("started"):
                response = await reader.read()
            assert response.started.offset == target
            assert response.lag == 12 - target
            assert response.at_end == (target == 12)
            assert await reader.read_records(12 - target) == list(range(target, 12))
        await served.publish(publish_request([b"new"]))
        assert await reader.read_records(1) == [12]


@pytest.mark.parametrize("target", [-1, 4, 13])
async def test_a_seek_outside_the_range_ends_the_stream_with_the_range(served: Served, target: int) -> None:
    await store(served, [5, 7])
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=5))
    async with Reader(served) as reader:
        await reader.read()
        await reader.seek(target)
        error = await reader.error()
    assert (error.name, error.lo, error.hi) == ("OFFSET_OUT_OF_RANGE", 5, 12)


async def test_without_acknowledgement_no_more_than_the_window_is_sent(served: Served) -> None:
    await store(served, [2, 2])
    async with Reader(served, max_bytes=1, window_bytes=1) as reader:
        await reader.read()
        for offset in range(4):
            response = await reader.read()
            assert [r.offset for r in response.records] == [offset]
            await served.publish(publish_request([b"more"]))  # new records do not widen the window
            await reader.ack(response.next_offset)
        assert [r.offset for r in (await reader.read()).records] == [4]
        for _ in range(3):
            await served.publish(publish_request([b"more"]))
        await reader.seek(0)
        assert (await reader.read()).HasField("started"), "nothing came before the start"


async def test_a_seek_clears_the_window(served: Served) -> None:
    await store(served, [5])
    async with Reader(served, max_bytes=1, window_bytes=1) as reader:
        await reader.read()
        await reader.read_records(1)
        await reader.seek(3)
        assert await reader.read_records(1) == [3]


def test_the_window_counts_what_is_sent_and_frees_what_is_acknowledged() -> None:
    window = Window(100)
    seen = []
    steps: list[Callable[[], None]] = [
        lambda: window.sent(5, 60),
        lambda: window.sent(9, 60),
        lambda: window.acknowledged(4),
        lambda: window.acknowledged(5),
        lambda: window.sent(12, 60),
        window.reset,
    ]
    for step in steps:
        step()
        seen.append(window.is_full)
    assert seen == [False, True, True, False, True, False]


def test_a_window_of_zero_is_never_full() -> None:
    window = Window(0)
    window.sent(1, 1 << 40)
    assert not window.is_full


# ------------------------------------------------------------------------------------------------ ends, errors
async def test_the_stop_offset_is_exclusive_and_cuts_a_batch(served: Served) -> None:
    await store(served, [5, 3, 4])
    for at_end in (False, True):  # whichever comes first
        init = {"offset_value": 2, "stop_offset": 6, "stop_at_end": at_end}
        responses = await served.subscribe(offset_type=pb.EXACT_OFFSET, **init)
        assert [o for o, _ in records_of(responses)] == [2, 3, 4, 5]
        assert responses[-1].next_offset == 6


async def test_a_stop_at_or_before_the_start_ends_immediately(served: Served) -> None:
    await store(served, [12])
    for init in ({"stop_offset": 3, "offset_value": 3}, {"stop_offset": 1, "offset_value": 5}):
        responses = await served.subscribe(offset_type=pb.EXACT_OFFSET, **init)
        assert records_of(responses) == []
        assert len(responses) == 1


async def test_an_empty_partition_read_to_its_end_is_an_empty_stream(served: Served) -> None:
    await store(served, [])
    (only,) = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    assert (only.next_offset, only.at_end) == (0, True)


async def test_responses_are_cut_near_max_bytes(served: Served) -> None:
    await store(served, [])
    await served.publish(publish_request([b"x" * 1000] * 50))
    responses = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True, max_bytes=5000)
    assert [o for o, _ in records_of(responses)] == list(range(50))
    assert max(len(r.records) for r in responses) == 5


async def test_a_duplicate_subscription_is_an_error_and_ending_the_first_frees_the_id(served: Served) -> None:
    await store(served, [])
    async with Reader(served) as first:
        await first.read()
        async with Reader(served) as second:
            assert (await second.error()).name == "SESSION_EXISTS"
        await served.publish(publish_request([b"still"]))
        assert await first.read_records(1) == [0]
    attempts = 0
    while not await _is_accepted(served) and attempts < 1000:  # the node hears of the cancellation a moment later
        attempts += 1
    assert attempts < 1000


async def _is_accepted(served: Served) -> bool:
    try:
        await served.subscribe(subscription_id="sub", offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    except grpc.aio.AioRpcError:
        return False
    return True


@pytest.mark.parametrize(
    ("init", "name"),
    [
        ({"topic": "absent"}, "UNKNOWN_TOPIC"),
        ({"partition": 1}, "UNKNOWN_PARTITION"),
        ({"partition": -1}, "UNKNOWN_PARTITION"),
        ({"offset_type": 0}, "INVALID_REQUEST"),
        ({"offset_type": 99}, "INVALID_REQUEST"),
        ({"offset_type": pb.RESUME_OR_LATEST}, "INVALID_REQUEST"),
        ({"stop_offset": -1}, "INVALID_REQUEST"),
        ({"max_bytes": -1}, "INVALID_REQUEST"),
        ({"subscription_id": ""}, "INVALID_REQUEST"),
    ],
)
async def test_a_subscription_that_makes_no_sense_is_a_typed_error(
    served: Served, init: dict[str, Any], name: str
) -> None:
    await store(served, [1])
    async with Reader(served, **init) as reader:
        error = await reader.error()
    assert (error.name, error.definite) == (name, True)


async def test_a_stream_that_does_not_begin_with_init_or_has_two_is_refused(served: Served) -> None:
    await store(served, [1])
    call = served.agent.SubscribeRecord()
    await call.write(pb.SubscribeRecordRequest(ack=pb.SubscribeAck(next_offset=1)))
    assert (await fails(call.read())).name == "INVALID_REQUEST"
    async with Reader(served) as reader:
        await reader.send(pb.SubscribeRecordRequest(init=pb.SubscribeInit(partition=0, subscription_id="x", topic="t")))
        assert (await reader.error()).name == "INVALID_REQUEST"


async def test_records_that_do_not_decode_end_the_stream_and_name_the_next_offset(served: Served) -> None:
    good = encode_batch([NewRecord(key=None, value=b"v", timestamp_ms=1)] * 3)
    broken = _with_crc(good[:70] + b"\xff" * (len(good) - 70))

    await store(served, [])
    await served.publish(
        pb.PublishRecordRequest(partition=0, topic="t", batch=broken, correlation_id=1), publish_request([b"after"])
    )
    async with Reader(served) as reader:
        error = await reader.error()
    assert error.name == "INVALID_BATCH"
    assert "seek to 3" in error.message
    responses = await served.subscribe(offset_type=pb.EXACT_OFFSET, offset_value=3, stop_at_end=True)
    assert [o for o, _ in records_of(responses)] == [3]


def _with_crc(batch: bytes) -> bytes:
    from crc32c import crc32c

    return batch[:17] + crc32c(batch[21:]).to_bytes(4, "big") + batch[21:]


async def test_a_waiting_subscription_ends_with_a_typed_error_when_the_node_stops(served: Served) -> None:
    await store(served, [1])
    async with Reader(served, offset_type=pb.RESET_TO_LATEST) as reader:
        await reader.read()
        stopping = asyncio.create_task(served.server.stop())
        assert (await reader.error()).name == "SHUTTING_DOWN"
        await stopping


async def test_after_a_restart_a_reader_continues_at_its_position(tmp_path: Path) -> None:
    async with served_node(tmp_path) as served:
        await store(served, [100, 50])
    async with served_node(tmp_path) as served:
        await served.wait_leaders()
        (answer,) = await served.publish(publish_request([b"150"]))
        assert answer.base_offset == 150
        responses = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
        assert records_of(responses) == [(i, b"%d" % i) for i in range(151)]
