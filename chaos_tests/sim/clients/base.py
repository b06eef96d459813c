"""The base of all clients: their world, their history, and their conduct after an unknown outcome.

Owns the catalogue of partitions, unique values, and the encoding of a value as a record.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_tests.history import Recorder
from chaos_tests.keyed import record_of, values_of
from chaos_tests.sim.clients.pace import Pace
from chaos_tests.sim.rpc import Call, Lost, Script, Sleep, Wait
from smq.raft_state.commands import Command
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, PartitionId, RequestId
from smq.raft_state.topic_config import BatchRules, batch_rules
from smq.records import CRC_START, BatchCorrupt, BatchHeader, NewRecord, check_crc, parse_header
from smq.replication.api import NodeApi, PartitionRange, StoredBatch
from smq.testing.virtual.clock import Scheduler
from smq.testing.virtual.rng import Streams

RpcResult = Any  # the handler's result, SmqError or Lost
Request = Callable[[Any, Callable[[Any], None]], object]  # calls the handler of a node
CORRUPT = -3  # the value of a record in a batch that was served although its CRC fails
DECODED_MAX = 200_000  # remembered batches, by content: a run has a few thousand


@dataclass(slots=True)
class Known:
    """A partition that clients use, and their knowledge of it."""

    topic: str
    index: int
    pid: PartitionId
    replicas: tuple[NodeId, ...] = ()
    leader: NodeId | None = None  # a guess, corrected by NOT_LEADER
    hwm: int = 0  # the highest that any client has learned
    lo: int = 0  # the highest log start that any client has learned
    dropped: bool = False

    @property
    def key(self) -> str:
        return f"{self.topic}/{self.index}"


@dataclass(slots=True)
class World:
    """The world that all clients of one run share."""

    scheduler: Scheduler
    streams: Streams
    recorder: Recorder
    nodes: tuple[NodeId, ...]
    report_violation: Callable[[NodeId, str], None]
    spawn: Callable[[Script], None]  # runs a script beside the caller's
    pace: Pace
    topic_config: tuple[tuple[str, str], ...] = ()  # of topics with records
    partitions: list[Known] = field(default_factory=list)
    externals: list[Known] = field(default_factory=list)  # of external storage
    keys: int = 0  # of the records; 0: they have none
    ledgers: list[Known] = field(default_factory=list)  # written to in transactions only
    mirrored: list[Known] = field(default_factory=list)  # copies of another cluster's
    sources: dict[str, Any] = field(default_factory=dict)  # what they are copies of: see `mirror`
    checkpoints: dict[str, list[Any]] = field(default_factory=dict)  # of apps: see `batch_writer`
    stopped: bool = False
    duplicates: int = 0
    producers_refused: int = 0  # attempts, as one too many
    _next_value: int = 0
    _decoded: dict[bytes, list[int]] = field(default_factory=dict)

    def record(self, value: int, timestamp_ms: int) -> NewRecord:
        """A record with this value; in a run with compaction it has a key, and may be a tombstone."""
        return record_of(value, self.keys, timestamp_ms)

    @property
    def rules(self) -> BatchRules:
        return batch_rules(dict(self.topic_config))

    def values(self, count: int) -> list[int]:
        first = self._next_value
        self._next_value += count
        return list(range(first, first + count))

    def now_ms(self) -> float:
        return self.scheduler.now_ns / 1e6

    def describe(self, node: NodeId, batch: StoredBatch) -> list[Any]:
        """A stored batch in the form of the history. Served rot becomes a value that no producer sends."""
        header = parse_header(batch.data)
        content = bytes(batch.data[CRC_START:])
        values = self._decoded.get(content)
        if values is None:
            if not _is_intact(batch.data, header):
                return [batch.base_offset, batch.ts_ns, [CORRUPT] * (header.last_offset_delta + 1), -1, -1, -1]
            values = values_of(batch.data, header)
            if len(self._decoded) < DECODED_MAX:
                self._decoded[content] = values
        if header.base_offset != batch.base_offset or header.last_offset != batch.last_offset:
            self.report_violation(node, f"a batch at {batch.base_offset} whose header says {header.base_offset}")
        self._check_form(node, batch, header)
        return [batch.base_offset, batch.ts_ns, values, header.producer_id, header.base_sequence, header.producer_epoch]

    def _check_form(self, node: NodeId, batch: StoredBatch, header: BatchHeader) -> None:
        """Every batch is as the topics ask for: no setting changes during a run."""
        rules = self.rules
        if not header.count:
            return  # compaction has left nothing in it
        if rules.codec is not None and header.codec != rules.codec:
            self.report_violation(node, f"the batch at {batch.base_offset} has codec {header.codec}: {rules}")
        if rules.is_append_time and header.max_timestamp != batch.ts_ns // 1_000_000:
            self.report_violation(node, f"the batch at {batch.base_offset} has another time than its append: {rules}")


def _is_intact(data: memoryview, header: BatchHeader) -> bool:
    try:
        check_crc(data, header)
    except BatchCorrupt:
        return False
    return True


class Client:
    """One sequential client. After an unknown outcome it goes on under a new process id."""

    def __init__(self, world: World, name: str, *, think_ms: float = 0) -> None:
        self.world = world
        self.name = name
        self.think_ms = think_ms
        self.rng: Random = world.streams.stream(f"client/{name}")
        self.process = world.recorder.new_process()

    def new_id(self) -> RequestId:
        return RequestId(self.rng.randbytes(16))

    def ok(self, function: str, **fields: Any) -> None:
        self.world.recorder.ok(self.process, function, **fields)
        self.world.pace.took(function)

    def conclude(self, function: str, result: RpcResult, *, unknown: bool, **fields: Any) -> bool:
        """Records the outcome of an operation, with these fields if it is an answer. Whether it is one."""
        if not isinstance(result, SmqError | Lost):
            self.ok(function, **fields)
            return True
        if unknown:
            self.conclude_unknown(function)
        else:
            self.fail(function, result)
        return False

    def conclude_unknown(self, function: str, **fields: Any) -> None:
        self.world.recorder.info(self.process, function, **fields)
        self.process = self.world.recorder.new_process()

    def fail(self, function: str, error: SmqError | Lost) -> None:
        """Records a definite failure, such as a refused connection."""
        if isinstance(error, SmqError):
            details = error.details
            lo, hi = details.lo, details.hi
            self.world.recorder.fail(self.process, function, err=error.code.name, lo=lo, hi=hi)
        else:
            self.world.recorder.fail(self.process, function, err=error.value)

    def any_node(self) -> NodeId:
        return self.rng.choice(self.world.nodes)

    def any_partition(self) -> Known | None:
        live = [known for known in self.world.partitions if not known.dropped]
        return self.rng.choice(live) if live else None

    def think(self) -> Wait | Sleep:
        return self.world.pace.think(self.think_ms)

    def request(
        self,
        call: Request,
        *,
        deadline_ms: float,
        attempt_ms: float,
        repeat_unknown: bool = True,
    ) -> Generator[Sleep | Call, Any, tuple[RpcResult, bool]]:
        """Tries any node until the deadline: (last result, whether any attempt may have taken effect)."""
        until = self.world.now_ms() + deadline_ms
        unknown = False
        while True:
            result = yield Call(self.any_node(), call, attempt_ms * 1.5, attempt_ms)
            if not isinstance(result, SmqError | Lost):
                return result, unknown
            if is_unknown(result):
                unknown = True
            if self.world.now_ms() > until or not may_retry(result) or (unknown and not repeat_unknown):
                return result, unknown
            yield Sleep(self.rng.uniform(10, 120))


def proposal(command: Command, ms: float) -> Request:
    """The request to propose a command, for which a node has this long."""
    return lambda api, done: api.propose(command, int(ms), done)


def range_of(known: Known, ms: float) -> Request:
    """The request for the exact range of a partition."""
    return lambda api, done: request_range(api, known.topic, known.index, ms, done)


def is_unknown(result: SmqError | Lost) -> bool:
    return result is Lost.TIMED_OUT if isinstance(result, Lost) else not result.code.is_definite


def may_retry(result: SmqError | Lost) -> bool:
    return isinstance(result, Lost) or result.code.is_retriable


def request_range(
    api: NodeApi, topic: str, index: int, timeout_ms: float, done: Callable[[PartitionRange | SmqError], None]
) -> None:
    """The exact range of one partition."""

    def unpack(found: list[PartitionRange | SmqError] | SmqError) -> None:
        done(found if isinstance(found, SmqError) else found[0])

    api.partition_ranges([(topic, index)], int(timeout_ms), unpack)


class LoopingClient(Client, ABC):
    def run(self) -> Script:
        """Thinks and acts, again and again, until the storm is over."""
        while not self.world.stopped:
            yield self.think()
            yield from self.act()

    @abstractmethod
    def act(self) -> Script:
        """One turn."""


class PartitionClient(LoopingClient):
    def act(self) -> Script:
        """With a partition that is there."""
        partition = self.any_partition()
        if partition is not None:
            yield from self.use(partition)

    @abstractmethod
    def use(self, partition: Known) -> Script: ...
