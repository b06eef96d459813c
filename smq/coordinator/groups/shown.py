"""Which groups have series of their own in the metrics: the same ones on every node.

Owns the rule: a group has all its series or none. Members, offsets and lag in offsets are shown by its coordinator,
bytes and time by the leaders of its partitions; each node can name the others' groups, because all is in the replicated
state. The lag monitor and the metrics import it.
"""

from collections import defaultdict
from collections.abc import Iterator

from smq.coordinator.limits import METRICS_GROUPS_MAX
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import NodeId
from smq.replication.api import NodeApi


def shown_groups(node: NodeApi) -> Iterator[tuple[str, NodeId, bool]]:
    """Each group's name, in order, with its coordinator, and whether it has series: the first ones of each coordinator.
    Node 0 coordinates as long as no node could; then Raft's leader shows its groups. Groups may come and go while the
    caller takes its time."""
    counts: defaultdict[NodeId, int] = defaultdict(int)
    for name in sorted(node.state.groups):
        owner = coordinator_of(node.state, name).node
        counts[owner] += 1
        yield name, owner, counts[owner] <= METRICS_GROUPS_MAX
