"""Clients of CommitBatch: drivers that write the micro-batches of an app, as Spark's sink does.

Owns the life of a driver. Its checkpoint outlives it: what a batch contains is fixed before anything is staged, and
that a batch is done is noted after its commit. So a driver that finds the checkpoint stages the same batch again. A
checkpoint may lose what a batch was: then a driver plans other values under its number. Several drivers share a
checkpoint, as two queries by mistake would. Each task of a batch has its own transaction.
"""

import hashlib
from typing import Any, Final

from chaos_tests.sim.clients.base import Known, World, proposal
from chaos_tests.sim.clients.ledger import CALL_MS, PLACES, make_ledger
from chaos_tests.sim.clients.transactional import PATIENCE_MS, TIMEOUT_MS, TransactionalClient
from chaos_tests.sim.rpc import Lost, Script, Sleep
from smq.raft_state.commands import AddToTransaction, CommitBatch, EndTransaction, Fingerprint, StagedTransaction
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.replies import BatchCommitted

DRIVERS: Final = 2  # of one checkpoint
TASKS: Final = 2


class BatchWriter(TransactionalClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"batch-writer-{number}", "", think_ms=think_ms)
        self.app = f"app-{number // DRIVERS}"
        # Ids that are forgotten, and ids that stay, lead to the same.
        self.is_temporary = number // DRIVERS % 2 == 1
        self._offsets: list[dict[str, int]] = []  # where each task of the present attempt lies, by place

    def act(self) -> Script:
        if self.world.ledgers or (yield from make_ledger(self)):
            yield from self.micro_batch()

    def micro_batch(self) -> Script:
        checkpoint = self.world.checkpoints.setdefault(self.app, [])
        if not checkpoint or checkpoint[-1].is_done:
            checkpoint.append(PlannedBatch(self._plan()))
        elif self.rng.random() < 0.2:
            checkpoint[-1] = PlannedBatch(self._plan())
        number, planned = len(checkpoint) - 1, checkpoint[-1]
        values = [value for task in planned.tasks for of_place in task.values() for value in of_place]
        self.world.recorder.invoke(self.process, "batch", app=self.app, id=number, v=values, tasks=list(planned.tasks))
        self._offsets = []
        staged = yield from self._stage_all(planned)
        if staged is None or self.rng.random() < 0.1:  # a task has failed, or the driver dies: nothing is committed
            self.world.recorder.fail(self.process, "batch", err="NOT_COMMITTED")
            return
        if self.rng.random() < 0.1:
            yield Sleep(self.rng.uniform(0.2, 2.0) * TIMEOUT_MS)  # others may have been faster when it wakes
        command = CommitBatch(
            request_id=self.new_id(),
            app=self.app,
            batch_id=number,
            transactions=staged,
            fingerprint=Fingerprint(len(values), hashlib.sha256(repr(sorted(values)).encode()).digest()),
        )
        request = proposal(command, CALL_MS)
        result, unknown = yield from self.request(request, deadline_ms=PATIENCE_MS, attempt_ms=CALL_MS)
        if isinstance(result, BatchCommitted):
            self.ok("batch", replay=result.is_replay, o=self._offsets)
            planned.is_done = planned.is_done or self.rng.random() < 0.8  # or the driver dies before it notes it
        elif unknown:
            self.conclude_unknown("batch", o=self._offsets)
        else:
            assert isinstance(result, SmqError | Lost)
            self.fail("batch", result)
            if isinstance(result, SmqError) and result.code is ErrorCode.BATCH_DIFFERS:
                planned.is_done = True  # the operator goes on with the next one

    def _plan(self) -> tuple[dict[str, list[int]], ...]:
        """What each task writes: values by place."""
        tasks = []
        for _ in range(self.rng.randint(1, TASKS)):
            places = self.rng.sample(self.world.ledgers, self.rng.randint(1, PLACES))
            tasks.append({place.key: self.world.values(self.rng.randint(1, 3)) for place in places})
        return tuple(tasks)

    def _stage_all(self, planned: "PlannedBatch") -> Any:
        """A Script that returns the staged transactions; None if a task has failed."""
        staged: list[StagedTransaction] = []
        for number, values in enumerate(planned.tasks):
            if self.rng.random() < 0.15:  # an attempt that is lost after it has staged, and leaves its transaction open
                yield from self._stage(f"{self.app}/{number}/lost", values)
            item = yield from self._stage(f"{self.app}/{number}", values)
            if item is None:
                return None
            staged.append(item)
            self._offsets.append(self.written)
        return tuple(staged)

    def _stage(self, transactional_id: str, values: dict[str, list[int]]) -> Any:
        """A Script that returns the open transaction with these values; None if it failed."""
        self.id, self.written = transactional_id, {}
        places = {place.key: place for place in self.world.ledgers}
        if not (yield from self.start()):
            return None
        chosen: list[Known] = [places[key] for key in values]
        added = yield from self.change(
            lambda common: AddToTransaction(**common, partitions=tuple(place.pid for place in chosen))
        )
        is_whole = not isinstance(added, SmqError | Lost)
        for place in chosen:
            is_whole = is_whole and (yield from self.write(place, values[place.key]))
        if not is_whole:
            if self.rng.random() < 0.5:  # or its time-out does it
                yield from self.change(lambda common: EndTransaction(**common, is_commit=False))
            return None
        assert self.producer is not None
        producer_id, epoch = self.producer
        return StagedTransaction(transactional_id=self.id, producer_id=producer_id, producer_epoch=epoch)


class PlannedBatch:
    """A batch as the checkpoint has it."""

    __slots__ = ("is_done", "tasks")

    def __init__(self, tasks: tuple[dict[str, list[int]], ...]) -> None:
        self.tasks = tasks
        self.is_done = False
