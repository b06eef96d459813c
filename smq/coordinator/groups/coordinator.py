"""The groups that this node coordinates, as the replicated table of coordinators says.

Owns the live groups, their clock with one timer for all, and the one way to change a group. This node answers each
request by the table as it has applied it, and says so if it is not the coordinator. Being wrong about that is harmless,
because every command names the epoch of its coordinator. The composition root makes one per node and hands it to the
Kafka port and the gRPC port.
"""

import heapq
from collections.abc import Callable
from typing import Final, TypeAlias

import structlog

from smq.coordinator.groups.change_queues import Changes
from smq.coordinator.groups.consumers import LiveConsumers
from smq.coordinator.groups.live import LiveGroup
from smq.coordinator.groups.member_requests import (
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
)
from smq.coordinator.groups.session_timeouts import NEVER_NS
from smq.coordinator.groups.surroundings import Surroundings
from smq.coordinator.limits import (
    GROUP_PAUSE_MS,
    GROUP_SESSION_MS_MAX,
    GROUP_SESSION_MS_MIN,
    GROUP_TICK_MS,
    GROUPS_NEW_PER_ADDRESS_MAX,
)
from smq.raft_state.commands import (
    CommitOffsets,
    Coordinated,
    DeleteGroup,
    DeleteOffsets,
    OffsetCommit,
    StageOffsets,
    TransactionChange,
)
from smq.raft_state.coordinators import coordinator_of, slot_of
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Epoch, Generation, PartitionId, RequestId
from smq.raft_state.limits import MEMBER_PROTOCOLS_MAX, MEMBER_TEXT_BYTES_MAX
from smq.raft_state.replies import Reply
from smq.raft_state.state import CoordinatorSlot, GroupKind
from smq.replication.api import Cancel, DoneFn, NodeApi
from smq.replication.monitoring.measures import GroupMeasures
from smq.replication.ports import Clock, Rng, Timer
from smq.replication.runtime.slices import Slices

log = structlog.get_logger(__name__)

_NS_PER_MS: Final = 1_000_000
_SWEEP_TICKS: Final = 100  # how often objects are dropped if nothing would be lost with them
# An event loop may run its timers before it reads its sockets. Heartbeats that have arrived by the deadline are read
# and handled within this time.
_ALARM_LATE_MS: Final = 1.0


_TOPICS_TICKS: Final = 20  # how often it looks whether topics have come, gone or grown

Live: TypeAlias = LiveGroup | LiveConsumers
NO_MEMBER: Final = Identity(member_id="")  # commits for a group without members


def _nothing() -> None:
    """There is nothing to withdraw."""


