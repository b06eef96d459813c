"""SearchRecords over gRPC, against a real node: what a filter lets through, pages, cursors, and what is refused."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc import search
from smq.raft_state.errors import ErrorCode
from smq.records import CODECS, NewRecord, encode_batch, parse_header, with_body
from smq.testing.served import PATIENCE_S, Served, fails, served_node

Batch = list[tuple[bytes | None, list[Any]]]  # keys and headers

# The time of each record is a hundred times its offset.
LOG: tuple[Batch, ...] = (
    [(b"ada", []), (b"bob", [("kind", b"x")]), (None, [])],
    [(b"adam", [("kind", b"y"), ("kind", b"x")]), (b"", [("other", None)])],
    [(b"bob", [("kind", None)]), (b"eve", [])],
)


async def fill(served: Served, batches: Iterable[Batch] = LOG, **create: Any) -> None:
    await served.create(**create)
    offset, requests = 0, []
    for number, records in enumerate(batches):
        new = [NewRecord(k, b"%d" % i, i * 100, h) for i, (k, h) in enumerate(records, offset)]
        batch = encode_batch(new, codec="zstd")
        requests.append(pb.PublishRecordRequest(topic="t", partition=0, correlation_id=number, batch=batch))
        offset += len(records)
    for answer in await served.publish(*requests):
        assert not answer.HasField("error"), answer


async def page(served: Served, **fields: Any) -> pb.SearchRecordsResponse:
    first = {} if "cursor" in fields else {"offset": 0}
    async with asyncio.timeout(PATIENCE_S):
        request = pb.SearchRecordsRequest(**{"topic": "t", "partition": 0, **first, **fields})
        answer: pb.SearchRecordsResponse = await served.broker.SearchRecords(request)
    return answer


async def pages(served: Served, **fields: Any) -> list[list[int]]:
    """The offsets of every page."""
    answer = await page(served, **fields)
    found = [[r.offset for r in answer.records]]
    fields = {key: value for key, value in fields.items() if key not in ("offset", "end_offset")}
    while answer.cursor:
        answer = await page(served, cursor=answer.cursor, **fields)
        found.append([r.offset for r in answer.records])
    return found


def wanted(**fields: Any) -> pb.RecordFilter:
    headers = [pb.HeaderFilter(key=key, value=value) for key, value in fields.pop("headers", ())]
    return pb.RecordFilter(**fields, headers=headers)


async def test_every_condition_lets_its_records_through_and_all_must_hold(served: Served) -> None:
    conditions: list[tuple[pb.RecordFilter, list[int]]] = [
        (wanted(), [0, 1, 2, 3, 4, 5, 6]),
        (wanted(key=b"bob"), [1, 5]),
        (wanted(key=b""), [4]),
        (wanted(key_prefix=b"ada"), [0, 3]),
        (wanted(key_prefix=b""), [0, 1, 2, 3, 4, 5, 6]),
        (wanted(headers=[("kind", b"x")]), [1, 3]),
        (wanted(headers=[("kind", None)]), [1, 3, 5]),
        (wanted(headers=[("kind", b"x"), ("kind", b"y")]), [3]),
        (wanted(headers=[("other", b"")]), []),
        (wanted(from_ms=300), [3, 4, 5, 6]),
        (wanted(until_ms=300), [0, 1, 2]),
        (wanted(from_ms=150, until_ms=501), [2, 3, 4, 5]),
        (wanted(key=b"bob", headers=[("kind", b"x")], until_ms=600), [1]),
        (wanted(key=b"frida"), []),
        (wanted(from_ms=601), []),
    ]

    await fill(served)
    for given, offsets in conditions:
        assert await pages(served, filter=given) == [offsets], given


async def test_a_record_is_returned_as_it_was_sent(served: Served) -> None:
    await fill(served)
    (record,) = (await page(served, filter=wanted(key=b"adam"))).records
    assert (record.offset, record.timestamp_ms, record.value) == (3, 300, b"3")
    assert [(h.key, h.value) for h in record.headers] == [("kind", b"y"), ("kind", b"x")]
    streamed = await served.subscribe(partition=0, offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    assert record in [r for response in streamed for r in response.records]


@pytest.mark.parametrize("max_records", [1, 2, 3, 7, 500])
async def test_pages_follow_one_another_without_a_gap(served: Served, max_records: int) -> None:
    await fill(served)
    found = await pages(served, max_records=max_records)
    assert [offset for each in found for offset in each] == list(range(7))
    assert all(len(each) <= max_records for each in found)
    found = await pages(served, max_records=max_records, filter=wanted(headers=[("kind", None)]))
    assert [offset for each in found for offset in each] == [1, 3, 5]


async def test_a_page_is_bounded_in_bytes_and_a_large_record_comes_alone(served: Served) -> None:
    large: list[Batch] = [[(b"k" * 40_000, [])], [(b"s", []), (b"k" * 9_000, []), (b"s", [])]]

    await fill(served, large)
    assert await pages(served, max_bytes=10_000) == [[0], [1, 2, 3]]
    assert await pages(served, max_bytes=9_000) == [[0], [1], [2], [3]]


async def test_a_search_covers_what_was_there_when_it_began(served: Served) -> None:
    await fill(served)
    first = await page(served, max_records=5)
    assert (first.next_offset, first.end_offset) == (5, 7)
    (answer,) = await served.publish(
        pb.PublishRecordRequest(topic="t", partition=0, batch=encode_batch([NewRecord(b"late", b"v", 0)]))
    )
    assert answer.base_offset == 7
    last = await page(served, cursor=first.cursor)
    assert ([r.offset for r in last.records], last.cursor, last.next_offset) == ([5, 6], b"", 7)
    assert await pages(served, offset=2, end_offset=4) == [[2, 3]]
    assert await pages(served, offset=4, end_offset=2) == [[]]
    assert await pages(served, offset=8) == [[]]
    assert await pages(served, offset=6, end_offset=99) == [[6, 7]]


async def test_a_page_ends_with_its_share_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCH_SCAN_BYTES_MAX", 1)

    async with served_node(tmp_path) as served:
        await fill(served)
        assert await pages(served, filter=wanted(key=b"eve")) == [[], [], [6]]
        monkeypatch.setattr(search, "SEARCH_SCAN_BYTES_MAX", 1 << 20)
        monkeypatch.setattr(search, "SEARCH_SCAN_S_MAX", 0.0)
        answer = await page(served)
        assert (list(answer.records), answer.next_offset) == ([], 0)
        monkeypatch.setattr(search, "SEARCH_SCAN_S_MAX", 1.0)
        assert len((await page(served, cursor=answer.cursor)).records) == 7


async def test_batches_that_are_too_old_are_not_decoded(served: Served) -> None:
    """Such a batch does not even decompress here."""

    await fill(served)
    sent = encode_batch([NewRecord(None, bytes(1_000), 700)], codec="zstd")
    broken = with_body(parse_header(sent), sent, CODECS["zstd"], b"not zstd" * 10)
    young = encode_batch([NewRecord(b"young", b"v", 9_000)])
    for batch in (broken, young):
        await served.publish(pb.PublishRecordRequest(topic="t", partition=0, batch=batch))
    assert await pages(served, offset=7, filter=wanted(from_ms=701)) == [[8]]
    refused = await fails(page(served, filter=wanted(key=b"young")))
    assert refused.code == ErrorCode.INVALID_BATCH.number
    assert "seek to 8 to read on" in refused.message


async def test_records_that_are_gone_between_two_pages_are_named(served: Served) -> None:
    await fill(served)
    first = await page(served, max_records=1)
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", partition=0, before_offset=5))
    gone = await fails(page(served, cursor=first.cursor))
    assert (gone.code, gone.lo, gone.hi) == (ErrorCode.OFFSET_OUT_OF_RANGE.number, 5, 7)


async def test_a_first_page_at_the_end_waits_for_a_record(served: Served) -> None:
    await fill(served)
    assert await pages(served, offset=7, max_wait_ms=1) == [[]]
    assert await pages(served, offset=5, max_wait_ms=30_000) == [[5, 6]]
    waiting = asyncio.create_task(page(served, offset=7, max_wait_ms=30_000, filter=wanted(key=b"late")))
    await served.publish(
        pb.PublishRecordRequest(topic="t", partition=0, batch=encode_batch([NewRecord(b"late", b"v", 0)]))
    )
    assert [r.offset for r in (await waiting).records] == [7]
    assert (await fails(page(served, offset=9, max_wait_ms=1))).code == ErrorCode.OFFSET_OUT_OF_RANGE.number
    assert (await fails(page(served, max_wait_ms=-1))).code == ErrorCode.INVALID_REQUEST.number


def _other_filter(fields: dict[str, Any]) -> None:
    fields["filter"] = wanted(key=b"x")


def _damaged(fields: dict[str, Any]) -> None:
    fields["cursor"] = fields["cursor"][:-1]


def _other_partition(fields: dict[str, Any]) -> None:
    fields["partition"] = 1


def _with_offset(fields: dict[str, Any]) -> None:
    fields["offset"] = 0


@pytest.mark.parametrize("change", [_other_filter, _damaged, _other_partition, _with_offset])
async def test_a_cursor_goes_on_with_its_own_search_only(
    served: Served, change: Callable[[dict[str, Any]], None]
) -> None:
    await fill(served, partitions=2)
    fields = {"cursor": (await page(served, max_records=1)).cursor}
    change(fields)
    assert (await fails(page(served, **fields))).code == ErrorCode.INVALID_REQUEST.number


async def test_a_cursor_of_a_deleted_topic_is_refused(served: Served) -> None:
    await fill(served)
    cursor = (await page(served, max_records=1)).cursor
    await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
    await fill(served)
    assert "was deleted" in (await fails(page(served, cursor=cursor))).message


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"partition": None}, ErrorCode.INVALID_REQUEST, "has no partition"),
        ({"offset": None}, ErrorCode.INVALID_REQUEST, "offset must be set"),
        ({"end_offset": -1}, ErrorCode.INVALID_REQUEST, "end_offset is -1"),
        ({"max_records": 10_001}, ErrorCode.INVALID_REQUEST, "max_records is 10001"),
        ({"max_bytes": -1}, ErrorCode.INVALID_REQUEST, "max_bytes is -1"),
        ({"max_bytes": 9 << 20}, ErrorCode.INVALID_REQUEST, "0 to 8388608"),
        ({"cursor": b"x", "offset": None}, ErrorCode.INVALID_REQUEST, "not one of this smq's"),
        ({"filter": wanted(from_ms=5, until_ms=5)}, ErrorCode.INVALID_REQUEST, "until_ms must be later"),
        ({"filter": wanted(from_ms=-1)}, ErrorCode.INVALID_REQUEST, "must be 0 or more"),
        ({"filter": wanted(key=b"a", key_prefix=b"b")}, ErrorCode.INVALID_REQUEST, "no record has both"),
        ({"filter": wanted(headers=[("h", b"")] * 33)}, ErrorCode.INVALID_REQUEST, "it may name 32"),
        ({"offset": 8}, ErrorCode.OFFSET_OUT_OF_RANGE, "records 0 to 6 are there"),
        ({"offset": -1}, ErrorCode.OFFSET_OUT_OF_RANGE, "records 0 to 6 are there"),
        ({"topic": "nowhere"}, ErrorCode.UNKNOWN_TOPIC, "nowhere"),
        ({"partition": 7}, ErrorCode.UNKNOWN_PARTITION, "7"),
    ],
)
async def test_what_cannot_be_searched_is_refused(
    served: Served, fields: dict[str, Any], code: ErrorCode, words: str
) -> None:
    await fill(served)
    refused = await fails(page(served, **fields))
    assert refused.code == code.number
    assert words in refused.message


async def test_too_many_searches_are_refused_until_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SEARCHES_MAX", 0)

    async with served_node(tmp_path) as served:
        await fill(served)
        assert (await fails(page(served))).code == ErrorCode.OVERLOADED.number
        monkeypatch.setattr(search, "SEARCHES_MAX", 1)
        for _ in range(3):
            assert len((await page(served)).records) == 7
