"""Producers: batches with unique values, any acks, idempotent with retries or plain, one by one, in bursts or many
together.

Owns the outcome rule of a send: ok; fail, only if every attempt definitely failed; otherwise unknown.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

from chaos_tests.sim.clients.base import Known, PartitionClient, Request, World, is_unknown, may_retry, proposal
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep, Wait
from smq.raft_state.commands import AllocateProducerId
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_PRODUCER, NodeId, ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated
from smq.records import encode_batch
from smq.replication.api import Acks, Produced, ProduceRequest

ATTEMPT_MS = 700
DEADLINE_MS = 4000.0
RECORDS_MAX = 5
REFUSED_MS = 1000.0  # before a producer that is one too many tries again, as the node advises
IN_FLIGHT_MAX = 5  # Kafka's limit for idempotent producers
CROWD_WAVE = 4  # producers that begin together
CROWD_PAUSE_MS = (200.0, 1_500.0)  # before the second attempt: leaders fail meanwhile
_CROWD_FIRST_ID = 1 << 40  # no id that the cluster allocates: allocations would use up the budget of operations


def _is_refused_as_new(result: SmqError | Lost) -> bool:
    return isinstance(result, SmqError) and result.code is ErrorCode.TOO_MANY_PRODUCERS


@dataclass(slots=True)
class Session:
    """An idempotent producer's identity and the next sequence of each partition."""

    producer_id: ProducerId
    epoch: ProducerEpoch
    sequences: dict[str, int]
    is_stale: bool = False  # after an unknown outcome: the epoch must be bumped before the next send


