"""The time without writes to a partition when its leader is killed.

Owns the failover figures: from SIGKILL of the leader to the first acknowledgement of a batch that was sent afterwards,
with an idempotent producer that never stops trying.
"""

import statistics
import time

from benchmarks.report import Report
from chaos_tests.live.load.traffic import Traffic
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for


def measure(cluster: Cluster, report: Report, *, kills: int) -> None:
    """Every kill is healed before the next; the records are judged at the end."""
    topic = cluster.make_topic()
    taken: list[float] = []
    traffic = Traffic(cluster, topic, pause_s=0)
    with traffic:
        for _ in range(kills):
            taken.append(_one(cluster, traffic))
    traffic.verify()
    smallest, middle, largest = min(taken), statistics.median(taken), max(taken)
    report.add(
        f"leader killed, to the first acknowledgement, {kills} kills",
        f"min {smallest:.0f} ms, median {middle:.0f} ms, max {largest:.0f} ms",
        min_ms=smallest,
        median_ms=middle,
        max_ms=largest,
        all_ms=[round(ms, 1) for ms in taken],
    )


def _one(cluster: Cluster, traffic: Traffic) -> float:
    """Milliseconds without an acknowledgement after one kill."""
    outcome = traffic.outcomes[0]
    victim = cluster.wait_leader(traffic.topic, 0)
    traffic.wait_acks(3)
    before, killed_at = len(outcome.acks), time.monotonic()
    cluster.kill(victim)

    def first_ack() -> float | None:
        # Acknowledgements of the dead leader may still arrive: only the next leader's count.
        return next((at for at, node in outcome.acks[before:] if at > killed_at and node != victim), None)

    acked_at = wait_for("an acknowledgement by another leader", first_ack)
    cluster.restart(victim)
    return (acked_at - killed_at) * 1000
