"""Several messages in one frame.

Owns how the messages that a turn sends to one peer share a frame, and how they are told apart again. It must never look
into a message: `wire` does. Parsing is bounded, as there.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Final

from smq.replication.net.pieces import WireError, cut, packed
from smq.replication.ports import Buffer

_SEVERAL: Final = 23  # then their number, the length of each, and the messages
_COUNT: Final = struct.Struct(">BI")


def joined(messages: Sequence[Sequence[Buffer]]) -> Sequence[Buffer]:
    """One frame's payload from encoded messages, in this order, as a gather list."""
    if len(messages) == 1:
        return messages[0]
    return [
        _COUNT.pack(_SEVERAL, len(messages)) + packed(sum(map(len, m)) for m in messages),
        *chain.from_iterable(messages),
    ]


def split(payload: memoryview) -> Sequence[memoryview]:
    """The encoded messages in a frame's payload. WireError if they do not fill it, or if one is empty."""
    if not payload:
        raise WireError("an empty message")
    if payload[0] != _SEVERAL:
        return (payload,)
    try:
        count = _COUNT.unpack_from(payload)[1]
    except struct.error as e:
        raise WireError(f"a frame of several messages has {len(payload)} bytes") from e
    messages = cut(payload, _COUNT.size, count)
    if not all(messages):
        raise WireError("an empty message among several")
    return messages
