"""A log whose compacted bytes are newer than the replicated state will be: the state is that of an older copy.

Owns how a node recognizes it, what its readers learn and what an operator is to do. A node that has just started may
know less than its log for a moment; once its own registration is applied, so is everything that it had applied before.
It must never change a log or its count of compactions: which of the two is right, no node can say.
"""

from typing import Final

import structlog

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionId
from smq.replication.host import Host
from smq.replication.log.stored_batch import partition_name
from smq.replication.partition.replica import Replica

_log = structlog.get_logger("smq.segments")

_ADVICE: Final = "stop this node, empty its directory, and start it again while the others are ready"


def is_outlived(host: Host, replica: Replica) -> bool:
    """Whether this log has outlived the state that its compacted bytes belong to."""
    known, part = host.state.nodes.get(host.node_id), host.state.partition(replica.pid)
    is_registered = known is not None and known.incarnation == host.incarnation
    return is_registered and part is not None and replica.log.segments.is_newer_than(part.compactions)


def check_state(host: Host, replica: Replica) -> None:
    """Raises DATA_DAMAGED for a reader of such a log: it may lack records that the state counts."""
    if is_outlived(host, replica):
        message = (
            f"{partition_name(replica.pid)}: this node's log was compacted later than the cluster's state knows, which"
            f" comes from an older copy; read from another replica, and {_ADVICE}"
        )
        raise SmqError(ErrorCode.DATA_DAMAGED, message)


class Outlived:
    """The partitions of this node whose log is newer than the state. Each is logged once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._seen: set[PartitionId] = set()  # bounded by the node's partitions

    def visit(self, replica: Replica) -> None:
        """To be called often for every partition."""
        if not is_outlived(self._host, replica):
            self._seen.discard(replica.pid)
        elif replica.pid not in self._seen:
            self._seen.add(replica.pid)
            name = replica.pid.hex()
            _log.error("a log is newer than the cluster's state", node=self._host.node_id, partition=name, do=_ADVICE)

    def forget(self, pid: PartitionId) -> None:
        """The partition is gone."""
        self._seen.discard(pid)

    def warnings(self) -> list[str]:
        """For an operator to act on."""
        if not self._seen:
            return []
        return [
            f"{len(self._seen)} partitions of this node were compacted later than the cluster's state knows, which"
            f" comes from an older copy; they are not read here: {_ADVICE}"
        ]
