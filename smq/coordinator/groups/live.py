"""One group, as its coordinator runs it: events in, actions by the table, answers through callbacks.

Owns what only the coordinator remembers of the group: sessions, the open round, waiting requests, and the one command
under way. Members, generation and assignment are read from the replicated state each time, and changed by commands
only. So a coordinator that knows nothing but the replicated state can go on where another one has ended: a command
whose outcome is not known ends this object, and the next one begins from the state. Only `coordinator` imports it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import structlog

from smq.coordinator.groups.member_checks import Admission, Present, Verdict, admission, check_identity, resolve_leaver
from smq.coordinator.groups.member_requests import (
    Identity,
    Join,
    Joined,
    OnJoined,
    OnLeft,
    OnSynced,
    Outcome,
    Sync,
    Synced,
    outcome_of_failure,
)
from smq.coordinator.groups.protocols import chosen, is_partition_free, metadata_of, subscription
from smq.coordinator.groups.session_timeouts import NEVER_NS, NO_MEMBERS, NS_PER_MS, Sessions
from smq.coordinator.groups.surroundings import Surroundings
from smq.coordinator.groups.transitions import TABLE, Action, Event, Phase, phase_of
from smq.coordinator.groups.waiting import (
    Heartbeat,
    Pending,
    PendingJoin,
    PendingLeave,
    PendingSync,
    Round,
    RoundEnd,
    absent_members,
    generation_of,
    new_round,
    rebalance_timeout_ns,
    round_end,
)
from smq.coordinator.limits import (
    GROUP_COMMAND_MS_MAX,
    GROUP_ID_GIVEN_MS_MAX,
    GROUP_QUEUE_MAX,
)
from smq.raft_state.commands import AssignMembers, Coordinated, GroupMember, RemoveMembers, ReplaceMember
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch
from smq.raft_state.replies import Reply
from smq.raft_state.state import GroupPhase, GroupState

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the command under way failed, or may have failed. `error` is None if another coordinator overtook it."""

    command: str
    outcome: Outcome
    error: SmqError | None = None


def _no_answer() -> None:
    """No request waits for it."""


