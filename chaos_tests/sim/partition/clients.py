"""Idempotent producers of a group, over connections that a schedule may leave and come back to.

Owns what such a producer promises: it numbers its records, sends them in order, and sends each again until it is
acknowledged. A connection goes to one process and keeps the order; requests in one that was left may still arrive. It
must never judge what is stored: `truth` does.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from chaos_tests.sim.partition.member import Member
from chaos_tests.sim.partition.producer_truth import Transaction
from chaos_tests.sim.partition.truth import Record, Truth
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, PartitionId
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import BatchRules
from smq.records import encode_batch
from smq.replication.api import Acks, Produced
from smq.replication.partition.admission import Offer
from smq.replication.partition.send_order import comes_again
from smq.replication.partition.transactional import NotYetKnown

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


class Clients(ABC):
    """Of a group that has these members."""

    pid: PartitionId
    members: dict[NodeId, Member]
    truth: Truth
    records: list[Record]
    producers: dict[int, IdempotentProducer]

    @property
    @abstractmethod
    def part(self) -> PartitionState: ...

    @abstractmethod
    def member(self, node: int) -> Member: ...

    @abstractmethod
    def run(self, ms: float = ...) -> None: ...

    @abstractmethod
    def new_record(self, key: bytes | None, is_tombstone: bool) -> Record: ...

    def connect(self, producer: int, node: int) -> None:
        member = self.member(node)
        if member.is_up:
            self._producer(producer).connect(NodeId(node), member.processes)

    def number(self, producer: int, count: int = 1, key: bytes | None = None, is_tombstone: bool = False) -> None:
        """The producer has one more record to send, unless too many are on their way."""
        found = self._producer(producer)
        if found.may_number:
            record = self.new_record(key, is_tombstone)
            self.records.append(record)
            if found.transaction is not None:
                self.truth.in_transaction(record, found.transaction)
            found.number(record, count)

    def request(self, producer: int, count: int = 1) -> None:
        """The producer's next batches are on their way, over its present connection."""
        for _ in range(count):
            self._producer(producer).send()

    def take_in(self, producer: int, connection: int = -1, count: int = 1) -> None:
        """The next requests of a connection reach the process that it goes to, if that runs."""
        found = self._producer(producer)
        if not -len(found.connections) <= connection < len(found.connections):
            return
        via = found.connections[connection]
        member = self.members[via.node]
        if not member.is_up or not via.is_to(member.node, member.processes):
            via.waiting.clear()
        for _ in range(min(count, len(via.waiting))):
            self._offer(member, found, via, via.waiting.popleft())
        self.run()

    def send_again(self, node: NodeId) -> None:
        """Everything that is not acknowledged, and whatever still waits in connections to it."""
        for number, producer in self.producers.items():
            process = self.members[node].processes
            if producer.unacked and not (producer.connections and producer.connections[-1].is_to(node, process)):
                producer.connect(node, process)
            while producer.send():
                pass
            # What is left behind comes too late for one that has expired: it could take its place.
            is_lost = producer.producer_id in self.truth.producers.forgotten
            for connection in range(-1 if is_lost else -len(producer.connections), 0):
                self.take_in(number, connection, 1_000)

    def _producer(self, producer: int) -> IdempotentProducer:
        return self.producers.setdefault(producer, self.new_producer(producer))

    @abstractmethod
    def new_producer(self, producer: int) -> IdempotentProducer:
        """By its number."""

    def _offer(self, member: Member, producer: IdempotentProducer, via: Connection, numbered: Numbered) -> None:
        replica = member.replica
        try:
            if replica is None:
                raise SmqError(ErrorCode.NOT_LEADER, "it has no replica")
            done = partial(self._on_answer, producer, via, numbered)
            replica.produce(Offer(numbered.batch, BatchRules()), Acks.ALL, PRODUCE_MS, done)
        except SmqError as e:
            if isinstance(e, NotYetKnown) or comes_again(e.code):  # as the node's requests do
                member.replicas.send_order.expect(self.pid, numbered.batch)
            producer.on_refused(via, numbered)

    def _on_answer(
        self, producer: IdempotentProducer, via: Connection, numbered: Numbered, result: Produced | SmqError
    ) -> None:
        self.truth.look()
        if isinstance(result, Produced):
            self.truth.on_acked(numbered.record, result.base_offset)
            producer.on_acked(via, numbered)
        else:
            producer.on_refused(via, numbered)
