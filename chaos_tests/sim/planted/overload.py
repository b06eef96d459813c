"""Planted bugs of overloaded nodes: bounds on queues, and the order of batches that were refused.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug

_INTAKE = "smq.replication.partition.intake:Intake."
_ORDER = "smq.replication.partition.send_order:SendOrder."

OVERLOAD_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="stuck-behind-a-busy-link",
        rule="4: a follower is served on, also where its link was busy with others when its last answer came",
        mutations=(Mutation("smq.replication.partition.streams:FollowerStream.on_tick", "self.pump()", "pass"),),
        scenario="overload",
        anomalies=frozenset({"no-progress"}),
        seeds=10,
    ),
    PlantedBug(
        name="followers-queue-unbounded",
        rule="the records that wait for a disk are bounded: a follower takes appends while it has room",
        mutations=(
            Mutation(
                _INTAKE + "admits", "if pid not in self._waiting and self.followed_bytes < self._half:", "if True:"
            ),
        ),
        scenario="overload",
        anomalies=frozenset({"queue-over-bound"}),
        seeds=5,
    ),
    PlantedBug(
        name="refused-first-batch-overtaken",
        rule="a batch that was refused for load makes the later ones of its producer wait until it has come again",
        mutations=(Mutation(_ORDER + "check", "if is_next and is_before(", "if False and is_before("),),
        scenario="overload",
        anomalies=frozenset({"overtaken"}),
        seeds=15,
    ),
    PlantedBug(
        name="overtaken-while-looked-up",
        rule="batches of one connection and partition are appended in order, also while the topic is looked up",
        mutations=(Mutation("smq.replication.arrivals:Arrivals.with_partition", "if self._waiting:", "if False:"),),
        scenario="new_topics",
        anomalies=frozenset({"overtaken"}),
        seeds=10,
    ),
    PlantedBug(
        name="held-for-ever",
        rule="a follower that was refused by its disk's queue gets its turn",
        mutations=(Mutation(_INTAKE + "next_turns", "while self._waiting and room > 0:", "while False:"),),
        scenario="overload",
        anomalies=frozenset({"no-progress"}),
        seeds=5,
    ),
    PlantedBug(
        name="rest-of-frame-lost",
        rule="every message of a frame reaches its partition, not the first one only",
        mutations=(
            Mutation(
                "smq.replication.dispatch:Dispatcher.on_message",
                "for message in messages:",
                "for message in messages[:1]:",
            ),
        ),
        scenario="overload",
        anomalies=frozenset({"no-progress"}),
        seeds=10,
    ),
)
