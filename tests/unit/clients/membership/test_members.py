"""Consumers that subscribe, against one real node: shares, callbacks, commits, and members that stop polling."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from smq.clients import Admin, Consumer, Producer, SmqError
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import GroupMembership, TopicPartition
from smq.coordinator.addresses import format_address
from smq.raft_state.errors import ErrorCode
from smq.testing.served import PATIENCE_S, Served
from smq.testing.served import serving as serving_node

PARTITIONS = 4
ALL = {("t", p) for p in range(PARTITIONS)}


def address(served: Served) -> str:
    return format_address(served.server.grpc_address)


def serving(directory: Path, body: Callable[[Served], Coroutine[None, None, None]]) -> None:
    """A node with a topic, whose groups do not wait for more members before their first generation."""

    async def prepared(served: Served) -> None:
        changed = {"group.initial.rebalance.delay.ms": "0"}
        await served.admin.AlterClusterConfig(pb.AlterClusterConfigRequest(set=changed))
        await served.create("t", partitions=PARTITIONS)
        await body(served)

    serving_node(directory, prepared)


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
def test_members_share_what_there_is_and_take_over_from_who_leaves(tmp_path: Path, assignor: str) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_next_owner_begins_where_the_former_one_committed_as_it_gave_up(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_block_that_raises_does_not_commit_what_it_was_processing(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        await fill(served, 1)

        async def process() -> None:
            async with member(served, auto_commit_interval_ms=3_600_000) as one:
                await until(lambda: bool(one.seen), one)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await process()
        async with Admin(address(served)) as admin:
            assert await admin.fetch_offsets("g") == {}

    serving(tmp_path, body)


def test_member_that_does_not_poll_leaves_and_learns_of_it(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        await fill(served, 1)
        async with member(served, max_poll_interval_ms=300) as slow, member(served) as other:
            await until(lambda: len(slow.owned) == len(other.owned) == 2, slow, other)
            had = slow.owned
            await until(lambda: other.owned == ALL, other)
            assert slow.owned == had  # it has not polled, so it does not know
            assert await code_of(slow.consumer.commit()) is ErrorCode.UNKNOWN_MEMBER
            await until(lambda: ("lost", had) in slow.told and len(slow.owned) == len(other.owned) == 2, slow, other)

    serving(tmp_path, body)


def test_member_that_waits_for_records_is_polling(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        async with member(served, max_poll_interval_ms=100) as one:
            waiting = asyncio.create_task(anext(one.consumer))
            await asyncio.sleep(0.5)  # several times the limit
            await fill(served, 1)
            assert (await waiting).offset == 0
            assert [what for what, _ in one.told] == ["assigned"]

    serving(tmp_path, body)


def test_iteration_notices_a_rebalance_before_the_next_record(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_callbacks_may_seek_commit_and_fail(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_seek_takes_all_seven_offset_types_of_a_subscribed_partition(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_paused_partitions_keep_their_place(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_static_member_comes_back_without_a_rebalance(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_leader_notices_a_topic_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smq.clients.membership.member.TOPICS_AGE_MS", 50.0)

    async def body(served: Served) -> None:
        async with member(served) as one, Admin(address(served)) as admin:
            await until(lambda: one.owned == ALL, one)
            await admin.add_partitions("t", PARTITIONS + 1)
            await until(lambda: ("t", PARTITIONS) in one.owned, one)

    serving(tmp_path, body)


def test_commit_gone_by_retention_is_the_error_of_that_partition_alone(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


def test_wrong_uses_are_refused_at_the_call(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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

    serving(tmp_path, body)


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
