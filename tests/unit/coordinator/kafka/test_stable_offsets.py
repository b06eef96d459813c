"""OffsetFetch with require_stable, while the transaction that has staged the group's offset ends."""

import asyncio
from typing import Any

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.handlers import HANDLERS
from smq.raft_state.ids import LogIndex, Offset, PartitionId, ProducerEpoch, ProducerId
from smq.raft_state.state import CommittedOffset, TransactionPhase, TransactionState
from smq.replication.api import DoneFn
from tests.unit.coordinator.kafka.test_lagging_node import gateway_of
from tests.unit.coordinator.lagging import GROUP, TOPIC, TOPIC_ID, LaggingNode, state_with

BEFORE, AFTER = (CommittedOffset(offset=Offset(n), metadata="", committed_ms=0) for n in (1, 2))


class EndingNode(LaggingNode):
    """The transaction ends after a look-up has been answered, and before its caller goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.state = state_with((TOPIC, TOPIC_ID))
        self.pid: PartitionId = self.state.topics[TOPIC].partitions[0].pid
        self.state.groups[GROUP].offsets[self.pid] = BEFORE
        self.state.transactions["x"] = TransactionState(
            transactional_id="x",
            producer_id=ProducerId(1),
            producer_epoch=ProducerEpoch(0),
            timeout_ms=1_000,
            phase=TransactionPhase.ONGOING,
            offsets={GROUP: {self.pid: AFTER}},
        )

    def _end(self) -> None:
        self.state.transactions["x"].offsets.clear()
        self.state.groups[GROUP].offsets[self.pid] = AFTER

    def barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        done(LogIndex(1))
        self._end()

    def fetch_offsets(self, _group: str, _pids: object, _timeout_ms: int, done: DoneFn[dict[Any, Any]]) -> None:
        done(dict(self.state.groups[GROUP].offsets))
        self._end()


def test_an_offset_that_a_transaction_has_just_replaced_is_never_called_stable() -> None:
    """A member that began there would process again what the transaction has processed."""
    for topics in ([{"name": TOPIC, "topic_id": b"", "partition_indexes": [0]}], None):
        request: Struct = {"groups": [{"group_id": "g", "topics": topics}], "require_stable": True}

        async def ask(request: Struct = request) -> Struct:
            return await HANDLERS[ApiKey.OFFSET_FETCH](gateway_of(EndingNode()), 9, request)

        answer = asyncio.run(ask())
        (group,) = answer["groups"]
        (topic,) = group["topics"]
        (partition,) = topic["partitions"]
        assert partition["committed_offset"] == AFTER.offset
