"""A small honest cluster in this process, over real gRPC: what the clients ask, and the faults they must get over.

Every node is a grpc.aio server over one shared state; a partition's log is a ModelPartition with Kafka's rules. A test
moves leaders, stops nodes, holds commits back, or hooks into a node's answers. The real server is tested in
tests/cluster; this one is here for faults that a real one cannot be made to show on command.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from smq.clients.errors import detail_from_error, status_of, trailing_metadata_of
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import (
    AdminServicer,
    AgentServicer,
    BrokerServicer,
    add_AdminServicer_to_server,
    add_AgentServicer_to_server,
    add_BrokerServicer_to_server,
)
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionIndex, ring_range
from smq.records import patched_prefix
from smq.testing.model_log import ModelPartition, Stored

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext is generic over message types that a fake need not name
TEST_TIMEOUT_S: Final = 20.0
BATCH_BYTES_MAX: Final = 1 << 20


def run(work: Coroutine[Any, Any, T]) -> T:
    """A test's event loop; a hang is a failure."""

    async def bounded() -> T:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


@dataclass
class FakePartition(ModelPartition):
    leader: int = 1
    replicas: tuple[int, ...] = (1, 2, 3)
    log_start: int = 0
    is_held: bool = False  # appended, and not committed until `release`
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self) -> None:
        if not self.is_held:
            self.commit()
        self.wake()  # an append alone is news too, to `reaches`

    async def reaches(self, end: int) -> None:
        """Waits until the log has grown so far, committed or not."""
        while self.end < end:
            await self.changed.wait()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def move(self, leader: int) -> None:
        """Truncates what is not committed; who waits for it is told."""
        self.change_leader()
        self.leader = leader
        self.wake()


class FakeCluster:
    def __init__(self) -> None:
        self.nodes: dict[int, FakeNode] = {}
        self.topics: dict[str, list[FakePartition]] = {}
        self.commits: dict[tuple[str, str, int], tuple[int, str]] = {}
        self.replies: dict[bytes, Message | SmqError] = {}
        self.applied: list[str] = []  # names of the changes that took effect, in order
        self.next_producer_id = 100
        self.assigned: dict[tuple[str, int], int] = {}  # next offsets of external storage
        self.drained: set[int] = set()
        self.groups: dict[str, pb.DescribeGroupResponse] = {}
        self.offsets_retention_ms = 90 * 86_400_000

    def partition(self, topic: str, partition: int) -> FakePartition:
        partitions = self.topics.get(topic)
        if partitions is None:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
        if not 0 <= partition < len(partitions):
            raise SmqError(ErrorCode.UNKNOWN_PARTITION, f"{topic!r} has {len(partitions)} partitions")
        return partitions[partition]

    def create(self, name: str, count: int, *, start_offset: int = 0) -> None:
        nodes = sorted(self.nodes)
        self.topics[name] = [
            FakePartition(leader=nodes[i % len(nodes)], replicas=tuple(nodes), log_start=start_offset, hwm=start_offset)
            for i in range(count)
        ]

    def once(self, request_id: bytes, name: str, change: Callable[[], Message]) -> Message:
        """A change under a request id takes effect once, and answers as it did then."""
        if request_id not in self.replies:
            try:
                self.replies[request_id] = change()
                self.applied.append(name)
            except SmqError as e:
                self.replies[request_id] = e
        found = self.replies[request_id]
        if isinstance(found, SmqError):
            raise found
        return found

    def assign(self, request: pb.AssignOffsetsRequest) -> Message:
        key = (request.topic, request.partition)

        def change() -> Message:
            base = self.assigned.get(key, 0)
            self.assigned[key] = base + request.count
            return pb.AssignOffsetsResponse(base_offset=base, last_offset=base + request.count - 1)

        return self.once(request.request_id, "assign", change)

    def not_leader(self, log: FakePartition) -> SmqError:
        address = self.nodes[log.leader].address
        return SmqError(
            ErrorCode.NOT_LEADER, "not here", ErrorDetails(leader=NodeId(log.leader), leader_address=address)
        )


