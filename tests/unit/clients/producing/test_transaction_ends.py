"""Commits and aborts of the producer while other tasks send: each record is in one transaction, or is refused."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import pytest

from smq.clients import (
    Admin,
    InvalidTransactionState,
    Producer,
    ProducerFenced,
    ProducerInterceptor,
    SmqError,
    SyncProducer,
    Timeout,
)
from smq.clients import producer as producer_module
from smq.clients.cluster import now_ms
from smq.clients.producing.producer_transactions import Transactions
from smq.clients.producing.publish_stream import PublishStream
from smq.raft_state.errors import ErrorCode
from smq.testing.served import Served
from tests.unit.clients.producing.test_producer_transactions import await_values, producer_of, servers

CALL = Transactions._call
SUBMIT = PublishStream.submit


def small_producer_of(served: Served, interceptors: Iterable[ProducerInterceptor]) -> Producer:
    """Its buffer has room for some ten records of 100 bytes."""
    return Producer(
        servers(served),
        transactional_id="id",
        linger_ms=1,
        batch_bytes=500,
        buffer_bytes=1_000,
        interceptors=interceptors,
    )


@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_a_record_sent_while_its_transaction_ends_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    await served.create(partitions=2)
    async with producer_of(served) as producer:

        def refuses() -> None:
            with pytest.raises(InvalidTransactionState, match=f"is being {end}.*: wait for {end}"):
                producer.send("t", b"late", partition=1)
            with pytest.raises(InvalidTransactionState, match=f"wait for {end}.* and begin another"):
                producer.begin()

        async def call(transactions: Transactions, *args: Any) -> Any:
            refuses()
            answer = await CALL(transactions, *args)
            refuses()
            return answer

        producer.begin()
        await producer.send("t", b"first", partition=0)
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_call", call)
            await getattr(producer, end)()
        async with producer.transaction():
            await producer.send("t", b"second", partition=0)
    await await_values(served, *([b"first"] if end == "commit" else []), b"second")


@pytest.mark.parametrize("interceptors", [[], [ProducerInterceptor()]], ids=["plain", "intercepted"])
@pytest.mark.parametrize("is_keyed", [False, True], ids=["unkeyed", "keyed"])
async def test_a_commit_waits_for_a_send_many_that_waits_for_room(
    served: Served, interceptors: list[ProducerInterceptor], is_keyed: bool
) -> None:
    await served.create()
    values = [b"%0100d" % n for n in range(100)]
    async with small_producer_of(served, interceptors) as producer:
        producer.begin()
        sending = asyncio.create_task(producer.send_many("t", values, keys=values if is_keyed else None))
        await producer.send("t", b"")  # it is stored: the task has begun
        assert not sending.done()
        await producer.commit()
        runs = await sending.result()
        assert sum(run.last_offset - run.base_offset + 1 for run in runs) == 100
    await await_values(served, b"", *values)


@pytest.mark.parametrize("interceptors", [[], [ProducerInterceptor()]], ids=["plain", "intercepted"])
async def test_an_abort_refuses_the_rest_of_a_send_many_that_waits_for_room(
    served: Served, interceptors: list[ProducerInterceptor]
) -> None:
    await served.create()
    async with small_producer_of(served, interceptors) as producer:
        producer.begin()
        sending = asyncio.create_task(producer.send_many("t", [b"%0100d" % n for n in range(100)]))
        await asyncio.sleep(0)
        aborting = asyncio.create_task(producer.abort())
        with pytest.raises(InvalidTransactionState, match="ended by another call"):
            await sending
        await aborting
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_a_commit_waits_for_offsets_that_are_under_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.create()
    async with producer_of(served) as producer, Admin(servers(served)) as admin:
        producer.begin()
        staging = asyncio.create_task(producer.send_offsets("g", {("t", 0): 5}))
        await asyncio.sleep(0)
        committing = asyncio.create_task(producer.commit())
        await asyncio.sleep(0)
        with pytest.raises(InvalidTransactionState, match="is being committed"):
            await producer.send_offsets("g", {("t", 0): 6})
        await committing
        await staging
        assert (await admin.fetch_offsets("g"))["t", 0].offset == 5


async def test_a_commit_whose_answer_is_lost_takes_nothing_until_it_is_known(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose_answer(transactions: Transactions, *args: Any) -> Any:
        await CALL(transactions, *args)
        raise SmqError(ErrorCode.TIMED_OUT, "no answer")

    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"first")
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_call", lose_answer)
            with pytest.raises(Timeout):
                await producer.commit()
        with pytest.raises(InvalidTransactionState, match=r"if it has failed, call commit\(\) or abort\(\) again"):
            producer.send("t", b"late")
        await producer.commit()
        async with producer.transaction():
            await producer.send("t", b"second")
    await await_values(served, b"first", b"second")


async def test_after_an_abort_that_has_failed_nothing_but_an_abort_is_allowed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that it has dropped are missing in the transaction."""

    async def lose_question(_: Transactions, *__: Any) -> Any:
        raise SmqError(ErrorCode.TIMED_OUT, "no answer")

    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"stored")
        dropped = producer.send("t", b"dropped")
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_call", lose_question)
            with pytest.raises(Timeout):
                await producer.abort()
        assert isinstance(dropped.exception(), InvalidTransactionState)
        for refused in (producer.commit(), producer.send_many("t", [b"late"])):
            with pytest.raises(InvalidTransactionState, match="is being aborted"):
                await refused
        await producer.abort()
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_a_commit_says_that_another_task_has_aborted(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        sent = producer.send("t", b"v")
        committing = asyncio.create_task(producer.commit())
        await asyncio.sleep(0)
        await producer.abort()
        with pytest.raises(InvalidTransactionState, match="ended by another call"):
            await committing
        assert isinstance(sent.exception(), InvalidTransactionState)
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def fail_to_start(_: Transactions) -> None:
    raise SmqError(ErrorCode.TIMED_OUT, "no answer")


async def cancel_start(_: Transactions) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("start", [fail_to_start, cancel_start])
async def test_no_batch_of_an_aborted_transaction_comes_in_the_next_one(
    served: Served, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    """The abort gets no new epoch while the batch is under way."""
    held: list[tuple[Any, ...]] = []
    is_held = asyncio.Event()

    def hold(*args: Any) -> None:
        held.append(args)
        is_held.set()

    def submit_after_held(*args: Any) -> None:
        while held:
            SUBMIT(*held.pop())
        SUBMIT(*args)

    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"aborted")
        with monkeypatch.context() as patch:
            patch.setattr(PublishStream, "submit", hold)
            dropped = producer.send("t", b"under way")
            await is_held.wait()
            patch.setattr(Transactions, "start", start)
            with pytest.raises((Timeout, asyncio.CancelledError)):
                await producer.abort()
        assert isinstance(dropped.exception(), Timeout)
        with pytest.raises(InvalidTransactionState, match=r"is being aborted.*if it has failed, call it again"):
            producer.begin()
        with monkeypatch.context() as patch:
            patch.delattr(Transactions, "_decide")  # it is not asked for again
            await producer.abort()
        monkeypatch.setattr(PublishStream, "submit", submit_after_held)
        async with producer.transaction():
            await producer.send("t", b"next")
        assert not held
    await await_values(served, b"next")


@pytest.mark.parametrize("is_made", [False, True], ids=["commit lost", "commit made"])
@pytest.mark.parametrize("is_answer", [False, True], ids=["question lost", "answer lost"])
@pytest.mark.parametrize("failing", [1, 2], ids=["decision", "start"])
async def test_after_a_commit_without_an_answer_and_an_abort_that_failed_the_next_abort_says_how_it_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_made: bool, is_answer: bool, failing: int
) -> None:
    calls = 0

    async def call(transactions: Transactions, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls not in (1, 1 + failing):
            return await CALL(transactions, *args)
        if is_made if calls == 1 else is_answer:
            with contextlib.suppress(SmqError):
                await CALL(transactions, *args)
        raise SmqError(ErrorCode.TIMED_OUT, "no answer")

    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"first")
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_call", call)
            for end in (producer.commit, producer.abort):
                with pytest.raises(Timeout):
                    await end()
            for refused in (producer.commit(), producer.send_many("t", [b"late"])):
                with pytest.raises(InvalidTransactionState, match="is being aborted"):
                    await refused
            if is_made:
                with pytest.raises(InvalidTransactionState, match="has been committed"):
                    await producer.abort()
            else:
                await producer.abort()
        async with producer.transaction():
            await producer.send("t", b"second")
    await await_values(served, *([b"first"] if is_made else []), b"second")


