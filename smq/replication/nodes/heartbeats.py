"""Heartbeats and pings between nodes, and what follows from a peer's.

Owns what this node says of itself: its incarnation, the marks of disks, whether it is leaving, the condition of its
disk, the latest digest of its replicated state. A heartbeat must be the first message of every CONTROL session: a vote
is counted only from a disk whose memory is known (rule 18).
"""

from smq.raft_state.binary import CodecError
from smq.raft_state.ids import NodeId
from smq.replication.host import Host
from smq.replication.monitoring.anomalies import StateWatch
from smq.replication.net import wire
from smq.replication.nodes.births import Births
from smq.replication.nodes.liveness import Liveness
from smq.replication.nodes.registration import Registration
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Channel


class Heartbeats:
    def __init__(
        self,
        host: Host,
        births: Births,
        liveness: Liveness,
        registration: Registration,
        replicas: Replicas,
        states: StateWatch,
    ) -> None:
        self._host = host
        self._births = births
        self._liveness = liveness
        self._registration = registration
        self._replicas = replicas
        self._states = states
        self._peers = sorted(n for n in host.config.peers if n != host.node_id)

    def send_all(self) -> None:
        now_ns = self._host.clock.monotonic_ns()
        for peer in self._peers:
            self.send(peer)
            self.ping(peer, now_ns)

    def send(self, peer: NodeId) -> None:
        marks, node_id = self._host.engine.marks, self._host.node_id
        is_leaving, disk = self._liveness.is_self_leaving, self._liveness.disk(node_id)
        beat = wire.Heartbeat(
            self._host.incarnation,
            (marks.own, *marks.known),
            is_leaving,
            disk,
            *self._states.latest,
            birth=self._births.claim,
            may_found=self._births.may_found,
        )
        self._host.links.send(peer, Channel.CONTROL, beat)

    def ping(self, peer: NodeId, number: int) -> None:
        self._host.links.send(peer, Channel.DATA, wire.Ping(number, False))

    def on_ping(self, peer: NodeId, ping: wire.Ping) -> None:
        if ping.is_answer:
            self._liveness.on_answer(peer)
        else:
            self._host.links.send(peer, Channel.DATA, wire.Ping(ping.number, True))

    def on_heartbeat(self, peer: NodeId, beat: wire.Heartbeat) -> None:
        own, *known = beat.marks
        if own.node != peer:
            raise CodecError(f"node {peer} speaks of itself as node {own.node}")
        if not self._births.hear(peer, beat.birth, own.disk, may_found=beat.may_found):
            return
        self._states.heard(peer, beat.digest_index, beat.digest)
        self._liveness.on_heartbeat(peer, beat.incarnation, is_leaving=beat.is_leaving, disk=beat.disk)
        forgotten = self._host.engine.marks.receive(peer, own, known)
        if forgotten is not None:
            self._registration.replace_old_copy(forgotten)
            self._host.engine.renounce()
            for replica in self._replicas.led():
                replica.resign()
            self.send_all()

    def leave(self) -> None:
        """The peers learn that this process is about to end."""
        self._liveness.is_self_leaving = True
        self.send_all()
