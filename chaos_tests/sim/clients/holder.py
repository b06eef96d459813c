"""Clients that hold a transaction open in a topic that keeps few records: retention must not pass it.

Owns their topics, which no other client uses. A `hold` operation succeeds only if its transaction was committed in the
end: until then it was open, whatever a clock or a node did, and the log start that its producer saw is judged.
"""

from collections.abc import Callable
from typing import Any, Final

from chaos_tests.sim.clients.base import Known, World, request_range
from chaos_tests.sim.clients.ledger import CALL_MS, CREATED_MS
from chaos_tests.sim.clients.transactional import PATIENCE_MS, TransactionalClient
from chaos_tests.sim.rpc import Lost, Script, Sleep
from smq.raft_state.commands import AddToTransaction, CreateTopic, EndTransaction
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionIndex, TopicId, partition_id
from smq.raft_state.topic_config import RETENTION_RECORDS
from smq.replication.api import NodeApi, PartitionRange

KEPT: Final = 2  # records
BATCHES: Final = 4  # of a transaction: more records than are kept
HELD_MS: Final = (200.0, 900.0)


class Holder(TransactionalClient):
    def __init__(self, world: World, number: int, *, think_ms: float) -> None:
        super().__init__(world, f"holder-{number}", f"held-{number}")
        self.think_ms = think_ms
        self._topic_id = TopicId(self.rng.randbytes(16))
        self._place: Known | None = None

    def run(self) -> Script:
        while not self.world.stopped:
            yield self.think(self.think_ms)
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
            config=((RETENTION_RECORDS, str(KEPT)),),
        )
        result, _ = yield from self.request(
            lambda api, done: api.propose(command, int(CALL_MS), done), deadline_ms=PATIENCE_MS, attempt_ms=CALL_MS
        )
        exists = isinstance(result, SmqError) and result.code is ErrorCode.TOPIC_EXISTS
        if exists or not isinstance(result, SmqError | Lost):
            self._place = Known(self.id, 0, partition_id(self._topic_id, PartitionIndex(0)))

    def _hold(self, place: Known) -> Script:
        self.world.recorder.invoke(self.process, "hold", k=place.key)
        self.written = {}
        added = yield from self.change(lambda common: AddToTransaction(**common, partitions=(place.pid,)))
        is_whole = not isinstance(added, SmqError | Lost)
        first = -1
        for number in range(BATCHES):
            is_whole = is_whole and (yield from self.write(place, self.world.values(1)))
            first = self.written[place.key] if is_whole and number == 0 else first
        yield Sleep(self.rng.uniform(*HELD_MS))

        def request(api: NodeApi, done: Callable[[Any], None]) -> None:
            request_range(api, place.topic, place.index, CALL_MS, done)

        seen, _ = yield from self.request(request, deadline_ms=PATIENCE_MS, attempt_ms=CALL_MS)
        ended = yield from self.change(lambda common: EndTransaction(**common, is_commit=is_whole))
        if is_whole and isinstance(seen, PartitionRange) and not isinstance(ended, SmqError | Lost):
            self.ok("hold", o=first, lo=seen.log_start)
        else:
            self.producer = None
            self.conclude_unknown("hold")
