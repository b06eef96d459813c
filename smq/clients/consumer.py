"""The asyncio consumer: assigned partitions, positions, iteration, raw batches, and a group's committed offsets.

Owns the I/O around `fetch_planner`: long polls, failover to another replica, look-ups of positions. The caller assigns
the partitions, or subscribes: then `groups` does so, with the other members of the group. Users, `sync` and the
command line import it.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Literal, TypeAlias, Unpack

from smq.clients.arguments import (
    INT32_MAX,
    Duration,
    Instant,
    check_choice,
    check_flag,
    check_int,
    check_name,
    check_place,
    invalid,
    milliseconds,
    partitions_of,
)
from smq.clients.channels import NodeStubs
from smq.clients.cluster import DEADLINE_GRACE_MS, ClusterClient, now_ms
from smq.clients.errors import build, error_from_detail
from smq.clients.fetch_planner import NO_END, FetchPlanner, FetchSettings, PartitionFetch, PlannedFetch, ResetTo
from smq.clients.groups.member import Member
from smq.clients.groups.member_options import MemberOptions, member_settings
from smq.clients.groups.subscribing import Callbacks, Resume, Subscribing
from smq.clients.interceptors import ConsumerChain, ConsumerInterceptor
from smq.clients.lifecycle import Lifecycle
from smq.clients.login import Login
from smq.clients.metadata import Servers
from smq.clients.pb import smq_pb2 as pb
from smq.clients.positions import (
    LookUp,
    Start,
    Wanted,
    ends_of,
    expanded,
    look_up_starts,
    parse_start,
    resolve_starts,
    starts_of,
)
from smq.clients.retry import RandomFn
from smq.clients.search import Searching
from smq.clients.tls import Tls
from smq.clients.types import ISOLATIONS, ConsumerRecord, FetchedRange, Isolation, RawBatch, TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import BatchCorrupt, decode_batch

Assigned: TypeAlias = str | TopicPartition  # a topic stands for all its partitions
Assignment: TypeAlias = str | Iterable[Assigned] | Mapping[Assigned, Start] | Mapping[TopicPartition, Start]
End: TypeAlias = int | Literal["latest"] | Mapping[TopicPartition, int]


class ConsumerOptions(MemberOptions, total=False):
    """The options of Consumer, for its blocking version."""

    servers: Servers | None
    group: str | None
    fetch_max_bytes: int
    partition_max_bytes: int
    max_wait_ms: Duration
    from_replica: int | None
    auto_offset_reset: ResetTo
    isolation: Isolation
    request_timeout_ms: Duration
    stall_timeout_ms: Duration
    connect_timeout_ms: Duration
    tls: Tls | None
    login: Login | None
    interceptors: Iterable[ConsumerInterceptor]
    random_source: RandomFn


class Consumer(Subscribing, Searching, Lifecycle):
    """`async with Consumer("host:port") as c: await c.assign("topic"); async for record in c: ...`
    `async with Consumer("host:port", group="g") as c: await c.subscribe("topic"); async for record in c: ...`

    A start position is an offset, "earliest", "latest", the name of another offset type, (type, value), a datetime, a
    timedelta (so long ago), or a StartAt; the default is RESUME_OR_EARLIEST with a group and RESET_TO_EARLIEST without.
    `from_replica`: read from this node id only; otherwise leaders first, and another replica if one fails.
    OFFSET_OUT_OF_RANGE (with lo and hi) is raised unless `auto_offset_reset` is "earliest" or "latest".

    One fetch waits up to `max_wait_ms` for records and gives at most `fetch_max_bytes`, of each partition about
    `partition_max_bytes`; a batch that is larger comes whole. Reading raises the error of a partition that no replica
    has served for `stall_timeout_ms`. `request_timeout_ms` bounds every other call, retries included, and
    `connect_timeout_ms` start(). Beside its own errors every call raises INVALID_REQUEST for a wrong argument, and
    NO_QUORUM, TIMED_OUT or UNREACHABLE if the cluster has not answered in time.
    With `isolation` "read_uncommitted" the records of open and of aborted transactions come, too, and the log ends at
    the high water mark, not at the last stable offset.

    `interceptors` see what iteration and getmany() are about to return, and commits: see ConsumerInterceptor.
    `membership`: the options of subscribe().
    """

    def __init__(
        self,
        bootstrap: Servers | None = None,
        *,
        servers: Servers | None = None,
        group: str | None = None,
        fetch_max_bytes: int = 8 << 20,
        partition_max_bytes: int = 1 << 20,
        max_wait_ms: Duration = 500,
        from_replica: int | None = None,
        auto_offset_reset: ResetTo = "none",
        isolation: Isolation = "read_committed",
        request_timeout_ms: Duration = 30_000.0,
        stall_timeout_ms: Duration = 60_000.0,
        connect_timeout_ms: Duration = 10_000.0,
        tls: Tls | None = None,
        login: Login | None = None,
        interceptors: Iterable[ConsumerInterceptor] = (),
        random_source: RandomFn = random.random,
        **membership: Unpack[MemberOptions],
    ) -> None:
        check_choice("auto_offset_reset", auto_offset_reset, ("none", "earliest", "latest"))
        check_choice("isolation", isolation, ISOLATIONS)
        if group is not None:
            check_name("group", group)
        if from_replica is not None:
            check_int("from_replica", from_replica, 1, INT32_MAX)
        check_int("fetch_max_bytes", fetch_max_bytes, 1, INT32_MAX)
        check_int("partition_max_bytes", partition_max_bytes, 1, INT32_MAX)
        self._group = group
        self._interceptors = ConsumerChain.of(interceptors)
        self._timeout_ms = milliseconds("request_timeout_ms", request_timeout_ms)
        self._cluster = ClusterClient(
            bootstrap,
            servers=servers,
            connect_timeout_ms=connect_timeout_ms,
            random_source=random_source,
            tls=tls,
            login=login,
        )
        settings = FetchSettings(
            partition_bytes_max=partition_max_bytes,
            response_bytes_max=fetch_max_bytes,
            max_wait_ms=int(milliseconds("max_wait_ms", max_wait_ms, lo=0)),
            reset=auto_offset_reset,
            stall_timeout_ms=milliseconds("stall_timeout_ms", stall_timeout_ms),
            only_node=from_replica,
            isolation=isolation,
        )
        self._look_ups: LookUp = {
            "group": group,
            "reset_if_gone": auto_offset_reset == "earliest",
            "isolation": isolation,
            "timeout_ms": self._timeout_ms,
        }
        self._planner = FetchPlanner(settings, self._cluster.metadata, random_source)
        self._tasks: set[asyncio.Task[None]] = set()  # at most one fetch per partition, and one refresh
        self._refreshing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._updated = asyncio.Event()
        self._decoded: deque[ConsumerRecord] = deque()  # of `_decoding`, for iteration
        self._decoding: RawBatch | None = None
        self._next_partition = 0
        self._is_closed = False
        self._settings = member_settings(membership)
        self._member: Member | None = None
        self._callbacks = Callbacks()
        self._resume: Resume = "RESUME_OR_EARLIEST"
        self._is_following = self._is_waiting = False
        self._taken = 0  # by an application that takes records from our caller
        self._committed_at_ms = now_ms()
        self._auto_committed: dict[TopicPartition, int] = {}

    # -- life

    async def start(self) -> None:
        """Finds the cluster, within `connect_timeout_ms`. UNREACHABLE. `async with` calls it."""
        await self._cluster.start()
        node = self._planner.settings.only_node
        if node is not None and self._cluster.metadata.address(node) is None:
            raise invalid(f"from_replica={node}: there is no such node (`smq status` lists them)")

    async def close(self, *, commit: bool = True) -> None:
        """Ends all reading. A subscribed consumer commits what it has returned, if commits are automatic (and not with
        `commit=False`, which is how a block ends that raises), and leaves its group. Every later call raises
        CLIENT_CLOSED."""
        check_flag("commit", commit)
        try:
            if not self._is_closed:
                await self._leave_group(is_committing=commit)
        finally:
            await self._close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(commit=kind is None)

    async def _close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._updated.set()
        await self._cluster.close()
        if self._interceptors is not None:
            self._interceptors.close()

    # -- assignment and positions

    async def assign(
        self,
        partitions: Assignment,
        start: Start | None = None,
        *,
        end_offset: End | None = None,
        until_ms: Instant | None = None,
    ) -> dict[TopicPartition, int]:
        """Replaces the assignment: a topic (all its partitions, as of now), a list of topics and (topic, partition)
        pairs that all begin at `start`, or a mapping of such to starts. Returns the positions. UNKNOWN_TOPIC,
        UNKNOWN_PARTITION, OFFSET_OUT_OF_RANGE; the old assignment then stays.

        Reading ends before `end_offset`: an offset for all partitions, "latest" for the present ends, or a mapping (a
        partition that is missing has no end). With `until_ms` it ends before the first record whose timestamp_ms is at
        or after it, or at the present end if there is none yet. With both, whichever comes first. When all partitions
        have ended, iteration stops, and `getmany` returns immediately."""
        self._check_usable()
        if self._member is not None:
            raise invalid("the consumer has a subscription, which assigns its partitions: unsubscribe() first")
        wanted = await expanded(self._cluster, starts_of(partitions, start, group=self._group), self._timeout_ms)
        found = await self._resolve(wanted)
        ends = await ends_of(self._resolve, list(wanted), end_offset, until_ms)
        self._decoded.clear()
        for old in self._planner.assigned.values():
            old.move(old.position)  # outstanding answers are discarded
        self._planner.assigned = {tp: PartitionFetch(tp[0], tp[1], found[tp], ends.get(tp)) for tp in wanted}
        self._pump()
        return found

    @property
    def is_finished(self) -> bool:
        """Every assigned partition has an end, and everything before it has been returned."""
        assigned = self._planner.assigned.values()
        return not self._decoded and bool(assigned) and all(fetch.is_over for fetch in assigned)

    def _check_usable(self) -> None:
        """CLIENT_CLOSED, FORKED."""
        if self._is_closed:
            raise SmqError(ErrorCode.CLIENT_CLOSED, "the consumer is closed")
        self._cluster.check_usable()

    async def _resolve(self, wanted: Mapping[TopicPartition, Wanted]) -> dict[TopicPartition, int]:
        listed = await resolve_starts(self._cluster, wanted, **self._look_ups)
        return {tp: position.offset for tp, position in listed.items()}

    async def _look_up(self, wanted: Mapping[TopicPartition, Wanted]) -> Mapping[TopicPartition, int | SmqError]:
        listed = await look_up_starts(self._cluster, wanted, **self._look_ups)
        return {tp: at if isinstance(at, SmqError) else at.offset for tp, at in listed.items()}

    def assignment(self) -> list[TopicPartition]:
        """The assigned partitions; empty before assign()."""
        return list(self._planner.assigned)

    async def seek(self, topic: str, partition: int, start: Start) -> int:
        """Moves to an offset within [lo, hi] (OFFSET_OUT_OF_RANGE otherwise), or to the position that `start` means
        now. INVALID_REQUEST for a partition that is not assigned."""
        self._check_usable()
        fetch = self._assigned(topic, partition)
        found = await self._resolve({(topic, partition): parse_start(start, group=self._group)})
        self._discard_decoded()
        fetch.move(found[(topic, partition)])
        self._pump()
        return fetch.position

    async def rewind(self, positions: Mapping[TopicPartition, int]) -> None:
        """Back to earlier positions of this assignment, without a look at a node: what was read ahead is read again.
        INVALID_REQUEST for a partition that is not assigned."""
        for tp, position in positions.items():
            self._assigned(*tp).move_back(position)
        self._pump()

    def position(self, topic: str, partition: int) -> int:
        """The offset after the last record that was returned; -1 while it is not known where a subscription begins.
        INVALID_REQUEST for a partition that is not assigned."""
        return self._assigned(topic, partition).position

    async def lag(self, topic: str, partition: int) -> int:
        """How many offsets lie between the position and the last known high water mark; -1 while the position is not
        known. INVALID_REQUEST for a partition that is not assigned."""
        fetch = self._assigned(topic, partition)
        if fetch.hwm < 0:
            latest = await self._resolve({(topic, partition): Wanted(type="RESET_TO_LATEST")})
            fetch.hwm = max(fetch.hwm, latest[(topic, partition)])
        return fetch.lag

    def high_water_mark(self, topic: str, partition: int) -> int:
        """As of the last answer; -1 before the first. INVALID_REQUEST for a partition that is not assigned."""
        return self._assigned(topic, partition).hwm

    def _assigned(self, topic: str, partition: int) -> PartitionFetch:
        check_place(topic, partition)
        fetch = self._planner.assigned.get((topic, partition))
        if fetch is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{topic}/{partition} is not assigned: assign() it first")
        return fetch

    async def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Returns no records of these partitions until resume(). They stay assigned, and their positions stay.
        INVALID_REQUEST for one that is not assigned."""
        chosen = [self._assigned(*tp) for tp in partitions_of("partitions", partitions)]
        self._discard_decoded()
        for fetch in chosen:
            fetch.is_paused = True

    async def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Ends a pause(). INVALID_REQUEST for a partition that is not assigned."""
        for tp in partitions_of("partitions", partitions):
            self._assigned(*tp).is_paused = False
        self._updated.set()
        self._pump()

    def paused(self) -> list[TopicPartition]:
        """Those of the assigned partitions that are paused. A partition that is revoked forgets it."""
        return [tp for tp, fetch in self._planner.assigned.items() if fetch.is_paused]

    # -- records

    def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        return self

    async def __anext__(self) -> ConsumerRecord:
        """Waits without a limit. SmqError if a partition cannot be read; CLIENT_CLOSED after close(), so that a loop
        never ends as if the data did; StopAsyncIteration once all partitions have ended."""
        self._check_usable()
        while not self._decoded:
            batch = await self._poll()
            if batch is not None:
                self._decode(batch)
            elif self.is_finished:
                raise StopAsyncIteration
            else:
                await self._wait_for_update(None)
        return self._pop_decoded()

    def _decode(self, batch: RawBatch) -> None:
        records = self._records_of(batch)
        if records is None:
            return
        self._decoded.extend(self._intercepted(records))
        self._decoding = batch
        if not self._decoded:
            self._advance(batch)

    def _pop_decoded(self) -> ConsumerRecord:
        record = self._decoded.popleft()
        self._planner.assigned[(record.topic, record.partition)].position = record.offset + 1
        if not self._decoded and self._decoding is not None:
            self._advance(self._decoding)  # past trailing offsets without a record
        return record

    async def getmany(
        self, max_records: int = 10_000, timeout_ms: Duration = 0.0
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Up to about `max_records` (a batch is never split) by partition; empty if nothing arrives in `timeout_ms`.
        Raises the SmqError of a partition that cannot be read, such as OFFSET_OUT_OF_RANGE, UNKNOWN_TOPIC,
        INVALID_BATCH or LEADER_UNAVAILABLE; if it has records of other partitions it returns them, and the next call
        raises."""
        self._check_usable()
        check_int("max_records", max_records, 1)
        timeout_ms = milliseconds("timeout_ms", timeout_ms, lo=0)
        out: dict[TopicPartition, list[ConsumerRecord]] = {}
        count = 0
        while self._decoded:
            record = self._pop_decoded()
            out.setdefault((record.topic, record.partition), []).append(record)
            count += 1
        while count < max_records and (
            batch := self._next_batch(is_raising=False) if count else await self._batch_within(timeout_ms)
        ):  # what is taken here has not been returned yet: the group and errors wait
            records = self._records_of(batch)
            if records is None:
                continue
            out.setdefault((batch.topic, batch.partition), []).extend(self._intercepted(records))
            self._advance(batch)
            count += len(records)  # also those that an interceptor leaves out: a poll ends
        return {tp: records for tp, records in out.items() if records}

    def _intercepted(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        return records if self._interceptors is None else self._interceptors.on_consume(records)

    async def getbatch(self, timeout_ms: Duration = 0.0) -> RawBatch | None:
        """The next RecordBatch exactly as it is in the log; the position moves past it. None if none arrives within
        `timeout_ms`. The caller must skip records below the position before the call, and those at or beyond an end.
        Raises what getmany() raises, such as OFFSET_OUT_OF_RANGE."""
        self._check_usable()
        self._discard_decoded()
        batch = await self._batch_within(milliseconds("timeout_ms", timeout_ms, lo=0))
        if batch is not None:
            self._advance(batch)
        return batch

    async def fetch_range(
        self, topic: str, partition: int, offset: int, *, max_bytes: int = 0, max_wait_ms: int = 0
    ) -> FetchedRange:
        """One fetch of raw batches from `offset` on, without an assignment, from any replica that can serve it. Waits
        up to `max_wait_ms` for a batch and gives at most `max_bytes` (0: the node's default), or one larger batch.
        UNKNOWN_TOPIC, UNKNOWN_PARTITION, OFFSET_OUT_OF_RANGE (lo, hi)."""
        return await fetch_range(
            self._cluster,
            self._planner.settings,
            (topic, partition),
            offset,
            bytes_max=max_bytes,
            max_wait_ms=max_wait_ms,
            timeout_ms=self._timeout_ms,
        )

    def _records_of(self, batch: RawBatch) -> list[ConsumerRecord] | None:
        """None if it does not decode: that is the partition's error then, and its position stays before the batch."""
        fetch = self._planner.assigned[(batch.topic, batch.partition)]
        lo, hi = fetch.position, fetch.end if fetch.end is not None else NO_END
        try:
            return records_of(batch, lo, hi)
        except BatchCorrupt as e:
            fetch.move(lo)
            offsets = f"offsets {batch.base_offset} to {batch.last_offset}"
            message = f"the records at {offsets} do not decode ({e}); seek past them to read on"
            fetch.error = SmqError(ErrorCode.INVALID_BATCH, f"{batch.topic}/{batch.partition}: {message}")
            return None

    def _advance(self, batch: RawBatch) -> None:
        fetch = self._planner.assigned[(batch.topic, batch.partition)]
        fetch.advance(batch.last_offset + 1)
        if fetch.reset_to is not None:
            self._pump()  # it may have waited for this batch

    def _discard_decoded(self) -> None:
        """Drops records that iteration has decoded ahead: they are fetched again from the position."""
        for tp in {(r.topic, r.partition) for r in self._decoded}:
            fetch = self._planner.assigned[tp]
            fetch.move_back(fetch.position)
        self._decoded.clear()

    # -- the pump: starts every fetch that can be started

    async def _poll(self) -> RawBatch | None:
        """What the group asks for, then the next batch. An error suspends first: the application may poll again
        immediately, and heartbeats need a turn."""
        self._check_usable()
        try:
            await self._follow_group()
            return self._next_batch()
        except SmqError:
            await asyncio.sleep(0)
            raise

    def _next_batch(self, *, is_raising: bool = True) -> RawBatch | None:
        """The next one with records. Raises the error of a partition that cannot be read, or leaves it to the next
        call."""
        while (batch := self._take_batch(is_raising=is_raising)) is not None and not batch.data:
            self._advance(batch)
        return batch

    def _take_batch(self, *, is_raising: bool) -> RawBatch | None:
        """Partitions take turns, one batch or one error each."""
        fetches = list(self._planner.assigned.values())
        first = self._next_partition
        for turn in range(first, first + len(fetches)):
            fetch = fetches[turn % len(fetches)]
            if fetch.is_paused:
                continue
            if fetch.batches:
                self._next_partition = (turn + 1) % len(fetches)
                batch = fetch.batches.popleft()
                fetch.buffered_bytes -= len(batch.data)
                self._pump()
                return batch
            if fetch.error is not None and not is_raising:
                self._next_partition = turn % len(fetches)
                return None
            if fetch.error is not None:
                self._next_partition = (turn + 1) % len(fetches)
                raise self._error_of(fetch)
        return None

    def _error_of(self, fetch: PartitionFetch) -> SmqError:
        """The partition's error. A retriable one is raised once, then the fetch is retried; others stay until a
        seek."""
        error = fetch.error or SmqError(ErrorCode.INTERNAL, "no error")
        if error.code.is_retriable:
            fetch.error, fetch.stalled_since_ms = None, None
            self._pump()
        return SmqError(error.code, error.message, error.details)

    async def _batch_within(self, timeout_ms: float) -> RawBatch | None:
        deadline = now_ms() + timeout_ms
        while True:
            batch = await self._poll()
            if batch is not None:
                return batch
            left = deadline - now_ms()
            if left <= 0 or self.is_finished:
                await asyncio.sleep(0)  # an application may poll in a loop, and its fetches need a turn
                return None
            await self._wait_for_update(left)

    async def _wait_for_update(self, timeout_ms: float | None) -> None:
        if not self._planner.assigned and self._member is None:
            raise invalid("nothing is assigned: assign() partitions, or subscribe() to topics first")
        self._updated.clear()
        self._pump()
        if self.has_news():
            return
        self._is_waiting = True
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000.0):
                await self._updated.wait()
        except TimeoutError:
            pass  # nothing arrived: the caller checks its own deadline
        finally:
            self._is_waiting = False

    def _wake(self) -> None:
        self._updated.set()

    def _progress(self) -> object:
        """Another value while the application waits for records, or after it has taken one."""
        return object() if self._is_waiting else (len(self._decoded), self._taken)

    def _pump(self) -> None:
        if self._is_closed:
            return
        now = now_ms()
        for plan in self._planner.plan(now):
            self._spawn(self._fetch(plan))
        while self._planner.resets:
            self._spawn(self._reset(*self._planner.resets.pop()))
        if self._planner.unplaced:
            self._spawn(self._place_later(self._planner.unplaced))
            self._planner.unplaced = []
        if self._planner.stale_topics and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._spawn(self._refresh(sorted(self._planner.stale_topics)))
            self._planner.stale_topics.clear()
        wakeup = self._planner.next_wakeup_ms(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakeup is not None:
            self._timer = asyncio.get_running_loop().call_later(max(wakeup - now, 0.0) / 1000.0, self._pump)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self, plan: PlannedFetch) -> None:
        settings = self._planner.settings

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.FetchResponse:
            return await node.broker.Fetch(plan.request(settings), timeout=call_s)

        # A hanging node is given up soon after the end of the long poll, and another replica is asked.
        node_ms = settings.max_wait_ms + self._timeout_ms / 6 + DEADLINE_GRACE_MS
        outcome = await self._cluster.attempt(run, plan.address, node_ms)
        if isinstance(outcome, SmqError):
            has_update = self._planner.failed(plan, outcome, now_ms())
        else:
            has_update = self._planner.fetched(plan, outcome[0], now_ms())
        if has_update:
            self._updated.set()
        self._pump()

    async def _reset(self, fetch: PartitionFetch, to: ResetTo) -> None:
        generation = fetch.generation
        kind = "RESET_TO_EARLIEST" if to == "earliest" else "RESET_TO_LATEST"
        try:
            found = await self._resolve({fetch.key: Wanted(type=kind)})
        except SmqError:
            return  # the next fetch is out of range again, and resets again
        if fetch.generation == generation:
            fetch.reset(found[fetch.key])
            self._pump()

    async def _refresh(self, topics: list[str]) -> None:
        try:
            missing = await self._cluster.refresh(topics)
        except SmqError:
            missing = frozenset()  # no node answers: if that lasts, the partitions' own errors report it
        for fetch in self._planner.assigned.values():
            if fetch.topic in missing:
                fetch.error = SmqError(ErrorCode.UNKNOWN_TOPIC, f"topic {fetch.topic!r} no longer exists")
                self._updated.set()
        await asyncio.sleep(self._planner.settings.backoff.max_ms / 1000.0)
        self._refreshing = None
        self._pump()


