"""Planted bugs that a node's own watch must see: each proves that one kind of anomaly is noted where it happens.

Owns these rows only. Some are bugs of other modules, which the judges find in their own way: here only the watch
counts. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug
from chaos_tests.sim.planted.one_round import EPOCH_STARTS_AT_THE_MARK
from chaos_tests.sim.planted.replication import NO_INCARNATION_CHECK, SNAPSHOT_FORGETS_COMMITS

_HANDLERS = "smq.raft_state.handlers."

WATCH_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="watched-epoch-starts-at-the-mark",
        rule="watch: an epoch starts at or above what a process had known to be committed",
        mutations=EPOCH_STARTS_AT_THE_MARK,
        scenario="seals",
        anomalies=frozenset({"watched-hwm-back"}),
        seeds=20,
    ),
    PlantedBug(
        name="watched-log-start-as-requested",
        rule="watch: a log start never goes back",
        mutations=(
            Mutation(
                _HANDLERS + "partitions:advance_log_start", "if command.offset <= partition.log_start:", "if False:"
            ),
        ),
        scenario="log_start",
        anomalies=frozenset({"watched-log-start-back"}),
        seeds=20,
    ),
    PlantedBug(
        name="watched-open-transactions-ignored",
        rule="watch: a last stable offset never goes back",
        mutations=(
            Mutation(
                "smq.replication.log.producers:ProducerTable.stable_end",
                "for first in self._open.values():",
                "for first in ():",
            ),
        ),
        scenario="transactions",
        anomalies=frozenset({"watched-lso-back"}),
        seeds=20,
    ),
    PlantedBug(
        name="watched-commit-of-the-last-record-read",
        rule="watch: a group's committed offset is that of its last commit",
        mutations=(
            Mutation(_HANDLERS + "groups:_commit_items", "offset=item.offset", "offset=max(item.offset - 1, 0)"),
        ),
        scenario="groups",
        anomalies=frozenset({"watched-commit-changed"}),
        seeds=20,
    ),
    PlantedBug(
        name="watched-snapshot-forgets-commits",
        rule="watch: nodes that have applied the same entries have the same state",
        mutations=SNAPSHOT_FORGETS_COMMITS,
        scenario="snapshots",
        anomalies=frozenset({"watched-state-differs"}),
        seeds=20,
    ),
    PlantedBug(
        name="watched-no-incarnation-check",
        rule="watch: where a follower's log ends, its leader's has the same batch",
        mutations=NO_INCARNATION_CHECK,
        scenario="quick_restarts",
        anomalies=frozenset({"watched-log-differs"}),
        seeds=40,
    ),
)