class LiveGroup:
    """All methods may be called at any time; answers come through the callbacks, perhaps before the call returns."""

    def __init__(
        self,
        surroundings: Surroundings,
        name: str,
        epoch: Epoch,
        *,
        set_alarm: Callable[["LiveGroup"], None],
        on_failed: Callable[["LiveGroup"], None],
        opened_by: str = "",
    ) -> None:
        """`epoch` is the coordinator's: another one makes another object. `set_alarm` is called when `due_ns` may have
        become earlier, `on_failed` when a command has ended this object. `opened_by` is the address whose request made
        it for a group that did not exist."""
        self.name = name
        self.epoch = epoch
        self.opened_by = opened_by
        self.alarm_ns = NEVER_NS  # when the alarm calls `on_time`; only `Alarms` changes it
        self._surroundings = surroundings
        self._set_alarm = set_alarm
        self._on_failed = on_failed
        self._sessions = Sessions()
        self._round: Round | None = None
        self._syncing: dict[str, PendingSync] = {}  # by member id
        self._queue: deque[Pending] = deque()
        self._is_changing = False  # a command is under way
        self._removing: frozenset[str] = frozenset()  # the members that the command under way removes
        self._refuse_change: Callable[[Outcome], None] | None = None  # of the request that the command answers, if any
        self._closed_with: Outcome | None = None
        self._catch_up()
        group = self._refresh()
        if group is not None and group.phase is GroupPhase.COMPLETING:
            self._await_syncs(list(group.members))
        set_alarm(self)

    def _handle(self, event: Event, subject: object) -> None:
        if self.phase not in (Phase.CHANGING, Phase.CLOSED):
            self._catch_up()
        self.actions[TABLE[self.phase, event]](self, subject)
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
        return self._sessions.due_ns

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
        self._refresh()
        return self.phase is Phase.EMPTY and not self._sessions.reserved_ids

    @property
    def is_rebalancing(self) -> bool:
        return self._round is not None

    @property
    def phase(self) -> Phase:
        group = self._surroundings.node.state.groups.get(self.name)
        return phase_of(
            is_closed=self._closed_with is not None,
            is_changing=self._is_changing,
            has_round=self._round is not None,
            replicated=group.phase if group is not None else GroupPhase.EMPTY,
        )

    # -------------------------------------------------------------------------------------------------- the state
    @property
    def _now_ns(self) -> int:
        return self._surroundings.clock.monotonic_ns()

    def _refresh(self) -> GroupState | None:
        """The group as it is replicated now."""
        group = self._surroundings.node.state.groups.get(self.name)
        members = group.members if group is not None else NO_MEMBERS
        if members is not self._sessions.members:
            self._sessions.follow(members, self._now_ns)
        return group

    def _catch_up(self) -> None:
        """Opens the round that the replicated state asks for, or gives the assignment that it has. This object need not
        have begun either: another coordinator may have, or an earlier object whose command took effect after it had
        been given up."""
        group = self._refresh()
        if group is None or self._round is not None:
            return
        if group.phase is GroupPhase.PREPARING:
            self._open_round()
        elif group.phase is GroupPhase.STABLE and self._syncing:
            self._answer_syncs(group)

    @property
    def _joiners(self) -> dict[str, PendingJoin]:
        return self._round.joiners if self._round is not None else {}

    @property
    def _waiting(self) -> set[str]:
        """Ids of the members whose requests wait here."""
        return self._joiners.keys() | self._syncing.keys()

    def _renew_session(self, member_id: str) -> None:
        """Restarts the session of the member if it is of this generation."""
        if member_id in self._sessions.members:
            self._sessions.restart(member_id, self._now_ns)

    def _compute_due(self) -> None:
        self._sessions.compute_due(self._waiting, self._round.until_ns if self._round is not None else NEVER_NS)

    def _check_sender(self, who: Identity, generation: int) -> Outcome:
        """A member whose removal is under way is no member any more: an answer that it is alive would be wrong a moment
        later."""
        if who.member_id in self._removing:
            return Outcome.UNKNOWN_MEMBER
        group = self._refresh()
        return check_identity(
            who,
            generation,
            members=self._sessions.members,
            joiners=self._joiners,
            current=group.generation if group is not None else None,
        )

    # ------------------------------------------------------------------------------------------------- one command
    def _propose(
        self, command: Coordinated, then: Callable[[], None], refuse: Callable[[Outcome], None] | None = None
    ) -> None:
        """Makes this the command under way. `then` runs once it has taken effect, `refuse` if it fails."""
        self._is_changing = True
        self._refuse_change = refuse
        on_reply = partial(self._on_reply, type(command).__name__, then)
        self._surroundings.changes.submit(command, GROUP_COMMAND_MS_MAX, on_reply)

    def _on_reply(self, command: str, then: Callable[[], None], reply: Reply | SmqError) -> None:
        if isinstance(reply, SmqError):
            self._handle(Event.FAILED, Failure(command, outcome_of_failure(reply), reply))
        elif coordinator_of(self._surroundings.node.state, self.name).epoch != self.epoch:
            # It took effect, but another coordinator has gone on since: the present state is no answer to this command.
            self._handle(Event.FAILED, Failure(command, Outcome.NOT_COORDINATOR))
        else:
            self._handle(Event.APPLIED, then)

    def _enqueue(self, pending: Pending) -> None:
        if len(self._queue) < GROUP_QUEUE_MAX:
            self._queue.append(pending)
        else:
            pending.refuse(Outcome.QUEUE_FULL)

    def _finish_change(self, then: Callable[[], None]) -> None:
        self._is_changing = False
        self._removing = frozenset()
        self._refuse_change = None
        self._refresh()
        then()
        while self._queue and not self._is_changing:
            pending = self._queue.popleft()
            self._handle(pending.event, pending)
        self._settle_round()

    def _give_up(self, failure: Failure) -> None:
        """Whatever is true of the group now is for the next object to read."""
        if failure.error is not None:
            log.warning("group_change_failed", group=self.name, command=failure.command, error=str(failure.error))
        self._on_failed(self)
        self._close(failure.outcome)

    def _close(self, outcome: Outcome) -> None:
        self._closed_with = outcome
        self._is_changing = False
        refuse_change, self._refuse_change = self._refuse_change, None
        if refuse_change is not None:
            refuse_change(outcome)
        joiners, self._round = self._joiners, None
        syncing, self._syncing = self._syncing, {}
        queue, self._queue = self._queue, deque()
        for pending in (*joiners.values(), *syncing.values(), *queue):
            pending.refuse(outcome)

    def _refuse_closed(self, request: Pending | Heartbeat) -> None:
        assert self._closed_with is not None, "it is closed"
        request.refuse(self._closed_with)

    def _refuse_unknown(self, request: Pending | Heartbeat) -> None:
        request.refuse(Outcome.UNKNOWN_MEMBER)

    def _nothing(self, _subject: object) -> None:
        """The event changes nothing in this phase."""

    # ------------------------------------------------------------------------------------------------------ joins
    def _admit(self, pending: PendingJoin, *, may_repeat: bool = False) -> None:
        if not pending.is_waiting:
            return  # withdrawn while it was in the queue
        present = Present(
            group=self._refresh(),
            members=self._sessions.members,
            joiners=self._joiners,
            reserved_ids=self._sessions.reserved_ids.keys(),
            member_bytes=self._surroundings.node.state.member_bytes,
        )
        decision = admission(pending.request, present, may_repeat=may_repeat)
        self._verdicts[decision.verdict](self, pending, decision)

    def _admit_or_repeat(self, pending: PendingJoin) -> None:
        self._admit(pending, may_repeat=True)

    def _drop_join(self, pending: PendingJoin) -> None:
        member_id = pending.member.member_id
        if self._joiners.get(member_id) is pending:
            del self._joiners[member_id]
            self._renew_session(member_id)
            self._settle_round()

    def _refuse(self, pending: PendingJoin, decision: Admission) -> None:
        pending.refuse(decision.outcome)

    def _reserve_id(self, pending: PendingJoin, _decision: Admission) -> None:
        member_id = self._surroundings.new_member_id(pending.member.client_id)
        wait_ms = min(pending.member.session_timeout_ms, GROUP_ID_GIVEN_MS_MAX)
        self._sessions.reserve_id(member_id, self._now_ns + wait_ms * NS_PER_MS)
        pending.refuse(Outcome.ID_RESERVED, member_id)

    def _enter_as_new(self, pending: PendingJoin, _decision: Admission) -> None:
        member = pending.member
        member_id = self._surroundings.new_member_id(member.instance_id or member.client_id)
        joiners = self._joiners
        for other in [j for j in joiners.values() if member.instance_id and j.member.instance_id == member.instance_id]:
            del joiners[other.member.member_id]
            other.refuse(Outcome.FENCED_INSTANCE)
        pending.member = replace(member, member_id=member_id)
        self._enter_round(pending)

    def _enter(self, pending: PendingJoin, _decision: Admission) -> None:
        member_id = pending.member.member_id
        self._sessions.reserved_ids.pop(member_id, None)
        self._renew_session(member_id)
        self._enter_round(pending)

    def _repeat(self, pending: PendingJoin, _decision: Admission) -> None:
        group = self._refresh()
        assert group is not None, "its member asks again"
        self._renew_session(pending.member.member_id)
        pending.answer(joined(group, pending.member.member_id))

    def _replace(self, pending: PendingJoin, decision: Admission) -> None:
        """A static member is back without its id. The process that had the id is fenced, whatever comes next."""
        assert decision.former is not None
        former = decision.former.member
        member_id = self._surroundings.new_member_id(pending.member.instance_id)
        pending.member = replace(pending.member, member_id=member_id)
        command = ReplaceMember(
            group=self.name, coordinator_epoch=self.epoch, old_member_id=former.member_id, member=pending.member
        )
        self._propose(command, partial(self._on_replaced, pending, former), pending.refuse)

    def _on_replaced(self, pending: PendingJoin, former: GroupMember) -> None:
        for request in (self._joiners.pop(former.member_id, None), self._syncing.pop(former.member_id, None)):
            if request is not None:
                request.refuse(Outcome.FENCED_INSTANCE)
        group = self._refresh()
        answer = None
        if group is not None and self._round is None:
            answer = joined_as_former(
                group,
                pending.member,
                former,
                can_skip=pending.request.can_skip_assignment,
                partition_count=self._surroundings.partition_count,
            )
        if answer is not None:
            pending.answer(answer)
        else:
            self._enter_round(pending)

    def _remove_former(self, pending: PendingJoin, decision: Admission) -> None:
        """The static member no longer knows the generation's protocol: it joins as a new one."""
        assert decision.former is not None
        self._remove([decision.former.member.member_id], partial(self._admit, pending), pending.refuse)

    # ----------------------------------------------------------------------------------------------------- rounds
    def _open_round(self, newcomer_timeout_ms: int = 0) -> Round:
        """All members must join again. Requests that wait for an assignment do not get it."""
        self._round = new_round(
            self._sessions.members,
            now_ns=self._now_ns,
            initial_delay_ns=self._surroundings.initial_delay_ms() * NS_PER_MS,
            newcomer_timeout_ns=newcomer_timeout_ms * NS_PER_MS,
        )
        self._sessions.wake_at(self._round.until_ns)
        self._sessions.stop_awaiting_syncs()
        syncing, self._syncing = self._syncing, {}
        for member_id, pending in syncing.items():
            self._renew_session(member_id)  # a waiting request is a sign of life
            pending.refuse(Outcome.REBALANCING)
        return self._round

    def _enter_round(self, pending: PendingJoin) -> None:
        """The member waits for the next generation; its first one opens the round."""
        round_ = self._round or self._open_round(pending.member.rebalance_timeout_ms)
        now_ns = self._now_ns
        before = round_.joiners.pop(pending.member.member_id, None)
        if before is not None:
            before.refuse(Outcome.REBALANCING)  # the same member has asked again
        elif round_.is_first and round_.joiners:
            round_.wait_longer(now_ns, self._surroundings.initial_delay_ms() * NS_PER_MS)
        round_.joiners[pending.member.member_id] = pending
        self._settle_round()

    def _settle_round(self) -> None:
        """Ends the round if it is over."""
        round_ = self._round
        if round_ is None or self._is_changing:
            return
        self._refresh()
        members = self._sessions.members
        if not members and not round_.joiners:
            self._round = None  # all members have gone
            return
        has_reserved_ids = bool(self._sessions.reserved_ids)
        absent = absent_members(round_, members)
        match round_end(round_, members, has_reserved_ids=has_reserved_ids, now_ns=self._now_ns):
            case RoundEnd.WAIT_FOR_STATIC:
                round_.until_ns = self._now_ns + rebalance_timeout_ns(absent)
                self._sessions.wake_at(round_.until_ns)
            case RoundEnd.REMOVE_ABSENT:
                self._round = None
                self._remove([m.member_id for m in absent])
            case RoundEnd.FORM:
                command = generation_of(round_, self._refresh(), self.name, self.epoch)
                self._propose(command, partial(self._on_formed, round_))

    def _on_formed(self, round_: Round) -> None:
        self._round = None
        group = self._refresh()
        assert group is not None, "its generation has just been applied"
        self._await_syncs([name for name in group.members if name in round_.joiners])
        for name, pending in round_.joiners.items():
            self._renew_session(name)
            pending.answer(joined(group, name))

    # ------------------------------------------------------------------------------------------------ assignments
    def _refuse_rebalancing(self, pending: PendingSync) -> None:
        outcome = self._check_sender(pending.request.who, pending.request.generation)
        pending.refuse(outcome if outcome is not Outcome.OK else Outcome.REBALANCING)

    def _check_sync(self, pending: PendingSync) -> GroupState | None:
        """The group, if the request is one of its members'; it is refused otherwise."""
        group = self._refresh()
        outcome = self._check_sender(pending.request.who, pending.request.generation)
        if outcome is Outcome.OK and group is not None:
            outcome = sync_refusal(pending.request, group)
        if outcome is not Outcome.OK:
            pending.refuse(outcome)
            return None
        self._renew_session(pending.member_id)
        self._sessions.on_sync(pending.member_id)
        return group

    def _give_assignment(self, pending: PendingSync) -> None:
        group = self._check_sync(pending)
        if group is not None:
            pending.answer(synced(group, pending.member_id))

    def _hold_sync(self, pending: PendingSync) -> None:
        group = self._check_sync(pending)
        if group is None:
            return
        if pending.request.assignments and pending.member_id != group.leader:
            pending.refuse(Outcome.BAD_MEMBER)  # nothing reads them, and they would be in memory while it waits
            return
        before = self._syncing.get(pending.member_id)
        self._syncing[pending.member_id] = pending
        if before is not None:
            before.refuse(Outcome.REBALANCING)  # the same member has asked again
        if pending.member_id == group.leader:
            command = AssignMembers(
                group=self.name,
                coordinator_epoch=self.epoch,
                generation=group.generation,
                assignments=tuple((name, data) for name, data in pending.request.assignments if name in group.members),
            )
            self._propose(command, self._on_assigned)

    def _on_assigned(self) -> None:
        group = self._refresh()
        assert group is not None, "its assignment has just been applied"
        self._answer_syncs(group)

    def _answer_syncs(self, group: GroupState) -> None:
        """The group's assignment has come: those that wait get theirs. A generation that an earlier object had given up
        may have come meanwhile, so not all of them need to be of this one."""
        syncing, self._syncing = self._syncing, {}
        # The leader first: it asked before anyone else could have an answer, and some clients' tests count on it.
        for member_id, pending in sorted(syncing.items(), key=lambda waiting: waiting[0] != group.leader):
            self._renew_session(member_id)
            if pending.request.generation == group.generation:
                pending.answer(synced(group, member_id))
            else:
                pending.refuse(Outcome.WRONG_GENERATION)

    def _drop_sync(self, pending: PendingSync) -> None:
        if self._syncing.get(pending.member_id) is pending:
            del self._syncing[pending.member_id]
            self._renew_session(pending.member_id)

    def _await_syncs(self, member_ids: list[str]) -> None:
        members = self._sessions.members
        timeout_ns = rebalance_timeout_ns([members[member_id].member for member_id in member_ids])
        self._sessions.await_syncs(member_ids, self._now_ns + timeout_ns)

    # ---------------------------------------------------------------------------------- signs of life, and silence
    def _keep_alive(self, heartbeat: Heartbeat) -> None:
        heartbeat.outcome = self._check_sender(heartbeat.who, heartbeat.generation)
        if heartbeat.outcome is Outcome.OK:
            self._renew_session(heartbeat.who.member_id)
            if self._round is not None:
                heartbeat.outcome = Outcome.REBALANCING

    def _grant_time(self, _event: None) -> None:
        """All members get a full session, and as long again to join or to ask for their assignment."""
        self._refresh()
        members = self._sessions.members
        for member_id in members:
            self._renew_session(member_id)
        if not members:
            return
        until_ns = self._now_ns + rebalance_timeout_ns([m.member for m in members.values()])
        if self._round is not None:
            self._round.until_ns = until_ns
        self._sessions.extend_syncs(until_ns)

    def _expire_ids(self, now_ns: int) -> None:
        self._sessions.expire_ids(now_ns)
        self._compute_due()

    def _evict(self, now_ns: int) -> None:
        self._sessions.expire_ids(now_ns)
        silent = self._sessions.silent(self._waiting, now_ns)
        self._compute_due()
        if silent:
            self._remove(silent)

    def _evict_or_end_round(self, now_ns: int) -> None:
        self._evict(now_ns)
        self._settle_round()

    # -------------------------------------------------------------------------------------- members that are gone
    def _remove_leaving(self, pending: PendingLeave) -> None:
        self._refresh()
        outcomes, removed = [], []
        for who in pending.leaving:
            outcome, member_id = self._leave(who)
            outcomes.append(outcome)
            if outcome is Outcome.OK and member_id in self._sessions.members:
                removed.append(member_id)
        if removed:
            self._remove(removed, partial(pending.answer, outcomes), pending.refuse)
        else:
            pending.answer(outcomes)
            self._settle_round()

    def _leave(self, who: Identity) -> tuple[Outcome, str]:
        """The answer to one of them and its id. What this object remembers of it is gone; the generation is still to
        change."""
        outcome, member_id = resolve_leaver(
            who,
            members=self._sessions.members,
            joiners=self._joiners,
            reserved_ids=self._sessions.reserved_ids.keys(),
        )
        if outcome is Outcome.OK:
            self._sessions.reserved_ids.pop(member_id, None)
            waiting = self._joiners.pop(member_id, None)
            if waiting is not None:
                waiting.refuse(Outcome.UNKNOWN_MEMBER)
        return outcome, member_id

    def _remove(
        self,
        member_ids: list[str],
        then: Callable[[], None] = _no_answer,
        refuse: Callable[[Outcome], None] | None = None,
    ) -> None:
        """Members that are gone for good; the others rebalance."""
        group = self._refresh()
        assert group is not None, "it has members"
        command = RemoveMembers(
            group=self.name,
            coordinator_epoch=self.epoch,
            generation=group.generation,
            member_ids=tuple(member_ids),
            removed_ms=self._surroundings.clock.wall_ns() // NS_PER_MS,
        )
        self._removing = frozenset(member_ids)
        self._propose(command, partial(self._on_removed, member_ids, then), refuse)

    def _on_removed(self, member_ids: list[str], then: Callable[[], None]) -> None:
        for member_id in member_ids:
            pending = self._syncing.pop(member_id, None)
            if pending is not None:
                pending.refuse(Outcome.UNKNOWN_MEMBER)
        if self._sessions.members and self._round is None:
            self._open_round()
        then()

    # Each action takes the subject of its event: a pending request, a heartbeat, the time, a callback or an outcome.
    actions: ClassVar[dict[Action, "Run"]] = {
        Action.NOTHING: _nothing,
        Action.QUEUE: _enqueue,
        Action.REFUSE_CLOSED: _refuse_closed,
        Action.REFUSE_UNKNOWN: _refuse_unknown,
        Action.REFUSE_REBALANCING: _refuse_rebalancing,
        Action.ADMIT: _admit,
        Action.ADMIT_OR_REPEAT: _admit_or_repeat,
        Action.DROP_JOIN: _drop_join,
        Action.HOLD_SYNC: _hold_sync,
        Action.GIVE_ASSIGNMENT: _give_assignment,
        Action.DROP_SYNC: _drop_sync,
        Action.KEEP_ALIVE: _keep_alive,
        Action.REMOVE_LEAVING: _remove_leaving,
        Action.EXPIRE_IDS: _expire_ids,
        Action.EVICT: _evict,
        Action.EVICT_OR_END_ROUND: _evict_or_end_round,
        Action.GRANT_TIME: _grant_time,
        Action.FINISH_CHANGE: _finish_change,
        Action.GIVE_UP: _give_up,
        Action.CLOSE: _close,
    }
    _verdicts: ClassVar[Mapping[Verdict, "_Verdict"]] = {
        Verdict.REFUSE: _refuse,
        Verdict.RESERVE_ID: _reserve_id,
        Verdict.ENTER_AS_NEW: _enter_as_new,
        Verdict.ENTER: _enter,
        Verdict.REPEAT: _repeat,
        Verdict.REPLACE: _replace,
        Verdict.REMOVE_FORMER: _remove_former,
    }


