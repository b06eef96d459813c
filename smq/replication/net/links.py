"""Sending to peers: messages encoded onto the network's sessions.

Owns the way out only; the dispatcher owns the way in. Every part of a node sends through it. What a turn of the loop
sends to one peer on one channel leaves in one frame, because a frame costs more than a small message, and its receiver
handles all of them in one turn. It must never reorder the messages of a channel, nor keep one beyond the turn or its
session: a message that finds no open session is not sent, one whose session ends is lost with it, and its sender
recovers. What Raft says comes here once it is on disk (`raft.executor`).
"""

from collections.abc import Callable, Sequence
from typing import Final

from smq.raft_state.ids import NodeId
from smq.replication.net import wire
from smq.replication.ports import Buffer, Channel, Network

_RAFT: Final = bytes((wire.RAFT,))
# A frame of several messages is complete once it is this long or has this many parts: the receiver handles a frame
# without a pause, some 40 us per batch.
FRAME_BYTES: Final = 1 << 20
FRAME_PARTS: Final = 256


class _Frame:
    """The messages of this turn to one peer on one channel."""

    __slots__ = ("messages", "part_count", "size")

    def __init__(self) -> None:
        self.messages: list[Sequence[Buffer]] = []
        self.size = self.part_count = 0


class Links:
    def __init__(self, network: Network, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._network = network
        self._call_soon = call_soon
        self._frames: dict[tuple[NodeId, Channel], _Frame] = {}
        self._is_flush_due = False
        self.is_open = network.is_open

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        """Bytes not yet taken by the operating system."""
        frame = self._frames.get((peer, channel))
        return self._network.backlog_bytes(peer, channel) + (frame.size if frame is not None else 0)

    def send(self, peer: NodeId, channel: Channel, message: wire.Message) -> bool:
        """False, and nothing sent, if no session is open."""
        return self._add(peer, channel, wire.encode(message))

    def send_raft(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        """A message of the engine, which encodes its own."""
        self._add(peer, Channel.CONTROL, [_RAFT, *parts])

    def _add(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        if not self._network.is_open(peer, channel):
            return False
        key = peer, channel
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = _Frame()
        frame.messages.append(parts)
        frame.size += sum(map(len, parts))
        frame.part_count += len(parts)
        if frame.size >= FRAME_BYTES or frame.part_count >= FRAME_PARTS:
            self._send_frame(key)
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._call_soon(self.flush)
        return True

    def collect(self) -> None:
        """The caller sends now, and calls `flush` when it has sent everything: no callback is needed for that."""
        self._is_flush_due = True

    def flush(self) -> None:
        """Sends what this turn has collected."""
        self._is_flush_due = False
        for key in list(self._frames):
            self._send_frame(key)

    def _send_frame(self, key: tuple[NodeId, Channel]) -> None:
        self._network.send(*key, wire.joined(self._frames.pop(key).messages))

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        """What was meant for this session must not appear in the next one."""
        self._frames.pop((peer, channel), None)
