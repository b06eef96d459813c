"""What `salvage` says of a disk at any moment of a storm, compared with what the cluster has at the end."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from chaos_tests.sim.replacement import Fault, replace
from chaos_tests.sim.run import Simulation, silence
from chaos_tests.sim.scenario import find
from smq.raft_state.ids import NodeId, PartitionId
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.stored_batch import BatchInfo, BatchKind, StoredValue, info_of_stored
from smq.replication.salvage import Fate, FoundBatch, found_in, partitions_on, read_state
from smq.testing.virtual.disk import DiskImage, FakeDisk
from tests.unit.replication.storage.support import ManualClock
from tests.unit.replication.support import raise_it

SAMPLES = 15  # of the observer, between two copies: three seconds
ALL_BYTES = 1 << 40


class CopiedDisks(Simulation):
    """Copies each disk now and then, as a power cut would leave it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies: list[tuple[NodeId, DiskImage]] = []
        self._samples = 0

    def _sample(self) -> None:
        super()._sample()
        self._samples += 1
        if self._samples % SAMPLES == 0 and not self.world.stopped:
            self.copies += [(host.node, host.image.copy()) for host in self.cluster.hosts.values()]

    def final_logs(self) -> dict[PartitionId, PartitionLog]:
        """All replicas agree at the end."""
        found = {}
        for known in [*self.world.partitions, *self.world.ledgers]:
            replicas = (host.api.replicas.get(known.pid) for host in self.cluster.up())
            if (replica := next(filter(None, replicas), None)) is not None:
                found[known.pid] = replica.log
        return found


def batches(log: PartitionLog) -> Iterator[StoredValue]:
    at = log.log_start
    while found := log.read(at, log.appended_end, ALL_BYTES):
        yield from found
        at = found[-1].end


def judged(name: str, seed: int) -> tuple[set[Fate], list[str]]:
    """The fates that were met, and what was wrong."""
    with silence():
        simulation = CopiedDisks(find(name), seed)
        assert simulation.run().violations == []
    met, wrong = set[Fate](), list[str]()
    truth = {pid: (log, {b.base: b.value for b in batches(log)}) for pid, log in simulation.final_logs().items()}
    for node, image in simulation.copies:
        disk = FakeDisk(ManualClock(), random.Random(1), image=image, on_fatal=raise_it)
        state = read_state(disk).state
        for pid in [pid for pid in partitions_on(disk) if pid in truth]:
            log, values = truth[pid]
            for found in found_in(disk, pid, state):
                if isinstance(found, FoundBatch) and found.stored.end > log.log_start:
                    met.add(found.fate)
                    is_there = values.get(found.stored.base) == found.stored.value
                    if not _is_true(found, log, is_there=is_there):
                        wrong.append(f"node {node}, {log!r}: {found.fate} {found.stored.base}..{found.stored.end}")
    return met, wrong


def _is_true(found: FoundBatch, log: PartitionLog, *, is_there: bool) -> bool:
    info = info_of_stored(found.stored)
    is_aborted = info.kind == BatchKind.TRANSACTIONAL and log.aborted.covers(info.producer_id, info.base)
    if found.fate is Fate.COMMITTED:
        return is_there and not is_aborted
    return found.fate is Fate.UNCERTAIN or not is_there or is_aborted


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "seed"),
    # In the first, a disk's state was ahead of its log, and told of a producer's next transaction.
    [("transactions", 2), ("power", 1), ("restored_disk", 1), ("batches", 1)],
)
def test_what_one_disk_takes_for_committed_or_aborted_is_so(name: str, seed: int) -> None:
    met, wrong = judged(name, seed)
    assert wrong == []
    assert met >= {Fate.COMMITTED, Fate.UNCERTAIN}


@pytest.mark.sim
def test_a_disk_that_took_all_for_committed_would_be_found() -> None:
    def hopeful(original: Fault, judge: object, info: BatchInfo) -> Fate:
        fate: Fate = original(judge, info)
        return Fate.COMMITTED if fate is Fate.UNCERTAIN else fate

    with replace("smq.replication.salvage:_Judge.fate", by=hopeful).planted():
        assert judged("transactions", 1)[1] != []
