"""The asyncio client of offsets without records: ranges of a topic with storage=external, and its high water mark.

Owns what makes a repeated attempt safe: one request id per call, and a bound from before its first attempt. It owns one
stream of each kind per node, too. Users, `sync` and the command line import it.
"""

import asyncio
import secrets
from typing import TypeAlias

from smq.clients.arguments import Duration, check_int, check_place, milliseconds
from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient
from smq.clients.errors import build
from smq.clients.lifecycle import Lifecycle
from smq.clients.login import Login
from smq.clients.metadata import Servers
from smq.clients.offset_stream import Advances, Assignments, OffsetStream
from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import Tls
from smq.raft_state.errors import ErrorCode, SmqError

AssignStream: TypeAlias = OffsetStream[pb.Assignment, pb.Assigned, pb.AssignOffsetsRequest, pb.AssignOffsetsResponse]
AdvanceStream: TypeAlias = OffsetStream[
    pb.Advance, pb.Advanced, pb.AdvanceHighWaterMarkRequest, pb.AdvanceHighWaterMarkResponse
]


class OffsetAssigner(Lifecycle):
    """`async with OffsetAssigner("host:port") as a: base, last = await a.assign("t", 0, 5)`.

    Any number of tasks may call it concurrently: calls of one turn of the event loop share a message, and calls that
    reach one node together share one round of Raft. One assigner for all tasks of a process is therefore the fast way.
    `timeout_ms` bounds each call, attempts at other nodes included; `connect_timeout_ms` bounds start(). Beside its own
    errors every call raises INVALID_REQUEST for a wrong argument, UNKNOWN_TOPIC, UNKNOWN_PARTITION, and NO_QUORUM,
    TIMED_OUT or UNREACHABLE if the cluster has not answered in time."""

    def __init__(
        self,
        bootstrap: Servers | None = None,
        *,
        servers: Servers | None = None,
        timeout_ms: Duration = 30_000.0,
        connect_timeout_ms: Duration = 10_000.0,
        tls: Tls | None = None,
        login: Login | None = None,
    ) -> None:
        self._cluster = ClusterClient(
            bootstrap, servers=servers, connect_timeout_ms=connect_timeout_ms, tls=tls, login=login
        )
        self._timeout_ms = milliseconds("timeout_ms", timeout_ms)
        self._bounds: dict[tuple[str, int], int] = {}  # a past next_offset of each partition used
        self._assign_streams: dict[str, AssignStream] = {}  # by address: bounded by the cluster's nodes
        self._advance_streams: dict[str, AdvanceStream] = {}

    async def start(self) -> None:
        """Finds the cluster, within `connect_timeout_ms`. UNREACHABLE. `async with` calls it."""
        await self._cluster.start()

    async def close(self) -> None:
        """Closes the connections. Every later call raises CLIENT_CLOSED."""
        await self._cluster.close()
        closing = [stream.close() for stream in self._assign_streams.values()]
        closing += [stream.close() for stream in self._advance_streams.values()]
        await asyncio.gather(*closing)

    def _assign_stream(self, node: NodeStubs) -> AssignStream:
        found = self._assign_streams.get(node.address)
        if found is None or found.is_broken:
            found = self._assign_streams[node.address] = OffsetStream(node.address, node, Assignments())
        return found

    def _advance_stream(self, node: NodeStubs) -> AdvanceStream:
        found = self._advance_streams.get(node.address)
        if found is None or found.is_broken:
            found = self._advance_streams[node.address] = OffsetStream(node.address, node, Advances())
        return found

    async def assign(
        self,
        topic: str,
        partition: int,
        count: int = 1,
        *,
        request_id: bytes | None = None,
        not_before: int | None = None,
    ) -> tuple[int, int]:
        """(base, last): `count` offsets that no other caller gets. WRONG_STORAGE, REQUEST_EXPIRED.

        A later call with the same `request_id` (16 bytes, chosen by the caller) returns the same offsets. With
        `not_before`, a next_offset from before the first such call, it is refused if the cluster has forgotten the
        request; without it, it would then get other offsets."""
        check_place(topic, partition)
        check_int("count", count, 1)
        if not_before is not None:
            check_int("not_before", not_before, 0)
        key, request_id_used = (topic, partition), secrets.token_bytes(16) if request_id is None else request_id
        if key not in self._bounds:
            self._bounds[key] = await self._next_offset(topic, partition)
        bound = not_before if not_before is not None else self._bounds[key]
        is_first = True

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.Assigned:
            nonlocal is_first
            known = not_before if is_first else bound  # at the first attempt the node knows a better bound
            is_first = False
            request = build(
                pb.Assignment,
                topic=topic,
                partition=partition,
                count=count,
                request_id=request_id_used,
                not_before=known,
                timeout_ms=node_ms,
            )
            return await self._assign_stream(node).submit(request, call_s)

        given = await self._cluster.call(run, timeout_ms=self._timeout_ms)
        if given.last_offset - given.base_offset + 1 != count:
            raise SmqError(ErrorCode.INTERNAL, f"{count} offsets were requested, but the answer was {given}")
        self._bounds[key] = given.last_offset + 1
        return given.base_offset, given.last_offset

    async def _next_offset(self, topic: str, partition: int) -> int:
        async def run(node: NodeStubs, node_ms: int, call_s: float) -> int:
            request = build(pb.GetPartitionRangeInfoRequest, topic=topic, partition=partition, timeout_ms=node_ms)
            return (await node.broker.GetPartitionRangeInfo(request, timeout=call_s)).next_offset

        return await self._cluster.call(run, timeout_ms=self._timeout_ms)

    async def advance(self, topic: str, partition: int, offset: int) -> int:
        """Declares that everything below `offset` can be read. Returns the mark in force, which never goes back.
        OFFSET_OUT_OF_RANGE above the assigned offsets."""

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> int:
            request = build(pb.Advance, topic=topic, partition=partition, offset=offset, timeout_ms=node_ms)
            return (await self._advance_stream(node).submit(request, call_s)).hwm

        return await self._cluster.call(run, timeout_ms=self._timeout_ms)
