"""What a process counts and times while it works: counters and histograms as plain numbers.

Owns the instruments, their names, and the values that a label may have. It knows neither a registry nor a text format:
`http.collectors` reads the numbers and shows them. An instrument must never decide anything, and costs a
dictionary's look-up. Each is changed by one thread only. Every layer of the server may import it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Final, Protocol

from smq.raft_state.ids import PartitionId

_MS: Final = 1_000_000
# From a cached answer to a disk that hangs; three per decade is enough to tell a slow disk from a slow network.
DURATIONS_NS: Final = tuple(
    int(ms * _MS) for ms in (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000)
)
COUNTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
SIZES: Final = tuple(1 << bits for bits in range(8, 25, 2))  # 256 bytes to 16 MiB
NS_PER_S: Final = 1_000_000_000
LATER_MAX: Final = 512  # amounts that wait to be folded: 20 KB per series; sorting them takes tens of microseconds
STORED: Final = ("stored",)  # of the batches that are counted by result
DUPLICATE: Final = ("duplicate",)


class Counter:
    """A number that only grows. Without labels it is `amount`; with labels there is one for each combination of their
    values in `by_labels`. A hot path changes either without a call."""

    __slots__ = ("amount", "by_labels", "labels", "name", "text")

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.amount = 0
        self.by_labels: dict[tuple[str, ...], int] = {}

    def add(self, count: int, *labels: str) -> None:
        self.by_labels[labels] = self.by_labels.get(labels, 0) + count

    @property
    def values(self) -> dict[tuple[str, ...], int]:
        """By the values of the labels, as of now."""
        return dict(self.by_labels) if self.labels else {(): self.amount}


class Sum(Counter):
    """A counter of what is counted by part anyway: `amount` is that of the parts that are gone."""

    __slots__ = ("_parts",)

    def __init__(self, name: str, text: str, parts: Callable[[], int]) -> None:
        super().__init__(name, text)
        self._parts = parts

    @property
    def values(self) -> dict[tuple[str, ...], int]:
        return {(): self.amount + self._parts()}


class Series:
    """The observations of a histogram with one combination of labels: how many fell into each bucket, and their sum.

    A hot path of the loop appends to `later` instead of a call of `observe`, and calls `fold` when there are LATER_MAX.
    What another thread observes may not wait there: it would be folded by two threads."""

    __slots__ = ("_buckets", "_total", "bounds", "later")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.later: list[int] = []  # the same list for ever
        self._buckets = [0] * (len(bounds) + 1)
        self._total = 0

    def observe(self, amount: int) -> None:
        self._buckets[bisect_left(self.bounds, amount)] += 1
        self._total += amount

    def fold(self) -> None:
        """Counts what was put off. Sorting costs less than a search for each: those of one turn ascend anyway."""
        later, begin = self.later, 0
        later.sort()
        for number, bound in enumerate(self.bounds):
            end = bisect_right(later, bound, begin)
            self._buckets[number] += end - begin
            begin = end
        self._buckets[-1] += len(later) - begin
        self._total += sum(later)
        later.clear()

    @property
    def buckets(self) -> list[int]:
        if self.later:
            self.fold()
        return self._buckets

    @property
    def total(self) -> int:
        if self.later:
            self.fold()
        return self._total

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Histogram:
    """How often something took how long, or was how large. Durations are in nanoseconds here, and in seconds where they
    are shown: `divisor` says by how much to divide."""

    __slots__ = ("bounds", "divisor", "labels", "name", "rows", "text")

    def __init__(
        self, name: str, text: str, *labels: str, bounds: tuple[int, ...] = DURATIONS_NS, divisor: int = NS_PER_S
    ) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.bounds, self.divisor = bounds, divisor
        self.rows: dict[tuple[str, ...], Series] = {} if labels else {(): Series(bounds)}

    def series(self, *labels: str) -> Series:
        """For a hot path: looked up once, and kept."""
        found = self.rows.get(labels)
        if found is None:
            found = self.rows[labels] = Series(self.bounds)
        return found

    def observe(self, amount: int, *labels: str) -> None:
        (self.rows.get(labels) or self.series(*labels)).observe(amount)


class StageSink(Protocol):
    """Where the times of a batch's stages go: to the histogram of all, or to the trace of one."""

    def observe(self, amount: int, stage: str, /) -> None:
        """The stage took this number of nanoseconds, and has just ended."""


