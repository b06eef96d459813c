"""Handlers of the cluster's start and of its nodes: InitCluster, RegisterNode, RaiseFeatureLevel, FenceNode,
UnfenceNode, SetNodeDrained, Barrier.

Owns which nodes are registered, with which incarnation, which are fenced or drained, and the cluster's feature level.
It must never change a partition's leader: the controller proposes an ElectLeader to replace a fenced one, since that
command must name a log. Groups get another coordinator immediately. Only `command_table` imports it.
"""

from smq.raft_state.commands import (
    Barrier,
    FenceNode,
    InitCluster,
    Listener,
    RaiseFeatureLevel,
    RegisterNode,
    SetNodeDrained,
    UnfenceNode,
)
from smq.raft_state.coordinators import reassign
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.elections import mark_replaced
from smq.raft_state.limits import (
    ADDRESS_BYTES_MAX,
    CLUSTER_ID_BYTES_MAX,
    DISK_ID_BYTES,
    LIMIT_CAP,
    LISTENER_NAME_BYTES_MAX,
    LISTENERS_MAX,
    NODES_MAX,
    RACK_BYTES_MAX,
    REPLIES_CAP,
)
from smq.raft_state.refusal import Refused, find_node
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, NodeState

_DONE = Applied(reply=Done())


def init_cluster(state: ClusterState, command: InitCluster) -> Applied:
    """Gives the cluster its ids and limits, once."""
    if state.cluster_id:
        raise Refused(ErrorCode.ALREADY_INITIALIZED, f"this is cluster {state.cluster_id}")
    if not 1 <= len(command.cluster_id.encode()) <= CLUSTER_ID_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"cluster_id must have 1 to {CLUSTER_ID_BYTES_MAX} bytes")
    limits = (
        ("topics_max", command.topics_max, LIMIT_CAP),
        ("partitions_max", command.partitions_max, LIMIT_CAP),
        ("groups_max", command.groups_max, LIMIT_CAP),
        ("replies_max", command.replies_max, REPLIES_CAP),
    )
    for name, value, cap in limits:
        if not 1 <= value <= cap:
            raise Refused(ErrorCode.INVALID_REQUEST, f"{name} must be from 1 to {cap}, not {value}")
    state.cluster_id, state.birth = command.cluster_id, command.birth
    state.topics_max = command.topics_max
    state.partitions_max = command.partitions_max
    state.groups_max = command.groups_max
    state.replies_max = command.replies_max
    return _DONE


def register_node(state: ClusterState, command: RegisterNode) -> Applied:
    """A higher incarnation replaces the node; the same incarnation with the same data is a retry. Both unfence it. On
    another disk than before, its logs count as incomplete (rule 18)."""
    _check_registration(command)
    new = NodeState(
        node=command.node,
        incarnation=command.incarnation,
        disk=command.disk,
        grpc_address=command.grpc_address,
        http_address=command.http_address,
        kafka_address=command.kafka_address,
        fenced=False,
        rack=command.rack,
        feature_level=command.feature_level,
        listeners=command.listeners,
    )
    old = state.nodes.get(command.node)
    new.drained = old is not None and old.drained
    if old is None and len(state.nodes) >= NODES_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"there are {NODES_MAX} nodes, which is the limit")
    if old is not None and old.incarnation >= new.incarnation and not _is_retry(old, new):
        raise Refused(
            ErrorCode.STALE_INCARNATION,
            f"node {new.node} is registered with incarnation {old.incarnation}, the new one is {new.incarnation}",
        )
    if new.feature_level < state.feature_level:
        raise Refused(
            ErrorCode.UPGRADE_NEEDED,
            f"the cluster is at feature level {state.feature_level}, and the smq of node {new.node} knows or is allowed"
            f" (feature_level_max) levels up to {new.feature_level}",
        )
    state.nodes[command.node] = new
    reassign(state)
    if old is None or old.disk == new.disk:
        return _DONE
    return Applied(reply=Done(), touched=mark_replaced(state, command.node))


