"""Who coordinates which groups: a table of slots, kept even over the nodes that live.

Owns the table. A group belongs to a slot by its name, a slot to one process of one node, under an epoch that each
change raises: so there is one coordinator of a group at any time, and whoever was it before is known by its epoch. The
table follows registrations and fencing within the same command, without an election: there is no log that a coordinator
would have to hold, since all it must know is in the replicated state. Handlers and readers import it.
"""

import zlib

from smq.raft_state.ids import Epoch, NodeId
from smq.raft_state.limits import COORDINATOR_SLOTS
from smq.raft_state.state import ClusterState, CoordinatorSlot


def slot_of(group: str) -> int:
    """The slot of a group. CRC-32, since it is the same on every Python."""
    return zlib.crc32(group.encode()) % COORDINATOR_SLOTS


def coordinator_of(state: ClusterState, group: str) -> CoordinatorSlot:
    """Who coordinates the group; node 0, epoch 0 while no node could."""
    return state.coordinators[slot_of(group)]


def reassign(state: ClusterState) -> None:
    """Gives what is not coordinated by a live process to live ones, and evens out. A node without a Kafka listener
    coordinates nothing, since nobody could reach it, and a drained one only where there is no other. Without any live
    node all stays as it is."""
    slots = state.coordinators
    live = [node for _, node in sorted(state.nodes.items()) if not node.fenced and node.kafka_address]
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
        _give(state, index, _least(counts), counts)
    while True:
        most, least = min(counts, key=lambda n: (-counts[n], n)), _least(counts)
        if counts[most] - counts[least] <= 1:
            return
        index = next(i for i, slot in enumerate(slots) if slot.node == most)
        counts[most] -= 1
        _give(state, index, least, counts)


def _least(counts: dict[NodeId, int]) -> NodeId:
    return min(counts, key=lambda n: (counts[n], n))


def _give(state: ClusterState, index: int, node: NodeId, counts: dict[NodeId, int]) -> None:
    before = state.coordinators[index]
    state.coordinators[index] = CoordinatorSlot(
        node=node, incarnation=state.nodes[node].incarnation, epoch=Epoch(before.epoch + 1)
    )
    counts[node] += 1
