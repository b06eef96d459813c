"""A client that creates a topic and immediately sends it batches without sequences, several down each connection.

Owns the order: of what one connection sent to one partition, whatever is stored is stored in that order. Nodes apply
the topic while its first batches are looked up.
"""

from collections.abc import Callable
from typing import Final

from chaos_tests.sim.clients.base import Client, Known, LoopingClient, World, is_unknown
from chaos_tests.sim.clients.producer import ATTEMPT_MS, Producer, produce
from chaos_tests.sim.clients.services import TopicOwner
from chaos_tests.sim.rpc import Call, Connection, Lost, Script, Sleep, Wait
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId
from smq.replication.api import Acks, Produced

BATCHES: Final = 6  # down one connection
PAUSE_MS: Final = 0.4  # on average, between two of them: a node applies a topic within milliseconds


class Streamer(LoopingClient):
    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self._count = 0
        self._owner = TopicOwner(world, f"{name}-owner", think_ms=think_ms)
        self._streams = [_Stream(world, f"{name}-{node}", node) for node in world.nodes]
        self._wake: Callable[[], None] | None = None  # set while it waits for the streams

    def act(self) -> Script:
        self._count += 1
        topic = f"{self.name}-{self._count}"
        if not (yield from self._owner.create(topic, partitions=1, replication=3)):
            return
        partition = next(known for known in self.world.partitions if known.topic == topic)
        for stream in self._streams:
            self.world.spawn(stream.send(partition, self._on_end))
        yield Wait(self._wait)
        yield from self._owner.drop(topic)

    def _wait(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _on_end(self) -> None:
        if self._wake is not None and not any(stream.is_busy for stream in self._streams):
            wake, self._wake = self._wake, None
            wake()


class _Stream(Client):
    """The batches for one node."""

    def __init__(self, world: World, name: str, node: NodeId) -> None:
        super().__init__(world, name)
        self._node = node
        self._writers = [
            Producer(world, f"{name}-{i}", acks=Acks.ALL, idempotent=False, think_ms=0) for i in range(BATCHES)
        ]
        self._unanswered = 0
        self._stored: dict[int, int] = {}  # offsets, by the batch's place on the connection

    @property
    def is_busy(self) -> bool:
        return self._unanswered > 0

    def send(self, partition: Known, on_end: Callable[[], None]) -> Script:
        connection = Connection()
        self._unanswered, self._stored = BATCHES, {}
        for place in range(BATCHES):
            self.world.spawn(self._attempt(partition, place, connection, on_end))
            yield Sleep(self.rng.expovariate(1.0) * PAUSE_MS)

    def _attempt(self, partition: Known, place: int, connection: Connection, on_end: Callable[[], None]) -> Script:
        writer = self._writers[place]
        values = self.world.values(1)
        request = produce(partition, writer._encode(partition, values), Acks.ALL)
        self.world.recorder.invoke(writer.process, "send", k=partition.key, v=values, acks=-1, idem=False)
        result = yield Call(self._node, request, ATTEMPT_MS * 1.3, ATTEMPT_MS, True, connection)
        writer._conclude(partition, values, result, isinstance(result, SmqError | Lost) and is_unknown(result))
        if isinstance(result, Produced):
            self._check_order(partition, place, result)
        self._unanswered -= 1
        if not self._unanswered:
            on_end()

    def _check_order(self, partition: Known, place: int, result: Produced) -> None:
        self._stored[place] = result.base_offset
        offsets = [self._stored[at] for at in sorted(self._stored)]
        if offsets != sorted(offsets):
            err = f"{partition.key}: one connection's batches, in the order sent, are stored at {offsets}"
            self.world.recorder.note("overtaken", err=err)
