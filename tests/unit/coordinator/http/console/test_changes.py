"""Changes through the console: off unless switched on, shown first, made once, and only for a page of this console."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import pytest

from smq.clients import Consumer
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import HttpConfig, ServerConfig, check_config
from smq.coordinator.http.console.changes import pages
from smq.coordinator.http.console.changes.pages import Tokens
from smq.coordinator.http.console.refusals import Forbidden
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.served import Served, node_config, served_node
from tests.unit.coordinator.http.console.test_pages import EVIL, Page, check_is_safe, fill, get, numbered, transactional
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of, dialling

__all__ = ("authorities",)  # a fixture
ON = HttpConfig(console_changes=True)
EVIL_GROUP = quote(EVIL, safe="")


@dataclass
class Browser:
    """Shows pages of a console, and sends their forms as a browser does."""

    served: Served
    scheme: str = "http"
    context: Any = None

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{format_address(self.served.server.http_address)}"

    async def ask(self, method: str, path: str, fields: dict[str, str] | None = None, **headers: str) -> Page:
        url = f"{self.origin}/console/{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, url, data=fields, headers=headers, ssl=self.context or True, allow_redirects=False
            ) as response,
        ):
            text = await response.text()
            self.location = response.headers.get("Location", "")
            return Page(text, response.status, dict(response.headers))

    async def plan(self, path: str, **query: str) -> Page:
        page = await self.ask("GET", f"{path}?{urlencode(query)}")
        check_is_safe(page)
        return page

    async def confirm(self, page: Page, path: str, *, typed: str = "", **changed: str) -> Page:
        """Sends the form of a dry run."""
        fields = {
            a["name"] or "": a["value"] or "" for tag, a in page.tags if tag == "input" and a.get("type") == "hidden"
        }
        origin = changed.pop("origin", self.origin)
        headers = {"Origin": origin} if origin else {}
        return await self.ask("POST", path, {**fields, "name": typed, **changed}, **headers)

    async def made(self, path: str, *, typed: str = "", **query: str) -> None:
        page = await self.plan(path, **query)
        assert page.status == 200, page.text
        answer = await self.confirm(page, path, typed=typed)
        assert (answer.status, self.location) == (303, "/console/events"), answer.text

    def events(self) -> list[str]:
        return [event.text for event in self.served.server._console.events.events if event.kind == "change"]


@asynccontextmanager
async def browsing(directory: Path, http: HttpConfig = ON) -> AsyncIterator[Browser]:
    async with served_node(directory, http=http) as served:
        await fill(served)
        yield Browser(served)


@pytest.fixture
def browser(tmp_path: Path) -> AbstractAsyncContextManager[Browser]:
    return browsing(tmp_path)


async def committed(served: Served, group: str = EVIL) -> dict[int, int]:
    answer = await served.broker.FetchOffsets(pb.FetchOffsetsRequest(group=group))
    return {o.partition: o.offset for o in answer.offsets}


# ------------------------------------------------------------------------------------------------------------- off
async def test_while_changes_are_off_no_address_of_one_allows_any_method(tmp_path: Path) -> None:
    async with browsing(tmp_path, HttpConfig()) as browser:
        for action in pages.ACTIONS:
            path = action.path.removeprefix("/console/").replace("{name}", "t")
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"):
                answer = await browser.ask(method, path, Origin=browser.origin)
                assert answer.status == 405, (method, path)
                assert method == "HEAD" or "console_changes = true" in answer.html
        for path in ("topics/t", f"groups/{EVIL_GROUP}", ""):
            page = await get(browser.served, path)
            assert "Read-only." in page.text
            assert not any(a.get("method") == "post" for tag, a in page.tags if tag == "form")
            assert not any("/drain" in link or "/delete" in link for link in page.links())
        assert "t" in browser.served.server.node.state.topics


async def test_pages_that_show_something_allow_no_change_even_when_changes_are_on(browser: Browser) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("", "topics", "topics/t", "topics/t/messages", "groups", "settings", "events"):
            assert (await browser.ask(method, path, Origin=browser.origin)).status == 405
    for method in ("PUT", "DELETE", "PATCH"):
        assert (await browser.ask(method, "topics/t/delete", Origin=browser.origin)).status == 405


# -------------------------------------------------------------------------------------------------------------- on
async def test_a_reset_is_shown_first_and_then_made_as_it_was_shown(browser: Browser) -> None:
    path = f"groups/{EVIL_GROUP}/reset"
    page = await browser.plan(path, way="latest", topics="t:0")
    assert "t 0 0 5 +5" in page.text
    assert await committed(browser.served) == {0: 0, 1: 0}, "nothing has changed yet"
    await browser.served.publish(*numbered(3))
    answer = await browser.confirm(page, path)
    assert answer.status == 303
    assert await committed(browser.served) == {0: 5, 1: 0}, "what was shown, and not a later end"
    (event,) = browser.events()
    assert "offsets reset, t/0 to 5; by 127.0.0.1" in event
    check_is_safe(await get(browser.served, "events"))


@pytest.mark.parametrize(
    ("way", "value", "expected"),
    [
        ("earliest", "", {0: 0, 1: 0}),
        ("offset", "3", {0: 3, 1: 0}),
        ("time", "1970-01-01T00:00:03Z", {0: 2, 1: 0}),
        ("shift", "-1", {0: 3, 1: 0}),
        ("latest", "", {0: 5, 1: 0}),
    ],
)
async def test_every_way_of_a_reset(browser: Browser, way: str, value: str, expected: dict[int, int]) -> None:
    place = pb.PartitionOffset(topic="t", partition=0, offset=4)
    await browser.served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=EVIL, offsets=[place]))
    await browser.made(f"groups/{EVIL_GROUP}/reset", way=way, value=value)
    assert await committed(browser.served) == expected


async def test_a_group_with_members_is_refused_and_its_members_are_named(browser: Browser) -> None:
    plan = await browser.plan("groups/g/reset", way="latest", topics="t")
    assert "there is no group 'g'" in plan.text
    address = format_address(browser.served.server.grpc_address)
    paths = ("groups/g/reset", "groups/g/forget")
    async with Consumer(address, group="g") as consumer:
        await consumer.subscribe("t")
        await consumer.getmany(timeout_ms=5_000, max_records=1)
        await consumer.commit()
        for path in paths:
            page = await browser.plan(path, way="latest")
            assert (page.status, "group g has members: " in page.text) == (409, True), page.text
        await consumer.close()
    shown = {path: await browser.plan(path, way="latest") for path in paths}
    before = await committed(browser.served, "g")
    async with Consumer(address, group="g") as consumer:
        await consumer.subscribe("t")
        await consumer.getmany(timeout_ms=5_000, max_records=1)
        for path in paths:
            answer = await browser.confirm(shown[path], path)
            assert (answer.status, "has members: " in answer.text) == (409, True), "it joined after the dry run"
    assert await committed(browser.served, "g") == before
    assert browser.events() == []


async def test_offsets_are_forgotten(browser: Browser) -> None:
    await browser.made(f"groups/{EVIL_GROUP}/forget", topics="t:1")
    assert await committed(browser.served) == {0: 0}
    page = await browser.plan(f"groups/{EVIL_GROUP}/forget", topics="t:1")
    assert "Nothing would change" in page.text


async def test_a_topic_is_deleted_once_its_name_is_typed(browser: Browser) -> None:
    page = await browser.plan("topics/t/delete")
    for typed in ("", "T", "t "):
        answer = await browser.confirm(page, "topics/t/delete", typed=typed)
        assert (answer.status, "type t to confirm" in answer.text) == (400, True)
    assert "t" in browser.served.server.node.state.topics
    assert (await browser.confirm(page, "topics/t/delete", typed="t")).status == 303
    assert "t" not in browser.served.server.node.state.topics
    assert browser.events() == ["topic t: deleted; by 127.0.0.1"]
    await browser.served.create("t")
    answer = await browser.confirm(page, "topics/t/delete", typed="t")
    assert (answer.status, "already" in answer.text) == (403, True), "a reload of the answer deletes no other topic"
    page = await browser.plan("topics/t/delete")
    await browser.served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
    await browser.served.create("t")
    answer = await browser.confirm(page, "topics/t/delete", typed="t")
    assert (answer.status, "made again" in answer.text) == (400, True)
    assert "t" in browser.served.server.node.state.topics


@pytest.mark.parametrize(
    ("query", "start"), [({"offset": "3"}, 3), ({"offset": "end"}, 5), ({"before": "1970-01-01T00:00:03Z"}, 2)]
)
async def test_a_topic_is_trimmed(browser: Browser, query: dict[str, str], start: int) -> None:
    if query.get("offset") == "3":
        await browser.served.publish(*numbered(4, partition=1))
    await browser.made("topics/t/trim", typed="t", **query)
    parts = browser.served.server.node.state.topics["t"].partitions
    assert parts[0].log_start == start


async def test_a_transaction_is_aborted_and_not_the_one_that_came_after_it(browser: Browser) -> None:
    path = f"transactions/{EVIL_GROUP}/abort"
    try:
        async with transactional(browser.served, EVIL) as producer:
            producer.begin()
            await producer.send("t", b"v", partition=1)
            await producer.flush()
            assert any(path in link for link in (await get(browser.served, f"transactions/{EVIL_GROUP}")).links())
            page = await browser.plan(path)
            async with transactional(browser.served, EVIL) as successor:
                successor.begin()
                await successor.send("t", b"v", partition=1)
                await successor.flush()
                answer = await browser.confirm(page, path)
                assert (answer.status, "has ended meanwhile" in answer.text) == (409, True)
                await browser.made(path)
                answer = await browser.plan(path)
                assert (answer.status, "no open transaction" in answer.text) == (409, True)
    except SmqError as e:  # both producers are fenced, and say so when they are closed
        if e.code is not ErrorCode.PRODUCER_FENCED:
            raise
    assert not any(path in link for link in (await get(browser.served, f"transactions/{EVIL_GROUP}")).links())


async def test_a_node_is_drained_and_undrained(browser: Browser) -> None:
    node = browser.served.server.node
    page = await browser.plan("nodes/1/drain")
    assert "No other node is in service" in page.text
    await browser.made("nodes/1/drain")
    assert node.state.nodes[node.node_id].drained
    assert "is drained already" in (await browser.plan("nodes/1/drain")).text
    overview = await get(browser.served, "")
    assert "/console/nodes/1/undrain" in overview.links()
    assert "warn" in [attributes.get("class") for _, attributes in overview.tags], "drained looks like any node"
    await browser.made("nodes/1/undrain")
    assert not node.state.nodes[node.node_id].drained
    assert len(browser.events()) == 2


# -------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "origin", ["", "null", "http://evil.example", "http://127.0.0.1:1", "https://evil.example:7402"]
)
async def test_a_form_of_another_page_changes_nothing(browser: Browser, origin: str) -> None:
    page = await browser.plan("topics/t/delete")
    answer = await browser.confirm(page, "topics/t/delete", typed="t", origin=origin)
    assert (answer.status, "must come from a page of this console" in answer.text) == (403, True)
    check_is_safe(answer)
    host = await browser.ask("POST", "topics/t/delete", Host="evil.example", Origin="http://evil.example")
    assert host.status == 421
    assert "t" in browser.served.server.node.state.topics
    assert browser.events() == []


async def test_a_token_is_for_the_change_that_was_shown_and_nothing_else(browser: Browser) -> None:
    path = f"groups/{EVIL_GROUP}/reset"
    page = await browser.plan(path, way="latest")
    other = await browser.plan("topics/t/delete")
    change = json.dumps([["t", 0, 1], ["t", 1, 0]], separators=(",", ":"))
    for changed in (
        {"token": ""},
        {"token": "9" * 11 + ".0"},
        {"token": "é.x"},
        {"change": change},
        {"change": ""},
    ):
        answer = await browser.confirm(page, path, **changed)
        assert (answer.status, "not a change that this console has shown" in answer.text) == (403, True), changed
    token = next(a["value"] for tag, a in other.tags if a.get("name") == "token") or ""
    assert (await browser.confirm(page, path, token=token)).status == 403, "of another action"
    assert (await browser.confirm(page, "groups/other/reset")).status == 403, "of another group"
    assert await committed(browser.served) == {0: 0, 1: 0}
    assert browser.events() == []


def test_a_token_works_once_and_for_ten_minutes() -> None:
    now = [1_000.0]
    tokens = Tokens(lambda: now[0])
    first, second = tokens.issue("a"), tokens.issue("b")
    tokens.take(first, "a")
    with pytest.raises(Forbidden, match="sent already"):
        tokens.take(first, "a")
    now[0] += pages.VALID_S + 1
    with pytest.raises(Forbidden, match="more than 10 minutes ago"):
        tokens.take(second, "b")
    with pytest.raises(Forbidden, match="more than 10 minutes ago"):
        tokens.take(first, "a")
    with pytest.raises(Forbidden, match="restarted"):
        Tokens(lambda: now[0]).take(tokens.issue("c"), "c")


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        (f"groups/{EVIL_GROUP}/reset", {"way": "up"}, 400, "the way must be one of"),
        (f"groups/{EVIL_GROUP}/reset", {"way": "shift", "value": "x"}, 400, "the value does not fit"),
        (f"groups/{EVIL_GROUP}/reset", {"way": "offset", "value": "-1"}, 400, "write a number"),
        (f"groups/{EVIL_GROUP}/reset", {"way": "time", "value": "soon"}, 400, "is no time"),
        (f"groups/{EVIL_GROUP}/reset", {"way": "latest", "topics": "t:9"}, 409, "the partitions 0 to 1, not 9"),
        (f"groups/{EVIL_GROUP}/reset", {"way": "latest", "topics": EVIL}, 409, "there is no topic"),
        ("topics/none/delete", {}, 409, "there is no topic 'none'"),
        ("topics/t/trim", {}, 400, "either a time or an offset"),
        ("topics/t/trim", {"offset": "99"}, 409, "cannot begin at 99"),
        ("topics/t/trim", {"offset": "x"}, 400, "is no offset"),
        ("nodes/9/drain", {}, 400, "there is no node 9"),
        ("nodes/x/drain", {}, 400, "a node has a number"),
        (f"transactions/{EVIL_GROUP}/abort", {}, 409, "there is no transactional id"),
    ],
)
async def test_a_change_that_makes_no_sense_says_what_to_write(
    browser: Browser, path: str, query: dict[str, str], status: int, says: str
) -> None:
    page = await browser.plan(path, **query)
    assert (page.status, says in page.text) == (status, True), page.text


async def test_a_change_whose_outcome_is_not_known_says_so_and_is_an_event(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await browser.plan("nodes/1/drain")

    async def silent(*_arguments: object) -> None:
        raise SmqError(ErrorCode.TIMED_OUT, "no answer")

    monkeypatch.setattr("smq.clients.Admin.set_node_drained", silent)
    answer = await browser.confirm(page, "nodes/1/drain")
    assert (answer.status, "may have been done all the same" in answer.text) == (503, True)
    (event,) = browser.events()
    assert "it may have been made" in event


# --------------------------------------------------------------------------------------------------------- protection
@contextmanager
def refused(says: str) -> Iterator[None]:
    with pytest.raises(ConfigError, match=says):
        yield


def test_a_node_whose_console_strangers_reach_does_not_start_with_changes_on(
    tmp_path: Path, authorities: Authorities
) -> None:
    def check(**changes: Any) -> None:
        config: ServerConfig = node_config(tmp_path, http=changes.pop("http", ON), **changes)
        check_config(config)

    check()
    certificates = config_of(authorities.node(1))
    public = {"http_address": ("10.0.0.5", 7402)}
    for changes in (
        {"insecure": True},
        {"http": HttpConfig(console_changes=True, probes="anyone", metrics="anyone")},
        {"tls": certificates, "http": HttpConfig(console_changes=True, tls=False), "insecure": True},
    ):
        with refused("http.console_changes is true, and anyone who reaches http_address 10.0.0.5:7402"):
            check(**public, **changes)
    check(**public, tls=certificates)


async def test_with_certificates_only_a_client_with_one_changes_anything_and_is_named(
    authorities: Authorities, tmp_path: Path
) -> None:
    rule = HttpConfig(probes="anyone", console_changes=True)
    async with served_node(tmp_path, tls=config_of(authorities.node(1)), http=rule) as served:
        browser = Browser(served, "https", dialling(authorities.client()))
        await browser.made("nodes/1/drain")
        (event,) = browser.events()
        assert "; by " in event
        assert " at 127.0.0.1" in event, "the name in the certificate comes first"
        stranger = Browser(served, "https", dialling(None))
        for method in ("GET", "POST"):
            assert (await stranger.ask(method, "nodes/1/undrain", Origin=stranger.origin)).status == 403


async def test_forms_stay_forms_whatever_names_hold(browser: Browser) -> None:
    page = await get(browser.served, f"groups/{EVIL_GROUP}")
    check_is_safe(page)
    assert "Changes are switched on." in page.text
    targets = [a["action"] for tag, a in page.tags if tag == "form"]
    assert targets == [f"/console/groups/{EVIL_GROUP}/reset", f"/console/groups/{EVIL_GROUP}/forget"]
    plan = await browser.plan(f"groups/{EVIL_GROUP}/reset", way="latest", topics="t")
    assert [a["action"] for tag, a in plan.tags if tag == "form"] == targets[:1]
    check_is_safe(await browser.plan("topics/t/delete"))
    await asyncio.sleep(0)
