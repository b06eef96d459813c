"""Leaving on purpose (SIGTERM): every leadership goes to another node first, and the leadership of Raft last.

Owns the order: partitions, a few at a time, each to the healthy replica that has received the fewest; then the node
fences itself, so that the remaining partitions elect other leaders immediately; then the leadership of Raft. The time
is bounded; a partition that was not handed over fails over as after a kill. It must never touch a log. Only the node
uses it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from smq.raft_state.commands import FenceNode
from smq.raft_state.ids import NodeId
from smq.replication.host import Host
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas

HANDOVERS_MAX: Final = 64  # partitions that hand over together: more would lengthen their common pause
STEP_MS: Final = 5
FENCE_MS_MAX: Final = 500
LINGER_MS: Final = 20  # until the last messages have left


class Drain:
    def __init__(
        self, host: Host, replicas: Replicas, liveness: Liveness, timeout_ms: int, done: Callable[[], None]
    ) -> None:
        self._host = host
        self._replicas = replicas
        self._liveness = liveness
        self._done = done
        self._deadline_ns = host.clock.monotonic_ns() + timeout_ms * 1_000_000
        self._given: Counter[NodeId] = Counter()
        self._raft_until_ns = 0

    def start(self) -> None:
        self._hand_over_partitions()

    def _hand_over_partitions(self) -> None:
        host = self._host
        led = [replica for replica in self._replicas.led() if self._candidates(replica)]
        if not led or host.clock.monotonic_ns() >= self._deadline_ns:
            self._fence()
            return
        slots = HANDOVERS_MAX - sum(replica.is_handing_over for replica in led)
        for replica in led:
            if slots <= 0:
                break
            if not replica.is_handing_over:
                slots -= self._begin(replica)
        host.clock.call_later(STEP_MS, self._hand_over_partitions)

    def _candidates(self, replica: Replica) -> list[NodeId]:
        me = self._host.node_id
        return [node for node in replica.part.replicas if node != me and self._liveness.is_candidate(node)]

    def _begin(self, replica: Replica) -> bool:
        for target in sorted(self._candidates(replica), key=lambda node: self._given[node]):
            if replica.transfer(target):
                self._given[target] += 1
                return True
        return False

    def _fence(self) -> None:
        host = self._host
        if not any(self._liveness.is_candidate(node) for node in host.state.nodes if node != host.node_id):
            self._hand_over_raft()  # no node could take over the rest
            return
        command = FenceNode(node=host.node_id, incarnation=host.incarnation)
        host.propose(command, FENCE_MS_MAX, lambda _reply: self._hand_over_raft())

    def _hand_over_raft(self) -> None:
        host = self._host
        self._raft_until_ns = host.clock.monotonic_ns() + host.config.election_timeout_min_ms * 1_000_000
        host.engine.transfer_leadership(None)
        self._await_raft()

    def _await_raft(self) -> None:
        host = self._host
        if host.engine.is_leader and host.clock.monotonic_ns() < self._raft_until_ns:
            host.clock.call_later(STEP_MS, self._await_raft)
        else:
            host.clock.call_later(LINGER_MS, self._done)
