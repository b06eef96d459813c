"""One replica with damaged bytes, after a jump of its state, or with a state older than its log: it continues, and
reports nothing that it does not know."""

from typing import cast

import pytest

from smq.raft_state.binary import CodecError
from smq.raft_state.commands import MarkIncomplete
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.raft_state.state import Segment
from smq.records import parse_header
from smq.replication.api import Fetched
from smq.replication.commands.coalescing import Barriers
from smq.replication.log.log_state import sealed
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.log.segments import HeldSegments
from smq.replication.log.stored_batch import BatchDamaged, base_of_key, parse_header_of
from smq.replication.net import wire
from smq.replication.net.wire import StepQuery, StepReport
from smq.replication.node_config import TAIL_BYTES_KEPT
from smq.replication.partition.compaction.segment_catch_up import Segments, combined, lowest_behind
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.older_state import Outlived
from smq.replication.partition.reads import READ_MS_MAX, Poll, Reads
from smq.replication.partition.repair import OPEN_NS_MAX, REMEMBERED_NS, REPEATS_MAX, Outcome, repair_error
from smq.replication.ports import DataDamaged, Table
from smq.testing.virtual.disk import DiskImage
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register
from tests.unit.replication.test_rules import acks, append, follower, stored


# -------------------------------------------------------------------------------------------------------------- damage
# One replica with damaged bytes: it continues, and reports nothing that it does not know.
def idempotent(sequence: int, value: bytes = b"v") -> bytes:
    return batch(value, producer_id=7, producer_epoch=0, base_sequence=sequence)


def advance_log_start(host: Host, to: int) -> None:
    host.move_log_start(to)


def rot(image: DiskImage, batch_number: int, *, with_row: bool = True) -> None:
    """One bit of the batch with this number, counted from the first on the disk; its index row may be gone, too."""
    rows = image.tables[Table.BATCHES]
    key = list(rows)[batch_number]
    rows[key] = rows[key][:-1] + bytes([rows[key][-1] ^ 1])
    if with_row:
        times = image.tables[Table.TIMES]
        del times[next(row for row in times if times[row] and base_of_key(row) == base_of_key(key))]


def restart_with_rot(host: Host, batch_number: int, *, with_row: bool = True) -> None:
    image = host.disk.crash()
    rot(image, batch_number, with_row=with_row)
    host.reopen(INCARNATION, image)


def follower_with(count: int) -> tuple[Host, list[bytes]]:
    """A follower in epoch 1 that holds `count` durable batches of one record each."""
    host = follower()
    values = [stored(batch(bytes([65 + i])), i, 1, ts_ns=10 + i) for i in range(count)]
    append(host, *values)
    host.settle()
    assert host.live.durable_verified_end == count
    return host, values


def follower_with_rot() -> tuple[Host, list[bytes]]:
    """Of three committed batches the second one has rotted; its index row has not."""
    host, values = follower_with(3)
    host.advance(3)
    restart_with_rot(host, 1, with_row=False)
    return host, values


# --------------------------------------------------------------------------------------------------- damage
def mark(host: Host) -> None:
    """What this replica has to tell the others about its damage, applied."""
    assert host.live.hidden_damage() == [host.part.pid]
    host.apply(
        MarkIncomplete(node=ME, incarnation=host.identity.incarnation, partitions=tuple(host.live.hidden_damage()))
    )


def test_rule_23_a_log_whose_end_is_hidden_is_fetched_again_once_the_others_know() -> None:
    host, values = follower_with(3)
    restart_with_rot(host, 1)
    assert host.live.durable_verified_end == 1
    append(host, *values[1:])
    assert host.live.log.appended_end == 1
    assert host.live.log.tail_damage is not None
    mark(host)
    assert host.live.hidden_damage() == []
    append(host, stored(batch(), 5, 1))  # leaves a gap
    assert host.live.log.tail_damage is not None, "the leader has not shown that it has what follows"
    append(host, *values[1:], stream=2)
    host.settle()
    assert host.live.durable_verified_end == 3
    assert [v.value for v in host.live.log.read(Offset(0), Offset(3), 1 << 20)] == values


