"""The outcomes of requests to a group, in the group's own terms.

Owns the outcomes, and the one that each failure of a command means. It must never name a protocol's codes:
`kafka/errors.py` maps each outcome to one. Pure. Everything that asks a coordinator may import it.
"""

import enum
from typing import Final

from smq.raft_state.errors import ErrorCode, SmqError


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


_FAILURES: Final = {
    ErrorCode.NOT_COORDINATOR: Outcome.NOT_COORDINATOR,
    ErrorCode.SHUTTING_DOWN: Outcome.NOT_COORDINATOR,
    ErrorCode.UPGRADE_NEEDED: Outcome.NOT_COORDINATOR,
    ErrorCode.LIMIT_EXCEEDED: Outcome.LIMIT_EXCEEDED,
    ErrorCode.INVALID_REQUEST: Outcome.BAD_GROUP,
}


def outcome_of_failure(error: SmqError) -> Outcome:
    """What a failed command means for the requests that wait for it."""
    return _FAILURES.get(error.code, Outcome.UNCERTAIN)
