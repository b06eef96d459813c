"""Readers of both isolations over gRPC: where their log ends, what wakes them, and which records each of them gets."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.limits import FETCH_WAIT_MS_MAX
from smq.records import decode_batch
from smq.testing.served import PATIENCE_S, Served, fails, publish_request
from tests.unit.coordinator.grpc.test_subscribe import Reader
from tests.unit.coordinator.grpc.test_transactions_service import add, batch, end, publish, start

ISOLATIONS = (pb.READ_COMMITTED, pb.READ_UNCOMMITTED)
ABORTED, COMMITTED, PLAIN, OPEN, AFTER, END = 0, 2, 4, 5, 6, 7  # after the first two there is a control batch


async def begin(served: Served, name: str, value: bytes) -> dict[str, Any]:
    """A producer whose transaction is open, with one record."""
    who = await start(served, name)
    await add(served, who, 0)
    assert not (await publish(served, batch(who, value))).HasField("error")
    return who


async def fill(served: Served) -> dict[str, Any]:
    """An aborted record, a committed one, a plain one, an open one, and a plain one after it. Gives the producer of the
    open one."""
    await served.create()
    who = await start(served)
    for sequence, (value, commit) in enumerate(((b"aborted", False), (b"committed", True))):
        await add(served, who, 0)
        assert not (await publish(served, batch(who, value, sequence))).HasField("error")
        await end(served, who, commit=commit)
    await add(served, who, 0)  # the control batches are written by then
    await served.publish(publish_request([b"plain"]))
    assert (await publish(served, batch(who, b"open", 2))).base_offset == OPEN
    await served.publish(publish_request([b"after"]))
    return who


async def fetch(served: Served, isolation: int, offset: int = 0, **fields: Any) -> pb.FetchedPartition:
    place = pb.FetchPartition(topic="t", partition=0, offset=offset)
    request = pb.FetchRequest(partitions=[place], isolation=isolation, **fields)  # type: ignore[arg-type]  # any number
    async with asyncio.timeout(PATIENCE_S):
        answer: pb.FetchResponse = await served.broker.Fetch(request)
    assert not answer.partitions[0].HasField("error"), answer
    return answer.partitions[0]


async def list_offset(served: Served, isolation: int, **fields: Any) -> pb.ListedOffset:
    place = pb.ListOffsetsPartition(topic="t", partition=0, **fields)
    answer = await served.broker.ListOffsets(pb.ListOffsetsRequest(partitions=[place], isolation=isolation))  # type: ignore[arg-type]  # as above
    found: pb.ListedOffset = answer.offsets[0]
    return found


def values(part: pb.FetchedPartition) -> dict[int, bytes]:
    """By offset. Batches without data hold no record for this reader."""
    return {r.offset: r.value or b"" for b in part.batches if b.data for r in decode_batch(b.data)}


SEEN: dict[int, dict[int, bytes]] = {
    pb.READ_COMMITTED: {COMMITTED: b"committed", PLAIN: b"plain"},
    pb.READ_UNCOMMITTED: {
        ABORTED: b"aborted",
        COMMITTED: b"committed",
        PLAIN: b"plain",
        OPEN: b"open",
        AFTER: b"after",
    },
}
ENDS: dict[int, int] = {pb.READ_COMMITTED: OPEN, pb.READ_UNCOMMITTED: END}


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_fetch_a_subscription_and_a_search_give_each_reader_its_records(served: Served, isolation: int) -> None:
    await fill(served)
    fetched = await fetch(served, isolation)
    assert values(fetched) == SEEN[isolation]
    assert (fetched.hwm, fetched.lso) == (END, OPEN)
    assert fetched.batches[-1].last_offset + 1 == ENDS[isolation]
    answers = await served.subscribe(offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True, isolation=isolation)
    assert {r.offset: r.value for a in answers for r in a.records} == SEEN[isolation]
    assert (answers[0].started.hi, answers[-1].next_offset) == (ENDS[isolation], ENDS[isolation])
    assert [a.at_end for a in answers] == [False] * (len(answers) - 1) + [True]
    first = await served.broker.SearchRecords(_search(isolation, offset=0, max_records=1))
    rest = await served.broker.SearchRecords(_search(isolation, cursor=first.cursor))
    assert {r.offset: r.value for a in (first, rest) for r in a.records} == SEEN[isolation]
    assert (rest.end_offset, rest.cursor) == (ENDS[isolation], b"")


def _search(isolation: int, **fields: Any) -> pb.SearchRecordsRequest:
    return pb.SearchRecordsRequest(topic="t", partition=0, isolation=isolation, **fields)  # type: ignore[arg-type]  # any number


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_latest_the_range_and_a_seek_follow_the_isolation(served: Served, isolation: int) -> None:
    await fill(served)
    latest = await list_offset(served, isolation, offset_type=pb.RESET_TO_LATEST)
    assert (latest.offset, latest.hi) == (ENDS[isolation], ENDS[isolation])
    far = await list_offset(served, isolation, offset_type=pb.RESET_TO_OFFSET, offset_value=99)
    assert (far.offset, far.clamped) == (ENDS[isolation], True)
    never = await list_offset(served, isolation, timestamp_ms=2**60)
    assert never.offset == ENDS[isolation]
    last = await list_offset(served, isolation, offset_type=pb.EXACT_OFFSET, offset_value=AFTER)
    assert last.HasField("error") == (isolation == pb.READ_COMMITTED)
    async with Reader(served, isolation=isolation) as reader:
        await reader.read()
        await reader.seek(ENDS[isolation])
        while (await reader.read()).started.offset != ENDS[isolation]:
            pass
        await reader.seek(ENDS[isolation] + 1)
        assert (await reader.error()).name == "OFFSET_OUT_OF_RANGE"


async def test_an_open_record_wakes_the_uncommitted_reader_and_its_end_the_committed_one(served: Served) -> None:
    await served.create()
    both = [asyncio.create_task(_next_record(served, isolation)) for isolation in ISOLATIONS]
    who = await begin(served, "open", b"open")
    async with asyncio.timeout(PATIENCE_S):
        assert await both[1] == {0: b"open"}
        assert not both[0].done()
        await end(served, who, commit=True)
        assert await both[0] == {0: b"open"}


async def _next_record(served: Served, isolation: int, offset: int = 0) -> dict[int, bytes]:
    """Of one long poll, which would take longer than a test may."""
    return values(await fetch(served, isolation, offset, max_wait_ms=FETCH_WAIT_MS_MAX))


async def test_a_committed_reader_wakes_when_the_first_of_two_open_transactions_ends(served: Served) -> None:
    """What it then gets ends far below the high water mark, where the second one begins."""

    await served.create()
    first = await begin(served, "first", b"first")
    await begin(served, "second", b"second")
    waiting = asyncio.create_task(_next_record(served, pb.READ_COMMITTED))
    async with Reader(served) as reader:
        await reader.read()
        await end(served, first, commit=True)
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting == {0: b"first"}
        assert await reader.read_records(1) == [0]


async def test_a_group_that_read_uncommitted_goes_on_committed_where_it_was(served: Served) -> None:
    """Beyond the last stable offset there is nothing for it yet, but its place is not out of range: it waits."""

    who = await fill(served)
    place = pb.PartitionOffset(topic="t", partition=0, offset=AFTER)
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group="g", offsets=[place]))
    found = await list_offset(served, pb.READ_COMMITTED, offset_type=pb.RESUME_OR_EARLIEST, group="g")
    assert (found.offset, found.hi) == (AFTER, OPEN)
    async with Reader(served, offset_type=pb.RESUME_OR_LATEST, group="g") as reader:
        assert (await reader.read()).started.offset == AFTER
        await end(served, who, commit=False)
        assert await reader.read_records(1) == [AFTER]
    beyond = pb.PartitionOffset(topic="t", partition=0, offset=99)
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group="g", offsets=[beyond]))
    gone = await list_offset(served, pb.READ_COMMITTED, offset_type=pb.RESUME_OR_EARLIEST, group="g")
    assert gone.error.name == "OFFSET_OUT_OF_RANGE"


async def test_a_cursor_is_of_one_isolation(served: Served) -> None:
    await fill(served)
    for isolation, other in (ISOLATIONS, ISOLATIONS[::-1]):
        first = await served.broker.SearchRecords(_search(isolation, offset=0, max_records=1))
        refused = await fails(served.broker.SearchRecords(_search(other, cursor=first.cursor)))
        assert (refused.name, "isolation" in refused.message) == ("INVALID_REQUEST", True)


async def test_an_unknown_isolation_is_refused_by_every_call(served: Served) -> None:
    await served.create()
    place = pb.FetchPartition(topic="t", partition=0, offset=0)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: served.broker.Fetch(pb.FetchRequest(partitions=[place], isolation=7)),  # type: ignore[arg-type]  # as a newer client
        lambda: served.broker.SearchRecords(_search(7, offset=0)),
        lambda: list_offset(served, 7, offset_type=pb.RESET_TO_LATEST),
        lambda: served.subscribe(offset_type=pb.RESET_TO_EARLIEST, isolation=7, subscription_id=secrets.token_hex(4)),
    ]
    for call in calls:
        refused = await fails(call())
        assert refused.name == "INVALID_REQUEST"
        assert "READ_COMMITTED (0), READ_UNCOMMITTED (1)" in refused.message
