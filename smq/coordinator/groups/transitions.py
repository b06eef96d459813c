"""The life of a group at its coordinator as a table: phase x event -> action.

Owns the table, and the phases to which each action may lead. Pure data: `live` looks an action up and runs it. A phase
is never stored: it follows from the replicated state, the open round and the command under way. docs/groups.md is
generated from here.
"""

import enum
from collections.abc import Mapping
from typing import Final

from smq.raft_state.state import GroupPhase


class Phase(enum.Enum):
    """The value describes it."""

    EMPTY = "The group has no members and no open round."
    JOINING = "A round is open: members join the next generation."
    SYNCING = "A generation has formed. Its leader has not given the assignment yet."
    STABLE = "The assignment is replicated."
    CHANGING = "A command is under way. Whatever would change the group waits for its reply."
    CLOSED = "This node no longer coordinates the group, or has given this object up after a failed command."


class Event(enum.Enum):
    """The value describes it."""

    JOIN = "A member asks to join."
    JOIN_WITHDRAWN = "The sender of a waiting join has disconnected."
    SYNC = "A member asks for its assignment. The leader's request carries the assignments of all."
    SYNC_WITHDRAWN = "The sender of a waiting sync has disconnected."
    HEARTBEAT = "A member says that it is alive."
    LEAVE = "Members leave."
    TIME = "A session, a reserved id, the round or the wait for syncs may have run out."
    PAUSED = "This node stood still, or could not reach a majority, and heard no member meanwhile."
    APPLIED = "The command under way has taken effect."
    FAILED = "The command under way was refused, timed out, or was overtaken by another coordinator."
    CLOSE = "This node no longer coordinates the group."


class Action(enum.Enum):
    """The value describes it."""

    NOTHING = "Does nothing."
    QUEUE = "Keeps the request until the command under way has its reply."
    REFUSE_CLOSED = "Answers with the outcome that the group was closed with."
    REFUSE_UNKNOWN = "Answers that the group has no such member."
    REFUSE_REBALANCING = "Answers a member that it must join again."
    ADMIT = "Refuses the member, reserves an id for it, replaces its former self, or puts it into the round."
    ADMIT_OR_REPEAT = "As ADMIT, but a member that asks again unchanged gets its current generation again."
    DROP_JOIN = "Takes the member out of the round, which may be over without it."
    HOLD_SYNC = "Keeps the request until there is an assignment. Replicates the assignment of the leader."
    GIVE_ASSIGNMENT = "Answers with the member's assignment."
    DROP_SYNC = "Forgets the waiting request."
    KEEP_ALIVE = "Restarts the member's session and answers from memory."
    REMOVE_LEAVING = "Removes the members that leave. The others rebalance."
    EXPIRE_IDS = "Forgets reserved ids that were not used in time."
    EVICT = "Removes members that are silent or late to ask for their assignment."
    EVICT_OR_END_ROUND = "Removes silent members. If there are none, ends the round once it is over."
    GRANT_TIME = "Restarts all sessions and waits."
    FINISH_CHANGE = "Answers the requests that waited for the command, then runs the queue."
    GIVE_UP = "Closes the object. The next one reads the group from the replicated state."
    CLOSE = "Answers all waiting and queued requests with the reason."


