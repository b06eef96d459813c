"""Proposes the steps of the replicated clock by which offsets, producers, records and transactions expire.

Owns when a step is due, and the measurement that goes with it: how long ago, by this node's monotonic clock, it has
seen the replicated clock change. The state machine decides how far the clock moves. Only the node imports it.
"""

from typing import Final

from smq.raft_state.cluster_config import offsets_retention_ms, producer_expiration_ms, transactional_id_expiration_ms
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.errors import SmqError
from smq.raft_state.replies import Reply
from smq.raft_state.state import ClusterState, TransactionPhase
from smq.raft_state.topic_config import times_ms
from smq.replication.host import Host

INTERVAL_MS_MAX: Final = 600_000  # nothing has to expire to the minute: retentions are hours and days
INTERVAL_MS_MIN: Final = 1_000
STEPS_PER_RETENTION: Final = 4  # with shorter retentions the clock moves more often
PROPOSAL_MS: Final = 10_000  # a step without an answer by then is measured again

_NS_PER_MS: Final = 1_000_000


class ExpiryClock:
    """Every node measures, and the Raft leader proposes. Two proposers do no harm: the second step is ignored."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._seen_ms = 0
        self._seen_ns = host.clock.monotonic_ns()
        self._is_proposing = False

    def on_beat(self) -> None:
        state, now_ns = self._host.state, self._host.clock.monotonic_ns()
        if state.expiry_clock_ms != self._seen_ms:
            self._seen_ms, self._seen_ns = state.expiry_clock_ms, now_ns
        if self._is_proposing or not self._host.engine.is_leader or not state.cluster_id:
            return
        elapsed_ms = (now_ns - self._seen_ns) // _NS_PER_MS
        if self._seen_ms and elapsed_ms < interval_ms(state):
            return
        self._is_proposing = True
        wall_ms = self._host.clock.wall_ns() // _NS_PER_MS
        command = AdvanceClock(seen_ms=self._seen_ms, elapsed_ms=elapsed_ms, now_ms=wall_ms)
        self._host.propose(command, PROPOSAL_MS, self._on_result)

    def _on_result(self, _result: Reply | SmqError) -> None:
        self._is_proposing = False


def interval_ms(state: ClusterState) -> int:
    """Between two steps: a part of the shortest time after which something expires, or an open transaction ends."""
    expiration_ms = producer_expiration_ms(state.config)
    of_transactions = (
        transaction.timeout_ms
        for transaction in (state.transactions.values() if state.transaction_items else ())
        if transaction.phase is TransactionPhase.ONGOING
    )
    of_topics = (ms for topic in state.topics.values() for ms in times_ms(topic.config))
    offsets_ms = offsets_retention_ms(state.config) or expiration_ms
    of_ids_ms = transactional_id_expiration_ms(state.config) if state.transactions else expiration_ms
    shortest_ms = min(offsets_ms, expiration_ms, of_ids_ms, *of_topics, *of_transactions)
    return min(INTERVAL_MS_MAX, max(INTERVAL_MS_MIN, shortest_ms // STEPS_PER_RETENTION))
