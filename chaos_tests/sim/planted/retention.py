"""Planted bugs of what topics retain.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_EARLY: Final = frozenset({"early-deletion"})

RETENTION_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="retention-keeps-too-few",
        rule="retention: the batches after a deleted one hold as much as is to be kept",
        mutations=(
            Mutation(
                "smq.replication.log.reader:LogReader.retained_start",
                "end - info.end >= limits.records",
                "end - info.base >= limits.records",
            ),
        ),
        scenario="retention",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-counts-what-is-not-committed",
        rule="14: only committed records count for what is kept",
        mutations=(
            Mutation(
                "smq.replication.partition.look_ups:LookUps.retained_start",
                "end = replica.part.hwm",
                "end = replica.log.appended_end",
            ),
        ),
        scenario="retention",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-counts-bytes-that-are-not-committed",
        rule="14: only committed bytes count for what is kept",
        mutations=(
            Mutation(
                "smq.replication.log.reader:LogReader.retained_start",
                " - self.backlog_bytes(max(end, start), self.appended_end)",
                "",
            ),
        ),
        scenario="retention_bytes",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-passes-open-transactions",
        rule="14: retention deletes nothing at or above the last stable offset",
        mutations=(
            Mutation(
                "smq.replication.partition.look_ups:LookUps.retained_start", "min(end, replica.stable_end)", "end"
            ),
        ),
        scenario="retention_bytes",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-by-a-nodes-own-clock",
        rule="retention: the replicated clock decides how old a record is",
        mutations=(
            Mutation(
                "smq.replication.partition.retention:Retainer._examine_next",
                "self._host.state.expiry_clock_ms",
                "self._host.clock.wall_ns() // 1_000_000",
            ),
        ),
        scenario="retention_age",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-by-append-time",
        rule="retention: a record ages by its create time, whatever the leader's clock says",
        mutations=(
            Mutation(
                "smq.replication.log.reader:LogReader.retained_start", "if info.max_timestamp_ms >= 0", "if False"
            ),
        ),
        scenario="retention_age",
        anomalies=_EARLY,
        seeds=8,
    ),
    PlantedBug(
        name="retention-deletes-nothing",
        rule="retention: what is not to be kept goes",
        mutations=(
            Mutation(
                "smq.replication.partition.retention:Retainer.visit",
                "if _may_be_exceeded(replica, limits):",
                "if False:",
            ),
        ),
        scenario="retention",
        anomalies=frozenset({"late-deletion"}),
        seeds=8,
    ),
    PlantedBug(
        name="retention-mixes-its-partitions",
        rule="14: one command moves many log starts, each by its own item",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.partitions:apply_retention",
                "_move_log_start(partition, item.offset)",
                "_move_log_start(partition, max(i.offset for i in command.items if i.offset <= partition.hwm))",
            ),
        ),
        scenario="retention",
        anomalies=_EARLY,
        seeds=8,
    ),
)
