"""What a batch costs three nodes, counted: the same each time, so that the hot path cannot grow in silence.

A figure here may fall: then write down the new one. It rises only with a reason.
"""

from collections import Counter

import pytest

from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch
from smq.replication.net import several, wire
from smq.replication.ports import Channel
from tests.unit.replication.hot_path import NODES, HotPath

ALL = NodeId(0)
LEADER, *FOLLOWERS = NODES
SETTLE_MS = 4  # after the last answer: what the followers do about it


def batch(size: int = 16_000) -> bytes:
    return encode_batch([NewRecord(None, b"v" * size, 1_000)])


@pytest.fixture(scope="module")
def world() -> HotPath:
    return HotPath(partitions=9)


def costs(world: HotPath, *, per_partition: int, partitions: int) -> dict[NodeId, Counter[str]]:
    """Of batches that reach node 1 in one turn of its loop."""
    led = world.led_by(LEADER)[:partitions]
    world.produce(LEADER, [(partition, batch(100)) for partition in led])
    world.scheduler.run_for_ms(500)
    with world.counted() as found:
        world.produce(LEADER, [(partition, batch()) for partition in led for _ in range(per_partition)])
        world.scheduler.run_for_ms(SETTLE_MS)
    return found


def test_the_appends_of_a_turn_leave_in_one_frame_to_each_follower(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)[LEADER]
    assert found["DATA frames"] == len(FOLLOWERS)
    assert found["Append"] == 3 * len(FOLLOWERS)  # one per partition, whatever it holds


def test_the_acknowledgements_of_a_commit_leave_in_one_frame(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)
    for follower in FOLLOWERS:
        # The first append wakes the disk, the others come while it writes: two commits.
        assert found[follower]["DATA frames"] <= 2
        assert found[follower]["Ack"] <= 2 * 3


def test_a_turn_costs_few_commits(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)
    for node in NODES:
        assert found[node]["commits"] <= 4  # two of batches, two of Raft's entries with the high water marks


def test_a_message_that_is_refused_costs_the_others_in_its_frame_nothing(world: HotPath) -> None:
    ping = wire.encode(wire.Ping(1, False))
    payload = b"".join(several.joined([ping, [b"\xff is no message"], ping]))
    with world.counted() as found:
        dispatcher = world.nodes[LEADER].dispatcher
        world.processes[LEADER].soon(lambda: dispatcher.on_message(NODES[1], Channel.DATA, memoryview(payload)))
        world.scheduler.run_for_ms(0)
    assert found[LEADER]["Ping"] == 2  # the answers
