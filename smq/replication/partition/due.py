"""What a replica has to propose or to tell now: marks, and what has become known of its copies.

Owns the content of these commands and messages. Each function looks at the replica as it is at the moment, and returns
nothing if there is nothing to say any more. `replicas` gives them to the parts that send.
"""

from smq.raft_state.commands import Command, CompleteReplica, HwmAdvance
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.raft_state.replies import HwmsAdvanced, Reply
from smq.replication.api import DoneFn
from smq.replication.host import Host
from smq.replication.partition.replica import Replica


def _led_epoch(replica: Replica) -> Epoch | None:
    """The epoch that this process leads, if it is still current."""
    return replica.leading if replica.leading == replica.part.epoch else None


def hwm_advances(replica: Replica) -> list[HwmAdvance]:
    """Rule 9."""
    epoch, part = _led_epoch(replica), replica.part
    if epoch is None:
        return []
    hwm = replica.known_commit_point()
    if hwm == part.hwm:
        return []
    log = replica.log
    return [HwmAdvance(partition=replica.pid, epoch=epoch, hwm=hwm, next_offset=log.appended_end, ts_ns=log.last_ts_ns)]


def propose_advances(host: Host, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
    """Counts what apply has made of each item: one of an epoch that is over changes nothing."""

    def counted(reply: Reply | SmqError) -> None:
        if isinstance(reply, HwmsAdvanced):
            accepted = sum(reply.accepted)
            host.measures.advances.add(accepted, "accepted")
            host.measures.advances.add(len(reply.accepted) - accepted, "rejected")
        done(reply)

    host.propose(command, timeout_ms, counted)


def untold_commits(replica: Replica) -> list[tuple[NodeId, Epoch, Offset]]:
    """Rule 24: the followers that do not know the commit point, and the point."""
    epoch = _led_epoch(replica)
    if epoch is None:
        return []
    told = [(stream.peer, stream.take_commit()) for stream in replica.streams.values()]
    return [(peer, epoch, commit) for peer, commit in told if commit is not None]


def caught_up(host: Host, replica: Replica) -> list[CompleteReplica]:
    """Rule 22: the incomplete replicas whose logs hold again whatever they may have acknowledged. A leader's own does:
    it was elected for that."""
    epoch = _led_epoch(replica)
    if epoch is None:
        return []
    processes = {s.peer: s.incarnation for s in replica.streams.values() if s.has_caught_up}
    processes[host.node_id] = host.incarnation
    return [
        CompleteReplica(partition=replica.pid, epoch=epoch, node=node, incarnation=incarnation)
        for node, incarnation in processes.items()
        if node in replica.part.incomplete and incarnation is not None
    ]


def hidden_damage(host: Host, replica: Replica) -> list[PartitionId]:
    """Rule 23: this partition, if the others have yet to learn of its damage. They take it from a registered process
    only."""
    me = host.state.nodes.get(host.node_id)
    is_due = replica.is_end_hidden and host.node_id not in replica.part.incomplete
    return [replica.pid] if is_due and me is not None and me.incarnation == host.incarnation else []
