"""What the members of a group tell each other, in Kafka's bytes: subscriptions and assignments.

Owns the two formats of Kafka's consumer protocol. A group's coordinator passes them on unread, so that clients of Kafka
and of smq understand each other. Newer versions only append fields, which a reader leaves unread. Pure.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from smq.clients.types import TopicPartition

PROTOCOL_TYPE: Final = "consumer"
NO_GENERATION: Final = -1
_OWNED_VERSION: Final = 1  # of a subscription: it names what the member owns
_GENERATION_VERSION: Final = 2  # and the generation in which it got that
_NO_BYTES: Final = struct.pack(">i", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """`owned`: what a member keeps while it joins, since `generation`. Of an eager member that is nothing."""

    topics: tuple[str, ...] = ()
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION


class Unreadable(ValueError):
    """The bytes are not of this protocol."""


def encode_subscription(subscription: Subscription, *, is_cooperative: bool) -> bytes:
    """Without what only cooperative members need to know, for others: all versions of all clients can read it."""
    topics = sorted(subscription.topics)
    version = _GENERATION_VERSION if is_cooperative else 0
    out = [struct.pack(">hi", version, len(topics)), *map(_string, topics), _NO_BYTES]
    if is_cooperative:
        out += [_places(subscription.owned), struct.pack(">i", subscription.generation)]
    return b"".join(out)


def decode_subscription(data: bytes) -> Subscription:
    """Unreadable if it is none."""
    reader = _Reader(data)
    version = reader.number(">h")
    topics = tuple(reader.string() for _ in range(reader.count()))
    reader.skip_bytes()
    owned = reader.places() if version >= _OWNED_VERSION else frozenset()
    generation = reader.number(">i") if version >= _GENERATION_VERSION else NO_GENERATION
    return Subscription(topics=topics, owned=owned, generation=generation)


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    return struct.pack(">h", 0) + _places(partitions) + _NO_BYTES


def decode_assignment(data: bytes) -> frozenset[TopicPartition]:
    """Unreadable if it is none. No bytes at all are nothing assigned."""
    if not data:
        return frozenset()
    reader = _Reader(data)
    reader.number(">h")
    return reader.places()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">h", len(data)) + data


def _places(partitions: Iterable[TopicPartition]) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        by_topic.setdefault(topic, []).append(partition)
    out = [struct.pack(">i", len(by_topic))]
    for topic, indexes in by_topic.items():
        out += [_string(topic), struct.pack(f">i{len(indexes)}i", len(indexes), *indexes)]
    return b"".join(out)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, kind: str) -> int:
        try:
            (found,) = struct.unpack_from(kind, self._data, self._at)
        except struct.error as e:
            raise Unreadable("the bytes end early") from e
        self._at += struct.calcsize(kind)
        return int(found)

    def count(self) -> int:
        """Of elements that follow: no more than there are bytes for."""
        found = self.number(">i")
        if not -1 <= found <= len(self._data):
            raise Unreadable(f"a count of {found} in {len(self._data)} bytes")
        return max(found, 0)

    def string(self) -> str:
        data = self._take(self.number(">h"))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as e:
            raise Unreadable("a name is no text") from e

    def skip_bytes(self) -> None:
        self._take(max(self.number(">i"), 0))

    def places(self) -> frozenset[TopicPartition]:
        found: set[TopicPartition] = set()
        for _ in range(self.count()):
            topic = self.string()
            found.update((topic, self.number(">i")) for _ in range(self.count()))
        return frozenset(found)

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self._at:
            raise Unreadable(f"a length of {size} bytes, where {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]
