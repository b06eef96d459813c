"""MirrorRecord over gRPC, against a real node: batches of another log keep their offsets, or are refused."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.ids import Offset
from smq.records import (
    HEADER_BYTES,
    NewRecord,
    build_batch,
    empty_batch,
    encode_batch,
    is_same_batch,
    marker_batch,
    parse_header,
    patched_prefix,
)
from smq.testing.served import Served, publish_request
from tests.unit.coordinator.grpc.test_publish import codes, offsets

MARKER = marker_batch(producer_id=9, producer_epoch=3, is_commit=False, timestamp_ms=5)


def at(base: int, batch: bytes, **fields: int) -> bytes:
    """The batch as another log has it: at this offset, in epoch 77, perhaps with other fields."""
    header = parse_header(batch)
    if fields:
        batch = build_batch(replace(header, **fields), batch[HEADER_BYTES:])
        header = parse_header(batch)
    return patched_prefix(base, header, 77) + batch[16:]


def records(count: int, codec: str = "none", **producer: int) -> bytes:
    new = [NewRecord(b"k%d" % i, b"v", 1_000 + i, [("h", b"x")]) for i in range(count)]
    return encode_batch(new, codec=codec, **producer)  # type: ignore[arg-type] # the tests name the producer's fields


OWN = {"producer_id": 9, "producer_epoch": 3, "base_sequence": 40}
# A log of every kind of batch: compressed, with a hole in it, of an aborted transaction, a gap between two batches.
SOURCE = [
    at(5, records(3, "gzip")),
    at(8, records(2), last_offset_delta=6),
    at(15, encode_batch([NewRecord(b"k", b"v", 7)], is_transactional=True, **OWN)),  # type: ignore[arg-type] # as above
    at(16, MARKER),
    at(17, empty_batch(0, 1_000_000)),
    at(1_000_017, records(1, "zstd")),
]


async def mirror(served: Served, *batches: bytes, **fields: object) -> list[pb.PublishRecordResponse]:
    sent = {"topic": "t", "partition": 0, **fields}
    requests = [
        pb.PublishRecordRequest(batch=batch, correlation_id=i, **sent)  # type: ignore[arg-type] # as above
        for i, batch in enumerate(batches)
    ]
    return await served.publish(*requests, is_mirror=True)


async def opened(served: Served) -> None:
    """For producers."""
    await served.admin.AlterTopic(pb.AlterTopicRequest(name="t", set={"mirrored": "false"}))
    while served.server.node.state.topics["t"].partitions[0].is_opening:  # noqa: ASYNC110 - the state says no event
        await asyncio.sleep(0)


async def created(served: Served) -> None:
    await served.create(config={"mirrored": "true", "compression.type": "lz4"}, start_offset=5)


async def test_another_log_comes_with_its_offsets_and_bytes_and_again_is_the_same(served: Served) -> None:
    await created(served)
    first = await mirror(served, *SOURCE)
    assert offsets(first) == [(5, 7), (8, 14), (15, 15), (16, 16), (17, 1_000_016), (1_000_017, 1_000_017)]
    again = await mirror(served, *SOURCE)
    assert [(a.base_offset, a.last_offset, a.ts_ns) for a in again] == [
        (a.base_offset, a.last_offset, a.ts_ns) for a in first
    ]
    assert [a.duplicate for a in first + again] == [False] * 6 + [True] * 6

    log = served.server.node.replicas.log(served.server.node.state.topics["t"].partitions[0].pid)
    assert log is not None
    stored = log.read(Offset(5), Offset(1_000_018), 1 << 20)
    assert all(is_same_batch(a.batch, memoryview(b)) for a, b in zip(stored, SOURCE, strict=True))
    info = await served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(partition=0, topic="t"))
    assert (info.log_start, info.lso, info.hwm, info.next_offset) == (5, 1_000_018, 1_000_018, 1_000_018)


@pytest.mark.parametrize(
    ("batch", "code"),
    [
        (at(9, records(1)), "OFFSET_OUT_OF_RANGE"),  # a hole in the log
        (at(5, records(3)), "OFFSET_TAKEN"),  # other bytes
        (at(5, records(2)), "OFFSET_TAKEN"),
        (at(7, records(4)), "OFFSET_TAKEN"),
        (at(4, records(1)), "OFFSET_OUT_OF_RANGE"),  # below the log start
        (at(8, records(1)[:-1] + b"?"), "CORRUPT_BATCH"),
        (at(8, records(2), last_offset_delta=0), "INVALID_BATCH"),
        (at(8, records(1), attributes=0x20), "INVALID_BATCH"),  # a control batch of no transaction
        (at(-1, records(1)), "INVALID_BATCH"),
        (at((1 << 62) - 1, records(1)), "OFFSET_OUT_OF_RANGE"),
    ],
)
async def test_what_would_change_an_offset_is_refused(served: Served, batch: bytes, code: str) -> None:
    await created(served)
    await mirror(served, SOURCE[0])
    assert codes(await mirror(served, batch)) == [code]
    assert offsets(await mirror(served, SOURCE[1])) == [(8, 14)]


async def test_where_compaction_has_been_a_batch_counts_as_stored_only_if_all_of_it_is_there(served: Served) -> None:
    await created(served)
    await mirror(served, SOURCE[0])
    served.server.node.state.topics["t"].partitions[0].compacted_end = Offset(8)
    assert codes(await mirror(served, at(5, records(2)), at(5, records(9)))) == ["", "OFFSET_TAKEN"]


async def test_a_batch_that_has_waited_is_refused_if_its_topic_has_another_writer_by_then(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await created(served)
    preparation, waiting = served.server.node._producing.preparation, list[partial[None]]()
    monkeypatch.setattr(preparation, "concerns", lambda *_: True)
    monkeypatch.setattr(preparation, "start", lambda _pid, batch, use: waiting.append(partial(use, batch)))
    sent = asyncio.create_task(mirror(served, SOURCE[0]))
    while not waiting:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    await opened(served)
    waiting[0]()
    assert codes(await sent) == ["WRONG_WRITER"]


async def test_a_topic_has_one_writer_and_a_cutover_forgets_the_other_clusters_producers(served: Served) -> None:
    await served.create("mine")
    assert codes(await mirror(served, SOURCE[0], topic="mine")) == ["WRONG_WRITER"]
    await created(served)
    assert codes(await mirror(served, SOURCE[0], acks=pb.ACKS_LEADER)) == ["INVALID_REQUEST"]
    assert codes(await mirror(served, SOURCE[0], at(8, records(2, "none", **OWN)))) == ["", ""]
    batch = records(1, producer_id=9, producer_epoch=0, base_sequence=0)
    own = pb.PublishRecordRequest(topic="t", partition=0, batch=batch)
    assert codes(await served.publish(own, publish_request([b"x"], correlation_id=1))) == ["WRONG_WRITER"] * 2

    # Raft does not know its last batch yet, which looks like the first one of a producer here.
    theirs = at(10, records(1, "gzip", producer_id=9, producer_epoch=0, base_sequence=0))
    assert codes(await mirror(served, theirs)) == [""]
    await opened(served)
    taken = await served.publish(own)
    assert (offsets(taken), taken[0].duplicate) == ([(11, 11)], False)
    assert codes(await mirror(served, at(12, records(1)))) == ["WRONG_WRITER"]
