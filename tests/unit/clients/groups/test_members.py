"""Consumers that subscribe, against one real node: shares, callbacks, commits, and members that stop polling."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from smq.clients import Admin, Consumer, Producer, SmqError
from smq.clients.groups.member import GroupCalls
from smq.clients.positions import look_up_starts
from smq.clients.types import GroupMembership, TopicPartition
from smq.coordinator.config.addresses import format_address
from smq.coordinator.groups.member_requests import Join, Joined
from smq.coordinator.service.group_members import Memberships
from smq.raft_state.cluster_config import GROUP_INITIAL_DELAY_MS
from smq.raft_state.errors import ErrorCode
from smq.testing.served import PATIENCE_S, Served, served_node

PARTITIONS = 4
ALL = {("t", p) for p in range(PARTITIONS)}


def address(served: Served) -> str:
    return format_address(served.server.grpc_address)


@asynccontextmanager
async def with_topic(directory: Path, *, delay_ms: int = 0) -> AsyncIterator[Served]:
    """A node with a topic, whose groups wait `delay_ms` for more members before their first generation."""
    async with served_node(directory, settings={GROUP_INITIAL_DELAY_MS: str(delay_ms)}) as served:
        await served.create("t", partitions=PARTITIONS)
        yield served


@pytest.fixture
def served(tmp_path: Path) -> AbstractAsyncContextManager[Served]:
    return with_topic(tmp_path)


async def fill(served: Served, count: int, topic: str = "t") -> None:
    """`count` records in each partition."""
    async with Producer(address(served)) as producer:
        for partition in range(PARTITIONS):
            await producer.send_many(topic, [b"%d" % n for n in range(count)], partition=partition)


class Watched:
    """A subscribed consumer, and the calls of its callbacks."""

    def __init__(self, served: Served, **options: Any) -> None:
        settings = {"group": "g", "heartbeat_interval_ms": 20, "session_timeout_ms": 2_000, "max_wait_ms": 20}
        self.consumer = Consumer(address(served), **{**settings, **options})
        self.told: list[tuple[str, set[TopicPartition]]] = []
        self.seen: list[tuple[int, int]] = []

    async def subscribe(self, topics: str | list[str] = "t", **options: Any) -> None:
        def note(what: str) -> Callable[[list[TopicPartition]], None]:
            return lambda partitions: self.told.append((what, set(partitions)))

        callbacks = {f"on_{what}": note(what) for what in ("assigned", "revoked", "lost")}
        await self.consumer.subscribe(topics, **{**callbacks, **options})

    async def poll(self) -> None:
        for records in (await self.consumer.getmany(timeout_ms=20)).values():
            self.seen += [(r.partition, r.offset) for r in records]

    @property
    def owned(self) -> set[TopicPartition]:
        return set(self.consumer.assignment())


@asynccontextmanager
async def member(served: Served, topics: str | list[str] = "t", **options: Any) -> AsyncIterator[Watched]:
    watched = Watched(served, **options)
    async with watched.consumer:
        await watched.subscribe(topics)
        yield watched


async def until(condition: Callable[[], bool], *members: Watched) -> None:
    """Polls the members in turn until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            for each in members:
                await each.poll()


async def code_of(work: Coroutine[Any, Any, Any]) -> ErrorCode:
    with pytest.raises(SmqError) as caught:
        await work
    return caught.value.code


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
async def test_members_share_what_there_is_and_take_over_from_who_leaves(served: Served, assignor: str) -> None:
    await fill(served, 5)
    async with member(served, assignors=[assignor]) as one:
        await until(lambda: len(one.seen) == 5 * PARTITIONS, one)
        assert (one.told, one.owned) == ([("assigned", ALL)], ALL)
        await one.consumer.commit()
        async with member(served, assignors=[assignor]) as two:
            await until(lambda: len(one.owned) == len(two.owned) == 2, one, two)
            assert one.owned | two.owned == ALL
            await fill(served, 1)
            await until(lambda: len(one.seen) + len(two.seen) == 6 * PARTITIONS, one, two)
            await one.consumer.commit()
            await two.consumer.commit()
            told_two = two.told
        await until(lambda: one.owned == ALL, one)
        if assignor == "cooperative-sticky":  # what stays is never revoked
            assert [what for what, partitions in one.told if partitions] == ["assigned", "revoked", "assigned"]
            assert one.told[1][1] | one.owned == ALL
            assert len(one.told[1][1]) == 2
        else:
            assert ("revoked", ALL) in one.told
        assert told_two[-1][0] == "revoked"
        assert sorted(one.seen + two.seen) == [(p, o) for p in range(PARTITIONS) for o in range(6)]


