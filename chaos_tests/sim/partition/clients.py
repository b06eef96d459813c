"""Idempotent and transactional producers of a group, over connections that a schedule may leave and come back to.

Owns what such a producer promises: it numbers its records, sends them in order, and sends each again until it is
acknowledged. A connection goes to one process and keeps the order; requests in one that was left may still arrive. It
must never judge what is stored: `truth` does. Only `group` imports it.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from chaos_tests.sim.partition.producer_truth import Transaction
from chaos_tests.sim.partition.truth import Record
from smq.raft_state.ids import NodeId
from smq.raft_state.replies import ProducerIdAllocated
from smq.records import encode_batch

PRODUCE_MS: Final = 60_000  # longer than a run: only its partition decides about a record
IN_FLIGHT_MAX: Final = 5


@dataclass(eq=False, slots=True)
class Numbered:
    """A record of an idempotent producer, and the batch that it is sent in each time."""

    record: Record
    batch: bytes
    place: int  # among the producer's batches


@dataclass(eq=False, slots=True)
class Connection:
    """To one process of a node. Requests wait in it until they are taken in."""

    node: NodeId
    process: int
    waiting: deque[Numbered] = field(default_factory=deque)

    def is_to(self, node: NodeId, process: int) -> bool:
        return (self.node, self.process) == (node, process)


class IdempotentProducer:
    def __init__(self, producer_id: int) -> None:
        self.producer_id, self.epoch = producer_id, 0
        self.next_sequence = self.batches = 0
        self.unacked: list[Numbered] = []
        self.connections: list[Connection] = []
        self.sent = 0  # of the unacknowledged ones, over the present connection
        self.transaction: Transaction | None = None

    def connect(self, node: NodeId, process: int) -> None:
        """Everything that is not acknowledged is to be sent again."""
        self.connections.append(Connection(node, process))
        self.sent = 0

    @property
    def may_number(self) -> bool:
        """Brokers remember so many batches, so it never goes further beyond one that is not acknowledged."""
        return not self.unacked or self.batches - self.unacked[0].place < IN_FLIGHT_MAX

    def number(self, record: Record, count: int) -> None:
        """A new record, in a batch of `count` copies."""
        batch = encode_batch(
            [record.content] * count,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.next_sequence,
            is_transactional=record.transaction is not None,
        )
        self.next_sequence += count
        self.unacked.append(Numbered(record, batch, self.batches))
        self.batches += 1

    def send(self) -> bool:
        """The next unacknowledged record, over the present connection. False if there is none."""
        if not self.connections or self.sent >= len(self.unacked):
            return False
        self.connections[-1].waiting.append(self.unacked[self.sent])
        self.sent += 1
        return True

    def on_acked(self, connection: Connection, numbered: Numbered) -> None:
        """An answer over a connection that was left is not heard."""
        if connection is self.connections[-1] and numbered in self.unacked:
            at = self.unacked.index(numbered)
            del self.unacked[at]
            self.sent -= at < self.sent

    def on_refused(self, connection: Connection, numbered: Numbered) -> None:
        """It and what follows it are sent again."""
        if connection is self.connections[-1] and numbered in self.unacked:
            self.sent = min(self.sent, self.unacked.index(numbered))


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
