"""The bytes between nodes: frames, and the hello that opens a session.

Owns the framing only: no sockets, no clock, no sessions. Everything read is bounded before it is stored. Only this
package imports it.

A frame is be32 length of the payload, u8 kind, payload. The first frame of each side is HELLO.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from smq.raft_state.ids import NodeId
from smq.replication.ports import Channel

HEADER: Final = struct.Struct(">IB")
PROTOCOL_VERSION: Final = 1
HELLO_BYTES_MAX: Final = 512  # the most that an unknown peer can make us hold
_MAGIC: Final = b"SMQP"
_HELLO: Final = struct.Struct(">4sHiiB16sQ")


class FrameKind(enum.IntEnum):
    HELLO = 0
    PING = 1  # empty: the sender is alive and had nothing to send
    MESSAGE = 2


class FrameError(ValueError):
    """The peer does not speak this protocol; its connection must be closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Sender, receiver and purpose of a session. `process` is random per process; `serial` grows with each dial."""

    sender: NodeId
    receiver: NodeId
    channel: Channel
    process: bytes
    serial: int
    cluster_id: str


def encode_hello(hello: Hello) -> bytes:
    """The payload of a HELLO frame."""
    fixed = _HELLO.pack(
        _MAGIC, PROTOCOL_VERSION, hello.sender, hello.receiver, hello.channel, hello.process, hello.serial
    )
    return fixed + hello.cluster_id.encode()


def decode_hello(payload: memoryview) -> Hello:
    """Inverse of `encode_hello`; FrameError says what is wrong."""
    if len(payload) < _HELLO.size:
        raise FrameError(f"a hello of {len(payload)} bytes is too short: is this port meant for something else?")
    magic, version, sender, receiver, channel, process, serial = _HELLO.unpack_from(payload)
    if magic != _MAGIC:
        raise FrameError("the hello does not begin with smq's magic: is this port meant for something else?")
    if version != PROTOCOL_VERSION:
        raise FrameError(
            f"the peer speaks version {version} of the protocol, this node {PROTOCOL_VERSION}: run the same smq on both"
        )
    try:
        cluster_id = bytes(payload[_HELLO.size :]).decode()
        purpose = Channel(channel)
    except (UnicodeDecodeError, ValueError) as e:
        raise FrameError(f"the hello does not decode: {e}") from e
    return Hello(
        sender=NodeId(sender),
        receiver=NodeId(receiver),
        channel=purpose,
        process=process,
        serial=serial,
        cluster_id=cluster_id,
    )


class FrameReader:
    """Cuts received chunks into frames. A frame within one chunk is a view of it; a longer one is gathered once,
    into memory of its own."""

    def __init__(self) -> None:
        self.payload_bytes_max = HELLO_BYTES_MAX  # raised by the session once the peer is known
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._kind = FrameKind.HELLO

    def feed(self, chunk: bytes) -> Iterator[tuple[FrameKind, memoryview]]:
        """The frames that `chunk` completes, in order. FrameError for an invalid frame."""
        view = memoryview(chunk)
        while view:
            if self._body is not None:
                view = self._fill(self._body, view)
                if self._filled == len(self._body):
                    body, self._body = self._body, None
                    yield self._kind, memoryview(body).toreadonly()
                continue
            parsed = self._header(view)
            if parsed is None:
                return
            length, view = parsed
            if len(view) >= length:
                yield self._kind, view[:length]
                view = view[length:]
            else:
                self._body, self._filled = bytearray(length), 0

    def _fill(self, body: bytearray, view: memoryview) -> memoryview:
        take = min(len(view), len(body) - self._filled)
        body[self._filled : self._filled + take] = view[:take]
        self._filled += take
        return view[take:]

    def _header(self, view: memoryview) -> tuple[int, memoryview] | None:
        """(payload length, what follows the header), or None while the header is incomplete."""
        if not self._head and len(view) >= HEADER.size:
            length, kind = HEADER.unpack_from(view)
            view = view[HEADER.size :]
        else:
            take = HEADER.size - len(self._head)
            self._head += view[:take]
            view = view[take:]
            if len(self._head) < HEADER.size:
                return None
            length, kind = HEADER.unpack(self._head)
            self._head.clear()
        if length > self.payload_bytes_max:
            raise FrameError(f"a frame of {length} bytes exceeds the limit of {self.payload_bytes_max}")
        try:
            self._kind = FrameKind(kind)
        except ValueError as e:
            raise FrameError(f"unknown frame kind {kind}") from e
        return length, view
