"""The handler of AlterClusterConfig.

Owns what a valid change of the cluster's settings is; `cluster_config` has the keys. It must never act on a setting:
the handlers and services that a setting concerns read it. Only `command_table` imports it.
"""

from smq.raft_state.cluster_config import CLUSTER_CONFIG, unknown_key_hint
from smq.raft_state.commands import AlterClusterConfig
from smq.raft_state.config_keys import known_at
from smq.raft_state.errors import ErrorCode
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState


def alter_cluster_config(state: ClusterState, command: AlterClusterConfig) -> Applied:
    """Sets some keys and resets others to their defaults, all or none."""
    changes: dict[str, str] = {}
    for key, value in command.set_:
        _check_key(key, state.feature_level)
        if key in changes:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is given twice")
        if not CLUSTER_CONFIG[key].accepts(value):
            raise Refused(ErrorCode.INVALID_CONFIG, CLUSTER_CONFIG[key].refusal(key, quoted(value)))
        changes[key] = value
    for key in command.unset:
        _check_key(key, state.feature_level)
        if key in changes:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is both set and unset")
    state.config = {key: value for key, value in state.config.items() if key not in command.unset} | changes
    return Applied(reply=Done())


def _check_key(key: str, level: int) -> None:
    known = known_at(CLUSTER_CONFIG, level)
    if key not in known:
        hint = unknown_key_hint(key, known)
        raise Refused(ErrorCode.INVALID_CONFIG, f"the cluster has no setting {quoted(key)}: {hint}")
