"""Planted bugs of the lag: how far a group is behind, as nodes calculate it.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_LAG: Final = "smq.coordinator.groups.lag:"
_MONITOR: Final = "smq.coordinator.groups.lag_monitor:LagMonitor."
_LOOK_UPS: Final = "smq.replication.partition.look_ups:"
_READER: Final = "smq.replication.log.reader:LogReader."
_WRONG: Final = frozenset({"wrong-lag"})

LAG_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="lag-to-the-applied-mark",
        rule="lag: it counts to the exact end, not to the mark that a node has applied",
        mutations=(Mutation(_LAG + "lags_of", "end.hwm)", "at.part.hwm)"),),
        scenario="lag",
        anomalies=frozenset({"stale-hwm"}),
        seeds=8,
    ),
    PlantedBug(
        name="lag-age-of-the-newest-record",
        rule="lag: the age is that of the next record, not of the newest one",
        mutations=(
            Mutation(
                _LOOK_UPS + "_measure",
                "bytes_max = 1  #",
                "at, bytes_max = Offset(max(at, end - 1)), 1  #",
            ),
        ),
        scenario="lag",
        anomalies=_WRONG,
        seeds=20,
    ),
    PlantedBug(
        name="lag-age-of-a-removed-record",
        rule="lag: the age is that of a record which is still there",
        mutations=(
            Mutation(
                _LOOK_UPS + "_measure",
                "_first_record(stored.batch, header, Offset(max(at, stored.base)))",
                "Offset(max(at, stored.base))",
            ),
        ),
        scenario="lag+compaction",
        anomalies=_WRONG,
        seeds=20,
    ),
    PlantedBug(
        name="lag-kept-although-deleted",
        rule="lag: the metrics measure again what retention has shortened",
        mutations=(
            Mutation(
                _MONITOR + "measure_all",
                "known[:2] == (first, end)",
                "known[0] <= first < known[1] == end",
            ),
        ),
        scenario="lag",
        anomalies=_WRONG,
        seeds=20,
    ),
    PlantedBug(
        name="lag-counts-removed-records",
        rule="lag: records are what can still be read; where compaction has been, their number is not known",
        mutations=(Mutation(_LAG + "counted", " if first >= min(at.part.compacted_end, end) else None", ""),),
        scenario="lag+compaction",
        anomalies=_WRONG,
        seeds=20,
    ),
    PlantedBug(
        name="lag-bytes-from-before-a-compaction",
        rule="lag: bytes are not counted from a checkpoint below the end of what is compacted",
        mutations=(
            Mutation(
                _READER + "_checkpoint_from",
                "max(start, self._base.end + 1, self._compacted_end)",
                "max(start, self._base.end + 1)",
            ),
        ),
        scenario="lag+compaction",
        anomalies=_WRONG,
        seeds=60,
    ),
)
