"""A consumer that was away for 30 days continues at exactly the next record, or learns exactly what is gone (P6). Its
lag says so meanwhile.

By gRPC and by Kafka, on three nodes in one loop whose calendar the test turns.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import uvloop
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from smq.clients.admin import Admin
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import KAFKA_GROUP_PREFIX
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.server.composition import Server
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.cluster_config import GROUP_INITIAL_DELAY_MS
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX
from smq.replication.api import NodeStatus
from smq.testing.kafka_client import RawKafka
from smq.testing.served import PATIENCE_S, Served, fails, node_config, publish_request

DAY_MS = 86_400_000
PLACE = TopicPartition("t", 0)
NEXT, END, KEPT = 1_001, 5_001, 3_000  # read up to, written up to, and what is left after the retention
GROUP = "away"


@dataclass
class Calendar:
    """The nodes' clock of the day; their other clock is the machine's."""

    days: int = 0


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Calendar:
    made = Calendar()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + made.days * DAY_MS * 1_000_000)
    return made


def status(server: Server) -> NodeStatus:
    return server.node.status()


@asynccontextmanager
async def three_nodes(path: Path, ports: Sequence[int]) -> AsyncIterator[list[Server]]:
    """Ready, and stopped in the end. The same path again is the same cluster."""
    peers: dict[NodeId, Address] = {NodeId(n): ("127.0.0.1", port) for n, port in enumerate(ports, 1)}
    servers = [
        Server(
            node_config(
                path,
                node_id=node,
                peers=peers,
                data_dir=path / str(node),
                kafka_address=("127.0.0.1", 0),
                settings={GROUP_INITIAL_DELAY_MS: "0"},
                tuning={},
            ),
            first_start=True,
        )
        for node in peers
    ]
    await asyncio.gather(*(server.start() for server in servers))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(status(server).is_ready for server in servers):  # noqa: ASYNC110  # a state, not an event
                await asyncio.sleep(0.01)
        yield servers
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@asynccontextmanager
async def cluster(path: Path, ports: Sequence[int]) -> AsyncIterator["Faces"]:
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(three_nodes(path, ports))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(format_address(servers[0].grpc_address)))
        yield Faces(servers, Served(servers[0], channel))


@dataclass
class Faces:
    servers: list[Server]
    served: Served

    def kafka(self, server: Server) -> str:
        assert server.kafka_address is not None
        return format_address(server.kafka_address)

    @asynccontextmanager
    async def consumer(self, *, reset: str) -> AsyncIterator[AIOKafkaConsumer]:
        """A member of the group."""
        made = AIOKafkaConsumer(
            "t",
            bootstrap_servers=[self.kafka(server) for server in self.servers],
            group_id=GROUP,
            auto_offset_reset=reset,
            enable_auto_commit=False,
            metadata_max_age_ms=1_000,
        )
        await made.start()
        try:
            yield made
        finally:
            await made.stop()

    async def read_kafka(self, until: int, *, reset: str, commits: bool = False) -> list[int]:
        """The offsets that a new member of the group is given, up to the one before `until`."""
        async with self.consumer(reset=reset) as consumer, asyncio.timeout(PATIENCE_S):
            got: list[int] = []
            while not got or got[-1] < until - 1:
                record = await consumer.getone()
                assert record.value == b"%d" % record.offset
                got.append(record.offset)
            if commits:
                await consumer.commit({PLACE: until})
            return got

    async def read_grpc(self, until: int, offset_type: int, **init: object) -> list[int]:
        responses = await self.served.subscribe(offset_type=offset_type, group=GROUP, stop_offset=until, **init)
        records = [record for response in responses for record in response.records]
        assert [record.value for record in records] == [b"%d" % record.offset for record in records]
        return [record.offset for record in records]

    async def publish(self, first: int, stop: int) -> None:
        for base in range(first, stop, 500):
            values = [b"%d" % n for n in range(base, min(base + 500, stop))]
            (answer,) = await self.served.publish(publish_request(values))
            assert answer.base_offset == base

    async def pass_days(self, calendar: Calendar, days: int) -> None:
        """With the steps of the clock that the Raft leader proposes every few minutes."""
        calendar.days += days
        node = self.served.server.node
        now_ms = node.clock.wall_ns() // 1_000_000
        while (before_ms := node.state.expiry_clock_ms) < now_ms:  # a step that another one overtakes does nothing
            seen = range(before_ms, now_ms, 2 * CLOCK_ELAPSED_MS_MAX) if before_ms else (0,)
            steps = [AdvanceClock(seen_ms=ms, elapsed_ms=CLOCK_ELAPSED_MS_MAX, now_ms=now_ms) for ms in seen]
            await asyncio.gather(*(NodeCalls(node).propose(step, 10_000) for step in steps))

    async def fetch_at(self, offset: int) -> Struct:
        """The answer of the partition's leader, as it is on the wire."""
        leader = next(s for s in self.servers if any(r.is_leader for r in s.node.replica_statuses()))

        def ask() -> Struct:
            connection = RawKafka(self.kafka(leader))
            try:
                return connection.fetch("t", offset)
            finally:
                connection.close()

        return await asyncio.to_thread(ask)


