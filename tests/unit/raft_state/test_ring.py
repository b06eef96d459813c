"""The ring agrees with Kafka's default partitioner, and every slot belongs to exactly one partition."""

import pytest

from smq.raft_state.ids import PartitionIndex, key_partition, murmur2, ring_range

# From Kafka's own UtilsTest.testMurmur2, as signed 32-bit integers.
KAFKA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("key", "expected"), KAFKA_VECTORS, ids=[key.decode() for key, _ in KAFKA_VECTORS])
def test_murmur2_matches_kafkas_own_vectors(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected & 0xFFFFFFFF
    assert key_partition(key, 7) == (expected & 0x7FFFFFFF) % 7


@pytest.mark.parametrize("partition_count", [1, 2, 6, 100])
def test_each_slot_is_owned_by_exactly_one_partition(partition_count: int) -> None:
    owned = [slot for p in range(partition_count) for slot in range(*ring_range(PartitionIndex(p)))]
    assert owned == list(range(32 * partition_count))


def test_partition_n_owns_slots_32n_to_32n_plus_31() -> None:
    assert ring_range(PartitionIndex(0)) == (0, 32)
    assert ring_range(PartitionIndex(3)) == (96, 128)
