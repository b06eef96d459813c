"""Topics of a chaos run that keep only some of their records: by retention, by compaction, and by both.

Owns their settings, what each of them promises to keep (noted for the checkers before the first record), their clients,
and the wait in the end until nothing more is due, with the comparison of the replicas' bytes. It must never judge.
"""

import time
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from chaos_tests.checkers.retention import LATE_RECORDS_MAX
from chaos_tests.keyed import value_of
from chaos_tests.live.load.grpc import (
    FETCH_WAIT_MS,
    SEEK_PROBABILITY,
    Client,
    Partition,
    PlainProducer,
    Producer,
    RangeReader,
    Reader,
    SharedRecorder,
    World,
)
from chaos_tests.live.load.kafka import KafkaProducer, make_consumer, places
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import decode_batch
from smq.testing.node_client import RawNode, Unanswered

KEYS: Final = 24
RECORDS: Final = 40
BYTES: Final = 4_000
MS: Final = 5_000
TOMBSTONE_MS: Final = 4_000
# A record in a batch of its own, with its key and its header; and one of five in a batch.
RECORD_BYTES_MAX: Final = 200
RECORD_BYTES_MIN: Final = 20
SAMPLED_S: Final = 60  # a log start is asked for again and again, but a fault may last
READ_S: Final = 5.0  # for one piece of a log
CONSUMED_MAX: Final = 500  # records of one read by a Kafka consumer
CONSUME_S: Final = 0.3
RANGE_S: Final = 3.0
IDLE_READS: Final = 5  # by a Kafka consumer, without a record, until a log counts as read
POLL_S: Final = 0.2
_COMPACTED: Final = {"min.cleanable.dirty.ratio": "0", "delete.retention.ms": str(TOMBSTONE_MS)}
# So that a run of a minute sees many passes over many segments. A cluster of one's own has its own settings.
TUNING: Final = {
    "retention_check_ms": 500,
    "compaction_check_ms": 500,
    "compaction_segment_bytes": 4_000,
    "compaction_reset_ms": 3_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One topic of one partition. 0: without that limit."""

    name: str
    config: dict[str, str]
    keys: int = 0
    records: int = 0  # stay at least
    most: int = 0  # stay at most
    ms: int = 0


KEPT: Final = (
    Kept(name="records", config={"retention.records": str(RECORDS)}, records=RECORDS, most=RECORDS),
    Kept(
        name="bytes",
        config={"retention.bytes": str(BYTES)},
        records=BYTES // RECORD_BYTES_MAX,
        most=BYTES // RECORD_BYTES_MIN,
    ),
    Kept(name="age", config={"retention.ms": str(MS)}, ms=MS),
    Kept(name="compacted", config={"cleanup.policy": "compact", **_COMPACTED}, keys=KEYS),
    Kept(
        name="both",
        config={"cleanup.policy": "compact,delete", "retention.records": str(RECORDS), **_COMPACTED},
        keys=KEYS,
        records=RECORDS,
        most=RECORDS,
    ),
)


def topic_of(run: str, kept: Kept) -> str:
    """Its name in the run with that topic."""
    return f"{run}-{kept.name}"


def create_kept(raw: RawNode, run: str, recorder: SharedRecorder, *, replicas: int, clocks_jump: bool) -> None:
    """Creates the topics, and notes what they keep."""
    created_0_ms = (time.time_ns() - time.monotonic_ns()) // 1_000_000
    for kept in KEPT:
        topics = [topic_of(run, kept)]
        if kept.keys:
            # A clock that jumps ends the time of a tombstone, too.
            kept_ms = 0 if clocks_jump else TOMBSTONE_MS
            recorder.note("compaction", keys=kept.keys, tombstone_ms=kept_ms, topics=topics)
        if kept.records or kept.ms:
            recorder.note(
                "retention",
                records=kept.records,
                most=kept.most,
                ms=kept.ms,
                topics=topics,
                created_0_ms=created_0_ms,
                sampled_ns=SAMPLED_S * 1_000_000_000,
            )
        raw.create_topic(topics[0], 1, timeout_ms=20_000, replication_factor=replicas, config=kept.config)


def partitions_of(run: str) -> list[Partition]:
    return [Partition(topic_of(run, kept), 0, keys=kept.keys) for kept in KEPT]


class StartWatcher(RangeReader):
    """Notes the log starts that it learns. The replicated clock, by which records age, is never ahead of the true time
    for longer than some node's clock has been."""

    def __init__(self, world: World, name: str, *, clocks_jump: bool) -> None:
        super().__init__(world, name, world.kept)
        self._began = time.monotonic()
        self._clocks_jump = clocks_jump

    def step(self) -> None:
        self.watch(self.any_partition())

    def watch(self, partition: Partition) -> None:
        found = self.ask_range(partition)
        if found is not None:
            ahead_s = time.monotonic() - self._began if self._clocks_jump else 0.0
            clock = int((time.time() + ahead_s) * 1_000)
            self.world.recorder.note("start", k=partition.key, lo=found.log_start, hwm=found.hwm, clock=clock)


class KeptConsumer(Client):
    """librdkafka's consumer: one partition at a time, from where it was, and now and then from further back. It seeks
    before each read, so that nothing was fetched before the operation began."""

    think_s = 0.1

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, world.kept)
        self._consumer: Any = None
        self._positions: dict[str, int] = {}

    def step(self) -> None:
        partition = self.any_partition()
        position = self._positions.get(partition.key, 0)
        if self.rng.random() < SEEK_PROBABILITY:
            position = self.rng.randint(0, position)
        self._positions[partition.key] = self.read(partition, position)

    def read(self, partition: Partition, position: int) -> int:
        """One read; returns the next position."""
        from confluent_kafka import KafkaError

        if self._consumer is None:
            self._consumer = make_consumer(self.world, **{"fetch.wait.max.ms": FETCH_WAIT_MS})
        (place,) = places([(partition, position)])
        self.world.recorder.invoke(self.process, "kpoll", c=self.name, k=partition.key, o=position)
        self._consumer.assign([place])
        found = self._consumer.consume(CONSUMED_MAX, CONSUME_S)
        given = [m for m in found if m.error() is None]
        # So librdkafka names an offset that is out of range, if it may not choose another.
        is_refused = any(m.error() is not None and m.error().code() == KafkaError._AUTO_OFFSET_RESET for m in found)
        if is_refused and not given:
            return self._refused(place)
        read = [[partition.key, m.offset(), value_of(m.value(), m.headers() or ())] for m in given]
        end = given[-1].offset() + 1 if given else position
        known = self._consumer.get_watermark_offsets(place, cached=True)
        hwm = max(end, known[1] if known is not None else 0)
        self.world.recorder.ok(self.process, "kpoll", r=read, hwm=hwm)
        return end

    def _refused(self, place: Any) -> int:
        """Where the log starts is a question of its own: the answer to the read did not say it."""
        from confluent_kafka import KafkaException

        try:
            lo, hwm = self._consumer.get_watermark_offsets(place, timeout=RANGE_S)
        except KafkaException as e:
            self.world.recorder.info(self.process, "kpoll", err=str(e)[:200])
            self.process = self.world.recorder.new_process()
            return int(place.offset)
        self.world.recorder.fail(self.process, "kpoll", err=ErrorCode.OFFSET_OUT_OF_RANGE.name, lo=lo, hi=hwm)
        return max(int(place.offset), int(lo))

    def read_all(self, partition: Partition) -> None:
        """From the log start on, until nothing more comes. The last records of a compacted log may be gone."""
        position, idle = 0, 0
        while idle < IDLE_READS and position < partition.hwm:
            after = self.read(partition, position)
            idle = idle + 1 if after == position else 0
            position = after

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def kept_clients(world: World, *, with_kafka: bool, clocks_jump: bool) -> list[Client]:
    keyed = [partition for partition in world.kept if partition.keys]
    return [
        *(Producer(world, f"kept-idempotent-{i}", world.kept) for i in range(2)),
        PlainProducer(world, "kept-plain", world.kept),
        *(Reader(world, f"kept-reader-{i}", world.kept) for i in range(2)),
        StartWatcher(world, "kept-start", clocks_jump=clocks_jump),
        *([KafkaProducer(world, "kept-kafka", keyed), KeptConsumer(world, "kept-consumer")] if with_kafka else []),
    ]