def test_rule_23_a_log_whose_end_is_hidden_acknowledges_and_reports_nothing_until_the_others_know() -> None:
    host, _ = follower_with(3)
    restart_with_rot(host, 1)
    host.sent.clear()
    host.live.on_probe(PEER_A, wire.Probe(host.part.pid, Epoch(1), 2))
    host.live.after_durable()
    assert host.live.seal(Epoch(1)) is None
    assert acks(host) == []
    assert host.noted["damaged"] == 1
    mark(host)
    assert [ack.end for ack in acks(host)] == [1]
    assert host.live.hidden_damage() == []
    assert host.live.seal(Epoch(1)) == (host.part.pid, 1, 1)


def test_rule_23_a_mark_of_an_earlier_process_is_not_enough() -> None:
    """It may be taken back for what that process had fetched again."""
    host, _ = follower_with(3)
    image = host.disk.crash()
    rot(image, 1)
    host.apply(MarkIncomplete(node=ME, incarnation=INCARNATION, partitions=(host.part.pid,)))
    host.reopen(INCARNATION + 1, image)
    host.live.note_damage()
    assert host.live.seal(Epoch(1)) is None
    assert host.live.hidden_damage() == [], "only a registered process can say it"
    host.apply(register(ME, INCARNATION + 1))
    host.live.note_damage()
    assert host.live.seal(Epoch(1)) == (host.part.pid, 1, 1)


def test_rule_23_a_log_whose_end_is_hidden_leads_nothing() -> None:
    host, _ = follower_with(3)
    host.advance(1)
    restart_with_rot(host, 1)
    host.elect(ME, end=1)
    assert (host.live.leading, host.resigned) == (None, [(host.part.pid, Epoch(2))])


def test_rule_21_a_damaged_batch_is_evidence_and_no_offer() -> None:
    """Its row says that it was here, so the log did hold it; the batch itself cannot be served."""
    host, _ = follower_with(3)
    restart_with_rot(host, 1, with_row=False)
    assert host.live.seal(Epoch(1)) == (host.part.pid, 3, 1)


def answer_fetches(
    host: Host,
    values: dict[int, bytes],
    peers: tuple[NodeId, ...] = (PEER_A, PEER_B),
    may_have: tuple[NodeId, ...] = (),
) -> list[int]:
    """The others answer requests from `values`. Returns the nodes that were asked, in order."""
    requested: list[int] = []
    seen: set[int] = set()
    while True:
        new = [(p, m) for p, m in host.sent if isinstance(m, wire.FetchBatch) and m.request not in seen and p in peers]
        if not new:
            host.settle()
            return requested
        for peer, message in new:
            assert isinstance(message, wire.FetchBatch)
            seen.add(message.request)
            requested.append(peer)
            value = values.get(message.offset, b"")
            found = wire.FoundBatch(message.partition, message.request, peer in may_have, memoryview(value))
            host.repairs.on_found(peer, found)


def want(host: Host, offset: int) -> list[bool]:
    """Asks for a repair; what its outcome was will be in the list."""
    reported: list[bool] = []
    host.repair(BatchDamaged(host.part.pid, Offset(offset), "rotten"), reported.append)
    return reported


def test_damaged_bytes_below_the_mark_are_fetched_from_the_leader_and_count_meanwhile() -> None:
    host, values = follower_with_rot()
    assert host.live.durable_verified_end == 3
    reported = want(host, 1)
    assert answer_fetches(host, {1: values[1]}) == [PEER_A]
    assert reported == [True]
    assert [v.value for v in host.live.log.read(Offset(0), Offset(3), 1 << 20)] == values


def test_damaged_bytes_beyond_the_mark_count_for_nothing_until_they_are_intact_on_disk() -> None:
    host, values = follower_with(3)
    restart_with_rot(host, 1, with_row=False)
    assert (host.live.durable_verified_end, host.live.log.appended_end) == (1, 3)
    want(host, 1)
    fetch = host.messages(wire.FetchBatch)[-1]
    host.repairs.on_found(PEER_A, wire.FoundBatch(fetch.partition, fetch.request, False, memoryview(values[1])))
    assert host.live.durable_verified_end == 1, "it has been submitted only"
    host.settle()
    assert host.live.durable_verified_end == 3


def test_a_damaged_first_batch_beyond_the_mark_leaves_nothing_that_counts() -> None:
    host, _ = follower_with(3)
    restart_with_rot(host, 0, with_row=False)
    assert host.live.durable_verified_end == 0


