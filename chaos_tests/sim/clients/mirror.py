"""Mirrors: copy the log of another cluster into a topic, two of them the same log, batch by batch, some again.

Owns the other cluster's log, which is made from the seed, and what a mirror does after each answer. Now and then it
tries what must be refused: other bytes at an offset, a batch after a hole, a producer's batch. One of them ends the
copy in time, and writes as a producer that looks like one of the other cluster's. The other one goes on.
"""

from collections.abc import Callable
from random import Random
from typing import Any
from zlib import crc32

from chaos_tests.sim.clients.base import Known, LoopingClient, World, is_unknown, may_retry, proposal, range_of
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.raft_state.commands import AlterTopicConfig, CreateTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionIndex, TopicId, partition_id
from smq.raft_state.topic_config import MIRRORED, is_mirrored
from smq.records import (
    PREFIX_BYTES,
    NewRecord,
    empty_batch,
    encode_batch,
    marker_batch,
    parse_header,
    patched_prefix,
)
from smq.replication.api import Acks, Fetched, NodeApi, PartitionRange, Produced, ProduceRequest

ATTEMPT_MS = 700
DEADLINE_MS = 4_000.0
BURST_MAX = 4  # batches one after another
START_MAX = 1 << 40
FINAL_POLLS_MAX = 5_000
COPIED_MIN = 25  # batches, before the copy may end
_NO_SUCH_PRODUCER = 1 << 41  # above the ids of all other clients


