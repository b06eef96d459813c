"""What a batch costs three nodes, counted: the same each time, so that the hot path cannot grow in silence.

A figure here may fall: then write down the new one. It rises only with a reason.
"""

import gc
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from smq.raft_state.ids import NodeId, Offset
from smq.records import NewRecord, encode_batch
from smq.replication.log.stored_batch import batch_key
from smq.replication.net import wire
from smq.replication.ports import Buffer, Channel, Table
from tests.unit.replication.allocations import Allocations
from tests.unit.replication.hot_path import NODES, TOPIC, HotPath

ALL = NodeId(0)
LEADER, *FOLLOWERS = NODES
SETTLE_MS = 4  # after the last answer: what the followers do about it


def batch(size: int = 16_000) -> bytes:
    return encode_batch([NewRecord(None, b"v" * size, 1_000)])


@pytest.fixture
def world() -> HotPath:
    return HotPath(partitions=9)  # one for each test, so that timers are at the same place in every run


def test_batches_that_come_while_a_small_one_is_on_its_way_share_the_next_frame_and_commit(world: HotPath) -> None:
    led = world.led_by(LEADER)[:1]
    world.rest()
    with world.counted() as found:
        world.produce_in_turns(LEADER, [[(partition, batch(100)) for partition in led] for _ in range(10)], 0.2)
        world.scheduler.run_for_ms(SETTLE_MS)
    assert found[LEADER]["Append"] <= 3 * len(FOLLOWERS)  # of ten turns
    assert found[LEADER]["Commits"] <= 2 * len(FOLLOWERS)  # the first and the last; the next append carries the others
    for node in NODES:
        assert found[node]["commits"] <= 3


def costs(world: HotPath, *, per_partition: int, partitions: int, size: int = 16_000) -> dict[NodeId, Counter[str]]:
    """Of batches that reach node 1 in one turn of its loop."""
    led = world.led_by(LEADER)[:partitions]
    world.produce(LEADER, [(partition, batch(100)) for partition in led])
    world.rest()
    with world.counted() as found:
        world.produce(LEADER, [(partition, batch(size)) for partition in led for _ in range(per_partition)])
        world.scheduler.run_for_ms(SETTLE_MS)
    return found


def test_the_appends_of_a_turn_leave_in_one_frame_to_each_follower(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)[LEADER]
    assert found["Append"] == 3 * len(FOLLOWERS)  # one per partition, whatever it holds
    assert found["Commits"] <= len(FOLLOWERS)  # with all commit points
    assert found["DATA frames"] == len(FOLLOWERS) + found["Commits"]


def test_the_acknowledgements_of_a_commit_leave_in_one_frame(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)
    for follower in FOLLOWERS:
        assert found[follower]["DATA frames"] == 1
        assert found[follower]["Ack"] == 3


def test_a_turn_costs_one_commit(world: HotPath) -> None:
    found = costs(world, per_partition=8, partitions=3)
    for node in NODES:
        assert found[node]["commits"] == 1  # Raft's entry with the high water marks comes later, for all of them


def test_a_batch_is_parsed_once_on_each_node_and_copied_once_by_each(world: HotPath) -> None:
    calls = costs(world, per_partition=8, partitions=3)[ALL]
    batches = 24
    assert calls["validate_produced"] == calls["build_value"] == batches  # on the leader
    assert calls["parse_value"] == calls["info_of_stored"] == len(FOLLOWERS) * batches
    assert calls["parse_header"] == batches  # followers make no object of it


def test_one_object_of_a_batch_goes_to_memory_disk_and_followers(world: HotPath) -> None:
    """The leader copies it out of the request, a follower out of the frame."""
    (partition,) = world.led_by(LEADER)[:1]
    world.ports[LEADER].large.clear()
    world.produce(LEADER, [(partition, batch())])
    world.scheduler.run_for_ms(SETTLE_MS)
    pid = world.nodes[LEADER].state.topics[TOPIC].partitions[partition].pid
    for node in NODES:
        log = world.nodes[node].replicas.log(pid)
        assert log is not None
        (stored,) = log.read_memory(Offset(log.appended_end - 1), log.appended_end, 1) or []
        assert world.disks[node].get(Table.BATCHES, batch_key(pid, stored.base)) is stored.value
        if node == LEADER:
            sent = world.ports[LEADER].large
            assert len(sent) == len(FOLLOWERS)
            assert all(part is stored.value for part in sent)


def test_functions_called_for_a_batch_among_others(world: HotPath) -> None:
    """Of smq, on all three nodes together. One or two of them count and time what the leader does."""
    found = costs(world, per_partition=8, partitions=3)
    assert found[ALL]["all calls"] / 24 < 140
    assert found[LEADER]["submissions"] <= 24 + 2  # one for each batch, and those of Raft
    for node in FOLLOWERS:
        assert found[node]["submissions"] <= 3 + 2  # one for each partition


def test_functions_called_for_a_small_batch_among_those_of_a_turn(world: HotPath) -> None:
    """One partition, and no batch larger than a record: what many clients cost that have one record in flight each."""
    found = costs(world, per_partition=33, partitions=1, size=100)
    assert found[ALL]["all calls"] / 33 < 112
    assert found[LEADER]["Append"] == len(FOLLOWERS)
    for node in FOLLOWERS:
        assert found[node]["submissions"] == 1


