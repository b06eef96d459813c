"""The consumer's side of its group: subscriptions, rebalances as the application meets them, and commits.

Owns when the application's callbacks run, and what is committed before partitions go: everything happens inside a poll
(a call that returns records), so what earlier polls have returned has been processed by then. Heartbeats do not wait
for that: `member` sends them. `consumer` uses it; others import its types.
"""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from smq.clients.admin import commit_offsets, fetch_offsets
from smq.clients.arguments import check_callback, check_choice, check_kind, invalid, names
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.fetch_planner import NO_END, NO_POSITION, FetchPlanner, PartitionFetch
from smq.clients.groups.member import Member
from smq.clients.groups.member_options import MemberSettings
from smq.clients.interceptors import ConsumerChain
from smq.clients.pb import smq_pb2 as pb
from smq.clients.positions import Wanted
from smq.clients.types import CommittedOffset, GroupMembership, TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError

OnPartitions: TypeAlias = Callable[[list[TopicPartition]], Awaitable[None] | None]
Resume: TypeAlias = Literal["RESUME_OR_EARLIEST", "RESUME_OR_LATEST"]
_RESUMES = ("RESUME_OR_EARLIEST", "RESUME_OR_LATEST")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    on_assigned: OnPartitions | None = None
    on_revoked: OnPartitions | None = None
    on_lost: OnPartitions | None = None