def test_bytes_that_fail_or_are_of_another_epoch_are_not_taken_and_the_next_replica_is_asked() -> None:
    host, values = follower_with_rot()
    reported = want(host, 1)
    assert answer_fetches(host, {1: stored(batch(b"other"), 1, 7, ts_ns=11)}) == [PEER_A, PEER_B]
    assert reported == [False]
    reported = want(host, 1)
    answer_fetches(host, {1: values[1][:-1] + b"?"})
    assert reported == [False]
    assert host.live.log.damaged_batches == {1}


def test_a_replica_that_does_not_answer_is_passed_over_and_leaves_the_outcome_open() -> None:
    host, _ = follower_with_rot()
    outcomes = begin_repair(host)
    host.settle(2_000)  # the leader does not answer
    assert answer_fetches(host, {}, peers=(PEER_B,)) == [PEER_B]
    assert outcomes == [], "the leader may answer yet"
    host.settle(READ_MS_MAX)
    assert outcomes == [Outcome.UNKNOWN]


def begin_repair(host: Host) -> list[Outcome]:
    """Of batch 1: its outcome will be in the list."""
    outcomes: list[Outcome] = []
    host.repairs.request(host.live, BatchDamaged(host.part.pid, Offset(1), "rotten"), outcomes.append)
    return outcomes


def begin_repair_without_answers(host: Host) -> tuple[list[Outcome], dict[NodeId, wire.FetchBatch]]:
    """Of batch 1. The leader and then the other replica have been asked, and neither has answered in its time."""
    outcomes = begin_repair(host)
    for _ in range(3):
        host.settle()
    asked = {peer: m for peer, m in host.sent if isinstance(m, wire.FetchBatch)}
    assert list(asked) == [PEER_A, PEER_B]
    assert outcomes == []
    return outcomes, asked


def answer_late(host: Host, peer: NodeId, asked: wire.FetchBatch, value: bytes = b"") -> None:
    host.repairs.on_found(peer, wire.FoundBatch(asked.partition, asked.request, False, memoryview(value)))
    host.settle()


@pytest.mark.parametrize("late", [PEER_A, PEER_B])
def test_a_late_answer_repairs_the_batch(late: NodeId) -> None:
    host, values = follower_with_rot()
    outcomes, asked = begin_repair_without_answers(host)
    other = PEER_B if late == PEER_A else PEER_A
    answer_late(host, other, asked[late], values[1])
    assert outcomes == [], "only the replica that was asked may answer"
    answer_late(host, late, asked[late], values[1])
    assert outcomes == [Outcome.REPAIRED]
    answer_late(host, other, asked[other], values[1])
    assert (outcomes, host.repairs.counts.repaired) == ([Outcome.REPAIRED], 1)
    assert [v.value for v in host.live.log.read(Offset(0), Offset(3), 1 << 20)] == values


def test_late_answers_that_no_replica_has_the_batch_are_final() -> None:
    host, _ = follower_with_rot()
    outcomes, asked = begin_repair_without_answers(host)
    answer_late(host, PEER_A, asked[PEER_A])
    assert outcomes == []
    answer_late(host, PEER_B, asked[PEER_B])
    assert outcomes == [Outcome.NO_REPLICA]


def test_a_reader_joins_a_repair_that_waits_for_late_answers_and_both_wait_no_longer_than_for_a_disk() -> None:
    assert OPEN_NS_MAX == READ_MS_MAX * 1_000_000
    host, values = follower_with_rot()
    outcomes, asked = begin_repair_without_answers(host)
    host.repairs.request(host.live, BatchDamaged(host.part.pid, Offset(1), "rotten"), outcomes.append)
    assert len(host.messages(wire.FetchBatch)) == 2
    host.settle(2_500)
    assert outcomes == [Outcome.UNKNOWN] * 2
    answer_late(host, PEER_A, asked[PEER_A], values[1])
    assert host.live.log.damaged_batches == {1}, "its question is forgotten"


def test_a_repair_does_not_wait_for_replicas_whose_links_have_closed() -> None:
    host, _ = follower_with_rot()
    outcomes = begin_repair(host)
    host.network.disconnected |= {PEER_A, PEER_B}
    host.settle(1_100)
    assert outcomes == [Outcome.UNKNOWN]