@dataclass(slots=True)
class Whole:
    """What one replica serves of a partition."""

    digest: str
    count: int  # of offsets
    twice: int  # records that have a later one of their key


def read_whole(raw: RawNode, partition: Partition) -> Whole:
    """From the log start to the high water mark that this node knows. SmqError, Unanswered."""
    total, newest, records = sha256(), dict[bytes | None, int](), 0
    lo = raw.range_info(partition.topic, partition.index).log_start
    at = lo
    while True:
        wanted = pb.FetchPartition(topic=partition.topic, partition=partition.index, offset=at)
        found = raw.fetch_once(pb.FetchRequest(partitions=[wanted]), READ_S)
        for batch in found.batches:
            total.update(b"%d %d %d %d " % (batch.base_offset, batch.last_offset, batch.ts_ns, len(batch.data)))
            total.update(batch.data)
            at = batch.last_offset + 1
            for record in decode_batch(batch.data) if partition.keys and batch.data else ():
                if record.offset >= lo:
                    newest[record.key] = record.offset
                    records += 1
        if not found.batches:
            return Whole(f"{lo} {at} {total.hexdigest()}", at - lo, records - len(newest))


def wait_kept(world: World, timeout_s: float) -> list[str]:
    """Once nothing is written any more: waits until the replicas hold the same bytes and nothing more is due, and notes
    how it is then. Returns what is not so in time."""
    give_up = time.monotonic() + timeout_s
    most = {partition.key: kept.most for partition, kept in zip(world.kept, KEPT, strict=True)}
    problems = []
    for partition in [*world.partitions, *world.kept]:
        while True:
            seen = _read_everywhere(world, partition)
            problem = _what_is_left(list(seen.values()), most.get(partition.key, 0))
            if problem is None or time.monotonic() > give_up:
                break
            time.sleep(POLL_S)
        problems += [f"{partition.key}: {problem}"] if problem is not None else []
        for node, whole in seen.items():
            world.recorder.note("log-digest", n=node, k=partition.key, d=whole.digest)
            if partition.keys:
                world.recorder.note("compacted", n=node, k=partition.key, twice=whole.twice, left=0)
    return problems


def _read_everywhere(world: World, partition: Partition) -> dict[int, Whole]:
    """By node; nothing if one does not answer."""
    try:
        return {node: read_whole(raw, partition) for node, raw in world.nodes.items()}
    except (SmqError, Unanswered):
        return {}


def _what_is_left(seen: list[Whole], most: int) -> str | None:
    """What has still to be done; None if nothing."""
    if not seen:
        return "not every replica answers"
    if len({whole.digest for whole in seen}) > 1:
        return f"the replicas hold different bytes: {[whole.digest for whole in seen]}"
    if seen[0].twice:
        return f"{seen[0].twice} records have a later one of their key"
    if most and seen[0].count > most + LATE_RECORDS_MAX:
        return f"{seen[0].count} records are left of {most}"
    return None
