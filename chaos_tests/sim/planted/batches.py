"""Planted bugs of CommitBatch.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_BATCHES: Final = "smq.raft_state.handlers.batches:"

BATCH_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="last-batch-not-compared",
        rule="31: a batch that is not newer than the app's last is dropped",
        mutations=(
            Mutation(
                _BATCHES + "commit_batch", "if app is not None and command.batch_id <= app.batch_id:", "if False:"
            ),
        ),
        scenario="batches",
        anomalies=frozenset({"repeated-batch"}),
        seeds=4,
    ),
    PlantedBug(
        name="batch-without-its-lost-transactions",
        rule="31: a batch commits all of its transactions, or none",
        mutations=(
            Mutation(
                _BATCHES + "commit_batch",
                "staged = [_find_staged(state, item) for item in command.transactions]",
                "staged = [f for item in command.transactions if (f := _still_staged(state, item)) is not None]",
            ),
        ),
        scenario="batches",
        anomalies=frozenset({"torn-batch", "lost-batch"}),
        seeds=8,
    ),
)
