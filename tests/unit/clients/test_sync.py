"""The blocking clients, used as a script would use them: without an event loop of its own."""

import _weakrefset
import asyncio
import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from smq.clients import Delivery, SmqError, SyncAdmin, SyncConsumer, SyncOffsetAssigner, SyncProducer
from smq.clients.pb import smq_pb2 as pb
from smq.clients.sync.background_loop import BlockingClient
from smq.raft_state.errors import ErrorCode
from smq.testing.fake.runner import cluster_in_thread


@pytest.fixture
def address() -> Iterator[str]:
    """A fake node in a thread of its own."""
    with cluster_in_thread(1, t=2) as cluster:
        yield cluster.nodes[1].address


def test_send_read_commit_and_resume(address: str) -> None:
    with SyncAdmin(address) as admin:
        admin.create_topic("u", 1)
        assert {t.name for t in admin.list_topics()} == {"t", "u"}
    with SyncProducer(address, linger_ms=1) as producer:
        assert producer.send("u", b"0").result().offset == 0
        runs = producer.send_many("u", [b"%d" % i for i in range(1, 10)])
        assert [(r.base_offset, r.last_offset) for r in runs] == [(1, 9)]
        assert producer.stats.records_acked == 10
    with SyncConsumer(address, group="g", max_wait_ms=50) as consumer:
        consumer.assign([("u", 0)])
        for record in consumer:
            assert consumer.position("u", 0) == record.offset + 1
            assert consumer.lag("u", 0) == 9 - record.offset
            if record.offset == 4:
                break
        consumer.commit()  # the position of the loop, not of the records fetched ahead
        assert consumer.committed()["u", 0].offset == 5
        found = consumer.getmany(100, 1_000)
        assert [r.offset for r in found["u", 0]] == [5, 6, 7, 8, 9]
    with SyncConsumer(address, group="g") as consumer:
        assert consumer.assign([("u", 0)]) == {("u", 0): 5}


@pytest.mark.parametrize("client", [SyncAdmin, SyncConsumer, SyncOffsetAssigner, SyncProducer])
def test_the_addresses_may_be_called_bootstrap_or_servers(address: str, client: Callable[..., BlockingClient]) -> None:
    for name in ("bootstrap", "servers"):
        client(**{name: address}).close()


def test_seek_forgets_what_was_read_ahead(address: str) -> None:
    with SyncProducer(address) as producer:
        producer.send_many("t", [b"%d" % i for i in range(10)], partition=0)
    with SyncConsumer(address, max_wait_ms=50) as consumer:
        consumer.assign([("t", 0)])
        assert next(iter(consumer)).offset == 0
        consumer.seek("t", 0, 7)
        assert next(iter(consumer)).offset == 7


def test_offsets_without_records_are_assigned_and_the_mark_advances(address: str) -> None:
    with SyncOffsetAssigner(address) as assigner:
        assert [assigner.assign("t", 0, count) for count in (5, 2)] == [(0, 4), (5, 6)]
        assert assigner.advance("t", 0, 7) == 7
        with pytest.raises(SmqError) as caught:
            assigner.advance("t", 0, 8)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_an_assignment_is_repeated_by_its_id_and_names_its_bound() -> None:
    with cluster_in_thread(1, t=1) as cluster, SyncOffsetAssigner(cluster.servers) as assigner:
        seen = list[pb.Assignment]()

        def keep(name: str, request: Any) -> None:
            if name == "AssignOffsets":
                seen.append(request)

        cluster.nodes[1].hook = keep
        assert assigner.assign("t", 0, 5) == (0, 4)
        given = [assigner.assign("t", 0, 3, request_id=b"i" * 16, not_before=2) for _ in range(2)]
        assert given == [(5, 7), (5, 7)]
        assert [(a.request_id, a.not_before) for a in seen[1:]] == [(b"i" * 16, 2)] * 2


def test_errors_arrive_unchanged(address: str) -> None:
    with SyncAdmin(address) as admin, pytest.raises(SmqError) as caught:
        admin.create_topic("t")
    assert caught.value.code is ErrorCode.TOPIC_EXISTS
    with SyncProducer(address) as producer, pytest.raises(SmqError, match="no topic"):
        producer.send("nope", b"v").result()


def test_number_that_no_request_can_hold_is_refused_and_the_client_stays_usable(address: str) -> None:
    with SyncConsumer(address, group="g") as consumer:
        consumer.assign([("t", 0)])
        for refused in (
            lambda: consumer.seek("t", 0, 1 << 63),
            lambda: consumer.commit({("t", 0): 1 << 63}),
            lambda: consumer.committed([("t", 1 << 31)]),
            lambda: consumer.fetch_range("t", 0, 1 << 63),
        ):
            with pytest.raises(SmqError, match="out of range") as caught:
                refused()
            assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert consumer.position("t", 0) == 0
    with pytest.raises(SmqError, match="max_wait_ms must be 0 to 2147483647 milliseconds"):
        SyncConsumer(address, max_wait_ms=1 << 31)


def _in_child(address: str, results: "multiprocessing.Queue[object]") -> None:
    with SyncAdmin(address) as admin:
        results.put([t.name for t in admin.list_topics()])


def test_fresh_clients_work_in_another_process(address: str) -> None:
    """As in a Spark worker: it starts without our threads and makes its own client with a loop of its own."""
    with SyncAdmin(address) as admin:
        assert admin.list_topics()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[object] = context.Queue()
    child = context.Process(target=_in_child, args=(address, results))
    child.start()
    assert results.get(timeout=120) == ["t"]
    child.join()


