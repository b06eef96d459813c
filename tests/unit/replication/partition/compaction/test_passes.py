"""Compaction at one replica: bytes that are nowhere, and bytes that must not be served or taken."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from smq.raft_state.commands import AdvanceClock, AlterTopicConfig, Command, CompactSegment
from smq.raft_state.ids import Offset
from smq.records import NewRecord, build_batch, decode_batch, encode_batch, parse_header
from smq.replication.log.compaction import cleaner
from smq.replication.log.compaction.key_table import KeyTable
from smq.replication.log.reader import LogReader
from smq.replication.log.stored_batch import BatchDamaged, BatchInfo
from smq.replication.net import wire
from smq.replication.partition.compaction.passes import URGENT_RESET_MS, Compactor
from smq.replication.partition.compaction.segment_catch_up import Segments
from smq.replication.partition.markers import Markers
from tests.unit.raft_state.support import add, init_transactions, proposed
from tests.unit.raft_state.support import end as end_transaction
from tests.unit.replication.support import ME, PEER_A, Host

RESET_MS = 60_000
KEYS_4_BYTES = 100  # room for four keys
LOST, LOST_TOO = b"bytes of no node", b"others of no one"


class Leader:
    """A leader with four committed batches, whose state names a digest that no replica holds."""

    def __init__(self, *, policy: str = "compact") -> None:
        self.host = Host()
        self.host.config = replace(self.host.config, compaction_reset_ms=RESET_MS)
        self.host.create_partition()
        self.host.elect(ME)
        self.host.apply(AlterTopicConfig(name="t", set_=(("cleanup.policy", policy),)))
        for key in (b"a", b"b", b"a", b"c"):
            self.host.produce(encode_batch([NewRecord(key, b"v", 1)]))
        self.host.settle()
        self.host.advance(4)
        look_ups = self.host.look_ups()
        node = self.host.node_host()
        self.measures = node.measures
        self.segments = Segments(node, look_ups, {self.host.live.pid: self.host.live}.get, lambda _: None)
        self.compactor = Compactor(node, look_ups, self.segments)
        self.agree(LOST)

    def agree(self, digest: bytes) -> None:
        agree(self.host, 3, digest)

    def wait(self, ms: int) -> None:
        for _ in range(ms // 500):
            now_ns = self.host.clock.monotonic_ns()
            self.compactor.visit(self.host.live, now_ns)
            self.segments.visit(self.host.live, now_ns)
            self.host.settle(500)

    @property
    def resets(self) -> list[CompactSegment]:
        return [c for c in self.host.proposed if isinstance(c, CompactSegment) and c.is_reset]


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
    assert isinstance(found, wire.FoundBatch)
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


def agree(host: Host, end: int, digest: bytes, tombstones_ms: int = 0) -> None:
    """On the bytes of [0, end)."""
    part = host.part
    host.apply(
        CompactSegment(
            partition=part.pid,
            epoch=part.epoch,
            compactions_seen=part.compactions,
            log_start_seen=part.log_start,
            start=Offset(0),
            end=Offset(end),
            digest=digest,
            tombstones_ms=tombstones_ms,
        )
    )


class Keeper:
    """The only replica of a partition, or its leader, which compacts at every look and keeps tombstones for a
    second."""

    def __init__(self, memory_bytes: int = 1 << 20, *, replication: int = 1, **config: Any) -> None:
        self.host = Host()
        config = {"compaction_memory_bytes": memory_bytes, "compaction_reset_ms": 5_000, **config}
        self.host.config = replace(self.host.config, **config)
        self.host.create_partition(replication=replication)
        policy = (("cleanup.policy", "compact"), ("min.cleanable.dirty.ratio", "0"), ("delete.retention.ms", "1000"))
        self.host.apply(AlterTopicConfig(name="t", set_=policy))
        look_ups = self.host.look_ups()
        replicas = {self.host.live.pid: self.host.live}
        node = self.host.node_host()
        self.measures = node.measures
        self.segments = Segments(node, look_ups, replicas.get, lambda _: None)
        self.compactor = Compactor(node, look_ups, self.segments)
        self.endings = Markers(node, node.propose)
        self._answered = 0

    def put(self, key: bytes, value: bytes | None, created_ms: int = 1) -> None:
        self._produce(encode_batch([NewRecord(key, value, created_ms)]))

    def configure(self, **config: str) -> None:
        set_ = tuple((name.replace("_", "."), value) for name, value in sorted(config.items()))
        self.host.apply(AlterTopicConfig(name="t", set_=set_))

    def put_in_transaction(self, key: bytes, value: bytes | None, *, commit: bool | None = True) -> None:
        """None for `commit` leaves it open."""
        host = self.host
        host.apply(proposed(host.state, init_transactions("t")))
        found = host.state.transactions["t"]
        producer, epoch = found.producer_id, found.producer_epoch
        host.apply(proposed(host.state, add("t", producer, epoch, host.part.pid)))
        batch = encode_batch(
            [NewRecord(key, value, 1)],
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=0,
            is_transactional=True,
        )
        self._produce(batch)
        if commit is not None:
            self.end(commit=commit)

    def end(self, *, commit: bool) -> None:
        state = self.host.state
        found = state.transactions["t"]
        change = end_transaction("t", found.producer_id, found.producer_epoch, commit=commit, fencing=False)
        self.host.apply(proposed(state, change))
        for _ in range(2):  # the marker, and the report that it is written
            self.endings.drive(self.host.live)
            self.settle()
            self.apply_proposed()

    def put_unreadable(self) -> None:
        """A batch that says it is compressed, and is not."""
        header = parse_header(encode_batch([NewRecord(b"k", b"old", 1)], codec="zstd"))
        self._produce(build_batch(header, b"no zstd"))

    def _produce(self, batch: bytes) -> None:
        self.host.produce(batch)
        self.settle()

    def settle(self, ms: int = 0) -> None:
        self.host.settle(ms)
        self.host.advance(self.host.live.log.appended_end)
        self.endings.drive(self.host.live)
        self.host.settle()

    def wait(self, ms: int) -> None:
        """What is proposed meanwhile is applied."""
        for _ in range(ms // 100):
            self.compactor.visit(self.host.live, self.host.clock.monotonic_ns())
            self.segments.visit(self.host.live, self.host.clock.monotonic_ns())
            self.settle(100)
            now_ms = self.host.clock.wall_ns() // 1_000_000
            self.host.apply(AdvanceClock(seen_ms=self.host.state.expiry_clock_ms, elapsed_ms=100, now_ms=now_ms))
            self.apply_proposed()

    def apply_proposed(self) -> None:
        while self._answered < len(self.host.proposed):
            command: Command = self.host.proposed[self._answered]
            self._answered += 1
            self.host.answers[self._answered - 1](self.host.apply(command))

    @property
    def records(self) -> list[tuple[bytes | None, bytes | None]]:
        log = self.host.live.log
        found = log.read(log.log_start, log.appended_end, 1 << 20)
        return [
            (r.key, r.value)
            for stored in found
            if parse_header(stored.batch).count and not parse_header(stored.batch).is_control
            for r in decode_batch(stored.batch)
        ]


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
    keeper.configure(min_cleanable_dirty_ratio="1")
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
    keeper.configure(min_cleanable_dirty_ratio="0.5")
    keeper.wait(20_000)
    assert keeper.records == [(b"k", b"the last")]


def test_what_is_too_young_is_no_part_of_the_ratio(keeper: Keeper) -> None:
    """As in Kafka: the clean part and the part that may be cleaned are all of it."""
    keeper.configure(min_cleanable_dirty_ratio="0.9", min_compaction_lag_ms="60000")
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
    keeper.configure(min_cleanable_dirty_ratio="1")
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
    keeper.configure(cleanup_policy="delete")
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
