"""Publishes all rows through the async producer, while the leader of the busiest partition is killed.

Owns the demo's producer and its kills. The offsets and times of the acknowledgements are the ground truth of every
later check. No failure is tolerated: a record that fails ends the demo.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from chaos_tests.demo.flights import Flights
from smq.clients.pb import smq_pb2 as pb
from smq.clients.producer import Producer
from smq.clients.producing.delivery import BatchMetadata
from smq.raft_state.ids import key_partition
from smq.testing.cluster import Cluster

CHUNK_ROWS: Final = 1024  # rows between two checks of the clock; about one batch per partition
KILL_AT: Final = 0.42  # of the rows acknowledged: one kill, between 30 and 60 % of them
SENT_BEFORE_KILL_MAX: Final = 0.55  # at most this share is sent before the kill, so that it cannot come too late
RESTART_AFTER_S: Final = 1.0  # after the first acknowledgement by a new leader
BUFFER_BYTES: Final = 4 << 20  # unacknowledged in the producer: a second's worth, not all of the input
WAIT_S: Final = 60.0  # for any one step; a failover takes about a second
POLL_S: Final = 0.05  # between two checks of a condition that no acknowledgement announces


class DemoFailure(Exception):
    """A check of the demo failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A run of rows of one partition, and when (monotonic seconds) it was acknowledged."""

    partition: int
    first: int
    last: int
    at_s: float


@dataclass(slots=True, kw_only=True)
class Kill:
    """One SIGKILL. `led` maps the partitions that the node led to the epoch of that leadership."""

    node: int
    at_s: float
    acked_rows: int
    in_flight_rows: int
    led: dict[int, int]
    leader_changes_before: int
    restarted_after_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Published:
    """Row i is in partition `partitions[i]` at offset `offsets[i]`."""

    partitions: list[int]
    offsets: list[int]
    acks: list[Ack] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0
    leader_changes: int = 0
    retries: int = 0
    duplicates: int = 0


class Publisher:
    """One run of the demo's first half."""

    def __init__(self, cluster: Cluster, topic: str, flights: Flights, partition_count: int, kills: int) -> None:
        self._cluster = cluster
        self._topic = topic
        self._flights = flights
        self._kills_planned = kills
        self._rows = len(flights.values)
        self._acked_rows = 0
        self._sent_rows = 0
        self._restarts = 0
        self._failure: BaseException | None = None
        self._progress = asyncio.Event()
        partition_of = {key: int(key_partition(key, partition_count)) for key in set(flights.keys)}
        partitions = [partition_of[key] for key in flights.keys]
        self.busiest = max(set(partitions), key=partitions.count)
        self.result = Published(partitions=partitions, offsets=[-1] * self._rows)

    async def run(self) -> Published:
        """Publishes everything. DemoFailure if a record was not acknowledged, or nothing could be killed."""
        started = time.monotonic()
        async with Producer(self._cluster.servers, compression="lz4", buffer_bytes=BUFFER_BYTES) as producer:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._kill_leaders(producer))
                tasks.create_task(self._send_all(producer))
            stats = producer.stats
            self.result.leader_changes, self.result.retries = stats.leader_changes, stats.retries
            self.result.duplicates = stats.duplicates
        self.result.seconds = max(ack.at_s for ack in self.result.acks) - started
        return self.result

    # -- sending

    async def _send_all(self, producer: Producer) -> None:
        for start in range(0, self._rows, CHUNK_ROWS):
            await self._wait_for_kill(start)
            groups: dict[int, list[int]] = {}
            for row in range(start, min(start + CHUNK_ROWS, self._rows)):
                groups.setdefault(self.result.partitions[row], []).append(row)
            for rows in groups.values():
                await self._send_group(producer, rows)
        await self._wait("the last acknowledgements", lambda: self._acked_rows == self._rows)

    async def _send_group(self, producer: Producer, rows: list[int]) -> None:
        flights = self._flights
        future = await producer.send_many(
            self._topic,
            [flights.values[row] for row in rows],
            keys=[flights.keys[row] for row in rows],
            timestamp_ms=[flights.times_ms[row] for row in rows],
        )
        self._sent_rows += len(rows)
        future.add_done_callback(lambda done: self._acknowledged(rows, done))

    def _acknowledged(self, rows: list[int], done: "asyncio.Future[list[BatchMetadata]]") -> None:
        self._progress.set()
        failure = done.exception()
        if failure is not None:
            self._failure = failure
            return
        places = [
            (run.partition, offset) for run in done.result() for offset in range(run.base_offset, run.last_offset + 1)
        ]
        if [partition for partition, _ in places] != [self.result.partitions[row] for row in rows]:
            self._failure = DemoFailure("a key went to another partition than Kafka's partitioner gives it")
            return
        for row, (_, offset) in zip(rows, places, strict=True):
            self.result.offsets[row] = offset
        self._acked_rows += len(rows)
        self.result.acks.append(
            Ack(partition=places[0][0], first=places[0][1], last=places[-1][1], at_s=time.monotonic())
        )

    # -- killing

    async def _kill_leaders(self, producer: Producer) -> None:
        for number in range(self._kills_planned):
            await self._kill_one(producer, self._rows * (number + KILL_AT) / self._kills_planned)

    async def _kill_one(self, producer: Producer, acked_rows: float) -> None:
        """One kill, from the wait for its moment to the node's restart."""
        await self._wait("acknowledgements before the kill", lambda: self._acked_rows >= acked_rows)
        kill = await self._kill(producer)
        await self._wait(
            "an acknowledgement by a new leader",
            lambda: producer.stats.leader_changes > kill.leader_changes_before and self._acked_since(kill),
        )
        await asyncio.sleep(RESTART_AFTER_S)
        kill.restarted_after_s = time.monotonic() - kill.at_s
        await asyncio.to_thread(self._cluster.restart, kill.node)
        self._restarts += 1
        self._progress.set()

    async def _kill(self, producer: Producer) -> Kill:
        """Finds the leader of the busiest partition and kills it while its batches are in flight."""
        cluster = await asyncio.to_thread(self._describe)
        partitions = cluster.topics[0].partitions
        node = next(p.leader for p in partitions if p.partition == self.busiest)
        await self._wait("batches in flight", lambda: self._sent_rows > self._acked_rows)
        kill = Kill(
            node=node,
            at_s=time.monotonic(),
            acked_rows=self._acked_rows,
            in_flight_rows=self._sent_rows - self._acked_rows,
            led={p.partition: p.epoch for p in partitions if p.leader == node},
            leader_changes_before=producer.stats.leader_changes,
        )
        self._cluster.kill(node)
        self.result.kills.append(kill)
        self._progress.set()
        return kill

    def _describe(self) -> pb.DescribeClusterResponse:
        request = pb.DescribeClusterRequest(topics=[self._topic], timeout_ms=5000)
        return self._cluster.nodes[min(self._cluster.nodes)].raw.admin.DescribeCluster(request, timeout=6)

    def _acked_since(self, kill: Kill) -> bool:
        return any(ack.at_s > kill.at_s and ack.partition in kill.led for ack in reversed(self.result.acks))

    async def _wait_for_kill(self, row: int) -> None:
        """Holds the sender back until a due kill has happened, and until the cluster has recovered from the last."""
        number = (
            min(int(row / self._rows * self._kills_planned), self._kills_planned - 1) if self._kills_planned else -1
        )
        if number < 0:
            return
        is_late = row >= self._rows * (number + SENT_BEFORE_KILL_MAX) / self._kills_planned
        await self._wait("the restart of the node killed before", lambda: self._restarts >= number)
        if is_late:
            await self._wait("the kill", lambda: len(self.result.kills) > number)

    async def _wait(self, what: str, is_done: Callable[[], bool]) -> None:
        """Waits until the condition holds, checked after every event; DemoFailure after WAIT_S or a failed record."""
        give_up_at = time.monotonic() + WAIT_S
        while not is_done():
            if self._failure is not None:
                raise DemoFailure(f"a record was not acknowledged: {self._failure}") from self._failure
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise DemoFailure(f"waited {WAIT_S:g} s for {what}; {self._acked_rows} of {self._rows} rows are done")
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), min(left, POLL_S))
            except TimeoutError:
                pass  # nothing happened; the condition may depend on the clock or on another thread
