"""Many partitions that wait for compaction on one node, and replicas that do not answer."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from smq.raft_state.commands import AlterTopicConfig
from smq.raft_state.ids import Offset, PartitionId
from smq.replication.host import Host as NodeHost
from smq.replication.log.segments import HeldSegments, own_digest
from smq.replication.partition.compaction.passes import IN_STEP_MS, Compactor
from smq.replication.partition.compaction.segment_catch_up import Segments
from smq.replication.partition.replica import Replica
from tests.unit.replication.partition.compaction.test_passes import Keeper, Leader, agree
from tests.unit.replication.support import PEER_A, PEER_B, Host

WAITING = 400  # a recursion into each of them would end the process


class _Waiting(SimpleNamespace):
    """What compaction sees of a replica that lacks the bytes of a segment."""

    def __hash__(self) -> int:  # type: ignore[override]  # the base has none
        return id(self)


def waiting_replicas() -> dict[PartitionId, Replica]:
    part = Leader().host.part
    made = {}
    for number in range(WAITING):
        pid = PartitionId(number.to_bytes(20, "big"))
        log = SimpleNamespace(
            segments=HeldSegments(),
            log_start=Offset(0),
            appended_end=Offset(0),
            is_installing=False,
            holds=lambda _offset: False,
        )
        made[pid] = cast(
            Replica,
            _Waiting(
                pid=pid,
                part=part,
                log=log,
                leading=part.epoch,
                segments_checked=(-1, -1),
                segments_due_ns=0,
                compaction_due_ns=0,
                may_install=lambda _end: True,
            ),
        )
    return made


def counting(host: Host, count: Callable[[], int]) -> tuple[NodeHost, list[int]]:
    """A node, and by how much each call that it delivers changes the count."""
    changes: list[int] = []

    def deliver(fn: Callable[[], None]) -> None:
        def run() -> None:
            before = count()
            fn()
            changes.append(count() - before)

        host.clock.call_soon(run)

    return replace(host.node_host(), deliver=deliver), changes


def test_partitions_that_find_no_link_open_are_given_up_one_at_a_time() -> None:
    host, replicas = Leader().host, waiting_replicas()

    def given_up() -> int:
        return sum(replica.segments_due_ns > 0 for replica in replicas.values())

    node, changes = counting(host, given_up)
    segments = Segments(node, host.look_ups(), replicas.get, lambda _: None)
    for replica in replicas.values():
        segments.visit(replica, host.clock.monotonic_ns())  # the first one asks, the others wait for it
    assert given_up() == 0
    host.network.disconnected = {PEER_A, PEER_B}
    host.settle(3_000)
    assert given_up() == WAITING
    assert max(changes) == 1


def test_passes_that_end_as_they_begin_do_so_one_at_a_time() -> None:
    keeper, replicas = Keeper(), waiting_replicas()
    host = keeper.host
    for value in (b"1", b"2"):
        keeper.put(b"k", value)
    node, changes = counting(host, lambda: compactor.passes)
    compactor = Compactor(node, host.look_ups(), keeper.segments)
    for replica in (host.live, *replicas.values()):
        compactor.visit(replica, host.clock.monotonic_ns())
    assert (compactor.is_at_work, compactor.passes) == (True, 0)
    host.settle(10_000)  # the agreement of the first one has no answer
    keeper.apply_proposed()
    host.settle(10_000)
    assert compactor.passes == WAITING + 1
    assert max(changes) == 1


@pytest.mark.parametrize("is_down", [True, False])
def test_a_pass_does_not_ask_whether_a_node_that_is_down_is_in_step(is_down: bool) -> None:
    """The node's other partitions would wait for each such pass."""
    leader = Leader()
    host, log = leader.host, leader.host.live.log
    agree(host, 3, own_digest(log, Offset(0), Offset(3)), tombstones_ms=1)
    log.note_held(Offset(0), Offset(3), host.part.segments[0].digest)
    host.apply(AlterTopicConfig(name="t", set_=(("min.cleanable.dirty.ratio", "1"), ("delete.retention.ms", "0"))))
    host.state.expiry_clock_ms = 1_000
    if is_down:
        host.network.disconnected = {PEER_B}
    leader.compactor.visit(host.live, host.clock.monotonic_ns())
    assert leader.compactor.is_at_work
    host.settle(IN_STEP_MS // 2)
    assert leader.compactor.is_at_work is not is_down
    host.settle(IN_STEP_MS)
    assert not leader.compactor.is_at_work