class Source:
    """The log of another cluster: `batches` grows as it is asked for. Equal for all mirrors of the topic."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.start = rng.choice((0, rng.randrange(START_MAX)))
        self._end = self.start
        self.batches: list[bytes] = []
        self.copied = 0  # so many of them are known to be in the copy
        self.is_ending = False  # one of the mirrors may have ended the copy

    def batch(self, index: int) -> bytes:
        while len(self.batches) <= index:
            self._grow()
        return self.batches[index]

    def _grow(self) -> None:
        """Records, a gap, or a transaction with its end."""
        rng, kind = self._rng, self._rng.random()
        records = [NewRecord(None, rng.randbytes(8), 1_000) for _ in range(rng.randint(1, 5))]
        if kind < 0.6:
            self._add(encode_batch(records, codec=rng.choice(("none", "gzip"))))
        elif kind < 0.8:
            self._add(empty_batch(0, rng.choice((1, 7, 1_000_000))))
        else:
            producer = rng.randrange(20)
            own = {"producer_id": producer, "producer_epoch": 0, "base_sequence": len(self.batches)}
            self._add(encode_batch(records, is_transactional=True, **own))  # type: ignore[arg-type] # of the producer
            is_commit = rng.random() < 0.5
            self._add(marker_batch(producer_id=producer, producer_epoch=0, is_commit=is_commit, timestamp_ms=1_000))

    def _add(self, batch: bytes) -> None:
        self.batches.append(patched_prefix(self._end, parse_header(batch), 7) + batch[PREFIX_BYTES:])
        self._end = parse_header(self.batches[-1]).end

    def index_of(self, offset: int) -> int:
        """Of the batch that begins there; -1 if none does."""
        found = (i for i, batch in enumerate(self.batches) if parse_header(batch).base_offset == offset)
        return next(found, -1)

    def inside(self, index: int) -> int:
        """An offset within a batch, from there on: no copy ever ends at it."""
        while (header := parse_header(self.batch(index))).last_offset_delta == 0:
            index += 1
        return header.base_offset + 1

    def ended_producer(self) -> tuple[int, int, int] | None:
        """Of the last batch in the copy whose producer has no transaction open there: its id, sequence and count."""
        ended, open_ = set[int](), {parse_header(batch).producer_id for batch in self.batches[self.copied :]}
        for batch in reversed(self.batches[: self.copied]):
            header = parse_header(batch)
            if header.is_control:
                ended.add(header.producer_id)
            elif header.producer_id in ended - open_:
                return header.producer_id, header.base_sequence, header.count
        return None


def digest(batch: bytes | memoryview) -> int:
    """Of what a copy must keep beside the offsets: all but the epoch."""
    return crc32(batch[PREFIX_BYTES:])


class Mirror(LoopingClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"mirror-{number}", think_ms=think_ms)
        self._topic = f"mirrored-{number // 2}"
        self._source = world.sources.setdefault(self._topic, Source(world.streams.stream(f"source/{self._topic}")))
        self._next: int | None = None  # of the source's batches; None: the target's end says it
        self._leader: NodeId | None = None
        self._known: Known | None = None
        self._writes: tuple[int, int, int] | None = None  # as a producer: its id, the next sequence, how many records
        self._ends = False  # it has to end the copy

    def act(self) -> Script:
        if self._known is None:
            yield from self._find_topic()
        elif self._writes is not None:
            self._writes = yield from self._write(self._known, self._writes)
        elif self._ends:
            yield from self._end()
        elif self._next is None:
            yield from self._find_end(self._known)
        else:
            place: int | None = self._next
            for _ in range(self.rng.randint(1, BURST_MAX)):
                if place is not None:
                    place = yield from self._copy(self._known, place)
            self._next = place
            if self._source.copied >= COPIED_MIN and not self._source.is_ending and self.rng.random() < 0.2:
                self._ends = self._source.is_ending = True

    def _find_topic(self) -> Script:
        """The id is by the name, so both mirrors know it, whichever of them made the topic."""
        topic_id = TopicId(self._topic.encode().ljust(16, b"-")[:16])
        command = CreateTopic(
            request_id=self.new_id(),
            name=self._topic,
            topic_id=topic_id,
            partition_count=1,
            replication_factor=min(3, len(self.world.nodes)),
            config=((MIRRORED, "true"),),
            start_offset=Offset(self._source.start),
            created_ms=int(self.world.now_ms()),
        )
        request = proposal(command, ATTEMPT_MS)
        result, _ = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        is_there = isinstance(result, SmqError) and result.code is ErrorCode.TOPIC_EXISTS
        if is_there or not isinstance(result, SmqError | Lost):
            pid = partition_id(topic_id, PartitionIndex(0))
            self._known = Known(self._topic, 0, pid, hwm=self._source.start, lo=self._source.start)
            if all(known.topic != self._topic for known in self.world.mirrored):
                self.world.mirrored.append(self._known)

    def _find_end(self, known: Known) -> Script:
        node = self.any_node()
        result = yield Call(node, range_of(known, ATTEMPT_MS), ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, PartitionRange):
            self._leader = result.leader
            self._next = self._source.index_of(result.next_offset)
            if result.next_offset == self._source._end:
                self._next = len(self._source.batches)
            if self._next < 0 and self._source.is_ending:
                self._next = len(self._source.batches) - 1  # what a producer wrote may be there
            elif self._next < 0:
                self.world.report_violation(node, f"{known.key} ends at {result.next_offset}, inside of a batch")
                self._next = 0

    def _copy(self, known: Known, index: int) -> Any:
        """A Script that returns the place of the next batch; None if the target has to say it."""
        chance = self.rng.random()
        if chance < 0.06:
            yield from self._try_wrong(known, index)
        elif chance < 0.2 and index:
            yield from self._send(known, self._source.batch(self.rng.randrange(max(0, index - 5), index)))
        else:
            is_taken = yield from self._send(known, self._source.batch(index))
            if is_taken:
                self._source.copied = max(self._source.copied, index + 1)
            return index + 1 if is_taken else None
        return index

    def _end(self) -> Script:
        command = AlterTopicConfig(request_id=self.new_id(), name=self._topic, set_=((MIRRORED, "false"),))
        request = proposal(command, ATTEMPT_MS)
        yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)

        def look(api: NodeApi, done: Callable[[bool], None]) -> None:
            topic = api.state.topics.get(self._topic)
            done(topic is not None and not is_mirrored(topic.config) and not topic.partitions[0].is_opening)

        is_open = yield Call(self.any_node(), look, ATTEMPT_MS, ATTEMPT_MS)
        if is_open is True:
            self._writes = self._source.ended_producer()
            self._ends = False

    def _write(self, known: Known, place: tuple[int, int, int]) -> Any:
        """A Script that returns the place of the next batch; None if this one is not known to be there."""
        producer, sequence, count = place
        is_there = yield from self._send_own(known, self._own_batch(producer, sequence, count))
        return (producer, sequence + count, count) if is_there else None

    def _own_batch(self, producer: int, sequence: int, count: int) -> bytes:
        records = [NewRecord(None, self.rng.randbytes(8), 1_000) for _ in range(count)]
        return encode_batch(records, producer_id=producer, producer_epoch=0, base_sequence=sequence)

    def _send_own(self, known: Known, batch: bytes) -> Any:
        """As a producer. A Script that returns whether the batch was taken."""
        self.world.recorder.invoke(self.process, "own", k=known.key, d=digest(batch))
        result, unknown = yield from self._attempts(known, batch, is_mirrored=False)
        if isinstance(result, Produced) and not self._source.is_ending:
            self._report(f"a producer's batch was taken into the copy: {result}")
        if isinstance(result, SmqError) and result.code is ErrorCode.OUT_OF_ORDER_SEQUENCE:
            self._report(f"a producer here was taken for one of the other cluster: {result}")
        return self.conclude("own", result, unknown=unknown, o=getattr(result, "base_offset", -1))

    def _send(self, known: Known, batch: bytes, *, is_wrong: bool = False) -> Any:
        """A Script that returns whether the batch was taken."""
        header = parse_header(batch)
        fields = {"k": known.key, "o": header.base_offset, "e": header.end, "d": digest(batch), "wrong": is_wrong}
        self.world.recorder.invoke(self.process, "mirror", **fields)
        result, unknown = yield from self._attempts(known, batch, is_mirrored=True)
        is_ok = self.conclude("mirror", result, unknown=unknown)
        if isinstance(result, Produced):
            if (result.base_offset, result.last_offset + 1) != (header.base_offset, header.end):
                self._report(f"{header.base_offset} was mirrored to {result}")
            self.world.duplicates += result.duplicate
        elif isinstance(result, SmqError) and result.code is ErrorCode.WRONG_WRITER and not self._source.is_ending:
            self._report(f"{header.base_offset} was refused: {result}")
        return is_ok

    def _attempts(self, known: Known, batch: bytes, *, is_mirrored: bool) -> Any:
        """A Script that returns the last result, and whether any attempt may have taken effect."""
        until, unknown = self.world.now_ms() + DEADLINE_MS, False

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.produce(ProduceRequest(known.topic, 0, batch, Acks.ALL, ATTEMPT_MS, done, is_mirrored=is_mirrored))

        while True:
            node = self._leader if self._leader is not None and self.rng.random() < 0.9 else self.any_node()
            result = yield Call(node, request, ATTEMPT_MS * 1.3, ATTEMPT_MS)
            if not isinstance(result, SmqError | Lost):
                return result, unknown
            unknown |= is_unknown(result)
            self._leader = result.details.leader if isinstance(result, SmqError) else None
            if not may_retry(result) or self.world.now_ms() > until:
                return result, unknown
            yield Sleep(self.rng.uniform(5, 80))

    def _report(self, what: str) -> None:
        self.world.report_violation(self._leader or self.world.nodes[0], f"{self._topic}: {what}")

    def _try_wrong(self, known: Known, index: int) -> Script:
        """Other bytes where the log has some, or a batch behind a hole."""
        here = parse_header(self._source.batch(max(0, index - 1)))
        forged = encode_batch([NewRecord(None, b"forged", 1)] * (here.last_offset_delta % 5 + 1))
        offset = here.base_offset if index and self.rng.random() < 0.5 else self._source.inside(index)
        wrong = patched_prefix(offset, parse_header(forged), 7) + forged[PREFIX_BYTES:]
        yield from self._send(known, wrong, is_wrong=True)

        yield from self._send_own(known, self._own_batch(_NO_SUCH_PRODUCER + self.rng.randrange(1 << 40), 0, 1))

    def read_all(self, known: Known, node: NodeId) -> Script:
        """Reads a replica's whole copy, for the judge."""
        found: list[list[int]] = []
        at, end = known.lo, known.lo
        self.world.recorder.invoke(self.process, "copy", k=known.key, n=node)
        for _ in range(FINAL_POLLS_MAX):

            def request(api: NodeApi, done: Callable[[Any], None], at: int = at) -> object:
                return api.fetch(known.topic, 0, Offset(at), max_bytes=8_000, max_wait_ms=0, done=done)

            result = yield Call(node, request, 1_500, 0)
            if not isinstance(result, Fetched):
                yield Sleep(20)
                continue
            for batch in result.batches:
                found.append([batch.base_offset, batch.last_offset + 1, digest(batch.data)])
                at = batch.last_offset + 1
            end = result.hwm
            if at >= end and not result.batches:
                break
        self.ok("copy", b=found, hwm=end)