class Producer(PartitionClient):
    """Sends with `acks`; a session makes its sends idempotent."""

    def __init__(self, world: World, name: str, *, acks: Acks, idempotent: bool, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.acks = acks
        self.idempotent = idempotent
        self.session: Session | None = None

    def use(self, partition: Known) -> Script:
        yield from self.send(partition)

    def send(self, partition: Known) -> Script:
        """One operation: one batch, with as many attempts as it needs."""
        if self.idempotent and (self.session is None or self.session.is_stale):
            yield from self._open_session()
            if self.session is None:
                return
        values = self.world.values(self.rng.randint(1, RECORDS_MAX))
        batch = self._encode(partition, values)
        self.world.recorder.invoke(
            self.process, "send", k=partition.key, v=values, acks=int(self.acks), idem=self.idempotent
        )
        result, unknown = yield from self._attempts(partition, batch)
        self._conclude(partition, values, result, unknown)

    def _encode(self, partition: Known, values: list[int]) -> bytes:
        timestamp_ms = int(self.world.now_ms()) + 1_700_000_000_000
        records = [self.world.record(value, timestamp_ms) for value in values]
        session = self.session
        if session is None:
            return encode_batch(records)
        return encode_batch(
            records,
            producer_id=session.producer_id,
            producer_epoch=session.epoch,
            base_sequence=session.sequences.get(partition.key, 0),
        )

    def _attempts(self, partition: Known, batch: bytes) -> Generator[Sleep | Call, Any, tuple[Any, bool]]:
        until = self.world.now_ms() + DEADLINE_MS
        unknown, request = False, produce(partition, batch, self.acks)
        while True:
            node = partition.leader if partition.leader is not None and self.rng.random() < 0.95 else self.any_node()
            result = yield Call(node, request, ATTEMPT_MS * 1.3, ATTEMPT_MS)
            if not isinstance(result, SmqError | Lost):
                partition.leader = node
                return result, unknown
            self._learn(partition, result)
            if is_unknown(result):
                unknown = True
            if (unknown and not self.idempotent) or not self._may_retry(result) or self.world.now_ms() > until:
                return result, unknown
            yield Sleep(self.rng.uniform(5, 80) if not _is_refused_as_new(result) else REFUSED_MS)

    def _may_retry(self, result: SmqError | Lost) -> bool:
        return may_retry(result)

    def _learn(self, partition: Known, result: SmqError | Lost) -> None:
        hint: NodeId | None = None
        if _is_refused_as_new(result):
            self.world.producers_refused += 1
            return  # this is the leader
        if isinstance(result, SmqError) and result.code is ErrorCode.NOT_LEADER:
            hint = result.details.leader
        partition.leader = hint

    def _conclude(self, partition: Known, values: list[int], result: Any, unknown: bool) -> None:
        if isinstance(result, Produced) and result.base_offset >= 0:
            self.ok("send", o=result.base_offset, ts=result.ts_ns, dup=result.duplicate, ep=result.epoch)
            if result.last_offset != result.base_offset + len(values) - 1:
                self.world.report_violation(partition.leader or NodeId(0), f"{result} for {len(values)} records")
            if self.acks is Acks.ALL:
                partition.hwm = max(partition.hwm, result.last_offset + 1)
            self.world.duplicates += result.duplicate
            if self.session is not None:
                self.session.sequences[partition.key] = self.session.sequences.get(partition.key, 0) + len(values)
        elif isinstance(result, Produced):
            self.conclude_unknown("send")  # acks=0: no answer reports its outcome
            self._abandon_session()
        elif unknown:
            err = result.code.name if isinstance(result, SmqError) else result.value
            self.conclude_unknown("send", err=err)
            self._abandon_session()
        else:
            self.fail("send", result)
            self._abandon_session()
            if isinstance(result, SmqError) and result.code is ErrorCode.UNKNOWN_TOPIC:
                partition.leader = None

    def _abandon_session(self) -> None:
        """The next sequence is unknown: half of the time the epoch is bumped, otherwise a new id is allocated."""
        if self.session is not None and self.rng.random() < 0.5:
            self.session = None
        elif self.session is not None:
            self.session.is_stale = True

    def _open_session(self) -> Script:
        old = self.session
        if old is None:
            yield from self._allocate(NO_PRODUCER, ProducerEpoch(-1))
        else:
            yield from self._allocate(old.producer_id, old.epoch)

    def _allocate(self, producer_id: ProducerId, epoch: ProducerEpoch) -> Script:
        command = AllocateProducerId(request_id=self.new_id(), producer_id=producer_id, producer_epoch=epoch)
        request = proposal(command, ATTEMPT_MS)
        self.world.recorder.invoke(self.process, "alloc")
        result, unknown = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        self.session, given = None, {}
        if isinstance(result, ProducerIdAllocated):
            given = {"id": result.producer_id, "epoch": result.producer_epoch}
            self.session = Session(result.producer_id, result.producer_epoch, {})
        self.conclude("alloc", result, unknown=unknown, **given)


def produce(partition: Known, batch: bytes, acks: Acks) -> Request:
    return lambda api, done: api.produce(
        ProduceRequest(partition.topic, partition.index, batch, acks, ATTEMPT_MS, done)
    )


class Crowd(PartitionClient):
    """Lets a few new idempotent producers begin with every wave. Each writes one batch, loses its answer, and sends it
    again a while later. Between the two attempts others write, leaders move and producers expire: a node that forgets a
    producer too early stores its batch twice."""

    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"crowd-{number}", think_ms=think_ms)
        self._ids = count(_CROWD_FIRST_ID + (number << 20))

    def use(self, partition: Known) -> Script:
        yield from ()
        for _ in range(CROWD_WAVE):
            self.world.spawn(_Single(self.world, self.name, next(self._ids)).run_once(partition))


