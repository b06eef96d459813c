"""Compaction at one replica: bytes that are nowhere, and bytes that must not be served or taken."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceClock, AlterTopicConfig, Command, CompactSegment
from smq.raft_state.ids import Offset
from smq.records import NewRecord, decode_batch, encode_batch, parse_header
from smq.replication.net import wire
from smq.replication.partition.compaction.passes import URGENT_RESET_MS, Compactor
from smq.replication.partition.compaction.segments import Segments
from smq.replication.partition.endings import Endings
from tests.unit.raft_state.support import add, init_transactions, proposed
from tests.unit.raft_state.support import end as end_transaction
from tests.unit.replication.support import ME, PEER_A, Host

RESET_MS = 60_000
LOST = b"bytes of no node"


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
        self.segments = Segments(
            self.host.node_host(), look_ups, {self.host.live.pid: self.host.live}.get, lambda _: None
        )
        self.compactor = Compactor(self.host.node_host(), look_ups, self.segments)
        part = self.host.part
        self.host.apply(
            CompactSegment(
                partition=part.pid,
                epoch=part.epoch,
                compactions_seen=0,
                log_start_seen=part.log_start,
                start=Offset(0),
                end=Offset(3),
                digest=LOST,
                tombstones_ms=0,
            )
        )

    def wait(self, ms: int) -> None:
        for _ in range(ms // 500):
            now_ns = self.host.clock.monotonic_ns()
            self.segments.visit(self.host.live, now_ns)
            self.compactor.visit(self.host.live, now_ns)
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


class Keeper:
    """The only replica of a partition, which compacts at every look and keeps tombstones for a second."""

    def __init__(self) -> None:
        self.host = Host()
        self.host.create_partition(replication=1)
        config = (("cleanup.policy", "compact"), ("min.cleanable.dirty.ratio", "0"), ("delete.retention.ms", "1000"))
        self.host.apply(AlterTopicConfig(name="t", set_=config))
        look_ups = self.host.look_ups()
        replicas = {self.host.live.pid: self.host.live}
        node = self.host.node_host()
        self.compactor = Compactor(node, look_ups, Segments(node, look_ups, replicas.get, lambda _: None))
        self.endings = Endings(node, node.propose)
        self._answered = 0

    def put(self, key: bytes, value: bytes | None) -> None:
        self._produce(encode_batch([NewRecord(key, value, 1)]))

    def put_in_transaction(self, key: bytes, value: bytes) -> None:
        host = self.host
        for change in (init_transactions("t"), add("t", 0, 0, host.part.pid)):
            host.apply(proposed(host.state, change))
        batch = encode_batch(
            [NewRecord(key, value, 1)], producer_id=0, producer_epoch=0, base_sequence=0, is_transactional=True
        )
        self._produce(batch)
        host.apply(proposed(host.state, end_transaction("t", 0, 0, commit=True, fencing=False)))
        self.endings.drive(host.live)
        self._settle()

    def _produce(self, batch: bytes) -> None:
        self.host.produce(batch)
        self._settle()

    def _settle(self, ms: int = 0) -> None:
        self.host.settle(ms)
        self.host.advance(self.host.live.log.appended_end)
        self.endings.drive(self.host.live)
        self.host.settle()

    def wait(self, ms: int) -> None:
        """What is proposed meanwhile is applied."""
        for _ in range(ms // 100):
            self.compactor.visit(self.host.live, self.host.clock.monotonic_ns())
            self._settle(100)
            now_ms = self.host.clock.wall_ns() // 1_000_000
            self.host.apply(AdvanceClock(seen_ms=self.host.state.expiry_clock_ms, elapsed_ms=100, now_ms=now_ms))
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


def test_a_tombstone_stays_while_a_batch_below_it_cannot_be_looked_into() -> None:
    """It deletes what a transaction wrote, and compaction leaves the batches of transactions as they are."""
    keeper = Keeper()
    keeper.put_in_transaction(b"k", b"old")
    keeper.put(b"k", None)
    keeper.put(b"other", b"v")
    keeper.wait(30_000)
    assert keeper.records == [(b"k", b"old"), (b"k", None), (b"other", b"v")]


def test_a_tombstone_goes_after_its_time() -> None:
    keeper = Keeper()
    keeper.put(b"k", b"old")
    keeper.put(b"k", None)
    keeper.put(b"other", b"v")
    keeper.wait(30_000)
    assert keeper.records == [(b"other", b"v")]
