"""One consumer group (KIP-848), as its coordinator runs it: heartbeats in, at most one command under way, answers out.

Owns what only the coordinator remembers of the group: sessions, how long a member has been giving up partitions, what
each was last told, and the heartbeats that wait for a command. Members, epochs and targets are in the replicated state,
and `raft_state.handlers.consumers` moves a member towards its target. A heartbeat that would change nothing is answered
from that state, and costs no entry. Those that come while a command is under way share the next one. So a coordinator
that knows nothing but the state goes on where another ended, and no member has to do anything again. A command whose
outcome is not known ends this object. Only `coordinator` imports it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from smq.coordinator.groups.assignors import ASSIGNORS, Candidate, Targets
from smq.coordinator.groups.member_requests import (
    LEAVING,
    Beat,
    Beaten,
    Identity,
    Join,
    Joined,
    OnBeaten,
    OnJoined,
    OnLeft,
    OnSynced,
    Outcome,
    Sync,
    Synced,
    outcome_of_failure,
)
from smq.coordinator.groups.session_timeouts import NEVER_NS, NO_MEMBERS, NS_PER_MS
from smq.coordinator.groups.surroundings import Surroundings
from smq.coordinator.limits import GROUP_COMMAND_MS_MAX, GROUP_PATTERNS_MAX, GROUP_QUEUE_MAX
from smq.coordinator.pattern_re2 import InvalidPattern, matcher
from smq.raft_state.cluster_config import CONSUMER_SESSION_MS, GROUP_CONSUMERS_MAX
from smq.raft_state.commands import (
    Acknowledgement,
    AssignConsumers,
    ConsumerUpdate,
    Coordinated,
    GroupMember,
    Partitions,
    ReconcileConsumers,
    RemoveMembers,
    Subscription,
    UpdateConsumers,
)
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.consumers import check_update, gathered, reconciled, spread
from smq.raft_state.ids import Epoch, Generation, TopicId
from smq.raft_state.limits import PATTERN_BYTES_MAX
from smq.raft_state.refusal import Refused
from smq.raft_state.replies import Reply
from smq.raft_state.state import AWAY_EPOCH, GroupKind, GroupState, MemberState
from smq.raft_state.topic_config import is_external

log = structlog.get_logger(__name__)

_BATCH_MAX: Final = 250  # members of one command: some 10 ms on every node


@dataclass(slots=True, eq=False)
class _Waiting:
    """A heartbeat that has no answer yet. `epoch` is the group's once the member has joined it: the answer waits for
    that epoch's target. `is_heard`: what the member has said is applied."""

    beat: Beat
    done: OnBeaten | None
    epoch: int = 0
    is_heard: bool = False

    def answer(self, beaten: Beaten) -> None:
        done, self.done = self.done, None
        if done is not None:
            done(beaten)

    def refuse(self, outcome: Outcome) -> None:
        self.answer(Beaten(outcome=outcome, member_id=self.beat.member_id, epoch=self.beat.epoch))