async def test_an_abort_succeeds_if_the_new_epoch_has_aborted_the_transaction(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def call(transactions: Transactions, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise SmqError(ErrorCode.TIMED_OUT, "no answer")
        return await CALL(transactions, *args)

    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"aborted")
        with monkeypatch.context() as patch:
            patch.setattr(Transactions, "_call", call)
            await producer.abort()
        assert calls > 1
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_an_abort_says_that_another_task_has_committed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is no abort of the next transaction, which that task begins immediately."""
    made, resumed = asyncio.Event(), asyncio.Event()

    async def call(transactions: Transactions, *args: Any) -> Any:
        answer = await CALL(transactions, *args)
        if not made.is_set():
            made.set()
            await resumed.wait()
        return answer

    await served.create()
    async with producer_of(served) as producer:

        async def work() -> None:
            await producer.commit()
            async with producer.transaction():
                await producer.send("t", b"second")

        producer.begin()
        await producer.send("t", b"first")
        monkeypatch.setattr(Transactions, "_call", call)
        working = asyncio.create_task(work())
        await made.wait()
        aborting = asyncio.create_task(producer.abort())
        await asyncio.sleep(0)
        resumed.set()
        with pytest.raises(InvalidTransactionState, match="has been committed"):
            await aborting
        await working
    await await_values(served, b"first", b"second")


@pytest.mark.parametrize(("end", "late"), [("commit", 2), ("abort", 4)])
async def test_two_tasks_that_end_a_transaction_in_the_same_way_do_not_end_the_next_one(
    served: Served, monkeypatch: pytest.MonkeyPatch, end: str, late: int
) -> None:
    begun, calls = asyncio.Event(), 0

    async def call(transactions: Transactions, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == late:  # the last one that both of them could need
            await begun.wait()
        return await CALL(transactions, *args)

    await served.create()
    async with producer_of(served) as producer:

        async def work() -> None:
            await getattr(producer, end)()
            async with producer.transaction():
                begun.set()
                await other
                await producer.send("t", b"second")

        producer.begin()
        await producer.send("t", b"first")
        monkeypatch.setattr(Transactions, "_call", call)
        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        other = asyncio.create_task(getattr(producer, end)())
        await working
    await await_values(served, *([b"first"] if end == "commit" else []), b"second")


async def test_a_producer_that_is_fenced_asks_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the task that waits for the abort's end nor a later call asks the cluster again."""
    starts = 0
    start = Transactions.start

    async def count(transactions: Transactions) -> None:
        nonlocal starts
        starts += 1
        await start(transactions)

    await served.create()
    async with producer_of(served) as zombie:
        zombie.begin()
        await zombie.send("t", b"zombie")
        async with producer_of(served):
            monkeypatch.setattr(Transactions, "start", count)
            errors = await asyncio.gather(zombie.abort(), zombie.abort(), return_exceptions=True)
            assert [type(error) for error in errors] == [ProducerFenced] * 2
            for end in (zombie.abort, zombie.commit):
                with pytest.raises(ProducerFenced):
                    await end()
            with pytest.raises(ProducerFenced):
                zombie.begin()
        assert starts == 1


async def test_close_does_not_wait_for_a_commit_that_gets_no_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def call(transactions: Transactions, *args: Any) -> Any:
        asked.set()
        await closed.wait()
        return await CALL(transactions, *args)

    await served.create()
    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_S", 0.01)
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"v")
        monkeypatch.setattr(Transactions, "_call", call)
        committing = asyncio.create_task(producer.commit())
        await asked.wait()
    closed.set()
    with pytest.raises(SmqError, match="closed"):
        await committing


async def test_a_record_without_a_transaction_opens_none_at_the_coordinator(served: Served) -> None:
    """The second line: the calls let no such record in."""

    await served.create()
    async with producer_of(served) as producer:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        producer._accumulator.add(producer._topic("t"), None, b"late", (), 0, 0, future, now_ms())
        producer._publisher.wake()
        with pytest.raises(InvalidTransactionState, match="no transaction is open"):
            await future
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_a_record_that_a_thread_sends_while_another_one_commits_fails_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.create()
    errors: list[SmqError | None] = []

    def blocking() -> None:
        with SyncProducer(servers(served), transactional_id="id", linger_ms=1) as producer:

            async def call(transactions: Transactions, *args: Any) -> Any:
                late = await asyncio.to_thread(producer.send, "t", b"late")
                errors.append(await asyncio.to_thread(late.exception, 30))
                return await CALL(transactions, *args)

            producer.begin()
            producer.send("t", b"first").result()
            with monkeypatch.context() as patch:
                patch.setattr(Transactions, "_call", call)
                producer.commit()

    await asyncio.to_thread(blocking)
    [error] = errors
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.INVALID_TRANSACTION_STATE
    await await_values(served, b"first")