def test_a_batch_whose_repair_fails_is_not_fetched_for_ever() -> None:
    """As in a tree that is out of order, in which a written row is not found."""
    host, values = follower_with(3)
    host.advance(3)
    outcomes: list[Outcome] = []
    requested = 0

    def again() -> None:
        nonlocal requested
        host.repairs.request(host.live, BatchDamaged(host.part.pid, Offset(1), "missing"), outcomes.append)
        requested += len(answer_fetches(host, {1: values[1]}))
        host.sent.clear()

    for _ in range(REPEATS_MAX + 3):
        again()
    assert outcomes == [Outcome.REPAIRED] * REPEATS_MAX + [Outcome.INEFFECTIVE] * 3
    assert requested == REPEATS_MAX
    assert (
        repair_error(BatchDamaged(host.part.pid, Offset(1), "missing"), Outcome.INEFFECTIVE).code
        is ErrorCode.DATA_DAMAGED
    )
    host.settle(REMEMBERED_NS // 1_000_000)
    again()
    assert outcomes[-1] is Outcome.REPAIRED


def test_a_replica_gives_only_what_is_right_and_whole_and_durable_here() -> None:
    host, values = follower_with(3)
    assert asked(host, 1) == (values[1], False)
    assert asked(host, 3) == (b"", True), "it may get the batch yet"
    host.repairs.on_fetch(PEER_B, None, wire.FetchBatch(host.part.pid, 5, Offset(1)))
    assert last_found(host) == (b"", True), "its state may be behind"


def test_a_replica_that_is_behind_or_busy_says_that_it_may_have_the_batch() -> None:
    host, values = follower_with(3)
    host.advance(3)
    host.reopen()
    host.live.log._tail.clear()
    host.disk.reads_max = 0
    assert asked(host, 1) == (b"", True), "too many reads wait for its disk"
    host.disk.reads_max = 1
    assert asked(host, 1) == (values[1], False)
    host.disk.stall_reads(100)
    host.repairs.on_fetch(PEER_B, host.live, wire.FetchBatch(host.part.pid, 5, Offset(2)))
    host.move_log_start(3)
    host.settle()
    assert last_found(host) == (b"", True), "the log start has passed the batch meanwhile"
    assert asked(host, 0) == (b"", True), "the other has not applied the log start yet"


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_answers_wait_for_a_full_link_with_more_room_than_streams_have(*, is_in_memory: bool) -> None:
    host, values = follower_with(3)
    host.advance(3)
    if not is_in_memory:
        host.reopen()
        host.live.log._tail.clear()
    window = host.config.replica_inflight_bytes_max
    host.network.backlog = window
    assert asked(host, 1) == (values[1], False)
    host.network.backlog = 2 * window
    assert asked(host, 1) == (b"", True)
    assert asked(host, 3) == (b"", True)


def test_a_replica_whose_copy_is_damaged_cannot_help() -> None:
    host, _ = follower_with_rot()
    assert asked(host, 1) == (b"", False)


def asked(host: Host, offset: int) -> tuple[bytes, bool]:
    host.repairs.on_fetch(PEER_B, host.live, wire.FetchBatch(host.part.pid, 5, Offset(offset)))
    host.settle(100)
    return last_found(host)


def last_found(host: Host) -> tuple[bytes, bool]:
    found = host.messages(wire.FoundBatch)[-1]
    return bytes(found.value), found.may_have


@pytest.mark.parametrize("later", [PEER_A, PEER_B])
def test_damage_is_final_only_if_every_replica_says_so(later: NodeId) -> None:
    host, _ = follower_with_rot()
    outcomes = begin_repair(host)
    assert answer_fetches(host, {}, may_have=(later,)) == [PEER_A, PEER_B]
    host.repairs.request(host.live, BatchDamaged(host.part.pid, Offset(1), "rotten"), outcomes.append)
    answer_fetches(host, {})
    assert outcomes == [Outcome.UNKNOWN, Outcome.NO_REPLICA]
    assert repair_error(BatchDamaged(host.part.pid, Offset(1), "rotten"), outcomes[0]).code is ErrorCode.NODE_NOT_READY


@pytest.mark.parametrize("hides_the_end", [True, False])
def test_an_elected_leader_gives_up_damaged_bytes_beyond_its_start(*, hides_the_end: bool) -> None:
    host, _ = follower_with(3)
    host.advance(1)
    restart_with_rot(host, 1 if hides_the_end else 2, with_row=hides_the_end)
    if hides_the_end:
        mark(host)
    host.elect(ME, end=1)
    assert (host.live.log.appended_end, host.live.log.damaged_batches) == (1, set())
    answer = host.produce()
    host.settle()
    host.ack(PEER_A, 2)
    host.advance(2)
    host.settle(10)
    assert answer.offsets == (1, 1)


def leader_with_rot() -> Host:
    """It leads epoch 1 with PEER_A level; PEER_B asks for a batch that has rotted under the running process."""
    host = Host()
    host.create_partition()
    host.elect(ME)
    count = 2 + TAIL_BYTES_KEPT // 4_000  # so that the first batches are no longer in memory
    for _ in range(count):
        host.produce(batch(b"x" * 4_000))
    host.settle()
    host.ack(PEER_A, count)
    host.advance(count)
    rot(host.disk._image, 0)  # what is on the platter, while the disk is in use
    host.answer_probe(PEER_B, 0)
    host.settle(100)  # it is read from the disk
    return host


def test_rot_at_the_leader_does_not_fail_producers() -> None:
    host = leader_with_rot()
    end = host.part.hwm
    answer = host.produce()
    host.settle(10)
    host.ack(PEER_A, end + 1)
    host.advance(end + 1)
    host.settle(10)
    assert answer.offsets == (end, end)


def test_a_leader_that_no_replica_can_help_resigns_for_a_follower_that_is_level() -> None:
    host = leader_with_rot()
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.resigned == [], "it asks first"
    answer_fetches(host, {})
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.resigned == [(host.part.pid, Epoch(1))]


def test_a_leader_that_was_helped_supplies_the_follower_and_keeps_leading() -> None:
    host = leader_with_rot()
    ts_ns = parse_header_of(host.disk.image.tables[Table.BATCHES].values()[0], verify=None)[0]
    whole = stored(batch(b"x" * 4_000), 0, 1, ts_ns=ts_ns)
    answer_fetches(host, {0: whole})
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.resigned == []
    assert [v.value for v in host.live.log.read(Offset(0), Offset(1), 1)] == [whole]


def test_a_leader_whose_bytes_no_other_replica_has_keeps_leading() -> None:
    host = leader_with_rot()
    host.advance(host.part.hwm + 1)  # no node reaches this mark
    host.live.on_tick(host.clock.monotonic_ns())
    answer_fetches(host, {})
    host.live.on_tick(host.clock.monotonic_ns())
    assert host.resigned == []


def test_a_hand_over_to_a_follower_that_cannot_be_supplied_does_not_begin() -> None:
    host = leader_with_rot()
    assert not host.live.transfer(PEER_B)


def restart_with_a_damaged_row(host: Host, table: Table, row_number: int) -> None:
    image = host.disk.crash()
    rows = image.tables[table]
    key = [k for k in rows if rows[k]][row_number]
    rows[key] = rows[key][:-1] + bytes([rows[key][-1] ^ 1])
    host.reopen(INCARNATION + 1, image)


def test_a_damaged_index_row_does_not_keep_the_log_start_from_moving() -> None:
    host, values = follower_with(6)
    host.advance(6)
    restart_with_a_damaged_row(host, Table.TIMES, 1)
    advance_log_start(host, 4)
    host.settle()
    assert [v.value for v in host.live.log.read(Offset(4), Offset(6), 1 << 20)] == values[4:]


def test_a_damaged_index_row_does_not_keep_a_log_from_being_truncated() -> None:
    host, _ = follower_with(6)
    host.advance(3)
    restart_with_a_damaged_row(host, Table.TIMES, 1)
    host.elect(PEER_B, end=3)
    append(host, stored(batch(b"new"), 3, 2, ts_ns=99), epoch=2, peer=PEER_B)
    host.settle()
    assert host.live.durable_verified_end == 4
    assert host.live.log.last_ts_ns == 99


def test_a_batch_deleted_during_its_repair_is_no_damage() -> None:
    host, values = follower_with_rot()
    outcomes = begin_repair(host)
    failed = host.repairs.counts.failed
    host.move_log_start(2)
    assert answer_fetches(host, {1: values[1]}) == [PEER_A, PEER_B], "the batch has no place here any more"
    assert (outcomes, host.repairs.counts.failed) == ([Outcome.DELETED], failed)


# --------------------------------------------------------------------------------------------------------------- jumps
# One replica after a jump of the applied state, or in a stopping process: it continues, and reports nothing that it
# does not know.
def jump(host: Host, *, hwm: int, log_start: int) -> None:
    """A snapshot reaches a replica that was cut off: PEER_A led epoch 1, ME leads epoch 2; it learns of both
    together."""
    with host.cut_off():
        host.elect(PEER_A)
        host.advance(hwm)
        host.elect(ME, end=hwm)
        advance_log_start(host, log_start)


def leader_with_a_sequence() -> Host:
    """Sequence 0 is committed, in epoch 0."""
    host = Host()
    host.create_partition()
    host.produce(idempotent(0))
    host.settle()
    host.advance(1)
    return host


def leader_with_an_uncommitted_sequence() -> Host:
    """It led epoch 0: sequence 0 is committed, sequence 1 never left this node."""
    host = leader_with_a_sequence()
    host.produce(idempotent(1))
    host.settle()
    return host


def test_a_jump_over_an_epoch_and_the_log_start_leaves_no_sequence_that_was_never_committed() -> None:
    host = leader_with_an_uncommitted_sequence()
    jump(host, hwm=2, log_start=2)
    assert (host.live.log.log_start, host.live.log.appended_end) == (2, 2)
    assert host.live.log.producers.check(parse_header(idempotent(1)), Offset(0)) is None


def test_a_jump_within_what_is_here_keeps_the_sequences_that_were_committed() -> None:
    host = leader_with_an_uncommitted_sequence()
    with host.cut_off():
        host.elect(ME)
        advance_log_start(host, 1)
    assert host.produce(idempotent(1)).result is None, "it was dropped with its epoch: this is a new batch"
    host.settle()
    assert (host.live.log.log_start, host.live.log.appended_end) == (1, 2)


def jumped() -> Host:
    """A follower of which DeleteRecords up to 9 has removed sequences 1 to 8 before it ever saw them."""
    host = follower()
    append(host, stored(idempotent(0), 0, 1))
    host.settle()
    host.advance(9)
    advance_log_start(host, 9)
    host.settle()
    return host


def send_producers(host: Host, at: int) -> None:
    """What a leader says whose log holds sequence 8 at offset 8."""
    table = ProducerTable()
    cached = CachedBatch(Epoch(1), Offset(8), Offset(9), Sequence(8), Sequence(8), TsNs(88))
    table.note(ProducerId(7), ProducerEpoch(0), cached)
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(at), 0, 1, table.snapshot()))
    host.settle()


