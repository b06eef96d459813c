"""Batches that arrive for a partition which this node does not know yet: they keep their order.

A batch whose topic was created through another node waits for a read barrier. One that comes later, when this node has
applied the topic, must not overtake it: producers without sequences rely on the order of their connection. So the first
arrival that finds the partition lets in everything that waits for it, in the order of arrival, and then itself. Nothing
waits longer for that. It must never append by itself. The node's requests own it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import TopicId
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import DoneFn
from smq.replication.lookup import Lookup, partition_in, unknown_partition


@dataclass(slots=True, eq=False)
class _Arrival:
    use: Callable[[PartitionState], None]
    fail: DoneFn[Any]


class Arrivals:
    def __init__(self, state: Callable[[], ClusterState], lookup: Lookup) -> None:
        self._state = state
        self._lookup = lookup
        # By topic, as its request names it, and partition. Bounded as the barriers are, and by what connections may
        # have in flight.
        self._waiting: dict[tuple[str | TopicId, int], list[_Arrival]] = {}

    def with_partition(
        self,
        topic: str | TopicId,
        index: int,
        timeout_ms: int,
        fail: DoneFn[Any],
        use: Callable[[PartitionState], None],
    ) -> None:
        """Calls `use` with the partition, after the earlier arrivals for it; or `fail` with why there is none, or why
        it cannot be known in time. `use` must not raise."""
        part = self._lookup.known_partition(topic, index)
        if part is not None:  # the hot path
            if self._waiting:
                self._let_in(part)
            use(part)
            return
        arrival = _Arrival(use, fail)
        self._waiting.setdefault((topic, index), []).append(arrival)
        done = partial(self._on_found, topic, index, arrival)
        self._lookup.find(lambda state: partition_in(state, topic, index), timeout_ms, done)

    def _on_found(
        self, topic: str | TopicId, index: int, arrival: _Arrival, found: PartitionState | SmqError | None
    ) -> None:
        waiting = self._waiting.get((topic, index), [])
        if arrival not in waiting:
            return  # a later one has let it in
        if isinstance(found, PartitionState):
            self._let_in(found)
            return
        waiting.remove(arrival)
        if not waiting:
            del self._waiting[topic, index]
        arrival.fail(found if found is not None else unknown_partition(self._state(), topic, index))

    def _let_in(self, part: PartitionState) -> None:
        for topic in (self._state().topic_names[part.topic_id], part.topic_id):
            for arrival in self._waiting.pop((topic, part.index), ()):
                arrival.use(part)
