"""What ends a compaction in its middle: nothing is lost that was not due, and a later one does the rest."""

import pytest

from smq.raft_state.commands import AlterTopicConfig, CompactSegment
from tests.unit.replication.partition.test_compaction import Keeper
from tests.unit.replication.partition.test_full_disk import fill, free

LONG_MS = 30_000  # two looks at what may be compacted
ALL = [(b"k", b"1"), (b"k", b"2"), (b"other", b"1"), (b"k", b"3")]
LAST = [(b"other", b"1"), (b"k", b"3")]


def set_policy(keeper: Keeper, policy: str) -> None:
    keeper.host.apply(AlterTopicConfig(name="t", set_=(("cleanup.policy", policy),)))


@pytest.fixture
def keeper() -> Keeper:
    """One that has begun."""
    made = Keeper()
    for key, value in ALL:
        made.put(key, value)
    made.compactor.visit(made.host.live, made.host.clock.monotonic_ns())
    return made


def is_agreed(keeper: Keeper) -> bool:
    return any(isinstance(command, CompactSegment) for command in keeper.host.proposed)


def test_another_policy_ends_it_until_the_topic_is_compacted_again(keeper: Keeper) -> None:
    set_policy(keeper, "delete")
    keeper.wait(LONG_MS)
    assert keeper.records == ALL
    assert not is_agreed(keeper)
    set_policy(keeper, "compact")
    keeper.wait(LONG_MS)
    assert keeper.records == LAST


def test_a_full_disk_ends_it_until_there_is_space(keeper: Keeper) -> None:
    fill(keeper.host)
    keeper.wait(LONG_MS)
    assert keeper.records == ALL
    assert not is_agreed(keeper), "nothing may be agreed that this node cannot write"
    free(keeper.host)
    keeper.wait(LONG_MS)
    assert keeper.records == LAST
