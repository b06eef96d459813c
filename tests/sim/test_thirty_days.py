"""A group that was away for 30 days, on three simulated nodes that lose power on day 15: it goes on at exactly the next
record, or learns exactly what retention has removed, and its lag says so all the time (P6).

tests/kafka/test_thirty_days.py asks real nodes over the ports of gRPC and Kafka.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pytest

from chaos_tests.sim.observer import WatchedNode
from chaos_tests.sim.run import Simulation
from chaos_tests.sim.scenario import find
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.coordinator.service.group_lag import Lag, lags_of, positions
from smq.coordinator.service.name_lookup import StartAsk, find_group, start_position
from smq.coordinator.service.start_positions import OffsetType
from smq.raft_state.commands import NO_GENERATION, AdvanceClock, OffsetCommit
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset, RequestId, TsNs
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX
from smq.records import NewRecord, decode_batch, encode_batch
from smq.replication.api import Acks, Backlog, Fetched, Produced, ProduceRequest, StoredBatch
from smq.replication.log.stored_batch import ENVELOPE_BYTES
from smq.testing.virtual.clock import NS_PER_MS

T = TypeVar("T")
DAY_MS = 86_400_000
PER_BATCH = 10
NEXT, RENEWED, END = 33, 60, 100  # committed up to, written before day 15, and written in the end
GROUP = "away"
PATIENCE_MS = 400_000  # of virtual time: retention looks every five minutes
CALL_MS = 5_000


@dataclass
class Story:
    simulation: Simulation

    def ask(self, node: NodeId, work: Callable[[WatchedNode], Awaitable[T]]) -> T:
        """What the work at this node returns, or the error that it raises."""
        found: list[Any] = []
        api = self.simulation.cluster.hosts[node].api
        api.loop.run(_awaited(work, api), found.append)
        self.wait(lambda: bool(found))
        if isinstance(found[0], BaseException):
            raise found[0]
        result: T = found[0]
        return result

    def wait(self, condition: Callable[[], bool]) -> None:
        assert self.simulation.scheduler.run_for_ms(PATIENCE_MS, stop=condition), "not within the virtual time"

    @property
    def leader(self) -> NodeId:
        known, found = self.simulation.world.partitions[0], list[NodeId]()

        def is_led() -> bool:
            for host in self.simulation.cluster.hosts.values():
                if (status := host.api.replica_status(known.pid)) is not None and status.is_leader:
                    found.append(host.node)
            return bool(found)

        self.wait(is_led)
        return found[0]

    def publish(self, first: int, stop: int) -> None:
        topic = self.simulation.world.partitions[0].topic
        for base in range(first, stop, PER_BATCH):

            async def produce(api: WatchedNode, base: int = base) -> Produced | SmqError:
                created_ms = api.clock.wall_ns() // NS_PER_MS
                records = [NewRecord(None, b"%d" % n, created_ms) for n in range(base, base + PER_BATCH)]
                answer: asyncio.Future[Produced | SmqError] = api.loop.create_future()
                api.produce(ProduceRequest(topic, 0, encode_batch(records), Acks.ALL, CALL_MS, answer.set_result))
                return await answer

            produced = self.ask(self.leader, produce)
            assert isinstance(produced, Produced)
            assert produced.base_offset == base
            self.simulation.scheduler.run_for_ms(50)

    def commit(self, offset: int) -> None:
        known = self.simulation.world.partitions[0]
        items = (OffsetCommit(partition=known.pid, offset=Offset(offset), metadata="m"),)

        async def work(api: WatchedNode) -> None:
            begin = partial(api.groups.commit, GROUP, NO_MEMBER, NO_GENERATION, items, RequestId(b"c" * 16), CALL_MS)
            await api.calls.change(begin, CALL_MS)

        state = self.simulation.cluster.hosts[NodeId(1)].api.state
        self.ask(coordinator_of(state, GROUP).node, work)

    def pass_days(self, days: int) -> None:
        """The machines' calendars move, and the cluster's clock of expiry follows in the steps of its leader."""
        for host in self.simulation.cluster.hosts.values():
            host.machine.wall_offset_ns += days * DAY_MS * NS_PER_MS

        async def work(api: WatchedNode) -> None:
            now_ms = api.clock.wall_ns() // NS_PER_MS
            while (before_ms := api.state.expiry_clock_ms) < now_ms:
                seen = range(before_ms, now_ms, 2 * CLOCK_ELAPSED_MS_MAX) if before_ms else (0,)
                steps = [AdvanceClock(seen_ms=ms, elapsed_ms=CLOCK_ELAPSED_MS_MAX, now_ms=now_ms) for ms in seen]
                for step in steps:
                    await api.calls.propose(step, CALL_MS)

        self.ask(NodeId(1), work)

    def lose_power(self) -> None:
        """On all nodes at the same time."""
        simulation = self.simulation
        for node in simulation.nodes:
            simulation.cluster.crash(node, power=True, why="day 15")
        for node in simulation.nodes:
            simulation.cluster.start(node)
        self.wait(simulation._are_all_ready)
        self.wait(self._has_leader)

    def _has_leader(self) -> bool:
        pid = self.simulation.world.partitions[0].pid
        statuses = [host.api.replica_status(pid) for host in self.simulation.cluster.hosts.values()]
        return any(status is not None and status.is_leader for status in statuses)

    def start_of(self, node: NodeId, *, resets: bool = False) -> int:
        """Where a member that comes back begins."""
        topic = self.simulation.world.partitions[0].topic
        ask = StartAsk(topic=topic, partition=0, type=OffsetType.RESUME_OR_EARLIEST, group=GROUP, reset_if_gone=resets)
        position, _ = self.ask(node, lambda api: start_position(api.calls, ask, CALL_MS))
        return position.offset

    def values_from(self, node: NodeId, offset: int) -> list[int]:
        """All that a reader gets from this node's replica."""
        found: list[int] = []
        while offset < END:
            for batch in self.ask(node, partial(self._read, offset=offset, max_wait_ms=100)).batches:
                records = decode_batch(bytes(batch.data))
                found += [int(record.value or b"") for record in records if record.offset >= offset]
                offset = batch.last_offset + 1
        return found

    def lag(self, node: NodeId) -> tuple[Lag, int]:
        """As gRPC, the command line and the console have it; and the wall clock of that node."""

        async def work(api: WatchedNode) -> tuple[Lag, int]:
            group = await find_group(api.calls, GROUP, CALL_MS)
            now_ns = api.clock.wall_ns()
            (lag,) = await lags_of(
                api.calls, list(positions(api.state, group)), CALL_MS, with_sizes=True, now_ns=now_ns
            )
            return lag, now_ns

        return self.ask(node, work)

    def batches(self) -> list[StoredBatch]:
        """Of the whole log, as its leader serves it."""
        read = partial(self._read, offset=self.log_start, max_wait_ms=0)
        return list(self.ask(self.leader, read).batches)

    async def _read(self, api: WatchedNode, *, offset: int, max_wait_ms: int) -> Fetched:
        topic = self.simulation.world.partitions[0].topic
        return await api.calls.fetch(topic, 0, offset, max_bytes=1 << 20, max_wait_ms=max_wait_ms, answer_ms=CALL_MS)

    @property
    def log_start(self) -> int:
        known = self.simulation.world.partitions[0]
        return int(self.simulation.cluster.hosts[NodeId(1)].api.state.partition(known.pid).log_start)

    def check_lag(self, first: int, days: int) -> None:
        """`first` is the first record that is there to read; it was written so many days ago."""
        pid = self.simulation.world.partitions[0].pid
        apis = [host.api for host in self.simulation.cluster.hosts.values()]
        self.wait(lambda: all(api.replica_status(pid).verified_end == END for api in apis))
        left = [batch for batch in self.batches() if batch.last_offset >= first]
        size = sum(ENVELOPE_BYTES + len(batch.data) for batch in left)
        ts_ns = left[0].ts_ns + first - left[0].base_offset
        for node in self.simulation.nodes:
            lag, now_ns = self.lag(node)
            assert (lag.end, lag.offsets, lag.records, lag.size_bytes) == (END, END - NEXT, END - first, size)
            assert lag.age_ms == max(0, now_ns - ts_ns) // NS_PER_MS, "that node's clock may be behind the leader's"
            assert abs(lag.age_ms - days * DAY_MS) < PATIENCE_MS, "as the calendar has it"
        monitor = self.simulation.cluster.hosts[self.leader].api.lag_monitor
        self.ask(self.leader, lambda _: monitor.measure_all())
        assert monitor.backlogs.found == {(GROUP, pid): Backlog(size, TsNs(ts_ns))}, "what the metrics show"


