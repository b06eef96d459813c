"""Feature levels: what a cluster may use before all of its nodes know it, and what a node does not know.

Owns the two errors. A level is a number in the replicated state. It is raised once every registered node knows it, and
never lowered (see `handlers.nodes`). Each row of the command table names the level that introduced it. It must never
hold a level itself. Any module on the node may import it.
"""

from smq.raft_state.binary import CodecError


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
