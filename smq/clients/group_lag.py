"""A group's lag in bytes and time, completed from the nodes that hold the partitions.

Owns which nodes are asked: the node that describes a group measures what it holds copies of, and the leaders measure
the rest. The admin client imports it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient
from smq.clients.errors import build
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import GroupDescription, GroupPosition, TopicPartition
from smq.raft_state.errors import SmqError

BACKLOGS_MAX = 1_000  # of one request; the node's own limit


async def with_all_sizes(cluster: ClusterClient, found: GroupDescription, timeout_ms: float) -> GroupDescription:
    """The description with the sizes that its node could not measure. What no leader reports stays None."""
    missing = [p for p in found.positions if p.lag and p.lag_bytes is None]
    if not missing:
        return found
    try:
        await cluster.refresh({p.topic for p in missing}, timeout_ms=timeout_ms)
    except SmqError:
        pass  # what is known of the leaders must do
    by_leader: dict[str, list[GroupPosition]] = defaultdict(list)
    for p in missing:
        view = cluster.metadata.partition(p.topic, p.partition)
        leader = cluster.metadata.leader_address(p.topic, p.partition)
        if leader is not None and view is not None and view.replicas:  # without replicas there are no bytes
            by_leader[leader].append(p)
    answers = await asyncio.gather(
        *(_measured(cluster, leader, positions, timeout_ms) for leader, positions in by_leader.items())
    )
    known = {place: backlog for answer in answers for place, backlog in answer.items()}
    return replace(found, positions=tuple(_completed(p, known.get((p.topic, p.partition))) for p in found.positions))


def _completed(position: GroupPosition, measured: pb.MeasuredBacklog | None) -> GroupPosition:
    if measured is None:
        return position
    return replace(position, lag_bytes=measured.size_bytes, lag_ms=measured.age_ms)


async def _measured(
    cluster: ClusterClient, address: str, positions: Iterable[GroupPosition], timeout_ms: float
) -> dict[TopicPartition, pb.MeasuredBacklog]:
    asked = [
        build(
            pb.PartitionOffset,
            topic=p.topic,
            partition=p.partition,
            offset=p.offset if p.offset is not None else p.log_start,
        )
        for p in positions
    ]
    found: dict[TopicPartition, pb.MeasuredBacklog] = {}
    for first in range(0, len(asked), BACKLOGS_MAX):
        some = asked[first : first + BACKLOGS_MAX]

        async def run(
            node: NodeStubs, node_ms: int, call_s: float, some: list[pb.PartitionOffset] = some
        ) -> pb.MeasureBacklogsResponse:
            request = build(pb.MeasureBacklogsRequest, offsets=some, timeout_ms=node_ms)
            return await node.broker.MeasureBacklogs(request, timeout=call_s)

        outcome = await cluster.attempt(run, address, timeout_ms)
        if isinstance(outcome, SmqError):
            break
        found |= {(b.topic, b.partition): b for b in outcome[0].backlogs if not b.HasField("error")}
    return found