async def _awaited(work: Callable[[WatchedNode], Awaitable[T]], api: WatchedNode) -> T:
    return await work(api)


def begun(seed: int, *, retention_ms: int = 0) -> Story:
    scenario = find("calm")
    simulation = Simulation(
        replace(scenario, cluster=replace(scenario.cluster, partitions=1, retention_ms=retention_ms)), seed
    )
    assert simulation._boot()
    story = Story(simulation)
    story.pass_days(0)  # the first step only starts the clock of expiry
    return story


SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


@SEEDS
def test_after_30_days_and_a_loss_of_power_a_group_goes_on_at_the_next_record(seed: int) -> None:
    story = begun(seed)
    story.publish(0, END)
    story.commit(NEXT)
    story.check_lag(NEXT, days=0)
    story.pass_days(15)
    story.lose_power()
    story.check_lag(NEXT, days=15)
    story.pass_days(15)
    story.check_lag(NEXT, days=30)
    for node in story.simulation.nodes:
        assert story.start_of(node) == NEXT
        assert story.values_from(node, NEXT) == list(range(NEXT, END))


@SEEDS
def test_after_30_days_and_retention_a_group_learns_exactly_what_is_gone(seed: int) -> None:
    """Records are kept for 20 days: those of day 0 go, those of day 15 stay."""
    story = begun(seed, retention_ms=20 * DAY_MS)
    story.publish(0, RENEWED)
    story.commit(NEXT)
    story.pass_days(15)
    story.lose_power()
    story.publish(RENEWED, END)
    story.check_lag(NEXT, days=15)
    story.pass_days(15)
    story.wait(lambda: story.log_start == RENEWED)
    story.check_lag(RENEWED, days=15)
    for node in story.simulation.nodes:
        with pytest.raises(SmqError) as gone:
            story.start_of(node)
        details = gone.value.details
        assert (gone.value.code, details.lo, details.hi) == (ErrorCode.OFFSET_OUT_OF_RANGE, RENEWED, END)
        assert f"records {NEXT} to {RENEWED - 1} were removed" in gone.value.message
        assert story.start_of(node, resets=True) == RENEWED
        assert story.values_from(node, RENEWED) == list(range(RENEWED, END))
