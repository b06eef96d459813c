"""Strikes that change the smq of a node: to one that knows level 2, and back to one that does not.

Owns these strikes and the end of an upgrade. A node is only upgraded by a restart. Going back is an operator's mistake:
once the cluster is at level 2 such a node must wait, and work again after the next upgrade. It is always the same node
that goes back, so that a majority stays.
"""

from chaos_tests.sim.cluster import Cluster, SimHost
from chaos_tests.sim.faults.catalogue import Fault
from chaos_tests.sim.levels import LEVEL_TWO
from chaos_tests.sim.rpc import Script


def upgrade(fault: Fault) -> Script:
    """A node that does not know level 2 is stopped and started with an smq that does."""
    for node in fault.targets():
        if fault.arena.cluster.configs[node].feature_level_known < LEVEL_TWO:
            _replace(fault, fault.arena.cluster.hosts[node], LEVEL_TWO)
    yield fault.duration()


def downgrade(fault: Fault) -> Script:
    """The victim gets the old smq, and some time later the new one again."""
    cluster, node = fault.arena.cluster, fault.arena.victim
    if cluster.configs[node].feature_level_known == LEVEL_TWO:
        _replace(fault, cluster.hosts[node], LEVEL_TWO - 1)
        yield fault.duration()
        _replace(fault, cluster.hosts[node], LEVEL_TWO)
    yield fault.duration()


def _replace(fault: Fault, host: SimHost, level: int) -> None:
    cluster = fault.arena.cluster
    cluster.crash(host.node, power=False, why=f"to install level {level}")
    cluster.install(host.node, level)
    cluster.start_later(host.node, fault.rng.uniform(50, 1500))


def finish(cluster: Cluster, host: SimHost, newest: int) -> None:
    """At the end of a run all nodes are upgraded: a strike may have been cut short while the only one was back."""
    if cluster.configs[host.node].feature_level_known < newest:
        cluster.crash(host.node, power=False, why=f"to install level {newest}")
        cluster.install(host.node, newest)
