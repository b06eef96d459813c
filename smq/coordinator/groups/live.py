"""One group, as its coordinator runs it: events in, actions by the table, answers through callbacks.

Owns the way from an event to its action, which `transitions` names and the modules of actions hold. A coordinator that
knows nothing but the replicated state can go on where another one has ended: a command whose outcome is not known ends
this object, and the next one begins from the state.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from smq.coordinator.groups import changing, joining, leaving, presence, syncing
from smq.coordinator.groups.memory import GroupHost, GroupMemory
from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.pending import Heartbeat, PendingJoin, PendingLeave, PendingSync
from smq.coordinator.groups.sessions import NEVER_NS
from smq.coordinator.groups.transitions import TABLE, Action, Event, Phase
from smq.coordinator.groups.types import Identity, Join, OnJoined, OnLeft, OnSynced, Sync
from smq.raft_state.ids import Epoch
from smq.raft_state.state import GroupPhase


def _nothing(_memory: GroupMemory, _subject: object) -> None:
    """The event changes nothing in this phase."""


# Each takes the subject of its event: a pending request, a heartbeat, the time, a callback or an outcome.
Run: TypeAlias = Callable[[GroupMemory, Any], None]
ACTIONS: Final[dict[Action, Run]] = {
    Action.NOTHING: _nothing,
    Action.QUEUE: changing.enqueue,
    Action.REFUSE_CLOSED: changing.refuse_closed,
    Action.REFUSE_UNKNOWN: changing.refuse_unknown,
    Action.REFUSE_REBALANCING: syncing.refuse_rebalancing,
    Action.ADMIT: joining.admit,
    Action.ADMIT_OR_REPEAT: joining.admit_or_repeat,
    Action.DROP_JOIN: joining.drop_join,
    Action.HOLD_SYNC: syncing.hold_sync,
    Action.GIVE_ASSIGNMENT: syncing.give_assignment,
    Action.DROP_SYNC: syncing.drop_sync,
    Action.KEEP_ALIVE: presence.keep_alive,
    Action.REMOVE_LEAVING: leaving.remove_leaving,
    Action.EXPIRE_IDS: presence.expire_ids,
    Action.EVICT: presence.evict,
    Action.EVICT_OR_END_ROUND: presence.evict_or_end_round,
    Action.GRANT_TIME: presence.grant_time,
    Action.FINISH_CHANGE: changing.finish_change,
    Action.GIVE_UP: changing.give_up,
    Action.CLOSE: changing.close,
}


class LiveGroup:
    """All methods may be called at any time; answers come through the callbacks, perhaps before the call returns."""

    def __init__(
        self,
        host: GroupHost,
        name: str,
        epoch: Epoch,
        *,
        set_alarm: Callable[["LiveGroup"], None],
        opened_by: str = "",
    ) -> None:
        """`set_alarm` is called when `due_ns` may have become earlier. `opened_by` is the address whose request made
        this object for a group that did not exist."""
        self.name = name
        self.epoch = epoch
        self.opened_by = opened_by
        self.alarm_ns = NEVER_NS  # when the alarm calls `on_time`; only `Alarms` changes it
        self._set_alarm = set_alarm
        self._memory = GroupMemory(host=host, name=name, epoch=epoch, handle=self._handle)
        self._memory.catch_up()
        group = self._memory.refresh()
        if group is not None and group.phase is GroupPhase.COMPLETING:
            self._memory.await_syncs(list(group.members))
        set_alarm(self)

    def _handle(self, event: Event, subject: object) -> None:
        if self._memory.phase not in (Phase.CHANGING, Phase.CLOSED):
            self._memory.catch_up()
        ACTIONS[TABLE[self._memory.phase, event]](self._memory, subject)
        if self.due_ns < self.alarm_ns:
            self._set_alarm(self)

    # --------------------------------------------------------------------------------------------------- requests
    def join(self, request: Join, done: OnJoined) -> Callable[[], None]:
        """Answers now or when the round is over. Call the returned function to withdraw the request."""
        pending = PendingJoin(request, request.member, done)
        self._handle(Event.JOIN, pending)
        return partial(self._withdraw_join, pending)

    def _withdraw_join(self, pending: PendingJoin) -> None:
        pending.done = None
        self._handle(Event.JOIN_WITHDRAWN, pending)

    def sync(self, request: Sync, done: OnSynced) -> Callable[[], None]:
        """Answers now or when the leader has given the assignment. Call the returned function to withdraw the
        request."""
        pending = PendingSync(request, done)
        self._handle(Event.SYNC, pending)
        return partial(self._handle, Event.SYNC_WITHDRAWN, pending)

    def heartbeat(self, who: Identity, generation: int) -> Outcome:
        heartbeat = Heartbeat(who, generation)
        self._handle(Event.HEARTBEAT, heartbeat)
        return heartbeat.outcome

    def leave(self, who: list[Identity], done: OnLeft) -> None:
        """Answers with one outcome per member."""
        self._handle(Event.LEAVE, PendingLeave(who, done))

    # -------------------------------------------------------------------------------------------- the coordinator
    @property
    def due_ns(self) -> int:
        """Nothing is to be done by the clock before this."""
        return self._memory.sessions.due_ns

    def on_time(self, now_ns: int) -> None:
        """Called once `due_ns` has come."""
        self._handle(Event.TIME, now_ns)

    def grant_time(self) -> None:
        """This node stood still, or could not reach a majority."""
        self._handle(Event.PAUSED, None)

    def close(self, outcome: Outcome) -> None:
        """Answers all that wait, queued requests included."""
        self._handle(Event.CLOSE, outcome)

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost with this object."""
        self._memory.refresh()
        return self._memory.phase is Phase.EMPTY and not self._memory.sessions.reserved_ids

    @property
    def is_rebalancing(self) -> bool:
        return self._memory.round is not None
