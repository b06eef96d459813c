"""The bytes between nodes: frames, and the hello that opens a session.

Owns the framing only: no sockets, no clock, no sessions. Everything read is bounded before it is stored, and checked
before it is used. This package imports it, and so does the simulated network.

A frame is be32 length of the payload, u8 kind, be32 CRC-32C of the payload, be32 CRC-32C of these nine bytes, payload.
The header has a CRC of its own, because a reader that believed a damaged length would wait for bytes that never come.
The first frame of each side is HELLO; one that only asks sends WHO, and gets HELLO or REFUSED.
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from smq.raft_state.ids import NodeId
from smq.replication.ports import Buffer, Channel

HEADER_BYTES: Final = 13
_FIELDS: Final = struct.Struct(">IBI")  # length, kind, CRC of the payload
_CRC: Final = struct.Struct(">I")  # of those
PROTOCOL_VERSION: Final = 1
HELLO_BYTES_MAX: Final = 512  # the most that an unknown peer can make us hold
_MAGIC: Final = b"SMQP"
_HELLO: Final = struct.Struct(">4sHiiB16sQq")


class FrameKind(enum.IntEnum):
    HELLO = 0
    PING = 1  # empty: the sender is alive and had nothing to send
    MESSAGE = 2
    WHO = 3  # a hello that opens no session: which process is here, and do you hold another one for me?
    REFUSED = 4  # text: why another process is held for the receiver's node


class FrameError(ValueError):
    """The peer does not speak this protocol; its connection must be closed."""


class FrameDamaged(FrameError):
    """The bytes are not those that a peer sent. Nothing after them on this connection can be trusted."""


def frame_header(kind: FrameKind, parts: Sequence[Buffer]) -> bytes:
    """The bytes before the payload that `parts` make up."""
    size = crc = 0
    for part in parts:
        size += len(part)
        crc = crc32c(part, crc)
    fields = _FIELDS.pack(size, kind, crc)
    return fields + _CRC.pack(crc32c(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Sender, receiver and purpose of a session. `process` is when the process began (be64 ns) and 8 random bytes;
    `serial` grows with each dial."""

    sender: NodeId
    receiver: NodeId
    channel: Channel
    process: bytes
    serial: int
    wall_ms: int  # the sender's clock, for a comparison alone
    cluster_id: str


def encode_hello(hello: Hello) -> bytes:
    """The payload of a HELLO frame."""
    fixed = _HELLO.pack(
        _MAGIC,
        PROTOCOL_VERSION,
        hello.sender,
        hello.receiver,
        hello.channel,
        hello.process,
        hello.serial,
        hello.wall_ms,
    )
    return fixed + hello.cluster_id.encode()


def decode_hello(payload: memoryview) -> Hello:
    """Inverse of `encode_hello`; FrameError says what is wrong."""
    if len(payload) < _HELLO.size:
        raise FrameError(f"a hello of {len(payload)} bytes is too short: is this port meant for something else?")
    magic, version, sender, receiver, channel, process, serial, wall_ms = _HELLO.unpack_from(payload)
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
        wall_ms=wall_ms,
        cluster_id=cluster_id,
    )


def encode_reason(reason: str) -> bytes:
    """The payload of a REFUSED frame."""
    return reason.encode()[:HELLO_BYTES_MAX]


def decode_reason(payload: memoryview) -> str:
    """Inverse of `encode_reason`, fit for a log."""
    text = bytes(payload[:HELLO_BYTES_MAX]).decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


class FrameReader:
    """Cuts received chunks into frames. A frame within one chunk is a view of it; a longer one is gathered once,
    into memory of its own."""

    def __init__(self) -> None:
        self.payload_bytes_max = HELLO_BYTES_MAX  # raised by the session once the peer is known
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._kind = FrameKind.HELLO
        self._crc = 0  # of the payload that comes next

    def feed(self, chunk: bytes) -> Iterator[tuple[FrameKind, memoryview]]:
        """The frames that `chunk` completes, in order. FrameError for an invalid frame."""
        view = memoryview(chunk)
        while view:
            if self._body is not None:
                view = self._fill(self._body, view)
                if self._filled == len(self._body):
                    body, self._body = self._body, None
                    yield self._kind, self._checked(memoryview(body).toreadonly())
                continue
            parsed = self._header(view)
            if parsed is None:
                return
            length, view = parsed
            if len(view) >= length:
                yield self._kind, self._checked(view[:length])
                view = view[length:]
            else:
                self._body, self._filled = bytearray(length), 0

    def _fill(self, body: bytearray, view: memoryview) -> memoryview:
        take = min(len(view), len(body) - self._filled)
        body[self._filled : self._filled + take] = view[:take]
        self._filled += take
        return view[take:]

    def _checked(self, payload: memoryview) -> memoryview:
        if crc32c(payload) != self._crc:
            raise FrameDamaged(f"a frame of {len(payload)} bytes fails its CRC: they were damaged on the way")
        return payload

    def _header(self, view: memoryview) -> tuple[int, memoryview] | None:
        """(payload length, what follows the header), or None while the header is incomplete."""
        if not self._head and len(view) >= HEADER_BYTES:
            length, kind = self._fields(view)
            view = view[HEADER_BYTES:]
        else:
            take = HEADER_BYTES - len(self._head)
            self._head += view[:take]
            view = view[take:]
            if len(self._head) < HEADER_BYTES:
                return None
            length, kind = self._fields(self._head)
            self._head.clear()
        if length > self.payload_bytes_max:
            raise FrameError(f"a frame of {length} bytes exceeds the limit of {self.payload_bytes_max}")
        try:
            self._kind = FrameKind(kind)
        except ValueError as e:
            raise FrameError(f"unknown frame kind {kind}") from e
        return length, view

    def _fields(self, head: Buffer) -> tuple[int, int]:
        length, kind, self._crc = _FIELDS.unpack_from(head)
        (crc,) = _CRC.unpack_from(head, _FIELDS.size)
        if crc32c(bytes(head[: _FIELDS.size])) != crc:
            raise FrameDamaged(
                "a frame's header fails its CRC: it was damaged on the way, or this port is meant for something else"
            )
        return length, kind
