"""The console of a real node: what its pages show, and that nothing a stranger wrote can become markup."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from smq.clients import Producer
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import HttpConfig, TlsConfig
from smq.coordinator.http.access import names_this_node
from smq.coordinator.http.console import record_reads
from smq.coordinator.http.console.markup import POLICY, text
from smq.records import NewRecord, encode_batch
from smq.testing.served import Served, node_config, served_node

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VOID = {"meta", "link", "input", "br", "img"}


@dataclass
class Page(HTMLParser):
    """A page as a browser takes it apart. It fails on tags that do not match."""

    html: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def links(self) -> list[str]:
        return [a["href"] or "" for tag, a in self.tags if tag == "a"]


async def get(served: Served, path: str, **headers: str) -> Page:
    url = f"http://127.0.0.1:{served.server.http_address[1]}/console/{path}"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return Page(await response.text(), response.status, dict(response.headers))


def check_is_safe(page: Page) -> None:
    """For every page: no script in any form, the policy that forbids it, and what a screen reader needs."""
    names = [tag for tag, _ in page.tags]
    assert not {"script", "img", "iframe", "object", "style", "base"} & set(names)
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
        assert not (attributes.get("href") or "").lower().startswith(("javascript:", "data:", "//", "http"))
    assert page.headers["Content-Security-Policy"] == POLICY
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert [a["lang"] for tag, a in page.tags if tag == "html"] == ["en"]
    assert names.count("h1") == names.count("main") == names.count("title") == 1
    assert names.count("table") == names.count("caption")
    shown = [tag for tag, attributes in page.tags if tag in ("input", "select") and attributes.get("type") != "hidden"]
    assert len(shown) == names.count("label")


def produce(*records: NewRecord, partition: int = 0, topic: str = "t") -> pb.PublishRecordRequest:
    return pb.PublishRecordRequest(topic=topic, partition=partition, batch=encode_batch(records))


async def fill(served: Served) -> None:
    await served.create(partitions=2)
    await served.publish(
        produce(
            NewRecord(EVIL.encode(), EVIL.encode(), 1_000, [(EVIL, EVIL.encode())]),
            NewRecord(b"j", b'{"a": [1, "<b>"]}', 2_000),
            NewRecord(None, None, 3_000),
            NewRecord(b"k", b"\xff\x00binary", 4_000),
            NewRecord(b"k", "a\u202eb\x1b[31m".encode(), -1),
        )
    )
    places = [pb.PartitionOffset(topic="t", partition=p, offset=0, metadata=EVIL) for p in range(2)]
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=EVIL, offsets=places))


def transactional(served: Served, name: str) -> Producer:
    return Producer(format_address(served.server.grpc_address), transactional_id=name)


async def test_every_page_is_whole_and_safe_whatever_names_and_records_hold(served: Served) -> None:
    await fill(served)
    async with transactional(served, EVIL) as producer, producer.transaction():
        await producer.send("t", EVIL.encode(), partition=1)
    group = quote(EVIL, safe="")
    paths = ("", "topics", "topics/t", "topics/t/messages", "groups", f"groups/{group}", "transactions")
    for path in (*paths, f"transactions/{group}", "settings", "events"):
        page = await get(served, path)
        assert page.status == 200, path
        check_is_safe(page)
    seen: set[str] = set()
    waiting = ["/console/"]
    while waiting:  # every link of the console leads somewhere
        link = waiting.pop()
        if link in seen or link.startswith("#") or "tail=on" in link:  # test_following follows those
            continue
        seen.add(link)
        page = await get(served, link.removeprefix("/console/"))
        assert page.status == 200, link
        check_is_safe(page)
        waiting += page.links()
    assert len(seen) > 10
    for missing in (
        f"topics/{group}",
        f"groups/{group}x",
        f"transactions/{group}x",
        f"topics/t/messages?contains={group}&offset={group}",
    ):
        page = await get(served, missing)
        assert page.status in (400, 404), missing
        check_is_safe(page)


async def test_records_are_counted_before_the_replicated_state_has_their_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers are answered earlier than that: no page denies what is committed."""
    monkeypatch.setattr("smq.replication.partition.replicas.hwm_advances", lambda replica: [])

    async with served_node(tmp_path) as served:
        await fill(served)
        assert served.server.node.state.topics["t"].partitions[0].hwm == 0
        assert "t 2 1 all 5" in (await get(served, "topics")).text
        assert "1 0 5 5" in (await get(served, "topics/t")).text
        history = served.server._console.history
        await history.sample()
        assert history.lags[EVIL][-1] == 5


