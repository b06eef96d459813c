"""What ends a compaction in its middle: nothing is lost that was not due, and a later one does the rest."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceClock, AdvanceLogStart, AlterTopicConfig, CompactSegment
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from tests.unit.replication.partition.compaction.test_passes import Keeper
from tests.unit.replication.partition.test_full_disk import RESERVE, fill, free

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


def agreement(keeper: Keeper) -> CompactSegment:
    while not is_agreed(keeper):
        keeper.host.settle(10)
    (command,) = keeper.host.proposed
    assert isinstance(command, CompactSegment)
    return command


def test_another_policy_ends_it_until_the_topic_is_compacted_again(keeper: Keeper) -> None:
    set_policy(keeper, "delete")
    keeper.wait(LONG_MS)
    assert keeper.records == ALL
    assert not is_agreed(keeper)
    set_policy(keeper, "compact")
    keeper.wait(LONG_MS)
    assert keeper.records == LAST


def test_what_is_agreed_is_installed_also_after_another_policy(keeper: Keeper) -> None:
    agreement(keeper)
    set_policy(keeper, "delete")
    keeper.apply_proposed()
    keeper.settle(1_000)
    assert keeper.records == LAST


def test_tombstones_that_are_to_be_kept_for_longer_are_kept_by_the_pass_under_way() -> None:
    keeper = Keeper()
    keeper.configure(delete_retention_ms="60000")
    for key, value in ((b"k", b"1"), (b"k", None), (b"other", b"1")):
        keeper.put(key, value)
    keeper.wait(LONG_MS)
    assert keeper.records == [(b"k", None), (b"other", b"1")]
    keeper.host.settle(60_000)
    seen_ms, now_ms = keeper.host.state.expiry_clock_ms, keeper.host.clock.wall_ns() // 1_000_000
    keeper.host.apply(AdvanceClock(seen_ms=seen_ms, elapsed_ms=60_000, now_ms=now_ms))
    keeper.host.live.compaction_due_ns = 0
    keeper.compactor.visit(keeper.host.live, keeper.host.clock.monotonic_ns())
    assert keeper.compactor.is_at_work
    keeper.configure(delete_retention_ms="604800000")
    keeper.wait(LONG_MS)
    assert keeper.records == [(b"k", None), (b"other", b"1")]


def test_a_full_disk_ends_it_until_there_is_space(keeper: Keeper) -> None:
    fill(keeper.host)
    keeper.wait(LONG_MS)
    assert keeper.records == ALL
    assert not is_agreed(keeper), "nothing may be agreed that this node cannot write"
    free(keeper.host)
    keeper.wait(LONG_MS)
    assert keeper.records == LAST


def test_a_disk_that_fills_between_agreement_and_installation_loses_nothing(keeper: Keeper) -> None:
    """What was agreed is then nowhere, and is given up; the next pass begins again."""
    agreement(keeper)
    fill(keeper.host)
    keeper.host.disk.capacity = keeper.host.disk.size_bytes() + RESERVE // 2  # rows that say what is held have room
    keeper.host.space.refresh()
    keeper.wait(LONG_MS)
    assert keeper.host.part.compactions > 0
    assert keeper.measures.compactions.values["install",] > 0
    assert keeper.records == ALL
    free(keeper.host)
    keeper.wait(2 * LONG_MS)
    assert keeper.records == LAST
    assert keeper.host.live.log.segments.digest_at(Offset(0)) == keeper.host.part.segments[0].digest


REFUSED = SmqError(ErrorCode.STALE_EPOCH, "it has been compacted")


def test_an_agreement_goes_on_if_only_its_repetition_is_answered(keeper: Keeper) -> None:
    """The leader of Raft ended once the entry was committed, so it was proposed again, and refused."""
    keeper.host.apply(agreement(keeper))
    keeper.host.answers[-1](REFUSED)
    keeper.host.settle(1_000)
    assert ("agree",) not in keeper.measures.compactions.values
    assert keeper.records == LAST
    assert keeper.host.live.log.segments.digest_at(Offset(0)) == keeper.host.part.segments[0].digest


@pytest.mark.parametrize("digest", [None, b"of another pass."], ids=["refused", "another"])
def test_a_refused_agreement_ends_it(keeper: Keeper, digest: bytes | None) -> None:
    command = agreement(keeper)
    if digest is not None:
        keeper.host.apply(replace(command, digest=digest))
    keeper.host.answers[-1](REFUSED)
    keeper.host.settle(1_000)
    assert not keeper.compactor.is_at_work
    assert keeper.measures.compactions.values["agree",] == 1
    assert keeper.records == ALL


def test_it_does_not_wait_for_a_segment_that_has_been_deleted_meanwhile(keeper: Keeper) -> None:
    agreement(keeper)
    keeper.apply_proposed()
    keeper.host.apply(AdvanceLogStart(partition=keeper.host.part.pid, offset=keeper.host.part.hwm))
    keeper.wait(100)
    assert not keeper.compactor.is_at_work
    assert ("install",) not in keeper.measures.compactions.values
    assert keeper.records == []
    assert keeper.host.live.log.size_bytes == 0


def test_nothing_is_agreed_while_a_segment_is_in_doubt(keeper: Keeper) -> None:
    """What the pass reads there may be older than what was agreed, and hold what has been removed since."""
    keeper.wait(LONG_MS)
    agreed = len(keeper.host.proposed)
    keeper.put(b"k", b"4")
    keeper.host.live.compaction_due_ns = 0
    keeper.compactor.visit(keeper.host.live, keeper.host.clock.monotonic_ns())
    has_begun = keeper.compactor.is_at_work
    keeper.host.live.log.segments.doubt(Offset(0))
    keeper.host.settle(LONG_MS)
    assert (has_begun, keeper.compactor.is_at_work) == (True, False)
    assert keeper.host.proposed[agreed:] == []