def test_a_log_that_jumped_counts_for_nothing_until_it_has_the_producers() -> None:
    host = jumped()
    assert host.live.durable_verified_end == 0
    assert acks(host)[-1].needs_producers
    append(host, stored(idempotent(9), 9, 1))
    assert host.live.log.appended_end == 9, "what follows waits for them, too"
    send_producers(host, 9)
    assert host.live.durable_verified_end == 9
    assert not acks(host)[-1].needs_producers


def test_rule_16_a_log_that_jumped_seals_and_is_no_candidate_until_it_has_the_producers() -> None:
    host = jumped()
    assert host.live.seal(Epoch(1)) == (host.part.pid, 9, wire.NO_CANDIDATE)
    host.elect(PEER_B)
    table = wire.Producers(host.part.pid, Epoch(2), 1, Offset(9), 0, 1, b"")
    host.live.on_producers(PEER_B, table)
    host.settle()
    assert host.live.seal(Epoch(2)) == (host.part.pid, 9, 9)


def test_a_leader_whose_log_had_jumped_answers_the_repetition_of_a_batch_it_never_held() -> None:
    host = jumped()
    send_producers(host, 9)
    host.elect(ME, end=9)
    answer = host.produce(idempotent(8))
    host.settle(10)
    assert answer.is_duplicate
    assert answer.offsets == (8, 8)


