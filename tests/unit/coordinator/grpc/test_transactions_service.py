"""Transactional producers over gRPC: their life, their batches, their offsets, and the errors of wrong requests."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from smq.clients.errors import ERROR_METADATA_KEY
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.state import TransactionPhase
from smq.records import NewRecord, decode_batch, encode_batch
from smq.replication.partition.markers import Markers
from smq.replication.partition.replica import Replica
from smq.testing.served import Served, fails, served_node

ID = "t-id"


async def ended(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a call that is repeated while the end of the last transaction is written, as clients do it."""
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            metadata: dict[str, Any] = dict(iter(error.trailing_metadata() or ()))  # type: ignore[arg-type] # stubs: not pairs
            if pb.ErrorDetail.FromString(metadata[ERROR_METADATA_KEY]).name != "TRANSACTION_ENDING":
                raise


async def start(served: Served, name: str = ID, **fields: Any) -> dict[str, Any]:
    """A producer's fields in every later request."""
    request = pb.StartProducerRequest(transactional_id=name, **{"transaction_timeout_ms": 60_000, **fields})
    answer = await ended(lambda: served.transactions.StartProducer(request))
    return {"transactional_id": name, "producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}


async def add(served: Served, who: dict[str, Any], *partitions: int, groups: tuple[str, ...] = ()) -> None:
    places = [pb.TopicPartition(topic="t", partition=p) for p in partitions]
    request = pb.AddToTransactionRequest(**who, partitions=places, groups=groups)
    await ended(lambda: served.transactions.AddToTransaction(request))


async def end(served: Served, who: dict[str, Any], *, commit: bool) -> None:
    await served.transactions.EndTransaction(pb.EndTransactionRequest(**who, commit=commit))


def batch(who: dict[str, Any], value: bytes, sequence: int = 0, *, is_transactional: bool = True) -> bytes:
    return encode_batch(
        [NewRecord(key=None, value=value, timestamp_ms=1)],
        producer_id=who["producer_id"],
        producer_epoch=who["producer_epoch"],
        base_sequence=sequence,
        is_transactional=is_transactional,
    )


async def publish(served: Served, data: bytes, partition: int = 0, **fields: Any) -> pb.PublishRecordResponse:
    (answer,) = await served.publish(pb.PublishRecordRequest(topic="t", partition=partition, batch=data, **fields))
    return answer


async def committed(served: Served, partition: int = 0, count: int = 1) -> list[bytes]:
    """The next `count` values that a reader of committed records gets."""
    values: list[bytes] = []
    at = 0
    while len(values) < count:
        place = pb.FetchPartition(topic="t", partition=partition, offset=at)
        answer = (await served.broker.Fetch(pb.FetchRequest(partitions=[place], max_wait_ms=200))).partitions[0]
        for found in answer.batches:
            values += [record.value or b"" for record in decode_batch(found.data)] if found.data else []
            at = found.last_offset + 1
    return values


async def test_readers_get_committed_transactions_whole_and_no_other(served: Served) -> None:
    await served.create("t", partitions=2)
    who = await start(served)
    for n, commit in enumerate((True, False, True)):
        await add(served, who, 0, 1)
        for partition in (0, 1):
            assert not (await publish(served, batch(who, b"%d" % n, n), partition)).HasField("error")
        await end(served, who, commit=commit)
        await end(served, who, commit=commit)  # the client may repeat it
    for partition in (0, 1):
        assert await committed(served, partition, 2) == [b"0", b"2"]


async def test_a_new_producer_fences_the_one_before_and_aborts_what_it_left_open(served: Served) -> None:
    await served.create()
    zombie = await start(served)
    await add(served, zombie, 0)
    assert (await publish(served, batch(zombie, b"zombie"))).base_offset == 0
    who = await start(served)
    assert who["producer_id"] == zombie["producer_id"]
    assert who["producer_epoch"] > zombie["producer_epoch"]
    late = await publish(served, batch(zombie, b"late", 1))
    assert late.error.name == "PRODUCER_FENCED"
    for call in (
        served.transactions.EndTransaction(pb.EndTransactionRequest(**zombie, commit=True)),
        served.transactions.AddToTransaction(pb.AddToTransactionRequest(**zombie, groups=["g"])),
        served.transactions.StartProducer(pb.StartProducerRequest(**zombie, transaction_timeout_ms=1)),
    ):
        assert (await fails(call)).name == "PRODUCER_FENCED"
    await add(served, who, 0)
    assert not (await publish(served, batch(who, b"new"))).HasField("error")
    await end(served, who, commit=True)
    assert await committed(served) == [b"new"]


async def test_a_producer_that_goes_on_gets_the_next_epoch_once(served: Served) -> None:
    who = await start(served)
    following = await start(served, **{k: who[k] for k in ("producer_id", "producer_epoch")})
    again = await start(served, **{k: who[k] for k in ("producer_id", "producer_epoch")})
    assert following == again == who | {"producer_epoch": 1}


async def test_offsets_are_committed_with_the_transaction_or_not_at_all(served: Served) -> None:
    await served.create()
    who = await start(served)

    async def stage(offset: int, group: str = "g") -> None:
        place = pb.PartitionOffset(topic="t", partition=0, offset=offset, metadata="m")
        await served.transactions.StageOffsets(pb.StageOffsetsRequest(**who, group=group, offsets=[place]))

    async def found() -> list[int]:
        answer = await served.broker.FetchOffsets(pb.FetchOffsetsRequest(group="g"))
        return [o.offset for o in answer.offsets]

    assert (await fails(stage(1))).name == "INVALID_TRANSACTION_STATE", "the group was not added"
    await add(served, who, groups=("g",))
    await stage(3)
    assert await found() == []
    await end(served, who, commit=False)
    assert await found() == []
    await add(served, who, groups=("g",))
    await stage(4)
    assert (await fails(stage(-1))).name == "INVALID_OFFSET"
    assert (await fails(stage(4, "other"))).name == "INVALID_TRANSACTION_STATE"
    await end(served, who, commit=True)
    assert await found() == [4]


async def test_wrong_requests_get_codes_of_their_own(served: Served) -> None:
    await served.create()
    t = served.transactions
    who = await start(served)
    number = {"producer_id": who["producer_id"], "producer_epoch": who["producer_epoch"]}
    place = pb.TopicPartition(topic="t", partition=0)
    calls = [
        (t.StartProducer(pb.StartProducerRequest(transactional_id="")), "INVALID_REQUEST"),
        (t.StartProducer(pb.StartProducerRequest(transactional_id="x")), "INVALID_TRANSACTION_TIMEOUT"),
        (
            t.StartProducer(pb.StartProducerRequest(transactional_id="x", transaction_timeout_ms=10**9)),
            "INVALID_TRANSACTION_TIMEOUT",
        ),
        (
            t.StartProducer(pb.StartProducerRequest(transactional_id=ID, transaction_timeout_ms=1, producer_id=0)),
            "INVALID_REQUEST",
        ),
        (t.EndTransaction(pb.EndTransactionRequest(**who, commit=True)), "INVALID_TRANSACTION_STATE"),
        (t.EndTransaction(pb.EndTransactionRequest(**who)), "INVALID_REQUEST"),
        (
            t.EndTransaction(pb.EndTransactionRequest(transactional_id="no", **number, commit=True)),
            "UNKNOWN_TRANSACTIONAL_ID",
        ),
        (
            t.EndTransaction(pb.EndTransactionRequest(**who | {"producer_epoch": 40_000}, commit=True)),
            "INVALID_REQUEST",
        ),
        (t.AddToTransaction(pb.AddToTransactionRequest(**who)), "INVALID_REQUEST"),
        (
            t.AddToTransaction(pb.AddToTransactionRequest(**who, partitions=[pb.TopicPartition(topic="t")])),
            "INVALID_REQUEST",
        ),
        (
            t.AddToTransaction(
                pb.AddToTransactionRequest(**who, partitions=[place, pb.TopicPartition(topic="no", partition=0)])
            ),
            "UNKNOWN_TOPIC",
        ),
        (t.StageOffsets(pb.StageOffsetsRequest(**who, group="g")), "INVALID_REQUEST"),
        (
            t.AddToTransaction(pb.AddToTransactionRequest(**who | {"producer_epoch": 1}, partitions=[place])),
            "PRODUCER_FENCED",
        ),
    ]
    for call, name in calls:
        detail = await fails(call)
        assert detail.name == name, detail
    assert (await publish(served, batch(who, b"v"))).error.name == "INVALID_TRANSACTION_STATE", "it is not added"
    await add(served, who, 0)
    assert (await publish(served, batch(who, b"v"), acks=pb.ACKS_LEADER)).error.name == "INVALID_REQUEST"
    assert not (await publish(served, batch(who, b"v"))).HasField("error")
    never = await publish(served, batch(who | {"producer_epoch": 1}, b"v"))
    assert never.error.name == "PRODUCER_FENCED", "an epoch that was never given"
    plain = await publish(served, batch(who, b"v", 1, is_transactional=False))
    assert plain.error.name == "INVALID_TRANSACTION_STATE"


async def stage(served: Served, name: str, value: bytes, partition: int = 0) -> pb.StagedTransaction:
    who = await start(served, name, temporary=name.startswith("temporary"))
    await add(served, who, partition)
    assert not (await publish(served, batch(who, value), partition)).HasField("error")
    return pb.StagedTransaction(**who)


async def test_a_batch_is_visible_once_and_whole(served: Served) -> None:
    await served.create("t", partitions=2)

    async def commit(number: int, *staged: pb.StagedTransaction) -> bool:
        request = pb.CommitBatchRequest(app="app", batch_id=number, transactions=staged)
        return bool((await served.transactions.CommitBatch(request)).replay)

    first = [await stage(served, f"task-{p}", b"first", p) for p in (0, 1)]
    assert not await commit(0, *first)
    assert await commit(0, *first), "the answer was lost, and the driver asks again"
    again = [await stage(served, f"task-{p}", b"again", p) for p in (0, 1)]
    assert await commit(0, *again), "a replay of the whole batch"
    fenced = await stage(served, "task-0", b"fenced", 0)
    second = [await stage(served, f"task-{p}", b"second", p) for p in (0, 1)]
    assert (await fails(commit(1, second[1], fenced))).name == "PRODUCER_FENCED"
    assert not await commit(1, *second)
    for partition in (0, 1):
        assert await committed(served, partition, 2) == [b"first", b"second"]


async def test_a_replay_with_other_rows_is_refused_and_can_be_committed_as_another_batch(served: Served) -> None:
    await served.create()

    async def commit(number: int, value: bytes, fingerprint: pb.Fingerprint) -> bool:
        staged = [await stage(served, "task", value)]
        request = pb.CommitBatchRequest(app="a", batch_id=number, transactions=staged, fingerprint=fingerprint)
        return bool((await served.transactions.CommitBatch(request)).replay)

    first, other = pb.Fingerprint(rows=1, digest=b"1"), pb.Fingerprint(rows=2, digest=b"2")
    assert not await commit(0, b"first", first)
    assert await commit(0, b"again", first)
    detail = await fails(commit(0, b"other", other))
    assert (detail.name, detail.definite, detail.retriable) == ("BATCH_DIFFERS", True, False)
    assert not await commit(1, b"other", other)
    assert await committed(served) == [b"first", b"other"]
    for bad in (pb.Fingerprint(), pb.Fingerprint(rows=-1), pb.Fingerprint(rows=0, digest=bytes(33))):
        assert (await fails(commit(2, b"v", bad))).name == "INVALID_REQUEST"


async def test_an_abort_that_names_the_producer_does_not_end_the_next_one_s_transaction(served: Served) -> None:
    """What a driver aborts of a dead task may arrive when the next batch has begun under the same id."""

    await served.create()

    async def abort(of: pb.StagedTransaction) -> None:
        who = {"producer_id": of.producer_id, "producer_epoch": of.producer_epoch}
        await served.admin.AbortTransaction(pb.AbortTransactionRequest(transactional_id="task", **who))

    dead = await stage(served, "task", b"dead")
    following = await stage(served, "task", b"next")
    assert (await fails(abort(dead))).name == "PRODUCER_FENCED"
    assert served.server.node.state.transactions["task"].phase is TransactionPhase.ONGOING
    await abort(following)
    await abort(following)
    half = pb.AbortTransactionRequest(transactional_id="task", producer_id=1)
    assert (await fails(served.admin.AbortTransaction(half))).name == "INVALID_REQUEST"


async def test_what_a_batch_has_committed_is_there_when_the_answer_comes(served: Served) -> None:
    await served.create()
    for number in range(5):
        staged = [await stage(served, "task", b"%d" % number)]
        await served.transactions.CommitBatch(pb.CommitBatchRequest(app="a", batch_id=number, transactions=staged))
        assert not any(transaction.is_ending for transaction in served.server.node.state.transactions.values())


async def test_a_replay_waits_for_the_commit_of_a_batch_whose_transactions_it_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that starts again stages under other transactional ids, or nothing at all."""
    are_held, drive = True, Markers.drive

    def held(endings: Markers, replica: Replica) -> None:
        if not are_held:
            drive(endings, replica)

    monkeypatch.setattr(Markers, "drive", held)

    async with served_node(tmp_path) as served:
        await served.create()
        state = served.server.node.state
        lost = [await stage(served, "task", b"v")]
        first = asyncio.ensure_future(
            served.transactions.CommitBatch(pb.CommitBatchRequest(app="a", batch_id=1, transactions=lost))
        )
        while "a" not in state.apps:  # noqa: ASYNC110 - it is state, not an event
            await asyncio.sleep(0.01)
        first.cancel()
        replay = asyncio.ensure_future(served.transactions.CommitBatch(pb.CommitBatchRequest(app="a", batch_id=1)))
        done, _ = await asyncio.wait({replay}, timeout=1)
        assert not done
        are_held = False
        assert (await replay).replay
        assert not state.transactions["task"].is_ending
        assert await committed(served) == [b"v"]


async def test_apps_are_listed_with_their_last_batch_and_when_they_are_forgotten(served: Served) -> None:
    async def listed() -> list[pb.App]:
        return list((await served.admin.ListApps(pb.ListAppsRequest())).apps)

    async def keep_for(minutes: int) -> None:
        change = pb.AlterClusterConfigRequest(set={"offsets.retention.minutes": str(minutes)})
        await served.admin.AlterClusterConfig(change)

    assert await listed() == []
    for app, number in (("query-b", 3), ("query-a", 7), ("query-b", 4), ("query-a", 6), ("", 0)):
        await served.transactions.CommitBatch(pb.CommitBatchRequest(app=app, batch_id=number))
    await keep_for(10)
    assert [(a.app, a.batch_id) for a in await listed()] == [("query-a", 7), ("query-b", 4)]
    assert all(a.idle_ms + a.expires_ms == 600_000 for a in await listed())
    await keep_for(0)
    assert not any(a.HasField("expires_ms") for a in await listed())


async def test_without_an_app_batches_are_not_counted_and_temporary_ids_go(served: Served) -> None:
    await served.create()
    request = pb.CommitBatchRequest(
        batch_id=0, transactions=[await stage(served, "temporary", b"v")], request_id=b"0123456789abcdef"
    )
    for _ in range(2):
        assert not (await served.transactions.CommitBatch(request)).replay
    assert await committed(served) == [b"v"]
    while (await served.admin.ListTransactions(pb.ListTransactionsRequest())).transactions:
        pass
    for number, name in ((None, "batch_id"), (1, "app")):
        detail = await fails(served.transactions.CommitBatch(pb.CommitBatchRequest(batch_id=number)))
        assert (detail.name, name in detail.message) == ("INVALID_REQUEST", True)
    no_epoch = pb.StagedTransaction(transactional_id="x", producer_id=1)
    detail = await fails(
        served.transactions.CommitBatch(pb.CommitBatchRequest(app="a", batch_id=0, transactions=[no_epoch]))
    )
    assert "producer_epoch" in detail.message


async def test_a_node_that_is_not_the_coordinator_names_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    who = await start(served)
    groups = served.server._groups
    monkeypatch.setattr(groups, "_owns", lambda slot: False)
    detail = await fails(served.transactions.EndTransaction(pb.EndTransactionRequest(**who, commit=True)))
    assert (detail.name, detail.leader, detail.retriable) == ("NOT_COORDINATOR", 1, True)
    assert detail.leader_address
