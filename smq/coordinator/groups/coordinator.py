"""The groups that this node coordinates, as the replicated table of coordinators says.

Owns the live groups, their clock, and the expiry of offsets. Each request is answered by the table as this node has
applied it: who is not the coordinator says so. Being wrong about that is harmless, since every command names the epoch
of its coordinator. The composition root makes one a node and hands it to the Kafka port; the simulation does the same.
"""

from collections.abc import Callable
from typing import Final

import structlog

from smq.coordinator.groups.live import LiveGroup
from smq.coordinator.groups.types import Identity, Join, Joined, OnJoined, OnLeft, OnSynced, Sync, Synced
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.limits import (
    GROUP_COMMAND_MS_MAX,
    GROUP_EXPIRY_MS,
    GROUP_PAUSE_MS,
    GROUP_SESSION_MS_MAX,
    GROUP_SESSION_MS_MIN,
    GROUP_TICK_MS,
    GROUPS_NEW_PER_ADDRESS_MAX,
    MEMBER_ID_CHARS_MAX,
)
from smq.raft_state.commands import Command, CommitCoordinatedOffsets, ExpireOffsets, OffsetCommit
from smq.raft_state.coordinators import coordinator_of, slot_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Generation, RequestId
from smq.raft_state.limits import MEMBER_PROTOCOLS_MAX, MEMBER_TEXT_BYTES_MAX
from smq.raft_state.replies import Reply
from smq.raft_state.state import CoordinatorSlot, GroupState
from smq.replication.api import DoneFn, NodeApi
from smq.replication.ports import Clock, Rng

log = structlog.get_logger(__name__)

_NS_PER_MS: Final = 1_000_000
_ID_BYTES: Final = 16  # random: no member id is ever given twice
_SWEEP_TICKS: Final = 100  # how often objects that nothing would be lost with are dropped


def _nothing() -> None:
    """There is nothing to withdraw."""


