"""The time line of events: what it notes, what outlives a restart, and what other nodes have seen."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smq.clients import Admin, Consumer
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import NodeEvent
from smq.coordinator.config.addresses import format_address
from smq.coordinator.http.console.event_page import events_page
from smq.coordinator.http.console.events import EVENTS_MAX, FILE, Event, EventFile, EventLog
from smq.coordinator.limits import STATUS_EVENTS_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.monitoring.anomalies import Kind
from smq.testing.served import PATIENCE_S, Served, served_node
from tests.unit.coordinator.http.console.test_pages import check_is_safe, get, scraped


async def test_the_time_line_shows_topics_settings_groups_and_leaders(served: Served) -> None:
    events = served.server._console.events
    await events.look()
    await served.create("made")
    setting = pb.AlterClusterConfigRequest(set={"num.partitions": "4"})
    await served.admin.AlterClusterConfig(setting)
    await events.look()
    await served.admin.DeleteTopic(pb.DeleteTopicRequest(name="made"))
    await events.look()
    page = await get(served, "events")
    for expected in ("this process has started", "made: created", "made: deleted", "num.partitions: now 4"):
        assert expected in page.text
    assert page.text.index("made: deleted") < page.text.index("made: created"), "the newest first"


async def test_an_anomaly_is_an_event_and_a_metric(served: Served) -> None:
    events = served.server._console.events
    await events.look()
    served.server.node._anomalies.note(Kind.LOG_DIFFERS, "t/0: <b>another batch</b>")
    await events.look()
    await events.look()
    found = [event.text for event in events.events if event.kind == "anomaly"]
    assert found == ["log-differs: t/0: <b>another batch</b>"], "once"
    assert "log-differs: t/0: <b>another batch</b>" in (await get(served, "events")).text
    lines = await scraped(served)
    assert 'smq_anomalies_total{kind="log-differs"} 1.0' in lines
    assert 'smq_anomalies_total{kind="hwm-back"} 0.0' in lines


async def test_a_node_shows_after_a_restart_what_it_saw_before(tmp_path: Path) -> None:
    """A crash: the first process writes nothing when it ends."""
    (tmp_path / "data").mkdir()
    before = EventFile(tmp_path / "data")
    before.add([Event(1_000.5, "leader", "t/0: <b>node 2</b> leads, epoch 4")], [])
    path = tmp_path / "data" / FILE
    path.write_bytes(path.read_bytes() + b"00000000 [1,2,3]\n" + b"torn")

    async with served_node(tmp_path) as served:
        events = served.server._console.events
        async with asyncio.timeout(PATIENCE_S):
            while len(events.events) < 3:  # noqa: ASYNC110 # read by another thread
                await asyncio.sleep(0.005)
        page = await get(served, "events")
        check_is_safe(page)
        assert "1970-01-01 00:16:40.500 UTC node 1 leader t/0: <b>node 2</b> leads, epoch 4" in page.text
        assert "2 earlier events are damaged, and left out" in page.text
        events.add("change", "made now")
        await events.save()
        assert "made now" in path.read_text(), "immediately, and not when the process ends"
    kept, damaged = EventFile(tmp_path / "data").load()
    assert damaged == 0
    assert [kept[0].kind, kept[-1].text] == ["leader", "node 1: this process stops"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_newest_events_of_the_other_nodes_are_shown_and_a_silent_node_is_named(tmp_path: Path) -> None:
    class Others:
        async def node_status(self, node: int, *, with_replicas: bool) -> SimpleNamespace:
            assert not with_replicas
            if node == 3:
                raise SmqError(ErrorCode.UNREACHABLE, "it is down")
            seen = [
                NodeEvent(at_ms=1_000, kind="raft", text="<b>x</b>"),
                NodeEvent(at_ms=2_100, kind="node", text="both"),
            ]
            return SimpleNamespace(events=seen)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield Others()

    async def body() -> str:
        nodes = {number: SimpleNamespace(grpc_address=f"h:{number}") for number in (1, 2, 3)}
        node: Any = SimpleNamespace(node_id=1, state=SimpleNamespace(nodes=nodes))
        events = EventLog(node, tmp_path)
        events.events.append(Event(2.0, "node", "both"))
        return "".join(str(part) for part in await events_page(node, events, opened))

    shown = asyncio.run(body())
    assert "Without an answer: node 3." in shown
    assert shown.index("both") < shown.index("&lt;b&gt;x&lt;/b&gt;"), "the newest first"
    assert (shown.count("both"), shown.count("node 2")) == (1, 1), "what both nodes saw is there once"


async def test_a_nodes_status_has_its_newest_events_and_its_free_disk(served: Served) -> None:
    await served.create()
    events = served.server._console.events
    await events.look()
    for n in range(30):
        events.add("change", f"number {n}")
    async with Admin(format_address(served.server.grpc_address)) as admin:
        status = await admin.node_status(1)
        brief = await admin.node_status(1, with_replicas=False)
    assert len(status.events) == STATUS_EVENTS_MAX
    changes = [e.text for e in status.events if e.kind == "change"]
    assert changes[-10:] == [f"number {n}" for n in range(20, 30)], "the oldest first"
    assert 0 < status.disk_free_bytes <= status.disk_total_bytes
    assert brief.events == status.events
    assert (len(status.replicas), brief.replicas) == (1, ())


def test_the_file_of_events_stays_small_and_a_disk_without_room_costs_nothing(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    kept: deque[Event] = deque(maxlen=EVENTS_MAX)
    for n in range(5 * EVENTS_MAX):
        kept.append(Event(float(n), "topic", f"number {n}"))
        file.add([kept[-1]], kept)
        assert len((tmp_path / FILE).read_bytes()) < 200 * EVENTS_MAX
    events, _ = EventFile(tmp_path).load()
    assert events == list(kept)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    file.add([kept[-1]], kept)
    assert EventFile(tmp_path).load() == ([], 0)


async def test_members_that_join_and_leave_are_named(tmp_path: Path) -> None:
    async with served_node(tmp_path, settings={"group.initial.rebalance.delay.ms": "0"}) as served:
        await served.create(partitions=2)
        events = served.server._console.events
        await events.look()
        async with Consumer(format_address(served.server.grpc_address), group="g") as consumer:
            await consumer.subscribe("t")
            while not consumer.assignment():
                await consumer.getmany(timeout_ms=20)
            (member,) = served.server.node.state.groups["g"].members.values()
            await events.look()
        async with asyncio.timeout(PATIENCE_S):
            while served.server.node.state.groups["g"].members:  # noqa: ASYNC110 # a state, not an event
                await asyncio.sleep(0.005)
        await events.look()
        found = [event.text for event in events.events if event.kind == "group"]
        name = f"{member.member.member_id} ({member.member.client_host})"
        assert any(text.endswith(f"1 members; new: {name}") for text in found), found
        assert any(text.endswith(f"0 members; gone: {name}") for text in found), found


async def test_what_a_node_missed_is_no_event_of_its_own_when_it_catches_up(served: Served, tmp_path: Path) -> None:
    node, is_ready = served.server.node, False

    class Late:
        """The same node, as it is while it applies old entries."""

        def __getattr__(self, name: str) -> Any:
            return getattr(node, name)

        def status(self) -> Any:
            return replace(node.status(), is_ready=is_ready)

    late: Any = Late()
    events = EventLog(late, tmp_path)
    await events.look()
    await served.create("old")
    await events.look()
    is_ready = True
    await served.create("last")
    await events.look()
    assert list(events.events) == []
    await served.create("new")
    await events.look()
    assert "new: created" in [event.text for event in events.events]
