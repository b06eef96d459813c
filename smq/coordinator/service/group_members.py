"""Members of groups, for every port: how long a request to the group's coordinator waits for its answer.

Owns these waits, and what an answer that does not come means: the outcome is uncertain, and the member asks again,
while it still listens: after its own time-out a client drops the connection, with everything else on it. A request
begins when the method is called, and waits in what the method returns. So a port keeps the order of a connection's
requests, and their waits do not hold each other up. A wait that is cancelled (its client has gone) withdraws the
request. It must never know a wire format. The Kafka port and the gRPC port import it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.member_requests import Beat, Beaten, Identity, Join, Joined, Outcome, Sync, Synced
from smq.coordinator.limits import GROUP_ANSWER_MS, GROUP_JOIN_LATE_MS, GROUP_SYNC_MS_MAX
from smq.coordinator.service.calls import Answer, NodeCalls
from smq.raft_state.commands import GroupMember
from smq.raft_state.errors import SmqError
from smq.raft_state.limits import MEMBER_TEXT_BYTES_MAX

_WAIT_MS_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Memberships:
    calls: NodeCalls
    groups: GroupCoordinator

    def join(self, request: Join) -> Awaitable[Joined]:
        """The answer once the generation has formed."""
        answer = Answer[Joined](self.calls.timeouts)
        return _joined(answer, request.member, self.groups.join(request, answer.done))

    def sync(self, request: Sync) -> Awaitable[Synced]:
        """The answer once the leader has given the assignment."""
        answer = Answer[Synced](self.calls.timeouts)
        wait_ms = self._sync_ms(request)
        return _synced(answer, wait_ms, self.groups.sync(request, answer.done))

    def _sync_ms(self, request: Sync) -> int:
        group = self.calls.node.state.groups.get(request.group)
        known = group.members.get(request.who.member_id) if group is not None else None
        return min(known.member.session_timeout_ms, GROUP_SYNC_MS_MAX) if known is not None else GROUP_SYNC_MS_MAX

    async def beat(self, beat: Beat) -> Beaten:
        """The answer once what the heartbeat says has taken effect."""
        answer = Answer[Beaten](self.calls.timeouts)
        withdraw = self.groups.beat(beat, answer.done)
        try:
            return await answer.result(GROUP_ANSWER_MS, withdraw, grace_ms=0)
        except SmqError:
            return Beaten(outcome=Outcome.UNCERTAIN, member_id=beat.member_id, epoch=beat.epoch)

    def heartbeat(self, group: str, who: Identity, generation: int) -> Outcome:
        return self.groups.heartbeat(group, who, generation)

    async def leave(self, group: str, leaving: list[Identity]) -> list[Outcome]:
        """One outcome per member."""
        answer = Answer[list[Outcome]](self.calls.timeouts)
        self.groups.leave(group, leaving, answer.done)
        try:
            return await answer.result(GROUP_ANSWER_MS, grace_ms=0)
        except SmqError:
            return [Outcome.UNCERTAIN] * len(leaving)


async def _joined(answer: Answer[Joined], member: GroupMember, withdraw: Callable[[], None]) -> Joined:
    wait_ms = min(member.rebalance_timeout_ms, _WAIT_MS_MAX) + GROUP_JOIN_LATE_MS
    try:
        return await answer.result(wait_ms, withdraw, grace_ms=0)
    except SmqError:
        return Joined(outcome=Outcome.UNCERTAIN, member_id="")


async def _synced(answer: Answer[Synced], wait_ms: int, withdraw: Callable[[], None]) -> Synced:
    try:
        return await answer.result(wait_ms, withdraw, grace_ms=0)
    except SmqError:
        return Synced(outcome=Outcome.UNCERTAIN)


def rebalance_timeout_of(requested_ms: int, session_timeout_ms: int) -> int:
    """A member that names none means its session timeout."""
    return requested_ms if requested_ms > 0 else session_timeout_ms


def shown_name(text: str) -> str:
    """A client may choose any name. The one that is kept is bounded."""
    return text[: MEMBER_TEXT_BYTES_MAX // 4]


def has_repeated_protocol(member: GroupMember) -> bool:
    names = [name for name, _ in member.protocols]
    return len(set(names)) != len(names)
