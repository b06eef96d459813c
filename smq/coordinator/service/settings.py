"""The settings that are in effect at a node: the cluster's, then its node.toml's, then the defaults.

Owns the precedence. Values are read at each use, so a change of the cluster's settings takes effect as soon as the node
has applied it. The ports import it.
"""

import enum
from collections.abc import Mapping

from smq.raft_state.cluster_config import (
    AUTO_CREATE,
    CLUSTER_CONFIG,
    GROUP_INITIAL_DELAY_MS,
    NUM_PARTITIONS,
    REPLICAS_BY_NODES,
    REPLICAS_BY_NODES_MAX,
    REPLICATION_FACTOR,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.limits import MESSAGE_BYTES_CAP
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES


class Source(enum.IntEnum):
    """Where a value comes from, by Kafka's numbers."""

    CLUSTER = 3
    NODE_TOML = 4
    DEFAULT = 5


class Settings:
    """Those of one node; `own` are the ones of its node.toml, `batch_bytes_max` what fits into a request."""

    def __init__(self, own: Mapping[str, str], batch_bytes_max: int = MESSAGE_BYTES_CAP) -> None:
        self._own = dict(own)
        self._batch_bytes_max = batch_bytes_max

    def check_topic(self, config: Mapping[str, str]) -> None:
        """INVALID_CONFIG for batches that no request to this node may hold. What is no number, others refuse."""
        if not self._fits(config):
            message = (
                f"{MAX_MESSAGE_BYTES} is {config[MAX_MESSAGE_BYTES]}, and the requests that this node takes have room "
                f"for {self._batch_bytes_max}: raise request_bytes_max in its node.toml first"
            )
            raise SmqError(ErrorCode.INVALID_CONFIG, message)

    def topics_beyond(self, state: ClusterState) -> list[str]:
        """Those that take larger batches than a request to this node may hold: it took larger ones when they were
        made, or another node made them."""
        return [name for name, topic in state.topics.items() if not self._fits(topic.config)]

    def _fits(self, config: Mapping[str, str]) -> bool:
        wanted = config.get(MAX_MESSAGE_BYTES, "")
        return not wanted.isdecimal() or not self._batch_bytes_max < int(wanted) <= MESSAGE_BYTES_CAP

    def layers(self, state: ClusterState, key: str) -> list[tuple[str, Source]]:
        """All values of a key, the one in effect first."""
        found = [(state.config[key], Source.CLUSTER)] if key in state.config else []
        if key in self._own:
            found.append((self._own[key], Source.NODE_TOML))
        return [*found, (CLUSTER_CONFIG[key].default, Source.DEFAULT)]

    def value(self, state: ClusterState, key: str) -> str:
        return self.layers(state, key)[0][0]

    def num_partitions(self, state: ClusterState) -> int:
        """Of a topic whose creator names no number."""
        return int(self.value(state, NUM_PARTITIONS))

    def replication_factor(self, state: ClusterState) -> int:
        """Of a topic whose creator names no number."""
        return int(replicas_meant(state, self.value(state, REPLICATION_FACTOR)))

    def auto_create(self, state: ClusterState) -> bool:
        """Whether a Kafka client that names an unknown topic creates it."""
        return self.value(state, AUTO_CREATE) == "true"

    def group_initial_delay_ms(self, state: ClusterState) -> int:
        """How long an empty group waits for more members."""
        return int(self.value(state, GROUP_INITIAL_DELAY_MS))


def replicas_meant(state: ClusterState, value: str) -> str:
    """A default replication factor as a number, also if it depends on the number of nodes."""
    return str(min(REPLICAS_BY_NODES_MAX, max(1, len(state.nodes)))) if value == REPLICAS_BY_NODES else value
