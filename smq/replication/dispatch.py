"""What arrives from peers: each session and message goes to the part that it is for.

Owns the way in; `net.links` owns the way out. It holds no rule. It must never let a message that does not decode, or
bytes that fail their CRC, do more than a log line. The node hands it to the network.
"""

from collections.abc import Callable
from typing import Final

import structlog

from smq.raft_state.binary import CodecError
from smq.raft_state.ids import NodeId, PartitionId
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.net.wire import SegmentPart, SegmentQuery, StepQuery, StepReport
from smq.replication.nodes.births import Births
from smq.replication.nodes.controller import Controller
from smq.replication.nodes.heartbeats import Heartbeats
from smq.replication.nodes.quorum import QuorumQueries
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Channel, DataDamaged

_log = structlog.get_logger("smq.node")

_GREETINGS: Final = (wire.Heartbeat, wire.Birth)  # by which a node learns whether a peer is of its cluster


class Dispatcher:
    """Implements the NetworkHandler port."""

    def __init__(
        self,
        host: Host,
        *,
        births: Births,
        heartbeats: Heartbeats,
        proposer: Proposer,
        controller: Controller,
        quorum: QuorumQueries,
        replicas: Replicas,
    ) -> None:
        self._host = host
        self._births = births
        self._heartbeats = heartbeats
        self._proposer = proposer
        self._controller = controller
        self._quorum = quorum
        self._replicas = replicas
        self._is_stopped = False

    def stop(self) -> None:
        """The node takes no more messages."""
        self._is_stopped = True

    # ---------------------------------------------------------------------------------------- NetworkHandler
    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.CONTROL:
            self._heartbeats.send(peer)  # first: a vote is counted only from a disk whose memory is known (rule 18)
            self._host.engine.on_session_open(peer)
            self._proposer.on_session_open(peer)
        else:
            self._heartbeats.ping(peer, self._host.clock.monotonic_ns())
            self._replicas.on_session_open(peer)

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        self._host.links.on_session_close(peer, channel)
        if channel is Channel.CONTROL:
            self._births.session_over(peer)
            self._host.engine.on_session_close(peer)
            self._proposer.on_session_close(peer)
            self._replicas.ends.on_session_close(peer)
            self._controller.wake()
        else:
            self._replicas.on_session_close(peer)

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        if self._is_stopped:
            return
        try:
            messages = wire.split(payload)
        except CodecError as e:
            _refused(peer, channel, e)
            return
        for message in messages:
            if message[0] == wire.RAFT and channel is Channel.CONTROL:
                if peer not in self._births.shut:
                    self._host.engine.on_message(peer, message[1:])
                continue
            try:
                decoded = wire.decode(message)
                if peer not in self._births.shut or isinstance(decoded, _GREETINGS):
                    self._dispatch(peer, decoded)
            except (CodecError, DataDamaged) as e:
                _refused(peer, channel, e)

    def _dispatch(self, peer: NodeId, message: wire.Message) -> None:
        now_ns = self._host.clock.monotonic_ns
        match message:
            case wire.Append(partition):
                if (replica := self._replicas.get(partition)) is not None:
                    replica.on_append(peer, message)
            case wire.Commits(points):
                for pid, epoch, commit in points:
                    replica = self._replicas.get(pid)
                    if replica is not None:
                        replica.on_commit(peer, epoch, commit)
            case wire.Ack(partition):
                if (replica := self._replicas.get(partition)) is not None:
                    replica.on_ack(peer, message)
            case wire.Producers():
                self._to_replica(message.partition, lambda r: r.on_producers(peer, message))
            case wire.Probe():
                self._to_replica(message.partition, lambda r: r.on_probe(peer, message))
            case wire.FetchBatch():
                self._replicas.repairs.on_fetch(peer, self._replicas.get(message.partition), message)
            case wire.FoundBatch():
                self._replicas.repairs.on_found(peer, message)
            case SegmentQuery():
                self._replicas.segments.on_query(peer, message)
            case SegmentPart():
                self._replicas.segments.on_part(peer, message)
            case StepQuery():
                self._replicas.segments.on_step_query(peer, message)
            case StepReport():
                self._replicas.compactor.on_step_report(peer, message)
            case wire.Ping():
                self._heartbeats.on_ping(peer, message)
            case wire.Heartbeat():
                self._heartbeats.on_heartbeat(peer, message)
            case wire.Birth():
                self._births.on_birth(peer, message)
            case wire.Propose():
                self._proposer.on_propose(peer, message)
            case wire.ReadIndex():
                self._proposer.on_read_index(peer, message)
            case wire.Proposed():
                self._proposer.on_proposed(message)
            case wire.Sealed():
                self._to_replica(message.partition, lambda r: r.on_sealed(message))
            case wire.ElectionQuery(query, term, partitions):
                if term >= self._host.engine.term:  # a late question of a former Raft leader seals nothing (rule 21)
                    report = wire.ElectionReport(query, self._host.incarnation, self._replicas.seal(partitions))
                    self._host.links.send(peer, Channel.CONTROL, report)
            case wire.ElectionReport():
                self._controller.on_report(peer, message, now_ns())
            case wire.Resign():
                self._controller.on_resign(peer, message, now_ns())
            case wire.Transfer(pid, epoch, target):
                self._replicas.transfer(pid, epoch, target)
            case wire.EndsQuery():
                self._replicas.ends.on_query(peer, message)
            case wire.EndsReport():
                self._replicas.ends.on_report(peer, message)
            case wire.DescribeQuorum():
                self._quorum.on_query(peer, message)
            case wire.QuorumDescribed():
                self._quorum.on_described(message)

    def _to_replica(self, pid: PartitionId, use: Callable[[Replica], None]) -> None:
        replica = self._replicas.get(pid)
        if replica is not None:
            use(replica)


def _refused(peer: NodeId, channel: Channel, reason: Exception) -> None:
    _log.warning("message refused", peer=peer, channel=channel.name, reason=str(reason))
