"""One replica with damaged bytes: it continues, and reports nothing that it does not know."""

import pytest

from smq.raft_state.commands import AdvanceLogStart, MarkIncomplete
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, NodeId, Offset
from smq.replication.log.stored_batch import BatchDamaged, base_of_key, parse_header_of
from smq.replication.net import wire
from smq.replication.node_config import TAIL_BYTES_KEPT
from smq.replication.partition.reads import READ_MS_MAX
from smq.replication.partition.repair import OPEN_NS_MAX, REMEMBERED_NS, REPEATS_MAX, Outcome, repair_error
from smq.replication.ports import Table
from smq.testing.virtual.disk import DiskImage
from tests.unit.replication.support import INCARNATION, ME, PEER_A, PEER_B, Host, batch, register
from tests.unit.replication.test_rules import acks, append, follower, stored


def idempotent(sequence: int, value: bytes = b"v") -> bytes:
    return batch(value, producer_id=7, producer_epoch=0, base_sequence=sequence)


def advance_log_start(host: Host, to: int) -> None:
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(to)))


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
    assert isinstance(fetch, wire.FetchBatch)
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
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(3)))
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
    assert isinstance(found, wire.FoundBatch)
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
    host.apply(AdvanceLogStart(partition=host.part.pid, offset=Offset(2)))
    assert answer_fetches(host, {1: values[1]}) == [PEER_A, PEER_B], "the batch has no place here any more"
    assert (outcomes, host.repairs.counts.failed) == ([Outcome.DELETED], failed)