async def read_and_leave(faces: Faces, calendar: Calendar) -> None:
    await faces.pass_days(calendar, 0)  # the first step only starts the clock of expiry
    await faces.served.create("t")
    await faces.publish(0, NEXT)
    assert await faces.read_kafka(NEXT, reset="earliest", commits=True) == list(range(NEXT))
    assert await faces.read_grpc(NEXT, pb.RESUME_OR_EARLIEST) == list(range(NEXT))
    async with Admin([format_address(server.grpc_address) for server in faces.servers]) as admin:
        await admin.commit_offsets(GROUP, {PLACE: NEXT})
    await faces.publish(NEXT, END)


async def check_lag(faces: Faces, first: int, days: int) -> None:
    """Of both groups: `first` is the first record that is there to read, and was written so many days ago."""
    async with Admin([format_address(server.grpc_address) for server in faces.servers]) as admin:
        found = [await admin.describe_group(name, with_sizes=True) for name in (GROUP, KAFKA_GROUP_PREFIX + GROUP)]
    sizes = set()
    for group in found:
        (at,) = group.positions
        assert (at.offset, at.hwm, at.lag, at.lag_records) == (NEXT, END, END - NEXT, END - first)
        assert at.lag_ms is not None
        assert days * DAY_MS <= at.lag_ms < (days + 1) * DAY_MS
        assert group.lag_total.offsets.value == END - NEXT
        sizes.add(at.lag_bytes)
    (size,) = sizes
    assert size is not None
    assert size > END - first


async def come_back(faces: Faces) -> None:
    """Both groups, and neither commits, so that they can come back once more."""
    missed = list(range(NEXT, END))
    assert await faces.read_grpc(END, pb.RESUME_OR_EARLIEST) == missed
    assert await faces.read_grpc(END, pb.RESUME_OR_LATEST) == missed
    assert await faces.read_kafka(END, reset="none") == missed


async def come_back_too_late_by_grpc(faces: Faces) -> None:
    error = await fails(faces.read_grpc(END, pb.RESUME_OR_EARLIEST))
    assert (error.name, error.lo, error.hi) == ("OFFSET_OUT_OF_RANGE", KEPT, END)
    assert f"records {NEXT} to {KEPT - 1} were removed" in error.message
    left = list(range(KEPT, END))
    assert await faces.read_grpc(END, pb.RESUME_OR_EARLIEST, reset_if_gone=True) == left


async def come_back_too_late_by_kafka(faces: Faces) -> None:
    answer = await faces.fetch_at(NEXT)
    assert (answer["error_code"], answer["records"]) == (KafkaError.OFFSET_OUT_OF_RANGE, b"")
    assert (answer["log_start_offset"], answer["high_watermark"]) == (KEPT, END)
    async with faces.consumer(reset="none") as consumer:
        with pytest.raises(OffsetOutOfRangeError) as error:
            await asyncio.wait_for(consumer.getone(), PATIENCE_S)
        assert error.value.args[0] == {PLACE: NEXT}
        assert await consumer.beginning_offsets([PLACE]) == {PLACE: KEPT}
    assert await faces.read_kafka(END, reset="earliest") == list(range(KEPT, END))


def test_a_consumer_that_was_away_for_30_days_reads_on_or_learns_what_is_gone(
    tmp_path: Path, calendar: Calendar
) -> None:
    ports = free_ports(3)

    async def story() -> None:
        async with cluster(tmp_path, ports) as faces:
            await read_and_leave(faces, calendar)
            await faces.pass_days(calendar, 15)
        async with cluster(tmp_path, ports) as faces:
            await faces.served.wait_leaders()
            await check_lag(faces, NEXT, days=15)
            await faces.pass_days(calendar, 15)
            await check_lag(faces, NEXT, days=30)
            await come_back(faces)
            await faces.served.admin.DeleteRecords(pb.DeleteRecordsRequest(partition=0, topic="t", before_offset=KEPT))
            await check_lag(faces, KEPT, days=30)
            await come_back_too_late_by_grpc(faces)
            await come_back_too_late_by_kafka(faces)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
