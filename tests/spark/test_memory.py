"""Ten million rows: the memory of an executor's Python does not grow with the rows that it reads."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from smq.records import NewRecord, encode_batch
from smq.testing.cluster import Cluster

log = logging.getLogger(__name__)  # --log-cli-level=INFO shows the figure
pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(900)]

ROWS = 10_000_000
PARTITIONS = 4
BATCH_ROWS = 5_000
VALUE_BYTES = 100


def worker_peaks_kb(spark: SparkSession) -> list[int]:
    """The largest resident size that each Python worker of this session has ever had."""
    jvm = spark._jvm
    assert jvm is not None
    java = int(jvm.java.lang.ProcessHandle.current().pid())
    peaks = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            parents = _ancestors(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime
        if b"pyspark.daemon" in command and java in parents and "VmHWM" in status:
            peaks.append(int(status["VmHWM"].split()[0]))
    return peaks


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        found.add(pid)
    return found


def test_executor_memory_is_bounded_while_ten_million_rows_are_read(
    spark: SparkSession, cluster: Cluster, new_topic: Callable[[int], str], read: Callable[..., DataFrame]
) -> None:
    topic = new_topic(PARTITIONS)
    values = [(b"%06d:" % i * 15)[:VALUE_BYTES] for i in range(BATCH_ROWS)]
    data = encode_batch([NewRecord(b"k", value, 1_700_000_000_000) for value in values], codec="zstd")
    for partition in range(PARTITIONS):
        for _ in range(ROWS // PARTITIONS // BATCH_ROWS):
            cluster.publish_batch(topic, partition, data)

    def totals(**options: str) -> tuple[int, int, int]:
        frame = read(topic, **options).selectExpr("count(*) n", "sum(offset) offsets", "sum(length(value)) size")
        (row,) = frame.collect()
        return row.n, row.offsets, row.size

    each = ROWS // PARTITIONS
    totals(endingOffsets=str({topic: {str(p): 1000 for p in range(PARTITIONS)}}).replace("'", '"'))
    before_kb = max(worker_peaks_kb(spark))
    assert totals() == (ROWS, PARTITIONS * each * (each - 1) // 2, ROWS * VALUE_BYTES)
    grown_kb = max(worker_peaks_kb(spark)) - before_kb
    log.info("a worker peaked %d MiB above the %d MiB it has without data", grown_kb // 1024, before_kb // 1024)
    # Each task read 250 MB (or several times that, if a worker served more than one task).
    assert grown_kb * 1024 < ROWS * VALUE_BYTES // 8
