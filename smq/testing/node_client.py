"""One node's gRPC services, called directly: one attempt at that node, errors as SmqError, no discovery.

Live histories, tests and benchmarks use it to decide exactly which node gets which request. smq.clients hides that
choice, and has tests of its own.
"""

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from smq.clients.errors import ERROR_METADATA_KEY, error_from_detail
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc as rpc
from smq.clients.tls import Tls
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import NewRecord, check_crc, decode_batch, encode_batch, parse_header

T = TypeVar("T")
DEADLINE_S = 15.0  # default of a call
CATCH_UP_POLL_MS = 100  # a long poll for records that are committed but not on this node yet
MESSAGE_BYTES_MAX = 101 << 20  # the largest message that the server sends


class Unanswered(Exception):
    """The call failed without a typed error from the server: no connection, or no answer by the deadline."""


def error_of(failure: Any) -> Exception:
    """The server's error for a failed call, or Unanswered."""
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return error_from_detail(pb.ErrorDetail.FromString(value))
    return Unanswered(str(failure))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """A stored batch, decoded as a node served it."""

    base_offset: int
    ts_ns: int
    values: list[bytes]
    producer_id: int
    producer_epoch: int
    base_sequence: int

    @classmethod
    def of(cls, batch: pb.Batch) -> "ReadBatch":
        header = parse_header(batch.data)
        check_crc(batch.data, header)
        records = list(decode_batch(batch.data))
        assert [record.offset for record in records] == list(range(batch.base_offset, batch.last_offset + 1))
        return cls(
            base_offset=batch.base_offset,
            ts_ns=batch.ts_ns,
            values=[record.value or b"" for record in records],
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )


class RawNode:
    """Stubs of one node, and short calls over them. Record values are bytes."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self.address = address
        self._tls = tls
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),  # nodes are killed and restarted here: notice it soon
            ("grpc.max_reconnect_backoff_ms", 300),
        ]
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self.agent = rpc.AgentStub(self._channel)
        self.broker = rpc.BrokerStub(self._channel)
        self.admin = rpc.AdminStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def call(self, method: Callable[..., T], request: object, deadline_s: float = DEADLINE_S) -> T:
        """One unary call; raises SmqError or Unanswered."""
        try:
            return method(request, timeout=deadline_s)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure

    # ------------------------------------------------------------------------------------------- publishing
    def publish(
        self, requests: Iterable[pb.PublishRecordRequest], deadline_s: float = DEADLINE_S
    ) -> list[pb.PublishRecordResponse]:
        """Sends all requests on one stream. The answers, errors included, in the order of their correlation ids."""
        try:
            answers = list(self.agent.PublishRecord(iter(list(requests)), timeout=deadline_s))
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        return sorted(answers, key=lambda answer: answer.correlation_id)

    def publish_values(
        self, topic: str, partition: int, values: Sequence[bytes], **options: Any
    ) -> pb.PublishRecordResponse:
        """Publishes one batch of `values`; raises the error of its answer."""
        return self.publish_batch(topic, partition, batch_of(values), **options)

    def publish_batch(
        self,
        topic: str,
        partition: int,
        batch: bytes,
        *,
        acks: pb.Acks.ValueType = pb.ACKS_ALL,
        timeout_ms: int = 10_000,
        deadline_s: float = DEADLINE_S,
    ) -> pb.PublishRecordResponse:
        request = pb.PublishRecordRequest(
            topic=topic, partition=partition, correlation_id=1, acks=acks, timeout_ms=timeout_ms, batch=batch
        )
        (answer,) = self.publish([request], deadline_s)
        if answer.HasField("error"):
            raise error_from_detail(answer.error)
        return answer

    def start_session(self, topic: str, session_id: str | None = None) -> pb.StartPublishSessionResponse:
        return self.call(
            self.agent.StartPublishSession,
            pb.StartPublishSessionRequest(
                session_id=session_id or secrets.token_hex(8), topic=topic, request_id=secrets.token_bytes(16)
            ),
        )

    def assign_offsets(
        self, topic: str, partition: int, count: int, *, deadline_s: float = DEADLINE_S, **fields: Any
    ) -> pb.Assigned:
        """One assignment on a stream of its own, with these fields of Assignment; raises the error of its answer."""
        request = pb.Assignment(correlation_id=1, topic=topic, partition=partition, count=count, **fields)
        (answer,) = self.assign([request], deadline_s)
        if answer.HasField("error"):
            raise error_from_detail(answer.error)
        return answer

    def assign(self, requests: Sequence[pb.Assignment], deadline_s: float = DEADLINE_S) -> list[pb.Assigned]:
        """Sends all requests in one message. The answers, errors included, in the order of their correlation ids."""
        message = pb.AssignOffsetsRequest(assignments=requests)
        try:
            responses = list(self.broker.AssignOffsets(iter([message]), timeout=deadline_s))
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        answers = [answer for response in responses for answer in response.assigned]
        return sorted(answers, key=lambda answer: answer.correlation_id)

    # --------------------------------------------------------------------------------------------- reading
    def fetch(
        self, topic: str, partition: int, offset: int, *, max_bytes: int = 0, max_wait_ms: int = 0
    ) -> pb.FetchedPartition:
        """One partition's answer; raises its error.

        A committed record may not be on this node's own disk yet, if two others made the majority. Until it is, the
        answer is empty and the fetch is repeated.
        """
        requested = pb.FetchPartition(topic=topic, partition=partition, offset=offset, max_bytes=max_bytes)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            request = pb.FetchRequest(partitions=[requested], max_wait_ms=max_wait_ms)
            fetched = self.fetch_once(request, DEADLINE_S + max_wait_ms / 1000)
            if fetched.batches or offset >= fetched.hwm or time.monotonic() > deadline:
                return fetched
            max_wait_ms = max(max_wait_ms, CATCH_UP_POLL_MS)

    def fetch_once(self, request: pb.FetchRequest, deadline_s: float) -> pb.FetchedPartition:
        """One attempt for one partition; raises its error."""
        (fetched,) = self.call(self.broker.Fetch, request, deadline_s).partitions
        if fetched.HasField("error"):
            raise error_from_detail(fetched.error)
        return fetched

    def read_batches(self, topic: str, partition: int, start: int = 0) -> list[ReadBatch]:
        """Every batch from the one that holds `start` to this node's high water mark. Asserts that there is no gap."""
        found: list[ReadBatch] = []
        position = start
        while True:
            fetched = self.fetch(topic, partition, position)
            if not fetched.batches:
                assert position == fetched.hwm, f"no batch at {position}, and the high water mark is {fetched.hwm}"
                return found
            for batch in fetched.batches:
                expected = batch.base_offset <= position if not found else batch.base_offset == position
                assert expected, f"a batch at {batch.base_offset}, expected one at {position}"
                found.append(ReadBatch.of(batch))
                position = batch.last_offset + 1
            assert position <= fetched.hwm, f"read up to {position}, past the high water mark {fetched.hwm}"

    def read_all(self, topic: str, partition: int, start: int = 0) -> dict[int, bytes]:
        """offset -> value of every record from `start` to this node's high water mark."""
        return {
            offset: value
            for batch in self.read_batches(topic, partition, start)
            for offset, value in enumerate(batch.values, batch.base_offset)
            if offset >= start
        }

    def subscribe(
        self, deadline_s: float = DEADLINE_S, **init: Any
    ) -> Generator[pb.SubscribeRecordResponse, None, None]:
        """A subscription with these fields of SubscribeInit; iterating raises typed errors."""
        init.setdefault("subscription_id", secrets.token_hex(8))
        init.setdefault("partition", 0)
        yield from self._subscription([pb.SubscribeRecordRequest(init=pb.SubscribeInit(**init))], deadline_s)

    def subscribe_requests(self, requests: list[pb.SubscribeRecordRequest]) -> list[pb.SubscribeRecordResponse]:
        """All answers to these requests, up to the end of the stream."""
        return list(self._subscription(requests, DEADLINE_S))

    def _subscription(
        self, requests: list[pb.SubscribeRecordRequest], deadline_s: float
    ) -> Generator[pb.SubscribeRecordResponse, None, None]:
        stream: Any = self.agent.SubscribeRecord(iter(requests), timeout=deadline_s)
        try:
            yield from stream
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        finally:
            stream.cancel()

    def subscribe_first(self, **init: Any) -> pb.SubscribeRecordResponse:
        """The first response of a subscription, which is cancelled afterwards."""
        stream = self.subscribe(**init)
        try:
            return next(stream)
        finally:
            stream.close()

    def list_offset(
        self, topic: str, partition: int, offset_type: pb.OffsetType.ValueType, **fields: Any
    ) -> pb.ListedOffset:
        requested = pb.ListOffsetsPartition(topic=topic, partition=partition, offset_type=offset_type, **fields)
        request = pb.ListOffsetsRequest(partitions=[requested], timeout_ms=10_000)
        (listed,) = self.call(self.broker.ListOffsets, request).offsets
        if listed.HasField("error"):
            raise error_from_detail(listed.error)
        return listed

    def range_info(self, topic: str, partition: int, timeout_ms: int = 10_000) -> pb.GetPartitionRangeInfoResponse:
        request = pb.GetPartitionRangeInfoRequest(topic=topic, partition=partition, timeout_ms=timeout_ms)
        return self.call(self.broker.GetPartitionRangeInfo, request)

    # -------------------------------------------------------------------------------------- groups and admin
    def commit(self, group: str, topic: str, partition: int, offset: int, timeout_ms: int = 10_000) -> None:
        item = pb.PartitionOffset(topic=topic, partition=partition, offset=offset)
        request = pb.CommitOffsetsRequest(
            group=group, offsets=[item], request_id=secrets.token_bytes(16), timeout_ms=timeout_ms
        )
        deadline_s = timeout_ms / 1000 + 1  # its coordinator may be dead
        self.change_group(lambda node: node.call(node.broker.CommitOffsets, request, deadline_s))

    def change_group(self, change: Callable[["RawNode"], T]) -> T:
        """At this node, or at the group's coordinator if this node names it."""
        try:
            return change(self)
        except SmqError as refusal:
            address = refusal.details.leader_address
            if refusal.code is not ErrorCode.NOT_COORDINATOR or address is None:
                raise
        coordinator = RawNode(address, self._tls)
        try:
            return change(coordinator)
        finally:
            coordinator.close()

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """The group's committed offset; None if it has none."""
        requested = pb.TopicPartition(topic=topic, partition=partition)
        request = pb.FetchOffsetsRequest(group=group, partitions=[requested], timeout_ms=10_000)
        for item in self.call(self.broker.FetchOffsets, request).offsets:
            return item.offset
        return None

    def create_topic(self, name: str, partitions: int = 1, *, timeout_ms: int = 10_000, **fields: Any) -> None:
        request = pb.CreateTopicRequest(
            name=name, partition_count=partitions, request_id=secrets.token_bytes(16), timeout_ms=timeout_ms, **fields
        )
        self.call(self.admin.CreateTopic, request)

    def describe(self, *topics: str, linearizable: bool = False) -> pb.DescribeClusterResponse:
        request = pb.DescribeClusterRequest(topics=topics, linearizable=linearizable, timeout_ms=5_000)
        return self.call(self.admin.DescribeCluster, request)

    def status(self, *, with_digest: bool = False) -> pb.NodeStatusResponse:
        return self.call(self.admin.NodeStatus, pb.NodeStatusRequest(with_digest=with_digest))


def batch_of(values: Sequence[bytes], *, key: bytes | None = None, **producer: Any) -> bytes:
    """A RecordBatch v2 of these values, created now."""
    now_ms = time.time_ns() // 1_000_000
    return encode_batch((NewRecord(key=key, value=value, timestamp_ms=now_ms) for value in values), **producer)