Run: TypeAlias = Callable[[LiveGroup, Any], None]
_Verdict: TypeAlias = Callable[[LiveGroup, PendingJoin, Admission], None]


# ------------------------------------------------------------------------- from the replicated state to the answers
def joined(group: GroupState, member_id: str) -> Joined:
    is_leader = group.leader == member_id
    members = [(name, m.member.instance_id, metadata_of(m.member, group.protocol)) for name, m in group.members.items()]
    return Joined(
        outcome=Outcome.OK,
        member_id=member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(members) if is_leader else (),
    )


def joined_as_former(
    group: GroupState,
    member: GroupMember,
    former: GroupMember,
    *,
    can_skip: bool,
    partition_count: Callable[[str], int],
) -> Joined | None:
    """The answer to a static member that is back and has taken its former self's place. None if the group must
    rebalance for it. `partition_count` is of a topic, 0 if it does not exist."""
    if group.phase is not GroupPhase.STABLE or subscription(former, group) != subscription(member, group):
        return None
    if chosen([m.member for m in group.members.values()]) != group.protocol:
        return None
    if is_partition_free(group, partition_count):
        return None
    answer = joined(group, member.member_id)
    if answer.leader != member.member_id:
        return answer
    if can_skip:
        return replace(answer, skip_assignment=True)
    # An older client would compute an assignment if the answer named it as the leader: it names its former id.
    return replace(answer, leader=former.member_id, members=())


def synced(group: GroupState, member_id: str) -> Synced:
    member = group.members.get(member_id)
    if member is None:
        return Synced(outcome=Outcome.UNKNOWN_MEMBER)
    return Synced(
        outcome=Outcome.OK,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        assignment=member.assignment,
    )


def sync_refusal(request: Sync, group: GroupState) -> Outcome:
    """A request that names a protocol means the generation of that one."""
    names_type = request.protocol_type in (None, group.protocol_type)
    names_protocol = request.protocol in (None, group.protocol)
    return Outcome.OK if names_type and names_protocol else Outcome.PROTOCOL_MISMATCH
