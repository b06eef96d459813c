"""The page that follows a topic: it stays open, and grows by each record that is committed. Nothing is loaded again.

Owns the rows of such a page, when it ends, and how many there may be. Each read goes on where the last one ended, so no
record is left out however many there are; a browser that reads slowly slows its own page down. `console.site` imports
it.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from smq.coordinator.http.console.asking import Ask, Cursor, cursor_text, step
from smq.coordinator.http.console.markup import Markup, joined, open_table, row, tag
from smq.coordinator.http.console.merging import Merged, Plan, page_of, planned
from smq.coordinator.http.console.record_pages import HEADS, form, record_row
from smq.coordinator.http.console.refusals import Busy
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.state import TopicState

LOOK_S: Final = 0.5  # between two reads that found nothing
ROWS_MAX: Final = 5_000  # of one page: a browser shows so many without effort
FOLLOWERS_MAX: Final = 16  # at the same time: people who look at a node
LOOKS_PER_SIGN: Final = 20  # after ten seconds of silence a comment keeps proxies from ending the answer
_SIGN: Final = Markup("<!-- still following -->")


class Followers:
    """The pages that are open. `stop` ends them: a node that stops does not wait for its readers."""

    def __init__(self, calls: NodeCalls) -> None:
        self._calls = calls
        self._is_stopping = asyncio.Event()
        self.count = 0

    def stop(self) -> None:
        self._is_stopping.set()

    async def pieces(self, topic: TopicState, ask: Ask) -> AsyncGenerator[Markup]:
        """The content of the page, as it comes, with empty pieces in which to see whether the reader is still there.
        Busy if there are too many pages; BadRequest as for any page."""
        if self.count >= FOLLOWERS_MAX:
            raise Busy(f"{FOLLOWERS_MAX} pages follow topics at this node: close one, or open another node's console")
        self.count += 1
        try:
            plan = await planned(self._calls, topic, ask)
            merged = await page_of(self._calls, topic.name, ask, plan)
            before, after = open_table("Records, growing", HEADS)
            yield joined((form(topic, ask), _intro(topic.name, ask, merged), *_problems(merged), before))
            async for piece in self._rows(topic.name, ask, plan, merged):
                yield piece
            yield after
        finally:
            self.count -= 1

    async def _rows(self, topic: str, ask: Ask, plan: Plan, merged: Merged) -> AsyncGenerator[Markup]:
        """Ends at the end that was asked for, after ROWS_MAX rows, or with an error, and says where to go on."""
        rows, looks, cursor = 0, 0, dict(plan.starts)
        while True:
            yield joined(row(record_row(record, ask.format)) for record in merged.records)
            rows, before, cursor = rows + len(merged.records), cursor, cursor | dict(merged.next)
            if reason := self._reason(rows, cursor, plan, merged):
                break
            if not merged.has_more or cursor == before:  # a copy that lags has less than what is committed
                await self._pause()
                looks += 1
                yield _SIGN if looks % LOOKS_PER_SIGN == 0 else Markup("")
            forward = replace(plan, starts=cursor, is_back=False)
            merged = await page_of(self._calls, topic, ask, forward)
        yield _last_row(reason, topic, ask, cursor)

    def _reason(self, rows: int, cursor: Cursor, plan: Plan, merged: Merged) -> str:
        """Why the page ends, if it does. What passes by itself, such as an election, is no reason."""
        if self._is_stopping.is_set():
            return "The node stops."
        if rows >= ROWS_MAX:
            return f"{rows:,} records are on this page."
        if cursor and all(p in plan.ends and offset >= plan.ends[p] for p, offset in cursor.items()):
            return "This is the end that was asked for."
        met = [e for p, e in merged.problems.items() if p in cursor and not e.code.is_retriable]
        if met:
            return str(met[0])
        return "" if cursor else "No partition can be read here."

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._is_stopping.wait()
        except TimeoutError:
            pass  # the usual case


def _intro(topic: str, ask: Ask, merged: Merged) -> Markup:
    stop = step("Stop following", topic, ask, {"at": cursor_text(merged.first)}, is_tail=False)
    text = "New records are added at the end of the table as they are committed, until you leave this page. "
    return tag("p", text, stop)


def _problems(merged: Merged) -> list[Markup]:
    found = sorted(merged.problems.items())
    return [tag("p", f"Partition {partition}: {e}", class_="bad", role="alert") for partition, e in found]


def _last_row(reason: str, topic: str, ask: Ask, cursor: Cursor) -> Markup:
    on = step("Go on following from here", topic, ask, {"at": cursor_text(cursor)})
    return tag("tr", tag("td", f"{reason} ", on, colspan=len(HEADS)))
