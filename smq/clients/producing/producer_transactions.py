"""The transactions of one producer: their life at the coordinator, and what the producer may do when.

Owns the producer's id and epoch under its transactional id, and the phases of a transaction. The `publisher` adds each
partition before its first batch goes out. It must never send a record. Only `producer` and `publisher` import it.
"""

import asyncio
import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from smq.clients.admin import offset_items
from smq.clients.arguments import check_name
from smq.clients.channels import NodeStubs
from smq.clients.cluster import CallFn, ClusterClient, T
from smq.clients.errors import build
from smq.clients.pb import smq_pb2 as pb
from smq.clients.producing.partition_queue import ProducerIdentity
from smq.clients.types import CommittedOffset, GroupMembership, TopicPartition, member_message
from smq.raft_state.errors import ErrorCode, InvalidTransactionState, ProducerFenced, SmqError

TRANSACTION_TIMEOUT_MS: Final = 60_000.0  # Kafka's producers' default
CLOSE_TIMEOUT_S: Final = 2.0  # for the abort of a transaction that close() finds open: its time-out does it, too


class Phase(enum.Enum):
    NONE = "no transaction is open"
    OPEN = "a transaction is open"
    COMMITTING = "the transaction is being committed"  # also after a commit() that has failed without a known outcome
    ABORTING = "the transaction is being aborted"  # also after an abort() that has failed
    FAILED = "the transaction has failed"  # a record of it was not stored: it can only be aborted


