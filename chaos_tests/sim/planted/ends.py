"""Planted bugs of where partitions end: which node says it, and after what (rules 13 and 25).

Owns these rows only. `catalogue` alone imports it. The last two show if leaders commit before Raft knows;
otherwise every node has the same high water mark after a read index.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

_ENDS = "smq.replication.partition.ends:"
_STALE = frozenset({"stale-hwm", "false-out-of-range", "wrong-time-offset"})

END_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="latest-without-barrier",
        rule="25: the leader says where a partition ends after a read index that began after the question",
        mutations=(
            Mutation(
                _ENDS + "ExactEnds._question",
                "self._barriers.wait(wait_ms, partial(self._on_own_barrier, number))",
                "self._on_own_barrier(number, LogIndex(0))",
            ),
            Mutation(
                _ENDS + "ExactEnds.on_query",
                "self._barriers.wait(min(query.wait_ms, QUERY_MS_MAX), reply)",
                "reply(LogIndex(0))",
            ),
        ),
        scenario="partitions",
        anomalies=_STALE,
        seeds=8,
    ),
    PlantedBug(
        name="out-of-range-without-the-end",
        rule="13: OFFSET_OUT_OF_RANGE only once the leader has said where the log ends",
        mutations=(
            Mutation(
                "smq.replication.partition.reads:Reads._try",
                "self._ask_end(poll)",
                "self._on_end(poll, PartitionEnd(part.epoch, part.leader, part.log_start, *[part.hwm] * 2,"
                " replica.log_end))",
            ),
        ),
        scenario="partitions",
        anomalies=frozenset({"false-out-of-range"}),
        seeds=8,
    ),
    PlantedBug(
        name="end-from-a-follower",
        rule="25: only the leader says where a partition ends, still leading after the read index",
        mutations=(
            Mutation(
                _ENDS + "end_at_leader", "if replica.leading is None or replica.leading != part.epoch:", "if False:"
            ),
            # Any replica is asked.
            Mutation(
                _ENDS + "ExactEnds._node_to_ask",
                "if is_here or part is None else part.leader",
                "if is_here or part is None or self._host.node_id in part.replicas else part.leader",
            ),
        ),
        scenario="rounds",
        anomalies=_STALE,
        seeds=8,
    ),
    PlantedBug(
        name="end-before-the-epoch-is-adopted",
        rule="25: a new leader says where a partition ends once it knows that all before its epoch is committed",
        mutations=(Mutation(_ENDS + "end_at_leader", "if known < part.history[-1].start:", "if False:"),),
        scenario="sealed_restarts",
        anomalies=_STALE,
        seeds=30,
    ),
)