async def test_records_are_shown_as_text_json_or_hex(served: Served) -> None:
    await fill(served)
    plain = await get(served, "topics/t/messages")
    assert EVIL in plain.text
    assert "null" in plain.text
    assert "ff 00 62 69" in plain.text, "no text: hex shows what it is"
    assert "a\ufffdb\u241b[31m" in plain.text, "nothing turns the direction of text, or is invisible"
    assert "1970-01-01 00:00:01.000 UTC" in plain.text
    assert '"a": [ 1, "<b>" ]' in (await get(served, "topics/t/messages?format=json")).text
    assert "7b 22 61 22" in (await get(served, "topics/t/messages?format=hex")).text


async def values(served: Served, query: str) -> list[int]:
    """Of records with the values value-N."""
    page = await get(served, f"topics/t/messages?{query}")
    assert page.status == 200, page.text
    return [int(word[6:]) for word in page.text.split() if word.startswith("value-")]


def numbered(count: int, partition: int = 0, first: int = 0) -> list[pb.PublishRecordRequest]:
    """One batch for each record. Value and create time count up; so does a header."""
    records = [
        NewRecord(None, b"value-%d" % n, 1_000 * n, [("h", b"head%d." % n)]) for n in range(first, first + count)
    ]
    return [produce(record, partition=partition) for record in records]


async def test_records_are_found_by_offset_time_end_and_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.create()
    await served.publish(*numbered(120))

    assert await values(served, "offset=10") == list(range(10, 60))
    assert await values(served, "") == list(range(50))
    assert await values(served, "offset=end") == list(range(70, 120))
    assert await values(served, "time=1970-01-01T00:01:30") == list(range(90, 120))
    assert await values(served, "contains=value-11") == [11, *range(110, 120)]
    assert await values(served, "contains=head117.") == [117], "headers, too"
    assert await values(served, "offset=end&contains=value-3") == [3, *range(30, 40)], "the newest that match"
    page = await get(served, "topics/t/messages?offset=10")
    assert any("at=0-60" in link for link in page.links()), "the later ones"
    assert any("before=0-10" in link for link in page.links()), "the earlier ones"
    assert await values(served, "before=0-60") == list(range(10, 60))
    monkeypatch.setattr(record_reads, "SEARCHED_RECORDS_MAX", 30)
    page = await get(served, "topics/t/messages?contains=value-119")
    assert "Searched 30 records, up to offset 30" in page.text
    assert any("at=0-30" in link and "contains=value-119" in link for link in page.links())


async def test_a_search_ends_at_an_offset_or_a_time(served: Served) -> None:
    await served.create()
    await served.publish(*numbered(120))
    assert await values(served, "offset=10&to=12") == [10, 11, 12]
    assert await values(served, "time=10000000000000") == []
    later, until = "time=1970-01-01T00:00:20Z", "until=1970-01-01T00:00:23Z"
    assert await values(served, f"{later}&{until}") == [20, 21, 22]
    assert await values(served, f"{until}&to=1") == [0, 1], "the nearer one of both"
    assert await values(served, "offset=end&to=5") == [0, 1, 2, 3, 4, 5]
    assert await values(served, "to=90&contains=value-9") == [9, 90]
    page = await get(served, "topics/t/messages?to=110&contains=value")
    assert any("at=0-50" in link and "to=110" in link for link in page.links()), "the end stays"
    assert await values(served, "offset=20&to=10") == []


async def test_all_partitions_are_one_page_in_the_order_of_time_and_links_leave_none_out(served: Served) -> None:
    await served.create(partitions=3)
    for n in range(60):  # one after another, so that each is later than the one before it
        await served.publish(*numbered(1, partition=n % 2, first=n))
    seen: list[int] = []
    query = "partition=all"
    while query:
        page = await get(served, f"topics/t/messages?{query}")
        check_is_safe(page)
        seen += [int(word[6:]) for word in page.text.split() if word.startswith("value-")]
        later = [link for link in page.links() if "&at=" in link and "tail" not in link]
        query = later[0].partition("?")[2] if later else ""
    assert seen == list(range(60))
    assert await values(served, "partition=all&offset=end") == list(range(10, 60))
    (earlier,) = [a for a in (await get(served, "topics/t/messages?partition=all&offset=end")).links() if "before" in a]
    assert await values(served, earlier.partition("?")[2]) == list(range(10))