class _Single(Producer):
    """One producer of the crowd: one batch, of which it hears nothing at first."""

    def __init__(self, world: World, name: str, producer_id: int) -> None:
        super().__init__(world, name, acks=Acks.ALL, idempotent=True, think_ms=0)
        self.session = Session(ProducerId(producer_id), ProducerEpoch(0), {})

    def run_once(self, partition: Known) -> Script:
        values = self.world.values(1)
        batch = self._encode(partition, values)
        self.world.recorder.invoke(self.process, "send", k=partition.key, v=values, acks=-1, idem=True)
        node: NodeId = partition.leader if partition.leader is not None else self.any_node()
        lost = yield Call(node, produce(partition, batch, self.acks), ATTEMPT_MS * 1.3, ATTEMPT_MS)
        may_be_stored = not isinstance(lost, SmqError | Lost) or is_unknown(lost)
        yield Sleep(self.rng.uniform(*CROWD_PAUSE_MS))
        result, unknown = yield from self._attempts(partition, batch)
        self._conclude(partition, values, result, unknown or may_be_stored)


# ---------------------------------------------------------------------------------------------- several in flight
class Pipeline(Producer):
    """Sends bursts, as Kafka's producers do, and continues the session only if the whole burst was acknowledged. Each
    batch is a separate operation with its own retries, so batches arrive in any order, more than once, and around a
    change of leaders."""

    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, acks=Acks.ALL, idempotent=True, think_ms=think_ms)
        self._lanes = [Lane(world, f"{name}-{i}") for i in range(IN_FLIGHT_MAX)]
        self._wake: Callable[[], None] | None = None  # set while it waits for the end of the burst

    def _wake_me(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _lane_ended(self, lanes: "list[Lane]") -> None:
        if self._wake is not None and not any(lane.is_busy for lane in lanes):
            wake, self._wake = self._wake, None
            wake()

    def send(self, partition: Known) -> Script:
        if self.session is None or self.session.is_stale:
            yield from self._open_session()
        session = self.session
        if session is None:
            return
        lanes = self._lanes[: self.rng.randint(2, IN_FLIGHT_MAX)]
        for lane in lanes:
            lane.prepare(partition, session)
        for lane in lanes:
            self.world.spawn(lane.run_prepared(lanes, self._lane_ended))
            if self.rng.random() < 0.5:
                yield Sleep(self.rng.uniform(0, 10))
        if any(lane.is_busy for lane in lanes):
            yield Wait(self._wake_me)
        if session.is_stale and self.rng.random() < 0.5:
            self.session = None


class Lane(Producer):
    """One batch of a burst."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, acks=Acks.ALL, idempotent=True, think_ms=0)
        self.is_busy = False
        self.sequence = 0
        self._lanes: list[Lane] = []
        self._partition: Known | None = None
        self._values: list[int] = []
        self._batch = b""

    def prepare(self, partition: Known, session: Session) -> None:
        """Takes the next sequences of the session."""
        self.is_busy = True
        self.session, self._partition = session, partition
        self._values = self.world.values(self.rng.randint(1, 3))
        self._batch = self._encode(partition, self._values)
        self.sequence = session.sequences.get(partition.key, 0)
        session.sequences[partition.key] = self.sequence + len(self._values)

    def run_prepared(self, lanes: "list[Lane]", on_end: "Callable[[list[Lane]], None]") -> Script:
        """Begins the operation and tries until its outcome is decided."""
        self._lanes = lanes
        partition = self._partition
        assert partition is not None
        self.world.recorder.invoke(self.process, "send", k=partition.key, v=self._values, acks=-1, idem=True)
        result, unknown = yield from self._attempts(partition, self._batch)
        sequences = dict(self.session.sequences) if self.session is not None else {}
        self._conclude(partition, self._values, result, unknown)
        if self.session is not None:
            self.session.sequences = sequences  # allocated in advance
        self.is_busy = False
        on_end(lanes)

    def _may_retry(self, result: SmqError | Lost) -> bool:
        """An out-of-order answer means "not yet" while an earlier batch is under way."""
        if isinstance(result, SmqError) and result.code is ErrorCode.OUT_OF_ORDER_SEQUENCE:
            return any(lane.is_busy and lane.sequence < self.sequence for lane in self._lanes)
        return may_retry(result)

    def _abandon_session(self) -> None:
        if self.session is not None:
            self.session.is_stale = True
