"""What all logs of a node hold in memory together: which of them give room."""

import pytest

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.log import partition_log
from smq.replication.log.store import LogStore
from smq.replication.node_config import TAIL_BYTES_KEPT
from tests.unit.replication.log.support import ALL, PID, append
from tests.unit.replication.storage.support import Harness


def test_partitions_that_rest_leave_the_memory_to_one_at_work(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 4 * TAIL_BYTES_KEPT
    monkeypatch.setattr(partition_log, "TAIL_BYTES_NODE_MAX", bound)
    store = LogStore(harness.disk)
    resting = [store.create(PartitionId(bytes([number]) * 20), Offset(0)) for number in range(6)]
    for log in resting:
        append(log, payload=bytes(TAIL_BYTES_KEPT - 1_000))
        harness.settle()
    at_work = store.create(PID, Offset(0))
    for _ in range(8):
        append(at_work, payload=bytes(TAIL_BYTES_KEPT // 4))
        harness.settle()
    assert sum(len(s.value) for s in at_work._tail) > TAIL_BYTES_KEPT // 2
    assert store.budget.used == sum(len(s.value) for log in [*resting, at_work] for s in log._tail) <= bound
    assert [bool(log._tail) for log in resting] == [False] * 3 + [True] * 3, "those that have rested longest go first"
    assert len(resting[0].read(Offset(0), ALL, 1 << 30)) == 1
    store.drop(resting[5])
    assert store.budget.used == sum(len(s.value) for log in [*resting[:5], at_work] for s in log._tail)
