"""Compaction at one replica: bytes that are nowhere, and bytes that must not be served or taken."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceClock, CompactSegment
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Offset
from smq.records import decode_batch
from smq.replication.log.compaction import cleaner
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.reader import LogReader
from smq.replication.log.stored_batch import BatchDamaged, BatchInfo
from smq.replication.net import wire
from smq.replication.net.wire import StepQuery, StepReport
from smq.replication.partition.compaction.passes import URGENT_RESET_MS, Compactor
from tests.unit.replication.partition.compaction.support import LOST, RESET_MS, Keeper, Leader, agree
from tests.unit.replication.partition.test_intake import RESERVE, fill, free
from tests.unit.replication.support import ME, PEER_A, PEER_B

KEYS_4_BYTES = 100  # room for four keys
LOST_TOO = b"others of no one"


def report(leader: Leader, end: int) -> None:
    """A follower's log ends there."""
    (stream,) = [s for s in leader.host.live.streams.values() if s.peer == PEER_A]
    leader.host.ack(stream.peer, end)


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_bytes_that_no_replica_holds_are_given_up(policy: str) -> None:
    """Also if the topic is no longer compacted: a follower that lags could never catch up."""
    leader = Leader(policy=policy)
    leader.wait(RESET_MS - 5_000)
    assert leader.resets == []
    leader.wait(20_000)
    assert [(c.start, c.end) for c in leader.resets[:1]] == [(0, 3)]
    assert leader.resets[0].digest != LOST


def test_they_are_given_up_soon_while_a_follower_needs_them() -> None:
    leader = Leader()
    report(leader, 1)
    leader.wait(URGENT_RESET_MS + 12_000)  # two silent peers, each asked twice
    assert [(c.start, c.end) for c in leader.resets[:1]] == [(0, 3)]


def test_a_segment_that_is_agreed_later_has_all_its_time() -> None:
    """As if another node had led meanwhile, and had just agreed on it: it may be about to send it."""
    leader = Leader()
    leader.wait(RESET_MS - 5_000)
    leader.agree(LOST_TOO)
    leader.wait(RESET_MS - 5_000)
    assert leader.resets == []
    leader.wait(20_000)
    assert [(c.start, c.end) for c in leader.resets[:1]] == [(0, 3)]


def test_a_batch_is_not_sent_while_a_segment_is_installed() -> None:
    """Its digest may be that of bytes that are not on the disk yet."""
    leader = Leader()
    host = leader.host
    host.live.log.is_installing = True
    host.repairs.on_fetch(PEER_A, host.live, wire.FetchBatch(host.part.pid, 5, Offset(1)))
    found = host.messages(wire.FoundBatch)[-1]
    assert (found.may_have, bytes(found.value)) == (True, b"")


def test_a_batch_is_not_replaced_while_a_segment_is_installed() -> None:
    log = Leader().host.live.log
    stored = log.read(Offset(1), Offset(2), 1)[0]
    log.is_installing = True
    assert not log.replace(stored, None, lambda: None)
    log.is_installing = False
    assert log.replace(stored, None, lambda: None)


def test_a_log_that_damage_has_shortened_no_longer_holds_its_segments() -> None:
    log = Leader().host.live.log
    log.note_held(Offset(0), Offset(2), b"digest of bytes.")
    log.note_held(Offset(2), Offset(4), b"other digest ...")
    log.truncate(Offset(3))
    assert log.segments.end_of(Offset(0), b"digest of bytes.") == 2
    assert log.segments.end_of(Offset(2), b"other digest ...") is None


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def test_a_tombstone_stays_while_a_batch_below_it_cannot_be_looked_into(keeper: Keeper) -> None:
    """What it deletes may be in there."""
    keeper.put_unreadable()
    keeper.put(b"k", None)
    keeper.put(b"other", b"v")
    keeper.wait(30_000)
    log = keeper.host.live.log
    (tombstone, _) = log.read(Offset(1), log.appended_end, 1 << 20)
    assert [(r.key, r.value) for r in decode_batch(tombstone.batch)] == [(b"k", None)]


