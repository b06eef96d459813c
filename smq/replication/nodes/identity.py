"""Which node and cluster this data directory belongs to, and which process of its node this is.

Owns the META rows of cluster id, birth, node id, voters, disk id and incarnation. A process must not send anything
before its incarnation is on disk (rule 2), and must refuse a directory of another node or cluster, or of a cluster of
other nodes. The disk id names the directory itself, so that the others notice if it was replaced (rule 18), or if its
Raft data was lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from smq.raft_state.binary import INT32, INT64, UINT32, CodecError, Fixed, Layout, Reader, Rows
from smq.raft_state.ids import DiskId, Incarnation
from smq.raft_state.limits import BIRTH_ID_BYTES, DISK_ID_BYTES
from smq.replication.net.wire import Birth
from smq.replication.node_config import NodeConfig
from smq.replication.ports import DataDamaged, Delete, Disk, Op, Put, Rng, Table
from smq.replication.raft.journal import has_voted, is_whole_row

CLUSTER_KEY: Final = b"cluster_id"
NODE_KEY: Final = b"node_id"
VOTERS_KEY: Final = b"voters"
INCARNATION_KEY: Final = b"incarnation"
BIRTH_KEY: Final = b"birth"
DISK_KEY: Final = b"disk_id"
REPLACED_KEY: Final = b"raft_replaced"
COPIED_KEY: Final = b"copied_to"
_INCARNATION: Final = Layout(INT64)
# CRC and birth. The CRC is of key and value: a bit of it that has flipped is no other cluster.
_BIRTH: Final = Layout(UINT32, Fixed(BIRTH_ID_BYTES))
_BORN: Final = Rows(INT32, Fixed(DISK_ID_BYTES))  # each node, and its disk

_REPLACE: Final = "Replace it with an empty one while the others are up"


class StartRefused(Exception):
    """This process must not use this directory; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    incarnation: Incarnation
    disk: DiskId


def claim_identity(disk: Disk, config: NodeConfig, rng: Rng, at_least: int, done: Callable[[], None]) -> Claim:
    """The directory's disk id, made at its first use, and a new incarnation: above every earlier one of this
    directory, and at least `at_least`.

    `done` runs once it is on disk. Wall-clock nanoseconds as `at_least` make it grow even if the directory was lost;
    the stored one makes it grow if the clock went back.
    """
    _refuse_copied(disk)
    _check(disk, CLUSTER_KEY, config.cluster_id.encode(), "cluster")
    _check(disk, NODE_KEY, str(config.node_id).encode(), "node")
    voters = ", ".join(map(str, sorted(config.peers)))
    if stored_birth(disk) is not None:
        _check_voters(disk, voters)
    stored = disk.get(Table.META, INCARNATION_KEY)
    try:
        last = _INCARNATION.unpack(stored)[0] if stored is not None else 0
    except CodecError as e:
        raise DataDamaged(f"meta/incarnation has {e}") from e
    incarnation = Incarnation(max(last + 1, at_least))
    disk_id = _disk_id(disk, rng, is_first=stored is None)
    ops = [
        Put(Table.META, CLUSTER_KEY, config.cluster_id.encode()),
        Put(Table.META, NODE_KEY, str(config.node_id).encode()),
        Put(Table.META, VOTERS_KEY, voters.encode()),
        Put(Table.META, DISK_KEY, disk_id),
        Put(Table.META, INCARNATION_KEY, _INCARNATION.pack(incarnation)),
    ]
    disk.submit(ops, done)
    return Claim(incarnation=incarnation, disk=disk_id)


