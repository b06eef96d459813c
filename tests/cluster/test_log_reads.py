"""Reading a partition on real nodes (the Log-reads and Subscriptions lines of the behaviour checklist)."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.records import decode_batch
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode, batch_of
from smq.testing.node_process import wait_for
from tests.cluster.raw import raises

NewTopic = Callable[..., str]
LeaderOf = Callable[..., RawNode]


class Reader:
    """A subscription whose requests are sent one by one."""

    def __init__(self, node: RawNode, **init: Any) -> None:
        self._requests: queue.Queue[pb.SubscribeRecordRequest | None] = queue.Queue()
        self._requests.put(pb.SubscribeRecordRequest(init=pb.SubscribeInit(**init)))
        self._stream: Any = node.agent.SubscribeRecord(iter(self._requests.get, None), timeout=20)

    def next(self) -> pb.SubscribeRecordResponse:
        answer: pb.SubscribeRecordResponse = next(self._stream)
        return answer

    def seek(self, offset: int) -> None:
        self._requests.put(pb.SubscribeRecordRequest(seek=pb.SubscribeSeek(offset=offset)))

    def started(self) -> pb.StartedAt:
        """Of the next response that says where it starts."""
        while True:
            answer = self.next()
            if answer.HasField("started"):
                return answer.started

    def offsets(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += [record.offset for record in self.next().records]
        return found

    def close(self) -> None:
        self._requests.put(None)
        self._stream.cancel()


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    return new_topic()


@pytest.fixture
def node(topic: str, leader_of: LeaderOf) -> RawNode:
    return leader_of(topic)


@pytest.fixture
def reader(topic: str, node: RawNode) -> Iterator[Reader]:
    """Ten records, read from the first."""
    node.publish_values(topic, 0, [b"%d" % i for i in range(10)])
    made = Reader(node, subscription_id=f"s-{topic}", topic=topic, partition=0, offset_type=pb.RESET_TO_EARLIEST)
    yield made
    made.close()


def test_fetch_at_the_hwm_waits_and_is_woken_by_the_next_append(topic: str, node: RawNode) -> None:
    node.publish_values(topic, 0, [b"first"])
    threading.Timer(0.3, lambda: node.publish_values(topic, 0, [b"second"])).start()
    began = time.monotonic()
    fetched = node.fetch(topic, 0, 1, max_wait_ms=20_000)
    assert [batch.base_offset for batch in fetched.batches] == [1]
    assert time.monotonic() - began < 10  # woken, not timed out


def test_fetch_at_the_hwm_of_every_replica_is_woken_too(cluster: Cluster, topic: str, node: RawNode) -> None:
    answers: queue.Queue[pb.FetchedPartition] = queue.Queue()
    for member in cluster.alive():
        threading.Thread(
            target=lambda raw=member.raw: answers.put(raw.fetch(topic, 0, 0, max_wait_ms=20_000)), daemon=True
        ).start()
    node.publish_values(topic, 0, [b"news"])
    for _ in cluster.alive():
        assert [batch.last_offset for batch in answers.get(timeout=15).batches] == [0]


def test_fetch_without_news_is_empty_after_max_wait(topic: str, node: RawNode) -> None:
    began = time.monotonic()
    fetched = node.fetch(topic, 0, 0, max_wait_ms=200)
    assert not fetched.batches
    assert time.monotonic() - began >= 0.19


def test_max_bytes_is_honoured_but_the_first_batch_always_comes(topic: str, node: RawNode) -> None:
    for _ in range(5):
        node.publish_values(topic, 0, [b"x" * 1000])
    assert len(node.fetch(topic, 0, 0, max_bytes=1).batches) == 1
    assert 1 <= len(node.fetch(topic, 0, 0, max_bytes=2500).batches) <= 3
    assert len(node.fetch(topic, 0, 0).batches) == 5


def test_fetch_inside_a_batch_brings_the_whole_batch(topic: str, node: RawNode) -> None:
    node.publish_values(topic, 0, [b"a", b"b", b"c"])
    (batch,) = node.fetch(topic, 0, 2).batches
    assert (batch.base_offset, batch.last_offset) == (0, 2)
    stream = node.subscribe(topic=topic, partition=0, offset_type=pb.EXACT_OFFSET, offset_value=2, stop_at_end=True)
    assert [(r.offset, r.value) for answer in stream for r in answer.records] == [(2, b"c")]


def test_every_replica_serves_the_same_bytes(cluster: Cluster, topic: str, node: RawNode) -> None:
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        node.publish_batch(topic, 0, batch_of([b"value-" * 50] * 20, key=b"k", codec=codec))
    cluster.wait_converged(topic, 1)
    copies = [
        [(b.base_offset, b.last_offset, b.ts_ns, b.data) for b in member.raw.fetch(topic, 0, 0).batches]
        for member in cluster.alive()
    ]
    assert copies[0] == copies[1] == copies[2]
    assert [record.offset for batch in copies[0] for record in decode_batch(batch[3])] == list(range(100))


def test_keys_values_headers_and_times_survive_null_and_empty(topic: str, node: RawNode) -> None:
    session = f"h-{topic}"
    node.start_session(topic, session)
    sent = [
        pb.NewRecord(timestamp_ms=1_000),
        pb.NewRecord(key=b"", value=b"", timestamp_ms=2_000),
        pb.NewRecord(key=b"k", timestamp_ms=3_000, headers=[pb.Header(key="h", value=b"\x00\xff"), pb.Header(key="n")]),
    ]
    request = pb.PublishRecordRequest(
        partition=0, base_sequence=0, session_id=session, correlation_id=1, records=pb.NewRecords(records=sent)
    )
    (answer,) = node.publish([request])
    assert not answer.HasField("error")
    stream = node.subscribe(topic=topic, partition=0, offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    got = [record for response in stream for record in response.records]
    for record, original in zip(got, sent, strict=True):
        assert (record.HasField("key"), record.key) == (original.HasField("key"), original.key)
        assert (record.HasField("value"), record.value) == (original.HasField("value"), original.value)
        assert record.timestamp_ms == original.timestamp_ms
        assert list(record.headers) == list(original.headers)


def test_seek_goes_back_and_forward_and_to_exactly_the_hwm(reader: Reader) -> None:
    assert reader.started().offset == 0
    assert reader.offsets(10) == list(range(10))
    reader.seek(4)
    assert reader.started().offset == 4
    assert reader.offsets(6) == list(range(4, 10))
    reader.seek(10)
    at_end = reader.next()
    while not at_end.HasField("started"):
        at_end = reader.next()
    assert (at_end.started.offset, at_end.at_end, at_end.lag) == (10, True, 0)


def test_seek_past_the_hwm_is_out_of_range(topic: str, node: RawNode) -> None:
    node.publish_values(topic, 0, [b"only"])

    def seek() -> object:
        requests = [
            pb.SubscribeRecordRequest(
                init=pb.SubscribeInit(
                    subscription_id=f"p-{topic}", topic=topic, partition=0, offset_type=pb.RESET_TO_EARLIEST
                )
            ),
            pb.SubscribeRecordRequest(seek=pb.SubscribeSeek(offset=2)),
        ]
        return node.subscribe_requests(requests)

    error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, seek)
    assert (error.details.lo, error.details.hi) == (0, 1)


def test_lag_shrinks_to_zero_and_at_end_is_false_after_seeking_back(reader: Reader) -> None:
    first = reader.next()
    assert (first.lag, first.at_end, first.hwm) == (10, False, 10)
    last = first
    while last.next_offset < 10:
        last = reader.next()
    assert (last.lag, last.at_end, last.hwm) == (0, True, 10)
    reader.seek(9)
    answer = reader.next()
    while not answer.HasField("started"):
        answer = reader.next()
    assert (answer.lag, answer.at_end) == (1, False)


def test_second_subscription_with_one_id_is_refused(reader: Reader, topic: str, node: RawNode) -> None:
    reader.started()
    raises(
        ErrorCode.SESSION_EXISTS,
        lambda: node.subscribe_first(
            subscription_id=f"s-{topic}", topic=topic, partition=0, offset_type=pb.RESET_TO_EARLIEST
        ),
    )


def test_latest_waits_for_what_comes_next(topic: str, node: RawNode) -> None:
    node.publish_values(topic, 0, [b"old"])
    waiting = Reader(node, subscription_id=f"l-{topic}", topic=topic, partition=0, offset_type=pb.RESET_TO_LATEST)
    assert waiting.started().offset == 1
    node.publish_values(topic, 0, [b"new"])
    answer = waiting.next()
    assert [(record.offset, record.value) for record in answer.records] == [(1, b"new")]
    waiting.close()


def test_stop_offset_is_exclusive_and_stop_at_end_is_the_hwm_of_the_call(topic: str, node: RawNode) -> None:
    node.publish_values(topic, 0, [b"%d" % i for i in range(10)])
    start: dict[str, Any] = {"topic": topic, "partition": 0, "offset_type": pb.RESET_TO_EARLIEST}
    stopped = [r.offset for answer in node.subscribe(**start, stop_offset=7) for r in answer.records]
    assert stopped == list(range(7))
    ended = [r.offset for answer in node.subscribe(**start, stop_at_end=True) for r in answer.records]
    assert ended == list(range(10))


def test_slow_reader_with_a_window_gets_no_more_than_it_acknowledges(topic: str, node: RawNode) -> None:
    for _ in range(20):
        node.publish_values(topic, 0, [b"x" * 10_000])
    reader = Reader(
        node,
        subscription_id=f"w-{topic}",
        topic=topic,
        partition=0,
        offset_type=pb.RESET_TO_EARLIEST,
        max_bytes=10_000,
        window_bytes=15_000,
    )
    assert reader.started().offset == 0
    got: list[int] = []
    done = threading.Event()

    def read() -> None:
        try:
            while True:
                got.extend(record.offset for record in reader.next().records)
        except Exception:  # noqa: BLE001 - the stream ends by our own cancel
            done.set()

    threading.Thread(target=read, daemon=True).start()
    wait_for("the first records", lambda: got)
    assert not done.wait(1.0)
    assert len(got) <= 4
    reader.close()
    assert done.wait(10)