async def fetch_range(
    cluster: ClusterClient,
    settings: FetchSettings,
    place: TopicPartition,
    offset: int,
    *,
    bytes_max: int,
    max_wait_ms: int,
    timeout_ms: float,
) -> FetchedRange:
    topic, partition = place
    check_place(topic, partition)
    item = build(pb.FetchPartition, topic=topic, partition=partition, offset=offset, max_bytes=bytes_max)
    request = build(
        pb.FetchRequest,
        partitions=[item],
        max_wait_ms=max_wait_ms,
        max_bytes=settings.response_bytes_max,
        isolation=ISOLATIONS[settings.isolation],
    )

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.FetchedPartition:
        answer = (await node.broker.Fetch(request, timeout=call_s + max_wait_ms / 1000.0)).partitions[0]
        if answer.HasField("error"):
            raise error_from_detail(answer.error)
        return answer

    part = await cluster.call_replica(run, topic, partition, only_node=settings.only_node, timeout_ms=timeout_ms)
    batches = tuple(RawBatch(topic, partition, b.base_offset, b.last_offset, b.ts_ns, b.data) for b in part.batches)
    return FetchedRange(log_start=part.log_start, hwm=part.hwm, lso=part.lso, batches=batches)


def records_of(batch: RawBatch, lo: int, hi: int) -> list[ConsumerRecord]:
    """Those with offsets in [lo, hi). Raises BatchCorrupt."""
    topic, partition, ts_ns_of_0 = batch.topic, batch.partition, batch.ts_ns - batch.base_offset
    return [
        ConsumerRecord(topic, partition, r.offset, ts_ns_of_0 + r.offset, r.timestamp_ms, r.key, r.value, r.headers)
        for r in decode_batch(batch.data)
        if lo <= r.offset < hi
    ]
