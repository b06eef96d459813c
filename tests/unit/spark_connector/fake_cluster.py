"""A cluster in this process, over real gRPC: what the connector asks for, and the faults it must get over.

Each FakeNode is a gRPC server of its own over one shared FakeLog, so that a test can stop a node, let it lag,
damage its bytes or drop the head of a log while a read is under way. The real server is tested next door.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset
from smq.records import NewRecord, decode_batch, encode_batch, parse_header, patched_prefix


@dataclass
class FakePartition:
    batches: list[pb.Batch] = field(default_factory=list)
    log_start: int = 0
    next_offset: int = 0
    hwm: int | None = None  # None: everything is committed

    @property
    def end(self) -> int:
        return self.next_offset if self.hwm is None else self.hwm

    def append(self, data: bytes, *, ts_ns: int, epoch: int = 0) -> int:
        header = parse_header(data)
        base = self.next_offset
        patched = patched_prefix(base, header, epoch) + data[16:]
        last = base + header.last_offset_delta
        self.batches.append(pb.Batch(base_offset=base, last_offset=last, ts_ns=ts_ns, data=patched))
        self.next_offset = last + 1
        return base

    def times(self) -> Iterator[tuple[int, int, int]]:
        """(offset, create time, append time) of what can be read."""
        for batch in self.batches:
            for record in decode_batch(batch.data):
                if record.offset < self.end:
                    yield record.offset, record.timestamp_ms, batch.ts_ns

    def sized_end(self, start: int, bytes_max: int) -> tuple[int, int]:
        end, size = start, 0
        for batch in self.batches:
            if start <= batch.last_offset < self.end:
                if size and size + len(batch.data) > bytes_max:
                    break
                end, size = batch.last_offset + 1, size + len(batch.data)
        return end, size


@dataclass
class FakeLog:
    """What all nodes share: topics, and each partition's batches."""

    partitions: dict[tuple[str, int], FakePartition] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # how often a topic of that name has been created

    def create(self, topic: str, count: int) -> None:
        self.made[topic] = self.made.get(topic, 0) + 1
        self.grow(topic, count)

    def grow(self, topic: str, count: int) -> None:
        for p in range(count):
            self.partitions.setdefault((topic, p), FakePartition())

    def delete(self, topic: str) -> None:
        self.partitions = {key: log for key, log in self.partitions.items() if key[0] != topic}

    def topic_id(self, topic: str) -> bytes:
        return f"{topic}#{self.made[topic]}".encode()

    def append(self, topic: str, partition: int, records: list[NewRecord], codec: str = "none") -> int:
        log = self.partitions[topic, partition]
        return log.append(encode_batch(records, codec=codec), ts_ns=1_000_000 + log.next_offset)