async def test_first_generation_may_take_longer_than_a_session(tmp_path: Path) -> None:
    async with with_topic(tmp_path, delay_ms=2000) as served, member(served, session_timeout_ms=1_000) as one:
        await until(lambda: one.owned == ALL, one)


async def test_join_that_is_refused_for_long_is_logged_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("smq.clients.groups.member.RETRY_MS", 1.0)

    async with with_topic(tmp_path) as served:
        refusals = iter([SmqError(ErrorCode.NO_QUORUM, "no majority")])
        joining = Memberships.join

        def join(self: Memberships, request: Join) -> Awaitable[Joined]:
            for refusal in refusals:
                raise refusal
            return joining(self, request)

        monkeypatch.setattr(Memberships, "join", join)
        async with member(served) as one:
            await until(lambda: one.owned == ALL, one)
        assert "group g cannot be joined now" in caplog.text
        assert "no majority" in caplog.text


async def test_next_owner_begins_where_the_former_one_committed_as_it_gave_up(served: Served) -> None:
    await fill(served, 5)
    async with member(served, auto_commit_interval_ms=3_600_000) as one:
        await until(lambda: len(one.seen) == 5 * PARTITIONS, one)
        async with member(served, auto_commit_interval_ms=3_600_000) as two:
            await until(lambda: len(two.owned) == 2, one, two)
            await fill(served, 1)
            await until(lambda: len(one.seen) + len(two.seen) >= 6 * PARTITIONS, one, two)
            assert sorted(one.seen + two.seen) == [(p, o) for p in range(PARTITIONS) for o in range(6)]
    async with Admin(address(served)) as admin:
        described = await admin.describe_group("g")
        assert (described.members, described.lag) == ((), 0)


async def test_block_that_raises_does_not_commit_what_it_was_processing(served: Served) -> None:
    await fill(served, 1)

    async def process() -> None:
        async with member(served, auto_commit_interval_ms=3_600_000) as one:
            await until(lambda: bool(one.seen), one)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await process()
    async with Admin(address(served)) as admin:
        assert await admin.fetch_offsets("g") == {}


async def test_member_that_does_not_poll_leaves_and_learns_of_it(served: Served) -> None:
    await fill(served, 1)
    async with member(served, max_poll_interval_ms=300) as slow, member(served) as other:
        await until(lambda: len(slow.owned) == len(other.owned) == 2, slow, other)
        had = slow.owned
        await until(lambda: other.owned == ALL, other)
        assert slow.owned == had  # it has not polled, so it does not know
        assert await code_of(slow.consumer.commit()) is ErrorCode.UNKNOWN_MEMBER
        await until(lambda: ("lost", had) in slow.told and len(slow.owned) == len(other.owned) == 2, slow, other)


async def test_member_that_waits_for_records_is_polling(served: Served) -> None:
    async with member(served, max_poll_interval_ms=100) as one:
        waiting = asyncio.create_task(anext(one.consumer))
        await asyncio.sleep(0.5)  # several times the limit
        await fill(served, 1)
        assert (await waiting).offset == 0
        assert [what for what, _ in one.told] == ["assigned"]


async def test_iteration_notices_a_rebalance_before_the_next_record(served: Served) -> None:
    await fill(served, 500)
    async with member(served) as one:
        first = await anext(one.consumer)
        async with member(served) as two:
            await until(lambda: one.consumer.has_news(), two)
            taking = asyncio.create_task(anext(one.consumer))
            await until(lambda: len(two.owned) == 2, two)
            await taking
            assert ("revoked", ALL) in one.told
            assert first.offset == 0


