"""Compaction while the log start moves, as retention moves it every second: it goes on where the log begins by then."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceLogStart, CompactSegment
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset
from smq.replication.log.compaction import cleaner
from smq.replication.partition.compaction.passes import Compactor
from tests.unit.replication.partition.compaction.test_passes import Keeper

KEYS = 7


class Trimmed(Keeper):
    """Each step reads one batch, as it reads a mebibyte of a large log. What has been refused is answered."""

    def apply_proposed(self) -> None:
        while self._answered < len(self.host.proposed):
            answer = self.host.answers[self._answered]
            command = self.host.proposed[self._answered]
            self._answered += 1
            try:
                answer(self.host.apply(command))
            except SmqError as e:
                answer(e)

    def put_many(self, count: int, keys: int = KEYS) -> None:
        for number in range(count):
            self.put(b"%d" % (number % keys), b"v")

    def delete_before(self, offset: int) -> None:
        self.host.apply(AdvanceLogStart(partition=self.host.part.pid, offset=Offset(offset)))

    def set_segment_bytes(self, size: int) -> None:
        self.host.config = replace(self.host.config, compaction_segment_bytes=size)
        node = self.host.node_host()
        self.measures = node.measures
        self.compactor = Compactor(node, self.host.look_ups(), self.segments)

    def begin(self) -> None:
        self.host.live.compaction_due_ns = 0
        self.compactor.visit(self.host.live, self.host.clock.monotonic_ns())
        assert self.compactor.is_at_work

    def finish(self, *, step: int = 0) -> None:
        """With `step`, so many offsets go each time that something could be agreed."""
        for _ in range(10_000):
            if not self.compactor.is_at_work:
                return
            self.host.settle(10)
            if step and len(self.host.proposed) > self._answered:
                self.delete_before(self.host.part.log_start + step)
            self.apply_proposed()
        raise AssertionError("the pass does not end")

    @property
    def results(self) -> set[str]:
        return {result for (result,) in self.measures.compactions.values}


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Trimmed:
    monkeypatch.setattr(cleaner, "STEP_BYTES", 1)
    return Trimmed()


def check(keeper: Trimmed, keys: int = KEYS) -> None:
    """No pass was abandoned, and the last record of each key is left."""
    assert keeper.results == {"done"}
    assert len(keeper.records) == keys
    assert keeper.host.part.compacted_end == keeper.host.part.hwm
    assert keeper.host.live.log.log_start == keeper.host.part.log_start


def test_the_first_segment_is_made_although_the_log_start_moves_at_all_times(keeper: Trimmed) -> None:
    keeper.put_many(400)
    keeper.begin()
    for number in range(1, 300):
        keeper.host.settle(10)
        keeper.delete_before(number)
        keeper.apply_proposed()
    keeper.finish()
    check(keeper)


def test_a_first_segment_that_is_refused_is_begun_again_and_is_smaller(keeper: Trimmed) -> None:
    """The log start passes seven batches while one is read and agreed on, and much more during a large segment."""
    keeper.put_many(400)
    keeper.begin()
    refused = 0
    while keeper.compactor.is_at_work and not keeper.host.part.segments:
        keeper.host.settle(10)
        if len(keeper.host.proposed) > keeper._answered:
            refused += 1
            if refused <= 3:
                keeper.delete_before(keeper.host.part.log_start + 7)
            keeper.apply_proposed()
    agreed = [command for command in keeper.host.proposed if isinstance(command, CompactSegment)]
    assert [command.start for command in agreed] == [0, 7, 14, 21]
    sizes = [command.end - command.start for command in agreed]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] // 2
    keeper.finish()
    check(keeper)


def test_it_is_tried_again_later_if_the_log_start_never_rests(keeper: Trimmed) -> None:
    keeper.put_many(40)
    keeper.begin()
    keeper.finish(step=1)
    assert keeper.results == {"agree"}
    keeper.begin()
    keeper.finish()
    assert len(keeper.records) == KEYS


def test_the_segments_above_one_that_is_deleted_meanwhile_are_cleaned(keeper: Trimmed) -> None:
    keeper.set_segment_bytes(1_000)
    keeper.put_many(60, 60)
    keeper.begin()
    keeper.finish()
    ends = [keeper.host.part.segment_end(number) for number in range(len(keeper.host.part.segments))]
    assert len(ends) > 3
    keeper.put_many(60, 60)
    keeper.begin()
    for end in ends[1:-1]:
        while keeper.compactor.is_at_work and len(keeper.host.proposed) == keeper._answered:
            keeper.host.settle(1)
        keeper.delete_before(end)
        keeper.apply_proposed()
    keeper.finish()
    check(keeper, 60)


def test_all_is_cleaned_after_the_log_start_has_passed_all_segments(keeper: Trimmed) -> None:
    keeper.put_many(20)
    keeper.begin()
    keeper.finish()
    keeper.put_many(60)
    keeper.begin()
    keeper.host.settle(3)
    keeper.delete_before(25)
    assert not keeper.host.part.segments
    keeper.finish()
    check(keeper)


def test_what_follows_a_small_first_segment_is_agreed_before_the_log_start_passes_that(keeper: Trimmed) -> None:
    """Compaction is four times as fast as the log start, but reads for longer for a whole segment than a small first
    one lasts."""
    keeper.put_many(800)
    size = keeper.host.live.log.size_bytes // 800
    keeper.set_segment_bytes(64 * size + size // 2)
    keeper.begin()
    for number in range(3_000):
        if not keeper.compactor.is_at_work:
            break
        keeper.host.settle(2)
        if number % 8 == 7 and keeper.host.part.log_start < 700:
            keeper.delete_before(keeper.host.part.log_start + 1)
        keeper.apply_proposed()
    keeper.finish()
    check(keeper)
