"""Who this data directory belongs to, and which process of its node this is.

Owns the META rows of cluster id, node id and incarnation. A process must not speak before its incarnation is on
disk (rule 2), and must refuse a directory of another node or cluster.
"""

import struct
from collections.abc import Callable
from typing import Final

from smq.raft_state.ids import Incarnation
from smq.replication.config import NodeConfig
from smq.replication.ports import DataDamaged, Disk, Put, Table

CLUSTER_KEY: Final = b"cluster_id"
NODE_KEY: Final = b"node_id"
INCARNATION_KEY: Final = b"incarnation"
_INT: Final = struct.Struct(">q")


class StartRefused(Exception):
    """This process must not use this directory; the message says what to do."""


def claim_incarnation(disk: Disk, config: NodeConfig, at_least: int, done: Callable[[], None]) -> Incarnation:
    """The new incarnation: above every earlier one of this directory, and at least `at_least`.

    `done` runs once it is on disk. Wall-clock nanoseconds as `at_least` make it grow even where the directory was
    lost; the stored one makes it grow where the clock went back.
    """
    _check(disk, CLUSTER_KEY, config.cluster_id.encode(), "cluster")
    _check(disk, NODE_KEY, str(config.node_id).encode(), "node")
    stored = disk.get(Table.META, INCARNATION_KEY)
    if stored is not None and len(stored) != _INT.size:
        raise DataDamaged(f"meta/incarnation has {len(stored)} bytes, not {_INT.size}")
    last = _INT.unpack(stored)[0] if stored is not None else 0
    incarnation = Incarnation(max(last + 1, at_least))
    ops = [
        Put(Table.META, CLUSTER_KEY, config.cluster_id.encode()),
        Put(Table.META, NODE_KEY, str(config.node_id).encode()),
        Put(Table.META, INCARNATION_KEY, _INT.pack(incarnation)),
    ]
    disk.submit(ops, done)
    return incarnation


def _check(disk: Disk, key: bytes, expected: bytes, what: str) -> None:
    stored = disk.get(Table.META, key)
    if stored is not None and stored != expected:
        raise StartRefused(
            f"the data directory belongs to {what} {stored.decode(errors='replace')}, not {expected.decode()}: "
            "use the directory of this node, or an empty one"
        )
