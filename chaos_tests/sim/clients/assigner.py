"""A client of offsets without records: it requests ranges, moves the mark, and reads it back, at any node.

Owns the memory of an honest caller: one request id per call, and a bound from before its first attempt. Some of its
attempts come to a node together with a request that must be refused: the two share a command.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Known, LoopingClient, World, is_unknown, range_of
from chaos_tests.sim.rpc import Call, Lost, Script
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.replies import OffsetsAssigned
from smq.replication.api import NodeApi, PartitionRange

ATTEMPT_MS: Final = 300  # short: attempts are often repeated while the first is still on its way
DEADLINE_MS: Final = 3_000.0
COUNT_MAX: Final = 5


class Assigner(LoopingClient):
    """`partition` belongs to a topic of external storage."""

    def __init__(self, world: World, name: str, partition: Known, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.partition = partition
        self._bound = 0  # a next offset of the past
        self._mark = 0  # the highest that this client has learned

    def act(self) -> Script:
        chance = self.rng.random()
        yield from (self.assign() if chance < 0.7 else self.advance() if chance < 0.85 else self.read())

    def assign(self) -> Script:
        count, request_id, bound = self.rng.randint(1, COUNT_MAX), self.rng.randbytes(16), self._bound
        topic, index = self.partition.topic, self.partition.index

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            if self.rng.random() < 0.3:
                self._ask_for_none(api)
            api.assign_offsets(
                topic, index, count, request_id=request_id, not_before=bound, timeout_ms=ATTEMPT_MS, done=done
            )

        self.world.recorder.invoke(self.process, "assign", k=self.partition.key, c=count)
        result, unknown = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        is_assigned = isinstance(result, OffsetsAssigned)
        self.conclude("assign", result, unknown=unknown, **({"o": result.base} if is_assigned else {}))
        if is_assigned:
            self._bound = result.last + 1
        if isinstance(result, SmqError) and result.code is ErrorCode.INVALID_REQUEST:
            self.world.report_violation(self.any_node(), f"a valid request for offsets was refused: {result}")

    def _ask_for_none(self, api: NodeApi) -> None:
        """A neighbour that no node may serve, and that must cost nothing to others."""
        node, request_id = self.any_node(), self.rng.randbytes(16)

        def judge(result: OffsetsAssigned | SmqError) -> None:
            if not isinstance(result, SmqError):
                self.world.report_violation(node, f"a request for 0 offsets got {result}")

        topic, index = self.partition.topic, self.partition.index
        api.assign_offsets(
            topic, index, 0, request_id=request_id, not_before=self._bound, timeout_ms=ATTEMPT_MS, done=judge
        )

    def advance(self) -> Script:
        """Not an operation of the history: the answer is a lower bound for the next read of this client."""
        topic, index, offset = self.partition.topic, self.partition.index, self._bound

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.advance_external_hwm(topic, index, offset, ATTEMPT_MS, done)

        result, _ = yield from self.request(request, deadline_ms=DEADLINE_MS, attempt_ms=ATTEMPT_MS)
        if not isinstance(result, SmqError | Lost):
            self._mark = max(self._mark, result)

    def read(self) -> Script:
        node, key = self.any_node(), self.partition.key
        self.world.recorder.invoke(self.process, "hwm", k=key, n=node)
        result = yield Call(node, range_of(self.partition, ATTEMPT_MS), ATTEMPT_MS * 1.5, ATTEMPT_MS)
        if isinstance(result, PartitionRange):
            answer = {"lo": result.log_start, "hwm": result.hwm, "next": result.next_offset, "epoch": result.epoch}
            self.world.recorder.ok(self.process, "hwm", **answer)
            if result.hwm < self._mark or result.next_offset < self._bound:
                what = f"{key}: mark {result.hwm} and next {result.next_offset} after {self._mark} and {self._bound}"
                self.world.report_violation(node, what)
        else:
            self.conclude("hwm", result, unknown=is_unknown(result))