class GroupCoordinator:
    """`start` once the node runs, `stop` before it ends. All on the node's loop."""

    def __init__(self, node: NodeApi, clock: Clock, rng: Rng, *, initial_delay_ms: Callable[[], int]) -> None:
        """`initial_delay_ms` is how long an empty group waits for more members."""
        self._node = node
        self._clock = clock
        self._changes = Changes(node, clock)
        self._slices = Slices(clock)
        self._topics: list[tuple[str, int]] = []  # with the number of partitions, as last seen
        self._topics_version = 0
        self._surroundings = Surroundings(
            node=node,
            clock=clock,
            rng=rng,
            changes=self._changes,
            slices=self._slices,
            initial_delay_ms=initial_delay_ms,
            topics_version=lambda: self._topics_version,
        )
        self._alarms = Alarms(clock, self._ring)
        self._live: dict[str, Live] = {}  # bounded by groups_max
        self._table: list[CoordinatorSlot] = []  # as it was when the groups were last loaded
        self._is_running = False
        self._was_away = False
        self._last_tick_ns = 0
        self._ticks = 0

    def start(self) -> None:
        self._is_running = True
        self._last_tick_ns = self._clock.monotonic_ns()
        self._tick()

    def stop(self) -> None:
        """Sends all waiting members to look for another coordinator."""
        self._is_running = False
        self._slices.stop()
        self._alarms.stop()
        self._changes.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
        live, self._live = self._live, {}
        for group in live.values():
            group.close(Outcome.NOT_COORDINATOR)

    @property
    def measures(self) -> GroupMeasures:
        return self._changes.measures

    # -------------------------------------------------------------------------------------------------- ownership
    def refusal(self, name: str) -> Outcome:
        """OK if this node coordinates the group and can do so."""
        if not self._is_running or not self._owns(coordinator_of(self._node.state, name)):
            return Outcome.NOT_COORDINATOR
        return Outcome.OK if self._node.is_ready else Outcome.NOT_READY

    def refuse(self, name: str) -> SmqError | None:
        """As `refusal`, for callers that take errors. Names the coordinator's gRPC port, unless this node has no
        quorum: then the coordinator that it knows may be out of date, or dead."""
        if self.refusal(name) is Outcome.OK:
            return None
        if not self._node.is_ready:
            return SmqError(
                ErrorCode.NODE_NOT_READY, f"this node has no quorum, which a change of group {name!r} needs"
            )
        slot = coordinator_of(self._node.state, name)
        node = self._node.state.nodes.get(slot.node)
        if node is None or self._owns(slot):
            return SmqError(ErrorCode.NOT_COORDINATOR, f"no node coordinates group {name!r} yet")
        details = ErrorDetails(leader=slot.node, leader_address=node.grpc_address)
        return SmqError(ErrorCode.NOT_COORDINATOR, f"node {slot.node} coordinates group {name!r}", details)

    def epoch_of(self, name: str) -> Epoch:
        return coordinator_of(self._node.state, name).epoch

    def wall_ms(self) -> int:
        return self._clock.wall_ns() // _NS_PER_MS

    def slots(self) -> frozenset[int]:
        """The slots whose groups this node coordinates."""
        return frozenset(i for i, slot in enumerate(self._node.state.coordinators) if self._owns(slot))

    def _owns(self, slot: CoordinatorSlot) -> bool:
        return slot.node == self._node.node_id and slot.incarnation == self._node.incarnation

    def _find(self, name: str) -> Live | None:
        """The live group. Makes one if the replicated group has members, and this node coordinates it: its sessions
        evict members."""
        group = self._live.get(name)
        slot = coordinator_of(self._node.state, name)
        if group is not None and group.epoch != slot.epoch:
            del self._live[name]
            group.close(Outcome.NOT_COORDINATOR)
            group = None
        if not self._owns(slot):
            return None
        known = self._node.state.groups.get(name)
        if group is None and known is not None and known.members:
            group = self._make_live(name, known.kind)
        return group

    def _make_live(self, name: str, kind: GroupKind, *, opened_by: str = "") -> Live:
        make = LiveConsumers if kind is GroupKind.CONSUMER else LiveGroup
        epoch = coordinator_of(self._node.state, name).epoch
        group = self._live[name] = make(
            self._surroundings,
            name,
            epoch,
            set_alarm=self._alarms.set,
            on_failed=self._forget,
            opened_by=opened_by,
        )
        return group

    def _live_of(self, name: str, kind: GroupKind, address: str) -> Live:
        """The live group. Makes one if there is none, or one of the other kind without members."""
        group = self._find(name)
        is_other = group is not None and isinstance(group, LiveConsumers) is not (kind is GroupKind.CONSUMER)
        if group is None or (is_other and group.is_idle):
            group = self._make_live(name, kind, opened_by=address)
        return group

    def _forget(self, group: Live) -> None:
        """Its last command failed. The next tick reads the group from the state again."""
        if self._live.get(group.name) is group:
            del self._live[group.name]
        self._table = []

    def _load(self) -> None:
        """After a change of the table: closes the groups that other nodes coordinate now, and takes over theirs."""
        state = self._node.state
        self._table = list(state.coordinators)
        mine = [self._owns(slot) for slot in self._table]
        for name, group in list(self._live.items()):
            slot = slot_of(name)
            if not mine[slot] or self._table[slot].epoch != group.epoch:
                del self._live[name]
                group.close(Outcome.NOT_COORDINATOR)
        for name, known in state.groups.items():
            if known.members and name not in self._live and mine[slot_of(name)]:
                self._find(name)

    # --------------------------------------------------------------------------------------------------- requests
    def join(self, request: Join, done: OnJoined) -> Callable[[], None]:
        """Answers when the generation has formed. Call the returned function to withdraw the request."""
        outcome = self._join_refusal(request)
        if outcome is not Outcome.OK:
            done(Joined(outcome=outcome, member_id=request.member.member_id))
            return _nothing
        return self._live_of(request.group, GroupKind.CLASSIC, request.member.client_host).join(request, done)

    def beat(self, beat: Beat, done: OnBeaten) -> Callable[[], None]:
        """A heartbeat of a consumer group's member, by which it joins and leaves, too. Call the returned function to
        withdraw the request."""
        outcome = self.refusal(beat.group)
        if outcome is Outcome.OK and beat.epoch == 0:
            outcome = self._new_group_refusal(beat.group, beat.client_host)
        if outcome is not Outcome.OK:
            done(Beaten(outcome=outcome, member_id=beat.member_id))
            return _nothing
        known = self._find(beat.group)
        group = self._live_of(beat.group, GroupKind.CONSUMER, beat.client_host) if beat.epoch == 0 else known
        if not isinstance(group, LiveConsumers):
            done(Beaten(outcome=Outcome.NO_CONSUMER_GROUP, member_id=beat.member_id))
            return _nothing
        return group.beat(beat, done)

    def _join_refusal(self, request: Join) -> Outcome:
        member = request.member
        if not GROUP_SESSION_MS_MIN <= member.session_timeout_ms <= GROUP_SESSION_MS_MAX:
            return Outcome.BAD_SESSION_TIMEOUT
        texts: tuple[str, ...] = (member.member_id, member.instance_id, member.client_id, request.protocol_type)
        texts += tuple(name for name, _ in member.protocols)
        if any(len(text.encode()) > MEMBER_TEXT_BYTES_MAX for text in texts):
            return Outcome.BAD_MEMBER
        if len(member.protocols) > MEMBER_PROTOCOLS_MAX:
            return Outcome.BAD_MEMBER
        outcome = self.refusal(request.group)
        if outcome is not Outcome.OK:
            return outcome
        return self._new_group_refusal(request.group, member.client_host)

    def _new_group_refusal(self, name: str, address: str) -> Outcome:
        state = self._node.state
        if name in state.groups or name in self._live:
            return Outcome.OK
        new = [group for group in self._live.values() if group.name not in state.groups]
        if len(state.groups) + len(new) >= state.groups_max and not any(g.is_unused for g in state.groups.values()):
            log.warning("group_refused", group=name, reason="the cluster has as many groups as it may have")
            return Outcome.TOO_MANY_GROUPS
        if sum(group.opened_by == address for group in new) >= GROUPS_NEW_PER_ADDRESS_MAX:
            log.warning("group_refused", group=name, reason="its address has asked for too many new groups")
            return Outcome.TOO_MANY_NEW_GROUPS
        return Outcome.OK

    def sync(self, request: Sync, done: OnSynced) -> Callable[[], None]:
        """Answers when the leader has given the assignment. Call the returned function to withdraw the request."""
        outcome, group = self._group(request.group)
        if group is None:
            done(Synced(outcome=outcome))
            return _nothing
        return group.sync(request, done)

    def heartbeat(self, name: str, who: Identity, generation: int) -> Outcome:
        outcome, group = self._group(name)
        return outcome if group is None else group.heartbeat(who, generation)

    def leave(self, name: str, leaving: list[Identity], done: OnLeft) -> None:
        """Answers with one outcome per member."""
        outcome, group = self._group(name)
        if group is None:
            done([outcome] * len(leaving))
        else:
            group.leave(leaving, done)

    def commit(
        self,
        name: str,
        who: Identity,
        generation: int,
        items: tuple[OffsetCommit, ...],
        request_id: RequestId,
        timeout_ms: int,
        done: DoneFn[Reply],
    ) -> Cancel:
        """A commit of a member, which is a sign of life, too; or of no member (NO_MEMBER, NO_GENERATION). The state
        machine decides whether the sender may commit. For all changes: SmqError if another node coordinates the group,
        and the returned function withdraws what has not been proposed yet."""
        refusal = self.refuse(name)
        group = self._find(name) if refusal is None else None
        if group is not None:
            group.heartbeat(who, generation)
        command = CommitOffsets(
            request_id=request_id,
            group=name,
            coordinator_epoch=self.epoch_of(name),
            generation=Generation(generation),
            member_id=who.member_id,
            instance_id=who.instance_id,
            items=items,
            committed_ms=self.wall_ms(),
        )
        return self._change(command, refusal, timeout_ms, done)

    def stage(self, command: StageOffsets, who: Identity, timeout_ms: int, done: DoneFn[Reply]) -> Cancel:
        """Offsets for a transaction: as a commit of the member."""
        refusal = self.refuse(command.group)
        group = self._find(command.group) if refusal is None else None
        if group is not None and who.member_id:
            group.heartbeat(who, command.generation)
        return self._change(command, refusal, timeout_ms, done)

    def change(self, command: TransactionChange, timeout_ms: int, done: DoneFn[Reply]) -> Cancel:
        """Of a transactional id, whose coordinator is chosen as a group's."""
        return self._change(command, self.refuse(command.transactional_id), timeout_ms, done)

    def delete_group(self, name: str, request_id: RequestId, timeout_ms: int, done: DoneFn[Reply]) -> Cancel:
        refusal = self.refuse(name)
        if refusal is None:
            self._find(name)  # the sessions of its members may have to end first
        command = DeleteGroup(request_id=request_id, group=name, coordinator_epoch=self.epoch_of(name))
        return self._change(command, refusal, timeout_ms, done)

    def delete_offsets(
        self,
        name: str,
        generation: Generation,
        partitions: tuple[PartitionId, ...],
        request_id: RequestId,
        timeout_ms: int,
        done: DoneFn[Reply],
    ) -> Cancel:
        """`generation` is the one whose subscriptions the caller has looked at."""
        command = DeleteOffsets(
            request_id=request_id,
            group=name,
            coordinator_epoch=self.epoch_of(name),
            generation=generation,
            partitions=partitions,
        )
        return self._change(command, self.refuse(name), timeout_ms, done)

    def _change(self, command: Coordinated, refusal: SmqError | None, timeout_ms: int, done: DoneFn[Reply]) -> Cancel:
        if refusal is not None:
            done(refusal)
            return _nothing
        return self._changes.submit(command, timeout_ms, done)

    def is_rebalancing(self, name: str) -> bool:
        """Whether a round is open for the next generation. False if another node coordinates the group."""
        group = self._find(name)
        return group is not None and group.is_rebalancing

    def _group(self, name: str) -> tuple[Outcome, Live | None]:
        """The live group; otherwise why there is none. A group that does not exist has no members."""
        outcome = self.refusal(name)
        if outcome is not Outcome.OK:
            return outcome, None
        return Outcome.UNKNOWN_MEMBER, self._find(name)

    # --------------------------------------------------------------------------------------------------- the clock
    def _tick(self) -> None:
        if not self._is_running:
            return
        now_ns = self._clock.monotonic_ns()
        late_ms = self._late_ms(now_ns)
        self._last_tick_ns = now_ns
        self._changes.run_deadlines(now_ns)
        if self._table != self._node.state.coordinators:
            self._load()
        if not self._node.is_ready:
            self._was_away = True  # no member is evicted for what this node could not hear
        else:
            if self._was_away or late_ms > GROUP_PAUSE_MS:
                self._was_away = False
                for group in self._live.values():
                    group.grant_time()
            self._run_due(now_ns)
        self._ticks += 1
        if self._ticks % _TOPICS_TICKS == 0:
            self._look_at_topics()
        if self._ticks % _SWEEP_TICKS == 0:
            self._live = {name: group for name, group in self._live.items() if not group.is_idle}
            # A generation that this node had given up may have formed after all: its members need sessions to end.
            self._load()
        self._clock.call_later(GROUP_TICK_MS, self._tick)

    def _look_at_topics(self) -> None:
        topics = [(name, len(topic.partitions)) for name, topic in self._node.state.topics.items()]
        if topics != self._topics:
            self._topics = topics
            self._topics_version += 1
            for group in list(self._live.values()):
                if isinstance(group, LiveConsumers):
                    group.on_topics_changed()

    def _late_ms(self, now_ns: int) -> float:
        """How late a tick would be now."""
        return (now_ns - self._last_tick_ns) / _NS_PER_MS - GROUP_TICK_MS

    def _ring(self) -> None:
        """Something of a group has run out. After a pause or without a majority, the next tick decides instead."""
        now_ns = self._clock.monotonic_ns()
        if self._is_running and self._node.is_ready and not self._was_away and self._late_ms(now_ns) <= GROUP_PAUSE_MS:
            self._run_due(now_ns)

    def _run_due(self, now_ns: int) -> None:
        for group in self._alarms.due(now_ns):
            if self._live.get(group.name) is group:
                if group.due_ns <= now_ns:
                    group.on_time(now_ns)
                # What is still due waits for the command under way, whose reply sets the alarm, too.
                again_ns = now_ns + GROUP_TICK_MS * _NS_PER_MS if group.due_ns <= now_ns else 0
                self._alarms.set(group, not_before_ns=again_ns)


