"""One member of a group, in the background: it joins, keeps its session alive, and says what the application must do.

Owns the member's id and generation, and its two tasks: the one that joins, and the heartbeats. It must never change
what is assigned, and never call the application: `subscribing` does so when the application polls. A member whose
application does not poll for `max_poll_interval_ms` leaves by itself. `subscribing` and `consumer` import it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

import grpc

from smq.clients.channels import NodeStubs
from smq.clients.cluster import CallFn, ClusterClient, T, now_ms
from smq.clients.errors import build, error_from_rpc
from smq.clients.groups.assignors import Assignor, Candidate
from smq.clients.groups.member_options import MemberSettings
from smq.clients.groups.protocol import (
    NO_GENERATION,
    PROTOCOL_TYPE,
    Subscription,
    Unreadable,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError

CLIENT_ID: Final = "smq-python"
CALL_SHARES: Final = 3  # attempts within one session timeout: a node that hangs does not cost a member its session
RETRY_MS: Final = 5_000.0  # of a join or a sync; then `member` learns of it, and asks again
WAIT_GRACE_S: Final = 5.0  # beyond the rebalance timeout, by which the coordinator has answered


class GroupCalls:
    """Every method raises SmqError; after one that is retriable, the coordinator may be found a while later."""

    def __init__(self, cluster: ClusterClient, group: str, settings: MemberSettings) -> None:
        self._cluster = cluster
        self._group = group
        self._settings = settings
        self._coordinator: str | None = None

    async def join(self, member_id: str, protocols: Mapping[str, bytes]) -> pb.JoinGroupResponse:
        """Without a generation if the member only has an id now. Waits for the other members."""
        request = build(
            pb.JoinGroupRequest,
            group=self._group,
            member_id=member_id,
            instance_id=self._settings.instance_id,
            client_id=CLIENT_ID,
            session_timeout_ms=self._settings.session_timeout_ms,
            rebalance_timeout_ms=self._settings.max_poll_interval_ms,
            protocol_type=PROTOCOL_TYPE,
            protocols=[pb.GroupProtocol(name=name, metadata=data) for name, data in protocols.items()],
        )

        async def run(node: NodeStubs, _node_ms: int, _call_s: float) -> pb.JoinGroupResponse:
            return await node.groups.JoinGroup(request, timeout=self._wait_s)

        return await self._call(run, RETRY_MS)

    async def sync(self, member: pb.GroupMember, protocol: str, assignments: Mapping[str, bytes]) -> bytes:
        """The member's assignment. Waits for the leader's."""
        request = build(
            pb.SyncGroupRequest,
            group=self._group,
            member=member,
            protocol_type=PROTOCOL_TYPE,
            protocol=protocol,
            assignments=[pb.MemberAssignment(member_id=m, assignment=data) for m, data in assignments.items()],
        )

        async def run(node: NodeStubs, _node_ms: int, _call_s: float) -> pb.SyncGroupResponse:
            return await node.groups.SyncGroup(request, timeout=self._wait_s)

        return (await self._call(run, RETRY_MS)).assignment

    @property
    def _wait_s(self) -> float:
        """Of a join or a sync, which wait for other members. The channel's keepalive notices a node that hangs."""
        return self._settings.max_poll_interval_ms / 1000.0 + WAIT_GRACE_S

    async def heartbeat(self, member: pb.GroupMember) -> bool:
        """Whether the group rebalances."""
        request = build(pb.HeartbeatRequest, group=self._group, member=member)

        async def run(node: NodeStubs, _node_ms: int, call_s: float) -> pb.HeartbeatResponse:
            return await node.groups.Heartbeat(request, timeout=call_s)

        return (await self._call(run, self._settings.session_timeout_ms)).rebalancing

    async def leave(self, member_id: str, timeout_ms: float) -> None:
        request = build(pb.LeaveGroupRequest, group=self._group, member_id=member_id)

        async def run(node: NodeStubs, _node_ms: int, call_s: float) -> pb.LeaveGroupResponse:
            return await node.groups.LeaveGroup(request, timeout=call_s)

        await self._call(run, timeout_ms)

    async def _call(self, run: CallFn[T], timeout_ms: float) -> T:
        async def tracked(node: NodeStubs, node_ms: int, call_s: float) -> T | SmqError:
            self._coordinator = None
            try:
                answer = await run(node, node_ms, call_s)
            except grpc.RpcError as e:
                error = error_from_rpc(e, node.address)
                if error.code is not ErrorCode.REBALANCE_IN_PROGRESS:
                    raise error from e
                return error  # retriable, but not by the same request
            self._coordinator = node.address
            return answer

        answer = await self._cluster.call(
            tracked, timeout_ms=timeout_ms, candidates=self._candidates, attempt_ms=timeout_ms / CALL_SHARES
        )
        if isinstance(answer, SmqError):
            raise answer
        return answer

    def _candidates(self) -> list[str]:
        return [self._coordinator] if self._coordinator is not None else self._cluster.any_node()