async def test_the_newest_are_found_behind_offsets_without_records(served: Served) -> None:
    """Aborted transactions and their marks leave hundreds of offsets without one."""

    await served.create()
    await served.publish(*numbered(60))
    async with transactional(served, "x") as producer:
        for _ in range(30):
            producer.begin()
            for _ in range(5):
                producer.send("t", b"never")
            await producer.flush()
            await producer.abort()
    assert await values(served, "offset=end") == list(range(10, 60))


@pytest.mark.parametrize(
    ("query", "status", "expected"),
    [
        ("partition=x", 400, "partition must be a number"),
        ("partition=-1", 400, "partition must be a number"),
        ("partition=9", 400, "the partitions 0 to 1, not 9"),
        ("partition=9&tail=on", 400, "the partitions 0 to 1, not 9"),
        ("offset=ten", 400, "offset must be a number"),
        ("offset=99999999999999999999", 400, "at most 19 digits"),
        ("time=yesterday", 400, "'yesterday' is no time: write an age"),
        ("until=2026-13-01", 400, "is no time"),
        ("to=last", 400, "the last offset must be a number"),
        ("at=0", 400, "an offset of at must be a number"),
        ("at=7-1", 400, "the partitions 0 to 1, not 7"),
        ("at=0-77", 200, "is outside [0, 5]"),
        ("before=" + ".".join(f"{p}-1" for p in range(33)), 400, "more than 32 partitions"),
        ("format=xml", 400, "one of text, json, hex"),
        ("contains=" + "x" * 201, 400, "200 characters"),
        ("offset=77", 200, "is outside [0, 5]"),
    ],
)
async def test_a_request_that_makes_no_sense_says_what_to_write(
    served: Served, query: str, status: int, expected: str
) -> None:
    await fill(served)
    page = await get(served, f"topics/t/messages?{query}")
    assert (page.status, expected in page.text) == (status, True), page.text
    check_is_safe(page)


async def test_a_batch_that_does_not_decode_is_one_line_and_hides_no_other(served: Served) -> None:
    await served.create()
    await served.publish(produce(NewRecord(None, b"before", 1)), produce(NewRecord(None, bytes(50_000), 1)))
    await served.publish(produce(NewRecord(None, b"after", 1)))
    whole = record_reads.DECODED_BYTES_MAX
    bomb = encode_batch([NewRecord(None, bytes(200_000), 1)], codec="gzip")
    await served.publish(pb.PublishRecordRequest(topic="t", partition=0, batch=bomb))
    record_reads.DECODED_BYTES_MAX = 100_000  # type: ignore[misc]  # so that a small batch is too large
    try:
        page = await get(served, "topics/t/messages")
    finally:
        record_reads.DECODED_BYTES_MAX = whole  # type: ignore[misc]  # as above
    assert page.status == 200
    assert "before" in page.text
    assert "after" in page.text
    assert "cannot be shown" in page.text
    assert "45,904 more bytes" in page.text, "long values are cut"


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 421), ("127.0.0.1:1", 200), ("localhost", 200), ("[::1]:7402", 200)]
)
async def test_a_name_that_a_stranger_controls_does_not_reach_the_console(
    served: Served, host: str, status: int
) -> None:
    """A page of evil.example whose name is made to mean 127.0.0.1 could read what the console shows."""

    assert (await get(served, "topics", Host=host)).status == status


@pytest.mark.parametrize(
    ("has_tls", "of_http", "takes_any_name"),
    [
        (False, None, False),
        (False, False, False),
        (True, None, True),
        (True, True, True),
        (True, False, False),  # the other ports have TLS, this one has none
    ],
)
def test_only_with_tls_on_this_port_every_name_will_do_because_a_stranger_has_no_certificate_for_it(
    tmp_path: Path, has_tls: bool, of_http: bool | None, takes_any_name: bool
) -> None:
    tls = TlsConfig(ca=tmp_path / "ca", certificate=tmp_path / "certificate", key=tmp_path / "key")
    config = node_config(tmp_path, tls=tls if has_tls else None, http=HttpConfig(tls=of_http))
    assert names_this_node(config, "broker.example:7402") is takes_any_name