# An event that a phase does not name does nothing in it.
_ROWS: Final[Mapping[Phase, Mapping[Event, Action]]] = {
    Phase.EMPTY: {
        Event.JOIN: Action.ADMIT,
        Event.SYNC: Action.REFUSE_UNKNOWN,
        Event.SYNC_WITHDRAWN: Action.DROP_SYNC,
        Event.HEARTBEAT: Action.REFUSE_UNKNOWN,
        Event.LEAVE: Action.REMOVE_LEAVING,
        Event.TIME: Action.EXPIRE_IDS,
        Event.CLOSE: Action.CLOSE,
    },
    Phase.JOINING: {
        Event.JOIN: Action.ADMIT,
        Event.JOIN_WITHDRAWN: Action.DROP_JOIN,
        Event.SYNC: Action.REFUSE_REBALANCING,
        Event.SYNC_WITHDRAWN: Action.DROP_SYNC,
        Event.HEARTBEAT: Action.KEEP_ALIVE,
        Event.LEAVE: Action.REMOVE_LEAVING,
        Event.TIME: Action.EVICT_OR_END_ROUND,
        Event.PAUSED: Action.GRANT_TIME,
        Event.CLOSE: Action.CLOSE,
    },
    Phase.SYNCING: {
        Event.JOIN: Action.ADMIT_OR_REPEAT,
        Event.SYNC: Action.HOLD_SYNC,
        Event.SYNC_WITHDRAWN: Action.DROP_SYNC,
        Event.HEARTBEAT: Action.KEEP_ALIVE,
        Event.LEAVE: Action.REMOVE_LEAVING,
        Event.TIME: Action.EVICT,
        Event.PAUSED: Action.GRANT_TIME,
        Event.CLOSE: Action.CLOSE,
    },
    Phase.STABLE: {
        Event.JOIN: Action.ADMIT_OR_REPEAT,
        Event.SYNC: Action.GIVE_ASSIGNMENT,
        Event.SYNC_WITHDRAWN: Action.DROP_SYNC,
        Event.HEARTBEAT: Action.KEEP_ALIVE,
        Event.LEAVE: Action.REMOVE_LEAVING,
        Event.TIME: Action.EVICT,
        Event.PAUSED: Action.GRANT_TIME,
        Event.CLOSE: Action.CLOSE,
    },
    Phase.CHANGING: {
        Event.JOIN: Action.QUEUE,
        Event.SYNC: Action.QUEUE,
        Event.SYNC_WITHDRAWN: Action.DROP_SYNC,
        Event.HEARTBEAT: Action.KEEP_ALIVE,
        Event.LEAVE: Action.QUEUE,
        Event.PAUSED: Action.GRANT_TIME,
        Event.APPLIED: Action.FINISH_CHANGE,
        Event.FAILED: Action.GIVE_UP,
        Event.CLOSE: Action.CLOSE,
    },
    Phase.CLOSED: {
        Event.JOIN: Action.REFUSE_CLOSED,
        Event.SYNC: Action.REFUSE_CLOSED,
        Event.HEARTBEAT: Action.REFUSE_CLOSED,
        Event.LEAVE: Action.REFUSE_CLOSED,
    },
}

TABLE: Final[Mapping[tuple[Phase, Event], Action]] = {
    (phase, event): _ROWS[phase].get(event, Action.NOTHING) for phase in Phase for event in Event
}

# The phases, besides the one before it, in which an action may leave the group. An action without a row changes none.
LEADS_TO: Final[Mapping[Action, frozenset[Phase]]] = {
    Action.ADMIT: frozenset({Phase.JOINING, Phase.CHANGING}),
    Action.ADMIT_OR_REPEAT: frozenset({Phase.JOINING, Phase.CHANGING}),
    Action.DROP_JOIN: frozenset({Phase.EMPTY, Phase.CHANGING}),
    Action.HOLD_SYNC: frozenset({Phase.CHANGING}),
    Action.REMOVE_LEAVING: frozenset({Phase.EMPTY, Phase.CHANGING}),
    Action.EVICT: frozenset({Phase.CHANGING}),
    Action.EVICT_OR_END_ROUND: frozenset({Phase.EMPTY, Phase.CHANGING}),
    Action.FINISH_CHANGE: frozenset({Phase.EMPTY, Phase.JOINING, Phase.SYNCING, Phase.STABLE}),
    Action.GIVE_UP: frozenset({Phase.CLOSED}),
    Action.CLOSE: frozenset({Phase.CLOSED}),
}

# PREPARING counts as JOINING even before the round is open: `live` opens it at the next event.
_REPLICATED: Final = {
    GroupPhase.EMPTY: Phase.EMPTY,
    GroupPhase.PREPARING: Phase.JOINING,
    GroupPhase.COMPLETING: Phase.SYNCING,
    GroupPhase.STABLE: Phase.STABLE,
}


def phase_of(*, is_closed: bool, is_changing: bool, has_round: bool, replicated: GroupPhase) -> Phase:
    if is_closed:
        return Phase.CLOSED
    if is_changing:
        return Phase.CHANGING
    return Phase.JOINING if has_round else _REPLICATED[replicated]
