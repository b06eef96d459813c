"""A consumer: reads partitions from any replica, seeks back now and then, and records every batch that it gets.

Owns polls and, at the end of a run, the full read of one replica.
"""

from collections.abc import Callable
from typing import Any

from chaos_tests.sim.clients.base import Known, PartitionClient, World, is_unknown
from chaos_tests.sim.rpc import Call, Script, Sleep
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.replication.api import Fetched, NodeApi
from smq.replication.log.stored_batch import ENVELOPE_BYTES

MAX_BYTES = 4_000  # a few batches: several short polls find more than one long one
MAX_WAIT_MS = 150
PATIENCE_MS = 1500.0
SEEK_PROBABILITY = 0.06
FAR_PROBABILITY = 0.01
FINAL_POLLS_MAX = 5_000  # a full read that takes more makes no progress


class Consumer(PartitionClient):
    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.positions: dict[str, int] = {}

    def use(self, partition: Known) -> Script:
        position = self.positions.get(partition.key, partition.lo)
        if self.rng.random() < SEEK_PROBABILITY:
            position = self.rng.randint(partition.lo, max(partition.lo, position))
        if self.rng.random() < FAR_PROBABILITY:
            position = partition.hwm + self.rng.choice((1, 1000))
        self.positions[partition.key] = yield from self.poll(partition, self._node(partition), position)

    def _node(self, partition: Known) -> NodeId:
        return self.rng.choice(partition.replicas) if partition.replicas else self.any_node()

    def poll(
        self, partition: Known, node: NodeId, position: int, *, max_wait_ms: int = MAX_WAIT_MS, final: bool = False
    ) -> "PollScript":
        """One poll; returns the next position."""

        def request(api: NodeApi, done: Callable[[Any], None]) -> object:
            return api.fetch(
                partition.topic,
                partition.index,
                Offset(position),
                max_bytes=MAX_BYTES,
                max_wait_ms=max_wait_ms,
                done=done,
            )

        requested = {"k": partition.key, "o": position, "n": node, **({"final": True} if final else {})}
        self.world.recorder.invoke(self.process, "poll", **requested)
        result = yield Call(node, request, max_wait_ms + PATIENCE_MS, max_wait_ms)
        if isinstance(result, Fetched):
            return self._took(partition, node, position, result)
        if is_unknown(result):
            self.conclude_unknown("poll")
            return position
        self.fail("poll", result)
        lo, hi = (result.details.lo, result.details.hi) if isinstance(result, SmqError) else (None, None)
        return position if lo is None else max(lo, min(position, hi or 0))

    def _took(self, partition: Known, node: NodeId, position: int, result: Fetched) -> int:
        batches = [self.world.describe(node, batch) for batch in result.batches]
        sizes = [[b.base_offset, b.last_offset + 1, ENVELOPE_BYTES + len(b.data)] for b in result.batches]
        self.ok("poll", b=batches, lo=result.log_start, hwm=result.hwm, s=sizes)
        partition.hwm = max(partition.hwm, result.hwm)
        partition.lo = max(partition.lo, result.log_start)
        return batches[-1][0] + len(batches[-1][2]) if batches else position

    def read_all(self, partition: Known, node: NodeId) -> Script:
        """Reads the replica's whole log, from its log start to its HWM, for the judges."""
        position, attempts = 0, 0  # the log start of another replica may be further
        while attempts < FINAL_POLLS_MAX:
            attempts += 1
            before = position
            position = yield from self.poll(partition, node, position, max_wait_ms=0, final=True)
            if position == before:
                if position >= partition.hwm:
                    return
                yield Sleep(20)


PollScript = Any  # a Script that returns the next position
