"""Transactional producers of a group, and what their coordinator decides.

Owns both of Kafka's protocols as a client and its coordinator follow them: in the first an epoch has many transactions,
in the second the end of each begins the next epoch. The decisions are entries of Raft, without a lag of the
coordinator's own. It must never judge: `producer_truth` does.
"""

from abc import abstractmethod
from typing import Final

from chaos_tests.sim.partition.clients import Clients, IdempotentProducer
from chaos_tests.sim.partition.producer_truth import Transaction
from smq.raft_state.commands import (
    AddToTransaction,
    Command,
    EndTransaction,
    InitTransactions,
    Joining,
    JoinTransactions,
    TransactionChange,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.machine import Machine
from smq.raft_state.replies import ProducerIdAllocated, Rejected, Reply, Results
from smq.raft_state.state import TransactionOutcome, TransactionPhase, TransactionState

TIMEOUT_MS: Final = 900_000
FIRST_TRANSACTIONAL: Final = 11  # producers below this number have no transactions
FIRST_ID: Final = 1_000_000  # of those: beyond the ids that Raft gives to the others


class TransactionalProducer(IdempotentProducer):
    def __init__(self, name: str) -> None:
        super().__init__(-1)
        self.name = name
        self.ended: list[Transaction] = []  # not yet complete
        self.lacks_epoch = True

    @property
    def may_number(self) -> bool:
        return self.transaction is not None and super().may_number

    def restart(self, reply: ProducerIdAllocated) -> None:
        """With the next epoch: whatever is not acknowledged is given up."""
        self.producer_id, self.epoch = reply.producer_id, reply.producer_epoch
        self.next_sequence = self.sent = 0
        self.unacked.clear()
        self.lacks_epoch = False


class Transactions(Clients):
    head: Machine

    @abstractmethod
    def append(self, command: Command) -> Reply: ...

    def new_producer(self, producer: int) -> IdempotentProducer:
        if producer < FIRST_TRANSACTIONAL:
            return IdempotentProducer(FIRST_ID + producer)
        return TransactionalProducer(f"p{producer}")

    def begin(self, producer: int, is_second: bool) -> None:
        """A transaction with the partition in it, unless the producer has one, or the markers of the last are due."""
        found = self._transactional(producer)
        if found.transaction is not None:
            return
        if found.lacks_epoch:
            reply = self._change(InitTransactions, found, timeout_ms=TIMEOUT_MS)
            if not isinstance(reply, ProducerIdAllocated):
                return
            found.restart(reply)
        producer_id, epoch = ProducerId(found.producer_id), ProducerEpoch(found.epoch)
        if is_second:
            reply = self.append(JoinTransactions(items=(Joining(self.pid, producer_id, epoch),)))
        else:
            reply = self._change(
                AddToTransaction, found, producer_id=producer_id, producer_epoch=epoch, partitions=(self.pid,)
            )
        if isinstance(reply, Rejected) or (isinstance(reply, Results) and isinstance(reply.items[0], Rejected)):
            return
        found.transaction = Transaction(producer_id)
        self.truth.producers.transactions.append(found.transaction)

    def end(self, producer: int, is_commit: bool, is_second: bool) -> None:
        """A commit only if all is acknowledged."""
        found = self._transactional(producer)
        if found.transaction is None or (is_commit and found.unacked):
            return
        reply = self._change(
            EndTransaction,
            found,
            producer_id=ProducerId(found.producer_id),
            producer_epoch=ProducerEpoch(found.epoch),
            is_commit=is_commit,
            is_bumping=is_second,
        )
        assert not isinstance(reply, Rejected), reply
        if isinstance(reply, ProducerIdAllocated):
            found.restart(reply)

    def replace(self, producer: int) -> None:
        """Another one starts under its transactional id, and aborts what is open."""
        found = self._transactional(producer)
        if found.transaction is not None:
            state = self._state_of(found)
            self._change(
                EndTransaction,
                found,
                producer_id=state.producer_id,
                producer_epoch=state.producer_epoch,
                is_commit=False,
                is_fencing=True,
            )
        found.unacked.clear()
        found.lacks_epoch = True

    def note_transactions(self) -> None:
        """After every entry of Raft. The clock may have ended some, too."""
        for producer in self.producers.values():
            if not isinstance(producer, TransactionalProducer) or producer.name not in self.head.state.transactions:
                continue
            state = self._state_of(producer)
            if producer.transaction is not None and state.phase is not TransactionPhase.ONGOING:
                self._end_as(producer, state.outcome)
            if state.phase is TransactionPhase.EMPTY:
                for transaction in producer.ended:
                    self.truth.producers.complete(transaction)
                producer.ended.clear()

    def has_ended_all(self) -> bool:
        """Every producer has its answers, and no transaction is open any more, in the logs either. A producer that has
        expired may have lost its place, and one that repeats a batch after that time may be refused."""
        is_waiting = False
        for number, producer in self.producers.items():
            is_lost = producer.producer_id in self.truth.producers.forgotten
            is_lost |= any(self.truth.is_forgotten(numbered.record, self.part) for numbered in producer.unacked)
            if producer.transaction is not None:
                self.end(number, is_commit=not is_lost, is_second=False)
            is_waiting |= producer.transaction is not None or (bool(producer.unacked) and not is_lost)
        return not is_waiting and not self.head.state.endings

    def _end_as(self, producer: TransactionalProducer, outcome: TransactionOutcome) -> None:
        assert producer.transaction is not None
        producer.transaction.is_committed = outcome is TransactionOutcome.COMMITTED
        producer.ended.append(producer.transaction)
        producer.transaction = None
        state = self._state_of(producer)
        is_fenced = (state.producer_id, state.producer_epoch) != (producer.producer_id, producer.epoch)
        if producer.unacked or is_fenced:  # some of its sequences may never come
            producer.unacked.clear()
            producer.lacks_epoch = True

    def _state_of(self, producer: TransactionalProducer) -> TransactionState:
        return self.head.state.transactions[producer.name]

    def _transactional(self, producer: int) -> TransactionalProducer:
        found = self._producer(producer)
        assert isinstance(found, TransactionalProducer)
        return found

    def _change(self, kind: type[TransactionChange], producer: TransactionalProducer, **fields: object) -> Reply:
        state, name = self.head.state, producer.name
        known = state.transactions.get(name)
        return self.append(
            kind(
                transactional_id=name,
                coordinator_epoch=coordinator_of(state, name).epoch,
                changes_seen=known.changes if known is not None else state.transaction_changes_floor,
                **fields,  # type: ignore[arg-type]  # the fields of `kind`
            )
        )
