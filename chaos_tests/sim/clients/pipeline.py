"""An idempotent producer with several batches of one partition in flight, as Kafka's producers have them.

Owns the bursts: sequences are allocated in advance, and every batch is a separate operation with its own retries, so
that batches arrive in any order, more than once, and around a change of leaders.
"""

from collections.abc import Callable

from chaos_tests.sim.clients.base import Known, World, may_retry
from chaos_tests.sim.clients.producer import Producer, Session
from chaos_tests.sim.rpc import Lost, Script, Sleep, Wait
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import Acks

IN_FLIGHT_MAX = 5  # Kafka's limit for idempotent producers


class Pipeline(Producer):
    """Sends bursts; continues the session only if the whole burst was acknowledged."""

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