class Alarms:
    """Wakes the live groups when something of theirs runs out. What has run out, the group decides. `ring` is called a
    moment after a group's due time; it takes the groups by `due`."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._heap: list[tuple[int, int, Live]] = []  # a few entries per live group
        self._tie = 0
        self._timer: Timer | None = None
        self._timer_ns = NEVER_NS

    def set(self, group: Live, *, not_before_ns: int = 0) -> None:
        """Something of the group is due at its `due_ns`, which may be earlier than before."""
        at_ns = max(group.due_ns, not_before_ns)
        if at_ns < group.alarm_ns:
            group.alarm_ns = at_ns
            self._tie += 1
            heapq.heappush(self._heap, (group.alarm_ns, self._tie, group))
            self._start_timer()

    def due(self, now_ns: int) -> list[Live]:
        """The groups whose due time has come. The caller sets the alarm of each again."""
        due: list[Live] = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, group = heapq.heappop(self._heap)
            if at_ns == group.alarm_ns:  # otherwise an earlier alarm has replaced it
                group.alarm_ns = NEVER_NS
                due.append(group)
        self._start_timer()
        return due

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _start_timer(self) -> None:
        at_ns = self._heap[0][0] if self._heap else NEVER_NS
        if at_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = at_ns
        if at_ns != NEVER_NS:
            after_ms = max(0.0, (at_ns - self._clock.monotonic_ns()) / _NS_PER_MS) + _ALARM_LATE_MS
            self._timer = self._clock.call_later(after_ms, lambda: self._clock.call_soon(self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_ns = NEVER_NS
        self._ring()
