"""The clients of a chaos run: threads that produce, read, ask and commit, each operation in the history.

Owns the outcome rules: ok if the server said so; fail if every attempt definitely failed; otherwise unknown, and the
process id is not used again. Values are unique within the run. Clients use raw gRPC (one attempt at one node), so that
a bug of smq.clients cannot hide one of the server; `load.kafka` adds real Kafka clients.
"""

import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TextIO

from chaos_tests.history import Event, Recorder
from chaos_tests.keyed import GONE, record_of, values_of
from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import Tls
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import check_crc, encode_batch, parse_header
from smq.testing.node_client import RawNode, Unanswered

ATTEMPT_MS: Final = 700  # a client that waited longer for a dead node would hide the speed of the others
SEND_S: Final = 12.0  # after that a send's outcome is unknown
RECORDS_MAX: Final = 5
FETCH_BYTES: Final = 16 << 10
FETCH_WAIT_MS: Final = 100
SEEK_PROBABILITY: Final = 0.05
JOIN_S: Final = SEND_S + 20


class SharedRecorder(Recorder):
    """A Recorder for many threads."""

    def __init__(self, sink: TextIO | None = None) -> None:
        super().__init__(time.monotonic_ns, sink)
        self._lock = threading.Lock()

    def new_process(self) -> int:
        with self._lock:
            return super().new_process()

    def add(self, process: int, kind: str, function: str, fields: Event) -> Event:
        with self._lock:
            return super().add(process, kind, function, fields)


@dataclass(slots=True)
class Partition:
    """The clients' knowledge of a partition."""

    topic: str
    index: int
    leader: int = 0  # a guess, corrected by NOT_LEADER
    hwm: int = 0  # the highest in any answer
    keys: int = 0  # different keys of its records; 0: no record has one

    @property
    def key(self) -> str:
        return f"{self.topic}/{self.index}"


class Ack(NamedTuple):
    """One success of acks=all."""

    at_ns: int
    key: str
    node: int  # that answered; 0 if the client does not report it


@dataclass(slots=True)
class World:
    """Shared by all clients of one run. Clients ask `nodes` directly, at their own addresses."""

    recorder: SharedRecorder
    nodes: Mapping[int, RawNode]
    kafka: str  # bootstrap servers; "" without a Kafka port
    tls: Tls | None = field(default=None, kw_only=True)
    partitions: list[Partition]
    rng: random.Random
    external: list[Partition] = field(default_factory=list)  # of a topic with storage=external
    kept: list[Partition] = field(default_factory=list)  # of topics that keep only some of their records
    stopping: threading.Event = field(default_factory=threading.Event)
    acks: list[Ack] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the harness's own threads: they make a run invalid
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_value: int = 0

    def values(self, count: int) -> list[int]:
        with self._lock:
            first = self._next_value
            self._next_value += count
        return list(range(first, first + count))


class Client(ABC):
    """A thread with a random stream of its own. Subclasses do one operation in `step`."""

    think_s = 0.06  # the mean: the machine should be busy with faults, not with clients

    def __init__(self, world: World, name: str, partitions: Sequence[Partition] = ()) -> None:
        self.world = world
        self.name = name
        self.partitions = partitions or world.partitions
        self.rng = random.Random(f"{name}/{world.rng.random()}")
        self.process = world.recorder.new_process()
        self.stopping = world.stopping
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def step(self) -> None:
        """One operation."""

    def close(self) -> None:  # noqa: B027 - most clients have nothing to close
        """Called after the last step, in the client's own thread."""

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.step()
                time.sleep(self.rng.expovariate(1.0) * self.think_s)
        except Exception as e:  # noqa: BLE001 - recorded, and the run is invalid: a broken harness proves nothing
            self.world.failures.append(f"{self.name}: {e!r}")
        finally:
            self.close()

    # ------------------------------------------------------------------------------------------- calls
    def any_node(self) -> int:
        return self.rng.choice(list(self.world.nodes))

    def any_partition(self) -> Partition:
        return self.rng.choice(self.partitions)

    def ask(self, node: int, call: Callable[[RawNode], Any]) -> Any:
        """The answer, SmqError or Unanswered, as a value."""
        try:
            return call(self.world.nodes[node])
        except (SmqError, Unanswered) as error:
            return error

    def insist(self, function: str, call: Callable[[RawNode], Any]) -> Any:
        """Asks any node, again and again: the answer; None, and the operation is recorded, if there was none."""
        deadline, unknown = time.monotonic() + SEND_S, False
        while True:
            result = self.ask(self.any_node(), call)
            if not isinstance(result, Exception):
                return result
            unknown = unknown or is_unknown(result)
            if not may_retry(result) or time.monotonic() > deadline:
                self.conclude(function, result, unknown=unknown)
                return None
            time.sleep(self.rng.uniform(0.02, 0.1))

    def conclude(self, function: str, result: Exception, *, unknown: bool = False) -> None:
        """Records an operation that did not succeed."""
        if unknown or is_unknown(result):
            self.world.recorder.info(self.process, function, err=str(result)[:200])
            self.process = self.world.recorder.new_process()
        else:
            assert isinstance(result, SmqError)
            details = result.details
            self.world.recorder.fail(self.process, function, err=result.code.name, lo=details.lo, hi=details.hi)


