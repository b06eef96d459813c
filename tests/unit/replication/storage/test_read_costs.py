"""What a read of 1 MiB from the page cache costs, counted: system calls, bytes, and calls of Python functions."""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import NewRecord, encode_batch, validate_produced
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue
from smq.replication.ports import DataDamaged
from tests.unit.replication.storage.support import LmdbHarness

PID = PartitionId(b"p" * 20)
MIB = 1 << 20
Answer = list[StoredValue] | DataDamaged | None


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LmdbHarness]:
    made = LmdbHarness(tmp_path / "node")
    yield made
    made.close()


def filled(harness: LmdbHarness, size: int, count: int) -> PartitionLog:
    log = LogStore(harness.disk, tail_bytes_kept=0).create(PID, Offset(0))
    batch = encode_batch([NewRecord(None, random.Random(1).randbytes(size), 1_000)])
    header = validate_produced(batch)
    for i in range(count):
        log.append(batch, header, epoch=Epoch(1), ts_ns=TsNs(i + 1), done=lambda: None)
    harness.settle()
    return log


def read(harness: LmdbHarness, log: PartitionLog, offset: int) -> list[StoredValue]:
    answers: list[Answer] = []
    assert log.read_later(Offset(offset), log.appended_end, MIB, answers.append)
    harness.wait(lambda: bool(answers))
    (found,) = answers
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("size", "count", "fitting", "system_calls", "functions_per_batch"),
    [(16_000, 200, 65, 20, 14), (500_000, 12, 2, 12, 70)],
)
def test_a_read_of_one_mib(
    harness: LmdbHarness,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    count: int,
    fitting: int,
    system_calls: int,
    functions_per_batch: int,
) -> None:
    log = filled(harness, size, count)
    read(harness, log, 1)
    sizes: list[int] = []
    calls = 0
    real_preadv, real_pread = os.preadv, os.pread

    def preadv(fd: int, buffers: Sequence[memoryview], at: int, flags: int = 0) -> int:
        found = real_preadv(fd, buffers, at, flags)
        sizes.append(found)
        return found

    def pread(fd: int, length: int, at: int) -> bytes:  # on a file system that cannot read without waiting
        data = real_pread(fd, length, at)
        sizes.append(len(data))
        return data

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and "/smq/" in frame.f_code.co_filename

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pread", pread)
    sys.setprofile(on_event)
    try:
        found = read(harness, log, 1)
    finally:
        sys.setprofile(None)
    assert len(found) == fitting
    assert 0 < len(sizes) <= system_calls
    wanted = sum(len(stored.value) for stored in found)
    assert sum(sizes) < 1.2 * wanted + 20 * 4_096  # and the pages of the tree
    assert calls / fitting < functions_per_batch