class GroupCoordinator:
    """`start` once the node runs, `stop` before it ends. All on the node's loop."""

    def __init__(self, node: NodeApi, clock: Clock, rng: Rng, *, initial_delay_ms: int) -> None:
        self.initial_delay_ms = initial_delay_ms
        self._node = node
        self._clock = clock
        self._rng = rng
        self._live: dict[str, LiveGroup] = {}  # bounded by groups_max
        self._table: list[CoordinatorSlot] = []  # as it was when the groups were last loaded
        self._is_running = False
        self._was_away = False
        self._last_tick_ns = 0
        self._ticks = 0
        self._expired_ns = 0

    def start(self) -> None:
        self._is_running = True
        self._last_tick_ns = self._expired_ns = self._clock.monotonic_ns()
        self._tick()

    def stop(self) -> None:
        """Tells everybody who waits to look for another coordinator."""
        self._is_running = False
        live, self._live = self._live, {}
        for group in live.values():
            group.close(KafkaError.NOT_COORDINATOR)

    # -------------------------------------------------------------------------------------------------- ownership
    def refusal(self, name: str) -> KafkaError:
        """NONE where this node coordinates the group and can do so."""
        if not self._is_running or not self._owns(coordinator_of(self._node.state, name)):
            return KafkaError.NOT_COORDINATOR
        return KafkaError.NONE if self._node.is_ready else KafkaError.COORDINATOR_NOT_AVAILABLE

    def slots(self) -> frozenset[int]:
        """Those whose groups this node coordinates."""
        return frozenset(i for i, slot in enumerate(self._node.state.coordinators) if self._owns(slot))

    def _owns(self, slot: CoordinatorSlot) -> bool:
        return slot.node == self._node.node_id and slot.incarnation == self._node.incarnation

    def _find(self, name: str) -> LiveGroup | None:
        """The group that this node coordinates, if it is alive in any way."""
        group = self._live.get(name)
        epoch = coordinator_of(self._node.state, name).epoch
        if group is not None and group.epoch != epoch:
            del self._live[name]
            group.close(KafkaError.NOT_COORDINATOR)
            group = None
        known = self._node.state.groups.get(name)
        if group is None and known is not None and known.members:
            group = self._live[name] = LiveGroup(self, name, epoch)
        return group

    def _load(self) -> None:
        """After a change of the table: lets go what others coordinate, and takes up what they did."""
        state = self._node.state
        self._table = list(state.coordinators)
        mine = [self._owns(slot) for slot in self._table]
        for name, group in list(self._live.items()):
            slot = slot_of(name)
            if not mine[slot] or self._table[slot].epoch != group.epoch:
                del self._live[name]
                group.close(KafkaError.NOT_COORDINATOR)
        for name, known in state.groups.items():
            if known.members and name not in self._live and mine[slot_of(name)]:
                self._find(name)

    # --------------------------------------------------------------------------------------------------- requests
    def join(self, request: Join, done: OnJoined) -> Callable[[], None]:
        """Answers when the generation has formed. What it returns withdraws the request."""
        code = self._join_refusal(request)
        if code is not KafkaError.NONE:
            done(Joined(code=code, member_id=request.member.member_id))
            return _nothing
        group = self._find(request.group)
        if group is None:
            epoch = coordinator_of(self._node.state, request.group).epoch
            address = request.member.client_host
            group = self._live[request.group] = LiveGroup(self, request.group, epoch, opened_by=address)
        return group.join(request, done)

    def _join_refusal(self, request: Join) -> KafkaError:
        member = request.member
        if not GROUP_SESSION_MS_MIN <= member.session_timeout_ms <= GROUP_SESSION_MS_MAX:
            return KafkaError.INVALID_SESSION_TIMEOUT
        texts: tuple[str, ...] = (member.member_id, member.instance_id, member.client_id, request.protocol_type)
        texts += tuple(name for name, _ in member.protocols)
        if any(len(text.encode()) > MEMBER_TEXT_BYTES_MAX for text in texts):
            return KafkaError.INVALID_REQUEST
        if len(member.protocols) > MEMBER_PROTOCOLS_MAX:
            return KafkaError.INVALID_REQUEST
        code = self.refusal(request.group)
        if code is not KafkaError.NONE:
            return code
        return self._new_group_refusal(request.group, member.client_host)

    def _new_group_refusal(self, name: str, address: str) -> KafkaError:
        state = self._node.state
        if name in state.groups or name in self._live:
            return KafkaError.NONE
        new = [group for group in self._live.values() if group.name not in state.groups]
        if len(state.groups) + len(new) >= state.groups_max:
            log.warning("group_refused", group=name, reason="there are groups_max groups")
            return KafkaError.POLICY_VIOLATION
        if sum(group.opened_by == address for group in new) >= GROUPS_NEW_PER_ADDRESS_MAX:
            log.warning("group_refused", group=name, reason="its address has asked for too many new groups")
            return KafkaError.COORDINATOR_NOT_AVAILABLE  # clients ask again a little later
        return KafkaError.NONE

    def sync(self, request: Sync, done: OnSynced) -> Callable[[], None]:
        """Answers when the leader has given the assignment. What it returns withdraws the request."""
        code, group = self._group(request.group)
        if group is None:
            done(Synced(code=code))
            return _nothing
        return group.sync(request, done)

    def heartbeat(self, name: str, who: Identity, generation: int) -> KafkaError:
        code, group = self._group(name)
        return code if group is None else group.heartbeat(who, generation)

    def leave(self, name: str, leaving: list[Identity], done: OnLeft) -> None:
        """One code each."""
        code, group = self._group(name)
        if group is None:
            done([code] * len(leaving))
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
    ) -> None:
        """A member's commit, which is a sign of life, too. The caller has asked `refusal` in this very turn; the state
        machine says whether the member may, and whether this node still coordinates the group by then."""
        group = self._find(name)
        if group is not None:
            group.heartbeat(who, generation)
        command = CommitCoordinatedOffsets(
            request_id=request_id,
            group=name,
            coordinator_epoch=self.epoch_of(name),
            generation=Generation(generation),
            member_id=who.member_id,
            instance_id=who.instance_id,
            items=items,
            committed_ms=self.wall_ms(),
        )
        self._node.propose(command, timeout_ms, done)

    def is_rebalancing(self, name: str) -> bool:
        """Whether members are being collected for the next generation, as far as this node coordinates the group."""
        group = self._find(name) if self._owns(coordinator_of(self._node.state, name)) else None
        return group is not None and group.is_rebalancing

    def _group(self, name: str) -> tuple[KafkaError, LiveGroup | None]:
        """A group that there is nothing of has no members."""
        code = self.refusal(name)
        group = self._find(name) if code is KafkaError.NONE else None
        return (code or KafkaError.UNKNOWN_MEMBER_ID), group

    # ------------------------------------------------------------------------------------------- what groups see
    @property
    def member_bytes(self) -> int:
        return self._node.state.member_bytes

    def epoch_of(self, name: str) -> Epoch:
        return coordinator_of(self._node.state, name).epoch

    def group_state(self, name: str) -> GroupState | None:
        return self._node.state.groups.get(name)

    def now_ns(self) -> int:
        return self._clock.monotonic_ns()

    def wall_ms(self) -> int:
        return self._clock.wall_ns() // _NS_PER_MS

    def new_member_id(self, prefix: str) -> str:
        """Random, since a member that is back after its group has gone and come again must not be taken for another."""
        number = self._rng.randbytes(_ID_BYTES).hex()
        return f"{prefix[: MEMBER_ID_CHARS_MAX - len(number) - 1]}-{number}"

    def propose(self, command: Command, done: Callable[[Reply | SmqError], None]) -> None:
        self._node.propose(command, GROUP_COMMAND_MS_MAX, done)

    def forget(self, group: LiveGroup) -> None:
        """Its last command failed: what there is now is loaded again, at the next tick."""
        if self._live.get(group.name) is group:
            del self._live[group.name]
        self._table = []

    def complain(self, group: str, what: str, error: SmqError) -> None:
        log.warning("group_change_failed", group=group, command=what, error=str(error))

    # --------------------------------------------------------------------------------------------------- the clock
    def _tick(self) -> None:
        if not self._is_running:
            return
        now_ns = self._clock.monotonic_ns()
        late_ms = (now_ns - self._last_tick_ns) / _NS_PER_MS - GROUP_TICK_MS
        self._last_tick_ns = now_ns
        if self._table != self._node.state.coordinators:
            self._load()
        if not self._node.is_ready:
            self._was_away = True  # nobody is evicted for what this node could not hear
        else:
            if self._was_away or late_ms > GROUP_PAUSE_MS:
                self._was_away = False
                for group in self._live.values():
                    group.grant_time()
            for group in [g for g in self._live.values() if g.due_ns <= now_ns]:
                group.on_time(now_ns)
            self._expire_offsets(now_ns)
        self._ticks += 1
        if self._ticks % _SWEEP_TICKS == 0:
            self._live = {name: group for name, group in self._live.items() if not group.is_idle}
        self._clock.call_later(GROUP_TICK_MS, self._tick)

    def _expire_offsets(self, now_ns: int) -> None:
        """By one node at a time, the coordinator of the first slot; two would do no harm."""
        state = self._node.state
        interval_ms = min(GROUP_EXPIRY_MS, max(1_000, state.offsets_retention_ms // 4))
        if now_ns - self._expired_ns < interval_ms * _NS_PER_MS or not self._owns(state.coordinators[0]):
            return
        self._expired_ns = now_ns
        if state.groups and state.offsets_retention_ms:
            self.propose(ExpireOffsets(now_ms=self.wall_ms()), _ignore)


def _ignore(_reply: Reply | SmqError) -> None:
    """The next one comes soon."""