async def test_callbacks_may_seek_commit_and_fail(served: Served) -> None:
    await fill(served, 10)
    watched = Watched(served)
    async with watched.consumer as consumer:

        async def skip(partitions: list[TopicPartition]) -> None:
            for tp in partitions:
                await consumer.seek(*tp, ("RESET_TO_OFFSET", 8))

        def fail(_partitions: list[TopicPartition]) -> None:
            raise ZeroDivisionError

        await watched.subscribe(on_assigned=skip, on_revoked=fail)
        await until(lambda: len(watched.seen) == 2 * PARTITIONS, watched)
        assert {offset for _, offset in watched.seen} == {8, 9}
        await consumer.commit()
        async with member(served) as other:
            with pytest.raises(ZeroDivisionError):
                await until(lambda: bool(other.owned), watched, other)
            await until(lambda: len(watched.owned) == len(other.owned) == 2, watched, other)
        await watched.subscribe()
        assert {found.offset for found in (await consumer.committed(ALL)).values()} == {10}


async def test_unsubscribing_while_a_poll_revokes_leaves_no_member(served: Served) -> None:
    entered, may_go = asyncio.Event(), asyncio.Event()
    revoked: list[list[TopicPartition]] = []

    async def flush(partitions: list[TopicPartition]) -> None:
        revoked.append(partitions)
        entered.set()
        await may_go.wait()

    watched = Watched(served)
    async with watched.consumer as consumer:
        await watched.subscribe(on_revoked=flush)
        await until(lambda: watched.owned == ALL, watched)
        async with member(served) as other:
            polling = asyncio.create_task(until(lambda: not consumer.subscription(), watched))
            await until(entered.is_set, other)
            await consumer.unsubscribe()
            may_go.set()
            await asyncio.gather(polling, return_exceptions=True)
            assert (revoked, watched.owned) == ([sorted(ALL)], set())
            await until(lambda: other.owned == ALL, other)
            async with Admin(address(served)) as admin:
                assert len((await admin.describe_group("g")).members) == 1


