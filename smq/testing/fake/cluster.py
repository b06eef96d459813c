"""The fake cluster that a test holds in its hand: shared state, nodes, and the faults to inject.

Owns topics, groups and replies of the whole cluster, and each node's gRPC server. Every node answers from the same
state. A test moves leaders, stops nodes, holds commits back, or hooks into a node's answers: faults that a real cluster
cannot be made to show on command. The services of this package read and change it; `runner` starts it.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from smq.clients.errors import status_of, trailing_metadata_of
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NO_NODE, NodeId
from smq.records import NewRecord, encode_batch
from smq.testing.fake.log import FakePartition

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Context = Any  # grpc.aio.ServicerContext is generic over message types that a fake need not name
Later = Awaitable[object] | None  # a hook may return something to wait for
BATCH_BYTES_MAX: Final = 1 << 20


class FakeCluster:
    """State that all nodes share. It belongs to the event loop in which it was made.

    `append`, `create`, `grow`, `delete` and `call` may be used from other threads too.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, FakeNode] = {}
        self.topics: dict[str, list[FakePartition]] = {}
        self.topic_ids: dict[str, bytes] = {}  # a topic that is deleted and created again gets another one
        self.commits: dict[tuple[str, str, int], tuple[int, str]] = {}  # by group, topic and partition
        self.replies: dict[bytes, Message | SmqError] = {}
        self.applied: list[str] = []  # names of the changes that took effect, in order
        self.next_producer_id = 100
        self.external: set[str] = set()  # topics of external storage
        self.assigned: dict[tuple[str, int], int] = {}  # their next offsets
        self.drained: set[int] = set()
        self.fenced: set[int] = set()  # nodes reported as fenced although they are up
        self.groups: dict[str, pb.DescribeGroupResponse] = {}
        self.users: dict[str, pb.UserInfo] = {}
        self.acls: list[pb.Acl] = []
        self.quotas: list[pb.Quota] = []
        self.config: dict[str, str] = {}  # only the settings that are set: the fake knows no defaults
        self.fetch_bytes_max = BATCH_BYTES_MAX  # per partition of an answer: a small one makes a read take several
        self.hidden: set[int] = set()  # base offsets of batches without a record to read
        self._created = 0
        self._loop = asyncio.get_running_loop()

    @property
    def servers(self) -> str:
        """All addresses, as clients take them."""
        return ",".join(node.address for node in self.nodes.values())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the cluster's loop and returns its result; for threads that have no loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def stop(self) -> None:
        """Stops every node."""
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))

    # ------------------------------------------------------------------------------------------------- topics
    def partition(self, topic: str, partition: int) -> FakePartition:
        """SmqError if it does not exist."""
        partitions = self.topics.get(topic)
        if partitions is None:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
        if not 0 <= partition < len(partitions):
            raise SmqError(ErrorCode.UNKNOWN_PARTITION, f"{topic!r} has {len(partitions)} partitions")
        return partitions[partition]

    def create(self, name: str, count: int, *, start_offset: int = 0, is_external: bool = False) -> None:
        """A topic with `count` partitions, which the nodes lead in turn; with external storage none does."""
        self._created += 1
        if is_external:
            self.external.add(name)
        self.topic_ids[name] = self._created.to_bytes(16, "big")
        self.topics[name] = []
        self.grow(name, count, start_offset=start_offset)

    def grow(self, name: str, count: int, *, start_offset: int = 0) -> None:
        """Adds partitions until the topic has `count`."""
        nodes = [] if name in self.external else sorted(self.nodes)
        partitions = self.topics[name]
        for index in range(len(partitions), count):
            leader = nodes[index % len(nodes)] if nodes else NO_NODE
            partition = FakePartition(leader=leader, replicas=tuple(nodes), log_start=start_offset, hwm=start_offset)
            partitions.append(partition)

    def delete(self, name: str) -> None:
        del self.topics[name]
        del self.topic_ids[name]
        self.external.discard(name)

    def append(self, topic: str, partition: int, records: Sequence[NewRecord], codec: str = "none") -> None:
        """Appends one batch, as a producer without an id would, and commits it unless the partition is held."""
        log = self.partition(topic, partition)
        log.append(encode_batch(records, codec=codec))
        if not log.is_held:
            log.commit()
        self._loop.call_soon_threadsafe(log.wake)

    def stored_values(self, topic: str) -> dict[int, list[bytes | None]]:
        """The committed values of each partition."""
        return {index: log.values() for index, log in enumerate(self.topics[topic])}

    # ------------------------------------------------------------------------------------------------ changes
    def once(self, request_id: bytes, name: str, change: Callable[[], M]) -> M:
        """Makes a change once per request id. A repeated request gets the first reply."""
        if request_id not in self.replies:
            try:
                self.replies[request_id] = change()
                self.applied.append(name)
            except SmqError as e:
                self.replies[request_id] = e
        found: Any = self.replies[request_id]
        if isinstance(found, SmqError):
            raise found
        reply: M = found
        return reply

    def assign(self, request: pb.Assignment) -> pb.Assigned:
        """Assigns offsets of external storage."""
        key = (request.topic, request.partition)

        def change() -> pb.Assigned:
            base = self.assigned.get(key, 0)
            self.assigned[key] = base + request.count
            return pb.Assigned(base_offset=base, last_offset=base + request.count - 1)

        return self.once(request.request_id, "assign", change)

    def not_leader(self, log: FakePartition) -> SmqError:
        """The error of a node that does not lead the partition, with the address of the leader."""
        address = self.nodes[log.leader].address
        return SmqError(
            ErrorCode.NOT_LEADER, "not here", ErrorDetails(leader=NodeId(log.leader), leader_address=address)
        )