class FakeNode:
    """One node, as far as the connector asks. `on_fetch` and `on_list` may raise SmqError, or change the answer."""

    def __init__(self, cluster: "FakeCluster", node: int) -> None:
        self.node = node
        self.fetches: list[tuple[str, int, int]] = []
        self.on_fetch: Callable[[pb.FetchedPartition], None] = lambda part: None
        self.on_list: Callable[[pb.ListedOffset], None] = lambda listed: None
        self._cluster = cluster
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        self._serve("smq.v1.Admin", "DescribeCluster", self._describe, pb.DescribeClusterRequest)
        self._serve("smq.v1.Broker", "ListOffsets", self._list_offsets, pb.ListOffsetsRequest)
        self._serve("smq.v1.Broker", "Fetch", self._fetch, pb.FetchRequest)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def _serve(self, service: str, method: str, answer: Callable[..., Message], request: type[Message]) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=request.FromString, response_serializer=lambda m: m.SerializeToString()
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    def _describe(
        self, request: pb.DescribeClusterRequest, context: grpc.ServicerContext
    ) -> pb.DescribeClusterResponse:
        answer = pb.DescribeClusterResponse(cluster_id="fake")
        nodes = self._cluster.nodes
        for node in nodes:
            answer.nodes.add(node=node.node, grpc_address=node.address, fenced=node.node in self._cluster.fenced)
        topics: dict[str, pb.TopicInfo] = {}
        for (topic, partition), log in sorted(self._cluster.log.partitions.items()):
            info = topics.setdefault(topic, pb.TopicInfo(name=topic, topic_id=self._cluster.log.topic_id(topic)))
            replicas = [n.node for n in nodes]
            info.partitions.add(
                partition=partition, replicas=replicas, log_start=log.log_start, hwm=log.end, lso=log.end
            )
        answer.topics.extend(topics.values())
        return answer

    def _list_offsets(self, request: pb.ListOffsetsRequest, context: grpc.ServicerContext) -> pb.ListOffsetsResponse:
        answer = pb.ListOffsetsResponse()
        for p in request.partitions:
            listed = answer.offsets.add(topic=p.topic, partition=p.partition)
            try:
                self.on_list(listed)
                self._list(p, listed)
            except SmqError as e:
                listed.error.CopyFrom(detail_from_error(e))
        return answer

    def _list(self, asked: pb.ListOffsetsPartition, listed: pb.ListedOffset) -> None:
        log = self._cluster.log.partitions[asked.topic, asked.partition]
        listed.lo, listed.hi = log.log_start, log.end
        if asked.HasField("timestamp_ms"):
            found = [o for o, created_ms, _ in log.times() if created_ms >= asked.timestamp_ms]
        elif asked.HasField("max_bytes"):
            listed.offset, listed.size_bytes = log.sized_end(asked.offset_value, asked.max_bytes)
            return
        else:
            assert asked.offset_type == pb.EXACT_TS_NS
            found = [o for o, _, ts_ns in log.times() if ts_ns >= asked.offset_value]
        listed.offset = next((o for o in found if o >= log.log_start), log.end)

    def _fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> pb.FetchResponse:
        answer = pb.FetchResponse()
        for asked in request.partitions:
            self.fetches.append((asked.topic, asked.partition, asked.offset))
            part = answer.partitions.add(topic=asked.topic, partition=asked.partition)
            try:
                self._fill(asked, part)
                self.on_fetch(part)
            except SmqError as e:
                del part.batches[:]
                part.error.CopyFrom(detail_from_error(e))
        return answer

    def _fill(self, asked: pb.FetchPartition, part: pb.FetchedPartition) -> None:
        log = self._cluster.log.partitions.get((asked.topic, asked.partition))
        if log is None:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"no topic {asked.topic}")
        if not log.log_start <= asked.offset <= log.end:
            details = ErrorDetails(lo=Offset(log.log_start), hi=Offset(log.end))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{asked.offset}", details)
        part.log_start, part.hwm, part.lso = log.log_start, log.end, log.end
        size = 0
        for batch in log.batches:
            if batch.last_offset < asked.offset or batch.last_offset >= log.end:
                continue
            if size and size + len(batch.data) > min(asked.max_bytes, self._cluster.fetch_bytes_max):
                break
            part.batches.append(batch)
            size += len(batch.data)


class FakeCluster:
    """Nodes over one log. `fetch_bytes_max` keeps answers small, so that reads take several of them."""

    def __init__(self, node_count: int = 3, fetch_bytes_max: int = 4 << 20) -> None:
        self.log = FakeLog()
        self.fetch_bytes_max = fetch_bytes_max
        self.fenced: set[int] = set()
        self.nodes: list[FakeNode] = []
        self.nodes += [FakeNode(self, i + 1) for i in range(node_count)]

    @property
    def servers(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def stop(self) -> None:
        stops = [threading.Thread(target=node.stop) for node in self.nodes]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()


@contextmanager
def fake_cluster(node_count: int = 3, fetch_bytes_max: int = 4 << 20) -> Iterator[FakeCluster]:
    cluster = FakeCluster(node_count, fetch_bytes_max)
    try:
        yield cluster
    finally:
        cluster.stop()


def records(count: int, *, first: int = 0, value_bytes: int = 20) -> list[NewRecord]:
    """`count` records whose value begins with their number."""
    return [
        NewRecord(key=b"k%d" % (i % 7), value=(b"%d:" % i).ljust(value_bytes, b"."), timestamp_ms=1_700_000_000_000 + i)
        for i in range(first, first + count)
    ]
