"""One group, as its coordinator lives with it: rounds of joining, waiting for assignments, sessions.

Owns what only memory holds. Who the members are, their generation and their assignments it reads from the replicated
state each time, and changes by commands alone, one at a time: what comes while a command is under way waits for its
answer. So a coordinator that knows nothing but the state can go on where another has ended. A command whose outcome is
not known ends this object, and the next one begins from the state.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeAlias

from smq.coordinator.groups.admission import fits, has_room
from smq.coordinator.groups.answers import code_of_failure, joined, subscription, synced
from smq.coordinator.groups.protocols import chosen
from smq.coordinator.groups.round import Joiner, Round
from smq.coordinator.groups.types import Identity, Join, OnJoined, OnLeft, OnSynced, Sync, Synced
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.limits import GROUP_ID_GIVEN_MS_MAX, GROUP_QUEUE_MAX
from smq.raft_state.commands import AssignMembers, Command, FormGeneration, GroupMember, RemoveMembers, ReplaceMember
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Generation
from smq.raft_state.limits import GROUP_MEMBERS_MAX
from smq.raft_state.replies import Reply
from smq.raft_state.state import GroupPhase, GroupState, MemberState

_NS_PER_MS: Final = 1_000_000
_NEVER_NS: Final = 1 << 62
_NOBODY: Final[dict[str, MemberState]] = {}
Refuse: TypeAlias = Callable[[KafkaError], None]


class LiveHost(Protocol):
    """What a live group sees of its coordinator."""

    @property
    def initial_delay_ms(self) -> int: ...

    @property
    def member_bytes(self) -> int:
        """Of the members of all groups of the cluster."""

    def group_state(self, name: str) -> GroupState | None: ...

    def epoch_of(self, name: str) -> Epoch:
        """Of the group's coordinator, as the state has it now."""

    def now_ns(self) -> int: ...

    def wall_ms(self) -> int: ...

    def new_member_id(self, prefix: str) -> str: ...

    def propose(self, command: Command, done: Callable[[Reply | SmqError], None]) -> None: ...

    def forget(self, group: "LiveGroup") -> None: ...

    def complain(self, group: str, what: str, error: SmqError) -> None: ...


