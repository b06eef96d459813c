"""Planted bugs of the replicated state: snapshots, retries, settings, users, topics, nodes, and the feature level.

Owns these rows only. `catalogue` alone imports it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from chaos_tests.sim.planted.partitions import BROKEN
from chaos_tests.sim.replacement import Fault, PlantedBug, nothing, replace
from smq.raft_state.commands import (
    AdvanceLogStart,
    AlterAcls,
    AlterClusterConfig,
    AlterTopicConfig,
    AlterUser,
    Assignment,
    RaiseFeatureLevel,
    RegisterNode,
    Request,
)
from smq.raft_state.handlers.acls import Permission
from smq.raft_state.ids import NO_BIRTH, NO_DISK, LogIndex, NodeId, Offset
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Applied, Done, OffsetsAssigned
from smq.raft_state.state import ClusterState, TopicState, UserState
from smq.replication.commands.applied_state import AppliedState
from smq.replication.node import Node
from smq.replication.nodes.births import Births, Claim
from smq.replication.nodes.controller import Controller
from smq.replication.nodes.liveness import Liveness

_HANDLERS: Final = "smq.raft_state.handlers."


def _forgets_commits(original: Fault, applied: AppliedState, index: LogIndex, snapshot: bytes) -> Iterator[None]:
    for _ in original(applied, index, snapshot):
        if applied.index == index:
            applied.state.groups.clear()
        yield
    applied.state.groups.clear()


def _runs_again(_original: Fault, machine: Machine, command: Request) -> Applied:
    return machine._run(command)


def _as_if_new(original: Fault, state: ClusterState, item: Assignment, *rest: Any) -> Any:
    state.assigned.pop(item.request_id, None)
    return original(state, item, *rest)


def _none_for_none(original: Fault, state: ClusterState, item: Assignment, *rest: Any) -> Any:
    return original(state, item, *rest) if item.count else OffsetsAssigned(base=Offset(0), last=Offset(-1))


def _who_is_away_is_empty(original: Fault, births: Births) -> bool:
    if 2 * len(births._claims) >= len(births._peers):
        births._claims = {peer: births._claims.get(peer, Claim(NO_BIRTH, NO_DISK, False)) for peer in births._peers}
    return bool(original(births))


def _every_moment(_original: Fault, liveness: Liveness) -> int:
    return liveness._heard_time._clock.monotonic_ns()


def _moves_back(original: Fault, state: ClusterState, command: AdvanceLogStart) -> Applied:
    part = state.partition(command.partition)
    if part is not None and 0 <= command.offset < part.log_start:
        part.log_start = command.offset
        return Applied(reply=Done(), touched=(command.partition,))
    applied: Applied = original(state, command)
    return applied


LOG_START_AS_REQUESTED: Final = replace(_HANDLERS + "partitions:advance_log_start", by=_moves_back)


def _alone(original: Fault, state: ClusterState, command: AlterClusterConfig) -> Applied:
    applied: Applied = original(state, command)
    state.config = dict(command.set_)
    return applied


def _opened_at_once(original: Fault, state: ClusterState, command: AlterTopicConfig) -> Applied:
    applied: Applied = original(state, command)
    for partition in state.topics[command.name].partitions:
        if partition.is_opening:
            partition.is_opening, partition.producers_start = False, partition.hwm
            partition.producer_marks.clear()
    return applied


def _those_alone(original: Fault, state: ClusterState, command: AlterUser) -> Applied:
    applied: Applied = original(state, command)
    if command.set_ and isinstance(applied.reply, Done):
        user = UserState(name=command.name, credentials=command.set_)
        state.users = {**state.users, command.name: user}
    return applied


def _keeps_denials(original: Fault, state: ClusterState, command: AlterAcls) -> Applied:
    kept = tuple(acl for acl in state.acls if acl in command.remove and acl.permission == Permission.DENY)
    applied: Applied = original(state, command)
    state.acls = tuple(sorted({*state.acls, *kept}))
    return applied


def _the_widest_first(original: Fault, *client: Any) -> Iterator[Any]:
    yield from reversed(list(original(*client)))


def _as_asked(_original: Fault, _config: Any, asked: dict[str, str]) -> dict[str, str]:
    return dict(asked)


def _in_order_of_nodes(
    original: Fault,
    state: ClusterState,
    topic: TopicState,
    count: int,
    assignments: tuple[tuple[NodeId, ...], ...],
    start: Any,
) -> None:
    original(state, topic, count, tuple(tuple(sorted(nodes)) for nodes in assignments), start)


def _keeps_its_listeners(original: Fault, state: ClusterState, command: RegisterNode) -> Applied:
    old = state.nodes.get(command.node)
    listeners = command.listeners if old is None else old.listeners
    applied: Applied = original(state, dataclasses.replace(command, listeners=listeners))
    return applied


def _whoever_knows_it(_original: Fault, state: ClusterState, command: RaiseFeatureLevel) -> Applied:
    state.feature_level = max(state.feature_level, command.level)
    return Applied(reply=Done())


def _to_what_one_knows(_original: Fault, controller: Controller) -> None:
    state = controller._host.state
    level = max((node.feature_level for node in state.nodes.values()), default=0)
    if level > state.feature_level:
        controller._propose_once("level", controller._host.node_id, RaiseFeatureLevel(level=level))


def _ends(_original: Fault, node: Node, error: BaseException) -> None:
    node._on_fatal(error)


STATE_BUGS: Final = (
    PlantedBug(
        name="snapshot-forgets-commits",
        rule="snapshot and restore are exact (P6)",
        faults=(replace("smq.replication.commands.applied_state:AppliedState.restore", by=_forgets_commits),),
        scenario="snapshots",
        anomalies=frozenset({"digest-mismatch", "stale-commit"}),
        watched="watched-state-differs",
    ),
    PlantedBug(
        name="no-reply-cache",
        rule="finding 10: a retried command answers as the first did",
        faults=(replace("smq.raft_state.machine:Machine._run_once", by=_runs_again),),
        scenario="remade",
        anomalies=frozenset({"process-died"}),
        seeds=30,
    ),
    PlantedBug(
        name="retry-assigned-anew",
        rule="19: a request for offsets takes effect once, however often it is repeated (P2)",
        faults=(replace(_HANDLERS + "external_offsets:_assign", by=_as_if_new),),
        scenario="handover",
        anomalies=frozenset({"offset-gap", "nonmonotonic-assign", "offset-reuse"}) | BROKEN,
        seeds=6,
    ),
    PlantedBug(
        name="no-offsets-are-assigned-too",
        rule="a request that cannot be served is refused, and costs its neighbours nothing (P8)",
        faults=(replace(_HANDLERS + "external_offsets:_assign", by=_none_for_none),),
        scenario="handover",
        anomalies=frozenset({"process-died"}),
        seeds=6,
    ),
    PlantedBug(
        name="log-start-as-requested",
        rule="14: the log start never goes back",
        faults=(LOG_START_AS_REQUESTED,),
        scenario="log_start",
        anomalies=frozenset({"watched-log-start-back"}),
    ),
    PlantedBug(
        name="setting-replaces-the-others",
        rule="a change of some settings leaves the others as they are",
        faults=(replace(_HANDLERS + "cluster_config:alter_cluster_config", by=_alone),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
    ),
    PlantedBug(
        name="credential-replaces-the-others",
        rule="a change of some of a user's credentials leaves the others as they are",
        faults=(replace(_HANDLERS + "users:alter_user", by=_those_alone),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
    ),
    PlantedBug(
        name="deletes-the-last-administrator",
        rule="the last of the super users is not deleted",
        faults=(replace(_HANDLERS + "users:_keep_administrator", by=nothing),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
    ),
    PlantedBug(
        name="denials-are-not-revoked",
        rule="a rule that is revoked is gone, on every node",
        faults=(replace(_HANDLERS + "acls:alter_acls", by=_keeps_denials),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
        seeds=8,
    ),
    PlantedBug(
        name="producers-of-a-mirror-forgotten-too-early",
        rule="once a copy has ended, its producers are strangers: none here is taken for one of them",
        faults=(replace(_HANDLERS + "topics:alter_topic_config", by=_opened_at_once),),
        scenario="stale",
        anomalies=frozenset({"mirror-lost"}),
        seeds=60,
    ),
    PlantedBug(
        name="quota-of-all-beats-a-users-own",
        rule="the quota that applies is the one that names user and client id most closely",
        faults=(replace("smq.coordinator.service.quotas:_entities", by=_the_widest_first),),
        scenario="settings",
        anomalies=frozenset({"stale-setting"}),
        seeds=8,
    ),
    PlantedBug(
        name="defaults-of-new-topics-forgotten",
        rule="a new topic has the defaults that the cluster has when it is made",
        faults=(replace("smq.raft_state.cluster_config:with_defaults", by=_as_asked),),
        scenario="settings",
        anomalies=frozenset({"wrong-default"}),
    ),
    PlantedBug(
        name="assignment-loses-its-order",
        rule="replicas are placed as assigned, the preferred leader first",
        faults=(replace(_HANDLERS + "topics:_grow", by=_in_order_of_nodes),),
        scenario="settings",
        anomalies=frozenset({"wrong-replicas"}),
    ),
    PlantedBug(
        name="address-of-the-first-process-is-kept",
        rule="clients get the addresses that a node's present process advertises",
        faults=(replace(_HANDLERS + "nodes:register_node", by=_keeps_its_listeners),),
        scenario="crashes",
        anomalies=frozenset({"wrong-address"}),
        seeds=4,
    ),
    PlantedBug(
        name="level-raised-too-early",
        rule="the feature level rises only once every registered node knows it",
        faults=(
            replace(_HANDLERS + "nodes:raise_feature_level", by=_whoever_knows_it),
            replace("smq.replication.nodes.controller:Controller._raise_level", by=_to_what_one_knows),
        ),
        scenario="upgrades",
        anomalies=frozenset({"stranded-node"}),
        seeds=10,
    ),
    PlantedBug(
        name="fences-what-it-slept-through",
        rule="a silence that a node slept through counts against no other node",
        faults=(replace("smq.replication.nodes.liveness:Liveness.now_ns", by=_every_moment),),
        scenario="oversleep",
        anomalies=frozenset({"no-progress"}),
        seeds=4,
    ),
    PlantedBug(
        name="born-of-most-nodes",
        rule="18: a cluster is born while all of its nodes are there, on empty disks",
        faults=(replace("smq.replication.nodes.births:Births._are_all_empty", by=_who_is_away_is_empty),),
        scenario="first_start",
        anomalies=frozenset({"no-progress", "log-mismatch"}),
        watched="watched-other-birth",
    ),
    PlantedBug(
        name="unknown-command-ends-the-process",
        rule="a node that meets what a newer smq wrote waits for its upgrade, and does not flap",
        faults=(replace("smq.replication.node:Node._on_engine_stopped", by=_ends),),
        scenario="upgrades",
        anomalies=frozenset({"process-died"}),
    ),
)
