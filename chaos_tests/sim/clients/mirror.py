"""Mirrors: copy the log of another cluster into a topic, two of them the same log, batch by batch, some again.

Owns the other cluster's log, which is made from the seed, and what a mirror does after each answer. Now and then it
tries what must be refused: other bytes at an offset, a batch after a hole, a producer's batch.
"""

from collections.abc import Callable
from random import Random
from typing import Any
from zlib import crc32

from chaos_tests.sim.clients.base import Known, LoopingClient, World, is_unknown, may_retry, proposal, range_of
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.raft_state.commands import CreateTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionIndex, TopicId, partition_id
from smq.raft_state.topic_config import MIRRORED
from smq.records import PREFIX_BYTES, NewRecord, empty_batch, encode_batch, marker_batch, parse_header, patched_prefix
from smq.replication.api import Acks, Fetched, NodeApi, PartitionRange, Produced, ProduceRequest

ATTEMPT_MS = 700
DEADLINE_MS = 4_000.0
BURST_MAX = 4  # batches one after another
START_MAX = 1 << 40
FINAL_POLLS_MAX = 5_000


class Source:
    """The log of another cluster: `batches` grows as it is asked for. Equal for all mirrors of the topic."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.start = rng.choice((0, rng.randrange(START_MAX)))
        self._end = self.start
        self.batches: list[bytes] = []

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


def digest(batch: bytes | memoryview) -> int:
    """Of what a copy must keep: all but the epoch."""
    return crc32(batch[PREFIX_BYTES:], crc32(batch[: PREFIX_BYTES - 4]))


class Mirror(LoopingClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"mirror-{number}", think_ms=think_ms)
        self._topic = f"mirrored-{number // 2}"
        self._source = world.sources.setdefault(self._topic, Source(world.streams.stream(f"source/{self._topic}")))
        self._next: int | None = None  # of the source's batches; None: the target's end says it
        self._leader: NodeId | None = None
        self._known: Known | None = None

    def act(self) -> Script:
        if self._known is None:
            yield from self._find_topic()
        elif self._next is None:
            yield from self._find_end(self._known)
        else:
            place: int | None = self._next
            for _ in range(self.rng.randint(1, BURST_MAX)):
                if place is not None:
                    place = yield from self._copy(self._known, place)
            self._next = place

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
            if self._next < 0:
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
            return index + 1 if is_taken else None
        return index

    def _send(self, known: Known, batch: bytes, *, is_wrong: bool = False) -> Any:
        """A Script that returns whether the batch was taken."""
        header = parse_header(batch)
        fields = {"k": known.key, "o": header.base_offset, "e": header.end, "d": digest(batch), "wrong": is_wrong}
        self.world.recorder.invoke(self.process, "mirror", **fields)
        until, unknown = self.world.now_ms() + DEADLINE_MS, False

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.produce(ProduceRequest(known.topic, 0, batch, Acks.ALL, ATTEMPT_MS, done, is_mirrored=True))

        while True:
            node = self._leader if self._leader is not None and self.rng.random() < 0.9 else self.any_node()
            result = yield Call(node, request, ATTEMPT_MS * 1.3, ATTEMPT_MS)
            if not isinstance(result, SmqError | Lost):
                break
            unknown |= is_unknown(result)
            self._leader = result.details.leader if isinstance(result, SmqError) else None
            if not may_retry(result) or self.world.now_ms() > until:
                break
            yield Sleep(self.rng.uniform(5, 80))
        is_ok = self.conclude("mirror", result, unknown=unknown)
        if isinstance(result, Produced) and (result.base_offset, result.last_offset + 1) != (
            header.base_offset,
            header.end,
        ):
            self.world.report_violation(node, f"{known.key}: {header.base_offset} was mirrored to {result}")
        self.world.duplicates += isinstance(result, Produced) and result.duplicate
        return is_ok

    def _try_wrong(self, known: Known, index: int) -> Script:
        """Other bytes where the log has some, or a batch behind a hole."""
        here = parse_header(self._source.batch(max(0, index - 1)))
        forged = encode_batch([NewRecord(None, b"forged", 1)] * (here.last_offset_delta % 5 + 1))
        offset = here.base_offset if index and self.rng.random() < 0.5 else self._source.inside(index)
        wrong = patched_prefix(offset, parse_header(forged), 7) + forged[PREFIX_BYTES:]
        yield from self._send(known, wrong, is_wrong=True)

        def produce(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.produce(ProduceRequest(known.topic, 0, forged, Acks.ALL, ATTEMPT_MS, done))

        node = self.any_node()
        result = yield Call(node, produce, ATTEMPT_MS * 1.3, ATTEMPT_MS)
        if isinstance(result, Produced):
            self.world.report_violation(node, f"a producer's batch was taken into the mirrored {known.key}: {result}")

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
