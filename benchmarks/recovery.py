"""The time until a restarted node is ready, by the size of its log.

Owns the recovery figures. All nodes are killed together, so that no running process helps. The time runs from the start
of the processes until every node reports that it is ready. Large logs are measured on one node, for the disk's sake.
"""

import time

from benchmarks.report import Report
from smq.testing.cluster import Cluster
from smq.testing.node_client import batch_of

MIB = 1 << 20
VALUES = [b"r" * 1000] * 900  # one batch of about 0.9 MB


def measure(cluster: Cluster, report: Report, *, sizes_mib: list[int]) -> None:
    """Kills all nodes and waits until they are ready again, with logs of each size in turn."""
    nodes = "three nodes" if len(cluster.nodes) == 3 else "one node"
    topic = cluster.make_topic()
    batch = batch_of(VALUES)
    written = 0
    for size in [0, *sizes_mib]:
        leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
        while written < size * MIB:
            leader.publish_batch(topic, 0, batch)
            written += len(batch)
        cluster.wait_converged(topic, 1)
        cluster.kill(*cluster.nodes)
        began = time.monotonic()
        cluster.restart(*cluster.nodes)
        taken = time.monotonic() - began
        report.add(f"{nodes} killed and ready again, log of {size} MiB", f"{taken:.2f} s", seconds=taken, mib=size)


def measure_alone(cluster: Cluster, report: Report, *, sizes_mib: list[int]) -> None:
    """The same with a single node. The cluster is stopped."""
    cluster.stop()
    alone = Cluster(cluster.root / "one", 1)
    try:
        measure(alone.start(), report, sizes_mib=sizes_mib)
    finally:
        alone.stop()
