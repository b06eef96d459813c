"""Producers of one replica: their bound on the node, their expiry, and large tables on the wire."""

from dataclasses import replace

import pytest

from smq.raft_state.binary import CodecError
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX, PRODUCER_EXPIRATION_MS_MIN
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.net import wire
from tests.unit.raft_state.support import producers_kept_ms
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Answer, Host, batch, register

LIMIT = 3


def of(producer: int, sequence: int = 0) -> bytes:
    return batch(producer_id=producer, producer_epoch=0, base_sequence=sequence)


def leader(producers_max: int = LIMIT) -> Host:
    host = Host()
    host.config = replace(host.config, producers_max=producers_max)
    host.create_partition()
    return host


def commit(host: Host, *batches: bytes) -> list[Answer]:
    answers = [host.produce(data) for data in batches]
    host.commit()
    host.settle(1)
    return answers


def pass_expiration(host: Host) -> None:
    """The clock marks what is there, which may start it, and moves on by one expiration."""
    host.apply(producers_kept_ms(PRODUCER_EXPIRATION_MS_MIN))
    for _ in range(1 + PRODUCER_EXPIRATION_MS_MIN // CLOCK_ELAPSED_MS_MAX):
        before = host.state.expiry_clock_ms
        now_ms = before + CLOCK_ELAPSED_MS_MAX
        host.apply(AdvanceClock(seen_ms=before, elapsed_ms=CLOCK_ELAPSED_MS_MAX, now_ms=now_ms))


# ---------------------------------------------------------------------------------------------------- the bound
def test_a_new_producer_is_refused_at_the_bound_and_known_ones_go_on() -> None:
    host = leader()
    commit(host, *(of(p) for p in range(LIMIT)))
    with pytest.raises(SmqError) as refused:
        host.produce(of(LIMIT))
    assert refused.value.code is ErrorCode.TOO_MANY_PRODUCERS
    assert (refused.value.code.is_definite, refused.value.code.is_retriable) == (True, True)
    assert "producers_max" in refused.value.message
    (repeated, following) = commit(host, of(0), of(1, 1))
    assert (repeated.offsets, repeated.is_duplicate) == ((0, 0), True)
    assert following.offsets == (LIMIT, LIMIT)
    assert commit(host, batch())[0].offsets == (LIMIT + 1, LIMIT + 1), "without an id there is nothing to remember"


def test_a_follower_takes_more_producers_than_its_own_bound() -> None:
    host = leader(producers_max=1)
    host.elect(PEER_A)
    values = []
    for producer in range(3):
        other = Host()
        other.create_partition()
        other.elect(ME)
        data = batch(producer_id=producer, producer_epoch=0, base_sequence=0)
        commit(other, *([batch()] * producer), data)
        values.append(other.live.log.read(Offset(producer), Offset(producer + 1), 1 << 20)[0].value)
    host.live.on_append(PEER_A, wire.Append(host.part.pid, Epoch(1), 1, Offset(0), values))
    host.settle()
    assert host.live.log.appended_end == 3
    assert host.producers_held == 3


def test_the_bound_counts_all_partitions_and_what_is_dropped_no_longer_counts() -> None:
    host = leader()
    commit(host, *(of(p) for p in range(LIMIT)))
    assert host.producers_held == LIMIT
    host.live.log.truncate(Offset(1))
    assert host.producers_held == 1
    host.store.drop(host.live.log)
    assert host.producers_held == 0


def test_producers_are_counted_again_after_a_restart() -> None:
    host = leader()
    commit(host, *(of(p) for p in range(LIMIT)))
    host.reopen()
    assert host.producers_held == LIMIT


# ---------------------------------------------------------------------------------------------------- expiry
def test_an_expired_producer_makes_room_and_may_continue_with_any_sequence() -> None:
    host = leader()
    commit(host, *(of(p) for p in range(LIMIT)))
    pass_expiration(host)
    assert (host.part.producers_start, host.producers_held) == (LIMIT, 0)
    (answer,) = commit(host, of(0, 17))
    assert not answer.is_duplicate
    assert host.producers_held == 1


def test_a_producer_that_has_written_since_the_mark_stays_known() -> None:
    host = leader()
    commit(host, of(0), of(1))
    host.apply(AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=1))
    commit(host, of(1, 1))
    host.apply(producers_kept_ms(PRODUCER_EXPIRATION_MS_MIN))
    step_ms = PRODUCER_EXPIRATION_MS_MIN
    host.apply(AdvanceClock(seen_ms=1, elapsed_ms=step_ms, now_ms=1 + step_ms))
    assert host.part.producers_start == 2
    assert host.producers_held == 1
    (answer,) = commit(host, of(1, 1))
    assert answer.is_duplicate