LEAVE_MS: Final = 5_000.0  # of a member that ends: if it cannot say so, its session does
TOPICS_AGE_MS: Final = 10_000.0  # how often the leader looks whether topics have more partitions
JOIN_PAUSE_S: Final = 0.25  # before the next attempt, if the coordinator was not found
# The member is no longer one, or not in this generation: what it had may be another's.
_LOST: Final = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.ILLEGAL_GENERATION})

log = logging.getLogger(__name__)


class Member:
    """`on_news` is called whenever the application has to do something: `failure`, `lost` or `gone`, `untold`,
    `assigned` or `is_due` says what, and `subscribing` does it in this order. `progress` gives another value after each
    sign of the application."""

    def __init__(
        self,
        cluster: ClusterClient,
        group: str,
        settings: MemberSettings,
        *,
        on_news: Callable[[], None],
        progress: Callable[[], object],
    ) -> None:
        self.group = group
        self.settings = settings
        self.topics: tuple[str, ...] = ()
        self.owned: frozenset[TopicPartition] = frozenset()  # what the application has been given
        self.failure: SmqError | None = None  # joining makes no sense until the application has seen this
        self.lost: SmqError | None = None  # why what is owned may be another's
        self.assigned: frozenset[TopicPartition] | None = None  # of the present generation, and not yet taken
        self.is_due = True  # it has to join
        self.is_ended = False  # the subscription is over, or about to be: nothing happens any more
        # What the application has to learn, until the callback has ended.
        self.untold: frozenset[TopicPartition] | None = None  # newly owned
        self.gone: frozenset[TopicPartition] = frozenset()  # lost, and owned no more
        self.leaving: frozenset[TopicPartition] = frozenset()  # revoked or lost: the callback runs
        self._cluster = cluster
        self._calls = GroupCalls(cluster, group, settings)
        self._on_news = on_news
        self._progress = progress
        self._member_id = ""
        self._generation = NO_GENERATION
        self._joining: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._counts: dict[str, int] | None = None  # of the topics of all members, if it is the leader
        self._counted_at_ms = 0.0
        self._seen: object = None
        self._seen_at_ms = now_ms()

    @property
    def identity(self) -> pb.GroupMember | None:
        """For commits; None while it is in no generation."""
        if self._generation == NO_GENERATION:
            return None
        return pb.GroupMember(
            member_id=self._member_id, instance_id=self.settings.instance_id, generation=self._generation
        )

    @property
    def is_joining(self) -> bool:
        return self._joining is not None and not self._joining.done()

    @property
    def has_news(self) -> bool:
        if self.is_ended:
            return False
        if self.failure is not None or self.has_lost or self.untold is not None or self.assigned is not None:
            return True
        return self.is_due and not self.is_joining

    @property
    def has_lost(self) -> bool:
        return self.lost is not None or bool(self.gone)

    def drop(self, going: frozenset[TopicPartition]) -> None:
        """The application has them no more."""
        self.owned -= going
        self.gone -= going
        if self.untold:
            self.untold = self.untold - going or None

    def polled(self) -> None:
        """The application is alive."""
        self._seen_at_ms = now_ms()

    # ---------------------------------------------------------------------------------------------------- joining
    def join(self) -> None:
        """Begins to join with what is owned now. `assigned` or `failure` follows; nothing if it has ended."""
        if self.is_ended:
            return
        self.is_due = False
        self._joining = asyncio.create_task(self._join())
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._keep_alive())

    async def _join(self) -> None:
        while True:
            try:
                assigned = await self._join_once()
                self.assigned = None if self.is_ended else assigned
                break
            except SmqError as e:
                if e.code in _LOST:
                    self._forget(e)
                    if self.owned:
                        break  # the application learns of that first
                    self.is_due = False  # it joins again here
                elif e.code is ErrorCode.REBALANCE_IN_PROGRESS:
                    continue
                elif not e.code.is_retriable:
                    self._fail(e)
                    break
                else:  # it has been repeated for seconds by now
                    log.warning("group %s cannot be joined now, and is tried again: %s", self.group, e)
                    await asyncio.sleep(JOIN_PAUSE_S)
            except Exception as e:  # noqa: BLE001 - whatever it is, an application that waits must learn of it
                self._fail(SmqError(ErrorCode.INTERNAL, f"the member of group {self.group!r} failed to join: {e!r}"))
                break
        self._on_news()

    async def _join_once(self) -> frozenset[TopicPartition]:
        mine = Subscription(topics=self.topics, owned=self.owned, generation=self._generation)
        protocols = {
            a.name: encode_subscription(mine, is_cooperative=a.is_cooperative) for a in self.settings.assignors
        }
        joined = await self._calls.join(self._member_id, protocols)
        self._member_id = joined.member_id
        if not joined.HasField("generation"):
            joined = await self._calls.join(self._member_id, protocols)
            self._member_id = joined.member_id
        shares: dict[str, bytes] = {}
        self._counts = None
        if joined.leader == joined.member_id:
            shares = await self._shares(joined)
        member = pb.GroupMember(
            member_id=joined.member_id, instance_id=self.settings.instance_id, generation=joined.generation
        )
        data = await self._calls.sync(member, joined.protocol, shares)
        self._generation = joined.generation
        try:
            return decode_assignment(data)
        except Unreadable as e:
            message = f"the leader of group {self.group!r} sent an assignment that is not Kafka's: {e}"
            raise SmqError(ErrorCode.INCONSISTENT_PROTOCOL, message) from e

    async def _shares(self, joined: pb.JoinGroupResponse) -> dict[str, bytes]:
        """As the generation's leader: every member's assignment. None if the present one stays."""
        candidates = [
            Candidate(member_id=m.member_id, instance_id=m.instance_id, subscription=_subscription(m.metadata))
            for m in joined.members
        ]
        topics = {topic for c in candidates for topic in c.subscription.topics}
        self._counts = await self._count(topics)
        if joined.skip_assignment:
            return {}
        shares = self._assignor(joined.protocol).assign(self._counts, candidates)
        return {member_id: encode_assignment(share) for member_id, share in shares.items()}

    def _assignor(self, name: str) -> Assignor:
        return next(a for a in self.settings.assignors if a.name == name)

    async def _count(self, topics: Iterable[str]) -> dict[str, int]:
        """The partitions of each of the topics that exists."""
        wanted = sorted(topics)
        if wanted:
            await self._cluster.refresh(wanted)
        self._counted_at_ms = now_ms()
        return {topic: self._cluster.metadata.partition_count(topic) or 0 for topic in wanted}

    # ---------------------------------------------------------------------------------------------- staying alive
    async def _keep_alive(self) -> None:
        try:
            await self._send_heartbeats()
        except Exception as e:  # noqa: BLE001 - without heartbeats it loses what it has: the application must learn of it
            self._stop_joining()
            self._fail(SmqError(ErrorCode.INTERNAL, f"heartbeats of group {self.group!r} failed: {e!r}"))
            self._on_news()

    async def _send_heartbeats(self) -> None:
        while self.failure is None:
            await asyncio.sleep(self.settings.heartbeat_interval_ms / 1000.0)
            if self._is_application_silent():
                await self._give_up()
            elif self._generation != NO_GENERATION and not self.is_joining:  # a join that waits is a sign of life
                await self._beat()

    async def _beat(self) -> None:
        generation, member = self._generation, self.identity
        assert member is not None
        try:
            is_rebalancing = await self._calls.heartbeat(member)
        except SmqError as e:
            if generation == self._generation and not self.is_joining:
                self._refused(e)
            return
        if generation == self._generation and (is_rebalancing or await self._have_topics_changed()):
            self._set_due()

    def _refused(self, error: SmqError) -> None:
        if error.code in _LOST:
            self._forget(error)
            self._on_news()
        elif not error.code.is_retriable:
            self._fail(error)
            self._on_news()

    async def _have_topics_changed(self) -> bool:
        """The leader looks at the topics of all members now and then."""
        if self._counts is None or now_ms() - self._counted_at_ms < TOPICS_AGE_MS:
            return False
        with suppress(SmqError):
            return await self._count(self._counts) != self._counts
        return False  # it looks again with a later heartbeat

    def _is_application_silent(self) -> bool:
        seen = self._progress()
        if seen != self._seen:
            self._seen, self._seen_at_ms = seen, now_ms()
        is_member = self._generation != NO_GENERATION or self.is_joining
        return is_member and now_ms() - self._seen_at_ms > self.settings.max_poll_interval_ms

    async def _give_up(self) -> None:
        """Lets the others have what an application that does not poll would keep from them. A static member's session
        does that in its own time."""
        self._stop_joining()
        member_id = self._member_id
        waited = f"the application has not polled for {self.settings.max_poll_interval_ms} ms (max_poll_interval_ms)"
        self._forget(SmqError(ErrorCode.UNKNOWN_MEMBER, f"the member has left group {self.group!r}: {waited}"))
        self._on_news()
        await self._leave(member_id)

    def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()

    def _set_due(self) -> None:
        if not self.is_due and not self.is_joining:
            self.is_due = True
            self._on_news()

    def _forget(self, error: SmqError) -> None:
        """It is in no generation any more; after UNKNOWN_MEMBER its id is gone, too."""
        if error.code is ErrorCode.UNKNOWN_MEMBER:
            self._member_id = ""
        self._generation, self.assigned, self._counts = NO_GENERATION, None, None
        self.is_due = True
        if self.owned:
            self.lost = error

    def _fail(self, error: SmqError) -> None:
        self._forget(error)
        self.failure = error

    # ------------------------------------------------------------------------------------------------------- the end
    def retire(self) -> None:
        """Before the last revocation: whatever is under way, in another task, too, is not to give it anything more."""
        self.is_ended, self.assigned, self.untold = True, None, None

    async def end(self) -> None:
        """Leaves the group, unless it is a static member, which may come back."""
        tasks = [task for task in (self._joining, self._beating) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        member_id = self._member_id
        self._member_id, self._generation = "", NO_GENERATION
        await self._leave(member_id)

    async def _leave(self, member_id: str) -> None:
        if member_id and not self.settings.instance_id:
            with suppress(SmqError):  # its session ends by itself
                await self._calls.leave(member_id, LEAVE_MS)


def _subscription(metadata: bytes) -> Subscription:
    """A member whose bytes are not Kafka's gets nothing; the others are not to suffer for it."""
    try:
        return decode_subscription(metadata)
    except Unreadable:
        return Subscription()
