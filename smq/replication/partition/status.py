"""This node's copy of a partition as operators, metrics and checkers see it.

Owns the choice of what is shown. It must never change what the replica holds. The node imports it.
"""

from smq.replication.api import ReplicaStatus
from smq.replication.partition.replica import Replica


def status_of(replica: Replica) -> ReplicaStatus:
    log = replica.log
    return ReplicaStatus(
        pid=replica.pid,
        is_leader=replica.leading is not None,
        epoch=replica.part.epoch,
        log_start=log.log_start,
        hwm=replica.known_commit_point(),
        lso=replica.stable_end,
        appended_end=log.appended_end,
        durable_end=log.durable_end,
        verified_end=replica.durable_verified_end,
        size_bytes=log.size_bytes,
    )