def stored_birth(disk: Disk) -> Birth | None:
    """None if the directory belongs to no cluster yet. Raises DataDamaged."""
    stored = disk.get(Table.META, BIRTH_KEY)
    if stored is None:
        if has_voted(disk):
            raise DataDamaged(
                "meta/birth is missing, and the node has taken part in a cluster: the directory is damaged, or of a "
                f"build before the first release. {_REPLACE}"
            )
        return None
    if not is_whole_row(BIRTH_KEY, stored):
        raise DataDamaged(f"meta/birth fails its checksum. {_REPLACE}")
    reader = Reader(stored)
    try:
        _, birth = _BIRTH.read(reader)
        return Birth(birth, _BORN.read(reader))
    except CodecError as e:
        raise DataDamaged(f"meta/birth does not decode: {e}. {_REPLACE}") from e


def birth_row(birth: Birth) -> Put:
    """As `stored_birth` reads it."""
    disks = _BORN.pack(birth.disks)
    crc = crc32c(BIRTH_KEY + birth.birth + disks)
    return Put(Table.META, BIRTH_KEY, _BIRTH.pack(crc, birth.birth) + disks)


def _disk_id(disk: Disk, rng: Rng, *, is_first: bool) -> DiskId:
    stored = disk.get(Table.META, DISK_KEY)
    if stored is None and is_first:
        return DiskId(rng.randbytes(DISK_ID_BYTES))
    if stored is None or len(stored) != DISK_ID_BYTES:
        what = "is missing" if stored is None else f"has {len(stored)} bytes, not {DISK_ID_BYTES}"
        raise DataDamaged(f"meta/disk_id {what}: replace this data directory with an empty one")
    return DiskId(stored)


def replace_disk_id(disk: Disk, rng: Rng, why: str, ops: list[Op], done: Callable[[], None]) -> DiskId:
    """This disk no longer holds everything that it has promised: from now on it is another one (rule 18). Written in
    one submission together with `ops`. `why` stays until `replacement_over`."""
    disk_id = DiskId(rng.randbytes(DISK_ID_BYTES))
    disk.submit([*ops, Put(Table.META, DISK_KEY, disk_id), Put(Table.META, REPLACED_KEY, why.encode())], done)
    return disk_id


def replacement(disk: Disk) -> str:
    """Why this directory counts as a replaced disk; empty if the others have let it in, or never had to."""
    return (disk.get(Table.META, REPLACED_KEY) or b"").decode(errors="replace")


def replacement_over() -> list[Op]:
    return [Delete(Table.META, REPLACED_KEY, REPLACED_KEY + b"\x00")]


def copied_to(where: str) -> Put:
    """From then on the disk with this id is elsewhere: no process may start on this directory."""
    return Put(Table.META, COPIED_KEY, where.encode())


def not_copied() -> list[Op]:
    """For a directory that has another disk id than its copy."""
    return [Delete(Table.META, COPIED_KEY, COPIED_KEY + b"\x00")]


def _refuse_copied(disk: Disk) -> None:
    where = disk.get(Table.META, COPIED_KEY)
    if where is not None:
        raise StartRefused(
            f"the data directory was copied to {where.decode(errors='replace')}, and both are the same disk: start the "
            "node on the copy. If there is none, run `smq disk copy` again. To use this directory nevertheless: `smq "
            "disk renew` makes it another disk"
        )


def _check(disk: Disk, key: bytes, expected: bytes, what: str) -> None:
    stored = disk.get(Table.META, key)
    if stored is not None and stored != expected:
        raise StartRefused(
            f"the data directory belongs to {what} {stored.decode(errors='replace')}, not {expected.decode()}: "
            "use the directory of this node, or an empty one"
        )


def _check_voters(disk: Disk, voters: str) -> None:
    """A majority of one set of nodes need not meet a majority of another one, and so could elect a leader without what
    that one has acknowledged. A directory of an earlier version names no set, and takes this one."""
    stored = disk.get(Table.META, VOTERS_KEY)
    if stored is not None and stored != voters.encode():
        raise StartRefused(
            f"the cluster of this data directory has the nodes {stored.decode(errors='replace')}, and [peers] names "
            f"{voters}: correct [peers], because a cluster keeps its nodes for life. For another number of nodes, "
            "start a new cluster, and copy the records to it"
        )