class Transactions:
    def __init__(
        self, cluster: ClusterClient, transactional_id: str, transaction_timeout_ms: float, call_timeout_ms: float
    ) -> None:
        self.id = transactional_id
        self.phase = Phase.NONE
        self.failure: SmqError | None = None
        self.identity: ProducerIdentity | None = None
        self.number = 0  # of the transaction, or of the last one
        self.deciding = asyncio.Lock()  # one call at a time asks for a decision, and for the epoch after it
        self._under_way: set[asyncio.Future[None]] = set()  # one for each call of `taking`
        self._cluster = cluster
        self._transaction_timeout_ms = int(transaction_timeout_ms)
        self._call_timeout_ms = call_timeout_ms
        self._has_begun = False  # at the coordinator: something has been added, or may have been
        self._is_commit_tried = False
        self._is_decided = False
        self._committed = 0  # the number of the last transaction that was committed

    # ---------------------------------------------------------------------------------------------------- phases
    def begin(self) -> None:
        if self.phase is not Phase.NONE:
            raise self._wrong_phase()
        self.phase = Phase.OPEN
        self.number += 1

    def begin_commit(self) -> int:
        """From now on it takes no new record; those under way are part of it. Returns its number.
        INVALID_TRANSACTION_STATE if there is none, or if it is being aborted: records of it may be gone."""
        self._check_begun()
        if self.phase is Phase.ABORTING:
            raise self._wrong_phase()
        if self.phase is Phase.OPEN:
            self.phase = Phase.COMMITTING
        return self.number

    def begin_abort(self) -> int:
        """From now on it takes no record, not even those under way. Returns its number.
        INVALID_TRANSACTION_STATE if there is none."""
        self._check_begun()
        self.phase = Phase.ABORTING
        return self.number

    def check_open(self, number: int | None = None) -> None:
        """INVALID_TRANSACTION_STATE unless there is a transaction that may take more. A commit does not keep a call
        that is under way, which gives its transaction's `number`, from taking the rest."""
        if number is not None:
            self.check_same(number)
        if self.phase is not Phase.OPEN and (number is None or self.phase is not Phase.COMMITTING):
            raise self._wrong_phase()

    def check_same(self, number: int) -> None:
        """INVALID_TRANSACTION_STATE unless this is still the transaction with that number, and nothing aborts it."""
        if self.has_ended(number) or self.phase is Phase.ABORTING:
            raise SmqError(ErrorCode.INVALID_TRANSACTION_STATE, "the transaction was ended by another call meanwhile")

    def has_ended(self, number: int) -> bool:
        return number != self.number or self.phase is Phase.NONE

    def has_committed(self, number: int) -> bool:
        """Whether this transaction was committed. Only the last one that was is known, and that is enough: a call that
        has waited for `deciding` gets it before the next transaction can end."""
        return number == self._committed

    @contextlib.contextmanager
    def taking(self) -> Iterator[int]:
        """Around a call that takes its time to add to the open transaction: commit() waits for its end. Gives the
        transaction's number."""
        self.check_open()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        try:
            yield self.number
        finally:
            self._under_way.discard(ended)
            ended.set_result(None)

    async def all_taken(self) -> None:
        """Waits for the calls that were under way when the commit began."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    def fail(self, error: SmqError) -> None:
        """A record of the transaction is not stored, or that is not known."""
        if self.phase in (Phase.OPEN, Phase.COMMITTING):
            self.phase, self.failure = Phase.FAILED, error

    def _check_begun(self) -> None:
        if self.phase is Phase.NONE:
            raise self._wrong_phase()

    def _wrong_phase(self) -> SmqError:
        advice = {
            Phase.NONE: "begin one first",
            Phase.OPEN: "commit or abort it before you begin another",
            Phase.COMMITTING: "wait for commit() and begin another; if it has failed, call commit() or abort() again",
            Phase.ABORTING: "wait for abort() and begin another; if it has failed, call it again",
            Phase.FAILED: f"abort it ({self.failure})",
        }
        return SmqError(ErrorCode.INVALID_TRANSACTION_STATE, f"{self.phase.value}: {advice[self.phase]}")

    # ----------------------------------------------------------------------------------------------------- calls
    async def start(self) -> None:
        """The next epoch of this producer, or its first one, which fences every other producer of the id."""
        before = self.identity

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.StartProducerResponse:
            request = build(
                pb.StartProducerRequest,
                transactional_id=self.id,
                transaction_timeout_ms=self._transaction_timeout_ms,
                producer_id=None if before is None else before.producer_id,
                producer_epoch=None if before is None else before.producer_epoch,
                timeout_ms=node_ms,
            )
            return await node.transactions.StartProducer(request, timeout=call_s)

        found = await self._call(run)
        self.identity = ProducerIdentity(producer_id=found.producer_id, producer_epoch=found.producer_epoch)
        self._ended()

    async def add(self, partitions: Iterable[TopicPartition] = (), groups: Iterable[str] = ()) -> ProducerIdentity:
        """Before the first batch to a partition, and the first offsets of a group. The identity that may now use
        them. INVALID_TRANSACTION_STATE if there is no transaction: the coordinator would begin one. Also in an abort,
        whose new epoch would fence this call."""
        if self.phase in (Phase.NONE, Phase.ABORTING):
            raise self._wrong_phase()
        identity = self._known()
        places = [build(pb.TopicPartition, topic=topic, partition=partition) for topic, partition in partitions]
        names = list(groups)

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.AddToTransactionRequest,
                transactional_id=self.id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                partitions=places,
                groups=names,
                timeout_ms=node_ms,
            )
            await node.transactions.AddToTransaction(request, timeout=call_s)

        self._has_begun = True
        await self._call(run)
        return identity

    async def stage_offsets(
        self, group: str | GroupMembership, offsets: Mapping[TopicPartition, int | CommittedOffset]
    ) -> None:
        membership = group if isinstance(group, GroupMembership) else GroupMembership(group=group)
        check_name("group", membership.group)
        items = offset_items(offsets)
        number = self.number

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.StageOffsetsRequest,
                transactional_id=self.id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                group=membership.group,
                offsets=items,
                timeout_ms=node_ms,
                member=member_message(membership),
            )
            await node.transactions.StageOffsets(request, timeout=call_s)

        try:
            identity = await self.add(groups=[membership.group])
            await self._call(run)
        except SmqError as e:
            if number == self.number:
                self.fail(e)
            raise

    async def commit(self) -> None:
        """After an error without a known outcome it may be called again."""
        self._is_commit_tried = True
        await self._decide(is_commit=True)
        self._committed = self.number
        self._ended()

    async def abort(self) -> None:
        """Aborts it, unless a commit before, without an answer, `has_committed` it. Then the next epoch, in which no
        batch of it that may still be under way can come any more. After an error or a cancellation nothing but abort()
        is allowed: it goes on with what is missing."""
        try:
            await self.decide_abort()
        except ProducerFenced:
            pass  # by its time-out, which has aborted it; or by another producer, as start() says
        except SmqError:
            if self._is_commit_tried:
                raise  # in the next epoch the coordinator could no longer say how it ended
            # otherwise start() aborts it
        await self.start()

    async def decide_abort(self) -> None:
        """The first half of `abort`."""
        if self._is_decided:
            return
        try:
            await self._decide(is_commit=False)
        except InvalidTransactionState:  # none is open at the coordinator
            if self._is_commit_tried:
                self._committed = self.number
        self._is_decided = True

    async def _decide(self, *, is_commit: bool) -> None:
        """Nothing is asked if nothing has been added."""
        if not self._has_begun:
            return
        identity = self._known()

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> None:
            request = build(
                pb.EndTransactionRequest,
                transactional_id=self.id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                commit=is_commit,
                timeout_ms=node_ms,
            )
            await node.transactions.EndTransaction(request, timeout=call_s)

        await self._call(run)

    def _ended(self) -> None:
        self.phase, self.failure = Phase.NONE, None
        self._has_begun = self._is_commit_tried = self._is_decided = False

    def _known(self) -> ProducerIdentity:
        if self.identity is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the producer is not started: await start() first")
        return self.identity

    async def _call(self, run: CallFn[T]) -> T:
        """At the coordinator, which any other node names."""
        return await self._cluster.call(run, timeout_ms=self._call_timeout_ms)
