"""The integers and byte strings that mean something, and the ring that maps keys to partitions.

Owns the NewTypes that all layers use and the one definition of a key's slot. It must never import another layer, do I/O
or hold state. Any module may import it.
"""

import struct
from typing import Final, NewType

NodeId = NewType("NodeId", int)  # 1..2**31-1, chosen by the operator
Incarnation = NewType("Incarnation", int)  # int64, grows with every start of a node's process
DiskId = NewType("DiskId", bytes)  # 16 random bytes, written once into a data directory (rule 18)
BirthId = NewType("BirthId", bytes)  # 16 random bytes, of a cluster, made at its first start (rule 18)
TopicId = NewType("TopicId", bytes)  # 16 bytes, a random uuid, never reused
PartitionIndex = NewType("PartitionIndex", int)  # 0..partition_count-1 within a topic
PartitionId = NewType("PartitionId", bytes)  # 20 bytes: topic id, then big-endian uint32 index; never reused
Offset = NewType("Offset", int)  # int64 >= 0; ends of ranges are exclusive
Epoch = NewType("Epoch", int)  # int32 >= 0, one leadership of one partition
Term = NewType("Term", int)  # Raft's only
LogIndex = NewType("LogIndex", int)  # Raft's only
Generation = NewType("Generation", int)  # int32 >= 0, one membership of one group; 0 before the first
TsNs = NewType("TsNs", int)  # int64 nanoseconds since 1970, the leader's append time
ProducerId = NewType("ProducerId", int)  # int64 >= 0; -1 means "not idempotent"
ProducerEpoch = NewType("ProducerEpoch", int)  # int16
Sequence = NewType("Sequence", int)  # int32, wraps to 0 after 2**31-1
RequestId = NewType("RequestId", bytes)  # 16 random bytes chosen by the caller; b"" means "none"

NO_DISK: Final = DiskId(bytes(16))
NO_BIRTH: Final = BirthId(bytes(16))  # of a node or a state that belongs to no cluster yet
NO_EPOCH: Final = Epoch(-1)
NO_PRODUCER: Final = ProducerId(-1)
NO_REQUEST: Final = RequestId(b"")
NO_NODE: Final = NodeId(0)  # the leader of a partition of external storage, which needs none

TOPIC_ID_BYTES: Final = 16
RING_SLOTS_PER_PARTITION: Final = 32  # docs/decisions/one-kind-of-offset.md says why


def partition_id(topic_id: TopicId, index: PartitionIndex) -> PartitionId:
    """The 20-byte identity of a partition."""
    return PartitionId(topic_id + struct.pack(">I", index))


def split_partition_id(pid: PartitionId) -> tuple[TopicId, PartitionIndex]:
    """Inverse of `partition_id`."""
    return TopicId(pid[:TOPIC_ID_BYTES]), PartitionIndex(struct.unpack(">I", pid[TOPIC_ID_BYTES:])[0])


def ring_range(index: PartitionIndex) -> tuple[int, int]:
    """(range_start inclusive, range_stop exclusive) of the slots that partition `index` owns."""
    start = RING_SLOTS_PER_PARTITION * index
    return start, start + RING_SLOTS_PER_PARTITION


def key_partition(key: bytes, partition_count: int) -> PartitionIndex:
    """The partition of a key, as Kafka's default partitioner chooses it."""
    return PartitionIndex((murmur2(key) & 0x7FFFFFFF) % partition_count)


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 (seed 0x9747b28c), as an unsigned integer."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    h = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = (k * m) & mask
        k ^= k >> 24
        h = ((h * m) & mask) ^ ((k * m) & mask)
    rest = data[whole:]
    if rest:
        h ^= int.from_bytes(rest, "little")
        h = (h * m) & mask
    h ^= h >> 13
    h = (h * m) & mask
    return h ^ (h >> 15)
