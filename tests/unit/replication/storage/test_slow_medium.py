"""A medium that is slow to give one place: readers that ask for it again wait, and all others are answered."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import NewRecord, encode_batch, validate_produced
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.reader import LogReader
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue
from smq.replication.ports import DataDamaged, GiveUp, Table
from smq.replication.storage.disk import READERS
from smq.replication.storage.rows import Moment
from tests.unit.replication.storage.support import StoreHarness

BATCHES = 5
SLOW = PartitionId(b"s" * 20)
OTHERS = [PartitionId(bytes([n]) * 20) for n in range(READERS)]
ASKED = 4 * READERS  # times, for the same place
Answers = list[list[StoredValue] | DataDamaged | None]


class SlowMedium:
    """A node with several partitions. Its medium gives nothing of the first one until `go_on`."""

    def __init__(self, harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.harness = harness
        self.begun: SimpleQueue[None] = SimpleQueue()
        self.go_on = threading.Event()
        self.logs = {pid: self._filled(pid) for pid in (SLOW, *OTHERS)}
        scan_from = Moment.scan_from

        def slow_scan(*arguments: Any) -> list[tuple[bytes, bytes]]:
            if arguments[1] is Table.BATCHES and arguments[2].startswith(SLOW):
                self._wait()
            return scan_from(*arguments)

        monkeypatch.setattr(Moment, "scan_from", slow_scan)

    def _filled(self, pid: PartitionId) -> PartitionLog:
        log = LogStore(self.harness.disk, tail_bytes_kept=0).create(pid, Offset(0))
        for number in range(BATCHES):
            batch = encode_batch([NewRecord(None, bytes(20_000), 1_000)])
            log.append(batch, validate_produced(batch), epoch=Epoch(1), ts_ns=TsNs(number + 1), done=lambda: None)
        self.harness.settle()
        return log

    def _wait(self) -> None:
        self.begun.put(None)
        assert self.go_on.wait(60)

    def read(self, pid: PartitionId, answers: Answers, offset: int = 0) -> GiveUp:
        log = self.logs[pid]
        give_up = log.read_later(Offset(offset), log.appended_end, 1, answers.append)
        assert give_up is not None
        return give_up

    def look_up(self, answers: Answers) -> GiveUp:
        def find(log: LogReader) -> list[StoredValue]:
            self._wait()
            return log.read(Offset(0), Offset(1), 1)

        give_up = self.logs[SLOW].look_up(find, answers.append)
        assert give_up is not None
        return give_up

    def all_others_are_answered(self) -> None:
        answers: Answers = []
        for pid in OTHERS:
            self.read(pid, answers)
        self.harness.wait(lambda: len(answers) == len(OTHERS))
        assert all(isinstance(found, list) and len(found) == 1 for found in answers)


@pytest.fixture
def medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    harness = StoreHarness(tmp_path / "node")
    made = SlowMedium(harness, monkeypatch)
    yield made
    made.go_on.set()
    harness.close()
    assert harness.fatal == []


def ask_again(ask: Callable[[], GiveUp], medium: SlowMedium) -> list[GiveUp]:
    """One that has begun, and more for the same place."""
    asked = [ask()]
    medium.begun.get(timeout=60)
    return asked + [ask() for _ in range(ASKED - 1)]


def test_reads_of_one_place_take_one_thread_however_often_they_are_repeated(medium: SlowMedium) -> None:
    answers: Answers = []
    ask_again(lambda: medium.read(SLOW, answers, 2), medium)
    medium.all_others_are_answered()
    assert (answers, medium.begun.qsize()) == ([], 0)
    medium.go_on.set()
    medium.harness.wait(lambda: len(answers) == ASKED)
    assert [[stored.base for stored in found] for found in answers if isinstance(found, list)] == [[2]] * ASKED


def test_look_ups_in_one_partition_take_one_thread_however_often_they_are_repeated(medium: SlowMedium) -> None:
    answers: Answers = []
    ask_again(lambda: medium.look_up(answers), medium)
    medium.all_others_are_answered()
    assert (answers, medium.begun.qsize()) == ([], 0)
    medium.go_on.set()
    medium.harness.wait(lambda: len(answers) == ASKED)
    assert [[stored.base for stored in found] for found in answers if isinstance(found, list)] == [[0]] * ASKED


def test_reads_from_different_offsets_to_one_slow_place_and_a_look_up_leave_a_thread_to_other_partitions(
    medium: SlowMedium,
) -> None:
    answers: Answers = []
    for offset in range(BATCHES):
        medium.read(SLOW, answers, offset)
    medium.look_up(answers)
    for _ in range(READERS - 1):
        medium.begun.get(timeout=60)
    medium.all_others_are_answered()
    assert (answers, medium.begun.qsize()) == ([], 0)
    medium.go_on.set()
    medium.harness.wait(lambda: len(answers) == BATCHES + 1)


def test_what_is_given_up_behind_a_slow_read_is_never_read(medium: SlowMedium) -> None:
    answers: Answers = []
    _, *others = ask_again(lambda: medium.read(SLOW, answers, 2), medium)
    for give_up in others:
        give_up()
    medium.go_on.set()
    medium.harness.wait(lambda: len(answers) == 1)
    medium.read(SLOW, answers, 2)
    medium.harness.wait(lambda: len(answers) == 2)
    assert medium.begun.qsize() == 1