async def test_nothing_can_be_changed_through_it(served: Served) -> None:
    await served.create()
    base = f"http://127.0.0.1:{served.server.http_address[1]}/console"
    async with aiohttp.ClientSession() as session:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/", "/topics", "/topics/t", "/groups"):
                async with session.request(method, base + path) as response:
                    assert response.status == 405


async def scraped(served: Served) -> list[str]:
    """The lines of /metrics."""
    url = f"http://127.0.0.1:{served.server.http_address[1]}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return (await response.text()).splitlines()


async def test_the_lag_of_a_group_is_drawn_with_its_figures_in_words(served: Served) -> None:
    await fill(served)
    history = served.server._console.history
    path = f"groups/{quote(EVIL, safe='')}"
    history.lags.clear()
    await history.sample()
    assert "drawn once there are two samples" in (await get(served, path)).text
    await served.publish(produce(NewRecord(None, b"v", 1)))
    await history.sample()
    page = await get(served, path)
    (image,) = [a for tag, a in page.tags if tag == "svg"]
    assert image["role"] == "img"
    assert "from 5 to 6, at most 6" in (image["aria-label"] or "")
    beyond = pb.PartitionOffset(topic="t", partition=0, offset=10**12)
    await served.broker.CommitOffsets(pb.CommitOffsetsRequest(group=EVIL, offsets=[beyond]))
    assert "999,999,999,994 beyond the end" in (await get(served, path)).text


async def test_open_transactions_come_first_and_name_what_they_hold_up(served: Served) -> None:
    await fill(served)
    async with transactional(served, EVIL) as producer, producer.transaction():
        await producer.send("t", b"v", partition=1)
    async with transactional(served, "open") as producer:
        producer.begin()
        await producer.send("t", b"v", partition=1)
        await producer.flush()
        await producer.send_offsets(EVIL, {("t", 0): 3})
        page = await get(served, "transactions")
        assert "Open or ending 1 Transactional ids 2" in page.text
        assert page.text.count("Ongoing") == 2, "in both tables"
        assert page.text.count("CompleteCommit") == 1, "that one has ended"
        shown = await get(served, "transactions/open")
        for expected in ("State Ongoing", "t/1", "smq txn abort"):
            assert expected in shown.text
        assert f"groups/{quote(EVIL, safe='')}" in " ".join(shown.links())
        check_is_safe(shown)
        assert "smq_cluster_open_transactions 1.0" in await scraped(served)
        await producer.abort()
    assert "Ongoing" not in (await get(served, "transactions")).text
    assert "smq_cluster_open_transactions 0.0" in await scraped(served)


async def test_a_topic_shows_the_records_per_second_that_it_takes(served: Served) -> None:
    await fill(served)
    history = served.server._console.history
    await history.sample()
    await served.publish(*(produce(NewRecord(None, b"v", 1)) for _ in range(50)))
    await history.sample()
    rate = history.rates["t"]
    assert rate > 0
    assert f"{round(rate):,}" in (await get(served, "topics")).text
    by_partition = [history.partition_rates[p.pid] for p in served.server.node.state.topics["t"].partitions]
    assert by_partition == [rate, 0]
    page = await get(served, "topics/t")
    assert f"B, the leader's copy {round(rate):,} records 1" in page.text, "the first partition takes all of them"
    await history.sample()
    assert history.rates["t"] == 0
    await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="t"))
    await history.sample()
    assert not history.rates
    assert not history.partition_rates


def test_values_are_escaped_and_control_characters_become_visible() -> None:
    assert text('<a b="c">&') == "&lt;a b=&quot;c&quot;&gt;&amp;"
    assert text("\x00\x7f\u2066") == "\u2400\u2421\ufffd"
    assert (text(None), text(1_234)) == ("-", "1,234")


async def test_a_topic_of_a_thousand_partitions_is_shown_in_pages_of_two_hundred(served: Served) -> None:

    await served.create("wide", partitions=1_000)
    page = await get(served, "topics/wide")
    assert sum(tag == "tr" for tag, _ in page.tags) == 201
    assert any("first=200" in link for link in page.links())
    last = await get(served, "topics/wide?first=900")
    assert sum(tag == "tr" for tag, _ in last.tags) == 101