def is_unknown(result: Exception) -> bool:
    return not (isinstance(result, SmqError) and result.code.is_definite)


def may_retry(result: Exception) -> bool:
    return not isinstance(result, SmqError) or result.code.is_retriable


# ------------------------------------------------------------------------------------------------ producers
class Producer(Client):
    """Idempotent, acks=all: sends the same bytes until they are acknowledged. Takes a new producer id after an unknown
    outcome."""

    acks: pb.Acks.ValueType = pb.ACKS_ALL
    idempotent = True

    def __init__(self, world: World, name: str, partitions: Sequence[Partition] = ()) -> None:
        super().__init__(world, name, partitions)
        self._session: pb.StartPublishSessionResponse | None = None
        self._sequences: dict[str, int] = {}

    def step(self) -> None:
        partition = self.any_partition()
        if self.idempotent and self._session is None and not self._open_session(partition.topic):
            return
        values = self.world.values(self.rng.randint(1, RECORDS_MAX))
        now_ms = time.time_ns() // 1_000_000
        records = [record_of(value, partition.keys, now_ms) for value in values]
        batch = encode_batch(records, **self._identity(partition))
        requested = {"k": partition.key, "v": values, "acks": -1 if self.acks == pb.ACKS_ALL else 1}
        self.world.recorder.invoke(self.process, "send", **requested, idem=self.idempotent)
        result, unknown, node = self._attempts(partition, batch)
        if isinstance(result, Exception):
            self.conclude("send", result, unknown=unknown)
            self._session = None
            return
        self.world.recorder.ok(self.process, "send", o=result.base_offset, ts=result.ts_ns, dup=result.duplicate)
        self._sequences[partition.key] = self._sequences.get(partition.key, 0) + len(values)
        if self.acks == pb.ACKS_ALL:
            self.world.acks.append(Ack(time.monotonic_ns(), partition.key, node))
            partition.hwm = max(partition.hwm, result.last_offset + 1)

    def _attempts(self, partition: Partition, batch: bytes) -> tuple[Any, bool, int]:
        """(the answer or the last error, whether an attempt's outcome is unknown, the node asked last)."""
        deadline = time.monotonic() + SEND_S
        unknown = False

        def publish(node: RawNode) -> Any:
            return node.publish_batch(
                partition.topic,
                partition.index,
                batch,
                acks=self.acks,
                timeout_ms=ATTEMPT_MS,
                deadline_s=ATTEMPT_MS / 1000 * 1.3,
            )

        while True:
            node = partition.leader if partition.leader and self.rng.random() < 0.95 else self.any_node()
            result = self.ask(node, publish)
            if not isinstance(result, Exception):
                partition.leader = node
                return result, unknown, node
            partition.leader = 0
            if isinstance(result, SmqError) and result.code is ErrorCode.NOT_LEADER:
                partition.leader = result.details.leader or 0
            unknown = unknown or is_unknown(result)
            # The end of a run leaves no send undecided: the last attempts continue until the deadline.
            if (unknown and not self.idempotent) or not may_retry(result) or time.monotonic() > deadline:
                return result, unknown, node
            time.sleep(self.rng.uniform(0.01, 0.08))

    def _open_session(self, topic: str) -> bool:
        found = self.ask(self.any_node(), lambda node: node.start_session(topic))
        if isinstance(found, Exception):
            return False
        self._session = found
        self._sequences = {}
        return True

    def _identity(self, partition: Partition) -> dict[str, Any]:
        if self._session is None:
            return {}
        return {
            "producer_id": self._session.producer_id,
            "producer_epoch": self._session.producer_epoch,
            "base_sequence": self._sequences.get(partition.key, 0),
        }