def test_a_log_that_jumped_does_not_lead_without_the_producers() -> None:
    host = jumped()
    host.elect(ME, end=9)
    assert host.live.leading is None


def test_the_lack_of_producers_outlives_the_process() -> None:
    host = jumped()
    assert not host.reopen().log.has_producers
    send_producers(host, 9)
    assert host.reopen().log.has_producers


def test_the_only_replica_keeps_leading_without_producers_as_no_other_has_them() -> None:
    host = jumped()
    host.part.replicas = (ME,)
    host.elect(ME, end=9)
    assert host.live.leading is not None


def test_a_sole_replica_that_leads_without_producers_waits_for_none_if_it_gets_others() -> None:
    host = jumped()
    host.part.replicas = (ME,)
    host.elect(ME, end=9)
    host.part.replicas = (ME, PEER_A, PEER_B)
    assert host.live.durable_verified_end == 9
    host.settle()
    assert host.reopen().log.has_producers


def test_producers_of_another_offset_are_not_taken() -> None:
    host = jumped()
    send_producers(host, 8)
    assert not host.live.log.has_producers


@pytest.mark.parametrize(("peer", "epoch"), [(PEER_B, 1), (PEER_A, 0), (PEER_A, 2)])
def test_producers_are_taken_from_the_leader_in_its_epoch_alone(peer: NodeId, epoch: int) -> None:
    host = jumped()
    host.live.on_producers(peer, wire.Producers(host.part.pid, Epoch(epoch), 1, Offset(9), 0, 1, b""))
    assert not host.live.log.has_producers
    host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(9), 0, 1, b""))
    assert host.live.log.has_producers