class LiveConsumers:
    """All methods may be called at any time; answers come through the callbacks, perhaps before the call returns."""

    def __init__(
        self,
        surroundings: Surroundings,
        name: str,
        epoch: Epoch,
        *,
        set_alarm: Callable[["LiveConsumers"], None],
        on_failed: Callable[["LiveConsumers"], None],
        opened_by: str = "",
    ) -> None:
        """As of `LiveGroup`."""
        self.name = name
        self.epoch = epoch
        self.opened_by = opened_by
        self.alarm_ns = NEVER_NS
        self.due_ns = NEVER_NS  # nothing runs out before this
        self._surroundings = surroundings
        self._set_alarm = set_alarm
        self._on_failed = on_failed
        self._members: dict[str, MemberState] = NO_MEMBERS  # of the replicated state, as last seen
        self._ends_ns: dict[str, int] = {}  # of each session
        self._revoke_until_ns: dict[str, int] = {}  # of the members that have to give something up
        self._told: dict[str, Partitions] = {}  # what each knows that it may use
        self._waiting: list[_Waiting] = []
        self._leaving: dict[str, None] = {}  # the members to be removed by the next command
        self._is_busy = False  # a command is under way, or a target is being computed
        self._is_outdated = True  # the target may not be that of the present topics
        self._one_by_one = 0  # so many updates are proposed singly, after a batch of them was refused
        self._matches: dict[str, tuple[int, list[str]]] = {}  # by pattern: the version of the topics, and which match
        self._matched_at: dict[str, int] = {}  # by member: the version of the topics
        self._closed_with: Outcome | None = None
        self._refresh()
        self._pump()
        set_alarm(self)

    # --------------------------------------------------------------------------------------------------- requests
    def beat(self, beat: Beat, done: OnBeaten) -> Callable[[], None]:
        """Answers now, or once what the heartbeat says has taken effect; to a new member, once it has partitions. Call
        the returned function to withdraw the request."""
        waiting = _Waiting(beat, done)
        outcome = self._closed_with or self._refusal(beat)
        if outcome is not Outcome.OK:
            waiting.refuse(outcome)
            return partial(self._withdraw, waiting)
        if not beat.member_id:
            waiting.beat = replace(beat, member_id=self._surroundings.new_member_id(beat.client_id))
        self._renew(beat.member_id)
        self._advance(waiting)
        if waiting.done is not None:
            if len(self._waiting) >= GROUP_QUEUE_MAX:
                waiting.refuse(Outcome.QUEUE_FULL)
            else:
                self._waiting.append(waiting)
        self._pump()
        return partial(self._withdraw, waiting)

    def _withdraw(self, waiting: _Waiting) -> None:
        waiting.done = None

    def heartbeat(self, _who: Identity, _generation: int) -> Outcome:
        """Of the classic protocol. A commit is no sign of life here: members that commit send heartbeats, too."""
        return Outcome.UNKNOWN_MEMBER

    def join(self, request: Join, done: OnJoined) -> Callable[[], None]:
        """Of the classic protocol."""
        done(Joined(outcome=Outcome.PROTOCOL_MISMATCH, member_id=request.member.member_id))
        return lambda: None

    def sync(self, _request: Sync, done: OnSynced) -> Callable[[], None]:
        """Of the classic protocol."""
        done(Synced(outcome=Outcome.UNKNOWN_MEMBER))
        return lambda: None

    def leave(self, leaving: list[Identity], done: OnLeft) -> None:
        """An administrator removes members."""
        outcomes = []
        for who in leaving:
            member = self._member_of(who.member_id, who.instance_id)
            outcomes.append(Outcome.UNKNOWN_MEMBER if member is None else Outcome.OK)
            if member is not None:
                self._leaving[member.member.member_id] = None
        self._pump()
        done(outcomes)

    def _member_of(self, member_id: str, instance_id: str) -> MemberState | None:
        if member_id:
            return self._members.get(member_id)
        return next((m for m in self._members.values() if m.member.instance_id == instance_id), None)

    # -------------------------------------------------------------------------------------------- the coordinator
    def on_time(self, now_ns: int) -> None:
        """Called once `due_ns` has come."""
        self._refresh()
        late = {m for m, until_ns in self._ends_ns.items() if until_ns <= now_ns}
        late |= {m for m, until_ns in self._revoke_until_ns.items() if until_ns <= now_ns}
        for member_id in self._members:
            if member_id in late:
                self._leaving[member_id] = None
                self._ends_ns[member_id] = self._revoke_until_ns[member_id] = NEVER_NS
        self.due_ns = min((*self._ends_ns.values(), *self._revoke_until_ns.values()), default=NEVER_NS)
        self._pump()

    def grant_time(self) -> None:
        """This node stood still, or could not reach a majority."""
        self._refresh()
        for member_id, m in self._members.items():
            self._renew(member_id)
            if member_id in self._revoke_until_ns:
                self._revoke_until_ns[member_id] = self._now_ns + m.member.rebalance_timeout_ms * NS_PER_MS

    def on_topics_changed(self) -> None:
        self._is_outdated = True
        self._pump()

    def close(self, outcome: Outcome) -> None:
        """Answers all that wait."""
        self._closed_with = outcome
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.refuse(outcome)

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost with this object."""
        self._refresh()
        return not self._members and not self._waiting and not self._is_busy

    @property
    def is_rebalancing(self) -> bool:
        return False  # what is said of a consumer group is in the replicated state

    # -------------------------------------------------------------------------------------------------- the state
    @property
    def _now_ns(self) -> int:
        return self._surroundings.clock.monotonic_ns()

    @property
    def _session_ns(self) -> int:
        return self._surroundings.setting(CONSUMER_SESSION_MS) * NS_PER_MS

    def _group(self) -> GroupState | None:
        group = self._surroundings.node.state.groups.get(self.name)
        return group if group is not None and group.kind is GroupKind.CONSUMER else None

    def _refresh(self) -> GroupState | None:
        """The group as it is replicated now. A member that is new to this coordinator gets a full session."""
        group = self._group()
        members = group.members if group is not None else NO_MEMBERS
        if members is self._members:
            return group
        session_ns, now_ns = self._session_ns, self._now_ns
        before, self._members = self._members, members
        for member_id, m in members.items():
            if before.get(member_id) is m:
                continue
            if member_id not in self._ends_ns:
                self._ends_ns[member_id] = now_ns + session_ns
                self._wake_at(now_ns + session_ns)
            if not m.revoking:
                self._revoke_until_ns.pop(member_id, None)
            elif member_id not in self._revoke_until_ns:
                until_ns = now_ns + m.member.rebalance_timeout_ms * NS_PER_MS
                self._revoke_until_ns[member_id] = until_ns
                self._wake_at(until_ns)
        for member_id in before:
            if member_id not in members:
                for memory in (self._ends_ns, self._revoke_until_ns, self._told, self._matched_at, self._leaving):
                    memory.pop(member_id, None)
        return group

    def _renew(self, member_id: str) -> None:
        if member_id in self._ends_ns and member_id not in self._leaving:
            self._ends_ns[member_id] = self._now_ns + self._session_ns
            self._wake_at(self._ends_ns[member_id])

    def _wake_at(self, at_ns: int) -> None:
        if at_ns < self.due_ns:
            self.due_ns = at_ns
            if at_ns < self.alarm_ns:
                self._set_alarm(self)

    # ---------------------------------------------------------------------------------------------- one heartbeat
    def _refusal(self, beat: Beat) -> Outcome:
        """Of a heartbeat that is wrong by itself, or of another member or epoch than it says."""
        self._refresh()
        if beat.assignor is not None and beat.assignor not in ASSIGNORS:
            return Outcome.UNKNOWN_ASSIGNOR
        if beat.pattern:
            if len(beat.pattern.encode()) > PATTERN_BYTES_MAX:
                return Outcome.BAD_MEMBER
            try:
                self._matching(beat.pattern)
            except InvalidPattern:
                return Outcome.BAD_PATTERN
        member = self._members.get(beat.member_id) if beat.member_id else None
        if beat.member_id in self._leaving:
            return Outcome.UNKNOWN_MEMBER
        if beat.instance_id:
            owner = self._member_of("", beat.instance_id)
            if owner is not None and owner is not member:
                if beat.epoch != 0:
                    return Outcome.FENCED_INSTANCE
                return Outcome.OK if owner.epoch == AWAY_EPOCH else Outcome.UNRELEASED_INSTANCE
        if member is None:
            if beat.epoch != 0:
                return Outcome.UNKNOWN_MEMBER
            is_full = len(self._members) >= self._surroundings.setting(GROUP_CONSUMERS_MAX)
            return Outcome.GROUP_FULL if is_full and not beat.instance_id else self._update_refusal(beat, None)
        if beat.epoch in (LEAVING, AWAY_EPOCH):
            return Outcome.OK
        outcome = epoch_refusal(beat, member)
        return outcome if outcome is not Outcome.OK else self._update_refusal(beat, member)

    def _update_refusal(self, beat: Beat, member: MemberState | None) -> Outcome:
        if member is not None and not self._needs_update(beat, member):
            return Outcome.OK
        try:
            check_update(self._update_of(replace(beat, member_id=beat.member_id or "new"), member))
        except Refused:
            return Outcome.BAD_MEMBER
        return Outcome.OK

    def _advance(self, waiting: _Waiting) -> None:
        """Answers the heartbeat if nothing of it is left to be done."""
        beat, group = waiting.beat, self._group()
        member = self._members.get(beat.member_id)
        if beat.epoch == LEAVING:
            if member is None:
                self._answer_left(waiting)
            else:
                self._leaving[beat.member_id] = None
            return
        if member is None or group is None:
            if beat.epoch != 0 or waiting.epoch:
                waiting.refuse(Outcome.UNKNOWN_MEMBER)  # it was removed meanwhile
            return
        if beat.epoch == AWAY_EPOCH:
            if member.epoch == AWAY_EPOCH:
                self._answer_left(waiting)
            return
        if self._needs_update(beat, member):
            return
        if beat.epoch == 0 and member.epoch == 0 and not waiting.epoch:
            waiting.epoch = group.generation
        if group.target_epoch < waiting.epoch:
            return  # it has joined, and gets its first partitions with its first answer
        if not waiting.is_heard and reconciled(group, member, said_in(beat, member)) is not member:
            return
        self._renew(beat.member_id)
        assigned: Partitions | None = member.assigned
        if self._told.get(beat.member_id) == assigned and not beat.is_full and beat.epoch == member.epoch:
            assigned = None
        self._told[beat.member_id] = member.assigned
        waiting.answer(Beaten(outcome=Outcome.OK, member_id=beat.member_id, epoch=member.epoch, assignment=assigned))

    def _answer_left(self, waiting: _Waiting) -> None:
        waiting.answer(Beaten(outcome=Outcome.OK, member_id=waiting.beat.member_id, epoch=waiting.beat.epoch))

    def _needs_update(self, beat: Beat, member: MemberState) -> bool:
        version = self._surroundings.topics_version()
        says_nothing = beat.topics is None and beat.pattern is None and beat.assignor is None and beat.rack is None
        is_matched = not member.subscription.pattern or self._matched_at.get(beat.member_id) == version
        if says_nothing and beat.rebalance_timeout_ms < 0 and is_matched:
            return False
        update = self._update_of(beat, member)
        is_needed = update.subscription != member.subscription or (
            update.member.rebalance_timeout_ms != member.member.rebalance_timeout_ms
        )
        if not is_needed:
            self._matched_at[beat.member_id] = version
        return is_needed

    def _update_of(self, beat: Beat, member: MemberState | None) -> ConsumerUpdate:
        """The member after this heartbeat. `member` is what it was; None if it is new."""
        former, replaces = member, ""
        if former is None and beat.instance_id:
            former = self._member_of("", beat.instance_id)
            replaces = former.member.member_id if former is not None else ""
        before = former.subscription if former is not None else Subscription()
        pattern = before.pattern if beat.pattern is None else beat.pattern
        matched = [name for name in self._matching(pattern) if beat.may_see(name)] if pattern else []
        timeout_ms = former.member.rebalance_timeout_ms if former is not None else 0
        return ConsumerUpdate(
            member=GroupMember(
                member_id=beat.member_id,
                instance_id=former.member.instance_id if former is not None else beat.instance_id,
                client_id=beat.client_id,
                client_host=beat.client_host,
                session_timeout_ms=0,
                rebalance_timeout_ms=beat.rebalance_timeout_ms if beat.rebalance_timeout_ms > 0 else timeout_ms,
                protocols=(),
            ),
            subscription=Subscription(
                topics=before.topics if beat.topics is None else tuple(sorted(set(beat.topics))),
                pattern=pattern,
                matched=tuple(matched),
                assignor=before.assignor if beat.assignor is None else beat.assignor,
                rack=before.rack if beat.rack is None else beat.rack,
            ),
            replaces=replaces,
        )

    def _matching(self, pattern: str) -> list[str]:
        """The topics whose whole names match, in order. InvalidPattern."""
        version = self._surroundings.topics_version()
        known = self._matches.get(pattern)
        if known is None or known[0] != version:
            matches, topics = matcher(pattern), self._surroundings.node.state.topics
            names = sorted(name for name, t in topics.items() if not is_external(t.config) and matches(name))
            self._matches = {p: found for p, found in self._matches.items() if found[0] == version}
            if len(self._matches) >= GROUP_PATTERNS_MAX:
                self._matches.clear()
            known = self._matches[pattern] = (version, names)
        return known[1]

    # ------------------------------------------------------------------------------------------------ one command
    def _pump(self) -> None:
        """Makes the next command of all that waits for one, unless one is under way."""
        if self._is_busy or self._closed_with is not None:
            return
        group = self._refresh()
        command = self._removal(group) or self._update() or self._reconciliation(group)
        if command is not None:
            self._propose(command)
        elif group is not None and group.members and (self._is_outdated or group.target_epoch < group.generation):
            self._compute(group)

    def _removal(self, group: GroupState | None) -> Coordinated | None:
        leaving = tuple(member_id for member_id in self._leaving if member_id in self._members)
        if group is None or not leaving:
            self._leaving.clear()
            return None
        return RemoveMembers(
            group=self.name,
            coordinator_epoch=self.epoch,
            generation=group.generation,
            member_ids=leaving,
            removed_ms=self._surroundings.clock.wall_ns() // NS_PER_MS,
        )

    def _update(self) -> Coordinated | None:
        updates: dict[str, ConsumerUpdate] = {}
        taken = set[str]()
        for waiting in self._waiting:
            beat = waiting.beat
            member = self._members.get(beat.member_id)
            if waiting.done is None or beat.epoch < 0 or (beat.instance_id and beat.instance_id in taken):
                continue
            if member is None or self._needs_update(beat, member):
                updates[beat.member_id] = self._update_of(beat, member)
                taken.add(beat.instance_id)
                self._matched_at[beat.member_id] = self._surroundings.topics_version()
            if self._one_by_one and updates:
                self._one_by_one -= 1
                break
            if len(updates) >= _BATCH_MAX:
                break
        if not updates:
            self._one_by_one = 0
            return None
        return UpdateConsumers(group=self.name, coordinator_epoch=self.epoch, updates=tuple(updates.values()))

    def _reconciliation(self, group: GroupState | None) -> Coordinated | None:
        """What has been said is applied for all that wait, before the next target is computed."""
        items = []
        for waiting in self._waiting:
            member = self._members.get(waiting.beat.member_id)
            if waiting.done is None or waiting.is_heard or member is None or group is None:
                continue
            if group.target_epoch < waiting.epoch or waiting.beat.epoch == LEAVING:
                continue
            said = said_in(waiting.beat, member)
            if reconciled(group, member, said) is not member:
                items.append(said)
                waiting.is_heard = True
            if len(items) >= _BATCH_MAX:
                break
        if not items:
            return None
        return ReconcileConsumers(group=self.name, coordinator_epoch=self.epoch, items=tuple(items))

    def _propose(self, command: Coordinated) -> None:
        self._is_busy = True
        self._surroundings.changes.submit(command, GROUP_COMMAND_MS_MAX, partial(self._on_reply, command))

    def _on_reply(self, command: Coordinated, reply: Reply | SmqError) -> None:
        if self._closed_with is not None:
            return
        self._is_busy = False
        if isinstance(reply, SmqError):
            self._on_refused(command, reply)
        elif coordinator_of(self._surroundings.node.state, self.name).epoch != self.epoch:
            self._give_up(Outcome.NOT_COORDINATOR)
        else:
            self._refresh()
            self._advance_all()
        self._pump()

    def _on_refused(self, command: Coordinated, error: SmqError) -> None:
        """One update that cannot be must not cost the others theirs."""
        if isinstance(command, UpdateConsumers) and error.code.is_definite and not error.code.is_retriable:
            if len(command.updates) > 1:
                self._one_by_one = len(command.updates)
                return
            refused = command.updates[0].member.member_id
            for waiting in [w for w in self._waiting if w.beat.member_id == refused]:
                self._waiting.remove(waiting)
                waiting.refuse(outcome_of_failure(error))
            return
        log.warning("group_change_failed", group=self.name, command=type(command).__name__, error=str(error))
        self._give_up(outcome_of_failure(error))

    def _give_up(self, outcome: Outcome) -> None:
        """Whatever is true of the group now is for the next object to read."""
        self._on_failed(self)
        self.close(outcome)

    def _advance_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.done is not None:
                self._advance(each)
        self._waiting = [w for w in waiting if w.done is not None] + self._waiting

    # ------------------------------------------------------------------------------------------------- the target
    def _compute(self, group: GroupState) -> None:
        """In slices of the loop's time. Who joins meanwhile waits for the next target."""
        self._is_busy = True
        self._is_outdated = False
        members = list(group.members.values())
        topics = self._topics(members)
        candidates = [self._candidate(m, topics) for m in members]
        counts = dict(topics.values())
        assignor = chosen_assignor(members)
        targets: Targets = [set() for _ in members]
        changed: list[tuple[str, Partitions]] = []

        def steps() -> Iterator[None]:
            yield from ASSIGNORS[assignor](candidates, counts, targets)
            for member, target in zip(members, targets, strict=True):
                partitions = gathered(target)
                if partitions != member.target:
                    changed.append((member.member.member_id, partitions))
                yield

        done = partial(self._on_computed, group.generation, assignor, changed)
        self._surroundings.slices.run(steps(), done, self._on_fault)

    def _topics(self, members: list[MemberState]) -> dict[str, tuple[TopicId, int]]:
        """Those that members want and that exist: id, and number of partitions."""
        known = self._surroundings.node.state.topics
        names = {name for m in members for name in (*m.subscription.topics, *m.subscription.matched)}
        found = ((name, known[name]) for name in names if name in known)
        return {name: (t.topic_id, len(t.partitions)) for name, t in found if not is_external(t.config)}

    def _candidate(self, m: MemberState, topics: dict[str, tuple[TopicId, int]]) -> Candidate:
        names = {*m.subscription.topics, *m.subscription.matched}
        return Candidate(
            member_id=m.member.member_id,
            instance_id=m.member.instance_id,
            topics=frozenset(topics[name][0] for name in names if name in topics),
            target=m.target,
        )

    def _on_computed(self, generation: Generation, assignor: str, changed: list[tuple[str, Partitions]]) -> None:
        self._is_busy = False
        group = self._refresh()
        if self._closed_with is not None or group is None:
            return
        if group.generation != generation:
            self._is_outdated = True
            self._pump()
        elif changed or group.target_epoch < generation:
            self._propose(
                AssignConsumers(
                    group=self.name,
                    coordinator_epoch=self.epoch,
                    generation=generation,
                    assignor=assignor,
                    targets=tuple(changed),
                )
            )
        else:
            self._pump()

    def _on_fault(self, fault: Exception) -> None:
        raise fault  # a bug: the loop's handler of exceptions ends the node


# ------------------------------------------------------------------------------------------------ pure decisions
def said_in(beat: Beat, member: MemberState) -> Acknowledgement:
    is_away = beat.epoch == AWAY_EPOCH
    return Acknowledgement(
        member_id=beat.member_id,
        epoch=member.epoch if is_away else beat.epoch,
        owned=beat.owned or (),
        says_owned=beat.owned is not None,
        is_away=is_away,
    )


def epoch_refusal(beat: Beat, member: MemberState) -> Outcome:
    """The member's epoch, or the one before if it has nothing that is not its own: the answer may have been lost."""
    if beat.epoch == member.epoch:
        return Outcome.OK
    is_known = beat.epoch == member.previous_epoch and beat.owned is not None
    if is_known and spread(beat.owned or ()) <= spread(member.assigned):
        return Outcome.OK
    return Outcome.FENCED_EPOCH


def chosen_assignor(members: list[MemberState]) -> str:
    """The one that most members ask for."""
    votes = Counter(m.subscription.assignor for m in members if m.subscription.assignor in ASSIGNORS)
    return min(votes, key=lambda name: (-votes[name], name)) if votes else next(iter(ASSIGNORS))
