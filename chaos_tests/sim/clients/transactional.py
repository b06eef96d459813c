"""What the clients of transactions share: a producer under a transactional id.

Owns the reaction to each answer, as Kafka's clients have it: after an unknown outcome of a batch, a producer begins
again in a new epoch. They write to the ledgers, which no other client uses. `transactor` and `batch_writer` use it.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Known, LoopingClient, Request, World, is_unknown, may_retry
from chaos_tests.sim.clients.ledger import CALL_MS, CREATED_MS
from chaos_tests.sim.rpc import Call, Lost, Sleep
from smq.raft_state.commands import EndTransaction, InitTransactions, TransactionChange
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.state import TransactionPhase
from smq.records import encode_batch
from smq.replication.api import Acks, Produced, ProduceRequest

NODE_MS: Final = 6_000.0  # that a node is given for a change: longer than the client waits
PATIENCE_MS: Final = 6_000.0  # that a client gives one step
TIMEOUT_MS: Final = 4_000  # of a transaction


class TransactionalClient(LoopingClient):
    """A producer of one transactional id, or none yet."""

    def __init__(self, world: World, name: str, transactional_id: str, *, think_ms: float) -> None:
        super().__init__(world, name, think_ms=think_ms)
        self.id = transactional_id
        self.is_temporary = False
        self.is_second = False  # the protocol of this session
        self.producer: tuple[ProducerId, ProducerEpoch] | None = None
        self.sequences: dict[str, int] = {}
        self.written: dict[str, int] = {}  # of the present transaction: where its batches lie
        self.was_unknown = False

    def start(self) -> Any:
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
                transactional_id=self.id,
                coordinator_epoch=api.groups.epoch_of(self.id),
                timeout_ms=TIMEOUT_MS,
                is_temporary=self.is_temporary,
            )
            api.groups.change(command, NODE_MS, done)

        reply = yield from self.at_coordinator(self.id, init)
        if not isinstance(reply, ProducerIdAllocated):
            return False
        self.producer, self.sequences = (reply.producer_id, reply.producer_epoch), {}
        return True

    def change(self, command_of: Callable[[dict[str, Any]], TransactionChange]) -> Any:
        """A Script that returns the reply to a change of this producer's."""
        assert self.producer is not None
        producer_id, epoch = self.producer

        def change(api: Any, done: Callable[[Any], None]) -> None:
            common = {
                "transactional_id": self.id,
                "coordinator_epoch": api.groups.epoch_of(self.id),
                "producer_id": producer_id,
                "producer_epoch": epoch,
            }
            api.groups.change(command_of(common), NODE_MS, done)

        return (yield from self.at_coordinator(self.id, change))

    def at_coordinator(self, subject: str, request: Request) -> Any:
        """A Script that returns the last answer. `_was_unknown` says whether an attempt may have taken effect."""
        until = self.world.now_ms() + PATIENCE_MS
        self.was_unknown = False
        while True:
            node = yield Call(
                self.any_node(), lambda api, done: done(coordinator_of(api.state, subject).node), CALL_MS, CALL_MS
            )
            result: Any = Lost.REFUSED
            if not isinstance(node, SmqError | Lost) and node:
                result = yield Call(node, request, CALL_MS, NODE_MS, is_tied=True)
            if not isinstance(result, SmqError | Lost):
                return result
            self.was_unknown |= is_unknown(result)
            if self.world.now_ms() > until or not (may_retry(result) or is_unknown(result)):
                return result
            yield Sleep(self.rng.uniform(10, 150))

    def batch(self, place: Known, values: list[int]) -> bytes:
        """With the next sequence of the place."""
        assert self.producer is not None
        return encode_batch(
            [self.world.record(value, CREATED_MS) for value in values],
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            base_sequence=self.sequences.get(place.key, 0),
            is_transactional=True,
        )

    def produce(self, place: Known, batch: bytes, *, is_joining: bool) -> Request:
        return lambda api, done: api.produce(
            ProduceRequest(
                place.topic, place.index, batch, Acks.ALL, int(CALL_MS), done, self.id, is_joining=is_joining
            )
        )

    def write(self, place: Known, values: list[int]) -> Any:
        """A Script that returns whether the batch was acknowledged."""
        request = self.produce(place, self.batch(place, values), is_joining=self.is_second)
        until = self.world.now_ms() + PATIENCE_MS
        while True:
            node = place.leader if place.leader is not None and self.rng.random() < 0.95 else self.any_node()
            result = yield Call(node, request, CALL_MS * 1.3, CALL_MS, is_tied=True)
            if isinstance(result, Produced):
                place.leader = node
                self.written[place.key] = result.base_offset
                self.sequences[place.key] = self.sequences.get(place.key, 0) + len(values)
                return True
            is_hint = isinstance(result, SmqError) and result.code is ErrorCode.NOT_LEADER
            place.leader = result.details.leader if is_hint else None
            if self.world.now_ms() > until or not (may_retry(result) or is_unknown(result)):
                return False
            yield Sleep(self.rng.uniform(5, 80))
