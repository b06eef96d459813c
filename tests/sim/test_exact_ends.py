"""Where partitions end, asked of three whole nodes: what one question costs, and what it says without a leader."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId
from smq.replication.api import PartitionRange
from smq.replication.net import wire
from smq.replication.ports import Buffer, Channel
from smq.testing.virtual.network import SimPort
from tests.unit.replication.virtual_nodes import ALL, VirtualNodes

pytestmark = pytest.mark.sim

PARTITIONS = 100
NAMES = [("t", i) for i in range(PARTITIONS)]
DEADLINE_MS = 5_000


class CountedPort(SimPort):
    """Counts the messages between all nodes by their kind."""

    sent: ClassVar[Counter[str]] = Counter()

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        for message in wire.split(memoryview(b"".join(parts))):
            is_raft = channel is Channel.CONTROL and message[0] == wire.RAFT
            self.sent["raft" if is_raft else type(wire.decode(message)).__name__] += 1
        return super().send(peer, channel, parts)


class World(VirtualNodes):
    port_type = CountedPort

    def __init__(self) -> None:
        super().__init__(seed=7)
        self.start(first_start=ALL)
        assert self.are_ready()
        self.create("t", PARTITIONS, start=40)

    def ranges(self, at: NodeId, timeout_ms: int = DEADLINE_MS) -> list[PartitionRange | SmqError]:
        found: list[Any] = []
        self.nodes[at].partition_ranges(NAMES, timeout_ms, found.append)
        assert self.wait(lambda: bool(found), 20_000)
        answer: list[PartitionRange | SmqError] = found[0]
        return answer


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("at", ALL)
def test_the_ends_of_100_partitions_cost_one_question_per_leader(world: World, at: NodeId) -> None:
    world.run(1_000)
    CountedPort.sent.clear()
    found = world.ranges(at)
    assert {(r.hwm, r.next_offset) for r in found if isinstance(r, PartitionRange)} == {(40, 40)}
    leaders = {r.leader for r in found if isinstance(r, PartitionRange)}
    assert leaders == set(ALL)
    costs = {kind: CountedPort.sent[kind] for kind in ("EndsQuery", "EndsReport", "ReadIndex", "Proposed")}
    # Both other leaders are asked, and each of the three takes one read index, one of them without a message.
    assert costs == {"EndsQuery": 2, "EndsReport": 2, "ReadIndex": 2, "Proposed": 2}


def test_with_a_leader_gone_the_rest_is_known_and_its_own_once_another_leads(world: World) -> None:
    gone = ALL[2]
    world.processes[gone].kill()
    late = [r for r in world.ranges(ALL[0], 400) if isinstance(r, SmqError)]
    assert 0 < len(late) < PARTITIONS
    assert {e.code for e in late} == {ErrorCode.OFFSET_NOT_AVAILABLE}
    assert {e.details.leader for e in late} == {gone}
    again = world.ranges(ALL[1])  # its time suffices for the elections
    assert {r.leader for r in again if isinstance(r, PartitionRange)} == {ALL[0], ALL[1]}
    assert not [r for r in again if isinstance(r, SmqError)]


def test_without_a_majority_no_end_is_known(world: World) -> None:
    for number in ALL[1:]:
        world.processes[number].kill()
    codes = {r.code for r in world.ranges(ALL[0]) if isinstance(r, SmqError)}
    assert codes == {ErrorCode.OFFSET_NOT_AVAILABLE}