def test_producers_that_do_not_decode_are_refused() -> None:
    host = jumped()
    with pytest.raises(CodecError, match="cannot be adopted"):
        host.live.on_producers(PEER_A, wire.Producers(host.part.pid, Epoch(1), 1, Offset(9), 0, 1, b"\x01"))


def test_a_leader_sends_its_producers_to_a_log_that_jumped() -> None:
    host = leader_with_a_sequence()
    advance_log_start(host, 1)
    probe = host.last_probe(PEER_B)
    ack = wire.Ack(host.part.pid, Epoch(0), INCARNATION, Offset(0), Offset(1), probe.stream, True, True)
    host.live.on_ack(PEER_B, ack)
    reported = host.messages(wire.Producers)[-1]
    assert (reported.at, reported.table) == (1, host.live.log.producers.snapshot())


def test_the_log_start_reached_in_the_own_epoch_keeps_the_sequences() -> None:
    host = leader_with_a_sequence()
    advance_log_start(host, 1)
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.is_duplicate


def test_a_repetition_of_a_committed_batch_is_answered_when_its_epoch_has_been_pruned() -> None:
    host = leader_with_a_sequence()
    host.elect(ME)
    host.produce(batch())
    host.settle()
    host.advance(2)
    advance_log_start(host, 2)
    assert host.part.epoch_range(Epoch(0)) is None
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.offsets == (0, 0)
    assert answer.is_duplicate


def test_a_stream_number_of_an_earlier_epoch_does_not_silence_a_follower() -> None:
    host = follower()
    append(host, stored(batch(), 5, 1), stream=2)
    host.elect(PEER_B)
    before = len(acks(host))
    append(host, stored(batch(), 5, 2), epoch=2, stream=2, peer=PEER_B)
    assert len(acks(host)) == before + 1


def test_a_jump_to_the_epoch_after_the_one_it_was_judged_by_keeps_the_sequences_that_were_committed() -> None:
    host = leader_with_a_sequence()
    for _ in range(2):
        host.elect(ME)  # epochs in which nothing is appended
    with host.cut_off():
        host.elect(ME)
        advance_log_start(host, 1)
    answer = host.produce(idempotent(0))
    host.settle(10)
    assert answer.offsets == (0, 0)


# ------------------------------------------------------------------------------------------------- stopping
def test_a_node_that_stops_does_not_say_that_what_it_appended_is_lost(host: Host) -> None:
    answer = host.produce()
    host.settle(100)
    host.live.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    host.settle(10)
    assert answer.error == "TIMED_OUT"
    assert not ErrorCode.TIMED_OUT.is_definite


# ----------------------------------------------------------------------------------------------------------- newer log
# A node whose state is older than what its log has installed: it has just started, and its Raft log is behind.
OLD, NEW = b"o" * 16, b"n" * 16


