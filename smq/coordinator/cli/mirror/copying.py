"""`smq mirror run`: topics, their settings, their logs and the groups' commits, from the source to this cluster.

Owns what is copied, in which order, and what stops one partition: never the others. Its position is the end of this
cluster's log, so there is no state to lose. A batch passes unread; where the source has nothing, an empty batch keeps
the offsets. It must never write to the source. `returning` and `commands.mirror` import it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from aiokafka.errors import KafkaError

from smq.clients import Admin
from smq.clients.types import KAFKA_GROUP_PREFIX, CommittedOffset, TopicDescription
from smq.coordinator.cli.mirror.comparing import compare
from smq.coordinator.cli.mirror.kafka_side import FETCH_BYTES, OUT_OF_RANGE, KafkaSide, Piece, Place
from smq.coordinator.cli.mirror.settings import MirrorSettings
from smq.coordinator.cli.mirror.target import Target
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError, TopicExists
from smq.raft_state.topic_config import CLEANUP_POLICY, COMPACT, MIRRORED, TOPIC_CONFIG
from smq.records import INT32_MAX, empty_batch, from_offset, parse_header

LOOK_S: Final = 10.0  # between two looks at the source's topics, and at groups
COMPARED_OFFSETS: Final = 1_000  # before a copy goes on: two logs that differ seldom agree there
PAUSE_S: Final = 1.0  # after an error of a node
WAIT_MS: Final = 500  # how long the source may wait for records
# Compaction may leave no batch up to the end, and nothing says so. A source that cannot read its records now, on tiered
# storage or while it repairs them, answers the same.
EMPTY_S: Final = 30.0
_SILENT: Final = (KafkaError, OSError, TimeoutError)  # a source that does not answer: it may come back in an hour


@dataclass(slots=True)
class Copy:
    """One partition on its way. Offsets: [position, hwm) is still to come."""

    place: Place
    is_compacted: bool
    first: int = 0  # where it began in this run
    position: int | None = None  # of the next fetch; None: this cluster is asked
    end: int = 0  # a majority here has everything below
    hwm: int | None = None  # the source's, as it last said
    empty_since: float | None = None  # answers have brought nothing, although there is more
    records: int = 0
    bytes: int = 0
    newest_ms: int = -1  # create time of the last record that was copied
    is_begun: bool = False  # something of it was here before
    problem: str = ""  # why it is not copied any more
    pushing: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.place[0]}/{self.place[1]}"

    @property
    def lag(self) -> int | None:
        return None if self.hwm is None else max(0, self.hwm - self.end)

    @property
    def is_done(self) -> bool:
        return bool(self.problem) or self.lag == 0


class Stopped(Exception):
    """This partition is not copied any further; the message says why, and what is kept."""


class Mirror:
    def __init__(
        self,
        settings: MirrorSettings,
        source: KafkaSide,
        here: KafkaSide,
        admin: Admin,
        target: Target,
        say: Callable[[str], None],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`share` (i, n): only every n-th partition, beginning with the i-th. `say` is given what a person should
        know."""
        self._settings = settings
        self._source = source
        self._here = here  # as its consumers see it
        self.admin = admin
        self._target = target
        self._say = say
        self._share = share
        self.copies: dict[Place, Copy] = {}
        self.commits = 0  # of groups, made here
        self._topics: set[str] = set()  # that are mirrored here
        self._refused: dict[str, str] = {}  # topics and groups that cannot be mirrored, and why
        self._paid_until = 0.0  # of the throttle

    @property
    def problems(self) -> list[str]:
        return [*self._refused.values(), *(f"{c.name}: {c.problem}" for c in self.copies.values() if c.problem)]

    async def run(self, *, once: bool) -> None:
        """Copies until it is cancelled; `once`: until nothing is left of what the source had at some moment."""
        await self.look()
        async with asyncio.TaskGroup() as tasks:
            pulls = tasks.create_task(self._pull_all(tasks))
            looks = tasks.create_task(self._look_again())
            while not once or not all(copy.is_done for copy in self.copies.values()):  # noqa: ASYNC110 - a look is cheap
                await asyncio.sleep(0.1)
            pulls.cancel()
            looks.cancel()
        await self.copy_commits()

    # ------------------------------------------------------------------------------------------------ topics
    async def look(self) -> None:
        """Takes in the source's topics: makes them here, with their settings and all their partitions."""
        counts = {
            name: count for name, count in (await self._source.partitions()).items() if self._settings.wants_topic(name)
        }
        for topic in {topic for topic, _ in self.copies} - counts.keys():
            for copy in self.copies.values():
                if copy.place[0] == topic and not copy.problem:
                    self._stop(copy, "the source has deleted the topic; its copy here is kept")
        await self._source.refresh()
        configs = await self._source.configs(counts)
        here = {topic.name: topic for topic in await self.admin.list_topics()}
        self._topics = set()
        for topic, count in counts.items():
            try:
                await self._take_in(topic, count, wanted_config(configs.get(topic, {})), here.get(topic))
            except SmqError as e:
                self._refuse(topic, f"{topic}: {e}")
            except UserError as e:
                self._refuse(topic, str(e))

    def _refuse(self, what: str, why: str) -> None:
        if self._refused.get(what) != why:
            self._refused[what] = why
            self._say(why)

    async def _take_in(self, topic: str, count: int, config: dict[str, str], here: TopicDescription | None) -> None:
        if here is None:
            starts = [(await self._source.bounds((topic, index)))[0] for index in range(count)]
            with suppress(TopicExists):  # another mirror has just made it
                await self.admin.create_topic(
                    topic, count, config=config | {MIRRORED: "true"}, start_offset=min(starts)
                )
        elif here.config.get(MIRRORED) != "true":
            raise UserError(
                f"topic {topic} exists here and has producers of its own: delete it, or set {MIRRORED}=true to go on"
            )
        else:
            changed = {
                key: value for key, value in config.items() if here.config.get(key, TOPIC_CONFIG[key].default) != value
            }
            if changed:
                await self.admin.alter_topic(topic, set=changed)
            if len(here.partitions) < count:
                await self.admin.add_partitions(topic, count)
        self._refused.pop(topic, None)
        self._topics.add(topic)
        share, shares = self._share
        for index in range(count):
            if (topic, index) not in self.copies and (crc32(topic.encode()) + index) % shares == share:
                self.copies[topic, index] = Copy((topic, index), COMPACT in config[CLEANUP_POLICY])

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                await self.copy_commits()
            except _SILENT as e:
                self._say(f"the source does not answer, and is asked again: {e!r}")
            except SmqError as e:
                if not e.code.is_retriable:
                    raise
                self._say(f"this cluster does not answer, and is asked again: {e}")

    # ------------------------------------------------------------------------------------------------ records
    async def _pull_all(self, tasks: asyncio.TaskGroup) -> None:
        """One puller for each node of the source."""
        pullers: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                for place, copy in self.copies.items():
                    node = self._source.leader(place)
                    if node is not None and node not in pullers and not copy.problem:
                        pullers[node] = tasks.create_task(self._pull(node))
                await asyncio.sleep(0.1)
        finally:
            for puller in pullers.values():
                puller.cancel()

    async def _pull(self, node: int) -> None:
        while True:
            try:
                await self._pull_once(node)
            except _SILENT as e:
                self._say(f"node {node} of the source does not answer, and is asked again: {e!r}")
                await asyncio.sleep(PAUSE_S)
                with suppress(*_SILENT):
                    await self._source.refresh()

    async def _pull_once(self, node: int) -> None:
        mine = [c for p, c in self.copies.items() if not c.problem and self._source.leader(p) == node]
        for copy in mine:
            if copy.position is None:
                await self._guarded(copy, self._open(copy))
        ready = [(copy.place, copy.position) for copy in mine if copy.position is not None and not copy.problem]
        if not ready:
            await asyncio.sleep(0.1)
            return
        bytes_max = min(FETCH_BYTES, self._settings.bytes_per_second or FETCH_BYTES)
        pieces = await self._source.fetch(node, ready, WAIT_MS, bytes_max)
        is_empty = not any(piece.batches for piece in pieces)
        for piece in pieces:
            copy = self.copies[piece.topic, piece.partition]
            if copy.pushing is not None:
                await copy.pushing  # one after another: the next ones follow in order
            if copy.position is not None and not copy.problem:
                await self._guarded(copy, self._take(copy, piece, is_last=is_empty))
        await self._throttle(sum(len(batch) for piece in pieces for batch in piece.batches))

    async def _guarded(self, copy: Copy, work: Awaitable[None]) -> None:
        try:
            await work
        except Stopped as e:
            self._stop(copy, str(e))
        except SmqError as e:
            self._failed(copy, e)

    def _stop(self, copy: Copy, why: str) -> None:
        copy.problem = why
        self._say(f"{copy.name}: {why}")

    def _failed(self, copy: Copy, error: SmqError) -> None:
        """This cluster's end says where it goes on, unless that cannot help. Where compaction has changed the source's
        batches, another mirror may have cut them elsewhere."""
        copy.position = None
        goes_on = (ErrorCode.OFFSET_OUT_OF_RANGE, *([ErrorCode.OFFSET_TAKEN] if copy.is_compacted else []))
        if not error.code.is_retriable and error.code not in goes_on:
            self._stop(copy, f"stopped at offset {copy.end}, up to which everything is kept: {error}")

    async def _open(self, copy: Copy) -> None:
        """Finds the position. If the last records here are not the source's, the two are not one log."""
        topic, index = copy.place
        here = await self.admin.partition_range(topic, index)
        copy.end = here.next_offset
        copy.first = copy.first or here.next_offset
        copy.is_begun = here.next_offset > here.log_start
        _, end = await self._source.bounds(copy.place)
        if end < here.next_offset:
            raise Stopped(
                f"the source ends at {end}, and the copy at {here.next_offset}: the source has been made again, or has"
                " lost records; nothing here was changed"
            )
        compared = await compare(self._source, self._here, copy.place, is_compacted=True, last=COMPARED_OFFSETS)
        if not compared.is_copy:
            raise Stopped(
                f"the source has other records at offsets {', '.join(map(str, compared.shown))}: they are not one log;"
                " nothing here was changed"
            )
        copy.position, copy.empty_since = here.next_offset, None

    async def _take(self, copy: Copy, piece: Piece, *, is_last: bool) -> None:
        assert copy.position is not None
        if piece.error == OUT_OF_RANGE:
            first, _ = await self._source.bounds(copy.place)
            copy.position = None
            if first > copy.end:
                if copy.is_begun:
                    self._say(
                        f"{copy.name}: the source deleted offsets {copy.end} to {first - 1} before they were copied"
                    )
                await self._target.append(*copy.place, gap(copy.end, first))
            return
        if piece.error:
            await self._source.refresh()
            return
        copy.hwm = piece.hwm
        batches: list[bytes] = []
        at = copy.position
        for found in piece.batches:
            batch, header = found, parse_header(found)
            if header.end <= at:
                continue
            if header.base_offset < at:
                if not copy.is_compacted:
                    raise Stopped(
                        f"the source has a batch {header.base_offset} to {header.last_offset}, the copy ends at {at}:"
                        " they are not one log; nothing here was changed"
                    )
                batch = from_offset(batch, header, at)  # compaction has joined it to batches that were copied
            else:
                batches += gap(at, header.base_offset)
            batches.append(batch)
            at = header.end
            copy.records += header.count
            copy.bytes += len(batch)
            copy.newest_ms = max(copy.newest_ms, header.max_timestamp)
        if not batches and at < piece.hwm and is_last and copy.is_compacted:
            copy.empty_since = copy.empty_since or time.monotonic()
            if time.monotonic() - copy.empty_since > EMPTY_S:
                self._say(f"{copy.name}: compaction has left nothing from offset {at} to {piece.hwm - 1} at the source")
                batches, at = gap(at, piece.hwm), piece.hwm
        if batches:
            copy.empty_since = None
            copy.position = at
            copy.pushing = asyncio.create_task(self._push(copy, batches, at))

    async def _push(self, copy: Copy, batches: list[bytes], end: int) -> None:
        try:
            await self._target.append(*copy.place, batches)
            copy.end = end
        except SmqError as e:
            self._failed(copy, e)
        finally:
            copy.pushing = None

    async def _throttle(self, size: int) -> None:
        if limit := self._settings.bytes_per_second:
            now = time.monotonic()
            self._paid_until = max(self._paid_until, now) + size / limit
            await asyncio.sleep(self._paid_until - now)

    # ------------------------------------------------------------------------------------------------ groups
    async def copy_commits(self) -> None:
        """What a group has committed at the source, it has here, once the record before that is here. A commit here
        that is further is kept."""
        if self._share[0]:
            return  # the first of several does it
        for group in await self._source.groups():
            if not self._settings.wants_group(group):
                continue
            there = {p: made for p, made in (await self._source.commits(group)).items() if p[0] in self._topics}
            name = KAFKA_GROUP_PREFIX + group
            here = await self.admin.fetch_offsets(name)
            wanted: dict[Place, int | CommittedOffset] = {}
            for (topic, index), (offset, metadata) in there.items():
                known = here.get((topic, index))
                copy = self.copies.get((topic, index))
                if known is None or known.offset < offset:
                    end = copy.end if copy is not None else (await self.admin.partition_range(topic, index)).next_offset
                    if offset > end:
                        continue
                    wanted[topic, index] = CommittedOffset(offset=offset, metadata=metadata)
                elif known.offset > offset:
                    self._say(f"group {group}: {known.offset} of {topic}/{index} is kept here; the source has {offset}")
            if wanted:
                try:
                    await self.admin.commit_offsets(name, wanted)
                    self.commits += len(wanted)
                except SmqError as e:
                    self._refuse(group, f"group {group}: its commits stay as they are here: {e}")


def gap(start: int, stop: int) -> list[bytes]:
    """Batches without a record."""
    return [empty_batch(at, min(stop - at, INT32_MAX)) for at in range(start, stop, INT32_MAX)]


def wanted_config(config: dict[str, str]) -> dict[str, str]:
    """Of the source's effective settings, those that mean something here, and that smq takes."""
    return {
        key: config.get(key, row.default)
        for key, row in TOPIC_CONFIG.items()
        if not row.is_read_only and key != MIRRORED and row.accepts(config.get(key, row.default))
    }


def lag_of(copies: Iterable[Copy]) -> int | None:
    lags = [copy.lag for copy in copies if not copy.problem]
    return None if any(lag is None for lag in lags) else sum(lag for lag in lags if lag is not None)
