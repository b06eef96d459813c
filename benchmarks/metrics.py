"""What the metrics cost: processor time per batch, with and without what they count, in one process.

Owns the list of what is taken out, and the comparison. Two runs of a whole cluster differ by more than the metrics
cost. So real nodes (Kafka port, disk, TCP, the loop of production) are changed while they run: short slices with and
without the instruments take turns, and each pair gives one ratio. The code objects of both sides stay the same, and
keep what the interpreter has learned of them. A node without followers is the worst case: one that has some does more
for each batch and counts no more. So three nodes that replicate are measured, too, all their processor time together.
"""

import asyncio
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Final, Self

import uvloop

from benchmarks.report import Report
from chaos_tests.sim.replacement import function_of
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import format_address
from smq.coordinator.kafka.api_keys import ApiKey
from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch
from smq.replication.monitoring.measures import Series
from smq.testing.kafka_client import RawKafka
from smq.testing.loops import in_thread
from smq.testing.served import served_node


def _nothing(*_arguments: object) -> None:
    """In place of a method that counts or times."""


def _forgotten(series: Series) -> None:
    series.later.clear()


# The instruments, and the methods that only feed them. The readings of the clock and the additions in the middle of
# other work stay on both sides.
COUNTED: Final[tuple[tuple[str, Callable[..., None]], ...]] = (
    ("smq.replication.monitoring.measures:Counter.add", _nothing),
    ("smq.replication.monitoring.measures:Series.observe", _nothing),
    ("smq.replication.monitoring.measures:Series.fold", _forgotten),
    ("smq.replication.monitoring.measures:Histogram.observe", _nothing),
    ("smq.replication.storage.disk:NodeLogDisk._measure", _nothing),
    ("smq.replication.commands.proposer:Proposer._count", _nothing),
)
PAIRS_OF_WARM_UP: Final = 5
WARM_UP: Final = 60  # batches at the beginning of a slice, not measured
WINDOW: Final = 20  # requests in flight
Z_95: Final = 1.96


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    nodes: int
    records: int
    value_bytes: int
    batches: int  # of a slice


SHAPES: Final = (
    _Shape("one node, batches of one record of 100 bytes", 1, 1, 100, 400),
    _Shape("one node, batches of 150 records of 100 bytes", 1, 150, 100, 400),
    _Shape("three nodes, batches of one record of 100 bytes", 3, 1, 100, 400),
    _Shape("three nodes, batches of 150 records of 100 bytes", 3, 150, 100, 400),
)
TOPIC: Final = "measured"


def measure(report: Report, *, pairs: int) -> None:
    for shape in SHAPES:
        with (
            tempfile.TemporaryDirectory(prefix="smq-bench-") as directory,
            in_thread(_leader(Path(directory), shape.nodes), uvloop.new_event_loop) as address,
        ):
            with _Producer(address, shape) as producer:
                for _ in range(PAIRS_OF_WARM_UP):
                    producer.pair()
                samples = [producer.pair() for _ in range(pairs)]
            _report(report, shape.name, samples)


@asynccontextmanager
async def _leader(directory: Path, nodes: int) -> AsyncIterator[str]:
    """Runs a cluster in this process. Yields the Kafka address of the node that leads the topic's one partition."""
    ids = [NodeId(number) for number in range(1, nodes + 1)]
    peers = {node: ("127.0.0.1", port) for node, port in zip(ids, free_ports(nodes), strict=True)}
    async with AsyncExitStack() as stack:
        starts = [
            served_node(directory / str(node), node_id=node, peers=peers, tuning={}, kafka_address=("127.0.0.1", 0))
            for node in ids
        ]
        running = await asyncio.gather(*map(stack.enter_async_context, starts))
        await running[0].create(TOPIC)
        described = await running[0].admin.DescribeCluster(pb.DescribeClusterRequest(topics=[TOPIC], linearizable=True))
        address = running[ids.index(described.topics[0].partitions[0].leader)].server.kafka_address
        assert address is not None
        yield format_address(address)


class _Producer:
    """Sends one batch again and again, from a process of its own: in this one it would compete with the nodes' threads
    for the lock of the interpreter."""

    def __init__(self, address: str, shape: _Shape) -> None:
        self._batches = shape.batches
        self._rng = random.Random(1)
        self._with, self._without = codes()
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_produce, args=(theirs, address, shape), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        exchange(self._with)
        self._pipe.send(0)
        self._process.join()

    def pair(self) -> tuple[float, float]:
        """CPU seconds per batch with and without, in a random order: what drifts hits both sides equally."""
        if self._rng.random() < 0.5:
            return self.slice(self._with), self.slice(self._without)
        without = self.slice(self._without)
        return self.slice(self._with), without

    def slice(self, code: Sequence[CodeType]) -> float:
        exchange(code)
        self._send(WARM_UP)
        before = _nodes_cpu_s()
        self._send(self._batches)
        return (_nodes_cpu_s() - before) / self._batches

    def _send(self, count: int) -> None:
        self._pipe.send(count)
        self._pipe.recv()


def codes() -> tuple[list[CodeType], list[CodeType]]:
    """With what is counted, and without."""
    return [function_of(target).__code__ for target, _ in COUNTED], [by.__code__ for _, by in COUNTED]


def exchange(code: Sequence[CodeType]) -> None:
    for (target, _), own in zip(COUNTED, code, strict=True):
        function_of(target).__code__ = own


def _produce(pipe: Connection, address: str, shape: _Shape) -> None:
    """In its own process: for each number that the pipe gives, as many batches; until it gives zero."""
    batch = encode_batch(NewRecord(None, b"v" * shape.value_bytes, 1_000) for _ in range(shape.records))
    data = [{"name": TOPIC, "partition_data": [{"index": 0, "records": [batch]}]}]
    kafka = RawKafka(address)
    while count := pipe.recv():
        for _ in range(0, count, WINDOW):
            kafka.send(ApiKey.PRODUCE, 9, times=WINDOW, acks=-1, timeout_ms=10_000, topic_data=data)
            for _ in range(WINDOW):
                kafka.receive_frame()
        pipe.send(None)
    kafka.close()


def _nodes_cpu_s() -> float:
    return time.process_time() - time.thread_time()


def _report(report: Report, name: str, samples: Sequence[tuple[float, float]]) -> None:
    """The median of the pairs' ratios, and the ranks between which it lies with 95 %: a pause of the disk or of the
    garbage collector in one slice moves neither."""
    ratios = sorted(100 * (counted / plain - 1) for counted, plain in samples)
    middle, off = (len(ratios) - 1) / 2, Z_95 * math.sqrt(len(ratios)) / 2
    low, share, high = (
        ratios[max(0, math.floor(middle - off))],
        statistics.median(ratios),
        ratios[math.ceil(middle + off)],
    )
    with_us, without_us = (1e6 * statistics.median(side) for side in zip(*samples, strict=True))
    least_with_us, least_without_us = (1e6 * statistics.quantiles(side, n=10)[0] for side in zip(*samples, strict=True))
    value = (
        f"{share:.2f} % (95 %: {low:.2f} to {high:.2f}); {without_us:.1f} -> {with_us:.1f} us of CPU per batch, in the"
        f" least disturbed tenth {least_without_us:.1f} -> {least_with_us:.1f}"
    )
    report.add(
        f"metrics, {name}",
        value,
        percent=share,
        percent_low=low,
        percent_high=high,
        with_us=with_us,
        without_us=without_us,
        least_with_us=least_with_us,
        least_without_us=least_without_us,
        pairs=len(samples),
    )
