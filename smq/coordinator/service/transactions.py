"""Transactional producers, for every port: the way of their requests to commands.

Owns how a request becomes a command, and that a new producer first aborts what the one before has left open. A change
of a transactional id runs at the id's coordinator, and one that stages offsets of a group at the group's, which knows
its members. The state machine decides, and a repetition of any request is safe. It must never know a wire format.
The ports import it.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.coordinator import NO_MEMBER, GroupCoordinator
from smq.coordinator.groups.member_requests import Identity
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.commands import (
    NO_GENERATION,
    UNSEEN,
    AddToTransaction,
    CommitBatch,
    EndTransaction,
    InitTransactions,
    OffsetCommit,
    StageOffsets,
    TransactionChange,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_PRODUCER, Generation, PartitionId, ProducerEpoch, ProducerId
from smq.raft_state.replies import BatchCommitted, ProducerIdAllocated, Reply
from smq.raft_state.state import ClusterState, TransactionPhase, TransactionState

VISIBLE_S: Final = 5.0  # a leader may have just died
_LOOK_S: Final = 0.005
_NO_EPOCH: Final = ProducerEpoch(-1)
# The transaction that was to be aborted has ended by itself meanwhile, perhaps under a new epoch or id of its producer.
_ENDED: Final = (ErrorCode.INVALID_TRANSACTION_STATE,)
_OVERTAKEN: Final = (*_ENDED, ErrorCode.PRODUCER_FENCED, ErrorCode.UNKNOWN_TRANSACTIONAL_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """A producer as it names itself. Without a producer id it has just started, and takes the place of any other."""

    transactional_id: str
    producer_id: ProducerId = NO_PRODUCER
    producer_epoch: ProducerEpoch = _NO_EPOCH


@dataclass(frozen=True, slots=True)
class Transactions:
    """Every method raises SmqError: NOT_COORDINATOR, which names the coordinator, if this node is not it (only
    `commit_batch` runs anywhere)."""

    calls: NodeCalls
    groups: GroupCoordinator

    async def start(
        self, producer: Producer, transaction_timeout_ms: int, timeout_ms: int, *, is_temporary: bool = False
    ) -> ProducerIdAllocated:
        """The producer's id and epoch from now on. If a transaction was open, it is aborted now, and the answer is
        TRANSACTION_ENDING: the producer asks again until the leaders have written that. A temporary transactional id
        is forgotten once its transaction has ended."""
        name = producer.transactional_id
        open_one = self.calls.node.state.transactions.get(name)
        is_named = producer.producer_id != NO_PRODUCER
        try:
            if open_one is None or open_one.phase is not TransactionPhase.ONGOING:
                return await self._init(producer, transaction_timeout_ms, timeout_ms, is_temporary=is_temporary)
            await self.abort(producer if is_named else producer_of(open_one), timeout_ms, is_replacing=not is_named)
        except SmqError as e:
            if open_one is None or e.code not in (_ENDED if is_named else _OVERTAKEN):
                raise
        raise SmqError(ErrorCode.TRANSACTION_ENDING, f"the open transaction of {name!r} has been aborted just now")

    async def abort(self, producer: Producer, timeout_ms: int, *, is_replacing: bool = False) -> None:
        """Fences the producer, too. Unless another one `is_replacing` it, it may ask for its next epoch."""
        abort = EndTransaction(
            transactional_id=producer.transactional_id,
            coordinator_epoch=self.groups.epoch_of(producer.transactional_id),
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            is_commit=False,
            is_fencing=True,
            is_replacing=is_replacing,
        )
        await self._change(abort, timeout_ms)

    async def _init(
        self, producer: Producer, transaction_timeout_ms: int, timeout_ms: int, *, is_temporary: bool
    ) -> ProducerIdAllocated:
        name = producer.transactional_id
        command = InitTransactions(
            transactional_id=name,
            coordinator_epoch=self.groups.epoch_of(name),
            timeout_ms=transaction_timeout_ms,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            is_temporary=is_temporary,
        )
        reply = await self._change(command, timeout_ms)
        assert isinstance(reply, ProducerIdAllocated)
        return reply

    async def add(
        self,
        producer: Producer,
        timeout_ms: int,
        *,
        partitions: tuple[PartitionId, ...] = (),
        groups: tuple[str, ...] = (),
    ) -> None:
        """The producer is about to write to these partitions, and to stage offsets of these groups: all or none."""
        command = AddToTransaction(
            transactional_id=producer.transactional_id,
            coordinator_epoch=self.groups.epoch_of(producer.transactional_id),
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            partitions=partitions,
            groups=groups,
        )
        await self._change(command, timeout_ms)

    async def end(
        self, producer: Producer, timeout_ms: int, *, is_commit: bool, is_bumping: bool = False
    ) -> ProducerIdAllocated | None:
        """Returns once the decision is made: every reader sees it, sooner or later, and nothing else. With Kafka's
        second protocol, `is_bumping`, it gives the id and epoch that the producer goes on with."""
        command = EndTransaction(
            transactional_id=producer.transactional_id,
            coordinator_epoch=self.groups.epoch_of(producer.transactional_id),
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            is_commit=is_commit,
            is_bumping=is_bumping,
        )
        reply = await self._change(command, timeout_ms)
        return reply if isinstance(reply, ProducerIdAllocated) else None

    async def stage(
        self,
        producer: Producer,
        group: str,
        items: tuple[OffsetCommit, ...],
        timeout_ms: int,
        *,
        who: Identity = NO_MEMBER,
        generation: Generation = NO_GENERATION,
        is_joining: bool = False,
    ) -> None:
        """Offsets of a group that become its own with the transaction, or never. The group has been added, perhaps at
        another node: unless `includes` is true here, wait for a barrier first. If it `is_joining`, this adds it."""
        found = self.calls.node.state.transactions.get(producer.transactional_id)
        command = StageOffsets(
            group=group,
            coordinator_epoch=self.groups.epoch_of(group),
            transactional_id=producer.transactional_id,
            transaction_changes_seen=found.changes if found is not None else UNSEEN,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            generation=generation,
            member_id=who.member_id,
            instance_id=who.instance_id,
            items=items,
            committed_ms=self.groups.wall_ms(),
            is_joining=is_joining,
        )
        await self.calls.change(lambda done: self.groups.stage(command, who, timeout_ms, done), timeout_ms)

    async def commit_batch(self, command: CommitBatch, timeout_ms: int) -> BatchCommitted:
        """At any node: the entry fences itself, by the producers' epochs and by the app's last batch. Answers once
        every read at a leader shows what was committed; that may take longer than the caller waits, and is no error.
        What a replay repeats was committed under transactional ids that it need not know: it waits for all commits."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(timeout_ms / 2_000, VISIBLE_S)
        reply = await self.calls.propose(command, timeout_ms)
        assert isinstance(reply, BatchCommitted)
        ending = [(t.transactional_id, t.producer_epoch) for t in command.transactions]
        if reply.is_replay:
            known = self.calls.node.state.transactions.values()
            ending += [(t.transactional_id, t.producer_epoch) for t in known if t.phase is TransactionPhase.COMMITTING]
        while ending and loop.time() < until:
            ending = [each for each in ending if _is_ending(self.calls.node.state, *each)]
            await asyncio.sleep(_LOOK_S if ending else 0)  # the leaders write the control batches
        return reply

    async def _change(self, command: TransactionChange, timeout_ms: int) -> Reply:
        return await self.calls.change(lambda done: self.groups.change(command, timeout_ms, done), timeout_ms)


def _is_ending(state: ClusterState, transactional_id: str, producer_epoch: ProducerEpoch) -> bool:
    """Whether the transaction is decided, and some log does not yet say so."""
    found = state.transactions.get(transactional_id)
    return found is not None and found.producer_epoch == producer_epoch and found.is_ending


def producer_of(transaction: TransactionState) -> Producer:
    """The present one of its id."""
    return Producer(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
    )


def is_current(state: ClusterState, producer: Producer) -> bool:
    """Whether this is the id's producer, as far as this node knows."""
    found = state.transactions.get(producer.transactional_id)
    return found is not None and found.producer_epoch == producer.producer_epoch


def includes(state: ClusterState, producer: Producer, group: str) -> bool:
    """Whether the group is part of the producer's open transaction, as far as this node knows."""
    return is_current(state, producer) and group in state.transactions[producer.transactional_id].offsets