class FakeNode:
    """One node's server, and a test's hooks into it.

    `hook(name, request)` runs before every answer, `on_fetch` and `on_list` run on the answer for each partition before
    it leaves. Each may raise SmqError, change the world or the answer, and return an awaitable that is waited for.
    """

    def __init__(
        self, cluster: FakeCluster, number: int, add_services: "Callable[[FakeNode, grpc.aio.Server], None]"
    ) -> None:
        self.cluster = cluster
        self.number = number
        self.address = ""
        self.seen: list[str] = []  # names of all calls
        self.published: list[pb.PublishRecordRequest] = []
        self.fetches: list[pb.FetchRequest] = []
        self.pages: list[pb.SearchRecordsResponse] = []  # answers of SearchRecords
        self.hook: Callable[[str, Any], Later] = lambda name, request: None
        self.on_fetch: Callable[[pb.FetchedPartition], Later] = lambda part: None
        self.on_list: Callable[[pb.ListedOffset], Later] = lambda listed: None
        self._add_services = add_services
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._add_services(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every connection, as a kill does. A hook that returns this never gives its answer."""
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.shield(asyncio.ensure_future(server.stop(None)))

    async def restart(self) -> None:
        """Starts again on the old address."""
        await self.start(int(self.address.rpartition(":")[2]))

    @property
    def is_up(self) -> bool:
        return self._server is not None

    async def before(self, name: str, request: Any) -> None:
        """Notes the call and runs the test's hook."""
        self.seen.append(name)
        await finished(self.hook(name, request))


async def finished(result: Later) -> None:
    """Waits for the result of a hook if it is awaitable."""
    if inspect.isawaitable(result):
        await result


def answering(method: Callable[[Any, Any], Coroutine[Any, Any, Message]]) -> Any:
    """Makes a unary method of a servicer: an SmqError becomes a status with the detail in its trailers."""

    async def wrapped(self: Any, request: Any, context: Context) -> Message:
        try:
            await self.node.before(method.__name__, request)
            return await method(self, request)
        except SmqError as e:
            await context.abort(status_of(e.code), str(e), trailing_metadata_of(e))
            raise AssertionError("abort raises") from e

    return wrapped
