"""The ledgers: the topics that only transactors write to, and the readers of what is committed there.

Owns the names and the creation of these topics. `transactor` owns what is written.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.keyed import value_of
from chaos_tests.sim.clients.base import Client, Known, LoopingClient, proposal, range_of
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.commands import CreateTopic
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, PartitionIndex, TopicId, partition_id
from smq.raft_state.topic_config import CLEANUP_POLICY, DELETE_RETENTION_MS, MIN_CLEANABLE_DIRTY_RATIO
from smq.records import decode_batch, parse_header
from smq.replication.api import Fetched, NodeApi, PartitionRange

LEDGER: Final = "ledger"
LEDGER_ID: Final = TopicId(b"ledger, 16 bytes")
PLACES: Final = 2  # partitions of the ledger
CALL_MS: Final = 900.0
CREATED_MS: Final = 1_700_000_000_000
ATTEMPTS_MAX: Final = 20  # of the final read of one replica that fail
RETRY_MS: Final = 100.0


def group_of(transactional_id: str) -> str:
    """The group whose offsets its transactions commit."""
    return f"group-of-{transactional_id}"


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
    result = yield Call(client.any_node(), proposal(command, CALL_MS), CALL_MS * 1.5, CALL_MS)
    exists = isinstance(result, SmqError) and result.code is ErrorCode.TOPIC_EXISTS
    if isinstance(result, SmqError | Lost) and not exists:
        return False
    if not client.world.ledgers:
        nodes = tuple(client.world.nodes)
        client.world.ledgers += [
            Known(LEDGER, n, partition_id(LEDGER_ID, PartitionIndex(n)), replicas=nodes) for n in range(PLACES)
        ]
    return True


class LedgerReader(LoopingClient):
    """Reads what is committed, from any replica, and asks the leader for the last stable offset."""

    def act(self) -> Script:
        if not self.world.ledgers:
            return
        known = self.rng.choice(self.world.ledgers)
        if self.rng.random() < 0.3:
            yield from self.range(known)
        else:
            yield from self.poll(known, self.rng.choice(known.replicas), self.rng.randint(0, known.hwm))

    def range(self, known: Known) -> Script:
        self.world.recorder.invoke(self.process, "tstable", k=known.key)
        result = yield Call(self.any_node(), range_of(known, CALL_MS), CALL_MS * 1.5, CALL_MS)
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
            [record.offset, value_of(record.value, record.headers)]
            for batch in result.batches
            if is_visible(result, batch) and parse_header(batch.data).count
            for record in decode_batch(batch.data)
            if record.offset >= offset
        ]
        following = result.batches[-1].last_offset + 1 if result.batches else offset
        self.ok("tpoll", r=found, next=following, lso=result.lso)
        return following

    def read_all(self) -> Script:
        """Every replica, to its end."""
        for known in self.world.ledgers:
            for node in known.replicas:
                if node in self.world.nodes:
                    yield from self._read_replica(known, node)

    def _read_replica(self, known: Known, node: NodeId) -> Script:
        """A read that fails is made again, as any reader does: a replica may have other work at that moment."""
        at, attempts = 0, 0
        while attempts < ATTEMPTS_MAX:
            following = yield from self.poll(known, node, at, is_final=True)
            if following == at:
                return
            if following is None:
                attempts += 1
                yield Sleep(RETRY_MS)
            else:
                at = following

    def read_offsets(self, ids: list[str]) -> Script:
        for name in ids:

            def request(api: NodeApi, done: Callable[[Any], None], name: str = name) -> None:
                api.fetch_offsets(group_of(name), None, int(CALL_MS), done)

            self.world.recorder.invoke(self.process, "toffset", id=name, g=group_of(name))
            result, unknown = yield from self.request(request, deadline_ms=5_000.0, attempt_ms=CALL_MS)
            found = [committed.offset for committed in result.values()] if isinstance(result, dict) else []
            self.conclude("toffset", result, unknown=unknown, off=found[0] if found else None)
