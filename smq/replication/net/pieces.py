"""Several pieces of bytes in one message: their lengths first, then the pieces.

Owns that layout and its bounds. It must never copy a piece. The modules of messages import it.
"""

import struct
from collections.abc import Iterable
from typing import Final

from smq.replication.ports import Buffer

ITEMS_MAX: Final = 1 << 20  # in one message; the frame cap bounds the bytes
_LENGTH: Final = struct.Struct(">I")


class WireError(ValueError):
    """The bytes are not a message of ours."""


def lengths_of(pieces: Iterable[Buffer]) -> bytes:
    """What precedes the pieces."""
    return packed(map(len, pieces))


def packed(lengths: Iterable[int]) -> bytes:
    return b"".join([_LENGTH.pack(length) for length in lengths])


def cut(payload: memoryview, offset: int, count: int) -> list[memoryview]:
    """At `offset`, `count` lengths and then pieces of these lengths, to the payload's end. WireError otherwise."""
    at = offset + count * _LENGTH.size
    if count > ITEMS_MAX or at > len(payload):
        raise WireError(f"{count} pieces do not fit {len(payload)} bytes")
    pieces: list[memoryview] = []
    for (length,) in _LENGTH.iter_unpack(payload[offset:at]):
        pieces.append(payload[at : at + length])
        at += length
    if at != len(payload):
        raise WireError(f"the pieces end at byte {at} of {len(payload)}")
    return pieces
