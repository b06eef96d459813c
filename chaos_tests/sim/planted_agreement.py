"""Planted bugs in what all nodes must agree on: the history of epochs, the bytes between nodes, the feature level.

Owns these rows only. `planted` takes them into its list.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

_FRAMES = "smq.replication.net.frames:FrameReader."

AGREEMENT_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="epochs-with-records-dropped",
        rule="20: an epoch leaves the history only if its range is empty or below the log start",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.partitions:_begin_epoch",
                "if len(history) > 1 and history[-1].start == beginning.start:",
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
)
