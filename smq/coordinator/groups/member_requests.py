"""Requests to a group's coordinator, its answers, and their outcomes in the group's own terms.

Owns the shapes that the ports and the simulation share with the coordinator, and the outcome that each failure of a
command means. Group names are those of the cluster (`kafka-cg-...`). It must never name a protocol's codes:
`kafka/errors.py` maps each outcome to one. Pure. Everything that asks a coordinator may import it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.commands import GroupMember, Partitions
from smq.raft_state.errors import ErrorCode, SmqError

NO_GENERATION = -1
LEAVING: Final = -1  # in place of a member's epoch: Kafka's number


class Outcome(enum.Enum):
    """The value describes it."""

    OK = "done"
    ID_RESERVED = "the member has an id now, and joins again under it"
    REBALANCING = "the members are joining the next generation"
    UNKNOWN_MEMBER = "the group has no such member"
    FENCED_INSTANCE = "another member has this instance id now"
    WRONG_GENERATION = "the member is in another generation than it says"
    PROTOCOL_MISMATCH = "the member shares no protocol with the others, or names another one than the generation's"
    GROUP_FULL = "the group, or all groups together, would be too large with this member"
    TOO_MANY_GROUPS = "the cluster has as many groups as it may have"
    LIMIT_EXCEEDED = "the state machine refused the command for one of its limits"
    TOO_MANY_NEW_GROUPS = "this address has asked for too many groups that have no members yet"
    QUEUE_FULL = "too many requests wait for the group's command under way"
    BAD_SESSION_TIMEOUT = "the session time-out is too short or too long"
    BAD_MEMBER = "a name is too long, there are too many protocols, or a member that is not the leader assigns"
    BAD_GROUP = "the state machine refused the command as malformed"
    NOT_COORDINATOR = "another node coordinates the group"
    NOT_READY = "the coordinator cannot reach a majority"
    UNCERTAIN = "the command failed, or may have taken effect: the state will show"
    FENCED_EPOCH = "the member is in another epoch than it says: it gives up all partitions and joins again"
    UNRELEASED_INSTANCE = "the instance id belongs to a member that has not left"
    UNKNOWN_ASSIGNOR = "there is no such assignor"
    BAD_PATTERN = "the regular expression is none of RE2's, or too long"
    NO_CONSUMER_GROUP = "the group does not exist, or its members use the classic protocol"


_FAILURES: Final = {
    ErrorCode.NOT_COORDINATOR: Outcome.NOT_COORDINATOR,
    ErrorCode.SHUTTING_DOWN: Outcome.NOT_COORDINATOR,
    ErrorCode.UPGRADE_NEEDED: Outcome.NOT_COORDINATOR,
    ErrorCode.LIMIT_EXCEEDED: Outcome.LIMIT_EXCEEDED,
    ErrorCode.INVALID_REQUEST: Outcome.BAD_GROUP,
    ErrorCode.INCONSISTENT_PROTOCOL: Outcome.NO_CONSUMER_GROUP,
}


def outcome_of_failure(error: SmqError) -> Outcome:
    """What a failed command means for the requests that wait for it."""
    return _FAILURES.get(error.code, Outcome.UNCERTAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """`member.member_id` is empty if the member has none yet."""

    group: str
    member: GroupMember
    protocol_type: str
    takes_id_first: bool  # KIP-394: a new member gets an id first, and joins again under it
    can_skip_assignment: bool  # KIP-814


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Only the leader gets `members`: id, instance id and metadata of the chosen protocol of every member."""

    outcome: Outcome
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[tuple[str, str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The sender of a request. `instance_id` is empty if the member is not static."""

    member_id: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """`protocol_type` and `protocol` are None if the request does not name them."""

    group: str
    who: Identity
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()  # by member id; from the leader only


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    outcome: Outcome
    protocol_type: str = ""
    protocol: str = ""
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat of a consumer group's member (KIP-848). None, or -1, is what has not changed since the last one.
    `epoch` is 0 to join, LEAVING to leave, and AWAY_EPOCH of a static member that will be back. `may_see` says of a
    topic whether a pattern of this member may match it."""

    group: str
    member_id: str
    epoch: int
    instance_id: str = ""
    rack: str | None = None
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    client_id: str = ""
    client_host: str = ""
    may_see: Callable[[str], bool] = lambda _: True

    @property
    def is_full(self) -> bool:
        """It says everything, as after an error: the member may have missed an answer."""
        says_topics = self.topics is not None or self.pattern is not None
        return self.epoch == 0 or (self.rebalance_timeout_ms >= 0 and says_topics and self.owned is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beaten:
    """The answer to a heartbeat. `assignment` is None if the member knows it."""

    outcome: Outcome
    member_id: str = ""
    epoch: int = 0
    assignment: Partitions | None = None


OnBeaten: TypeAlias = Callable[[Beaten], None]
OnJoined: TypeAlias = Callable[[Joined], None]
OnSynced: TypeAlias = Callable[[Synced], None]
OnLeft: TypeAlias = Callable[[list[Outcome]], None]