def test_allocations_for_a_batch_among_others(world: HotPath) -> None:
    """On all three nodes together, with their disks, which are dicts here. At the peak the network has a frame as well,
    with all batches: that is one more copy of each."""
    batches = 8 * [(partition, batch()) for partition in world.led_by(LEADER)[:3]]
    count, size = len(batches), len(batch())
    for _ in range(2):  # tables that grow, and what Python makes once for a function that it profiles, are in the first
        world.rest()
        with Allocations() as found:
            world.produce(LEADER, batches)
            world.scheduler.run_for_ms(SETTLE_MS)
    assert found.large == found.large_kept == len(NODES) * count  # no copy but the one that each node keeps
    assert found.large_bytes / count < 3.01 * size
    assert found.bytes_kept / count < 3.4 * size
    assert found.bytes_peak / count < 4.4 * size
    assert found.blocks_kept / count < 33  # one more object on each node breaks this, and the next
    assert found.blocks_peak / count < 50


def test_a_batch_leaves_nothing_to_the_garbage_collector(world: HotPath) -> None:
    led = [(partition, batch(100)) for partition in world.led_by(LEADER)]
    world.produce(LEADER, led)
    gc.collect()
    gc.disable()
    try:
        world.produce(LEADER, 10 * led)
        world.scheduler.run_for_ms(SETTLE_MS)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_what_a_batch_costs_that_comes_alone(world: HotPath) -> None:
    """Until it is answered. Raft's entry with the high water mark follows, for all batches of the meantime."""
    found = costs(world, per_partition=1, partitions=1)
    assert found[ALL]["all calls"] < 505
    assert found[ALL]["Raft._turn"] == 0
    for node in NODES:
        assert found[node]["commits"] == found[node]["submissions"] == 1
    assert found[LEADER]["DATA frames"] == 2 * len(FOLLOWERS)  # the batch, and the commit point
    assert [found[node]["DATA frames"] for node in FOLLOWERS] == [1, 1]
    assert sum(found[node]["CONTROL frames"] for node in NODES) == 0
    assert sum(found[node]["callbacks"] for node in NODES) <= 16  # the slower follower has stored it, too, or not


def commit_costs(world: HotPath, node_id: NodeId, count: int) -> dict[NodeId, Counter[str]]:
    """Of offset commits that reach a node in one turn of its loop."""
    world.commit_offsets(node_id, count)
    world.rest()
    with world.counted() as found:
        world.commit_offsets(node_id, count)
        world.scheduler.run_for_ms(SETTLE_MS)
    return found


def test_offset_commits_of_a_turn_share_frames_turns_and_commits_on_the_way_to_rafts_leader(world: HotPath) -> None:
    leader = world.raft_leader
    coordinator = next(node for node in NODES if node != leader)
    (other,) = set(NODES) - {leader, coordinator}
    for count in (1, 10):
        found = commit_costs(world, coordinator, count)
        # At the leader: to send the entries, and to commit them once a majority has them. At each follower: to take
        # them, and to apply them. A tick of the leader may come in between.
        assert found[ALL]["Raft._turn"] <= 7
        assert found[coordinator]["CONTROL frames"] <= 2  # what it proposes, and that the entries are durable
        assert found[other]["CONTROL frames"] <= 1
        assert found[leader]["CONTROL frames"] <= 4  # to each: the entries, and what is committed; and the replies
        assert all(found[node]["commits"] == found[node]["submissions"] == 1 for node in NODES)


def test_offset_commits_at_rafts_leader(world: HotPath) -> None:
    leader = world.raft_leader
    found = commit_costs(world, leader, 10)
    assert found[ALL]["Raft._turn"] <= 7
    assert found[leader]["CONTROL frames"] <= 4
    assert all(found[node]["CONTROL frames"] <= 1 for node in NODES if node != leader)


def test_a_message_that_is_refused_costs_the_others_in_its_frame_nothing(world: HotPath) -> None:
    ping = wire.encode(wire.Ping(1, False))
    payload = b"".join(wire.joined([ping, [b"\xff is no message"], ping]))
    with world.counted() as found:
        dispatcher = world.nodes[LEADER].dispatcher
        world.processes[LEADER].soon(lambda: dispatcher.on_message(NODES[1], Channel.DATA, memoryview(payload)))
        world.scheduler.run_for_ms(0)
    assert found[LEADER]["Ping"] == 2  # the answers


def test_a_table_is_looked_up_without_python_code() -> None:
    """The writer does it three times for every row."""
    rows, called = dict.fromkeys(Table, 0), list[str]()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for table in (Table.BATCHES, Table.TIMES):
            rows[table] += 1
    finally:
        sys.setprofile(None)
    assert not called


def test_what_a_node_says_in_the_turn_in_which_it_stops_still_leaves(
    world: HotPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, port = world.nodes[LEADER], world.ports[LEADER]
    send, taken = port.send, list[bool]()

    def noted(peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        taken.append(send(peer, channel, parts))
        return taken[-1]

    def last_turn() -> None:
        node._links.send(FOLLOWERS[0], Channel.CONTROL, wire.ReadIndex(7))
        node.stop()

    monkeypatch.setattr(port, "send", noted)
    world.processes[LEADER].soon(last_turn)
    world.scheduler.run_for_ms(0)
    assert taken == [True]
