"""No page of the console keeps the loop for long, however large the cluster is: what a page does between two of its
pauses is counted, in calls of functions, which are the same on any machine.
"""

import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from smq.coordinator.http.console.site import Console
from smq.coordinator.service.settings import Settings
from smq.coordinator.service.turns import ITEMS_PER_TURN
from smq.raft_state.commands import OffsetCommit
from smq.raft_state.ids import LogIndex, NodeId, Offset, PartitionId, ProducerEpoch, ProducerId, TsNs
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState, PartitionState, TransactionPhase, TransactionState
from smq.records import NewRecord, encode_batch
from smq.replication.api import Backlog, Fetched, PartitionRange, StoredBatch
from smq.testing.served import node_config
from tests.unit.raft_state.support import commit, proposed, register, topic

TOPICS, PARTITIONS, GROUPS, COMMITS, TRANSACTIONS = 30, 1_000, 1_000, 20, 10_000
RECORDS = 5_000
# A few milliseconds. One look at each partition without a pause would take three times as much, and more.
CALLS_MAX = 30_000


class Wide:
    """What the console needs of a node of a large cluster."""

    node_id = NodeId(1)

    def __init__(self) -> None:
        self.machine = Machine()
        self._index = 0
        self._apply(default_init("c"))
        self._apply(register(1))
        for n in range(TOPICS):
            self._apply(topic(n, partitions=PARTITIONS, replicas=1))
        first = self.state.topics["t0"].partitions
        for n in range(GROUPS):
            items = tuple(
                OffsetCommit(partition=p.pid, offset=Offset(0)) for p in first[: PARTITIONS if n == 0 else COMMITS]
            )
            self._apply(proposed(self.state, replace(commit(f"g{n:04}"), items=items)))
        for n in range(TRANSACTIONS):
            made_open = TransactionPhase.ONGOING if n % 2 else TransactionPhase.EMPTY
            name = f"x{n:05}"
            self.state.transactions[name] = TransactionState(
                transactional_id=name,
                producer_id=ProducerId(n),
                producer_epoch=ProducerEpoch(0),
                timeout_ms=60_000,
                phase=made_open,
                partitions={p.pid for p in first} if n == 1 else set(),
            )
        data = encode_batch(NewRecord(b"k", b"v", 1) for _ in range(RECORDS))
        self._batch = StoredBatch(Offset(0), Offset(RECORDS - 1), TsNs(1), memoryview(data))

    def _apply(self, command: Any) -> None:
        self._index += 1
        self.machine.apply(LogIndex(self._index), command)

    @property
    def state(self) -> ClusterState:
        return self.machine.state

    def status(self) -> Any:
        storage = SimpleNamespace(free_bytes=1, total_bytes=2)
        fields = {"raft_leader": self.node_id, "raft_term": 1, "applied_index": 1, "is_ready": True, "warnings": ()}
        return SimpleNamespace(node=self.node_id, storage=storage, **fields)

    def known_hwm(self, part: PartitionState) -> Offset:
        return Offset(RECORDS)

    def replica_status(self, _pid: PartitionId) -> Any:
        return SimpleNamespace(size_bytes=7)

    def anomalies(self) -> tuple[()]:
        return ()

    def partition_ranges(self, partitions: Any, _timeout_ms: int, done: Callable[[Any], None], **_: Any) -> None:
        done([self._range(topic, index) for topic, index in partitions])

    def _range(self, topic: str, index: int) -> PartitionRange:
        part, end = self.state.topics[topic].partitions[index], Offset(RECORDS)
        return PartitionRange(
            topic=topic,
            partition=part.index,
            pid=part.pid,
            log_start=Offset(0),
            lso=end,
            hwm=end,
            next_offset=end,
            leader=self.node_id,
            epoch=part.epoch,
            replicas=(self.node_id,),
        )

    def backlog(self, *arguments: Any) -> Callable[[], None]:
        arguments[-1](Backlog(1, TsNs(1)))
        return lambda: None

    def fetch(self, *_arguments: Any, done: Callable[[Any], None], **_: Any) -> Callable[[], None]:
        end = Offset(RECORDS)
        done(Fetched([self._batch], Offset(0), end, end, end))
        return lambda: None


@dataclass
class Counted:
    """Awaits `inner`, and counts the calls of functions between its pauses."""

    inner: Awaitable[Any]
    passes: list[int] = field(default_factory=list)

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, sent = self.inner.__await__(), None
        while True:
            count = 0

            def note(_frame: Any, event: str, _argument: Any) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            sys.setprofile(note)
            try:
                waits_for = steps.send(sent)
            except StopIteration as end:
                return end.value
            finally:
                sys.setprofile(None)
                self.passes.append(count)
            sent = yield waits_for


@asynccontextmanager
async def nothing() -> Any:
    yield None


@pytest.fixture(scope="module")
def wide() -> Wide:
    return Wide()


PAGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("/console/", {}),
    ("/console/topics", {}),
    ("/console/topics/{topic}", {"topic": "t0"}),
    ("/console/topics/{topic}/messages", {"topic": "t0"}),
    ("/console/groups", {}),
    ("/console/groups/{group}", {"group": "g0000"}),
    ("/console/transactions", {}),
    ("/console/transactions/{id}", {"id": "x00001"}),
    ("/console/settings", {}),
    ("/console/events", {}),
)


def console_of(node: Any, directory: Path) -> Console:
    return Console(node, Settings({}), node_config(directory), nothing)


@pytest.mark.parametrize(("path", "names"), PAGES, ids=[path for path, _ in PAGES])
async def test_a_page_of_a_large_cluster_does_a_bounded_amount_of_work_between_two_pauses(
    wide: Wide, tmp_path: Path, path: str, names: dict[str, str]
) -> None:
    console = console_of(wide, tmp_path)
    await console.history.sample()
    await console.events.look()
    for n in range(1_000):
        console.events.add("node", f"event {n}")
    handler = {route.path: route.handler for route in console.routes()}[path]
    query = "?contains=nowhere" if "messages" in path else ""
    request = make_mocked_request("GET", path.format(**names) + query, headers={"Host": "localhost"}, match_info=names)
    counted = Counted(handler(request))
    response = await counted
    assert response.status == 200, response.text
    assert max(counted.passes) <= CALLS_MAX, sorted(counted.passes)[-5:]


async def test_every_kind_of_page_is_among_them(wide: Wide, tmp_path: Path) -> None:
    pages = {route.path for route in console_of(wide, tmp_path).routes() if route.method == "GET"}
    assert pages - {"/console", "/console/style.css"} == {path for path, _ in PAGES}


async def test_the_looks_behind_the_pages_pause_after_a_turn(wide: Wide, tmp_path: Path) -> None:
    """They go over all partitions, groups and offsets."""

    console = console_of(wide, tmp_path)
    for look in (console.history.sample, console.history.sample, console.events.look, console.events.look):
        counted = Counted(look())
        await counted
        assert max(counted.passes) <= CALLS_MAX
        assert len(counted.passes) >= TOPICS * PARTITIONS / ITEMS_PER_TURN
