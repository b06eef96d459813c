"""Planted bugs in what administrators change: settings of the cluster, and replicas that they assign.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

ADMINISTRATION_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="snapshot-forgets-settings",
        rule="snapshot and restore are exact",
        mutations=(Mutation("smq.raft_state.snapshot:_parts", "tuple(sorted(state.config.items()))", "()"),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
        seeds=8,
    ),
    PlantedBug(
        name="setting-replaces-the-others",
        rule="a change of some settings leaves the others as they are",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.cluster_config:alter_cluster_config",
                "{key: value for key, value in state.config.items() if key not in command.unset} | changes",
                "changes",
            ),
        ),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
        seeds=8,
    ),
    PlantedBug(
        name="assignment-loses-its-order",
        rule="replicas are placed as assigned, the preferred leader first",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.topics:_grow",
                "list(assignments) or",
                "[tuple(sorted(nodes)) for nodes in assignments] or",
            ),
        ),
        scenario="settings",
        anomalies=frozenset({"wrong-replicas"}),
        seeds=8,
    ),
    PlantedBug(
        name="address-of-the-first-process-is-kept",
        rule="clients get the addresses that a node's present process advertises",
        mutations=(
            Mutation(
                "smq.raft_state.handlers.nodes:register_node",
                "listeners=command.listeners",
                "listeners=state.nodes.get(command.node, command).listeners",
            ),
        ),
        scenario="crashes",
        anomalies=frozenset({"wrong-address"}),
        seeds=4,
    ),
    PlantedBug(
        name="deletion-crowded-out-of-memory",
        rule="a client's retry is recognised however many requests nodes have numbered meanwhile",
        mutations=(Mutation("smq.raft_state.remembered:kind_of", "if request.is_from_node:", "if True:"),),
        scenario="repeated",
        anomalies=frozenset({"process-died"}),
        seeds=10,
    ),
    PlantedBug(
        name="elections-at-the-leader-only",
        rule="a leader hands over to the preferred replica whichever node an operator asks",
        mutations=(
            Mutation(
                "smq.replication.membership.balancer:request_transfer",
                "host.links.send(part.leader, Channel.CONTROL, wire.Transfer(part.pid, part.epoch, target))",
                "pass",
            ),
        ),
        scenario="elections",
        anomalies=frozenset({"no-progress"}),
        seeds=20,
    ),
)
