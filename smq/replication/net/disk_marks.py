"""A mark: how much a node's disk has reported that it remembers of Raft (rule 18), and its bytes.

Owns the value and its packing, which Raft and the messages between nodes share. It holds no judgement: that is in
`raft.voters`.
"""

from typing import Final, NamedTuple

from smq.raft_state.binary import INT32, UINT64, Fixed, Rows
from smq.raft_state.ids import DiskId, NodeId
from smq.raft_state.limits import DISK_ID_BYTES, NODES_MAX

START_BYTES: Final = 8
DISKS_KEPT_MAX: Final = 4  # per node, the latest: an older one differs from the registered one by its id
MARKS_MAX: Final = NODES_MAX * DISKS_KEPT_MAX


class Mark(NamedTuple):
    """Of a node's disk: `writes` were durable when its process `start` (random bytes) reported them, `base` of them
    when that process began."""

    node: NodeId
    disk: DiskId
    start: bytes
    base: int
    writes: int


MARKS: Final = Rows(
    INT32, Fixed(DISK_ID_BYTES), Fixed(START_BYTES), UINT64, UINT64, make=Mark._make, count_max=MARKS_MAX + 1
)