def test_a_batch_that_is_not_committed_yet_keeps_its_producer_known() -> None:
    host = leader()
    commit(host, of(0))
    host.produce(of(1))
    pass_expiration(host)
    assert host.part.producers_start == 1
    repeated = host.produce(of(1))
    host.settle()
    host.advance(2)
    host.settle(1)
    assert repeated.is_duplicate


def test_expired_producers_do_not_come_back_with_a_checkpoint_or_a_truncation() -> None:
    host = leader()
    commit(host, of(0), of(1))
    host.move_log_start(1)
    host.settle()
    pass_expiration(host)
    host.reopen()
    assert host.producers_held == 0
    host.apply(register(ME, host.identity.incarnation))
    host.elect(ME, incarnation=host.identity.incarnation)
    host.produce(of(7))
    host.settle()
    host.live.log.truncate(Offset(2))
    assert host.producers_held == 0


# ---------------------------------------------------------------------------------------------------- the wire
def big_table(count: int) -> ProducerTable:
    table = ProducerTable()
    for p in range(count):
        cached = CachedBatch(Epoch(0), Offset(0), Offset(1), Sequence(0), Sequence(0), TsNs(1))
        table.note(ProducerId(p), ProducerEpoch(0), cached)
    return table


def jumped(host: Host) -> None:
    """It follows epoch 1 and has never seen the records below 9."""
    host.elect(PEER_A)
    host.advance(9)
    host.move_log_start(9)
    host.settle()


def piece(host: Host, number: int, pieces: list[bytes], stream: int = 1) -> None:
    message = wire.Producers(host.part.pid, Epoch(1), stream, Offset(9), number, len(pieces), pieces[number])
    host.live.on_producers(PEER_A, message)


def test_a_table_is_adopted_with_its_last_piece() -> None:
    host = leader()
    jumped(host)
    table = big_table(10).snapshot()
    pieces = [table[i : i + 100] for i in range(0, len(table), 100)]
    for number in range(len(pieces)):
        assert not host.live.log.has_producers
        piece(host, number, pieces)
    assert host.live.log.has_producers
    assert host.producers_held == 10


def test_pieces_of_two_transfers_are_never_mixed() -> None:
    host = leader()
    jumped(host)
    old, new = ([half[:100], half[100:]] for half in (big_table(5).snapshot(), big_table(4).snapshot()))
    piece(host, 0, old, stream=1)
    piece(host, 1, new, stream=2)
    assert not host.live.log.has_producers
    piece(host, 0, new, stream=2)
    piece(host, 0, new, stream=2)  # a repetition is out of turn, too
    piece(host, 1, new, stream=2)
    assert not host.live.log.has_producers
    for number in range(2):
        piece(host, number, new, stream=3)
    assert host.producers_held == 4


def test_a_large_table_is_sent_in_pieces_as_the_link_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TABLE_PIECE_BYTES", 100)
    host = leader(producers_max=100)
    commit(host, *(of(p) for p in range(20)))
    host.move_log_start(20)
    commit(host, of(99))
    probe = next(m for peer, m in reversed(host.sent) if peer == PEER_B and isinstance(m, wire.Probe))
    host.network.backlog = host.config.replica_inflight_bytes_max
    ack = wire.Ack(host.part.pid, Epoch(0), INCARNATION, Offset(0), Offset(20), probe.stream, True, True)
    host.live.on_ack(PEER_B, ack)
    assert host.messages(wire.Producers) == [], "the link is busy"
    host.network.backlog = 0
    host.live.on_tick(host.clock.monotonic_ns())
    sent = [m for peer, m in host.sent if peer == PEER_B and isinstance(m, wire.Producers | wire.Append)]
    tables = [m for m in sent if isinstance(m, wire.Producers)]
    assert [m.piece for m in tables] == list(range(tables[0].pieces))
    assert max(len(m.table) for m in tables) == 100
    assert isinstance(sent[-1], wire.Append), "records follow the table"
    restored = ProducerTable.restore(b"".join(m.table for m in tables))
    assert all(restored.knows(p, Offset(0)) for p in range(20))


@pytest.mark.parametrize(("number", "pieces"), [(0, 0), (2, 2), (0, wire.TABLE_PIECES_MAX + 1)])
def test_a_piece_that_cannot_be_is_refused(number: int, pieces: int) -> None:
    host = leader()
    message = wire.Producers(host.part.pid, Epoch(1), 1, Offset(9), number, pieces, b"")
    with pytest.raises(CodecError, match="piece"):
        wire.decode(memoryview(b"".join(wire.encode(message))))
