"""The cost of 10,000 partitions and 1,000 groups: snapshots, restores, memory, and an idle node.

Owns the figures at this size. The state alone is measured in this process. Then a cluster of three nodes holds as much
and is watched from outside: the CPU time of idle nodes, and the pauses of their loops while topics are created,
snapshots are taken and installed, a node comes back, and topics are deleted.
"""

import os
import signal
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.many_partitions.pauses import INTERVAL_S, LONG_MS, Watch
from benchmarks.report import Report
from smq.clients import SyncAdmin
from smq.raft_state.command_codec import FEATURE_LEVEL
from smq.raft_state.commands import CommitOffsets, CreateTopic, OffsetCommit, RegisterNode
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.handlers.fencing import changes_of
from smq.raft_state.ids import DiskId, Incarnation, LogIndex, NodeId, Offset, RequestId, TopicId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for

TOPICS, PARTITIONS = 10, 1_000
GROUPS, COMMITS = 1_000, 100  # each group has committed offsets of this many partitions
REPLIES = 10_000
SNAPSHOT_ENTRIES = 5_000  # a node's default
IDLE_S = 10.0
SETTLE_S = 2.0
CALLERS = 40


def measure(cluster: Cluster, report: Report, *, quick: bool) -> None:
    topics = 1 if quick else TOPICS
    groups, replies = (GROUPS // 10, REPLIES // 10) if quick else (GROUPS, REPLIES)
    _measure_state(report)
    with SyncAdmin(",".join(node.grpc for node in cluster.alive())) as admin:
        with Watch([node.http for node in cluster.alive()]) as watch:
            _measure_creation(admin, watch, report, topics)
            _measure_idle(cluster, watch, report, topics * PARTITIONS)
            _measure_commits(admin, watch, report, groups, replies)
            _measure_digest(cluster, watch, report)
        _measure_install(cluster, admin, report, SNAPSHOT_ENTRIES + 2_000)
        _measure_restart(cluster, report)
        with Watch([node.http for node in cluster.alive()]) as watch:
            began = time.perf_counter()
            for topic in range(topics):
                admin.delete_topic(f"t{topic}")
            took = time.perf_counter() - began
            _add_pause(report, watch, f"deleting {topics * PARTITIONS:,} partitions took {took:.1f} s")


def _add_pause(report: Report, watch: Watch, what: str) -> None:
    longest_ms, long_ones = watch.take()
    text = f"{longest_ms:.0f} ms, {long_ones} above {LONG_MS:.0f} ms"
    report.add(f"longest pause: {what}", text, pause_max_ms=longest_ms, pauses_long=long_ones)


def _measure_creation(admin: SyncAdmin, watch: Watch, report: Report, topics: int) -> None:
    watch.take()
    began = time.perf_counter()
    for topic in range(topics):
        admin.create_topic(f"t{topic}", PARTITIONS)
    took = time.perf_counter() - began
    time.sleep(SETTLE_S)  # until the last logs are made and leaders have reported it
    _add_pause(report, watch, f"creating {topics * PARTITIONS:,} partitions, {PARTITIONS:,} a topic, took {took:.1f} s")


def _measure_state(report: Report) -> None:
    tracemalloc.start()
    machine = _full_machine()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pieces, longest = list[bytes](), 0.0
    began = last = time.perf_counter()
    for piece in machine.snapshot_pieces():
        pieces.append(piece)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    state = b"".join(pieces)
    taken = time.perf_counter() - began
    what = f"{TOPICS * PARTITIONS:,} partitions, {GROUPS * COMMITS:,} commits, {REPLIES:,} replies"
    report.add(f"state of {what}", f"{len(state) / 1e6:.1f} MB, {size / 1e6:.0f} MB in memory", bytes=len(state))
    report.add(
        f"its snapshot, in {len(pieces):,} pieces",
        f"{taken * 1000:.0f} ms, the longest piece {longest * 1000:.1f} ms",
        total_ms=taken * 1000,
        piece_max_ms=longest * 1000,
    )
    count, longest = 0, 0.0
    began = last = time.perf_counter()
    for _ in Machine.restoring(state, FEATURE_LEVEL):
        now = time.perf_counter()
        count, longest, last = count + 1, max(longest, now - last), now
    restored = time.perf_counter() - began
    report.add(
        f"its restore, checked, in {count:,} steps",
        f"{restored * 1000:.0f} ms, the longest step {longest * 1000:.1f} ms",
        total_ms=restored * 1000,
        step_max_ms=longest * 1000,
    )
    assert Machine.restore(state).snapshot() == state


def _full_machine() -> Machine:
    machine, index = Machine(), 0

    def apply(command: CreateTopic | RegisterNode | CommitOffsets) -> None:
        nonlocal index
        index += 1
        machine.apply(LogIndex(index), command)

    machine.apply(LogIndex(0), default_init("bench"))
    for n in (1, 2, 3):
        disk = DiskId(bytes([n]) * 16)
        addresses: dict[str, Any] = {"grpc_address": "host:1", "http_address": "host:2", "kafka_address": "host:3"}
        apply(RegisterNode(node=NodeId(n), incarnation=Incarnation(1), disk=disk, **addresses))
    for n in range(TOPICS):
        topic_id = TopicId(bytes([n + 1]) * 16)
        apply(
            CreateTopic(name=f"t{n}", topic_id=topic_id, partition_count=PARTITIONS, replication_factor=3, created_ms=0)
        )
    pids = [p.pid for t in machine.state.topics.values() for p in t.partitions]
    for n in range(REPLIES):
        first = n % GROUPS * COMMITS // 10
        count = COMMITS if n < GROUPS else 1
        items = tuple(OffsetCommit(partition=pids[(first + k) % len(pids)], offset=Offset(n % 2)) for k in range(count))
        request = RequestId(n.to_bytes(16, "big"))
        group = f"g{n % GROUPS}"
        apply(
            CommitOffsets(
                request_id=request,
                group=group,
                coordinator_epoch=coordinator_of(machine.state, group).epoch,
                changes_seen=changes_of(machine.state, group),
                items=items,
                committed_ms=1,
            )
        )
    return machine


def _measure_idle(cluster: Cluster, watch: Watch, report: Report, count: int) -> None:
    watch.take()
    before = {node.id: _cpu_s(node.pid) for node in cluster.alive()}
    time.sleep(IDLE_S)
    shares = [(_cpu_s(node.pid) - before[node.id]) / IDLE_S for node in cluster.alive()]
    memory = max(_rss_bytes(node.pid) for node in cluster.alive())
    report.add(
        f"an idle node with {count:,} partitions (asked /healthz {1 / INTERVAL_S:.0f} times a second)",
        f"{max(shares):.1%} of a core, {memory / 1e6:.0f} MB",
        core_share_max=max(shares),
        rss_bytes=memory,
    )
    _add_pause(report, watch, f"an idle node with {count:,} partitions")


def _measure_commits(admin: SyncAdmin, watch: Watch, report: Report, groups: int, replies: int) -> None:
    """Fills groups and reply cache; snapshots are taken in between."""
    watch.take()
    commit(admin, groups, each=COMMITS, groups=groups)
    _add_pause(report, watch, f"{groups:,} commits of {COMMITS} offsets each")
    commit(admin, replies, each=1, groups=groups)
    _add_pause(report, watch, f"{replies:,} commits, snapshots among them")


def commit(admin: SyncAdmin, count: int, *, each: int, groups: int) -> None:
    def one(n: int) -> None:
        admin.commit_offsets(f"g{n % groups}", {("t0", (n + k) % PARTITIONS): 0 for k in range(each)})

    with ThreadPoolExecutor(CALLERS) as pool:
        for _ in pool.map(one, range(count)):
            pass


def _measure_digest(cluster: Cluster, watch: Watch, report: Report) -> None:
    watch.take()
    for node in cluster.alive():
        node.raw.status(with_digest=True)
    _add_pause(report, watch, "the digest of the state, once on each node")


def _measure_install(cluster: Cluster, admin: SyncAdmin, report: Report, commands: int) -> None:
    """A node is frozen until the others' journals no longer hold the entries that it lacks; it gets a snapshot."""
    away = min(node.id for node in cluster.alive() if node.raw.status().raft_leader != node.id)
    cluster.signal(away, signal.SIGSTOP)
    commit(admin, commands, each=1, groups=10)
    target = max(node.raw.status().applied_index for node in cluster.alive() if node.id != away)
    with Watch([node.http for node in cluster.alive() if node.id != away]) as watch:
        cluster.signal(away, signal.SIGCONT)
        began = time.perf_counter()
        with Watch([cluster.nodes[away].http]) as own:
            wait_for("the node caught up", lambda: cluster.nodes[away].raw.status().applied_index >= target, 120)
            took = time.perf_counter() - began
            time.sleep(SETTLE_S)
            _add_pause(report, own, f"on a node that takes over a snapshot, level again after {took:.1f} s")
        _add_pause(report, watch, "on the others meanwhile")


def _measure_restart(cluster: Cluster, report: Report) -> None:
    node = next(iter(cluster.nodes))
    cluster.kill(node)
    began = time.perf_counter()
    with Watch([other.http for other in cluster.alive()]) as watch:
        cluster.restart(node)
        took = time.perf_counter() - began
        time.sleep(SETTLE_S)
        _add_pause(report, watch, "on the others while a killed node comes back")
    memory = _rss_bytes(cluster.nodes[node].pid)
    report.add("a killed node is ready after", f"{took:.1f} s, {memory / 1e6:.0f} MB", s=took, rss_bytes=memory)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
