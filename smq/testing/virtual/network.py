"""The simulated network: sessions between nodes over links that delay, stall, break, or are cut one way or both.

Owns sessions and the messages in flight. As with TCP, messages of one session keep their order and arrive at most once;
nothing is promised between sessions. A cut link holds messages back. They are retransmitted when it heals, or dropped
when the keep-alive time-out ends the session. A damaged link flips bits of frames, which the production reader of
frames then judges. It must never look into a message.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log
from random import Random
from typing import Final

from smq.raft_state.ids import NodeId
from smq.replication.net.frames import FrameError, FrameKind, FrameReader, frame_header
from smq.replication.ports import Buffer, Channel, NetworkHandler
from smq.testing.virtual.clock import NS_PER_MS, Process, Scheduler
from smq.testing.virtual.rng import Streams

Trace = Callable[[str], None]
Pair = tuple[NodeId, NodeId]
Key = tuple[NodeId, NodeId, Channel]  # of a session; the lower node first
FLIPS_MAX: Final = 3  # bits of one damaged frame; a CRC-32C notices any three
_MESSAGES: Final = ("message", "damaged")


@dataclass(slots=True, kw_only=True)
class LinkProfile:
    """How slow every link is, and how long it takes to notice a dead one."""

    delay_ms_min: float = 0.1
    delay_ms_mean: float = 0.5  # on top of the minimum, exponentially distributed
    tail_probability: float = 0.01  # a retransmission
    tail_ms_max: float = 200.0
    bytes_per_ms: float = 100_000.0
    keepalive_ms_min: float = 400.0
    keepalive_ms_max: float = 3000.0
    reconnect_ms_min: float = 2.0
    reconnect_ms_max: float = 120.0


@dataclass(slots=True)
class Link:
    """One direction between two nodes."""

    rng: Random
    cut: bool = False
    cut_version: int = 0
    slowdown: float = 1.0
    damage: float = 0.0  # chance of a message to arrive with flipped bits
    stalled: set[Channel] = field(default_factory=set)


@dataclass(slots=True)
class Side:
    """One node's end of a session, with the messages on their way to it, in order."""

    node: NodeId
    peer: NodeId
    link: Link  # towards the node
    endpoint: "Endpoint"
    deliver: Callable[[], None] = lambda: None
    state: str = "opening"  # opening, open, closed
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    stalled: list[bytes] = field(default_factory=list)  # held back by a cut or stalled link
    last_arrival_ns: int = 0
    free_at_ns: int = 0  # when the sender's line has transmitted everything queued for this side
    departures: deque[tuple[int, int]] = field(default_factory=deque)  # (departs, bytes)


@dataclass(slots=True)
class Session:
    key: Key
    sides: dict[NodeId, Side]
    ending: bool = False


@dataclass(slots=True)
class Endpoint:
    """A started process's place in the network."""

    process: Process
    handler: NetworkHandler
    sessions: dict[tuple[NodeId, Channel], Session] = field(default_factory=dict)


