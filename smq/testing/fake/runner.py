"""Starts fake clusters: in the test's own event loop, or in a thread for tests that block.

Owns which services a node has. Tests import it; nothing else of the package does.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc

from smq.clients.pb.smq_pb2_grpc import (
    add_AdminServicer_to_server,
    add_AgentServicer_to_server,
    add_BrokerServicer_to_server,
)
from smq.testing.fake.admin import Admin
from smq.testing.fake.agent import Agent
from smq.testing.fake.broker import Broker
from smq.testing.fake.cluster import FakeCluster, FakeNode
from smq.testing.loops import in_thread


@asynccontextmanager
async def cluster_of(nodes: int = 1, **topics: int) -> AsyncIterator[FakeCluster]:
    """A running cluster of `nodes` nodes, numbered from 1, with these topics (name=partitions)."""
    cluster = FakeCluster()
    for number in range(1, nodes + 1):
        cluster.nodes[number] = FakeNode(cluster, number, _add_services)
        await cluster.nodes[number].start()
    for name, count in topics.items():
        cluster.create(name, count)
    try:
        yield cluster
    finally:
        await cluster.stop()


@contextmanager
def cluster_in_thread(nodes: int = 1, **topics: int) -> Iterator[FakeCluster]:
    """As `cluster_of`, for a test that has no event loop. The hooks run in the cluster's thread."""
    with in_thread(cluster_of(nodes, **topics)) as cluster:
        yield cluster


def _add_services(node: FakeNode, server: grpc.aio.Server) -> None:
    add_AgentServicer_to_server(Agent(node), server)
    add_BrokerServicer_to_server(Broker(node), server)
    add_AdminServicer_to_server(Admin(node), server)  # type: ignore[abstract]  # UNIMPLEMENTED for what it lacks