class Subscribing(ABC):
    """A consumer's life in its group."""

    _cluster: ClusterClient
    _group: str | None
    _interceptors: ConsumerChain | None
    _planner: FetchPlanner
    _timeout_ms: float
    _settings: MemberSettings
    _member: Member | None
    _callbacks: Callbacks
    _resume: Resume
    _is_following: bool
    _taken: int
    _committed_at_ms: float
    _auto_committed: dict[TopicPartition, int]

    @abstractmethod
    async def _look_up(self, wanted: Mapping[TopicPartition, Wanted]) -> Mapping[TopicPartition, int | SmqError]: ...

    @abstractmethod
    def _discard_decoded(self) -> None: ...

    @abstractmethod
    def _pump(self) -> None: ...

    @abstractmethod
    def _check_usable(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None: ...

    @abstractmethod
    def _progress(self) -> object: ...

    @abstractmethod
    def assignment(self) -> list[TopicPartition]: ...

    # ------------------------------------------------------------------------------------------------ subscriptions
    async def subscribe(
        self,
        topics: str | Iterable[str],
        *,
        start: Resume = "RESUME_OR_EARLIEST",
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
    ) -> None:
        """Joins the group, which shares the topics' partitions among its members. Replaces an earlier subscription.
        UNKNOWN_TOPIC; INVALID_REQUEST without a group, or while partitions are assigned by hand.

        What follows happens inside the calls that return records. `on_assigned` gets the partitions that are new, after
        each rebalance and before their first record: it may seek. `on_revoked` gets those that go to other members, and
        may commit. `on_lost` gets those that others may have already, and cannot commit; without it, `on_revoked` gets
        them. The callbacks are functions or coroutine functions; if a poll is cancelled in one, the next poll calls it
        again. Reading begins at the group's commit, or where `start` says."""
        self._check_usable()
        wanted = [topics] if isinstance(topics, str) else topics
        chosen = tuple(sorted(set(names("topics", wanted))))
        check_choice("start", start, _RESUMES)
        for name, callback in (("on_assigned", on_assigned), ("on_revoked", on_revoked), ("on_lost", on_lost)):
            check_callback(name, callback)
        group = self._named_group()
        if not chosen:
            raise invalid("topics must not be empty: unsubscribe() ends a subscription")
        if self._member is None and self._planner.assigned:
            raise invalid("partitions are assigned by hand: make another consumer, or assign([]) first")
        for topic in await self._cluster.refresh(chosen, timeout_ms=self._timeout_ms):
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
        if self._member is None:
            self._member = Member(self._cluster, group, self._settings, on_news=self._on_news, progress=self._progress)
        self._callbacks = Callbacks(on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost)
        self._resume = start
        self._member.topics = chosen
        self._member.is_due = True

    async def unsubscribe(self) -> None:
        """Commits if commits are automatic, revokes what is assigned, and leaves the group. CLIENT_CLOSED."""
        self._check_usable()
        await self._leave_group(is_committing=True)

    def subscription(self) -> list[str]:
        """The topics; empty without a subscription."""
        return [] if self._member is None else list(self._member.topics)

    def membership(self) -> GroupMembership:
        """For `send_offsets` of a transactional producer: the group, and this member's generation.
        REBALANCE_IN_PROGRESS while it is in none."""
        group, member = self._named_group(), self._identity()
        if member is None:
            return GroupMembership(group=group)
        return GroupMembership(
            group=group,
            member_id=member.member_id,
            instance_id=member.instance_id,
            generation=member.generation,
        )

    def has_news(self) -> bool:
        """Whether the group has something for the application to do: the next call that returns records does it."""
        return self._member is not None and self._member.has_news

    def is_read_ahead_void(self) -> bool:
        """For a caller that has taken a batch and returns it record by record: whether to take the rest again, because
        the group rebalances. A sign of life of the application, too."""
        self._taken += 1
        return self.has_news()

    def _on_news(self) -> None:
        self._discard_decoded()  # so that iteration comes here before the next record
        self._wake()

    # -------------------------------------------------------------------------------------------------- rebalances
    async def _follow_group(self) -> None:
        """What the group asks for, inside a poll that has not taken any record yet."""
        member = self._member
        if member is None:
            return
        member.polled()
        if self._is_following:
            message = "the consumer is being polled already: poll it from one task, and not in a rebalance callback"
            raise invalid(message)
        self._is_following = True
        try:
            while member is self._member and member.has_news:
                await self._next_step(member)
            await self._commit_when_due()
        finally:
            self._is_following = False
            member.polled()

    async def _next_step(self, member: Member) -> None:
        """A poll may be cancelled in any step: the next poll takes that step again, and its callback is called again.
        A callback that raises has been called."""
        if member.failure is not None:
            await self._report(member, member.failure)
        elif member.has_lost:
            await self._lose(member)
        elif member.untold is not None:
            await self._tell_assigned(member, member.untold)
        elif member.assigned is not None:
            await self._take(member, member.assigned)
        else:
            await self._prepare(member)

    async def _report(self, member: Member, failure: SmqError) -> None:
        await self._lose(member)
        if failure.code is not ErrorCode.FENCED_INSTANCE:  # that process has been replaced for ever
            member.failure = None
        raise SmqError(failure.code, failure.message, failure.details)

    async def _prepare(self, member: Member) -> None:
        """Before joining: an eager member gives up everything, a cooperative one what it no longer subscribes to."""
        going = member.owned
        if member.settings.is_cooperative:
            going = frozenset(tp for tp in going if tp[0] not in member.topics)
        await self._auto_commit()
        if not member.has_lost:
            await self._revoke(member, going)
            member.join()  # unless the subscription has ended meanwhile

    async def _take(self, member: Member, assigned: frozenset[TopicPartition]) -> None:
        going, new = member.owned - assigned, sorted(assigned - member.owned)
        if going:
            member.is_due = True  # so that their next members get them
            await self._auto_commit()
            await self._revoke(member, going)
        starts = await self._look_up(dict.fromkeys(new, self._resuming()))
        if member.assigned is not assigned:
            return  # it was lost meanwhile, or the subscription has ended
        member.assigned = None
        member.owned, member.untold = assigned, frozenset(new)
        fetches = {tp: PartitionFetch(*tp, NO_POSITION) for tp in new}
        self._planner.assigned |= fetches
        self._place(fetches.values(), starts)
        await self._tell_assigned(member, member.untold)

    async def _tell_assigned(self, member: Member, new: frozenset[TopicPartition]) -> None:
        def told() -> None:
            member.untold = None

        try:
            await self._call_back(self._callbacks.on_assigned, new, told)
        finally:
            self._pump()

    def _resuming(self) -> Wanted:
        """Not from an offset that the former member's transaction is about to move: it would be processed twice."""
        return Wanted(type=self._resume, stable=True)

    async def _place_later(self, fetches: list[PartitionFetch]) -> None:
        """Looks up the starts that were not known when the partitions came: the application gets the others' records
        meanwhile, and its polls keep to their time."""
        generations = [fetch.generation for fetch in fetches]
        try:
            starts = await self._look_up(dict.fromkeys((fetch.key for fetch in fetches), self._resuming()))
        except SmqError as e:
            starts = dict.fromkeys((fetch.key for fetch in fetches), e)
        waiting = [f for f, generation in zip(fetches, generations, strict=True) if f.generation == generation]
        if self._place(waiting, starts):
            self._wake()
        self._pump()

    def _place(self, fetches: Iterable[PartitionFetch], starts: Mapping[TopicPartition, int | SmqError]) -> bool:
        """Whether one of them has an error for the reader: such as one whose start is out of range."""
        has_error = False
        for fetch in fetches:
            start = starts[fetch.key]
            if isinstance(start, SmqError):
                has_error |= self._planner.not_placed(fetch, start, now_ms())
            else:
                fetch.move(start)
        return has_error

    async def _revoke(self, member: Member, going: frozenset[TopicPartition]) -> None:
        await self._withdraw(member, self._callbacks.on_revoked, going & member.owned)

    async def _lose(self, member: Member) -> None:
        going, member.lost = member.gone | member.owned, None
        self._drop(member, going)
        member.gone = going
        await self._withdraw(member, self._callbacks.on_lost or self._callbacks.on_revoked, going)

    async def _withdraw(self, member: Member, callback: OnPartitions | None, going: frozenset[TopicPartition]) -> None:
        """Another task, or the callback itself, may end the subscription while the callback runs. That does not call it
        once more for the same partitions."""
        self._discard_decoded()
        leaving = going - member.leaving
        if not leaving:
            return
        member.leaving |= leaving
        try:
            await self._call_back(callback, leaving, partial(self._drop, member, leaving))
        finally:
            member.leaving -= leaving

    def _drop(self, member: Member, going: frozenset[TopicPartition]) -> None:
        member.drop(going)
        for tp in going:
            self._planner.assigned.pop(tp, None)
            self._auto_committed.pop(tp, None)

    async def _call_back(
        self, callback: OnPartitions | None, partitions: Iterable[TopicPartition], told: Callable[[], None]
    ) -> None:
        """`told` runs when the callback has ended. A cancelled poll does not get there: it is called again."""
        try:
            if callback is not None:
                result = callback(sorted(partitions))
                if inspect.isawaitable(result):
                    await result
        except Exception:  # the application's own error: its callback has been called
            told()
            raise
        told()

    async def _leave_group(self, *, is_committing: bool) -> None:
        """The end of the subscription, if there is one. An error of a callback propagates once all is done."""
        member = self._member
        if member is None:
            return
        member.retire()
        try:
            with self._ended_subscription(member):
                if is_committing and not member.has_lost:
                    await self._auto_commit()
                if member.has_lost:
                    await self._lose(member)
                else:
                    await self._revoke(member, member.owned)
        finally:
            await member.end()

    @contextmanager
    def _ended_subscription(self, member: Member) -> Iterator[None]:
        try:
            yield
        finally:
            self._drop(member, member.owned)
            self._member = None

    # ----------------------------------------------------------------------------------------------------- commits
    async def commit(self, offsets: Mapping[TopicPartition, int | CommittedOffset] | None = None) -> None:
        """Commits the group's next offsets: the positions of all assigned partitions, or the given ones. All or none;
        linearizable once it returns. INVALID_REQUEST without a group, UNKNOWN_TOPIC, UNKNOWN_PARTITION, INVALID_OFFSET;
        UNKNOWN_MEMBER while the group has members and this consumer is none. A subscribed one commits as a member:
        UNKNOWN_MEMBER, ILLEGAL_GENERATION or FENCED_INSTANCE if the group has gone on without it, REBALANCE_IN_PROGRESS
        while it joins: commit again after the next poll, if the partitions are still assigned then."""
        group = self._named_group()
        if offsets is None:
            offsets = self.resume_positions({})
        check_kind("offsets", offsets, Mapping)
        if offsets:
            await self._commit(group, offsets)

    async def _commit(self, group: str, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        member = self._identity()
        try:
            await commit_offsets(self._cluster, group, offsets, self._timeout_ms, member=member)
        except SmqError as e:
            if e.code is not ErrorCode.ILLEGAL_GENERATION or self._member is None or not self._member.is_joining:
                raise
            raise _rebalancing(group) from e
        if self._interceptors is not None:
            self._interceptors.on_commit(offsets)

    def _identity(self) -> pb.GroupMember | None:
        """None without a subscription."""
        member = self._member
        if member is None:
            return None
        if member.lost is not None:
            raise SmqError(member.lost.code, member.lost.message, member.lost.details)
        identity = member.identity
        if identity is None:
            raise _rebalancing(member.group)
        return identity

    def resume_positions(self, ahead: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """What a commit names. `ahead`: the first offsets that our caller has taken and not returned yet."""
        fetches = {tp: fetch for tp, fetch in self._planner.assigned.items() if fetch.position != NO_POSITION}
        return {tp: min(fetch.resume_at, ahead.get(tp, NO_END)) for tp, fetch in fetches.items()}

    async def committed(
        self, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """Committed offsets of the assigned partitions, or of the given ones. Partitions without a commit are absent.
        INVALID_REQUEST without a group; NO_QUORUM."""
        wanted = self.assignment() if partitions is None else partitions
        return await fetch_offsets(self._cluster, self._named_group(), wanted, self._timeout_ms)

    def _named_group(self) -> str:
        if not self._group:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the consumer has no group: make it with group=...")
        return self._group

    async def _commit_when_due(self) -> None:
        interval_ms = self._settings.auto_commit_interval_ms
        if interval_ms is not None and now_ms() - self._committed_at_ms >= interval_ms:
            await self._auto_commit()

    async def _auto_commit(self) -> None:
        """What has been returned so far, if commits are automatic. A failure costs no record: what is not committed is
        read again. The application is not told, as it could do nothing else."""
        member = self._member
        if self._settings.auto_commit_interval_ms is None or member is None or member.identity is None:
            return
        moved = {tp: at for tp, at in self.resume_positions({}).items() if at != self._auto_committed.get(tp)}
        self._committed_at_ms = now_ms()
        if not moved:
            return
        try:
            await self._commit(member.group, moved)
        except SmqError as e:
            log.warning("automatic commit of group %s failed, its records will be read again: %s", member.group, e)
        else:
            self._auto_committed |= moved


def _rebalancing(group: str) -> SmqError:
    return SmqError(ErrorCode.REBALANCE_IN_PROGRESS, f"this member of group {group!r} is joining: poll first")
