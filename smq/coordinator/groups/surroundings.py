"""What all live groups of a node share: node, clock, random source, the queue of changes, the cluster's settings.

Owns the ids of new members. It must never know a group. `coordinator` makes it, and the live groups use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.change_queues import Changes
from smq.coordinator.limits import MEMBER_ID_CHARS_MAX
from smq.raft_state.cluster_config import cluster_value
from smq.raft_state.topic_config import is_external
from smq.replication.api import NodeApi
from smq.replication.ports import Clock, Rng
from smq.replication.runtime.slices import Slices

_MEMBER_ID_BYTES: Final = 16  # random: no member id is ever given twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`initial_delay_ms` is how long an empty group waits for more members. `topics_version` is another number after
    topics have come, gone or grown."""

    node: NodeApi
    clock: Clock
    rng: Rng
    changes: Changes
    slices: Slices
    initial_delay_ms: Callable[[], int]
    topics_version: Callable[[], int]

    def setting(self, key: str) -> int:
        """Of the cluster."""
        return int(cluster_value(self.node.state.config, key))

    def partition_count(self, topic: str) -> int:
        """0 if there is no such topic, or its records are in external storage: Kafka's clients do not see it."""
        known = self.node.state.topics.get(topic)
        return len(known.partitions) if known is not None and not is_external(known.config) else 0

    def new_member_id(self, prefix: str) -> str:
        """Random: a group that ended and was formed again must not give a new member the id of a former one."""
        number = self.rng.randbytes(_MEMBER_ID_BYTES).hex()
        return f"{prefix[: MEMBER_ID_CHARS_MAX - len(number) - 1]}-{number}"