def compacted(memory_bytes: int) -> Keeper:
    keeper = Keeper(memory_bytes)
    for version in range(2):
        for key in range(9):
            keeper.put(b"%d" % key, b"version %d" % version)
            keeper.put_in_transaction(b"%d" % key, b"of a transaction", commit=key % 2 == 0)
    keeper.put(b"0", b"the last")
    keeper.wait(15_000)
    return keeper


def test_a_table_of_few_keys_takes_several_passes_to_the_same_end() -> None:
    assert KeyTable.keys_in(KEYS_4_BYTES) == 4
    one, several = compacted(1 << 20), compacted(KEYS_4_BYTES)
    assert several.compactor.passes >= one.compactor.passes + 3
    odd = [(b"%d" % key, b"version 1") for key in range(1, 9, 2)]
    even = [(b"%d" % key, b"of a transaction") for key in range(2, 9, 2)]
    assert sorted(one.records) == sorted(several.records) == sorted([(b"0", b"the last"), *odd, *even])


def test_a_segment_of_more_keys_than_the_table_is_not_tried_again_at_once() -> None:
    """It is dirty until the node has more memory for compaction."""
    keeper = Keeper(KEYS_4_BYTES)
    for key in range(9):
        keeper.put(b"%d" % key, b"v")
    agree(keeper.host, 9, LOST)
    keeper.wait(20_000)
    clock, config = keeper.host.clock, keeper.host.config
    passes, began_ns = keeper.compactor.passes, clock.monotonic_ns()
    keeper.wait(60_000)
    assert keeper.host.part.segments[0].is_dirty
    due = (clock.monotonic_ns() - began_ns) // (config.compaction_check_ms * 1_000_000)
    assert 0 < keeper.compactor.passes - passes <= due + 1


@pytest.mark.parametrize(
    ("writes", "left"),
    [
        ([(b"k", b"old", False), (b"k", None, False)], []),
        ([(b"k", b"old", True), (b"k", None, True)], []),
        (
            [(b"a", b"1", True), (b"b", b"1", True), (b"a", b"2", False), (b"b", b"2", True)],
            [(b"a", b"2"), (b"b", b"2")],
        ),
    ],
    ids=["a tombstone", "a tombstone in a transaction", "values in transactions"],
)
def test_the_last_value_of_each_key_is_left_whether_in_a_transaction_or_not(
    keeper: Keeper, writes: list[tuple[bytes, bytes | None, bool]], left: list[tuple[bytes, bytes]]
) -> None:
    for key, value, is_transactional in writes:
        (keeper.put_in_transaction if is_transactional else keeper.put)(key, value)
    keeper.put(b"other", b"v")
    keeper.wait(30_000)
    assert keeper.records == [*left, (b"other", b"v")]


@pytest.mark.parametrize("value", [b"aborted", None], ids=["value", "tombstone"])
def test_an_aborted_record_goes_and_supersedes_nothing(keeper: Keeper, value: bytes | None) -> None:
    keeper.put(b"k", b"kept")
    keeper.put_in_transaction(b"k", value, commit=False)
    keeper.put_in_transaction(b"j", b"aborted, the only one of its key", commit=False)
    keeper.put_in_transaction(b"other", b"of the same producer, committed later")
    keeper.wait(30_000)
    assert keeper.records == [(b"k", b"kept"), (b"other", b"of the same producer, committed later")]
    log = keeper.host.live.log
    assert [(a.first, a.marker) for a in log.aborted] == [(1, 2), (3, 4)]
    assert log.producers.stable_end(log.appended_end) == log.appended_end


def test_nothing_is_compacted_from_an_open_transaction_on(keeper: Keeper) -> None:
    keeper.put(b"k", b"1")
    keeper.put_in_transaction(b"k", b"2", commit=None)
    keeper.put(b"k", b"3")
    keeper.wait(5_000)
    assert keeper.records == [(b"k", b"1"), (b"k", b"2"), (b"k", b"3")]
    keeper.end(commit=True)
    keeper.wait(5_000)
    assert keeper.records == [(b"k", b"3")]


