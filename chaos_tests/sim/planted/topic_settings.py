"""Planted bugs of what topics ask of their producers' batches, and of the defaults of new topics.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

TOPIC_SETTING_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="converted-batches-overtake",
        rule="batches of one connection keep their order, however long it takes to convert each",
        mutations=(
            Mutation(
                "smq.replication.preparation:Preparation._on_prepared",
                "while entries and entries[0].is_ready:",
                "if entries and entry in entries:",
            ),
            Mutation(
                "smq.replication.preparation:Preparation._on_prepared",
                "first = entries.popleft()",
                "first = entry; entries.remove(entry)",
            ),
        ),
        scenario="converted",
        anomalies=frozenset({"overtaken"}),
        seeds=8,
    ),
    PlantedBug(
        name="append-time-without-the-setting",
        rule="records of a topic with LogAppendTime have the time of their append",
        mutations=(
            Mutation(
                "smq.replication.partition.admission:admitted",
                "ts_ns // 1_000_000)",
                "host.clock.monotonic_ns() // 1_000_000)",
            ),
        ),
        scenario="converted",
        anomalies=frozenset({"process-died"}),
        seeds=8,
    ),
    PlantedBug(
        name="repeated-batch-judged-by-its-age",
        rule="a batch that the log holds is answered as at its first attempt, whatever the clock says now",
        mutations=(
            Mutation(
                "smq.replication.partition.replica:Replica.produce",
                "header, log = validated(offer), self.log",
                "log = self.log; ts = self._host.clock.wall_ns();"
                " header = admitted(self._host, self._owner, self.part, log, [], offer, validated(offer), ts)[1]",
            ),
        ),
        scenario="late_batches",
        anomalies=frozenset({"repeat-refused"}),
        seeds=20,
    ),
    PlantedBug(
        name="defaults-of-new-topics-forgotten",
        rule="a new topic has the defaults that the cluster has when it is made",
        mutations=(
            Mutation("smq.raft_state.topic_rules:check_creation", "with_defaults(state.config, asked)", "asked"),
        ),
        scenario="settings",
        anomalies=frozenset({"wrong-default"}),
        seeds=8,
    ),
    PlantedBug(
        name="reset-key-without-a-default",
        rule="a key of a topic that is reset has the present default of new topics",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.topics:alter_topic_config",
                "{**kept, **reset, **changes}",
                "{**kept, **changes}",
            ),
        ),
        scenario="settings",
        anomalies=frozenset({"wrong-default"}),
        seeds=8,
    ),
)
