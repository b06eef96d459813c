"""Which node coordinates which groups: a table of slots, balanced over the live nodes.

Owns the table. A group's name decides its slot. A slot belongs to one process of one node, in an epoch that grows with
each change. So a group has one coordinator at any time, and a former coordinator is recognized by its epoch. The table
follows registrations and fencing within the same command. It needs no election: everything that a coordinator must know
is in the replicated state, so it need not hold a log. Handlers and readers import it.
"""

import zlib

from smq.raft_state.ids import Epoch, NodeId
from smq.raft_state.limits import COORDINATOR_SLOTS
from smq.raft_state.state import ClusterState, CoordinatorSlot


def slot_of(group: str) -> int:
    """The slot of a group, by CRC-32, which is the same on every Python."""
    return zlib.crc32(group.encode()) % COORDINATOR_SLOTS


def coordinator_of(state: ClusterState, group: str) -> CoordinatorSlot:
    """The slot of the group's coordinator; node 0, epoch 0 as long as no node could coordinate."""
    return state.coordinators[slot_of(group)]


def reassign(state: ClusterState) -> None:
    """Gives slots without a live process to live ones, then balances. A node without a Kafka listener coordinates only
    if no live node has one, since Kafka clients could not reach it; a drained node only if there is no other. If no
    node is live, nothing changes."""
    slots = state.coordinators
    unfenced = [node for _, node in sorted(state.nodes.items()) if not node.fenced]
    live = [node for node in unfenced if node.kafka_address] or unfenced
    counts = {node.node: 0 for node in live if not node.drained} or {node.node: 0 for node in live}
    if not counts:
        return
    orphans: list[int] = []
    for index, slot in enumerate(slots):
        if slot.node in counts and state.nodes[slot.node].incarnation == slot.incarnation:
            counts[slot.node] += 1
        else:
            orphans.append(index)
    for index in orphans:
        _assign(state, index, _least_loaded(counts), counts)
    while True:
        most, least = min(counts, key=lambda n: (-counts[n], n)), _least_loaded(counts)
        if counts[most] - counts[least] <= 1:
            return
        index = next(i for i, slot in enumerate(slots) if slot.node == most)
        counts[most] -= 1
        _assign(state, index, least, counts)


def _least_loaded(counts: dict[NodeId, int]) -> NodeId:
    return min(counts, key=lambda n: (counts[n], n))


def _assign(state: ClusterState, index: int, node: NodeId, counts: dict[NodeId, int]) -> None:
    before = state.coordinators[index]
    state.coordinators[index] = CoordinatorSlot(
        node=node, incarnation=state.nodes[node].incarnation, epoch=Epoch(before.epoch + 1)
    )
    counts[node] += 1