def test_client_from_before_a_fork_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncAdmin(address) as admin:
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(SmqError, match="before the process forked"):
                admin.list_topics()
        assert admin.list_topics()


@pytest.mark.parametrize(
    "poll",
    [
        pytest.param(lambda c: c.getmany(100, 10_000), id="getmany"),
        pytest.param(lambda c: c.getbatch(10_000), id="getbatch"),
        pytest.param(lambda c: next(iter(c)), id="iteration"),
    ],
)
def test_ctrl_c_during_a_poll_costs_no_record(
    address: str, poll: Callable[[SyncConsumer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the loop has taken the records, and the waiting thread does not have them yet."""
    with SyncProducer(address) as producer:
        producer.send_many("t", [b"%d" % i for i in range(10)], partition=0)
    main = threading.main_thread().ident
    assert main is not None
    with SyncConsumer(address, group="g", max_wait_ms=50) as consumer:
        consumer.assign([("t", 0)])
        advance = consumer._consumer._advance

        def interrupted(batch: Any) -> None:
            advance(batch)
            signal.pthread_kill(main, signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(consumer._consumer, "_advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                poll(consumer)
        assert consumer.position("t", 0) == 0
        consumer.commit()
        assert consumer.committed()["t", 0].offset == 0
        assert next(iter(consumer)).offset == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["_run", "_poll"])
def test_ctrl_c_at_any_bytecode_of_the_waiting_thread_leaves_nothing_hanging(address: str, way: str) -> None:
    is_running: list[bool] = []

    async def call() -> None:
        is_running.append(True)
        try:
            await asyncio.sleep(0.001)
        finally:
            is_running.clear()

    with SyncConsumer(address) as consumer:
        interrupts = 0
        while True:
            work = call()
            try:
                with interrupt_after(interrupts) as raised:
                    getattr(consumer, way)(work)
                assert not raised, "Ctrl-C was lost"
                break  # it ended before that many
            except KeyboardInterrupt:
                interrupts += 1
            assert not is_running
            work.close()  # if it has never begun
    assert interrupts > 100, "it takes some 200 bytecodes, more or fewer as the threads take turns"


@contextmanager
def interrupt_after(bytecodes: int) -> Iterator[list[bool]]:
    """KeyboardInterrupt once this thread has run so many bytecodes, in whatever function it is then. Only callbacks of
    weak references are left out: Python itself swallows what they raise. Yields a list that is empty until then."""
    left = bytecodes
    raised: list[bool] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename in (__file__, contextlib.__file__, _weakrefset.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raised.append(True)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)


def send_interrupted(producer: SyncProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends b"0", and Ctrl-C comes when the record is handed over and the loop does not know of it."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(producer, "_runner", SimpleNamespace(loop=SimpleNamespace(call_soon_threadsafe=interrupted)))
        with pytest.raises(KeyboardInterrupt):
            producer.send("t", b"0", partition=0)


def test_after_ctrl_c_in_a_send_the_next_one_is_delivered(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncProducer(address, linger_ms=1) as producer:
        send_interrupted(producer, monkeypatch)
        assert producer.send("t", b"1", partition=0).result(30).offset == 1


def test_after_ctrl_c_in_a_send_that_took_the_last_room_the_next_one_finds_room(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smq.clients.sync.producer.HANDED_RECORDS_MAX", 1)
    sent: list[Delivery] = []
    with SyncProducer(address, linger_ms=1) as producer:
        send_interrupted(producer, monkeypatch)
        sending = threading.Thread(target=lambda: sent.append(producer.send("t", b"1", partition=0)))
        sending.start()
        sending.join(10)
        assert sent, "it waits for ever"
        assert sent[0].result(30).offset == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda p: p.flush(), id="flush"),
        pytest.param(lambda p: p.send_many("t", [b"never sent"]), id="send_many"),
        pytest.param(lambda p: p.close(), id="close"),
    ],
)
def test_ctrl_c_in_a_call_loses_no_record_that_was_sent_before(
    call: Callable[[SyncProducer], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the loop has taken some of them."""
    main = threading.main_thread().ident
    assert main is not None
    called, resumed = asyncio.Event(), asyncio.Event()
    with cluster_in_thread(1, t=1) as cluster, SyncProducer(cluster.servers, linger_ms=1) as producer:
        take, take_all = producer._take, producer._take_all

        async def take_later(records: Sequence[Any]) -> None:
            await called.wait()
            await take(records[:10])
            if not resumed.is_set():
                signal.pthread_kill(main, signal.SIGINT)
                await resumed.wait()
            await take(records[10:])

        async def take_all_now() -> None:
            called.set()
            await take_all()

        monkeypatch.setattr(producer, "_take", take_later)
        monkeypatch.setattr(producer, "_take_all", take_all_now)
        send_interrupted(producer, monkeypatch)
        sent = [producer.send("t", b"%d" % n) for n in range(1, 30)]
        with pytest.raises(KeyboardInterrupt):
            call(producer)
        producer._runner.loop.call_soon_threadsafe(resumed.set)
        producer.close()
        assert [delivery.result(0).offset for delivery in sent] == list(range(1, 30))
        assert cluster.stored_values("t") == {0: [b"%d" % n for n in range(30)]}


@pytest.mark.parametrize("way", ["_run", "_poll"])
def test_ctrl_c_ends_a_call_and_waits_for_its_end(address: str, way: str) -> None:
    main = threading.main_thread().ident
    assert main is not None
    ended: list[bool] = []

    async def call() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0.001)
            ended.append(True)

    with SyncConsumer(address) as consumer:
        with pytest.raises(KeyboardInterrupt):
            getattr(consumer, way)(call())
        assert ended
