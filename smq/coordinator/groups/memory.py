"""What only a group's coordinator remembers of it, and what every action needs of that.

Owns sessions, the open round, waiting requests, and the one command under way. Members, generation and assignment it
reads from the replicated state each time, and changes by commands only. The modules of actions import it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from smq.coordinator.groups.answers import synced
from smq.coordinator.groups.outcomes import Outcome, outcome_of_failure
from smq.coordinator.groups.pending import Pending, PendingJoin, PendingSync
from smq.coordinator.groups.round import Round, new_round, rebalance_timeout_ns
from smq.coordinator.groups.sessions import NEVER_NS, NO_MEMBERS, NS_PER_MS, Sessions
from smq.coordinator.groups.transitions import Event, Phase, phase_of
from smq.raft_state.commands import Coordinated
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch
from smq.raft_state.replies import Reply
from smq.raft_state.state import GroupPhase, GroupState


class GroupHost(Protocol):
    """What a live group sees of its coordinator."""

    @property
    def initial_delay_ms(self) -> int: ...

    @property
    def member_bytes(self) -> int:
        """Of the members of all groups of the cluster."""

    def group_state(self, name: str) -> GroupState | None: ...

    def partition_count(self, topic: str) -> int:
        """0 if there is no such topic, or its records are in external storage: Kafka's clients do not see it."""

    def epoch_of(self, name: str) -> Epoch:
        """Of the group's coordinator, as the state has it now."""

    def now_ns(self) -> int: ...

    def wall_ms(self) -> int: ...

    def new_member_id(self, prefix: str) -> str: ...

    def propose(self, command: Coordinated, done: Callable[[Reply | SmqError], None]) -> None: ...

    def forget(self, name: str, epoch: Epoch) -> None: ...

    def log_failure(self, group: str, command: str, error: SmqError) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the command under way failed, or may have failed. `error` is None if another coordinator overtook it."""

    command: str
    outcome: Outcome
    error: SmqError | None = None


@dataclass(slots=True, kw_only=True)
class GroupMemory:
    """`handle` runs the action of an event: an action's reply comes back as one."""

    host: GroupHost
    name: str
    epoch: Epoch  # of the coordinator: another one makes another object
    handle: Callable[[Event, Any], None]
    sessions: Sessions = field(default_factory=Sessions)
    round: Round | None = None
    syncing: dict[str, PendingSync] = field(default_factory=dict)  # by member id
    queue: deque[Pending] = field(default_factory=deque)
    is_changing: bool = False  # a command is under way
    removing: frozenset[str] = frozenset()  # the members that the command under way removes
    refuse_change: Callable[[Outcome], None] | None = None  # refuses the request that the command answers, if any
    closed_with: Outcome | None = None

    # -------------------------------------------------------------------------------------------------- the state
    def refresh(self) -> GroupState | None:
        """The group as it is replicated now."""
        group = self.host.group_state(self.name)
        members = group.members if group is not None else NO_MEMBERS
        if members is not self.sessions.members:
            self.sessions.follow(members, self.host.now_ns())
        return group

    def catch_up(self) -> None:
        """Opens the round that the replicated state asks for, or gives the assignment that it has. This object need not
        have begun either: another coordinator may have, or an earlier object whose command took effect after it had
        been given up."""
        group = self.refresh()
        if group is None or self.round is not None:
            return
        if group.phase is GroupPhase.PREPARING:
            self.open_round()
        elif group.phase is GroupPhase.STABLE and self.syncing:
            self.answer_syncs(group)

    @property
    def phase(self) -> Phase:
        group = self.host.group_state(self.name)
        return phase_of(
            is_closed=self.closed_with is not None,
            is_changing=self.is_changing,
            has_round=self.round is not None,
            replicated=group.phase if group is not None else GroupPhase.EMPTY,
        )

    @property
    def joiners(self) -> dict[str, PendingJoin]:
        return self.round.joiners if self.round is not None else {}

    @property
    def waiting(self) -> set[str]:
        """Ids of the members whose requests wait here."""
        return self.joiners.keys() | self.syncing.keys()

    def renew_session(self, member_id: str) -> None:
        """Restarts the session of the member if it is of this generation."""
        if member_id in self.sessions.members:
            self.sessions.restart(member_id, self.host.now_ns())

    def compute_due(self) -> None:
        self.sessions.compute_due(self.waiting, self.round.until_ns if self.round is not None else NEVER_NS)

    # ----------------------------------------------------------------------------------------- rounds, assignments
    def open_round(self, newcomer_timeout_ms: int = 0) -> Round:
        """All members must join again. Requests that wait for an assignment do not get it."""
        self.round = new_round(
            self.sessions.members,
            now_ns=self.host.now_ns(),
            initial_delay_ns=self.host.initial_delay_ms * NS_PER_MS,
            newcomer_timeout_ns=newcomer_timeout_ms * NS_PER_MS,
        )
        self.sessions.wake_at(self.round.until_ns)
        self.sessions.stop_awaiting_syncs()
        syncing, self.syncing = self.syncing, {}
        for member_id, pending in syncing.items():
            self.renew_session(member_id)  # a waiting request is a sign of life
            pending.refuse(Outcome.REBALANCING)
        return self.round

    def answer_syncs(self, group: GroupState) -> None:
        """The group's assignment has come: those that wait get theirs. A generation that an earlier object had given up
        may have come meanwhile, so not all of them need to be of this one."""
        syncing, self.syncing = self.syncing, {}
        # The leader first: it asked before anyone else could have an answer, and some clients' tests count on it.
        for member_id, pending in sorted(syncing.items(), key=lambda waiting: waiting[0] != group.leader):
            self.renew_session(member_id)
            if pending.request.generation == group.generation:
                pending.answer(synced(group, member_id))
            else:
                pending.refuse(Outcome.WRONG_GENERATION)

    def await_syncs(self, member_ids: list[str]) -> None:
        members = self.sessions.members
        timeout_ns = rebalance_timeout_ns([members[member_id].member for member_id in member_ids])
        self.sessions.await_syncs(member_ids, self.host.now_ns() + timeout_ns)

    # ------------------------------------------------------------------------------------------------- one command
    def propose(
        self, command: Coordinated, then: Callable[[], None], refuse: Callable[[Outcome], None] | None = None
    ) -> None:
        """Makes this the command under way. `then` runs once it has taken effect, `refuse` if it fails."""
        self.is_changing = True
        self.refuse_change = refuse
        self.host.propose(command, partial(self._on_reply, type(command).__name__, then))

    def _on_reply(self, command: str, then: Callable[[], None], reply: Reply | SmqError) -> None:
        if isinstance(reply, SmqError):
            self.handle(Event.FAILED, Failure(command, outcome_of_failure(reply), reply))
        elif self.host.epoch_of(self.name) != self.epoch:
            # It took effect, but another coordinator has gone on since: the present state is no answer to this command.
            self.handle(Event.FAILED, Failure(command, Outcome.NOT_COORDINATOR))
        else:
            self.handle(Event.APPLIED, then)
