"""Clients of transactions: producers that share transactional ids, and readers of what is committed.

Owns what a transaction has in it, and how it ends. Several producers share an id, so each fences the others.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, Known, World, request_range
from chaos_tests.sim.clients.transactional import CALL_MS, NODE_MS, PLACES, TIMEOUT_MS, TransactionalClient, make_ledger
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.commands import (
    UNSEEN,
    AddToTransaction,
    EndTransaction,
    OffsetCommit,
    StageOffsets,
)
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.records import decode_batch
from smq.replication.api import Fetched, NodeApi, PartitionRange

SHARERS: Final = 2  # producers of one transactional id


def group_of(transactional_id: str) -> str:
    """The group whose offsets its transactions commit."""
    return f"group-of-{transactional_id}"


class Transactor(TransactionalClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"transactor-{number}", f"tx-{number // SHARERS}")
        self.think_ms = think_ms

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
            if self.world.ledgers or (yield from make_ledger(self)):
                yield from self.transact()

    # ------------------------------------------------------------------------------------------ one transaction
    def transact(self) -> Script:
        if self.producer is None and not (yield from self.start()):
            return
        places = self.rng.sample(self.world.ledgers, self.rng.randint(1, PLACES))
        values = {known.key: self.world.values(self.rng.randint(1, 3)) for known in places}
        (tag,) = self.world.values(1)
        offset = tag if self.rng.random() < 0.5 else None
        self.world.recorder.invoke(self.process, "txn", id=self.id, v=values, off=offset)
        outcome = yield from self._run(places, values, offset)
        if outcome == "unknown":
            self.conclude_unknown("txn")
        elif outcome == "none":
            self.world.recorder.fail(self.process, "txn", err="NOT_COMMITTED")
        else:
            self.ok("txn", out=outcome)

    def _run(self, places: list[Known], values: dict[str, list[int]], offset: int | None) -> Any:
        """A Script that returns commit, abort, none (no commit was asked for, or it is certain that it failed) or
        unknown."""
        groups = (group_of(self.id),) if offset is not None else ()
        added = yield from self.change(
            lambda common: AddToTransaction(**common, partitions=tuple(p.pid for p in places), groups=groups)
        )
        if isinstance(added, SmqError | Lost):
            self.producer = None
            return "none"
        is_whole = True
        for place in places:
            is_whole = is_whole and (yield from self.write(place, values[place.key]))
        if self.rng.random() < 0.1:
            yield Sleep(self.rng.uniform(0.2, 2.0) * TIMEOUT_MS)  # it may be fenced, or timed out, when it wakes
        if is_whole and offset is not None:
            is_whole = yield from self._stage(offset)
        is_commit = is_whole and self.rng.random() < 0.75
        if self.rng.random() < 0.06:
            self.producer = None
            return "none"  # its process dies: the transaction stays open
        ended = yield from self.change(lambda common: EndTransaction(**common, is_commit=is_commit))
        if not is_whole or isinstance(ended, SmqError | Lost):
            self.producer = None
        if not isinstance(ended, SmqError | Lost):
            return "commit" if is_commit else "abort"
        return "unknown" if is_commit and self.was_unknown else "none"

    def _stage(self, offset: int) -> Any:
        """A Script that returns whether the offset is staged."""
        assert self.producer is not None
        producer_id, epoch = self.producer
        group, pid = group_of(self.id), self.world.ledgers[0].pid

        def stage(api: Any, done: Callable[[Any], None]) -> None:
            found = api.state.transactions.get(self.id)
            command = StageOffsets(
                group=group,
                coordinator_epoch=api.groups.epoch_of(group),
                transactional_id=self.id,
                transaction_changes_seen=found.changes if found is not None else UNSEEN,
                producer_id=producer_id,
                producer_epoch=epoch,
                items=(OffsetCommit(partition=pid, offset=Offset(offset)),),
                committed_ms=api.groups.wall_ms(),
            )
            api.groups.stage(command, NO_MEMBER, NODE_MS, done)

        result = yield from self.at_coordinator(group, stage)
        return not isinstance(result, SmqError | Lost)


class LedgerReader(Client):
    """Reads what is committed, from any replica, and asks the leader for the last stable offset."""

    def __init__(self, world: World, name: str, *, think_ms: float) -> None:
        super().__init__(world, name)
        self.think_ms = think_ms

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
            if not self.world.ledgers:
                continue
            known = self.rng.choice(self.world.ledgers)
            if self.rng.random() < 0.3:
                yield from self.range(known)
            else:
                yield from self.poll(known, self.rng.choice(known.replicas), self.rng.randint(0, known.hwm))

    def range(self, known: Known) -> Script:
        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            request_range(api, known.topic, known.index, CALL_MS, done)

        self.world.recorder.invoke(self.process, "tstable", k=known.key)
        result = yield Call(self.any_node(), request, CALL_MS * 1.5, CALL_MS)
        if isinstance(result, PartitionRange):
            self.ok("tstable", lso=result.lso)
            known.hwm = max(known.hwm, result.lso)
        else:
            self.fail("tstable", result)

    def poll(self, known: Known, node: NodeId, offset: int, *, is_final: bool = False) -> Any:
        """A Script that returns the next offset; None if the read failed."""

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.fetch(known.topic, known.index, offset, max_bytes=1 << 16, max_wait_ms=0, done=done, is_committed=True)

        self.world.recorder.invoke(self.process, "tpoll", k=known.key, o=offset, n=node, final=is_final)
        result = yield Call(node, request, 6_000.0, 5_500.0)
        if not isinstance(result, Fetched):
            self.fail("tpoll", result)
            return None
        found = [
            [record.offset, int(record.value or b"-1")]
            for batch in result.batches
            if is_visible(result, batch)
            for record in decode_batch(batch.data)
            if record.offset >= offset
        ]
        following = result.batches[-1].last_offset + 1 if result.batches else offset
        self.ok("tpoll", r=found, next=following, lso=result.lso)
        return following

    def read_all(self) -> Script:
        """Every replica, to its end, and every group."""
        for known in self.world.ledgers:
            for node in known.replicas:
                at, following = -1, 0
                while following is not None and following > at:
                    at = following
                    following = yield from self.poll(known, node, at, is_final=True)

    def read_offsets(self, ids: list[str]) -> Script:
        for name in ids:

            def request(api: NodeApi, done: Callable[[Any], None], name: str = name) -> None:
                api.fetch_offsets(group_of(name), None, int(CALL_MS), done)

            self.world.recorder.invoke(self.process, "toffset", id=name)
            result, unknown = yield from self.request(request, deadline_ms=5_000.0, attempt_ms=CALL_MS)
            if isinstance(result, dict):
                found = [committed.offset for committed in result.values()]
                self.ok("toffset", off=found[0] if found else None)
            elif unknown:
                self.conclude_unknown("toffset")
            else:
                self.fail("toffset", result)
