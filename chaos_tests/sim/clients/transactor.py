"""Clients of transactions: producers that share transactional ids, rivals that commit offsets of the same groups
without one, and holders that keep a transaction open.

Owns what a transaction has in it, and how it ends. Each session of a producer speaks one of the two protocols
of transactions. After an unknown outcome of a batch, one of the first begins again in a new epoch; one of the second
has the abort begin it, and what is still on its way from an earlier transaction arrives in the middle of a later one.
Several producers share an id, so each fences the others. They write to the ledgers, which no other client uses.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from chaos_tests.sim.clients.base import Known, World, proposal, range_of
from chaos_tests.sim.clients.ledger import CALL_MS, CREATED_MS, PLACES, group_of, make_ledger
from chaos_tests.sim.clients.services import GroupMember
from chaos_tests.sim.clients.transactional import NODE_MS, PATIENCE_MS, TIMEOUT_MS, TransactionalClient
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.raft_state.commands import (
    UNSEEN,
    AddToTransaction,
    CreateTopic,
    EndTransaction,
    OffsetCommit,
    StageOffsets,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionIndex, ProducerEpoch, ProducerId, TopicId, partition_id
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.topic_config import RETENTION_RECORDS
from smq.replication.api import PartitionRange

SHARERS: Final = 2  # producers of one transactional id
STAGED_MS: Final = (50.0, 400.0)
HELD_KEPT: Final = 2  # records of a holder's topic
HELD_BATCHES: Final = 4  # of its transaction: more records than are kept
HELD_MS: Final = (200.0, 900.0)


class _Late(NamedTuple):
    """What belongs to a transaction that has ended, and is still on its way."""

    producer: tuple[ProducerId, ProducerEpoch]
    is_commit: bool
    place: Known
    batch: bytes  # empty for none


class Transactor(TransactionalClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"transactor-{number}", f"tx-{number // SHARERS}", think_ms=think_ms)
        self._late: _Late | None = None

    def act(self) -> Script:
        if self.world.ledgers or (yield from make_ledger(self)):
            yield from self.transact()

    # ------------------------------------------------------------------------------------------ one transaction
    def transact(self) -> Script:
        if self.producer is None and not (yield from self.start()):
            return
        places = self.rng.sample(self.world.ledgers, self.rng.randint(1, PLACES))
        values = {known.key: self.world.values(self.rng.randint(1, 3)) for known in places}
        held = self.world.values(1) if self.is_second and self.rng.random() < 0.3 else []
        (tag,) = self.world.values(1)
        offset = tag if self.rng.random() < 0.5 else None
        shown = {known.key: values[known.key] + (held if known is places[0] else []) for known in places}
        self.world.recorder.invoke(self.process, "txn", id=self.id, v=shown, off=offset)
        self.written = {}
        outcome = yield from self._run(places, values, held, offset)
        if outcome == "unknown":
            self.conclude_unknown("txn", o=self.written)
        elif outcome == "none":
            self.world.recorder.fail(self.process, "txn", err="NOT_COMMITTED")
        else:
            self.ok("txn", out=outcome, o=self.written)

    def _run(self, places: list[Known], values: dict[str, list[int]], held: list[int], offset: int | None) -> Any:
        """A Script that returns commit, abort, none (no commit was asked for, or it is certain that it failed) or
        unknown. `held` are values that stay on their way to the first place until the transaction has been aborted."""
        if not self.is_second and not (yield from self._add(places, offset)):
            self.producer = None
            return "none"
        is_whole = True
        for place in places:
            is_whole = is_whole and (yield from self.write(place, values[place.key]))
            yield from self._arrive_late()
        if self.rng.random() < 0.1:
            yield Sleep(self.rng.uniform(0.2, 2.0) * TIMEOUT_MS)  # it may be fenced, or timed out, when it wakes
        if is_whole and offset is not None:
            is_whole = yield from self._stage(offset)
            if self.rng.random() < 0.3:
                yield Sleep(self.rng.uniform(*STAGED_MS))  # a rival commits in the meantime
        is_commit = is_whole and not held and self.rng.random() < 0.75
        if self.rng.random() < 0.06:
            self.producer = None
            return "none"  # its process dies: the transaction stays open
        return (yield from self._end(places[0], held, is_commit=is_commit, is_whole=is_whole))

    def _add(self, places: list[Known], offset: int | None) -> Any:
        """A Script that returns whether the transaction has begun: the first protocol says first what it will have."""
        groups = (group_of(self.id),) if offset is not None else ()
        added = yield from self.change(
            lambda common: AddToTransaction(**common, partitions=tuple(p.pid for p in places), groups=groups)
        )
        return not isinstance(added, SmqError | Lost)

    def _end(self, place: Known, held: list[int], *, is_commit: bool, is_whole: bool) -> Any:
        """A Script that returns the outcome, as `_run` does."""
        assert self.producer is not None
        before, late = self.producer, self.batch(place, held) if held else b""
        ended = yield from self.change(
            lambda common: EndTransaction(**common, is_commit=is_commit, is_bumping=self.is_second)
        )
        if isinstance(ended, ProducerIdAllocated):
            self.producer, self.sequences = (ended.producer_id, ended.producer_epoch), {}
            self._late = _Late(before, is_commit, place, late)
        elif not is_whole or isinstance(ended, SmqError | Lost):
            self.producer = None
        if not isinstance(ended, SmqError | Lost):
            return "commit" if is_commit else "abort"
        return "unknown" if is_commit and self.was_unknown else "none"

    def _arrive_late(self) -> Script:
        """The requests that an earlier transaction has left behind come while another one is open: once, and their
        answers are of no interest."""
        late = self._late
        if late is None or self.rng.random() < 0.5:
            return
        self._late = None
        if late.batch:
            leader = late.place.leader if late.place.leader is not None else self.any_node()
            request = self.produce(late.place, late.batch, is_joining=True)
            yield Call(leader, request, CALL_MS, CALL_MS, is_tied=True)
        if self.rng.random() < 0.7:
            (producer_id, epoch), is_commit = late.producer, late.is_commit

            def end(api: Any, done: Callable[[Any], None]) -> None:
                command = EndTransaction(
                    transactional_id=self.id,
                    coordinator_epoch=api.groups.epoch_of(self.id),
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    is_commit=is_commit,
                    is_bumping=True,
                )
                api.groups.change(command, NODE_MS, done)

            node = yield Call(
                self.any_node(), lambda api, done: done(coordinator_of(api.state, self.id).node), CALL_MS, CALL_MS
            )
            if not isinstance(node, SmqError | Lost) and node:
                yield Call(node, end, CALL_MS, NODE_MS, is_tied=True)

    def start(self) -> Any:
        """A Script that returns whether it has a producer now."""
        self.is_second = self.rng.random() < 0.6
        return (yield from super().start())

    def _stage(self, offset: int) -> Any:
        """A Script that returns whether the offset is staged."""
        assert self.producer is not None
        producer_id, epoch = self.producer
        group, place, is_joining = group_of(self.id), self.world.ledgers[0], self.is_second
        pid, tag, process = place.pid, f"{self.name}-{offset}", self.world.recorder.new_process()
        self.world.recorder.invoke(process, "stage", g=group, k=place.key, o=offset, tag=tag)

        def stage(api: Any, done: Callable[[Any], None]) -> None:
            found = api.state.transactions.get(self.id)
            command = StageOffsets(
                group=group,
                coordinator_epoch=api.groups.epoch_of(group),
                transactional_id=self.id,
                transaction_changes_seen=found.changes if found is not None else UNSEEN,
                producer_id=producer_id,
                producer_epoch=epoch,
                items=(OffsetCommit(partition=pid, offset=Offset(offset), metadata=tag),),
                committed_ms=api.groups.wall_ms(),
                is_joining=is_joining,
            )
            api.groups.stage(command, NO_MEMBER, NODE_MS, done)

        result = yield from self.at_coordinator(group, stage)
        is_staged = not isinstance(result, SmqError | Lost)
        self.world.recorder.add(process, "ok" if is_staged else "info", "stage", {})
        return is_staged


class Rival(GroupMember):
    """Commits, fetches and deletes the offsets of groups for which transactions stage others."""

    def __init__(self, world: World, number: int, ids: int, *, think_ms: float) -> None:
        super().__init__(world, f"rival-{number}", "", think_ms=think_ms)
        self._ids = ids

    def act(self) -> Script:
        if self.world.ledgers:
            number = self.rng.randrange(self._ids)
            place, group, chance = self.world.ledgers[0], group_of(f"tx-{number}"), self.rng.random()
            if chance < 0.05 and number == 0:
                yield from self.delete(place, group)
            else:
                yield from (self.commit if chance < 0.4 else self.fetch)(place, group)

    def next_offset(self, partition: Known) -> int:
        """No other client's."""
        (value,) = self.world.values(1)
        return value


