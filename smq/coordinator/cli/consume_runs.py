"""The runs of `smq consume`: what is read, written and counted, up to which offset it is committed, and how a run ends.

Owns the two ways to read. `Fetching` fetches all records, and filters by itself if it must; `Searching` lets the nodes
filter, so that no other record crosses the network. Both commit what they have written or passed over, and nothing
beyond, however they end. `commands.consume` alone imports it.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import BinaryIO, Final

import click

from smq.clients import (
    Consumer,
    ConsumerRecord,
    IllegalGeneration,
    RebalanceInProgress,
    SearchPage,
    UnknownMember,
)
from smq.clients import RecordFilter as Wanted
from smq.clients.types import TopicPartition
from smq.coordinator.cli.record_format import WriteFn
from smq.coordinator.service.record_filter import RecordFilter

POLL_MS: Final = 500.0  # how often a waiting command checks whether it is done or should commit
COMMIT_INTERVAL_S: Final = 5.0  # while it reads
SEARCHES_TOGETHER_MAX: Final = 4  # of all partitions: a node runs eight, and others search, too
PAGE_RECORDS_MAX: Final = 500


class Reading(ABC):
    """One run of the command."""

    def __init__(self, consumer: Consumer, max_records: int | None, *, write: WriteFn, commits: bool) -> None:
        self._consumer = consumer
        self._left = max_records
        self._line = write
        self._commits = commits
        self._next: dict[TopicPartition, int] = {}  # to commit: after what was written or passed over
        self._committed: dict[TopicPartition, int] = {}  # or begun at
        self._unread: set[TopicPartition] = set()  # nothing was committed for them by this run
        self._committed_at = time.monotonic()
        self._out: BinaryIO = sys.stdout.buffer

    async def to_the_end(self) -> None:
        """Until it is done, or a signal ends it. Then what was written is flushed and committed."""
        try:
            await self._read()
        finally:
            await self._finish()

    @abstractmethod
    async def _read(self) -> None:
        """Until everything has been written."""

    def _write(self, record: ConsumerRecord) -> None:
        self._out.write(self._line(record))
        if self._left is not None:
            self._left -= 1

    def _start_at(self, positions: Mapping[TopicPartition, int]) -> None:
        self._next.update(positions)
        self._committed.update(positions)
        self._unread.update(positions)

    async def _finish(self) -> None:
        """Also of what it has not read is committed where it begins: the group's lag is that of all it reads."""
        self._out.flush()
        if self._commits:
            for tp in self._unread & self._committed.keys():
                del self._committed[tp]
            await self._commit()

    async def _commit_when_due(self) -> None:
        if self._commits and time.monotonic() - self._committed_at >= COMMIT_INTERVAL_S:
            await self._commit()

    async def _commit(self) -> None:
        moved = {tp: offset for tp, offset in self._next.items() if offset != self._committed.get(tp)}
        if moved:
            try:
                await self._consumer.commit(moved)
            except (IllegalGeneration, RebalanceInProgress, UnknownMember) as e:
                click.echo(f"not committed, so other members will write these records again: {e}", err=True)
            else:
                self._committed.update(moved)
                self._unread -= moved.keys()
        self._committed_at = time.monotonic()


class Fetching(Reading):
    """Reads what the consumer has been assigned, or is given as a member of a group, and writes what is chosen."""

    def __init__(
        self, consumer: Consumer, max_records: int | None, *, write: WriteFn, commits: bool, chosen: RecordFilter
    ) -> None:
        super().__init__(consumer, max_records, write=write, commits=commits)
        self._ends: Mapping[TopicPartition, int] | None = None
        self._chosen = chosen

    def begin(self, partitions: Iterable[TopicPartition], ends: Mapping[TopicPartition, int] | None = None) -> None:
        """These partitions are read from now on, perhaps beside others."""
        self._ends = ends
        self._start_at({tp: self._consumer.position(*tp) for tp in partitions})

    async def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Other members go on with them."""
        self._out.flush()
        await self._commit()
        self.forget(partitions)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._next.pop(tp, None)
            self._committed.pop(tp, None)

    async def _read(self) -> None:
        while not self._is_done():
            found = await self._consumer.getmany(1, POLL_MS)
            for tp, records in found.items():
                self._write_chosen(tp, records)
            if self._left != 0:
                self._pass_over()
            self._out.flush()
            await self._commit_when_due()

    def _is_done(self) -> bool:
        if self._left == 0:
            return True
        ends = self._ends
        return ends is not None and all(self._consumer.position(*tp) >= end for tp, end in ends.items())

    def _pass_over(self) -> None:
        """The offsets between the last record and the position are read, too: the ends of transactions, and the
        records of aborted ones."""
        for tp in self._next:
            position = self._consumer.position(*tp)
            self._next[tp] = position if self._ends is None else min(position, self._ends[tp])

    def _write_chosen(self, tp: TopicPartition, records: list[ConsumerRecord]) -> None:
        end = None if self._ends is None else self._ends[tp]
        for record in records:
            if self._left == 0 or (end is not None and record.offset >= end):
                return
            if self._chosen.passes(record):
                self._write(record)
            self._next[tp] = record.offset + 1


class Searching(Reading):
    """The nodes search each partition from its position to its end, or for ever without `ends`.

    Partitions are searched side by side, in a task each. A task writes a page before it asks for the next, and few ask
    together, except for those that wait for new records: what is held is a page of each partition at most.
    """

    def __init__(
        self,
        consumer: Consumer,
        max_records: int | None,
        *,
        write: WriteFn,
        commits: bool,
        wanted: Wanted,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None,
    ) -> None:
        super().__init__(consumer, max_records, write=write, commits=commits)
        self._wanted = wanted
        self._ends = ends
        self._page_records = PAGE_RECORDS_MAX if max_records is None else min(max_records, PAGE_RECORDS_MAX)
        self._slots = asyncio.Semaphore(SEARCHES_TOGETHER_MAX)
        self._start_at(positions)

    async def _read(self) -> None:
        tasks = [asyncio.create_task(self._search(tp)) for tp in self._next]
        running = set(tasks)
        try:
            while running and self._left != 0:
                ended, running = await asyncio.wait(
                    running, timeout=POLL_MS / 1000, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    task.result()  # its error ends the command
                await self._commit_when_due()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self, tp: TopicPartition) -> None:
        start, end = self._next[tp], None if self._ends is None else self._ends[tp]
        if end is not None and start >= end:
            return
        pages = self._consumer.search_pages(
            *tp, self._wanted, start=start, end_offset=end, follow=end is None, max_records=self._page_records
        )
        is_waiting = False
        while self._left != 0:
            async with nullcontext() if is_waiting else self._slots:
                page = await anext(pages, None)
                if page is None:
                    return
                self._write_page(tp, page)
            is_waiting = page.cursor is None

    def _write_page(self, tp: TopicPartition, page: SearchPage) -> None:
        for record in page.records:
            if self._left == 0:
                return
            self._write(record)
            self._next[tp] = record.offset + 1
        self._next[tp] = page.next_offset  # everything below has been searched
        self._out.flush()
