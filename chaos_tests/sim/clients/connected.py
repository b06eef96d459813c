"""An idempotent producer that sends several batches down one connection, in order, as Kafka's producers do.

Owns the order: it resends from the first batch that was not acknowledged, in order, once every batch in flight has an
answer. Then no batch may ever be refused for its sequence: the ones before it are stored, or come first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos_tests.sim.clients.base import Known, World, is_unknown
from chaos_tests.sim.clients.producer import ATTEMPT_MS, DEADLINE_MS, Producer, produce
from chaos_tests.sim.rpc import Call, Connection, Lost, Script, Sleep, Wait
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import Acks, Produced

BATCHES_MAX = 5  # in flight, as Kafka's idempotent producers


@dataclass(slots=True, eq=False)
class _Sent:
    """One batch of a burst: an operation of its own."""

    writer: Producer  # whose process the operation is
    values: list[int]
    data: bytes
    result: Any = None  # of the last attempt
    is_unknown: bool = False  # some attempt may have been stored


class Connected(Producer):
    """Sends bursts; continues the session only if the whole burst was acknowledged."""

    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, acks=Acks.ALL, idempotent=True, think_ms=think_ms)
        self._writers = [
            Producer(world, f"{name}-{i}", acks=Acks.ALL, idempotent=True, think_ms=0) for i in range(BATCHES_MAX)
        ]
        self._unanswered = 0
        self._wake: Callable[[], None] | None = None  # set while it waits for answers

    def send(self, partition: Known) -> Script:
        if self.session is None or self.session.is_stale or self.rng.random() < 0.5:  # new ids are what may go wrong
            yield from self._open_session()
        if self.session is None:
            return
        burst = [self._prepare(writer, partition) for writer in self._writers[: self.rng.randint(2, BATCHES_MAX)]]
        left = burst
        until = self.world.now_ms() + DEADLINE_MS
        while left:
            yield from self._round(partition, left)
            left = [sent for sent in left if not isinstance(sent.result, Produced)]
            if not left or self.world.now_ms() > until or not self._may_resend(left):
                break
            yield Sleep(self.rng.uniform(5, 80))
        for sent in burst:
            self._finish(partition, sent)
        if left:
            self._abandon_session()

    def _prepare(self, writer: Producer, partition: Known) -> _Sent:
        session = self.session
        assert session is not None
        writer.session = session
        values = self.world.values(self.rng.randint(1, 3))
        sent = _Sent(writer, values, writer._encode(partition, values))
        session.sequences[partition.key] = session.sequences.get(partition.key, 0) + len(values)
        self.world.recorder.invoke(writer.process, "send", k=partition.key, v=values, acks=-1, idem=True)
        return sent

    # ------------------------------------------------------------------------------------------ one round
    def _round(self, partition: Known, left: list[_Sent]) -> Script:
        """Sends all batches, without waiting for answers in between, and waits for all answers."""
        known = partition.leader is not None and self.rng.random() < 0.95
        node = partition.leader if known and partition.leader is not None else self.any_node()
        connection = Connection()
        self._unanswered = len(left)
        for sent in left:
            self.world.spawn(
                self._attempt(
                    partition,
                    sent,
                    Call(
                        node,
                        produce(partition, sent.data, Acks.ALL),
                        ATTEMPT_MS * 1.3,
                        ATTEMPT_MS,
                        True,
                        connection,
                    ),
                )
            )
            yield Sleep(self.rng.expovariate(1.0) * 5)
        if self._unanswered:
            yield Wait(self._wake_me)
        for sent in left:
            if isinstance(sent.result, SmqError | Lost):
                self._learn(partition, sent.result)
                return
        partition.leader = node

    def _attempt(self, partition: Known, sent: _Sent, call: Call) -> Script:
        sent.result = yield call
        if isinstance(sent.result, SmqError | Lost) and is_unknown(sent.result):
            sent.is_unknown = True
        self._unanswered -= 1
        if not self._unanswered and self._wake is not None:
            wake, self._wake = self._wake, None
            wake()

    def _wake_me(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _may_resend(self, left: list[_Sent]) -> bool:
        """A batch may be refused for its sequence while an earlier one is missing; the first may not."""
        first = left[0].result
        if isinstance(first, SmqError) and first.code is ErrorCode.OUT_OF_ORDER_SEQUENCE:
            self.world.recorder.note("overtaken", err=f"a batch whose predecessors are all stored: {first}")
            return False
        return isinstance(first, Lost) or first.code.is_retriable

    def _finish(self, partition: Known, sent: _Sent) -> None:
        session = self.session
        sequences = dict(session.sequences) if session is not None else {}
        sent.writer._conclude(partition, sent.values, sent.result, sent.is_unknown)
        if session is not None:
            session.sequences = sequences  # allocated in advance
