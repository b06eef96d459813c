"""A mark: how much a node's disk has reported that it remembers of Raft (rule 18), and its bytes.

Owns the value and its packing, which Raft and the messages between nodes share. It holds no judgement: that is in
`raft.voters`.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from smq.raft_state.ids import DiskId, NodeId
from smq.raft_state.limits import DISK_ID_BYTES, NODES_MAX

START_BYTES: Final = 8
DISKS_KEPT_MAX: Final = 4  # per node, the latest: an older one differs from the registered one by its id
MARKS_MAX: Final = NODES_MAX * DISKS_KEPT_MAX
_MARK: Final = struct.Struct(f">i{DISK_ID_BYTES}s{START_BYTES}sQQ")


@dataclass(frozen=True, slots=True)
class Mark:
    """Of a node's disk: `writes` were durable when its process `start` (random bytes) reported them, `base` of them
    when that process began."""

    node: NodeId
    disk: DiskId
    start: bytes
    base: int
    writes: int


def pack_marks(marks: Iterable[Mark]) -> bytes:
    return b"".join(_MARK.pack(m.node, m.disk, m.start, m.base, m.writes) for m in marks)


def unpack_marks(data: bytes | memoryview) -> tuple[Mark, ...]:
    """Inverse of `pack_marks`. ValueError for anything else."""
    if len(data) % _MARK.size or len(data) > (MARKS_MAX + 1) * _MARK.size:
        raise ValueError(f"{len(data)} bytes of marks")
    return tuple(
        Mark(NodeId(n), DiskId(d), start, base, writes) for n, d, start, base, writes in _MARK.iter_unpack(data)
    )
