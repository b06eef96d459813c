"""Clients of transactions: producers that share transactional ids, and readers of what is committed.

Owns the reaction to each answer, as Kafka's clients have it with the first protocol of transactions: after an unknown
outcome of a batch, a producer begins again in a new epoch. Several producers share an id, so each fences the others.
They write to topics of their own, the ledgers, which no other client uses.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Client, Known, World, is_unknown, may_retry, request_range, value_of
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.commands import (
    UNSEEN,
    AddToTransaction,
    CreateTopic,
    EndTransaction,
    InitTransactions,
    OffsetCommit,
    StageOffsets,
    TransactionChange,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionIndex, ProducerEpoch, ProducerId, TopicId, partition_id
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.state import TransactionPhase
from smq.raft_state.topic_config import CLEANUP_POLICY, DELETE_RETENTION_MS, MIN_CLEANABLE_DIRTY_RATIO
from smq.records import decode_batch, encode_batch, parse_header
from smq.replication.api import Acks, Fetched, NodeApi, PartitionRange, Produced

LEDGER: Final = "ledger"
LEDGER_ID: Final = TopicId(b"ledger, 16 bytes")
PLACES: Final = 2  # partitions of the ledger
SHARERS: Final = 2  # producers of one transactional id
CALL_MS: Final = 900.0
NODE_MS: Final = 6_000.0  # that a node is given for a change: longer than the client waits
PATIENCE_MS: Final = 6_000.0  # that a client gives one step
TIMEOUT_MS: Final = 4_000  # of a transaction
CREATED_MS: Final = 1_700_000_000_000


def group_of(transactional_id: str) -> str:
    """The group whose offsets its transactions commit."""
    return f"group-of-{transactional_id}"


class Transactor(Client):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"transactor-{number}")
        self.id = f"tx-{number // SHARERS}"
        self.think_ms = think_ms
        self._producer: tuple[ProducerId, ProducerEpoch] | None = None
        self._sequences: dict[str, int] = {}
        self._written: dict[str, int] = {}  # of the present transaction: where its batches lie

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
            if self.world.ledgers or (yield from make_ledger(self)):
                yield from self.transact()

    # ------------------------------------------------------------------------------------------ one transaction
    def transact(self) -> Script:
        if self._producer is None and not (yield from self._start()):
            return
        places = self.rng.sample(self.world.ledgers, self.rng.randint(1, PLACES))
        values = {known.key: self.world.values(self.rng.randint(1, 3)) for known in places}
        (tag,) = self.world.values(1)
        offset = tag if self.rng.random() < 0.5 else None
        self.world.recorder.invoke(self.process, "txn", id=self.id, v=values, off=offset)
        self._written = {}
        outcome = yield from self._run(places, values, offset)
        if outcome == "unknown":
            self.conclude_unknown("txn", o=self._written)
        elif outcome == "none":
            self.world.recorder.fail(self.process, "txn", err="NOT_COMMITTED")
        else:
            self.ok("txn", out=outcome, o=self._written)

    def _run(self, places: list[Known], values: dict[str, list[int]], offset: int | None) -> Any:
        """A Script that returns commit, abort, none (no commit was asked for, or it is certain that it failed) or
        unknown."""
        groups = (group_of(self.id),) if offset is not None else ()
        added = yield from self._change(
            lambda common: AddToTransaction(**common, partitions=tuple(p.pid for p in places), groups=groups)
        )
        if isinstance(added, SmqError | Lost):
            self._producer = None
            return "none"
        is_whole = True
        for place in places:
            is_whole = is_whole and (yield from self._write(place, values[place.key]))
        if self.rng.random() < 0.1:
            yield Sleep(self.rng.uniform(0.2, 2.0) * TIMEOUT_MS)  # it may be fenced, or timed out, when it wakes
        if is_whole and offset is not None:
            is_whole = yield from self._stage(offset)
        is_commit = is_whole and self.rng.random() < 0.75
        if self.rng.random() < 0.06:
            self._producer = None
            return "none"  # its process dies: the transaction stays open
        ended = yield from self._change(lambda common: EndTransaction(**common, is_commit=is_commit))
        if not is_whole or isinstance(ended, SmqError | Lost):
            self._producer = None
        if not isinstance(ended, SmqError | Lost):
            return "commit" if is_commit else "abort"
        return "unknown" if is_commit and self._was_unknown else "none"

    def _start(self) -> Any:
        """A Script that returns whether it has a producer now. As the node does for Kafka's clients, it first aborts
        what the one before has left open."""

        def init(api: Any, done: Callable[[Any], None]) -> None:
            found = api.state.transactions.get(self.id)
            if found is not None and found.phase is TransactionPhase.ONGOING:
                command: TransactionChange = EndTransaction(
                    transactional_id=self.id,
                    coordinator_epoch=api.groups.epoch_of(self.id),
                    producer_id=found.producer_id,
                    producer_epoch=found.producer_epoch,
                    is_commit=False,
                    is_fencing=True,
                    is_replacing=True,
                )
                ending = SmqError(ErrorCode.TRANSACTION_ENDING, "its last transaction was open")
                api.groups.change(command, NODE_MS, lambda r: done(r if isinstance(r, SmqError) else ending))
                return
            command = InitTransactions(
                transactional_id=self.id, coordinator_epoch=api.groups.epoch_of(self.id), timeout_ms=TIMEOUT_MS
            )
            api.groups.change(command, NODE_MS, done)

        reply = yield from self._at_coordinator(self.id, init)
        if not isinstance(reply, ProducerIdAllocated):
            return False
        self._producer, self._sequences = (reply.producer_id, reply.producer_epoch), {}
        return True

    def _change(self, command_of: Callable[[dict[str, Any]], TransactionChange]) -> Any:
        """A Script that returns the reply to a change of this producer's."""
        assert self._producer is not None
        producer_id, epoch = self._producer

        def change(api: Any, done: Callable[[Any], None]) -> None:
            common = {
                "transactional_id": self.id,
                "coordinator_epoch": api.groups.epoch_of(self.id),
                "producer_id": producer_id,
                "producer_epoch": epoch,
            }
            api.groups.change(command_of(common), NODE_MS, done)

        return (yield from self._at_coordinator(self.id, change))

    def _at_coordinator(self, subject: str, request: Callable[[Any, Callable[[Any], None]], None]) -> Any:
        """A Script that returns the last answer. `_was_unknown` says whether an attempt may have taken effect."""
        until = self.world.now_ms() + PATIENCE_MS
        self._was_unknown = False
        while True:
            node = yield Call(
                self.any_node(), lambda api, done: done(coordinator_of(api.state, subject).node), CALL_MS, CALL_MS
            )
            result: Any = Lost.REFUSED
            if not isinstance(node, SmqError | Lost) and node:
                result = yield Call(node, request, CALL_MS, NODE_MS, is_tied=True)
            if not isinstance(result, SmqError | Lost):
                return result
            self._was_unknown |= is_unknown(result)
            if self.world.now_ms() > until or not (may_retry(result) or is_unknown(result)):
                return result
            yield Sleep(self.rng.uniform(10, 150))

    # ------------------------------------------------------------------------------------------ its contents
    def _write(self, place: Known, values: list[int]) -> Any:
        """A Script that returns whether the batch was acknowledged."""
        assert self._producer is not None
        batch = encode_batch(
            [self.world.record(value, CREATED_MS) for value in values],
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=self._sequences.get(place.key, 0),
            is_transactional=True,
        )

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            api.produce(place.topic, place.index, batch, Acks.ALL, int(CALL_MS), done)

        until = self.world.now_ms() + PATIENCE_MS
        while True:
            node = place.leader if place.leader is not None and self.rng.random() < 0.95 else self.any_node()
            result = yield Call(node, request, CALL_MS * 1.3, CALL_MS, is_tied=True)
            if isinstance(result, Produced):
                place.leader = node
                self._written[place.key] = result.base_offset
                self._sequences[place.key] = self._sequences.get(place.key, 0) + len(values)
                return True
            is_hint = isinstance(result, SmqError) and result.code is ErrorCode.NOT_LEADER
            place.leader = result.details.leader if is_hint else None
            if self.world.now_ms() > until or not (may_retry(result) or is_unknown(result)):
                return False
            yield Sleep(self.rng.uniform(5, 80))

    def _stage(self, offset: int) -> Any:
        """A Script that returns whether the offset is staged."""
        assert self._producer is not None
        producer_id, epoch = self._producer
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

        result = yield from self._at_coordinator(group, stage)
        return not isinstance(result, SmqError | Lost)


