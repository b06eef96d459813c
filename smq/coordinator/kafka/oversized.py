"""A Produce request that is larger than the node takes, read without its records, so that it can be answered.

Owns which of its bytes are kept: all but the records. If its connection were closed instead, its client would send the
same request again and again, and give up without a reason. It must never keep more than KEPT_BYTES_MAX.
`kafka.connection` alone imports it.
"""

import struct
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.codec import CodecError
from smq.coordinator.kafka.produce import BY_ID_VERSION

KEPT_BYTES_MAX: Final = 1 << 20  # the names and numbers of ten thousand partitions and more
_FLEXIBLE_VERSION: Final = 9
_HEAD: Final = struct.Struct(">hhi")  # key, version, correlation id
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_ACKS_AND_TIMEOUT_BYTES: Final = 6
_TOPIC_ID_BYTES: Final = 16
_VARINT_BYTES_MAX: Final = 5

T = TypeVar("T")
_Steps: TypeAlias = Generator[None, bytes, T]  # each step is sent the bytes that it has asked for


class Oversized:
    """`feed` it what follows the size, until there is a `frame`: the request with null in place of all records.
    CodecError for anything but a Produce that is served."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.frame: memoryview | None = None
        self._left = size  # of the request, not asked for yet
        self._needed = 0  # of what is asked for
        self._is_skipped = False
        self._piece = bytearray()
        self._kept = bytearray()
        self._steps = self._request()
        next(self._steps)

    def feed(self, data: memoryview) -> int:
        """Returns how many bytes it has used: fewer than there are only if the request ends before."""
        at = 0
        while self.frame is None and at < len(data):
            stop = min(at + self._needed, len(data))
            if not self._is_skipped:
                self._piece += data[at:stop]
            self._needed -= stop - at
            at = stop
            if not self._needed:
                self._step()
        return at

    def _step(self) -> None:
        piece, self._piece = bytes(self._piece), bytearray()
        try:
            self._steps.send(piece)
        except StopIteration:
            self.frame = memoryview(bytes(self._kept))

    def _garbled(self) -> CodecError:
        return CodecError(f"a request of {self.size} bytes is more than the node takes, and garbled")

    # ------------------------------------------------------------------------------------ the parts of a request
    def _request(self) -> _Steps[None]:
        key, version, _ = _HEAD.unpack((yield from self._keep(_HEAD.size)))
        if key != ApiKey.PRODUCE or version not in SERVED[ApiKey.PRODUCE].versions:
            raise CodecError(f"a request of {self.size} bytes is more than the node takes")
        is_flexible = version >= _FLEXIBLE_VERSION
        yield from self._text(is_compact=False)  # the client's name
        yield from self._tags(is_flexible)
        yield from self._text(is_compact=is_flexible)  # the transactional id
        yield from self._keep(_ACKS_AND_TIMEOUT_BYTES)
        for _ in range((yield from self._length(is_flexible))):
            if version >= BY_ID_VERSION:
                yield from self._keep(_TOPIC_ID_BYTES)
            else:
                yield from self._text(is_compact=is_flexible)
            for _ in range((yield from self._length(is_flexible))):
                yield from self._keep(_INT32.size)  # the partition
                yield from self._records(is_flexible)
                yield from self._tags(is_flexible)
            yield from self._tags(is_flexible)
        yield from self._tags(is_flexible)
        yield from self._ask(self._left, is_skipped=True)  # librdkafka may send a byte more

    def _ask(self, size: int, *, is_skipped: bool) -> _Steps[bytes]:
        if not 0 <= size <= self._left:
            raise self._garbled()
        self._left -= size
        self._needed, self._is_skipped = size, is_skipped
        return (yield) if size else b""

    def _keep(self, size: int) -> _Steps[bytes]:
        if len(self._kept) + size > KEPT_BYTES_MAX:
            raise self._garbled()
        piece = yield from self._ask(size, is_skipped=False)
        self._kept += piece
        return piece

    def _records(self, is_flexible: bool) -> _Steps[None]:
        start = len(self._kept)
        size = yield from self._length(is_flexible)
        self._kept[start:] = b"\0" if is_flexible else _INT32.pack(-1)
        yield from self._ask(max(size, 0), is_skipped=True)

    def _text(self, *, is_compact: bool) -> _Steps[None]:
        if is_compact:
            size = (yield from self._varint()) - 1
        else:
            (size,) = _INT16.unpack((yield from self._keep(_INT16.size)))
        yield from self._keep(max(size, 0))

    def _length(self, is_flexible: bool) -> _Steps[int]:
        """-1 of a null."""
        if is_flexible:
            return (yield from self._varint()) - 1
        (size,) = _INT32.unpack((yield from self._keep(_INT32.size)))
        return int(size)

    def _tags(self, is_flexible: bool) -> _Steps[None]:
        for _ in range((yield from self._varint()) if is_flexible else 0):
            yield from self._varint()
            yield from self._keep((yield from self._varint()))

    def _varint(self) -> _Steps[int]:
        value = 0
        for place in range(_VARINT_BYTES_MAX):
            byte = (yield from self._keep(1))[0]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value
        raise self._garbled()
