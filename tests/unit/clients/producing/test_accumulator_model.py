"""The accumulator against a model of the log, under every failure that a stream and a leader can bring.

Whatever happens: a record reported as acknowledged is committed exactly once; a record whose failure is definite is
not there; any other at most once; and what is there lies in the order in which it was sent.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from smq.clients.producing.accumulator import Accumulator, BatchingSettings
from smq.clients.producing.partition_queue import Batch, ProducerIdentity
from smq.clients.retry import Verdict
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId
from smq.records import parse_header
from smq.testing.fake.log import ModelPartition, Stored
from tests.examples import examples

TOPIC = "t"
PARTITIONS = 2
DELIVERY_MS = 400.0  # short, so that batches expire and their neighbours do not
NODES = ("node-1", "node-2")
HINT = ErrorDetails(leader=NodeId(2), leader_address=NODES[1])

REFUSED_UNTRIED = [
    SmqError(ErrorCode.NOT_LEADER, "moved"),
    SmqError(ErrorCode.NOT_LEADER, "moved", HINT),
    SmqError(ErrorCode.LEADER_UNAVAILABLE, "electing"),
    SmqError(ErrorCode.OVERLOADED, "busy", ErrorDetails(retry_after_ms=30)),
    SmqError(ErrorCode.UNKNOWN_TOPIC, "lagging"),
    SmqError(ErrorCode.STORAGE_FULL, "full"),
    SmqError(ErrorCode.BATCH_TOO_LARGE, "too large"),
    SmqError(ErrorCode.CORRUPT_BATCH, "damaged on the way"),
]
BROKEN = SmqError(ErrorCode.TIMED_OUT, "the stream broke")
NO_ANSWER = SmqError(ErrorCode.NO_QUORUM, "not committed in time")
LOST = SmqError(ErrorCode.APPEND_LOST, "truncated")


@dataclass
class Stream:
    """A stream to one node: requests are taken in order; an appended one is answered when it commits."""

    requests: deque[Batch] = field(default_factory=deque)
    waiting: list[tuple[Batch, Stored]] = field(default_factory=list)


class ProducerWorld(RuleBasedStateMachine):
    is_idempotent = True

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.now = 0.0
        self.next_value = 0
        self.next_producer_id = 0
        self.sent: dict[int, list[bytes]] = {p: [] for p in range(PARTITIONS)}
        self.acked: dict[bytes, tuple[int, int]] = {}  # value -> partition, offset
        self.failed: dict[bytes, SmqError] = {}
        self.bytes_of: dict[tuple[int, int, int, int], bytes] = {}  # partition, pid, epoch, sequence -> data
        self.logs = [ModelPartition() for _ in range(PARTITIONS)]
        self.leaders = [NODES[p % 2] for p in range(PARTITIONS)]
        self.streams = {node: Stream() for node in NODES}
        self.accumulator = Accumulator(
            BatchingSettings(
                batch_bytes=200,
                linger_ms=5.0,
                delivery_timeout_ms=DELIVERY_MS,
                is_idempotent=self.is_idempotent,
                in_flight_max=5 if self.is_idempotent else 1,
                buffer_bytes_max=4_000,
            ),
            random.Random(seed).random,
        )
        self.accumulator.set_partition_count(TOPIC, PARTITIONS)

    # -- the user's steps

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 12))
    def send(self, partition: int, count: int) -> None:
        topic = self.accumulator.topic(TOPIC)
        for _ in range(count):
            if self.accumulator.is_full:
                return
            value = b"%08d" % self.next_value
            self.next_value += 1
            self.accumulator.add(topic, None, value, (), partition, 1, value, self.now)
            self.sent[partition].append(value)

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 30))
    def send_run(self, partition: int, count: int) -> None:
        values = [b"%08d" % (self.next_value + i) for i in range(count)]
        queue = self.accumulator.topic(TOPIC).explicit(partition)
        taken = 0
        while taken < count and not self.accumulator.is_full:
            before = taken
            token = (values, before)  # the run begins at this index of the values
            taken += self.accumulator.add_run(queue, None, values, 1, taken, count, token, self.now)
        self.next_value += count
        self.sent[partition] += values[:taken]

    @rule(ms=st.sampled_from([1.0, 6.0, 60.0, 200.0]))
    def wait(self, ms: float) -> None:
        self.now += ms

    @rule()
    def flush(self) -> None:
        self.accumulator.mark_due()

    # -- the publisher's steps

    @rule()
    def poll(self) -> None:
        polled = self.accumulator.poll(self.now, lambda _topic, partition: self.leaders[partition])
        for address, batch in polled.sends:
            self._check_bytes(batch)
            self.streams[address].requests.append(batch)
        for batch, error in polled.failed:
            for value in self._values(batch):
                assert value not in self.acked
                assert value not in self.failed
                self.failed[value] = error
        if polled.need_identity:
            identity = ProducerIdentity(producer_id=self.next_producer_id, producer_epoch=0)
            self.next_producer_id += 1
            if any(not q.needs_own_identity for q in polled.need_identity):
                self.accumulator.set_identity(identity)
            else:
                for queue in polled.need_identity:
                    self.accumulator.give_identity(queue, identity)

    def _check_bytes(self, batch: Batch) -> None:
        """A retry has the same bytes, producer id and sequence."""
        header = parse_header(batch.data)
        if header.producer_id >= 0:
            key = (batch.partition, header.producer_id, header.producer_epoch, header.base_sequence)
            assert self.bytes_of.setdefault(key, batch.data) == batch.data

    @staticmethod
    def _values(batch: Batch) -> list[bytes]:
        values: list[bytes] = []
        for first, count, token in batch.tokens:
            if isinstance(token, bytes):
                values.append(token)
            elif isinstance(token, tuple):
                assert first == len(values), "runs lie side by side"
                values += token[0][token[1] : token[1] + count]
        assert len(values) == batch.count
        return values

    # -- steps of streams and leaders

    @rule(node=st.sampled_from(NODES), count=st.integers(1, 6))
    def take_requests(self, node: str, count: int) -> None:
        stream = self.streams[node]
        for _ in range(min(count, len(stream.requests))):
            batch = stream.requests.popleft()
            if self.leaders[batch.partition] != node:
                self._refuse(batch, REFUSED_UNTRIED[0])
                continue
            try:
                stored, _ = self.logs[batch.partition].append(batch.data)
            except SmqError as e:
                self._refuse(batch, e)
                continue
            stream.waiting.append((batch, stored))

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def commit(self, partition: int) -> None:
        self.logs[partition].commit()
        for stream in self.streams.values():
            for batch, stored in [w for w in stream.waiting if w[0].partition == partition]:
                stream.waiting.remove((batch, stored))
                self._ack(batch, stored)

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def commit_without_an_answer(self, partition: int) -> None:
        self.logs[partition].commit()

    @rule(node=st.sampled_from(NODES), error=st.sampled_from(REFUSED_UNTRIED))
    def refuse_one(self, node: str, error: SmqError) -> None:
        if self.streams[node].requests:
            self._refuse(self.streams[node].requests.popleft(), error)

    @rule(node=st.sampled_from(NODES))
    def time_out_one(self, node: str) -> None:
        if self.streams[node].waiting:
            self._refuse(self.streams[node].waiting.pop(0)[0], NO_ANSWER)

    @rule(node=st.sampled_from(NODES), taken_before=st.integers(0, 5))
    def break_stream(self, node: str, taken_before: int) -> None:
        """Some requests arrived and were appended, the others were lost; none is answered."""
        self.take_requests(node, taken_before) if taken_before else None
        stream = self.streams[node]
        lost = [batch for batch, _ in stream.waiting] + list(stream.requests)
        self.streams[node] = Stream()
        for batch in lost:
            self._refuse(batch, BROKEN)

    @rule(node=st.sampled_from(NODES))
    def store_and_lose_the_answers(self, node: str) -> None:
        """Steers toward the hardest case: batches that are stored although their sender cannot know."""
        self.mark_and_poll()
        self.take_requests(node, 100)
        for partition in range(PARTITIONS):
            self.commit_without_an_answer(partition)
        self.break_stream(node, 0)

    @rule(error=st.sampled_from(REFUSED_UNTRIED), steps=st.integers(1, 4))
    def refuse_everything_for_a_while(self, error: SmqError, steps: int) -> None:
        for _ in range(steps):
            self.wait(80.0)
            self.mark_and_poll()
            for stream in self.streams.values():
                while stream.requests:
                    self._refuse(stream.requests.popleft(), error)

    def mark_and_poll(self) -> None:
        self.flush()
        self.poll()

    @rule(partition=st.integers(0, PARTITIONS - 1))
    def change_leader(self, partition: int) -> None:
        log = self.logs[partition]
        log.change_leader()
        for stream in self.streams.values():
            for batch, stored in [w for w in stream.waiting if w[0].partition == partition]:
                stream.waiting.remove((batch, stored))
                if stored in log.stored:
                    self._ack(batch, stored)
                else:
                    self._refuse(batch, LOST)
        self.leaders[partition] = NODES[1 - NODES.index(self.leaders[partition])]

    def _ack(self, batch: Batch, stored: Stored) -> None:
        values = self._values(batch)
        if self.accumulator.acked(batch):
            for index, value in enumerate(values):
                assert value not in self.failed
                assert value not in self.acked
                self.acked[value] = (batch.partition, stored.base_offset + index)

    def _refuse(self, batch: Batch, error: SmqError) -> None:
        assert self.accumulator.refused(batch, error, self.now) is not Verdict.FENCED

    # -- invariants

    @invariant()
    def buffer_is_bounded_and_counted(self) -> None:
        if not hasattr(self, "accumulator"):
            return
        queues = self.accumulator.topic(TOPIC).queues
        held = [b for q in queues for b in q.batches()]
        assert self.accumulator.buffered_bytes == sum(b.bytes_counted for b in held)
        assert all(q.in_flight == sum(b.in_flight for b in q.batches()) <= 5 for q in queues)

    def teardown(self) -> None:
        """The world heals: everything is settled, and the log matches the acknowledgements."""
        if not hasattr(self, "accumulator"):
            return
        self._heal()
        assert self.accumulator.buffered_bytes == 0
        for partition in range(PARTITIONS):
            self._check_log(partition)
        for partition in range(PARTITIONS):
            self.send(partition, 3)
            self._heal()
            assert all(value in self.acked for value in self.sent[partition][-3:]), "it does not recover"

    def _heal(self) -> None:
        for _ in range(200):
            self.accumulator.mark_due()
            self.poll()
            for node in NODES:
                self.take_requests(node, 100)
            for partition in range(PARTITIONS):
                self.commit(partition)
            self.now += 10.0
        assert self.accumulator.is_empty

    def _check_log(self, partition: int) -> None:
        log = self.logs[partition].values()
        sent = self.sent[partition]
        if self.is_idempotent:
            assert len(log) == len(set(log)), "a record is stored twice"
            places = {value: i for i, value in enumerate(sent)}
            acked = [v for v in log if v in self.acked]
            assert acked == sorted(acked, key=lambda v: places[v or b""]), "acknowledged records are out of order"
        for value in sent:
            if value in self.acked:
                where, offset = self.acked[value]
                assert where == partition
                assert log[offset] == value
            else:
                error = self.failed[value]
                assert not (error.code.is_definite and value in log), f"{error.code.name}, and yet it is stored"


class AtLeastOnceWorld(ProducerWorld):
    is_idempotent = False


TestIdempotentProducer = ProducerWorld.TestCase
TestIdempotentProducer.settings = settings(
    max_examples=examples(300), stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAtLeastOnceProducer = AtLeastOnceWorld.TestCase
TestAtLeastOnceProducer.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)
