"""The page that follows a topic: every record once, in order, however many come; and nothing stays of a reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.http.console import following
from smq.coordinator.service.calls import NodeCalls
from smq.replication.api import Fetched
from smq.testing.served import PATIENCE_S, Served, served_node
from tests.unit.coordinator.http.console.test_pages import Page, check_is_safe, fill, get, numbered, transactional


class Reader:
    """A browser that shows the page as far as it has come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.html = ""

    @property
    def values(self) -> list[int]:
        words = self.html.replace("<", " <").replace(">", "> ").split()
        return [int(word[6:]) for word in words if word.startswith("value-")]

    async def until(self, count: int) -> list[int]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.values) < count:
                piece = await self.response.content.readany()
                assert piece, self.html[-500:]
                self.html += piece.decode()
        return self.values

    async def rest(self) -> Page:
        """The whole page, once it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            self.html += (await self.response.read()).decode()
        return Page(self.html, self.response.status, dict(self.response.headers))


@asynccontextmanager
async def following_page(served: Served, query: str) -> AsyncIterator[Reader]:
    url = f"http://127.0.0.1:{served.server.http_address[1]}/console/topics/t/messages?tail=on&{query}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200, await response.text()
        yield Reader(response)


async def test_every_record_is_shown_once_in_order_at_any_rate(served: Served) -> None:
    """More than a page of them comes between two looks."""

    await served.create()
    await served.publish(*numbered(60))
    async with following_page(served, "") as reader:
        assert await reader.until(50) == list(range(10, 60)), "it begins with the newest"
        await served.publish(*numbered(400, first=60))
        assert await reader.until(450) == list(range(10, 460))


@pytest.mark.parametrize(
    ("start", "first"), [("time=1970-01-01T00:00:50Z", 50), ("offset=3", 3), ("at=0-7", 7), ("offset=end", 10)]
)
async def test_following_begins_where_it_is_asked_to(served: Served, start: str, first: int) -> None:
    await served.create()
    await served.publish(*numbered(60))
    async with following_page(served, start) as reader:
        await reader.until(60 - first)
        await served.publish(*numbered(5, first=60))
        assert await reader.until(65 - first) == list(range(first, 65))


async def test_all_partitions_are_followed_and_a_search_leaves_out_what_does_not_match(served: Served) -> None:
    await served.create(partitions=3)
    async with following_page(served, "partition=all&contains=5") as reader:
        for n in range(20):
            await served.publish(*numbered(1, partition=n % 3, first=n))
        await served.publish(*numbered(1, partition=1, first=50))
        assert await reader.until(3) == [5, 15, 50]


async def test_what_a_transaction_aborts_is_passed_and_what_it_commits_is_shown(served: Served) -> None:
    await served.create()
    async with following_page(served, "") as reader, transactional(served, "x") as producer:
        for n in range(6):
            producer.begin()
            producer.send("t", b"value-%d" % n)
            await producer.flush()
            await (producer.abort() if n % 2 else producer.commit())
        assert await reader.until(3) == [0, 2, 4]


async def test_the_page_ends_whole_and_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "ROWS_MAX", 100)

    async with served_node(tmp_path) as served:
        await served.create()
        await served.publish(*numbered(130))
        async with following_page(served, "offset=0") as reader:
            page = await reader.rest()
            assert reader.values == list(range(100))
        check_is_safe(page)
        assert "100 records are on this page" in page.text
        (on,) = [link for link in page.links() if "at=0-100" in link]
        assert "tail=on" in on
        (stop,) = [link for link in page.links() if "at=0-0" in link]
        assert "tail" not in stop, "and it can be stopped"
        async with following_page(served, "offset=3&to=7") as reader:
            assert "the end that was asked for" in (await reader.rest()).text
            assert reader.values == [3, 4, 5, 6, 7]
        async with following_page(served, "offset=0") as reader:
            await reader.until(50)
            await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
            page = await reader.rest()
        check_is_safe(page)


async def test_a_link_of_a_page_that_follows_follows(served: Served) -> None:
    await served.create()
    await served.publish(*numbered(130))
    page = await get(served, "topics/t/messages?offset=50&format=json&contains=value")
    (follow,) = [link for link in page.links() if "tail=on" in link]
    assert all(part in follow for part in ("at=0-100", "format=json", "contains=value"))
    async with following_page(served, "offset=0") as reader:
        await reader.until(130)
    assert 'name="tail" value="on" checked' in reader.html


async def test_records_that_retention_deletes_before_they_are_shown_end_the_page_with_the_range(served: Served) -> None:
    await served.create()
    await served.publish(*numbered(10))
    await served.admin.DeleteRecords(pb.DeleteRecordsRequest(topic="t", partition=0, before_offset=8))
    async with following_page(served, "at=0-2") as reader:
        assert "is outside [8, 10]" in (await reader.rest()).text


async def test_too_many_pages_are_refused_until_one_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOWERS_MAX", 2)

    async with served_node(tmp_path) as served:
        await served.create()
        await served.publish(*numbered(1))
        async with following_page(served, "") as one, following_page(served, "") as two:
            await one.until(1)
            await two.until(1)
            page = await get(served, "topics/t/messages?tail=on")
            assert (page.status, "close one" in page.text) == (503, True)
            check_is_safe(page)
        await all_gone(served)
        async with following_page(served, "") as three:
            assert await three.until(1) == [0]


async def all_gone(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.server._console.followers.count:  # noqa: ASYNC110 # no event says so
            await asyncio.sleep(0.005)


async def test_a_browser_that_goes_away_while_it_follows_the_end_leaves_nothing_behind(served: Served) -> None:
    await fill(served)
    host, port = served.server.http_address
    before = asyncio.all_tasks()
    for number in range(30):
        _, writer = await asyncio.open_connection(host, port)
        request = f"GET /console/topics/t/messages?tail=on&contains=x HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
        writer.write(request.encode()[: None if number % 2 else -2])  # half of them in the middle of the request
        await writer.drain()
        if number % 3 == 0:
            await asyncio.sleep(0.001)  # the page is on its way
        writer.transport.abort()
    server, followers = served.server, served.server._console.followers
    async with asyncio.timeout(PATIENCE_S):
        # Their number alone does not say it, since a task of `before` may end, too.
        while server._http.acceptor.open or followers.count or len(asyncio.all_tasks()) > len(before):  # noqa: ASYNC110 # no event says so
            await asyncio.sleep(0.005)
    assert server.node.replicas.reads._parked_count == 0
    assert (await get(served, "topics/t/messages")).status == 200


async def test_a_node_that_stops_ends_the_page_and_does_not_wait_for_its_reader(served: Served) -> None:
    await served.create()
    await served.publish(*numbered(1))
    async with following_page(served, "") as reader:
        await reader.until(1)
        async with asyncio.timeout(PATIENCE_S):
            await served.server.stop()
        page = await reader.rest()
    check_is_safe(page)
    assert "The node stops" in page.text


async def test_the_first_page_is_loaded_again_only_if_that_is_asked_for_and_can_be_stopped(served: Served) -> None:
    def reloads(page: Page) -> list[str | None]:
        return [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "refresh"]

    page = await get(served, "")
    assert reloads(page) == []
    assert "/console/?update=on" in page.links()
    page = await get(served, "?update=on")
    assert reloads(page) == ["30"]
    assert "Stop updating" in page.text
    check_is_safe(page)


async def test_a_copy_that_lags_is_waited_for_and_not_asked_again_and_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed is not here yet: the end is known, and there are no batches."""
    asked = 0

    await served.create()
    await served.publish(*numbered(1))
    followers = served.server._console.followers
    fetch = NodeCalls.fetch

    async def lagging(*arguments: Any, **options: Any) -> Fetched:
        nonlocal asked
        asked += 1
        return replace(await fetch(*arguments, **options), batches=[])

    pauses = asyncio.Semaphore(0)

    async def paused() -> None:
        pauses.release()
        await asyncio.sleep(0)

    monkeypatch.setattr(NodeCalls, "fetch", lagging)
    monkeypatch.setattr(followers, "_pause", paused)
    async with following_page(served, "offset=0"), asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await pauses.acquire()
    monkeypatch.setattr(NodeCalls, "fetch", fetch)
    assert asked <= 3 + pauses._value + 2, "one read for each pause"