def sized(name: str, text: str, *labels: str, bounds: tuple[int, ...]) -> Histogram:
    """A histogram of what is no time."""
    return Histogram(name, text, *labels, bounds=bounds, divisor=1)


@dataclass(slots=True)
class Traffic:
    """Of one partition, at this node: batches that it took in as the leader, and batches that readers took from it."""

    produced_records: int = 0
    produced_bytes: int = 0
    fetched_bytes: int = 0


NO_TRAFFIC: Final = Traffic()


@dataclass(slots=True)
class NodeMeasures:
    """Of a node's replication. The values of labels are acks, stages, error codes: each a short fixed list."""

    produced: Counter = field(
        default_factory=lambda: Counter(
            "smq_produce_batches",
            "Batches from producers: stored, duplicate (a retry of a stored batch), or refused with this error code.",
            "result",
        )
    )
    produced_records: Sum = field(init=False)
    produced_bytes: Sum = field(init=False)
    produce: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_produce_seconds",
            "From the arrival of a batch at its leader to its answer, without errors. Of one batch in 127.",
            "acks",
        )
    )
    stage: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_produce_stage_seconds",
            "Parts of a batch's way. queue: arrival to append. append: check and append. fsync: append to this disk."
            " replicate: append to a majority's disks. commit: majority to committed. answer: commit to answer. Of one"
            " batch in 127; all but the first two of one at a time per partition.",
            "stage",
        )
    )
    fetches: Counter = field(
        default_factory=lambda: Counter(
            "smq_fetches", "Reads of one partition: data, empty (nothing came in time), or this error code.", "result"
        )
    )
    fetched_batches: Counter = field(
        default_factory=lambda: Counter("smq_fetch_batches", "Batches that readers were given.")
    )
    fetched_records: Counter = field(
        default_factory=lambda: Counter("smq_fetch_records", "Offsets in batches that readers were given.")
    )
    fetched_bytes: Counter = field(default_factory=lambda: Counter("smq_fetch_bytes", "Bytes that readers were given."))
    fetch: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_fetch_seconds",
            "Time of a read without errors, by whether it had to wait for records.",
            "waited",
        )
    )
    proposals: Counter = field(
        default_factory=lambda: Counter(
            "smq_raft_proposals", "Commands that this node proposed: committed, or ended by this error code.", "result"
        )
    )
    proposal: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_raft_commit_seconds", "From the proposal of a command to its effect on this node."
        )
    )
    read_index: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_raft_read_index_seconds", "Time until a linearizable read point was reached."
        )
    )
    advances: Counter = field(
        default_factory=lambda: Counter(
            "smq_hwm_advances",
            "High water marks that this node proposed: accepted, or rejected because the partition's epoch was over or"
            " the partition was gone.",
            "result",
        )
    )
    compactions: Counter = field(
        default_factory=lambda: Counter(
            "smq_compaction_passes",
            "Looks at a led partition of a compacted topic, by result. done: all that was due is compacted."
            " lacks_bytes: a segment's bytes are on no replica that answers. Abandoned, and tried again: leader"
            " (leadership or limits changed), log_start (it has moved), read (a read failed), damage, disk_full, agree"
            " (the command was not committed in time), install (other changes were on their way to the disk).",
            "result",
        )
    )
    compacted_records: Counter = field(
        default_factory=lambda: Counter(
            "smq_compaction_removed_records", "Records that compaction removed from partitions that this node led."
        )
    )
    retained_offsets: Counter = field(
        default_factory=lambda: Counter(
            "smq_retention_deleted_offsets", "Offsets that retention deleted, of partitions that this node led."
        )
    )
    retained_bytes: Counter = field(
        default_factory=lambda: Counter(
            "smq_retention_deleted_bytes", "Stored size of the batches that went with them, on one replica."
        )
    )
    leader_changes: Counter = field(
        default_factory=lambda: Counter("smq_raft_leader_changes", "Times that this node saw another Raft leader.")
    )
    anomalies: Counter = field(
        default_factory=lambda: Counter(
            "smq_anomalies",
            "What only a bug, a disk that has lied, or a hand in the data explains. hwm-back, log-start-back, lso-back:"
            " a partition's mark went back. commit-changed: a group's committed offset is not that of its last commit."
            " state-differs: nodes have different replicated states. log-differs: replicas have different batches.",
            "kind",
        )
    )
    traffic: dict[PartitionId, Traffic] = field(default_factory=dict)  # bounded by the node's partitions

    def __post_init__(self) -> None:
        of_traffic = self.traffic.values
        self.produced_records = Sum(
            "smq_produce_records",
            "Records in stored batches.",
            lambda: sum(traffic.produced_records for traffic in of_traffic()),
        )
        self.produced_bytes = Sum(
            "smq_produce_bytes",
            "Bytes of stored batches, as the producers sent them.",
            lambda: sum(traffic.produced_bytes for traffic in of_traffic()),
        )
        self.produced.by_labels.update({STORED: 0, DUPLICATE: 0})  # the hot path only adds to them

    def traffic_of(self, partition: PartitionId) -> Traffic:
        found = self.traffic.get(partition)
        if found is None:
            found = self.traffic[partition] = Traffic()
        return found

    def forget_traffic(self, partition: PartitionId) -> None:
        """This node has it no longer; what it took counts on."""
        gone = self.traffic.pop(partition, NO_TRAFFIC)
        self.produced_records.amount += gone.produced_records
        self.produced_bytes.amount += gone.produced_bytes