class PlainProducer(Producer):
    """acks=all without a producer id: retries only after a definite failure."""

    idempotent = False
    think_s = 0.1


class LeaderProducer(Producer):
    """acks=1: may lose records, but must not disturb the producers with acks=all."""

    acks = pb.ACKS_LEADER
    idempotent = False
    think_s = 0.15


# -------------------------------------------------------------------------------------------------- readers
class Reader(Client):
    """Reads from any replica, in order, and seeks back now and then."""

    think_s = 0.1

    def __init__(self, world: World, name: str, partitions: Sequence[Partition] = ()) -> None:
        super().__init__(world, name, partitions)
        self._positions: dict[str, int] = {}

    def step(self) -> None:
        partition = self.any_partition()
        position = self._positions.get(partition.key, 0)
        if self.rng.random() < SEEK_PROBABILITY:
            position = self.rng.randint(0, max(0, position))
        self._positions[partition.key] = self.poll(partition, self.any_node(), position)

    def poll(self, partition: Partition, node: int, position: int, *, final: bool = False) -> int:
        """One poll; returns the next position."""
        requested = {"k": partition.key, "o": position, "n": node, **({"final": True} if final else {})}
        wanted = pb.FetchPartition(
            topic=partition.topic,
            partition=partition.index,
            offset=position,
            max_bytes=0 if final else FETCH_BYTES,
        )
        request = pb.FetchRequest(partitions=[wanted], max_wait_ms=0 if final else FETCH_WAIT_MS)
        self.world.recorder.invoke(self.process, "poll", **requested)
        result = self.ask(node, lambda raw: raw.fetch_once(request, ATTEMPT_MS / 1000))
        if isinstance(result, Exception):
            self.conclude("poll", result)
            if isinstance(result, SmqError) and result.code is ErrorCode.OFFSET_OUT_OF_RANGE:
                return max(position, result.details.lo or 0)
            return position
        shown = [_shown(batch) for batch in result.batches]
        self.world.recorder.ok(self.process, "poll", b=shown, lo=result.log_start, hwm=result.hwm)
        partition.hwm = max(partition.hwm, result.hwm)
        return result.batches[-1].last_offset + 1 if result.batches else position


def _shown(batch: pb.Batch) -> list[Any]:
    """A batch in the form of the history."""
    if not batch.data:  # compaction has left nothing in it
        return [batch.base_offset, batch.ts_ns, [GONE] * (batch.last_offset + 1 - batch.base_offset), -1, -1, -1]
    header = parse_header(batch.data)
    check_crc(batch.data, header)
    assert (header.base_offset, header.last_offset) == (batch.base_offset, batch.last_offset)
    values = values_of(batch.data, header)
    return [batch.base_offset, batch.ts_ns, values, header.producer_id, header.base_sequence, header.producer_epoch]


class RangeReader(Client):
    """Asks any node for the linearizable range of a partition."""

    think_s = 0.15

    def step(self) -> None:
        self.ask_range(self.any_partition())

    def ask_range(self, partition: Partition) -> pb.GetPartitionRangeInfoResponse | None:
        node = self.any_node()
        # One attempt, on a real clock: on a very busy machine it may fail although the cluster is healthy.
        self.world.recorder.invoke(self.process, "hwm", k=partition.key, n=node, may_fail=True)
        request = pb.GetPartitionRangeInfoRequest(
            topic=partition.topic, partition=partition.index, timeout_ms=ATTEMPT_MS
        )
        result = self.ask(node, lambda raw: raw.call(raw.broker.GetPartitionRangeInfo, request, ATTEMPT_MS / 1000 + 1))
        if isinstance(result, Exception):
            self.conclude("hwm", result)
            return None
        found = {"lo": result.log_start, "hwm": result.hwm, "next": result.next_offset, "epoch": result.epoch}
        self.world.recorder.ok(self.process, "hwm", **found)
        partition.hwm = max(partition.hwm, result.hwm)
        answer: pb.GetPartitionRangeInfoResponse = result
        return answer