@pytest.fixture
def older() -> Host:
    """A follower of one batch after the other, up to 4, which the state takes for compacted in two segments."""
    older = follower()
    append(older, *[stored(batch(b"v"), n, 1, ts_ns=10 + n) for n in range(4)])
    older.settle()
    older.advance(4)
    part = older.live.part
    part.segments = [Segment(start=Offset(0), digest=OLD), Segment(start=Offset(2), digest=OLD)]
    part.compacted_end, part.compactions = Offset(4), 2
    older.live.log.segments.put(Offset(0), Offset(4), NEW)
    return older


def test_an_older_segment_takes_no_place_in_a_newer_log(older: Host) -> None:
    assert lowest_behind(older.live) == (0, 2, OLD), "an older log"
    older.live.log.segments.compactions = 3
    assert lowest_behind(older.live) is None
    older.live.part.compactions = 3
    assert lowest_behind(older.live) == (0, 2, OLD), "the state has caught up"


def test_a_newer_log_says_of_no_older_state_that_it_is_in_step(older: Host) -> None:
    """It may lack what the next entries of that state put in line."""
    live = older.live
    segments = Segments(older.node_host(), older.look_ups(), {live.pid: live}.get, lambda _: None)
    live.part.segments = [Segment(start=Offset(0), digest=NEW)]

    def is_in_step() -> bool:
        segments.on_step_query(PEER_A, StepQuery(live.pid, 1, combined(live.part)))
        report = older.messages(StepReport)[-1]
        return report.is_in_step

    assert is_in_step()
    live.log.segments.compactions = 3
    assert not is_in_step()


def test_a_newer_log_is_not_read_by_the_marks_of_an_older_state(older: Host) -> None:
    assert older.live.readable_end == 4
    older.live.log.segments.compactions = 3
    assert older.live.readable_end == 0


def outlived(older: Host) -> tuple[Outlived, list[Fetched | Offset | SmqError]]:
    """The node's own view of it, and what two readers get, after the log has been found to be newer."""
    older.live.log.segments.compactions = 3
    node = older.node_host()
    seen = Outlived(node)
    seen.visit(older.live)
    found: list[Fetched | Offset | SmqError] = []
    ends = ExactEnds(node, cast(Barriers, None), {older.live.pid: older.live}.get)
    Reads(node, ends, older.repairs).fetch(Poll(older.live, Offset(0), 1 << 20, 0, found.append))
    older.look_ups().run(older.live, lambda log: log.log_start, 1_000, found.append)
    older.settle(10)
    return seen, found


def test_an_older_state_is_waited_for_before_the_process_is_registered(older: Host) -> None:
    older.reopen(INCARNATION + 1)
    seen, (fetched, _) = outlived(older)
    assert seen.warnings() == []
    assert isinstance(fetched, Fetched)
    assert fetched.batches == []


def test_a_log_that_has_outlived_the_state_is_refused_with_the_way_out(older: Host) -> None:
    """The registration of this process is applied: nothing that it had applied before is yet to come."""
    older.reopen(INCARNATION + 1)
    older.apply(register(ME, INCARNATION + 1))
    seen, found = outlived(older)
    assert ["empty its directory" in warning for warning in seen.warnings()] == [True]
    for error in found:
        assert isinstance(error, SmqError)
        assert error.code is ErrorCode.DATA_DAMAGED
        assert "empty its directory" in str(error)
    assert older.live.log.segments.compactions == 3, "the count is never lowered"


def test_the_row_keeps_the_compactions_and_one_of_the_first_version_has_none() -> None:
    held = HeldSegments()
    held.put(Offset(0), Offset(4), NEW)
    held.compactions = 7
    again = HeldSegments.decode(held.encode())
    assert (again.compactions, again.compacted_end, again.holds(Offset(0), Offset(4), NEW)) == (7, 4, True)
    first = bytes.fromhex("010000000000000004")
    older = HeldSegments.decode(sealed(first + held.encode()[17:-4]))
    assert (older.compactions, older.compacted_end, older.holds(Offset(0), Offset(4), NEW)) == (0, 4, True)
    with pytest.raises(DataDamaged, match="version 3"):
        HeldSegments.decode(sealed(b"\x03" + first[1:]))