@dataclass(slots=True)
class DiskMeasures:
    """Of the disk's writer, but for the series of the index: its thread alone changes each."""

    write: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_disk_write_seconds",
            "Time of one synced write: of a round to the log, or of a transaction of the index.",
            "to",
        )
    )
    submissions: Histogram = field(
        default_factory=lambda: sized(
            "smq_disk_write_submissions", "Submissions that shared one synced write.", bounds=COUNTS
        )
    )
    size: Histogram = field(
        default_factory=lambda: sized("smq_disk_write_bytes", "Bytes of values in one synced write.", bounds=SIZES)
    )


@dataclass(slots=True)
class GroupMeasures:
    """Of the groups that a node coordinates."""

    changes: Counter = field(
        default_factory=lambda: Counter(
            "smq_group_changes",
            "Changes of groups by this coordinator: done, or ended by this error code. A rebalance is a FormGeneration,"
            " a commit a CommitOffsets.",
            "command",
            "result",
        )
    )
    change: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_group_change_seconds", "From the request for a change of a group to its effect.", "command"
        )
    )


@dataclass(slots=True)
class ProcessMeasures:
    """Of the process: what delays everything in it."""

    loop_lag: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_loop_lag_seconds", "How late the event loop ran a timer; probed several times per second."
        )
    )
    gc_pause: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_gc_pause_seconds", "Time of one pass of Python's garbage collector.", "generation"
        )
    )
    kafka_request: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_kafka_request_seconds",
            "From the arrival of a Kafka request to its answer. Fetch, JoinGroup and SyncGroup include waiting. Of"
            " Produce, only of what is read in one turn of the loop in seven.",
            "api",
        )
    )
    fetch_sessions: Counter = field(
        default_factory=lambda: Counter(
            "smq_kafka_fetch_sessions",
            "Fetch sessions (KIP-227) that were opened, closed by their clients, or evicted: there was no room for all."
            " Open are those that neither ended.",
            "change",
        )
    )
    grpc_request: Histogram = field(
        default_factory=lambda: Histogram(
            "smq_grpc_request_seconds",
            "From the start of a gRPC call with one answer to that answer, without errors. Fetch, JoinGroup and"
            " SyncGroup include waiting.",
            "method",
        )
    )
    grpc_requests: Counter = field(
        default_factory=lambda: Counter(
            "smq_grpc_requests",
            "gRPC calls with one answer: ok, or ended by this error code. What its client gave up is not counted.",
            "method",
            "result",
        )
    )


def instruments(measures: object) -> Iterator[Counter | Histogram]:
    """The instruments of a dataclass like those above, in order."""
    for each in fields(measures):  # type: ignore[arg-type]  # any of the dataclasses above
        found = getattr(measures, each.name)
        if isinstance(found, Counter | Histogram):
            yield found


def all_instruments(groups: Iterable[object]) -> list[Counter | Histogram]:
    """Of several such dataclasses."""
    return [found for measures in groups for found in instruments(measures)]