def make_ledger(client: Client) -> Any:
    """A Script that returns whether the ledger exists now."""
    kept = (MIN_CLEANABLE_DIRTY_RATIO, DELETE_RETENTION_MS)
    compacted = [(CLEANUP_POLICY, "compact"), *((k, v) for k, v in client.world.topic_config if k in kept)]
    command = CreateTopic(
        name=LEDGER,
        topic_id=LEDGER_ID,
        partition_count=PLACES,
        replication_factor=3,
        created_ms=CREATED_MS,
        config=tuple(sorted(compacted)) if client.world.keys else (),
    )
    result = yield Call(
        client.any_node(), lambda api, done: api.propose(command, int(CALL_MS), done), CALL_MS * 1.5, CALL_MS
    )
    exists = isinstance(result, SmqError) and result.code is ErrorCode.TOPIC_EXISTS
    if isinstance(result, SmqError | Lost) and not exists:
        return False
    if not client.world.ledgers:
        nodes = tuple(client.world.nodes)
        client.world.ledgers += [
            Known(LEDGER, n, partition_id(LEDGER_ID, PartitionIndex(n)), replicas=nodes) for n in range(PLACES)
        ]
    return True


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
            [record.offset, value_of(record)]
            for batch in result.batches
            if is_visible(result, batch) and parse_header(batch.data).count
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
