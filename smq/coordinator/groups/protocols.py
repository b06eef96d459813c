"""Which protocol a generation uses, and the topics that consumers name in theirs.

Owns the vote, and the one part of a member's metadata that a server must read: the topics that a consumer subscribes
to, for the deletion of offsets. Pure. Metadata that does not parse is no subscription, and never an error.
"""

import struct
from collections import Counter
from collections.abc import Iterable
from typing import Final

from smq.raft_state.commands import GroupMember

CONSUMER: Final = "consumer"
_TOPICS_MAX: Final = 1_000_000  # far more than the metadata's own cap allows


def known_to_all(members: Iterable[GroupMember]) -> set[str]:
    """Names of the protocols that every member knows."""
    common: set[str] | None = None
    for member in members:
        names = {name for name, _ in member.protocols}
        common = names if common is None else common & names
    return common or set()


def chosen(members: list[GroupMember]) -> str:
    """Each member votes for the first protocol in its list that all members know. Of equals, the one with the first
    vote wins. Empty if they share none, which the state machine refuses."""
    common = known_to_all(members)
    if not common:
        return ""
    votes = Counter(next(name for name, _ in member.protocols if name in common) for member in members)
    return votes.most_common(1)[0][0]


def metadata_of(member: GroupMember, protocol: str) -> bytes:
    """The member's metadata for a protocol; empty if it does not know the protocol."""
    return next((data for name, data in member.protocols if name == protocol), b"")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """The topics of a consumer's subscription (version i16, topics, ...); None if the bytes are none."""
    try:
        version, count = struct.unpack_from(">hi", metadata)
        if version < 0 or not 0 <= count <= _TOPICS_MAX:
            return None
        topics, at = [], 6
        for _ in range(count):
            (size,) = struct.unpack_from(">h", metadata, at)
            end = at + 2 + size
            if size < 0 or end > len(metadata):
                return None
            topics.append(str(metadata[at + 2 : end], "utf-8"))
            at = end
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