def test_nothing_is_compacted_while_it_is_not_known_what_was_aborted(keeper: Keeper) -> None:
    keeper.put(b"k", b"kept")
    keeper.put_in_transaction(b"k", b"aborted", commit=False)
    keeper.host.live.log.aborted_damage = BatchDamaged(keeper.host.part.pid, Offset(0), "as a test has it")
    keeper.wait(5_000)
    assert keeper.records == [(b"k", b"kept"), (b"k", b"aborted")]
    keeper.host.live.log.aborted_damage = None
    keeper.wait(5_000)
    assert keeper.records == [(b"k", b"kept")]


def looked_at(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the looks for what is dirty begin, from now on."""
    starts: list[int] = []
    whole = LogReader.infos_between

    def noted(log: LogReader, start: Offset, end: Offset) -> Iterator[BatchInfo]:
        starts.append(start)
        return whole(log, start, end)

    monkeypatch.setattr(LogReader, "infos_between", noted)
    return starts


def test_a_look_for_what_is_dirty_goes_in_steps_and_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleaner, "DIRT_BATCHES_MAX", 3)
    keeper = Keeper()
    keeper.host.configure(min_cleanable_dirty_ratio="1")
    keeper.put(b"k", b"clean")
    keeper.wait(20_000)
    assert keeper.host.part.compacted_end == 1
    starts = looked_at(keeper, monkeypatch)
    for value in range(7):
        keeper.put(b"k", b"%d" % value)
    keeper.wait(20_000)
    assert starts[:4] == [1, 4, 7, 8], "the second look begins at the end of the first"
    keeper.put(b"k", b"the last")
    keeper.wait(20_000)
    assert set(starts[4:]) == {8, 9}
    assert len(keeper.records) == 9, "not all of it is dirty"
    keeper.host.configure(min_cleanable_dirty_ratio="0.5")
    keeper.wait(20_000)
    assert keeper.records == [(b"k", b"the last")]


def test_what_is_too_young_is_no_part_of_the_ratio(keeper: Keeper) -> None:
    """As in Kafka: the clean part and the part that may be cleaned are all of it."""
    keeper.host.configure(min_cleanable_dirty_ratio="0.9", min_compaction_lag_ms="60000")
    keeper.wait(1_000)
    keeper.put(b"k", b"1")
    keeper.put(b"k", b"2")
    young_ms = keeper.host.clock.wall_ns() // 1_000_000 + 3_600_000
    for number in range(20):
        keeper.put(b"%d" % number, b"young", young_ms)
    keeper.wait(20_000)
    assert keeper.records[0] == (b"k", b"2")


def test_the_measures_say_what_compaction_did_and_how_long_it_has_not(keeper: Keeper) -> None:
    measures = keeper.measures
    assert keeper.compactor.age_ms == 0, "nothing is compacted yet"
    for value in range(3):
        keeper.put(b"k", b"%d" % value)
    keeper.wait(20_000)
    assert (measures.compacted_records.amount, keeper.compactor.dirty_bytes) == (2, 0)
    assert keeper.compactor.age_ms < 20_000
    done = measures.compactions.values["done",]
    keeper.host.configure(min_cleanable_dirty_ratio="1")
    log = keeper.host.live.log
    clean_bytes = log.size_bytes
    keeper.put(b"other", b"v")
    keeper.wait(20_000)
    assert keeper.compactor.dirty_bytes == log.size_bytes - clean_bytes > 0
    log.aborted_damage = BatchDamaged(log.pid, Offset(0), "as a test has it")
    keeper.wait(60_000)
    assert measures.compactions.values["damage",] > 1
    assert measures.compactions.values["done",] > done
    assert keeper.compactor.age_ms > 50_000
    keeper.host.configure(cleanup_policy="delete")
    keeper.wait(20_000)
    assert (keeper.compactor.age_ms, keeper.compactor.dirty_bytes) == (0, 0)


def test_a_node_that_leads_again_counts_the_time_without_a_whole_pass_from_then_on(keeper: Keeper) -> None:
    keeper.put(b"k", b"1")
    keeper.wait(20_000)
    keeper.host.live.resign()
    keeper.settle(600_000)
    clock = keeper.host.clock
    led_ns = clock.monotonic_ns()
    keeper.host.elect(ME)
    assert keeper.host.live.leading == keeper.host.part.epoch
    assert keeper.compactor.age_ms == 0
    keeper.host.live.log.aborted_damage = BatchDamaged(keeper.host.part.pid, Offset(0), "as a test has it")
    keeper.wait(40_000)
    assert 40_000 < keeper.compactor.age_ms <= (clock.monotonic_ns() - led_ns) // 1_000_000


def test_a_look_at_what_no_replica_holds_is_no_whole_pass() -> None:
    leader = Leader()
    leader.wait(RESET_MS - 5_000)
    assert "done" not in {result for (result,) in leader.measures.compactions.values}
    assert leader.compactor.age_ms > RESET_MS - 10_000


# --------------------------------------------------------------------------------------------------------------- stops
# What ends a compaction in its middle: nothing is lost that was not due, and a later one does the rest.
LONG_MS = 30_000  # two looks at what may be compacted
ALL = [(b"k", b"1"), (b"k", b"2"), (b"other", b"1"), (b"k", b"3")]
LAST = [(b"other", b"1"), (b"k", b"3")]


def set_policy(begun: Keeper, policy: str) -> None:
    begun.host.configure(cleanup_policy=policy)


@pytest.fixture
def begun() -> Keeper:
    """One that has begun."""
    made = Keeper()
    for key, value in ALL:
        made.put(key, value)
    made.look()
    return made


def is_agreed(begun: Keeper) -> bool:
    return any(isinstance(command, CompactSegment) for command in begun.host.proposed)


def agreement(begun: Keeper) -> CompactSegment:
    while not is_agreed(begun):
        begun.host.settle(10)
    (command,) = begun.host.proposed
    assert isinstance(command, CompactSegment)
    return command


def test_another_policy_ends_it_until_the_topic_is_compacted_again(begun: Keeper) -> None:
    set_policy(begun, "delete")
    begun.wait(LONG_MS)
    assert begun.records == ALL
    assert not is_agreed(begun)
    set_policy(begun, "compact")
    begun.wait(LONG_MS)
    assert begun.records == LAST


def test_what_is_agreed_is_installed_also_after_another_policy(begun: Keeper) -> None:
    agreement(begun)
    set_policy(begun, "delete")
    begun.apply_proposed()
    begun.settle(1_000)
    assert begun.records == LAST


def test_tombstones_that_are_to_be_kept_for_longer_are_kept_by_the_pass_under_way() -> None:
    begun = Keeper()
    begun.host.configure(delete_retention_ms="60000")
    for key, value in ((b"k", b"1"), (b"k", None), (b"other", b"1")):
        begun.put(key, value)
    begun.wait(LONG_MS)
    assert begun.records == [(b"k", None), (b"other", b"1")]
    begun.host.settle(60_000)
    seen_ms, now_ms = begun.host.state.expiry_clock_ms, begun.host.clock.wall_ns() // 1_000_000
    begun.host.apply(AdvanceClock(seen_ms=seen_ms, elapsed_ms=60_000, now_ms=now_ms))
    assert begun.begins()
    begun.host.configure(delete_retention_ms="604800000")
    begun.wait(LONG_MS)
    assert begun.records == [(b"k", None), (b"other", b"1")]


def test_a_full_disk_ends_it_until_there_is_space(begun: Keeper) -> None:
    fill(begun.host)
    begun.wait(LONG_MS)
    assert begun.records == ALL
    assert not is_agreed(begun), "nothing may be agreed that this node cannot write"
    free(begun.host)
    begun.wait(LONG_MS)
    assert begun.records == LAST


def test_a_disk_that_fills_between_agreement_and_installation_loses_nothing(begun: Keeper) -> None:
    """What was agreed is then nowhere, and is given up; the next pass begins again."""
    agreement(begun)
    fill(begun.host)
    begun.host.disk.capacity = begun.host.disk.size_bytes() + RESERVE // 2  # rows that say what is held have room
    begun.host.space.refresh()
    begun.wait(LONG_MS)
    assert begun.host.part.compactions > 0
    assert begun.measures.compactions.values["install",] > 0
    assert begun.records == ALL
    free(begun.host)
    begun.wait(2 * LONG_MS)
    assert begun.records == LAST
    assert begun.host.live.log.segments.digest_at(Offset(0)) == begun.host.part.segments[0].digest


REFUSED = SmqError(ErrorCode.STALE_EPOCH, "it has been compacted")


def test_an_agreement_goes_on_if_only_its_repetition_is_answered(begun: Keeper) -> None:
    """The leader of Raft ended once the entry was committed, so it was proposed again, and refused."""
    begun.host.apply(agreement(begun))
    begun.host.answers[-1](REFUSED)
    begun.host.settle(1_000)
    assert ("agree",) not in begun.measures.compactions.values
    assert begun.records == LAST
    assert begun.host.live.log.segments.digest_at(Offset(0)) == begun.host.part.segments[0].digest


@pytest.mark.parametrize("digest", [None, b"of another pass."], ids=["refused", "another"])
def test_a_refused_agreement_ends_it(begun: Keeper, digest: bytes | None) -> None:
    command = agreement(begun)
    if digest is not None:
        begun.host.apply(replace(command, digest=digest))
    begun.host.answers[-1](REFUSED)
    begun.host.settle(1_000)
    assert not begun.compactor.is_at_work
    assert begun.measures.compactions.values["agree",] == 1
    assert begun.records == ALL


def test_it_does_not_wait_for_a_segment_that_has_been_deleted_meanwhile(begun: Keeper) -> None:
    agreement(begun)
    begun.apply_proposed()
    begun.host.move_log_start(begun.host.part.hwm)
    begun.wait(100)
    assert not begun.compactor.is_at_work
    assert ("install",) not in begun.measures.compactions.values
    assert begun.records == []
    assert begun.host.live.log.size_bytes == 0


def test_nothing_is_agreed_while_a_segment_is_in_doubt(begun: Keeper) -> None:
    """What the pass reads there may be older than what was agreed, and hold what has been removed since."""
    begun.wait(LONG_MS)
    agreed = len(begun.host.proposed)
    begun.put(b"k", b"4")
    has_begun = begun.begins()
    begun.host.live.log.segments.doubt(Offset(0))
    begun.host.settle(LONG_MS)
    assert (has_begun, begun.compactor.is_at_work) == (True, False)
    assert begun.host.proposed[agreed:] == []


# ----------------------------------------------------------------------------------------------------------- log start
# Compaction while the log start moves, as retention moves it every second: it goes on where the log begins by then.
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
        self.host.move_log_start(offset)

    def set_segment_bytes(self, size: int) -> None:
        self.host.config = replace(self.host.config, compaction_segment_bytes=size)
        node = self.host.node_host()
        self.measures = node.measures
        self.compactor = Compactor(node, self.host.look_ups(), self.segments)

    def begin(self) -> None:
        assert self.begins()

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
def trimmed(monkeypatch: pytest.MonkeyPatch) -> Trimmed:
    monkeypatch.setattr(cleaner, "STEP_BYTES", 1)
    return Trimmed()


def check(trimmed: Trimmed, keys: int = KEYS) -> None:
    """No pass was abandoned, and the last record of each key is left."""
    assert trimmed.results == {"done"}
    assert len(trimmed.records) == keys
    assert trimmed.host.part.compacted_end == trimmed.host.part.hwm
    assert trimmed.host.live.log.log_start == trimmed.host.part.log_start


def test_the_first_segment_is_made_although_the_log_start_moves_at_all_times(trimmed: Trimmed) -> None:
    trimmed.put_many(400)
    trimmed.begin()
    for number in range(1, 300):
        trimmed.host.settle(10)
        trimmed.delete_before(number)
        trimmed.apply_proposed()
    trimmed.finish()
    check(trimmed)


def test_a_first_segment_that_is_refused_is_begun_again_and_is_smaller(trimmed: Trimmed) -> None:
    """The log start passes seven batches while one is read and agreed on, and much more during a large segment."""
    trimmed.put_many(400)
    trimmed.begin()
    refused = 0
    while trimmed.compactor.is_at_work and not trimmed.host.part.segments:
        trimmed.host.settle(10)
        if len(trimmed.host.proposed) > trimmed._answered:
            refused += 1
            if refused <= 3:
                trimmed.delete_before(trimmed.host.part.log_start + 7)
            trimmed.apply_proposed()
    agreed = [command for command in trimmed.host.proposed if isinstance(command, CompactSegment)]
    assert [command.start for command in agreed] == [0, 7, 14, 21]
    sizes = [command.end - command.start for command in agreed]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] // 2
    trimmed.finish()
    check(trimmed)


def test_it_is_tried_again_later_if_the_log_start_never_rests(trimmed: Trimmed) -> None:
    trimmed.put_many(40)
    trimmed.begin()
    trimmed.finish(step=1)
    assert trimmed.results == {"agree"}
    trimmed.begin()
    trimmed.finish()
    assert len(trimmed.records) == KEYS


def test_the_segments_above_one_that_is_deleted_meanwhile_are_cleaned(trimmed: Trimmed) -> None:
    trimmed.set_segment_bytes(1_000)
    trimmed.put_many(60, 60)
    trimmed.begin()
    trimmed.finish()
    ends = [trimmed.host.part.segment_end(number) for number in range(len(trimmed.host.part.segments))]
    assert len(ends) > 3
    trimmed.put_many(60, 60)
    trimmed.begin()
    for end in ends[1:-1]:
        while trimmed.compactor.is_at_work and len(trimmed.host.proposed) == trimmed._answered:
            trimmed.host.settle(1)
        trimmed.delete_before(end)
        trimmed.apply_proposed()
    trimmed.finish()
    check(trimmed, 60)


def test_all_is_cleaned_after_the_log_start_has_passed_all_segments(trimmed: Trimmed) -> None:
    trimmed.put_many(20)
    trimmed.begin()
    trimmed.finish()
    trimmed.put_many(60)
    trimmed.begin()
    trimmed.host.settle(3)
    trimmed.delete_before(25)
    assert not trimmed.host.part.segments
    trimmed.finish()
    check(trimmed)


def test_what_follows_a_small_first_segment_is_agreed_before_the_log_start_passes_that(trimmed: Trimmed) -> None:
    """Compaction is four times as fast as the log start, but reads for longer for a whole segment than a small first
    one lasts."""
    trimmed.put_many(800)
    size = trimmed.host.live.log.size_bytes // 800
    trimmed.set_segment_bytes(64 * size + size // 2)
    trimmed.begin()
    for number in range(3_000):
        if not trimmed.compactor.is_at_work:
            break
        trimmed.host.settle(2)
        if number % 8 == 7 and trimmed.host.part.log_start < 700:
            trimmed.delete_before(trimmed.host.part.log_start + 1)
        trimmed.apply_proposed()
    trimmed.finish()
    check(trimmed)


# ----------------------------------------------------------------------------------------------------- tombstone times
# When tombstones go: their time begins once no replica has what they delete.
LOOK_MS, KEPT_MS, STEP_MS = 500, 20_000, 2_000  # STEP_MS: a few looks
DELETED = [(b"k", None), (b"other", b"v")]
GONE = [(b"other", b"v")]


class Replicated(Keeper):
    """A leader with two followers, of which one or both may lag. A key has been deleted, and its record removed."""

    def __init__(self) -> None:
        super().__init__(replication=3, compaction_check_ms=LOOK_MS)
        self.host.configure(delete_retention_ms=str(KEPT_MS))
        self.lagging: set[NodeId] = {PEER_B}
        self._seen = 0
        for key, value in ((b"k", b"v"), (b"k", None), (b"other", b"v")):
            self.put(key, value)
        self.wait(STEP_MS)
        assert self.records == DELETED

    @property
    def questions(self) -> list[StepQuery]:
        return [message for message in self.host.messages(StepQuery) if isinstance(message, StepQuery)]

    def settle(self, ms: int = 0) -> None:
        self.host.settle(max(ms, 20))  # no longer, so that the replicated clock keeps up
        self.host.advance(self.host.live.log.appended_end)
        asked = self.questions
        for query in asked[self._seen :]:
            for peer in (PEER_A, PEER_B):
                report = StepReport(query.partition, query.request, peer not in self.lagging)
                self.compactor.on_step_report(peer, report)
        self._seen = len(asked)


@pytest.fixture
def replicated() -> Replicated:
    return Replicated()


def test_a_tombstone_stays_for_its_time_after_the_last_replica_has_lost_what_it_deletes(replicated: Replicated) -> None:
    """Until then that replica serves it, and a consumer that reads it there needs time to reach the tombstone."""
    replicated.wait(2 * KEPT_MS)
    replicated.lagging.clear()
    replicated.wait(KEPT_MS - STEP_MS)
    assert replicated.records == DELETED
    replicated.wait(4 * STEP_MS)
    assert replicated.records == GONE


def test_a_tombstone_stays_while_a_replica_lags_when_its_time_has_passed(replicated: Replicated) -> None:
    replicated.lagging.clear()
    replicated.wait(2 * STEP_MS)
    replicated.lagging.add(PEER_A)
    replicated.wait(2 * KEPT_MS)
    assert replicated.records == DELETED
    replicated.lagging.clear()
    replicated.wait(STEP_MS)
    assert replicated.records == GONE


def test_a_younger_tombstone_is_not_taken_for_one_of_which_all_replicas_were_in_step(replicated: Replicated) -> None:
    replicated.lagging.clear()
    replicated.wait(2 * STEP_MS)
    replicated.lagging.add(PEER_B)
    replicated.put(b"other", None)
    replicated.put(b"last", b"v")
    replicated.wait(2 * KEPT_MS)
    replicated.lagging.clear()
    replicated.wait(STEP_MS)
    assert replicated.records == [(b"other", None), (b"last", b"v")]
    replicated.wait(KEPT_MS + 2 * STEP_MS)
    assert replicated.records == [(b"last", b"v")]


def test_the_time_goes_on_with_other_leaders(replicated: Replicated) -> None:
    """Otherwise no tombstone would ever go where leaders change every night."""
    replicated.lagging.clear()
    for _ in range(5):
        replicated.wait(KEPT_MS // 5)
        replicated.host.elect(ME)
    replicated.wait(2 * STEP_MS)
    assert replicated.records == GONE


def test_the_replicas_are_seldom_asked_and_not_if_nothing_depends_on_it(replicated: Replicated) -> None:
    before = len(replicated.questions)
    replicated.wait(KEPT_MS)
    assert 0 < len(replicated.questions) - before <= 2 * 10  # of each of the two
    replicated.lagging.clear()
    replicated.wait(2 * STEP_MS)
    before = len(replicated.questions)
    replicated.wait(KEPT_MS - 2 * STEP_MS)
    assert len(replicated.questions) == before
    replicated.wait(4 * STEP_MS)
    assert replicated.records == GONE
    before = len(replicated.questions)
    replicated.wait(2 * KEPT_MS)
    assert len(replicated.questions) == before
