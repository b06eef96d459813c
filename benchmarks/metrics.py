"""What the metrics cost: processor time per batch of one node, with and without what they count, in one process.

Owns the list of what is taken out, and the comparison. Two runs of a whole cluster differ by more than the metrics
cost. So one real node (its Kafka port, its disk) is changed while it runs: short slices with and without take turns,
and each pair gives one ratio. Both sides are compiled again for each slice, so that the interpreter's caches are as
cold on both. A node that has followers does more for each batch and counts no more, so its ratio is smaller.
"""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.report import Report
from chaos_tests.sim.mutation import Mutation, mutated
from smq.coordinator.kafka.api_keys import ApiKey
from smq.records import NewRecord, encode_batch
from smq.testing.broker import running_broker
from smq.testing.kafka_client import RawKafka

_PRODUCING: Final = "smq.replication.producing:Producing."
_WAITERS: Final = "smq.replication.partition.waiters:Waiters."

# Everything that a produced batch counts or times. The probes of the loop and of the garbage collector are not per
# batch: a few times per second.
COUNTED: Final = (
    (
        _PRODUCING + "produce",
        "is_timed = trace is not None or not self._batches % BATCHES_PER_SAMPLE",
        "is_timed = trace is not None",
    ),
    (
        _PRODUCING + "_on_produced",
        """    measures = self.host.measures
    if isinstance(result, SmqError):
        measures.produced.add(1, result.code.name)
    else:
        labels, counts = _DUPLICATE if result.duplicate else _STORED, measures.produced.by_labels
        counts[labels] = counts.get(labels, 0) + 1
        self._latency[acks].observe(self.now_ns() - began_ns)
""",
        "",
    ),
    (
        "smq.replication.partition.intake:Intake.took_produced",
        """    size, measures = len(stored.value) - ENVELOPE_BYTES, self._measures
    measures.produced_records.amount += stored.end - stored.base
    measures.produced_bytes.amount += size
    traffic = measures.traffic.get(pid) or measures.traffic_of(pid)
    traffic.produced_bytes += size
""",
        "",
    ),
    (
        _WAITERS + "add",
        """        elif not self._stages.is_timing:
            self._stages.begin(waiter.end)
""",
        "",
    ),
    (
        "smq.replication.storage.disk:StoreDisk._measure",
        """    self.measures.write.observe(time.monotonic_ns() - began_ns, to)
    if group:
        self.measures.submissions.observe(len(group))
        self.measures.size.observe(sum(submission.size for submission in group))
""",
        "    pass\n",
    ),
    (
        "smq.replication.proposer:Proposer._conclude",
        "    self._count(pending, result)\n",
        "",
    ),
    (
        "smq.coordinator.kafka.connection:Connection._finish",
        """    took_ns = time.monotonic_ns() - slot.began_ns
    self._gateway.request_times.observe(took_ns, SERVED[request.key].name)
""",
        "",
    ),
)
WITHOUT: Final = tuple(Mutation(*row) for row in COUNTED)
WITH: Final = tuple(Mutation(target, old, old) for target, old, _ in COUNTED)
WARM_UP: Final = 60  # batches at the beginning of a slice, not measured
WINDOW: Final = 20  # requests in flight
Z_95: Final = 1.96


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    records: int
    value_bytes: int
    batches: int  # of a slice


SHAPES: Final = (
    _Shape("batches of one record of 100 bytes", 1, 100, 400),
    _Shape("batches of 150 records of 100 bytes", 150, 100, 400),
)


def measure(report: Report, *, pairs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory, running_broker(Path(directory)) as broker:
        for shape in SHAPES:
            kafka = RawKafka(broker.kafka)
            producer = _Producer(kafka, broker.create_topic(), shape)
            producer.slice(WITH)
            samples = [producer.pair() for _ in range(pairs)]
            kafka.close()
            _report(report, shape.name, samples)


class _Producer:
    """Sends one batch again and again; the node's threads are all of this process but the caller's."""

    def __init__(self, kafka: RawKafka, topic: str, shape: _Shape) -> None:
        self._kafka, self._topic, self._shape = kafka, topic, shape
        self._batch = encode_batch(NewRecord(None, b"v" * shape.value_bytes, 1_000) for _ in range(shape.records))
        self._rng = random.Random(1)

    def pair(self) -> tuple[float, float]:
        """CPU seconds per batch with and without, in a random order: what drifts hits both sides equally."""
        if self._rng.random() < 0.5:
            return self.slice(WITH), self.slice(WITHOUT)
        without = self.slice(WITHOUT)
        return self.slice(WITH), without

    def slice(self, changes: Sequence[Mutation]) -> float:
        changed: AbstractContextManager[None] = mutated(changes)
        with changed:
            self._send(WARM_UP)
            before = _node_cpu_s()
            self._send(self._shape.batches)
            return (_node_cpu_s() - before) / self._shape.batches

    def _send(self, count: int) -> None:
        for _ in range(0, count, WINDOW):
            data = [{"name": self._topic, "partition_data": [{"index": 0, "records": [self._batch]}]}]
            self._kafka.send(ApiKey.PRODUCE, 9, times=WINDOW, acks=-1, timeout_ms=10_000, topic_data=data)
            for _ in range(WINDOW):
                self._kafka.receive_frame()


def _node_cpu_s() -> float:
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
    value = f"{share:.2f} % (95 %: {low:.2f} to {high:.2f}); {without_us:.0f} -> {with_us:.0f} us of CPU per batch"
    report.add(
        f"metrics, {name}",
        value,
        percent=share,
        percent_low=low,
        percent_high=high,
        with_us=with_us,
        without_us=without_us,
        pairs=len(samples),
    )
