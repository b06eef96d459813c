"""A partition's compaction under a test's hands: its passes, its segments, and what other replicas have of them."""

from dataclasses import replace
from typing import Any

from smq.raft_state.commands import AdvanceClock, Command, CompactSegment
from smq.raft_state.ids import Offset
from smq.records import NewRecord, build_batch, decode_batch, encode_batch, parse_header
from smq.replication.log.compaction.segment_writer import Rewritten, SegmentWriter
from smq.replication.log.partition_log import PartitionLog
from smq.replication.partition.compaction.passes import Compactor
from smq.replication.partition.compaction.segment_catch_up import Segments
from smq.replication.partition.markers import Markers
from tests.unit.raft_state.support import add, init_transactions, proposed
from tests.unit.raft_state.support import end as end_transaction
from tests.unit.replication.support import ME, Host

RESET_MS = 60_000
START = Offset(0)
LOST = b"bytes of no node"


def agree(host: Host, end: int, digest: bytes, tombstones_ms: int = 0) -> None:
    """On the bytes of [0, end)."""
    part = host.part
    host.apply(
        CompactSegment(
            partition=part.pid,
            epoch=part.epoch,
            compactions_seen=part.compactions,
            log_start_seen=part.log_start,
            start=Offset(0),
            end=Offset(end),
            digest=digest,
            tombstones_ms=tombstones_ms,
        )
    )


def rewritten_without(log: PartitionLog, end: int, gone: set[int]) -> Rewritten:
    """The bytes of [0, end) without these offsets, as another leader may have agreed on them."""
    writer = SegmentWriter(log.pid, START)
    for stored in log.read_segment(START, Offset(end), 1 << 20):
        writer.add(stored, lambda records: [offset not in gone for offset, _, _ in records])
    return writer.finish()


def segments_of(host: Host) -> Segments:
    """Of the present process."""
    return Segments(host.node_host(), host.look_ups(), {host.live.pid: host.live}.get, lambda _: None)


class Compacting:
    """A replica, and its node's compaction."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.measures = host.measures
        self.segments = segments_of(host)
        self.compactor = Compactor(host.node_host(), host.look_ups(), self.segments)

    def look(self) -> None:
        """For something to compact."""
        self.compactor.visit(self.host.live, self.host.clock.monotonic_ns())

    def look_for_segments(self) -> None:
        self.segments.visit(self.host.live, self.host.clock.monotonic_ns())

    def begins(self) -> bool:
        """Whether a pass is under way after a look."""
        self.host.live.compaction_due_ns = 0
        self.look()
        return self.compactor.is_at_work

    @property
    def records(self) -> list[tuple[bytes | None, bytes | None]]:
        log = self.host.live.log
        found = log.read(log.log_start, log.appended_end, 1 << 20)
        return [
            (r.key, r.value)
            for stored in found
            if parse_header(stored.batch).count and not parse_header(stored.batch).is_control
            for r in decode_batch(stored.batch)
        ]


class Leader(Compacting):
    """A leader with four committed batches, whose state names a digest that no replica holds."""

    def __init__(self, *, policy: str = "compact") -> None:
        host = Host()
        host.config = replace(host.config, compaction_reset_ms=RESET_MS)
        host.create_partition()
        host.elect(ME)
        host.configure(cleanup_policy=policy)
        host.commit(*(encode_batch([NewRecord(key, b"v", 1)]) for key in (b"a", b"b", b"a", b"c")))
        super().__init__(host)
        self.agree(LOST)

    def agree(self, digest: bytes) -> None:
        agree(self.host, 3, digest)

    def wait(self, ms: int) -> None:
        for _ in range(ms // 500):
            self.look()
            self.look_for_segments()
            self.host.settle(500)

    @property
    def resets(self) -> list[CompactSegment]:
        return [c for c in self.host.proposed if isinstance(c, CompactSegment) and c.is_reset]


class Keeper(Compacting):
    """The only replica of a partition, or its leader, which compacts at every look and keeps tombstones for a
    second."""

    def __init__(self, memory_bytes: int = 1 << 20, *, replication: int = 1, **config: Any) -> None:
        host = Host()
        config = {"compaction_memory_bytes": memory_bytes, "compaction_reset_ms": 5_000, **config}
        host.config = replace(host.config, **config)
        host.create_partition(replication=replication)
        host.configure(cleanup_policy="compact", min_cleanable_dirty_ratio=0, delete_retention_ms=1000)
        super().__init__(host)
        self.endings = Markers(host.node_host(), host.propose)
        self._answered = 0

    def put(self, key: bytes, value: bytes | None, created_ms: int = 1) -> None:
        self._produce(encode_batch([NewRecord(key, value, created_ms)]))

    def put_in_transaction(self, key: bytes, value: bytes | None, *, commit: bool | None = True) -> None:
        """None for `commit` leaves it open."""
        host = self.host
        host.apply(proposed(host.state, init_transactions("t")))
        found = host.state.transactions["t"]
        producer, epoch = found.producer_id, found.producer_epoch
        host.apply(proposed(host.state, add("t", producer, epoch, host.part.pid)))
        batch = encode_batch(
            [NewRecord(key, value, 1)],
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=0,
            is_transactional=True,
        )
        self._produce(batch)
        if commit is not None:
            self.end(commit=commit)

    def end(self, *, commit: bool) -> None:
        state = self.host.state
        found = state.transactions["t"]
        change = end_transaction("t", found.producer_id, found.producer_epoch, commit=commit, fencing=False)
        self.host.apply(proposed(state, change))
        for _ in range(2):  # the marker, and the report that it is written
            self.endings.drive(self.host.live)
            self.settle()
            self.apply_proposed()

    def put_unreadable(self) -> None:
        """A batch that says it is compressed, and is not."""
        header = parse_header(encode_batch([NewRecord(b"k", b"old", 1)], codec="zstd"))
        self._produce(build_batch(header, b"no zstd"))

    def _produce(self, batch: bytes) -> None:
        self.host.produce(batch)
        self.settle()

    def settle(self, ms: int = 0) -> None:
        self.host.settle(ms)
        self.host.advance(self.host.live.log.appended_end)
        self.endings.drive(self.host.live)
        self.host.settle()

    def wait(self, ms: int) -> None:
        """What is proposed meanwhile is applied."""
        for _ in range(ms // 100):
            self.look()
            self.look_for_segments()
            self.settle(100)
            now_ms = self.host.clock.wall_ns() // 1_000_000
            self.host.apply(AdvanceClock(seen_ms=self.host.state.expiry_clock_ms, elapsed_ms=100, now_ms=now_ms))
            self.apply_proposed()

    def apply_proposed(self) -> None:
        while self._answered < len(self.host.proposed):
            command: Command = self.host.proposed[self._answered]
            self._answered += 1
            self.host.answers[self._answered - 1](self.host.apply(command))
