"""Offsets without records assigned per second: one by one and in batches, with one caller, a hundred and a thousand.

Owns the AssignOffsets figures, measured through our own client. Every caller waits for its answer before the next call.
All callers are tasks of one process and share one client, as they should in a program: see OffsetAssigner. CPU per call
is steadier than time on a busy machine.
"""

import asyncio
import itertools
import time

from benchmarks import loop
from benchmarks.cpu import TreeCpu
from benchmarks.report import Report, percentile
from smq.clients import Admin, OffsetAssigner
from smq.testing.cluster import Cluster

BATCH = 100  # offsets per call in the batched runs
CALLERS = 100  # as in the aims
TOPIC = "assigned"


def measure(cluster: Cluster, report: Report, *, calls: int) -> None:
    loop.start(_measure(cluster, report, calls)).result()


async def _measure(cluster: Cluster, report: Report, calls: int) -> None:
    addresses = [node.grpc for node in cluster.alive()]
    await _make_topic(addresses)
    nodes = [TreeCpu(node.pid) for node in cluster.alive()]
    async with OffsetAssigner(addresses) as assigner:
        for callers in (1, CALLERS, 1_000):
            for count in (1, BATCH):
                share = calls if callers == 1 else calls * 10
                await _run(assigner, nodes, report, callers=callers, count=count, calls=share)


def load(addresses: list[str], *, calls: int) -> None:
    """A hundred callers that assign one offset per call, without figures: for `profile`, which samples the nodes."""
    loop.start(_load(addresses, calls)).result()


async def _load(addresses: list[str], calls: int) -> None:
    await _make_topic(addresses)
    async with OffsetAssigner(addresses) as assigner:
        given, _ = await _assign(assigner, callers=CALLERS, count=1, calls=calls)
    _check(given)


async def _make_topic(addresses: list[str]) -> None:
    async with Admin(addresses) as admin:
        await admin.create_topic(TOPIC, config={"storage": "external"})


async def _run(
    assigner: OffsetAssigner, nodes: list[TreeCpu], report: Report, *, callers: int, count: int, calls: int
) -> None:
    client_s, nodes_s = time.process_time(), sum(node.root_seconds() for node in nodes)
    began = time.perf_counter()
    given, taken_ms = await _assign(assigner, callers=callers, count=count, calls=calls)
    per_s = len(given) / (time.perf_counter() - began)
    client_us = (time.process_time() - client_s) / len(given) * 1e6
    nodes_us = (sum(node.root_seconds() for node in nodes) - nodes_s) / len(given) * 1e6
    _check(given)
    p50, p99 = percentile(taken_ms, 50), percentile(taken_ms, 99)
    report.add(
        f"AssignOffsets, {callers:,} caller(s), {count} offset(s) per call",
        f"{per_s:,.0f} calls/s, {per_s * count:,.0f} offsets/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms; CPU per "
        f"call: client {client_us:.0f} us, nodes {nodes_us:.0f} us",
        calls_per_s=per_s,
        offsets_per_s=per_s * count,
        p50_ms=p50,
        p99_ms=p99,
        client_us=client_us,
        nodes_us=nodes_us,
    )


async def _assign(
    assigner: OffsetAssigner, *, callers: int, count: int, calls: int
) -> tuple[list[tuple[int, int]], list[float]]:
    """What each call got, its first and last offset, and how long it took, in ms."""
    given: list[tuple[int, int]] = []
    taken_ms: list[float] = []

    async def caller() -> None:
        for _ in range(max(1, calls // callers)):
            began = time.perf_counter()
            given.append(await assigner.assign(TOPIC, 0, count))
            taken_ms.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return given, taken_ms


def _check(given: list[tuple[int, int]]) -> None:
    ordered = sorted(given)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(ordered)), "an offset was assigned twice, or left out"