class Holder(TransactionalClient):
    """Holds a transaction open in a topic of its own that keeps few records: retention must not pass it. A `hold`
    succeeds only if its transaction was committed in the end: until then it was open, whatever a clock or a node did,
    and the log start that its producer saw is judged."""

    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"holder-{number}", f"held-{number}", think_ms=think_ms)
        self._topic_id = TopicId(self.rng.randbytes(16))
        self._place: Known | None = None

    def act(self) -> Script:
        if self._place is None:
            yield from self._make_topic()
        elif self.producer is not None or (yield from self.start()):
            yield from self._hold(self._place)

    def _make_topic(self) -> Script:
        command = CreateTopic(
            name=self.id,
            topic_id=self._topic_id,
            partition_count=1,
            replication_factor=3,
            created_ms=CREATED_MS,
            config=((RETENTION_RECORDS, str(HELD_KEPT)),),
        )
        request = proposal(command, CALL_MS)
        result, _ = yield from self.request(request, deadline_ms=PATIENCE_MS, attempt_ms=CALL_MS)
        exists = isinstance(result, SmqError) and result.code is ErrorCode.TOPIC_EXISTS
        if exists or not isinstance(result, SmqError | Lost):
            self._place = Known(self.id, 0, partition_id(self._topic_id, PartitionIndex(0)))

    def _hold(self, place: Known) -> Script:
        self.world.recorder.invoke(self.process, "hold", k=place.key)
        self.written = {}
        added = yield from self.change(lambda common: AddToTransaction(**common, partitions=(place.pid,)))
        is_whole = not isinstance(added, SmqError | Lost)
        first = -1
        for number in range(HELD_BATCHES):
            is_whole = is_whole and (yield from self.write(place, self.world.values(1)))
            first = self.written[place.key] if is_whole and number == 0 else first
        yield Sleep(self.rng.uniform(*HELD_MS))
        request = range_of(place, CALL_MS)
        seen, _ = yield from self.request(request, deadline_ms=PATIENCE_MS, attempt_ms=CALL_MS)
        ended = yield from self.change(lambda common: EndTransaction(**common, is_commit=is_whole))
        if is_whole and isinstance(seen, PartitionRange) and not isinstance(ended, SmqError | Lost):
            self.ok("hold", o=first, lo=seen.log_start)
        else:
            self.producer = None
            self.conclude_unknown("hold")