class FakeNode:
    """`hook(name, request)` runs before every answer: it may raise SmqError, wait, or change the world."""

    def __init__(self, cluster: FakeCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.address = ""
        self.seen: list[str] = []
        self.published: list[pb.PublishRecordRequest] = []
        self.fetches: list[pb.FetchRequest] = []
        self.hook: Callable[[str, Any], Any] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_AgentServicer_to_server(_Agent(self), self._server)
        add_BrokerServicer_to_server(_Broker(self), self._server)
        add_AdminServicer_to_server(_Admin(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        """As a kill: every connection breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        await self.start(int(self.address.rpartition(":")[2]))

    @property
    def is_up(self) -> bool:
        return self._server is not None

    async def before(self, name: str, request: Any) -> None:
        self.seen.append(name)
        if self.hook is not None:
            waited = self.hook(name, request)
            if waited is not None:
                await waited


def call(method: Callable[[Any, Any], Coroutine[Any, Any, Message]]) -> Any:
    """A unary method whose SmqError becomes a status with the detail in its trailers."""

    async def wrapped(self: Any, request: Any, context: Context) -> Message:
        try:
            await self.node.before(method.__name__, request)
            return await method(self, request)
        except SmqError as e:
            context.set_trailing_metadata(trailing_metadata_of(e))
            await context.abort(status_of(e.code), e.message)
            raise AssertionError("abort raises") from e

    return wrapped


class _Agent(AgentServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @call
    async def StartPublishSession(self, request: pb.StartPublishSessionRequest) -> Message:
        cluster = self.node.cluster
        count = len(cluster.topics.get(request.topic, ()))
        if not count:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {request.topic!r}")

        def change() -> Message:
            cluster.next_producer_id += 1
            return pb.StartPublishSessionResponse(
                producer_id=cluster.next_producer_id, partition_count=count, batch_bytes_max=BATCH_BYTES_MAX
            )

        return cluster.once(request.request_id, "producer id", change)

    async def SubscribeRecord(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # stubs say iterator
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no client of ours subscribes")

    @call
    async def ClosePublishSession(self, request: pb.ClosePublishSessionRequest) -> Message:
        return pb.ClosePublishSessionResponse()

    async def PublishRecord(  # type: ignore[override]  # the stubs say iterator
        self, requests: AsyncIterator[pb.PublishRecordRequest], context: Context
    ) -> None:
        topic, answers, writing = "", set(), asyncio.Lock()  # gRPC takes one message of a stream at a time
        async for request in requests:
            topic = request.topic or topic
            self.node.published.append(request)
            task = asyncio.create_task(self._answer(topic, request, context, writing))
            answers.add(task)
            task.add_done_callback(answers.discard)
            await asyncio.sleep(0)  # appended before the next is read
        await asyncio.gather(*answers)

    async def _answer(
        self, topic: str, request: pb.PublishRecordRequest, context: Context, writing: asyncio.Lock
    ) -> None:
        answer = pb.PublishRecordResponse(correlation_id=request.correlation_id, base_offset=-1)
        try:
            await self.node.before("PublishRecord", request)
            log = self.node.cluster.partition(topic, request.partition)
            if log.leader != self.node.number:
                raise self.node.cluster.not_leader(log)
            if len(request.batch) > BATCH_BYTES_MAX:
                raise SmqError(ErrorCode.BATCH_TOO_LARGE, f"{len(request.batch)} bytes")
            stored, answer.duplicate = log.append(request.batch)
            await self._committed(log, stored)
            base = max(stored.base_offset, 0) + log.log_start
            answer.base_offset, answer.last_offset, answer.ts_ns = base, base + stored.header.count - 1, 1
        except SmqError as e:
            answer.error.CopyFrom(detail_from_error(e))
        async with writing:
            await context.write(answer)

    @staticmethod
    async def _committed(log: FakePartition, stored: Stored) -> None:
        log.settle()
        while log.hwm < stored.end:
            await log.changed.wait()
            if stored not in log.stored:
                raise SmqError(ErrorCode.APPEND_LOST, "truncated")


class _Broker(BrokerServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @call
    async def Fetch(self, request: pb.FetchRequest) -> Message:
        self.node.fetches.append(request)
        answer = self._fetched(request)
        if request.max_wait_ms and not any(p.batches or p.HasField("error") for p in answer.partitions):
            logs = [self.node.cluster.partition(p.topic, p.partition) for p in request.partitions]
            waits = [asyncio.create_task(log.changed.wait()) for log in logs]
            try:
                await asyncio.wait(waits, timeout=request.max_wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            answer = self._fetched(request)
        return answer

    def _fetched(self, request: pb.FetchRequest) -> pb.FetchResponse:
        answer, left = pb.FetchResponse(), request.max_bytes or BATCH_BYTES_MAX
        for asked in request.partitions:
            part = answer.partitions.add(topic=asked.topic, partition=asked.partition)
            try:
                left -= self._fill(part, asked, left)
            except SmqError as e:
                part.error.CopyFrom(detail_from_error(e))
        return answer

    def _fill(self, part: pb.FetchedPartition, asked: pb.FetchPartition, left: int) -> int:
        log = self.node.cluster.partition(asked.topic, asked.partition)
        if self.node.number not in log.replicas:
            raise SmqError(ErrorCode.NOT_REPLICA, "no copy here")
        part.log_start, part.hwm, part.lso = log.log_start, log.hwm, log.hwm
        if not log.log_start <= asked.offset <= log.hwm:
            details = ErrorDetails(lo=Offset(log.log_start), hi=Offset(log.hwm))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no offset {asked.offset}", details)
        taken = 0
        for stored in log.stored:
            if asked.offset < stored.end <= log.hwm and (not taken or taken + len(stored.data) <= asked.max_bytes):
                if left - taken <= 0:
                    break
                data = patched_prefix(stored.base_offset, stored.header, log.epoch) + stored.data[16:]
                part.batches.add(base_offset=stored.base_offset, last_offset=stored.end - 1, ts_ns=1, data=data)
                taken += len(data)
        return taken

    @call
    async def ListOffsets(self, request: pb.ListOffsetsRequest) -> Message:
        answer = pb.ListOffsetsResponse()
        for asked in request.partitions:
            listed = answer.offsets.add(topic=asked.topic, partition=asked.partition)
            try:
                self._list(listed, asked)
            except SmqError as e:
                listed.error.CopyFrom(detail_from_error(e))
        return answer

    def _list(self, listed: pb.ListedOffset, asked: pb.ListOffsetsPartition) -> None:
        log = self.node.cluster.partition(asked.topic, asked.partition)
        lo, hi = listed.lo, listed.hi = log.log_start, log.hwm
        kind = pb.OffsetType.Name(asked.offset_type)
        committed = self.node.cluster.commits.get((asked.group, asked.topic, asked.partition), (None, ""))[0]
        wanted = {"RESET_TO_EARLIEST": lo, "RESET_TO_LATEST": hi, "EXACT_TS_NS": hi}.get(kind, asked.offset_value)
        if kind.startswith("RESUME"):
            wanted = committed if committed is not None else (lo if kind == "RESUME_OR_EARLIEST" else hi)
        listed.offset = min(max(wanted, lo), hi)
        listed.clamped = listed.offset != wanted
        is_resumable = kind.startswith("RESUME") and asked.reset_if_gone
        if (kind == "EXACT_OFFSET" and not lo <= wanted < hi) or (
            kind.startswith("RESUME") and listed.clamped and not is_resumable
        ):
            details = ErrorDetails(lo=Offset(lo), hi=Offset(hi))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no record at {wanted}", details)

    @call
    async def GetPartitionRangeInfo(self, request: pb.GetPartitionRangeInfoRequest) -> Message:
        log = self.node.cluster.partition(request.topic, request.partition)
        start, stop = ring_range(PartitionIndex(request.partition))
        return pb.GetPartitionRangeInfoResponse(
            topic=request.topic,
            partition=request.partition,
            range_start=start,
            range_stop=stop,
            log_start=log.log_start,
            hwm=log.hwm,
            lso=log.hwm,
            next_offset=log.end,
            leader=log.leader,
            epoch=log.epoch,
            replicas=log.replicas,
        )

    @call
    async def CommitOffsets(self, request: pb.CommitOffsetsRequest) -> Message:
        def change() -> Message:
            for o in request.offsets:
                self.node.cluster.commits[request.group, o.topic, o.partition] = (o.offset, o.metadata)
            return pb.CommitOffsetsResponse()

        return self.node.cluster.once(request.request_id, "commit", change)

    @call
    async def AssignOffsets(self, request: pb.AssignOffsetsRequest) -> Message:
        return self.node.cluster.assign(request)

    @call
    async def AdvanceHighWaterMark(self, request: pb.AdvanceHighWaterMarkRequest) -> Message:
        end = self.node.cluster.assigned.get((request.topic, request.partition), 0)
        if request.offset > end:
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"assigned are {end}")
        return pb.AdvanceHighWaterMarkResponse(hwm=request.offset)

    @call
    async def FetchOffsets(self, request: pb.FetchOffsetsRequest) -> Message:
        wanted = {(p.topic, p.partition) for p in request.partitions}
        answer = pb.FetchOffsetsResponse()
        for (group, topic, partition), (offset, metadata) in self.node.cluster.commits.items():
            if group == request.group and (not wanted or (topic, partition) in wanted):
                answer.offsets.add(topic=topic, partition=partition, offset=offset, metadata=metadata)
        return answer


class _Admin(AdminServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @call
    async def CreateTopic(self, request: pb.CreateTopicRequest) -> Message:
        cluster = self.node.cluster

        def change() -> Message:
            if request.name in cluster.topics:
                raise SmqError(ErrorCode.TOPIC_EXISTS, f"topic {request.name!r} is there")
            cluster.create(request.name, request.partition_count, start_offset=request.start_offset)
            return pb.CreateTopicResponse(topic_id=b"i" * 16)

        return cluster.once(request.request_id, "create", change)

    @call
    async def DeleteTopic(self, request: pb.DeleteTopicRequest) -> Message:
        def change() -> Message:
            self.node.cluster.partition(request.name, 0)
            del self.node.cluster.topics[request.name]
            return pb.DeleteTopicResponse()

        return self.node.cluster.once(request.request_id, "delete", change)

    @call
    async def AddPartitions(self, request: pb.AddPartitionsRequest) -> Message:
        def change() -> Message:
            partitions = self.node.cluster.topics[request.name]
            partitions += [FakePartition() for _ in range(request.partition_count - len(partitions))]
            return pb.AddPartitionsResponse()

        return self.node.cluster.once(request.request_id, "add partitions", change)

    @call
    async def AlterTopic(self, request: pb.AlterTopicRequest) -> Message:
        return self.node.cluster.once(request.request_id, "alter", pb.AlterTopicResponse)

    @call
    async def SetNodeDrained(self, request: pb.SetNodeDrainedRequest) -> Message:
        def change() -> Message:
            (self.node.cluster.drained.add if request.drained else self.node.cluster.drained.discard)(request.node)
            return pb.SetNodeDrainedResponse()

        return self.node.cluster.once(request.request_id, "drain", change)

    @call
    async def DeleteRecords(self, request: pb.DeleteRecordsRequest) -> Message:
        def change() -> Message:
            log = self.node.cluster.partition(request.topic, request.partition)
            log.log_start = log.hwm if request.before_offset < 0 else request.before_offset
            return pb.DeleteRecordsResponse(log_start=log.log_start)

        return self.node.cluster.once(request.request_id, "delete records", change)

    @call
    async def ListGroups(self, request: pb.ListGroupsRequest) -> Message:
        cluster = self.node.cluster
        groups = [cluster.groups[name].group for name in sorted(cluster.groups)]
        return pb.ListGroupsResponse(groups=groups, offsets_retention_ms=cluster.offsets_retention_ms)

    @call
    async def DescribeGroup(self, request: pb.DescribeGroupRequest) -> Message:
        found = self.node.cluster.groups.get(request.group)
        if found is None:
            raise SmqError(ErrorCode.UNKNOWN_GROUP, f"there is no group {request.group!r}")
        return found

    @call
    async def DeleteGroup(self, request: pb.DeleteGroupRequest) -> Message:
        def change() -> Message:
            if self.node.cluster.groups[request.group].members:
                raise SmqError(ErrorCode.GROUP_NOT_EMPTY, f"group {request.group!r} has members")
            del self.node.cluster.groups[request.group]
            return pb.DeleteGroupResponse()

        return self.node.cluster.once(request.request_id, "delete group", change)

    @call
    async def SetOffsetsRetention(self, request: pb.SetOffsetsRetentionRequest) -> Message:
        def change() -> Message:
            self.node.cluster.offsets_retention_ms = request.retention_ms
            return pb.SetOffsetsRetentionResponse()

        return self.node.cluster.once(request.request_id, "set retention", change)

    @call
    async def DescribeCluster(self, request: pb.DescribeClusterRequest) -> Message:
        cluster = self.node.cluster
        answer = pb.DescribeClusterResponse(cluster_id="fake", raft_leader=1)
        for number, node in cluster.nodes.items():
            answer.nodes.add(
                node=number,
                grpc_address=node.address,
                fenced=not node.is_up,
                drained=number in self.node.cluster.drained,
            )
        for name in request.topics or cluster.topics:
            cluster.partition(name, 0)
            topic = answer.topics.add(name=name, topic_id=b"i" * 16, replication_factor=3)
            for index, log in enumerate(cluster.topics[name]):
                topic.partitions.add(
                    partition=index,
                    leader=log.leader,
                    leader_available=cluster.nodes[log.leader].is_up,
                    epoch=log.epoch,
                    replicas=log.replicas,
                    log_start=log.log_start,
                    hwm=log.hwm,
                    next_offset=log.end,
                )
        return answer

    @call
    async def NodeStatus(self, request: pb.NodeStatusRequest) -> Message:
        digest = "d" if request.with_digest else ""
        answer = pb.NodeStatusResponse(node=self.node.number, is_ready=True, raft_leader=1, digest=digest)
        for name, logs in self.node.cluster.topics.items():
            for index, log in enumerate(logs):
                is_leader = log.leader == self.node.number
                answer.replicas.add(topic=name, partition=index, is_leader=is_leader, hwm=log.hwm, verified_end=log.end)
        return answer


@asynccontextmanager
async def cluster_of(nodes: int = 1, **topics: int) -> AsyncIterator[FakeCluster]:
    """A running cluster with these topics (name=partitions)."""
    cluster = FakeCluster()
    for number in range(1, nodes + 1):
        cluster.nodes[number] = FakeNode(cluster, number)
        await cluster.nodes[number].start()
    for name, count in topics.items():
        cluster.create(name, count)
    try:
        yield cluster
    finally:
        for node in cluster.nodes.values():
            await node.stop()


def bootstrap_of(cluster: FakeCluster) -> list[str]:
    return [node.address for node in cluster.nodes.values()]


def stored_values(cluster: FakeCluster, topic: str) -> dict[int, list[bytes | None]]:
    found: dict[int, list[bytes | None]] = defaultdict(list)
    for index, log in enumerate(cluster.topics[topic]):
        found[index] = log.values()
    return found
