"""What 10,000 partitions and 1,000 groups cost: snapshots, restores, memory, and a node that has nothing to do.

Owns the figures at size. The state alone is measured in this process; then a cluster of three holds as many partitions,
and its nodes are watched from outside: the share of a core that they use while nobody asks anything, and how late they
answer a trivial request while thousands of commands make them take snapshots.
"""

import os
import time
import tracemalloc
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from benchmarks.report import Report
from smq.clients import SyncAdmin
from smq.raft_state.commands import CommitOffsets, CreateTopic, OffsetCommit, RegisterNode
from smq.raft_state.ids import DiskId, Incarnation, LogIndex, NodeId, Offset, RequestId, TopicId
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from tests.cluster.harness import Cluster

TOPICS, PARTITIONS = 10, 1_000
GROUPS, COMMITS = 1_000, 100  # each group has committed for so many partitions
REPLIES = 10_000
SNAPSHOT_ENTRIES = 5_000  # a node's default
IDLE_S = 10.0
PING_S = 0.005


def measure(cluster: Cluster, report: Report, *, quick: bool) -> None:
    _measure_state(report)
    with SyncAdmin(",".join(node.grpc for node in cluster.alive())) as admin:
        began = time.perf_counter()
        for topic in range(1 if quick else TOPICS):
            admin.create_topic(f"t{topic}", PARTITIONS)
        count = PARTITIONS * (1 if quick else TOPICS)
        report.add(f"creating {count:,} partitions", f"{time.perf_counter() - began:.1f} s")
        time.sleep(2.0)  # the last files are made, leaders have said so
        _measure_idle(cluster, report, count)
        _measure_pauses(cluster, admin, report, commands=SNAPSHOT_ENTRIES // (5 if quick else 1) + 500)


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
    taken, began = time.perf_counter() - began, time.perf_counter()
    assert Machine.restore(state).snapshot() == state
    restored = time.perf_counter() - began
    what = f"{TOPICS * PARTITIONS:,} partitions, {GROUPS * COMMITS:,} commits, {REPLIES:,} replies"
    report.add(f"state of {what}", f"{len(state) / 1e6:.1f} MB, {size / 1e6:.0f} MB in memory", bytes=len(state))
    report.add(
        f"its snapshot, in {len(pieces):,} pieces",
        f"{taken * 1000:.0f} ms, the longest piece {longest * 1000:.1f} ms",
        total_ms=taken * 1000,
        piece_max_ms=longest * 1000,
    )
    report.add("its restore, checked (at a start, or from another node)", f"{restored * 1000:.0f} ms")


def _full_machine() -> Machine:
    machine, index = Machine(), 0

    def apply(command: CreateTopic | RegisterNode | CommitOffsets) -> None:
        nonlocal index
        index += 1
        machine.apply(LogIndex(index), command)

    machine.apply(LogIndex(0), default_init("bench"))
    for n in (1, 2, 3):
        disk = DiskId(bytes([n]) * 16)
        addresses = {"grpc_address": "host:1", "http_address": "host:2", "kafka_address": "host:3"}
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
        apply(CommitOffsets(request_id=request, group=f"g{n % GROUPS}", items=items, committed_ms=1))
    return machine


def _measure_idle(cluster: Cluster, report: Report, count: int) -> None:
    before = {node.id: _cpu_s(node.pid) for node in cluster.alive()}
    time.sleep(IDLE_S)
    shares = [(_cpu_s(node.pid) - before[node.id]) / IDLE_S for node in cluster.alive()]
    memory = max(_rss_bytes(node.pid) for node in cluster.alive())
    report.add(
        f"an idle node with {count:,} partitions",
        f"{max(shares):.1%} of a core, {memory / 1e6:.0f} MB",
        core_share_max=max(shares),
        rss_bytes=memory,
    )


def _measure_pauses(cluster: Cluster, admin: SyncAdmin, report: Report, *, commands: int) -> None:
    """The longest wait for /healthz, which is answered by the node's own loop."""
    stop = Event()

    def ping(address: str) -> float:
        longest = 0.0
        while not stop.is_set():
            began = time.perf_counter()
            urllib.request.urlopen(f"http://{address}/healthz", timeout=10).read()
            longest = max(longest, time.perf_counter() - began)
            time.sleep(PING_S)
        return longest

    with ThreadPoolExecutor(40) as pool:
        pings = [pool.submit(ping, node.http) for node in cluster.alive()]
        work = [
            pool.submit(admin.commit_offsets, f"g{n % GROUPS}", {("t0", n % PARTITIONS): 0}) for n in range(commands)
        ]
        for done in work:
            done.result()
        stop.set()
        longest = max(p.result() for p in pings)
    report.add(
        f"longest wait for /healthz of any node during {commands:,} commits, snapshots among them",
        f"{longest * 1000:.0f} ms",
        max_ms=longest * 1000,
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
