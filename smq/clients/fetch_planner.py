"""Plans the consumer's fetches and holds their results: the consumer's side of every partition. Sans-IO.

Owns positions, buffered batches, back-off and the choice of replica. It must never send, sleep or read a clock.
Only the consumer imports it.

A partition is in at most one outstanding fetch. Partitions that become ready together share one call per node; a
partition that becomes ready later does not wait for the others' long poll. Memory is bounded: a partition with
`partition_bytes_max` buffered is not fetched, and none is once `buffer_bytes_max` is reached.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from smq.clients.errors import build, error_from_detail
from smq.clients.metadata import Metadata
from smq.clients.pb import smq_pb2 as pb
from smq.clients.retry import Backoff, RandomFn, needs_refresh, of_partition
from smq.clients.types import ISOLATIONS, Isolation, RawBatch, TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError

ResetTo: TypeAlias = Literal["none", "earliest", "latest"]

AVOID_REPLICA_MS: Final = 2_000.0  # a replica that could not serve a partition is asked again after this
LAGGING_ANSWERS_MAX: Final = 5  # a lagging node may not know a new topic yet: its answer counts after this many
NO_END: Final = 1 << 63
NO_POSITION: Final = -1  # of a partition whose start is not known yet
PARTITIONS_PER_FETCH_MAX: Final = 200  # below the server's cap; more go into further calls
_AVOID: Final = frozenset(
    {
        ErrorCode.NOT_REPLICA,
        ErrorCode.DATA_DAMAGED,
        ErrorCode.NODE_NOT_READY,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.UPGRADE_NEEDED,
        ErrorCode.TIMED_OUT,
        ErrorCode.UNREACHABLE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    partition_bytes_max: int = 1 << 20
    response_bytes_max: int = 8 << 20
    buffer_bytes_max: int = 64 << 20
    max_wait_ms: int = 500
    reset: ResetTo = "none"
    stall_timeout_ms: float = 60_000.0  # retriable errors are retried silently for this long, then reported
    only_node: int | None = None
    isolation: Isolation = "read_committed"
    backoff: Backoff = field(default_factory=Backoff)


class PartitionFetch:
    """One assigned partition. `position` is the next offset to return, `fetch_offset` the next to fetch. Nothing at or
    beyond `end` is returned; None: there is no end."""

    __slots__ = (
        "attempts",
        "avoid",
        "batches",
        "buffered_bytes",
        "end",
        "error",
        "fetch_offset",
        "generation",
        "hwm",
        "is_busy",
        "is_paused",
        "log_start",
        "lso",
        "partition",
        "position",
        "reset_to",
        "retry_at_ms",
        "stalled_since_ms",
        "topic",
    )

    def __init__(self, topic: str, partition: int, position: int, end: int | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.end = end
        self.position = self.fetch_offset = position
        self.batches: deque[RawBatch] = deque()  # bounded by partition_bytes_max and one response
        self.generation = 0
        self.is_busy = self.is_paused = False
        self.hwm = self.lso = self.log_start = -1
        self.avoid: dict[str, float] = {}  # address -> until when; at most the partition's replicas
        self.move(position)

    @property
    def key(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def is_over(self) -> bool:
        """Everything before the end has been taken from here."""
        return not self.batches and self.is_fetched

    @property
    def is_fetched(self) -> bool:
        """There is nothing more to fetch before the end."""
        return self.end is not None and self.fetch_offset >= self.end

    @property
    def lag(self) -> int:
        """To the last known high water mark; -1 while the position is not known."""
        return -1 if self.position == NO_POSITION else max(self.hwm - self.position, 0)

    def advance(self, position: int) -> None:
        """Past offsets that have been returned, or hold no record."""
        self.position = max(self.position, position if self.end is None else min(position, self.end))

    def move(self, position: int) -> None:
        """Seek: discards buffered batches and outstanding answers."""
        self.position = self.fetch_offset = position
        self.reset_to: int | None = None  # where to go on after a reset, once what was read before has been taken
        self.batches.clear()
        self.buffered_bytes = 0
        self.generation += 1
        self.is_busy = False
        self.error: SmqError | None = None
        self.attempts = 0
        self.retry_at_ms = 0.0
        self.stalled_since_ms: float | None = None

    @property
    def resume_at(self) -> int:
        """Where reading would begin again without what was read ahead. Not beyond where a reset leads to: the position
        may be of a log that is gone, and at the same offset of its successor records would be passed over."""
        return self.position if self.reset_to is None else min(self.position, self.reset_to)

    def move_back(self, position: int) -> None:
        """To read again what was read ahead; after a reset not beyond its position, for the same reason."""
        self.move(min(position, self.resume_at))

    def reset(self, position: int) -> None:
        """Moves once everything that was read before has been taken, as for a reader that reads nothing ahead: those
        records may be gone from the log, so none of them is dropped. Until then nothing is fetched, because a position
        that follows the old records would hide the new ones."""
        self.generation += 1  # outstanding answers are discarded
        self.is_busy = False
        self.reset_to = position

    def finish_reset(self) -> None:
        if self.reset_to is not None and self.position >= self.fetch_offset:
            self.move(self.reset_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFetch:
    address: str
    items: tuple[tuple[PartitionFetch, int], ...]  # with the generation at the time of the request

    def request(self, settings: FetchSettings) -> pb.FetchRequest:
        partitions = [
            build(
                pb.FetchPartition,
                topic=f.topic,
                partition=f.partition,
                offset=f.fetch_offset,
                max_bytes=settings.partition_bytes_max,
            )
            for f, _ in self.items
        ]
        return build(
            pb.FetchRequest,
            partitions=partitions,
            max_wait_ms=settings.max_wait_ms,
            max_bytes=settings.response_bytes_max,
            isolation=ISOLATIONS[settings.isolation],
        )


class FetchPlanner:
    def __init__(self, settings: FetchSettings, metadata: Metadata, random: RandomFn) -> None:
        self.settings = settings
        self.assigned: dict[TopicPartition, PartitionFetch] = {}
        self.stale_topics: set[str] = set()  # to refresh: no replica is known, or a node says our metadata is old
        self.resets: list[tuple[PartitionFetch, ResetTo]] = []  # positions to look up again
        self.unplaced: list[PartitionFetch] = []  # starts to look up
        self._metadata = metadata
        self._random = random
        self._turn = 0

    @property
    def buffered_bytes(self) -> int:
        return sum(f.buffered_bytes for f in self.assigned.values())

    def plan(self, now_ms: float) -> list[PlannedFetch]:
        """The fetches to start now. Their partitions are busy until `fetched` or `failed`, and those that become
        `unplaced` until they move, or `not_placed`."""
        groups: dict[str, list[tuple[PartitionFetch, int]]] = {}
        if self.buffered_bytes < self.settings.buffer_bytes_max:
            for fetch in self._in_turn():
                fetch.finish_reset()
                if not self._is_ready(fetch, now_ms):
                    continue
                if fetch.position == NO_POSITION:
                    fetch.is_busy = True
                    self.unplaced.append(fetch)
                    continue
                address = self._address(fetch, now_ms)
                if address is None:
                    self.stale_topics.add(fetch.topic)
                    continue
                fetch.is_busy = True
                groups.setdefault(address, []).append((fetch, fetch.generation))
        return [
            PlannedFetch(address=address, items=tuple(items[i : i + PARTITIONS_PER_FETCH_MAX]))
            for address, items in groups.items()
            for i in range(0, len(items), PARTITIONS_PER_FETCH_MAX)
        ]

    def _in_turn(self) -> Iterator[PartitionFetch]:
        """Begins with another partition every time: a full response leaves the last ones out."""
        fetches = list(self.assigned.values())
        self._turn = (self._turn + 1) % len(fetches) if fetches else 0
        yield from fetches[self._turn :]
        yield from fetches[: self._turn]

    def _is_ready(self, fetch: PartitionFetch, now_ms: float) -> bool:
        if fetch.is_busy or fetch.is_paused or fetch.error is not None:
            return False
        if fetch.is_fetched or fetch.reset_to is not None or now_ms < fetch.retry_at_ms:
            return False
        return fetch.buffered_bytes < self.settings.partition_bytes_max

    def _address(self, fetch: PartitionFetch, now_ms: float) -> str | None:
        if self.settings.only_node is not None:
            return self._metadata.address(self.settings.only_node)
        addresses = self._metadata.replica_addresses(fetch.topic, fetch.partition, now_ms)
        fetch.avoid = {a: until for a, until in fetch.avoid.items() if until > now_ms}
        return next((a for a in addresses if a not in fetch.avoid), addresses[0] if addresses else None)

    def next_wakeup_ms(self, now_ms: float) -> float | None:
        times = [f.retry_at_ms for f in self.assigned.values() if not f.is_busy and f.retry_at_ms > now_ms]
        return min(times, default=None)

    # -- answers

    def fetched(self, plan: PlannedFetch, answer: pb.FetchResponse, now_ms: float) -> bool:
        """Processes an answer. True if it brought data or an error for the reader."""
        by_key = {f.key: (f, generation) for f, generation in plan.items}
        has_update = False
        for part in answer.partitions:
            fetch, generation = by_key.pop((part.topic, part.partition), (None, 0))
            if fetch is None or fetch.generation != generation:
                continue
            fetch.is_busy = False
            if part.HasField("error"):
                has_update |= self._part_failed(fetch, plan.address, error_from_detail(part.error), now_ms)
            else:
                has_update |= _buffer(fetch, part)
        for fetch, generation in by_key.values():
            if fetch.generation == generation:
                fetch.is_busy = False
        return has_update

    def failed(self, plan: PlannedFetch, error: SmqError, now_ms: float) -> bool:
        """The call itself failed. True if the reader must get an error now."""
        has_update = False
        for fetch, generation in plan.items:
            if fetch.generation == generation:
                fetch.is_busy = False
                has_update |= self._part_failed(fetch, plan.address, error, now_ms)
        return has_update

    def not_placed(self, fetch: PartitionFetch, error: SmqError, now_ms: float) -> bool:
        """Its start is not known, and is looked up again later. True if the reader must get an error now."""
        fetch.is_busy = False
        return self._part_failed(fetch, None, error, now_ms)

    def _part_failed(self, fetch: PartitionFetch, address: str | None, error: SmqError, now_ms: float) -> bool:
        fetch.attempts += 1
        if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and self.settings.reset != "none":
            fetch.retry_at_ms = now_ms + self.settings.backoff.delay_ms(fetch.attempts, self._random)
            self.resets.append((fetch, self.settings.reset))
            return False
        if fetch.stalled_since_ms is None or error.code is ErrorCode.OFFSET_STAGED:
            fetch.stalled_since_ms = now_ms  # no stall: it is served, and the transaction's time-out bounds the wait
        may_pass = error.code.is_retriable or (needs_refresh(error) and fetch.attempts < LAGGING_ANSWERS_MAX)
        if not may_pass or now_ms - fetch.stalled_since_ms >= self.settings.stall_timeout_ms:
            shown = of_partition(error)
            fetch.error = SmqError(shown.code, f"{fetch.topic}/{fetch.partition}: {shown.message}", shown.details)
            return True
        if address is not None and error.code in _AVOID:
            fetch.avoid[address] = now_ms + AVOID_REPLICA_MS
        if needs_refresh(error):
            self.stale_topics.add(fetch.topic)
        fetch.retry_at_ms = now_ms + self.settings.backoff.delay_ms(
            fetch.attempts, self._random, error.details.retry_after_ms
        )
        return False


def _buffer(fetch: PartitionFetch, part: pb.FetchedPartition) -> bool:
    fetch.log_start, fetch.hwm, fetch.lso = part.log_start, max(part.hwm, fetch.hwm), part.lso
    fetch.attempts, fetch.stalled_since_ms = 0, None
    fetch.avoid.clear()
    for b in part.batches:
        if b.last_offset < fetch.fetch_offset:
            continue  # already buffered
        fetch.batches.append(RawBatch(part.topic, part.partition, b.base_offset, b.last_offset, b.ts_ns, b.data))
        fetch.buffered_bytes += len(b.data)
        fetch.fetch_offset = b.last_offset + 1
    return bool(part.batches)
