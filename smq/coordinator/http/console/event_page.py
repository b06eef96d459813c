"""The page of events: those that this node remembers, and the newest of the other nodes.

Owns how they are merged. The other nodes are asked as `smq top` asks them. `console.site` imports it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

from smq.clients import Admin
from smq.clients.types import NodeEvent
from smq.coordinator.http.console.events import FILE, EventLog
from smq.coordinator.http.console.markup import Content, long_table, tag
from smq.coordinator.http.console.overview import ROWS_MAX, moment
from smq.coordinator.operators.time_line import Seen, merged
from smq.raft_state.errors import SmqError
from smq.replication.api import NodeApi

OpenAdmin: TypeAlias = Callable[[], AbstractAsyncContextManager[Admin]]
ASK_S: Final = 3.0  # a node that hangs does not keep the page


async def events_page(node: NodeApi, events: EventLog, open_admin: OpenAdmin) -> list[Content]:
    others = [number for number in sorted(node.state.nodes) if number != node.node_id]
    asked: list[Sequence[NodeEvent] | None] = [None for _ in others]
    if others:
        with contextlib.suppress(SmqError):  # each gRPC port asks for users
            async with open_admin() as admin:
                asked = await asyncio.gather(*(_events_of(admin, number) for number in others))
    found = dict(zip(others, asked, strict=True))
    silent = [str(number) for number, theirs in found.items() if theirs is None]
    seen = [Seen(int(at_s * 1000), node.node_id, kind, what) for at_s, kind, what in events.events]
    seen += [Seen(e.at_ms, number, e.kind, e.text) for number, theirs in found.items() for e in theirs or ()]
    text = (
        "What this node saw, looking once per second, and keeps over restarts; of the other nodes the newest. What "
        f"several nodes saw is here once. The last {ROWS_MAX} are shown; all are in {FILE} of the data directory."
    )
    missing = [tag("p", f"Without an answer: node {', '.join(silent)}.", class_="bad")] if silent else []
    shown = [(moment(e.at_ms / 1000), f"node {e.node}", e.kind, e.text) for e in reversed(merged(seen)[-ROWS_MAX:])]
    return [tag("p", text), *missing, await long_table("Events", ("Time", "Seen by", "Kind", "What"), shown)]


async def _events_of(admin: Admin, number: int) -> Sequence[NodeEvent] | None:
    """By the addresses of the port that the client came to: another may ask for a user."""
    try:
        async with asyncio.timeout(ASK_S):
            return (await admin.node_status(number, with_replicas=False)).events
    except (SmqError, TimeoutError):
        return None