async def test_unsubscribing_while_a_poll_looks_up_positions_ends_reading(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_go = asyncio.Event(), asyncio.Event()

    async def slow_look_up(*args: Any, **kwargs: Any) -> Any:
        found = await look_up_starts(*args, **kwargs)
        entered.set()
        await may_go.wait()
        return found

    await fill(served, 1)
    monkeypatch.setattr("smq.clients.consumer.look_up_starts", slow_look_up)
    async with member(served) as one:
        polling = asyncio.create_task(until(lambda: not one.consumer.subscription(), one))
        await entered.wait()
        await one.consumer.unsubscribe()
        may_go.set()
        await asyncio.gather(polling, return_exceptions=True)
        assert (one.told, one.owned, one.seen) == ([], set(), [])


async def test_cancelled_poll_leaves_its_callback_to_the_next_one(served: Served) -> None:
    await fill(served, 10)
    watched = Watched(served, max_poll_interval_ms=1_000)
    async with watched.consumer as consumer:
        calls: list[str] = []
        entered = asyncio.Event()

        def callback(what: str) -> Callable[[list[TopicPartition]], Coroutine[None, None, None]]:
            async def call(partitions: list[TopicPartition]) -> None:
                assert set(partitions) == ALL
                calls.append(what)
                entered.set()
                if calls.count(what) == 1:
                    await asyncio.Event().wait()  # until the poll is cancelled
                if what == "assigned":
                    for tp in partitions:
                        await consumer.seek(*tp, 8)

            return call

        async def cancelled_poll() -> None:
            entered.clear()
            polling = asyncio.create_task(until(lambda: False, watched))
            await entered.wait()
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

        callbacks: dict[str, Any] = {f"on_{what}": callback(what) for what in ("assigned", "revoked", "lost")}
        await watched.subscribe(**callbacks)
        await cancelled_poll()
        await until(lambda: len(watched.seen) == 2 * PARTITIONS, watched)
        assert {offset for _, offset in watched.seen} == {8, 9}
        assert calls == ["assigned"] * 2
        await watched.subscribe(**callbacks)  # joins again
        await cancelled_poll()
        await until(lambda: len(calls) == 5, watched)
        assert calls == ["assigned"] * 2 + ["revoked"] * 2 + ["assigned"]
        while not consumer.has_news():  # noqa: ASYNC110 - it has not polled for too long
            await asyncio.sleep(0.01)
        await cancelled_poll()
        await until(lambda: len(calls) == 8, watched)
        assert calls[5:] == ["lost", "lost", "assigned"]


async def test_callback_may_unsubscribe(served: Served) -> None:
    watched = Watched(served)
    async with watched.consumer as consumer:
        revoked: list[list[TopicPartition]] = []

        async def stop(partitions: list[TopicPartition]) -> None:
            revoked.append(partitions)
            await consumer.unsubscribe()

        await watched.subscribe(on_revoked=stop)
        await until(lambda: watched.owned == ALL, watched)
        await watched.subscribe(on_revoked=stop)  # joins again
        assert await code_of(until(lambda: False, watched)) is ErrorCode.INVALID_REQUEST  # nothing is assigned
        assert (revoked, consumer.subscription()) == ([sorted(ALL)], [])
        async with member(served) as other:
            await until(lambda: other.owned == ALL, other)


async def test_heartbeats_that_fail_are_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with member(served) as one:
        await until(lambda: one.owned == ALL, one)
        with monkeypatch.context() as patched:

            async def fail(*_: object) -> bool:
                raise ZeroDivisionError

            patched.setattr(GroupCalls, "heartbeat", fail)
            assert await code_of(until(lambda: False, one)) is ErrorCode.INTERNAL
        assert one.told[-1] == ("lost", ALL)
        await until(lambda: one.owned == ALL, one)


async def test_seek_takes_all_seven_offset_types_of_a_subscribed_partition(served: Served) -> None:
    await fill(served, 10)
    async with member(served) as one:
        await until(lambda: len(one.seen) == 10 * PARTITIONS, one)
        await one.consumer.commit({("t", 0): 4})
        at = [
            await one.consumer.seek("t", 0, start)
            for start in (
                ("EXACT_OFFSET", 3),
                ("RESET_TO_OFFSET", 99),
                ("EXACT_TS_NS", 0),
                "RESET_TO_EARLIEST",
                "RESET_TO_LATEST",
                "RESUME_OR_EARLIEST",
                "RESUME_OR_LATEST",
            )
        ]
        assert at == [3, 10, 0, 0, 10, 4, 4]
        one.seen.clear()
        await until(lambda: len(one.seen) == 6, one)
        assert one.seen == [(0, offset) for offset in range(4, 10)]


async def test_paused_partitions_keep_their_place(served: Served) -> None:
    async with member(served) as one:
        await until(lambda: one.owned == ALL, one)
        await one.consumer.pause([("t", 0), ("t", 1)])
        assert one.consumer.paused() == [("t", 0), ("t", 1)]
        await fill(served, 3)
        await until(lambda: len(one.seen) == 6, one)
        assert {p for p, _ in one.seen} == {2, 3}
        await one.consumer.resume([("t", 0)])
        await until(lambda: len(one.seen) == 9, one)
        assert {p for p, _ in one.seen} == {0, 2, 3}


async def test_static_member_comes_back_without_a_rebalance(served: Served) -> None:
    async with member(served) as other:
        async with member(served, group_instance_id="one") as one:
            await until(lambda: len(one.owned) == len(other.owned) == 2, one, other)
            had, told = one.owned, len(other.told)
        async with member(served, group_instance_id="one") as back:
            await until(lambda: bool(back.owned), back, other)
            assert (back.owned, len(other.told)) == (had, told)
            former = Watched(served, group_instance_id="one")
            async with former.consumer:
                await former.subscribe()
                await until(lambda: former.owned == had, former, other)
                with pytest.raises(SmqError) as caught:
                    await until(lambda: not back.owned, back)
                assert caught.value.code is ErrorCode.FENCED_INSTANCE
                assert await code_of(back.consumer.getmany()) is ErrorCode.FENCED_INSTANCE


@pytest.mark.parametrize("has_other", [True, False])
async def test_static_leader_that_comes_back_to_a_topic_that_has_grown_assigns_all_of_it(
    served: Served, has_other: bool
) -> None:
    async with AsyncExitStack() as stack:
        async with member(served, group_instance_id="one") as one:
            await until(lambda: one.owned == ALL, one)
            others = [await stack.enter_async_context(member(served))] if has_other else []
            await until(lambda: all(each.owned for each in (one, *others)), one, *others)
        async with Admin(address(served)) as admin:
            await admin.add_partitions("t", PARTITIONS + 1)
        async with member(served, group_instance_id="one") as back:
            grown = ALL | {("t", PARTITIONS)}
            await until(lambda: back.owned.union(*(o.owned for o in others)) == grown, back, *others)


async def test_leader_notices_a_topic_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.clients.groups.member.TOPICS_AGE_MS", 50.0)

    async with with_topic(tmp_path) as served, member(served) as one, Admin(address(served)) as admin:
        await until(lambda: one.owned == ALL, one)
        await admin.add_partitions("t", PARTITIONS + 1)
        await until(lambda: ("t", PARTITIONS) in one.owned, one)


async def test_commit_gone_by_retention_is_the_error_of_that_partition_alone(served: Served) -> None:
    await fill(served, 5)
    async with Admin(address(served)) as admin:
        await admin.commit_offsets("g", {("t", 0): 1})
        await admin.delete_records("t", 0, 3)
    async with member(served) as one:
        with pytest.raises(SmqError) as caught:
            await until(lambda: False, one)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert one.owned == ALL
        await one.consumer.seek("t", 0, "earliest")
        await until(lambda: (0, 3) in one.seen, one)


async def test_start_that_an_open_transaction_may_move_holds_up_its_own_partition_only(served: Served) -> None:
    await fill(served, 5)
    async with Producer(address(served), transactional_id="x") as producer:
        producer.begin()
        await producer.send_offsets("g", {("t", 0): 3, ("t", 1): 3})
        async with member(served, request_timeout_ms=1_000) as one:
            await until(lambda: len(one.seen) == 5 * 2, one)
            assert (one.told, one.owned) == ([("assigned", ALL)], ALL)
            await one.consumer.seek("t", 1, 4)
            await until(lambda: (1, 4) in one.seen, one)
            await one.consumer.commit()
            assert (await one.consumer.committed(ALL)).keys() == ALL - {("t", 0)}
            assert one.consumer.position("t", 0) == await one.consumer.lag("t", 0) == -1
            await producer.commit()
            await until(lambda: (0, 4) in one.seen, one)
            assert [at for at in one.seen if at[0] < 2] == [(1, 4), (0, 3), (0, 4)]


async def test_wrong_uses_are_refused_at_the_call(served: Served) -> None:
    async with Consumer(address(served)) as consumer:
        assert await code_of(consumer.subscribe("t")) is ErrorCode.INVALID_REQUEST  # no group
    async with Consumer(address(served), group="g") as consumer:
        assert await code_of(consumer.subscribe([])) is ErrorCode.INVALID_REQUEST
        assert await code_of(consumer.subscribe("nope")) is ErrorCode.UNKNOWN_TOPIC
        assert await code_of(consumer.getmany(timeout_ms=1)) is ErrorCode.INVALID_REQUEST
        await consumer.assign("t")
        assert await code_of(consumer.subscribe("t")) is ErrorCode.INVALID_REQUEST
    async with member(served) as one:
        assert await code_of(one.consumer.assign("t")) is ErrorCode.INVALID_REQUEST
        assert await code_of(one.consumer.commit({("t", 0): 1})) is ErrorCode.REBALANCE_IN_PROGRESS
        await until(lambda: one.owned == ALL, one)
        assert one.consumer.membership().member_id
        async with Consumer(address(served), group="g") as other:
            assert other.membership() == GroupMembership(group="g")
            assert await code_of(other.commit({("t", 0): 1})) is ErrorCode.UNKNOWN_MEMBER
        async with member(served, assignors=["cooperative-sticky"]) as stranger:
            assert await code_of(stranger.consumer.getmany(timeout_ms=5_000)) is ErrorCode.INCONSISTENT_PROTOCOL
        await one.consumer.unsubscribe()
        assert (one.owned, one.consumer.subscription()) == (set(), [])
        await one.consumer.assign("t")


@pytest.mark.parametrize(
    "options",
    [
        {"assignors": []},
        {"assignors": ["sticky"]},
        {"assignors": "range"},
        {"assignors": ["range", "range"]},
        {"group_instance_id": ""},
        {"session_timeout_ms": 1_000, "heartbeat_interval_ms": 1_000},
        {"max_poll_interval_ms": timedelta(0)},
        {"auto_commit_interval_ms": -1},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SmqError) as caught:
        Consumer("127.0.0.1:1", group="g", **options)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert next(iter(options)).split("_")[0] in caught.value.message or "heartbeat" in caught.value.message