class LiveGroup:
    """All methods may be called at any time; answers come through the callbacks, perhaps before the call returns."""

    def __init__(self, host: LiveHost, name: str, epoch: Epoch, *, opened_by: str = "") -> None:
        """`opened_by` is the address that asked for a group that there was not."""
        self.name = name
        self.opened_by = opened_by
        self.epoch = epoch  # of the coordinator: another one makes another object
        self.due_ns = _NEVER_NS  # nothing is to be done by the clock before this
        self._host = host
        self._seen: dict[str, MemberState] = _NOBODY  # the members that `_sessions` is about
        self._sessions: dict[str, int] = {}  # when a member that is not heard of is gone
        self._given_ids: dict[str, int] = {}  # ids of members that have not joined under them yet, and until when
        self._round: Round | None = None
        self._syncing: dict[str, OnSynced] = {}
        self._unsynced: set[str] = set()  # members of this generation that have not asked for their assignment
        self._sync_until_ns = _NEVER_NS
        self._is_busy = False  # a command is under way
        self._failed: Refuse | None = None  # who is told where that one fails, besides those who wait
        self._queue: deque[Callable[[], None]] = deque()
        self._closed_with: KafkaError | None = None
        group = self._look()
        if group is not None and group.phase is GroupPhase.PREPARING:
            self._open_round()
        elif group is not None and group.phase is GroupPhase.COMPLETING:
            self._await_syncs(group.members)

    # ------------------------------------------------------------------------------------------------- the state
    def _look(self) -> GroupState | None:
        """The group as it is replicated. A member that this object has not seen yet gets one fresh session: after
        another coordinator's end nobody is evicted for what that one had not heard."""
        group = self._host.group_state(self.name)
        members = group.members if group is not None else _NOBODY
        if members is not self._seen:
            self._seen = members
            before, now_ns = self._sessions, self._host.now_ns()
            self._sessions = {
                name: before.get(name, now_ns + m.member.session_timeout_ms * _NS_PER_MS) for name, m in members.items()
            }
            self._unsynced &= members.keys()
            self._wake_at(min(self._sessions.values(), default=_NEVER_NS))
        return group

    def _catch_up(self) -> GroupState | None:
        """As `_look`; begins the round that the state asks for where this object has not asked for it: a removal whose
        outcome an earlier object was not told has been applied since."""
        group = self._look()
        is_due = group is not None and group.phase is GroupPhase.PREPARING
        if is_due and self._round is None and not self._is_busy and self._closed_with is None:
            self._open_round()
        return group

    @property
    def is_idle(self) -> bool:
        """Nothing would be lost with this object."""
        self._look()
        return not (self._seen or self._given_ids or self._round or self._is_busy)

    @property
    def is_rebalancing(self) -> bool:
        return self._round is not None

    def _wake_at(self, at_ns: int) -> None:
        self.due_ns = min(self.due_ns, at_ns)

    def _touch(self, member_id: str) -> None:
        member = self._seen.get(member_id)
        if member is not None:
            until_ns = self._host.now_ns() + member.member.session_timeout_ms * _NS_PER_MS
            self._sessions[member_id] = until_ns
            self._wake_at(until_ns)

    def grant_time(self) -> None:
        """This node could not hear anybody for a while: everybody gets a fresh session, and time to join."""
        self._look()
        for member_id in self._seen:
            self._touch(member_id)
        if not self._seen:
            return
        until_ns = self._host.now_ns() + max(m.member.rebalance_timeout_ms for m in self._seen.values()) * _NS_PER_MS
        if self._round is not None:
            self._round.until_ns = until_ns
        if self._unsynced:
            self._sync_until_ns = until_ns

    # ------------------------------------------------------------------------------------------------ one at a time
    def _enter(self, event: Callable[[], None], refuse: Refuse) -> None:
        """Runs an event now, or after the command under way."""
        if not self._is_busy:
            event()
        elif len(self._queue) < GROUP_QUEUE_MAX:
            self._queue.append(event)
        else:
            refuse(KafkaError.COORDINATOR_NOT_AVAILABLE)

    def _change(self, command: Command, then: Callable[[], None], failed: Refuse | None = None) -> None:
        """Proposes the one command under way. A definite refusal and an unknown outcome end this object alike."""
        self._is_busy = True
        self._failed = failed

        def on_reply(reply: Reply | SmqError) -> None:
            if not self._is_busy:
                return  # closed meanwhile
            if isinstance(reply, SmqError):
                self._host.complain(self.name, type(command).__name__, reply)
                self._give_up(code_of_failure(reply))
                return
            if self._host.epoch_of(self.name) != self.epoch:
                # It took effect, and another has gone on since: what the state says now is no answer to this command.
                self._give_up(KafkaError.NOT_COORDINATOR)
                return
            self._is_busy = False
            self._failed = None
            self._look()
            then()
            self._drain()

        self._host.propose(command, on_reply)

    def _drain(self) -> None:
        while self._queue and not self._is_busy:
            self._queue.popleft()()
        self._settle_round()

    def _give_up(self, code: KafkaError) -> None:
        """What there is now is for the next object to find."""
        self._host.forget(self)
        self.close(code)

    def close(self, code: KafkaError) -> None:
        """Everybody who waits is told, those in the queue too."""
        self._closed_with = code
        self._is_busy = False
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(code)
        round_, self._round = self._round, None
        syncing, self._syncing = self._syncing, {}
        for joiner in round_.joiners.values() if round_ is not None else ():
            joiner.refuse(code)
        for done in syncing.values():
            done(Synced(code=code))
        queue, self._queue = self._queue, deque()
        for event in queue:
            event()

    # ---------------------------------------------------------------------------------------------------- joining
    def join(self, request: Join, done: OnJoined) -> Callable[[], None]:
        """Answers now or when the round is over. What it returns withdraws the request: its sender is gone."""
        joiner = Joiner(request, request.member, done)
        self._enter(partial(self._join, joiner), joiner.refuse)
        return partial(self._withdraw, joiner)

    def _join(self, joiner: Joiner) -> None:
        if self._closed_with is not None:
            joiner.refuse(self._closed_with)
        if not joiner.is_waiting:
            return
        group = self._catch_up()
        member = joiner.member
        waiting = self._round.joiners if self._round is not None else {}
        if not fits(joiner, group, self._seen, waiting):
            joiner.refuse(KafkaError.INCONSISTENT_GROUP_PROTOCOL)
        elif not has_room(member, self._seen, waiting, self._host.member_bytes):
            joiner.refuse(KafkaError.GROUP_MAX_SIZE_REACHED)
        elif member.member_id:
            self._join_again(group, joiner)
        else:
            owner = group.static_member(member.instance_id) if group is not None and member.instance_id else None
            if owner is not None:
                self._replace(joiner, owner)
            else:
                self._join_first(joiner)

    def _join_first(self, joiner: Joiner) -> None:
        waiting = self._round.joiners if self._round is not None else {}
        if len(self._seen.keys() | waiting.keys()) + len(self._given_ids) >= GROUP_MEMBERS_MAX:
            joiner.refuse(KafkaError.GROUP_MAX_SIZE_REACHED)
            return
        member = joiner.member
        member_id = self._host.new_member_id(member.instance_id or member.client_id)
        if joiner.request.takes_id_first and not member.instance_id:
            until_ns = self._host.now_ns() + min(member.session_timeout_ms, GROUP_ID_GIVEN_MS_MAX) * _NS_PER_MS
            self._given_ids[member_id] = until_ns
            self._wake_at(until_ns)
            joiner.refuse(KafkaError.MEMBER_ID_REQUIRED, member_id)
            return
        for other in [j for j in waiting.values() if member.instance_id and j.member.instance_id == member.instance_id]:
            del waiting[other.member.member_id]
            other.refuse(KafkaError.FENCED_INSTANCE_ID)
        joiner.member = replace(member, member_id=member_id)
        self._wait_for_round(joiner)

    def _join_again(self, group: GroupState | None, joiner: Joiner) -> None:
        """A member that has an id: given to it, its own since a generation, or waiting in this round already."""
        member = joiner.member
        if self._given_ids.pop(member.member_id, None) is not None:
            self._wait_for_round(joiner)
            return
        code = self._check(Identity(member_id=member.member_id, instance_id=member.instance_id))
        if code is not KafkaError.NONE:
            joiner.refuse(code)
            return
        self._touch(member.member_id)
        known = self._seen.get(member.member_id)
        if self._round is not None or known is None or group is None:
            self._wait_for_round(joiner)
            return
        is_same = known.member.protocols == member.protocols
        if is_same and not (group.phase is GroupPhase.STABLE and group.leader == member.member_id):
            joiner.answer(joined(group, member.member_id))
        else:
            self._wait_for_round(joiner)

    def _wait_for_round(self, joiner: Joiner) -> None:
        round_ = self._round or self._open_round(joiner.member.rebalance_timeout_ms)
        member_id, now_ns = joiner.member.member_id, self._host.now_ns()
        before = round_.joiners.pop(member_id, None)
        if before is not None:
            before.refuse(KafkaError.REBALANCE_IN_PROGRESS)  # the same member has asked again
        elif round_.is_first and round_.joiners:
            round_.wait_longer(now_ns, self._host.initial_delay_ms * _NS_PER_MS)
        round_.joiners[member_id] = joiner
        self._settle_round()

    def _open_round(self, newcomer_timeout_ms: int = 0) -> Round:
        """All members must join again. Those who wait for an assignment will not get it."""
        now_ns = self._host.now_ns()
        timeouts_ms = [m.member.rebalance_timeout_ms for m in self._seen.values()]
        limit_ns = now_ns + max(timeouts_ms, default=newcomer_timeout_ms) * _NS_PER_MS
        is_first = not self._seen
        until_ns = min(now_ns + self._host.initial_delay_ms * _NS_PER_MS, limit_ns) if is_first else limit_ns
        self._round = Round(until_ns=until_ns, limit_ns=limit_ns, is_first=is_first)
        self._wake_at(until_ns)
        self._stop_waiting_for_syncs()
        return self._round

    def _withdraw(self, joiner: Joiner) -> None:
        joiner.done = None
        member_id = joiner.member.member_id
        if self._is_busy or self._round is None or self._round.joiners.get(member_id) is not joiner:
            return  # it will be, or is, a member that was not heard of since
        del self._round.joiners[member_id]
        self._touch(member_id)
        self._settle_round()

    # --------------------------------------------------------------------------------------------- static members
    def _replace(self, joiner: Joiner, owner: MemberState) -> None:
        """A static member is back without its id: the process that had it is fenced, whatever comes next."""
        group = self._look()
        assert group is not None, "it has a member"
        old_id = owner.member.member_id
        member = replace(joiner.member, member_id=self._host.new_member_id(joiner.member.instance_id))
        if group.protocol not in {name for name, _ in member.protocols}:
            self._remove([old_id], partial(self._join, joiner), joiner.refuse)
            return
        joiner.member = member
        command = ReplaceMember(group=self.name, coordinator_epoch=self.epoch, old_member_id=old_id, member=member)
        self._change(command, partial(self._after_replacement, joiner, owner.member), joiner.refuse)

    def _after_replacement(self, joiner: Joiner, old: GroupMember) -> None:
        waiting = self._round.joiners.pop(old.member_id, None) if self._round is not None else None
        if waiting is not None:
            waiting.refuse(KafkaError.FENCED_INSTANCE_ID)
        syncing = self._syncing.pop(old.member_id, None)
        if syncing is not None:
            syncing(Synced(code=KafkaError.FENCED_INSTANCE_ID))
        group = self._look()
        if group is None or self._round is not None or group.phase is not GroupPhase.STABLE:
            self._wait_for_round(joiner)
            return
        is_same = chosen([m.member for m in group.members.values()]) == group.protocol and (
            subscription(old, group) == subscription(joiner.member, group)
        )
        if not is_same:
            self._wait_for_round(joiner)
            return
        answer = joined(group, joiner.member.member_id)
        if answer.leader != joiner.member.member_id:
            joiner.answer(answer)
        elif joiner.request.can_skip_assignment:
            joiner.answer(replace(answer, skip_assignment=True))
        else:
            # An older client would compute an assignment if it were told that it leads; it is told its old id.
            joiner.answer(replace(answer, leader=old.member_id, members=()))

    # ------------------------------------------------------------------------------------------------ generations
    def _settle_round(self) -> None:
        """Ends the round where it is over."""
        round_ = self._round
        if round_ is None or self._is_busy:
            return
        self._look()
        if not round_.joiners and not self._seen:
            self._round = None  # everybody has gone
            return
        all_are_back = not self._given_ids and self._seen.keys() <= round_.joiners.keys()
        if not round_.is_over(self._host.now_ns(), all_are_back=all_are_back):
            return
        absent = [m.member for name, m in self._seen.items() if name not in round_.joiners]
        if not round_.joiners and any(m.instance_id for m in absent):
            # Static members may be away for their whole session; there is nobody yet who could lead.
            round_.until_ns = self._host.now_ns() + max(m.rebalance_timeout_ms for m in absent) * _NS_PER_MS
            self._wake_at(round_.until_ns)
        elif not round_.joiners:
            self._round = None
            self._remove([m.member_id for m in absent], lambda: None)
        else:
            self._form(round_, [m for m in absent if m.instance_id])

    def _form(self, round_: Round, kept: list[GroupMember]) -> None:
        members = [j.member for j in round_.joiners.values()] + kept
        group = self._look()
        leader = group.leader if group is not None and group.leader in round_.joiners else members[0].member_id
        command = FormGeneration(
            group=self.name,
            coordinator_epoch=self.epoch,
            expected_generation=group.generation if group is not None else Generation(0),
            protocol_type=next(iter(round_.joiners.values())).request.protocol_type,
            protocol=chosen(members),
            leader=leader,
            members=tuple(members),
        )
        self._change(command, partial(self._on_formed, round_))

    def _on_formed(self, round_: Round) -> None:
        self._round = None
        group = self._look()
        assert group is not None, "its generation has just been applied"
        self._await_syncs({name: m for name, m in group.members.items() if name in round_.joiners})
        for name, joiner in round_.joiners.items():
            self._touch(name)
            joiner.answer(joined(group, name))

    # --------------------------------------------------------------------------------------------------- syncing
    def sync(self, request: Sync, done: OnSynced) -> Callable[[], None]:
        """Answers now, or once the leader has given the assignment."""
        self._enter(partial(self._sync, request, done), lambda code: done(Synced(code=code)))

        def withdraw() -> None:
            if self._syncing.get(request.who.member_id) is done:
                del self._syncing[request.who.member_id]
                self._touch(request.who.member_id)

        return withdraw

    def _sync(self, request: Sync, done: OnSynced) -> None:
        group, member_id = self._catch_up(), request.who.member_id
        code = self._closed_with or self._check(request.who, request.generation)
        if code is KafkaError.NONE and self._round is not None:
            code = KafkaError.REBALANCE_IN_PROGRESS
        if code is not KafkaError.NONE or group is None:
            done(Synced(code=code))
            return
        is_other = request.protocol_type not in (None, group.protocol_type)
        if is_other or request.protocol not in (None, group.protocol):
            done(Synced(code=KafkaError.INCONSISTENT_GROUP_PROTOCOL))
            return
        self._touch(member_id)
        self._unsynced.discard(member_id)
        if group.phase is GroupPhase.STABLE:
            done(synced(group, member_id))
            return
        before = self._syncing.get(member_id)
        self._syncing[member_id] = done
        if before is not None:
            before(Synced(code=KafkaError.REBALANCE_IN_PROGRESS))
        if member_id == group.leader:
            command = AssignMembers(
                group=self.name,
                coordinator_epoch=self.epoch,
                generation=group.generation,
                assignments=tuple((name, data) for name, data in request.assignments if name in group.members),
            )
            self._change(command, self._on_assigned)

    def _on_assigned(self) -> None:
        group = self._look()
        assert group is not None, "its assignment has just been applied"
        syncing, self._syncing = self._syncing, {}
        # The leader first: it asked before anyone else could have an answer, and some clients' tests count on it.
        for member_id, done in sorted(syncing.items(), key=lambda waiting: waiting[0] != group.leader):
            self._touch(member_id)
            done(synced(group, member_id))

    def _await_syncs(self, members: dict[str, MemberState]) -> None:
        """A member that joins and never asks for its assignment would keep its partitions from the others."""
        self._unsynced = set(members)
        timeout_ms = max((m.member.rebalance_timeout_ms for m in members.values()), default=0)
        self._sync_until_ns = self._host.now_ns() + timeout_ms * _NS_PER_MS
        self._wake_at(self._sync_until_ns)

    def _stop_waiting_for_syncs(self) -> None:
        self._unsynced.clear()
        self._sync_until_ns = _NEVER_NS
        syncing, self._syncing = self._syncing, {}
        for member_id, done in syncing.items():
            self._touch(member_id)  # it was heard of as long as it waited
            done(Synced(code=KafkaError.REBALANCE_IN_PROGRESS))

    # ---------------------------------------------------------------------------------------- heartbeats, leaving
    def heartbeat(self, who: Identity, generation: int) -> KafkaError:
        """Answered from memory, at once."""
        group = self._catch_up()
        code = self._check(who, generation)
        if code is not KafkaError.NONE or group is None:
            return code
        self._touch(who.member_id)
        return KafkaError.NONE if self._round is None else KafkaError.REBALANCE_IN_PROGRESS

    def _check(self, who: Identity, generation: int | None = None) -> KafkaError:
        """Kafka's order: the instance, the member, the generation. Members that wait for their first generation are
        known, too."""
        waiting = self._round.joiners if self._round is not None else {}
        if who.instance_id:
            owners = [m.member for m in self._seen.values()] + [j.member for j in waiting.values()]
            ids = {m.member_id for m in owners if m.instance_id == who.instance_id}
            if not ids:
                return KafkaError.UNKNOWN_MEMBER_ID
            if who.member_id not in ids:
                return KafkaError.FENCED_INSTANCE_ID
        if who.member_id not in self._seen:
            if who.member_id not in waiting:
                return KafkaError.UNKNOWN_MEMBER_ID
            return KafkaError.NONE if generation is None else KafkaError.REBALANCE_IN_PROGRESS
        group = self._host.group_state(self.name)
        is_current = group is not None and generation in (None, group.generation)
        return KafkaError.NONE if is_current else KafkaError.ILLEGAL_GENERATION

    def leave(self, leaving: list[Identity], done: OnLeft) -> None:
        """One code each."""
        self._enter(partial(self._leave, leaving, done), lambda code: done([code] * len(leaving)))

    def _leave(self, leaving: list[Identity], done: OnLeft) -> None:
        if self._closed_with is not None:
            done([self._closed_with] * len(leaving))
            return
        self._look()
        codes, removed = [], []
        for who in leaving:
            code, member_id = self._resolve(who)
            codes.append(code)
            if code is not KafkaError.NONE:
                continue
            self._given_ids.pop(member_id, None)
            joiner = self._round.joiners.pop(member_id, None) if self._round is not None else None
            if joiner is not None:
                joiner.refuse(KafkaError.UNKNOWN_MEMBER_ID)
            if member_id in self._seen:
                removed.append(member_id)
        if removed:
            self._remove(removed, lambda: done(codes), lambda code: done([code] * len(leaving)))
        else:
            done(codes)
            self._settle_round()

    def _resolve(self, who: Identity) -> tuple[KafkaError, str]:
        """A static member may be named by its instance id alone."""
        if who.member_id in self._given_ids:
            return KafkaError.NONE, who.member_id
        if not who.member_id and who.instance_id:
            for member in self._seen.values():
                if member.member.instance_id == who.instance_id:
                    return KafkaError.NONE, member.member.member_id
        return self._check(who), who.member_id

    def _remove(self, member_ids: list[str], then: Callable[[], None], failed: Refuse | None = None) -> None:
        """Members that are gone for good; the others rebalance."""
        group = self._look()
        assert group is not None, "it has members"
        command = RemoveMembers(
            group=self.name,
            coordinator_epoch=self.epoch,
            generation=group.generation,
            member_ids=tuple(member_ids),
            removed_ms=self._host.wall_ms(),
        )

        def removed() -> None:
            for member_id in member_ids:
                done = self._syncing.pop(member_id, None)
                if done is not None:
                    done(Synced(code=KafkaError.UNKNOWN_MEMBER_ID))
            if self._seen and self._round is None:
                self._open_round()
            then()

        self._change(command, removed, failed)

    # ------------------------------------------------------------------------------------------------- by the clock
    def on_time(self, now_ns: int) -> None:
        """Called once `due_ns` has come."""
        if self._is_busy:
            return
        self._catch_up()
        for member_id in [m for m, until_ns in self._given_ids.items() if until_ns <= now_ns]:
            del self._given_ids[member_id]
        gone = self._gone(now_ns)
        self.due_ns = self._next_due()
        if gone:
            self._remove(gone, lambda: None)
        else:
            self._settle_round()

    def _gone(self, now_ns: int) -> list[str]:
        """Who was not heard of for its session, or has not asked for its assignment. Who waits here is heard of."""
        waiting = self._round.joiners if self._round is not None else {}
        late = self._unsynced if now_ns >= self._sync_until_ns else ()
        return [
            name
            for name, until_ns in self._sessions.items()
            if (until_ns <= now_ns or name in late) and name not in waiting and name not in self._syncing
        ]

    def _next_due(self) -> int:
        """Those who wait here have no end of session; their waiting has one."""
        waiting = self._round.joiners if self._round is not None else {}
        quiet = (at for name, at in self._sessions.items() if name not in waiting and name not in self._syncing)
        due_ns = min(quiet, default=_NEVER_NS)
        if self._unsynced:
            due_ns = min(due_ns, self._sync_until_ns)
        if self._round is not None:
            due_ns = min(due_ns, self._round.until_ns)
        return min(due_ns, min(self._given_ids.values(), default=_NEVER_NS))