class SimNetwork:
    """The hub of all links, sessions and endpoints. Faults are its methods."""

    def __init__(
        self,
        scheduler: Scheduler,
        streams: Streams,
        nodes: Sequence[NodeId],
        profile: LinkProfile,
        trace: Trace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.profile = profile
        self.nodes = tuple(nodes)
        self._trace = trace
        self._rng = streams.stream("network/sessions")
        self._damage_rng = streams.stream("network/damage")
        self.damage_refused = 0  # messages with flipped bits that their receiver did not take
        self._links = {(a, b): Link(streams.stream(f"network/link/{a}-{b}")) for a in nodes for b in nodes if a != b}
        self._endpoints: dict[NodeId, Endpoint] = {}
        self._sessions: dict[Key, Session] = {}

    # ------------------------------------------------------------------------------------------ processes
    def attach(self, node: NodeId, process: Process, handler: NetworkHandler) -> None:
        """A process starts to listen. Sessions that its peers still have with its predecessor are closed first."""
        self._endpoints[node] = Endpoint(process, handler)
        for key in self._keys_of(node):
            session = self._sessions.get(key)
            if session is not None:
                self.break_session(key, drop_in_flight=True)
            self._kick(key)

    def listens(self, node: NodeId, process: Process | None) -> bool:
        """Whether this process of the node has begun to listen."""
        endpoint = self._endpoints.get(node)
        return endpoint is not None and endpoint.process is process

    def detach(self, node: NodeId, *, silently: bool) -> None:
        """The node's process is gone. After a kill, the kernel still delivers what was sent and closes the connection;
        a machine without power (`silently`) sends nothing."""
        self._endpoints.pop(node, None)
        for key in self._keys_of(node):
            session = self._sessions.get(key)
            if session is None:
                continue
            session.sides[node].state = "closed"
            if silently:
                delay = self._rng.uniform(self.profile.keepalive_ms_min, self.profile.keepalive_ms_max)
                self.scheduler.after_ms(delay, partial(self._expire, session))
            else:
                self._end_side(session, session.sides[self._other(key, node)], drop_in_flight=False)
            self._forget_if_closed(session)

    def _keys_of(self, node: NodeId) -> list[Key]:
        return [
            (min(node, peer), max(node, peer), channel) for peer in self.nodes if peer != node for channel in Channel
        ]

    @staticmethod
    def _other(key: Key, node: NodeId) -> NodeId:
        return key[1] if key[0] == node else key[0]

    # ------------------------------------------------------------------------------------------ sessions
    def _kick(self, key: Key) -> None:
        delay = self._rng.uniform(self.profile.reconnect_ms_min, self.profile.reconnect_ms_max)
        self.scheduler.after_ms(delay, partial(self._try_open, key))

    def _try_open(self, key: Key) -> None:
        a, b, _ = key
        ends = [self._endpoints.get(a), self._endpoints.get(b)]
        if key in self._sessions or self._links[a, b].cut or self._links[b, a].cut:
            return
        if any(end is None or end.process.paused for end in ends):
            return
        assert ends[0] is not None
        assert ends[1] is not None
        session = Session(key, {a: Side(a, b, self._links[b, a], ends[0]), b: Side(b, a, self._links[a, b], ends[1])})
        for side in session.sides.values():
            side.deliver = partial(self._deliver, session, side)
        self._sessions[key] = session
        for side in session.sides.values():
            self._enqueue(side, "open", b"", self.scheduler.now_ns + self._delay_ns(side.link))

    def _enqueue(self, side: Side, kind: str, payload: bytes, arrival_ns: int) -> None:
        """Puts one item after everything that is on its way to `side`."""
        if self._endpoints.get(side.node) is not side.endpoint:
            return
        if arrival_ns > side.last_arrival_ns:
            side.last_arrival_ns = arrival_ns
        side.inbox.append((kind, payload))
        self.scheduler.at(side.last_arrival_ns, side.deliver, side.endpoint.process)

    def _deliver(self, session: Session, side: Side) -> None:
        if not side.inbox:
            return  # it was expedited
        kind, payload = side.inbox.popleft()
        if side.state == "closed":
            return
        channel, endpoint = session.key[2], side.endpoint
        if self._trace is not None:
            self._trace(f"net {kind} {side.peer}>{side.node} {channel.name} {len(payload)}")
        if kind == "message":
            endpoint.handler.on_message(side.peer, channel, memoryview(payload))
        elif kind == "damaged":
            self._take_damaged(session, side, payload)
        elif kind == "open":
            side.state = "open"
            endpoint.sessions[side.peer, channel] = session
            endpoint.handler.on_session_open(side.peer, channel)
        elif kind == "close":
            was_open = side.state == "open"
            side.state = "closed"
            endpoint.sessions.pop((side.peer, channel), None)
            self._forget_if_closed(session)
            if was_open:
                endpoint.handler.on_session_close(side.peer, channel)

    def _take_damaged(self, session: Session, side: Side, stream: bytes) -> None:
        """The production reader of frames judges them. If it refuses, or waits for more, the session ends there."""
        reader, found = FrameReader(), list[tuple[FrameKind, memoryview]]()
        reader.payload_bytes_max = len(stream)
        try:
            found += reader.feed(stream)
        except FrameError:
            self.damage_refused += 1
        if not found or any(kind is FrameKind.HELLO for kind, _ in found):
            self._end(session, drop_in_flight=True)
            return
        for kind, payload in found:
            if kind is FrameKind.MESSAGE:
                side.endpoint.handler.on_message(side.peer, session.key[2], payload)

    def _forget_if_closed(self, session: Session) -> None:
        if any(side.state != "closed" for side in session.sides.values()):
            return
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self._kick(session.key)

    def _expire(self, session: Session) -> None:
        if self._sessions.get(session.key) is session:
            self._end(session, drop_in_flight=True)

    def break_session(self, key: Key, *, drop_in_flight: bool) -> None:
        """Ends a session. Each end notices in its own time; then a new session opens."""
        session = self._sessions.get(key)
        if session is not None:
            self._end(session, drop_in_flight=drop_in_flight)

    def _end(self, session: Session, *, drop_in_flight: bool) -> None:
        if session.ending:
            return
        session.ending = True
        for side in session.sides.values():
            self._end_side(session, side, drop_in_flight=drop_in_flight)
        self._forget_if_closed(session)

    def _end_side(self, session: Session, side: Side, *, drop_in_flight: bool) -> None:
        if side.node not in self._endpoints:
            side.state = "closed"
        if side.state == "closed":
            self._forget_if_closed(session)
            return
        side.stalled.clear()
        if drop_in_flight:
            side.inbox = deque(("drop" if kind in _MESSAGES else kind, b"") for kind, _ in side.inbox)
        self._enqueue(side, "close", b"", self.scheduler.now_ns + self._delay_ns(side.link))

    # ------------------------------------------------------------------------------------------ messages
    def _delay_ns(self, link: Link) -> int:
        profile, random = self.profile, link.rng.random
        delay = profile.delay_ms_min - log(1.0 - random()) * profile.delay_ms_mean
        if random() < profile.tail_probability:
            delay += random() * profile.tail_ms_max
        return int(delay * link.slowdown * NS_PER_MS)

    def send(self, src: NodeId, dst: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        endpoint = self._endpoints.get(src)
        session = endpoint.sessions.get((dst, channel)) if endpoint is not None else None
        if session is None:
            return False
        side, payload = session.sides[dst], b"".join(parts)
        if session.ending or side.state == "closed":
            return True  # taken by the kernel, and lost
        link = side.link
        if link.cut or channel in link.stalled or side.stalled:
            side.stalled.append(payload)
        else:
            self._transmit(side, payload)
        return True

    def _transmit(self, side: Side, payload: bytes) -> None:
        now, size = self.scheduler.now_ns, len(payload)
        busy_ns = int(size / self.profile.bytes_per_ms * side.link.slowdown * NS_PER_MS)
        free_at_ns = side.free_at_ns = (side.free_at_ns if side.free_at_ns > now else now) + busy_ns
        departures = side.departures
        while departures and departures[0][0] <= now:
            departures.popleft()
        departures.append((free_at_ns, size))
        kind = "message"
        if side.link.damage and self._damage_rng.random() < side.link.damage:
            kind, payload = "damaged", self._damaged(payload)
        self._enqueue(side, kind, payload, free_at_ns + self._delay_ns(side.link))

    def _damaged(self, payload: bytes) -> bytes:
        """The frame of a message with a few bits flipped, anywhere in it."""
        frame = bytearray(frame_header(FrameKind.MESSAGE, (payload,)) + payload)
        for _ in range(self._damage_rng.randint(1, FLIPS_MAX)):
            bit = self._damage_rng.randrange(8 * len(frame))
            frame[bit // 8] ^= 1 << bit % 8
        return bytes(frame)

    def backlog_bytes(self, src: NodeId, dst: NodeId, channel: Channel) -> int:
        endpoint = self._endpoints.get(src)
        session = endpoint.sessions.get((dst, channel)) if endpoint is not None else None
        if session is None:
            return 0
        side, now = session.sides[dst], self.scheduler.now_ns
        while side.departures and side.departures[0][0] <= now:
            side.departures.popleft()
        return sum(size for _, size in side.departures) + sum(map(len, side.stalled))

    def is_open(self, src: NodeId, dst: NodeId, channel: Channel) -> bool:
        endpoint = self._endpoints.get(src)
        return endpoint is not None and (dst, channel) in endpoint.sessions

    # ------------------------------------------------------------------------------------------ faults
    def cut(self, src: NodeId, dst: NodeId) -> None:
        """Lets nothing through in this direction; sessions end when the keep-alive runs out."""
        link = self._links[src, dst]
        if link.cut:
            return
        link.cut = True
        link.cut_version += 1
        delay = self._rng.uniform(self.profile.keepalive_ms_min, self.profile.keepalive_ms_max)
        self.scheduler.after_ms(delay, partial(self._keepalive, src, dst, link.cut_version))

    def _keepalive(self, src: NodeId, dst: NodeId, version: int) -> None:
        link = self._links[src, dst]
        if link.cut and link.cut_version == version:
            for channel in Channel:
                self.break_session((min(src, dst), max(src, dst), channel), drop_in_flight=True)

    def heal(self, src: NodeId, dst: NodeId) -> None:
        link = self._links[src, dst]
        if link.cut:
            link.cut = False
            for channel in Channel:
                self._flush(src, dst, channel)
                self._kick((min(src, dst), max(src, dst), channel))

    def stall(self, src: NodeId, dst: NodeId, channel: Channel) -> None:
        """Holds back one direction of one channel; the session stays open."""
        self._links[src, dst].stalled.add(channel)

    def unstall(self, src: NodeId, dst: NodeId, channel: Channel) -> None:
        self._links[src, dst].stalled.discard(channel)
        self._flush(src, dst, channel)

    def slow(self, src: NodeId, dst: NodeId, factor: float) -> None:
        self._links[src, dst].slowdown = factor

    def damage(self, src: NodeId, dst: NodeId, chance: float) -> None:
        """Flips bits of this share of the messages in one direction, as a bad cable or switch does where TCP's checksum
        does not notice."""
        self._links[src, dst].damage = chance

    def resumed(self, node: NodeId) -> None:
        """A paused process runs again: sessions that could not open during the pause are retried."""
        for key in self._keys_of(node):
            self._kick(key)

    def heal_all(self) -> None:
        for (src, dst), link in self._links.items():
            self.heal(src, dst)
            link.slowdown = 1.0
            link.damage = 0.0
            for channel in Channel:
                self.unstall(src, dst, channel)
        for session in self._sessions.values():
            for side in session.sides.values():
                self._expedite(side)

    def _expedite(self, side: Side) -> None:
        """Delivers immediately, in order, what a slow line would have kept for seconds: a retransmission on a line that
        is sixty times slower takes twelve, and everything after it waits."""
        now = self.scheduler.now_ns
        if side.last_arrival_ns > now + self.profile.tail_ms_max * NS_PER_MS:
            side.last_arrival_ns = side.free_at_ns = now + int(self.profile.delay_ms_min * NS_PER_MS)
            side.departures.clear()
            for _ in side.inbox:
                self.scheduler.at(side.last_arrival_ns, side.deliver, side.endpoint.process)

    def is_cut(self, src: NodeId, dst: NodeId) -> bool:
        return self._links[src, dst].cut

    def _flush(self, src: NodeId, dst: NodeId, channel: Channel) -> None:
        session = self._sessions.get((min(src, dst), max(src, dst), channel))
        link = self._links[src, dst]
        if session is None or link.cut or channel in link.stalled:
            return
        side = session.sides[dst]
        held, side.stalled = side.stalled, []
        for payload in held:
            self._transmit(side, payload)


class SimPort:
    """The Network port of one process."""

    def __init__(self, hub: SimNetwork, node: NodeId, process: Process) -> None:
        self._hub = hub
        self._node = node
        self._process = process

    def start(self, handler: NetworkHandler) -> None:
        self._hub.attach(self._node, self._process, handler)

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        return self._hub.send(self._node, peer, channel, parts)

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return self._hub.is_open(self._node, peer, channel)

    def is_at_address(self, peer: NodeId) -> bool:
        return self.is_open(peer, Channel.CONTROL)  # a node has one process here

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return self._hub.backlog_bytes(self._node, peer, channel)

    def close(self) -> None:
        if self._process.alive:
            self._hub.detach(self._node, silently=False)
