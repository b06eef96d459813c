"""Planted bugs of partitions that commit by a majority of logs.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug
from chaos_tests.sim.planted.replication import BROKEN

_REPLICA = "smq.replication.partition.replica:Replica."
_SEALS = "smq.raft_state.seals:"
_ELECTIONS = "smq.raft_state.handlers.elections:"

EPOCH_STARTS_AT_THE_MARK = (
    Mutation(
        _ELECTIONS + "elect_leader",
        "start = partition.hwm if partition.two_round else command.end",
        "start = partition.hwm",
    ),
)

ONE_ROUND_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="seal-forgotten-at-once",
        rule="6, 7 and 21: a process that has sealed an epoch neither appends nor acknowledges in it",
        mutations=(
            Mutation(_REPLICA + "_is_out", "self._sealed == self.part.epoch or ", ""),
            Mutation(_REPLICA + "seal", "self._stop_leading()", "pass"),
        ),
        scenario="seals",
        anomalies=BROKEN,
        seeds=15,
    ),
    PlantedBug(
        name="shortest-log-elected",
        rule="11: a candidate has what a majority may have",
        mutations=(
            Mutation(_SEALS + "commit_floor", "known = sorted(ends, reverse=True)\n", "return min(ends)\n"),
            Mutation(
                "smq.replication.membership.controller:Controller._decide",
                "worth = 0 if part.two_round else -1",
                "worth = 0 if part.two_round else 1",
            ),
        ),
        scenario="seals",
        anomalies=BROKEN,
        seeds=15,
    ),
    PlantedBug(
        name="epoch-starts-at-the-mark",
        rule="11: an epoch starts where its leader's log ends, because what is committed may lie beyond the mark",
        mutations=EPOCH_STARTS_AT_THE_MARK,
        scenario="seals",
        anomalies=BROKEN,
        seeds=15,
    ),
)