def raise_feature_level(state: ClusterState, command: RaiseFeatureLevel) -> Applied:
    """Refused while a registered node does not know the level, running or not. A level that is reached stays."""
    if command.level <= state.feature_level:
        return _DONE
    behind = sorted(node.node for node in state.nodes.values() if node.feature_level < command.level)
    if behind:
        names = ", ".join(map(str, behind))
        raise Refused(ErrorCode.FEATURE_NOT_ENABLED, f"nodes {names} do not know feature level {command.level}")
    state.feature_level = command.level
    return _DONE


def fence_node(state: ClusterState, command: FenceNode) -> Applied:
    """Keeps the node out of elections and makes it the last choice of placement, until it registers or is unfenced."""
    find_node(state, command.node, command.incarnation).fenced = True
    reassign(state)
    return _DONE


def unfence_node(state: ClusterState, command: UnfenceNode) -> Applied:
    """Inverse of `fence_node`, for the same incarnation only."""
    find_node(state, command.node, command.incarnation).fenced = False
    reassign(state)
    return _DONE


def set_node_drained(state: ClusterState, command: SetNodeDrained) -> Applied:
    """Works whether or not the node runs. A drained node still leads partitions that no other replica can lead."""
    node = state.nodes.get(command.node)
    if node is None:
        raise Refused(ErrorCode.UNKNOWN_NODE, f"node {command.node} has not registered")
    node.drained = command.drained
    reassign(state)
    return _DONE


def barrier(_state: ClusterState, _command: Barrier) -> Applied:
    """Changes nothing. The proposer only waits for it to be applied."""
    return _DONE


def _check_registration(command: RegisterNode) -> None:
    if command.node < 1:
        raise Refused(ErrorCode.INVALID_REQUEST, f"node must be at least 1, not {command.node}")
    if len(command.disk) != DISK_ID_BYTES:
        raise Refused(ErrorCode.INVALID_REQUEST, f"disk must have {DISK_ID_BYTES} bytes, not {len(command.disk)}")
    for name in ("grpc_address", "http_address", "kafka_address"):
        if len(getattr(command, name).encode()) > ADDRESS_BYTES_MAX:
            raise Refused(ErrorCode.INVALID_REQUEST, f"{name} must have at most {ADDRESS_BYTES_MAX} bytes")
    if len(command.rack.encode()) > RACK_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"rack must have at most {RACK_BYTES_MAX} bytes")
    _check_listeners(command.listeners)


def _check_listeners(listeners: tuple[Listener, ...]) -> None:
    if len(listeners) > LISTENERS_MAX:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"a node may have {LISTENERS_MAX} named listeners, not {len(listeners)}"
        )
    names = [listener.name for listener in listeners]
    if names != sorted(set(names)):
        raise Refused(ErrorCode.INVALID_REQUEST, "listeners must have different names, in order")
    for listener in listeners:
        if not 1 <= len(listener.name.encode()) <= LISTENER_NAME_BYTES_MAX:
            raise Refused(
                ErrorCode.INVALID_REQUEST, f"a listener's name must have 1 to {LISTENER_NAME_BYTES_MAX} bytes"
            )
        if max(len(listener.grpc_address.encode()), len(listener.kafka_address.encode())) > ADDRESS_BYTES_MAX:
            reason = f"the addresses of a listener must have at most {ADDRESS_BYTES_MAX} bytes"
            raise Refused(ErrorCode.INVALID_REQUEST, reason)


def _is_retry(old: NodeState, new: NodeState) -> bool:
    return _registration(old) == _registration(new)


def _registration(node: NodeState) -> tuple[object, ...]:
    addresses = node.grpc_address, node.http_address, node.kafka_address
    return node.incarnation, node.disk, addresses, node.rack, node.feature_level, node.listeners
