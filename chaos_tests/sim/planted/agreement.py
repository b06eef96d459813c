"""Planted bugs in what all nodes must agree on: the history of epochs, the bytes between nodes, the feature level.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

_FRAMES = "smq.replication.net.frames:FrameReader."

AGREEMENT_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="epochs-with-records-dropped",
        rule="20: an epoch leaves the history only if its range is empty or below the log start",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.elections:_begin_epoch",
                "while len(history) > 1 and history[-1].start >= beginning.start:",
                "if len(history) > 1:",
            ),
        ),
        scenario="churn",
        anomalies=frozenset({"lost-write", "no-progress", "offset-reuse", "process-died"}),
        seeds=8,
    ),
    PlantedBug(
        name="damaged-frames-taken",
        rule="every frame between nodes carries a CRC, and one that fails it ends its session",
        mutations=(
            Mutation(_FRAMES + "_checked", "if crc32c(payload) != self._crc:", "if False:"),
            Mutation(_FRAMES + "_fields", "if crc32c(bytes(head[: _FIELDS.size])) != crc:", "if False:"),
        ),
        scenario="damaged_links",
        anomalies=frozenset({"digest-mismatch", "log-mismatch", "no-progress", "process-died"}),
        seeds=10,
    ),
    PlantedBug(
        name="level-raised-too-early",
        rule="the feature level rises only once every registered node knows it",
        mutations=(
            Mutation("smq.raft_state.handlers.nodes:raise_feature_level", "if behind:", "if False:"),
            Mutation("smq.replication.membership.controller:Controller._raise_level", "level = min(", "level = max("),
        ),
        scenario="upgrades",
        anomalies=frozenset({"stranded-node"}),
        seeds=10,
    ),
    PlantedBug(
        name="newer-command-proposed-too-early",
        rule="a command is proposed only once the cluster is at the feature level that introduced it",
        mutations=(
            Mutation(
                "smq.replication.proposer:Proposer._encoded",
                "encode_command(command, state.feature_level)",
                "encode_command(command, self._known_level)",
            ),
        ),
        scenario="upgrades",
        anomalies=frozenset({"stranded-node"}),
        seeds=10,
    ),
    PlantedBug(
        name="newer-setting-taken-too-early",
        rule="a setting exists only once the cluster is at the feature level that introduced it",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.cluster_config:_check_key",
                "known_at(CLUSTER_CONFIG, level)",
                "CLUSTER_CONFIG",
            ),
        ),
        scenario="upgrades",
        anomalies=frozenset({"digest-mismatch"}),
        seeds=10,
    ),
    PlantedBug(
        name="unknown-command-ends-the-process",
        rule="a node that meets what a newer smq wrote waits for its upgrade, and does not flap",
        mutations=(
            Mutation(
                "smq.replication.node:Node._on_engine_stopped", "if isinstance(error, UpgradeNeeded):", "if False:"
            ),
        ),
        scenario="upgrades",
        anomalies=frozenset({"process-died"}),
        seeds=20,
    ),
)
