"""Feature levels: what a cluster may use before all of its nodes know it, and what a node does not know.

Owns the two errors, and the check of the settings that a command names. A level is a number in the replicated state. It
is raised once every registered node knows it, and never lowered (see `handlers.nodes`). Each row of the command table,
and each row of a configuration table, names the level that introduced it. It must never hold the level of a cluster
itself. Any module on the node may import it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from smq.raft_state.binary import CodecError
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.raft_state.config_keys import ConfigKey
from smq.raft_state.topic_config import TOPIC_CONFIG

SETTINGS_LEVEL: Final = max(row.since for row in (*CLUSTER_CONFIG.values(), *TOPIC_CONFIG.values()))


class FeatureNotEnabled(CodecError):
    """This smq knows the command, but some node of the cluster may not: it is not proposed yet."""

    def __init__(self, what: str, *, needed: int, level: int) -> None:
        super().__init__(
            f"{what} needs feature level {needed}, and the cluster is at level {level}: it rises once every node runs "
            "an smq that knows it"
        )


class UpgradeNeeded(CodecError):
    """A newer smq wrote this, so the node cannot know what follows from it. It must stop where it is, and wait."""

    def __init__(self, what: str, *, level: int, known: int) -> None:
        super().__init__(f"{what}; this smq knows feature levels up to {known}: run a newer smq on this node")
        self.level = level  # at least


def check_keys(table: Mapping[str, ConfigKey], keys: Iterable[str], level: int) -> None:
    """FeatureNotEnabled for a key that a cluster of this level does not have yet. Unknown keys are not judged."""
    for key in keys:
        row = table.get(key)
        if row is not None and row.since > level:
            raise FeatureNotEnabled(f"the configuration {key}", needed=row.since, level=level)
