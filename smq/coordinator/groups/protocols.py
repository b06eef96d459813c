"""Which protocol a generation uses, and what a server reads of a consumer's bytes.

Owns the vote, and these two parts: the topics that a consumer subscribes to, and the partitions that it was assigned.
Pure. Bytes that do not parse are neither, and never an error.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from smq.raft_state.commands import GroupMember
from smq.raft_state.state import GroupKind, GroupState

CONSUMER: Final = "consumer"
_TOPICS_MAX: Final = 1_000_000  # far more than the metadata's own cap allows
_PARTITIONS_MAX: Final = 1_000_000  # far more than an assignment's own cap allows


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


def subscriptions(group: GroupState) -> frozenset[str] | None:
    """The topics that the members subscribe to. None if they are no consumers, or their metadata does not name topics
    as that of consumers does."""
    topics: frozenset[str] = frozenset()
    if group.kind is GroupKind.CONSUMER:
        wanted = (m.subscription for m in group.members.values())
        return frozenset(name for s in wanted for name in (*s.topics, *s.matched))
    for m in group.members.values():
        found = subscribed_topics(metadata_of(m.member, group.protocol)) if group.protocol_type == CONSUMER else None
        if found is None:
            return None
        topics |= found
    return topics


def assigned_indexes(assignment: bytes) -> list[tuple[str, tuple[int, ...]]] | None:
    """The partitions of a consumer's assignment (version i16, topics with partitions, ...), by topic. None if the bytes
    are no assignment. No bytes at all assign nothing."""
    found: list[tuple[str, tuple[int, ...]]] = []
    if not assignment:
        return found
    try:
        (topics,) = struct.unpack_from(">i", assignment, 2)
        at = 6
        for _ in range(min(topics, _TOPICS_MAX)):
            (size,) = struct.unpack_from(">h", assignment, at)
            topic = str(assignment[at + 2 : at + 2 + size], "utf-8")
            (count,) = struct.unpack_from(">i", assignment, at + 2 + size)
            at += 6 + size
            if size < 0 or not 0 <= count <= _PARTITIONS_MAX:
                return None
            found.append((topic, struct.unpack_from(f">{count}i", assignment, at)))
            at += 4 * count
    except (struct.error, UnicodeDecodeError):
        return None
    return found


def subscription(member: GroupMember, group: GroupState) -> object:
    """The part of a member's metadata that matters to the others: a consumer's topics, not what it still owns."""
    metadata = metadata_of(member, group.protocol)
    topics = subscribed_topics(metadata) if group.protocol_type == CONSUMER else None
    return topics if topics is not None else metadata


def is_partition_free(group: GroupState, partition_count: Callable[[str], int]) -> bool:
    """Whether a partition of the subscribed topics has no member. The next generation is to assign it, and only the
    former process may have known that: as a cooperative member that was to give a partition up and join again, or as a
    leader that was to see its topic grow. False if the group's bytes do not say what is subscribed or assigned."""
    topics = subscriptions(group)
    if not topics:
        return False
    assigned: dict[str, set[int]] = {topic: set() for topic in topics}
    for m in group.members.values():
        found = assigned_indexes(m.assignment)
        if found is None:
            return False
        for topic, indexes in found:
            if topic in assigned:
                assigned[topic].update(indexes)
    return not all(indexes.issuperset(range(partition_count(topic))) for topic, indexes in assigned.items())