class GroupMember(Client):
    """Commits and fetches the offsets of a shared group; each commit carries a tag of its own."""

    think_s = 0.15

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.group = world.partitions[0].topic  # unique to the run, like the topic
        self._count = 0

    def step(self) -> None:
        partition = self.any_partition()
        if self.rng.random() < 0.4:
            self._commit(partition)
        else:
            self.fetch(partition)

    def _commit(self, partition: Partition) -> None:
        self._count += 1
        tag, offset = f"{self.name}-{self._count}", self.rng.randint(0, partition.hwm)
        item = pb.PartitionOffset(topic=partition.topic, partition=partition.index, offset=offset, metadata=tag)
        request = pb.CommitOffsetsRequest(
            group=self.group, offsets=[item], request_id=secrets.token_bytes(16), timeout_ms=ATTEMPT_MS
        )
        self.world.recorder.invoke(self.process, "commit", g=self.group, k=partition.key, o=offset, tag=tag)

        def commit(raw: RawNode) -> Any:
            return raw.change_group(lambda at: at.call(at.broker.CommitOffsets, request, ATTEMPT_MS / 1000 + 1))

        if self.insist("commit", commit) is not None:
            self.world.recorder.ok(self.process, "commit")

    def fetch(self, partition: Partition) -> int | None:
        """The committed offset, -1 if there is none; None if no node reported it."""
        node = self.any_node()
        wanted = pb.TopicPartition(topic=partition.topic, partition=partition.index)
        request = pb.FetchOffsetsRequest(group=self.group, partitions=[wanted], timeout_ms=ATTEMPT_MS)
        # One attempt, as for the range above.
        self.world.recorder.invoke(self.process, "fetch", g=self.group, k=partition.key, n=node, may_fail=True)
        result = self.ask(node, lambda raw: raw.call(raw.broker.FetchOffsets, request, ATTEMPT_MS / 1000 + 1))
        if isinstance(result, SmqError) and result.code is ErrorCode.UNKNOWN_GROUP:
            offset, tag = -1, ""
        elif isinstance(result, Exception):
            self.conclude("fetch", result)
            return None
        else:
            found = next(iter(result.offsets), None)
            offset, tag = (found.offset, found.metadata) if found is not None else (-1, "")
        self.world.recorder.ok(self.process, "fetch", o=offset, tag=tag)
        return offset


class Assigner(Client):
    """Assigns offsets without records; retries with the same request id until it gets its range."""

    think_s = 0.15

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._known_next: dict[str, int] = {}

    def step(self) -> None:
        partition = self.rng.choice(self.world.external)
        count = self.rng.randint(1, 10)
        request_id, not_before = secrets.token_bytes(16), self._known_next.get(partition.key, 0)

        def assign(raw: RawNode) -> pb.Assigned:
            return raw.assign_offsets(
                partition.topic,
                partition.index,
                count,
                request_id=request_id,
                not_before=not_before,
                timeout_ms=ATTEMPT_MS,
                deadline_s=ATTEMPT_MS / 1000 + 1,
            )

        self.world.recorder.invoke(self.process, "assign", k=partition.key, c=count)
        result = self.insist("assign", assign)
        if result is not None:
            self.world.recorder.ok(self.process, "assign", o=result.base_offset)
            self._known_next[partition.key] = result.last_offset + 1


# --------------------------------------------------------------------------------------------------- all of it
def grpc_clients(world: World) -> list[Client]:
    """The mix of clients in every run."""
    return [
        *(Producer(world, f"idempotent-{i}") for i in range(3)),
        PlainProducer(world, "plain-0"),
        LeaderProducer(world, "leader-0"),
        *(Reader(world, f"reader-{i}") for i in range(2)),
        RangeReader(world, "range-0"),
        *(GroupMember(world, f"member-{i}") for i in range(2)),
        *(Assigner(world, f"assigner-{i}") for i in range(2 if world.external else 0)),
    ]


def stop(world: World, clients: list[Client]) -> None:
    """Ends every client after its current operation."""
    world.stopping.set()
    join(world, clients)


def join(world: World, clients: list[Client]) -> None:
    """Waits for stopping clients to end."""
    for client in clients:
        client.thread.join(JOIN_S)
        if client.thread.is_alive():
            world.failures.append(f"{client.name} does not end")
