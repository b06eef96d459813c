"""Planted bugs of when a partition forgets its producers.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

PRODUCER_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="oldest-producer-evicted",
        rule="P7: a partition forgets no producer by their number",
        mutations=(
            Mutation(
                "smq.replication.log.producers:ProducerTable.note",
                "self._changed.add(producer_id)",
                "self._changed.add(producer_id)\n"
                "    while len(self._entries) > 8:\n"
                "        gone = next(iter(self._entries))\n"
                "        self.size_bytes -= len(self._entries.pop(gone))\n"
                "        self._changed.discard(gone)",
            ),
        ),
        scenario="producers",
        anomalies=frozenset({"duplicate-sequence"}),
        seeds=8,
    ),
    PlantedBug(
        name="producers-forgotten-with-their-records",
        rule="P7: the marks of producers wait for one expiration",
        mutations=(Mutation("smq.raft_state.handlers.expiry:_move_marks", "marks[0].clock_ms <= horizon_ms", "True"),),
        scenario="producers",
        anomalies=frozenset({"duplicate-sequence"}),
        seeds=40,
    ),
)
