"""A crowd: many idempotent producers that write one batch each, lose its answer, and send it again a while later.

Owns its producers' identities and their pauses. Between the two attempts others write, leaders move and producers
expire. A node that forgets a producer too early stores its batch twice.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, Known, World, is_unknown
from chaos_tests.sim.clients.producer import ATTEMPT_MS, Producer, Session
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, ProducerEpoch, ProducerId
from smq.replication.api import Acks, NodeApi

WAVE: Final = 4  # producers that begin together
PAUSE_MS: Final = (200.0, 1_500.0)  # before the second attempt: leaders fail meanwhile
_FIRST_ID: Final = 1 << 40  # no id that the cluster allocates: allocations would use up the budget of operations


class Crowd(Client):
    """Lets a few new producers begin with every wave."""

    def __init__(self, world: World, name: str, number: int, *, think_ms: float) -> None:
        super().__init__(world, name)
        self.name = name
        self.think_ms = think_ms
        self._ids = count(_FIRST_ID + (number << 20))

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
            partition = self.any_partition()
            if partition is not None:
                for _ in range(WAVE):
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

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.produce(partition.topic, partition.index, batch, self.acks, ATTEMPT_MS, done)

        node: NodeId = partition.leader if partition.leader is not None else self.any_node()
        lost = yield Call(node, request, ATTEMPT_MS * 1.3, ATTEMPT_MS)
        may_be_stored = not isinstance(lost, SmqError | Lost) or is_unknown(lost)
        yield Sleep(self.rng.uniform(*PAUSE_MS))
        result, unknown = yield from self._attempts(partition, batch)
        self._conclude(partition, values, result, unknown or may_be_stored)
