"""Planted bugs of partitions and of the nodes that hold them: logs, elections, answers, reads, repairs, disks, queues.

Owns these rows only. `catalogue` alone imports it, and the other modules of this room what reveals a broken log.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

from chaos_tests.sim.raft.planted import COUNTS_UNSYNCED, EVERY_DISK_COUNTS
from chaos_tests.sim.replacement import Fault, PlantedBug, nothing, replace, returns
from smq.raft_state.commands import AdvanceHwms, ElectLeader, HwmAdvance
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers import elections
from smq.raft_state.ids import Epoch, LogIndex, NodeId, Offset, PartitionId
from smq.raft_state.replies import Applied
from smq.raft_state.state import ClusterState, EpochStart, PartitionState
from smq.records import parse_header
from smq.replication.host import Host
from smq.replication.log.lineage import EpochRun
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.stored_batch import StoredValue, build_value, parse_header_of
from smq.replication.net import frames
from smq.replication.nodes import identity
from smq.replication.nodes.controller import Controller
from smq.replication.partition import admission
from smq.replication.partition.handover import HandOver
from smq.replication.partition.intake import SpaceGuard
from smq.replication.partition.replica import Replica
from smq.replication.partition.waiters import Waiter, Waiters
from smq.replication.ports import Buffer, Table
from smq.testing.virtual.disk import FakeDisk

_HANDLERS: Final = "smq.raft_state.handlers."
_LOG: Final = "smq.replication.log."
_MEMBERSHIP: Final = "smq.replication.nodes."
_PARTITION: Final = "smq.replication.partition."
_REPLICA: Final = _PARTITION + "replica:Replica."
LOST: Final = frozenset(
    {"lost-write", "offset-reuse", "inconsistent-offsets", "divergent-replica", "precommitted-read", "aborted-read"}
)
BROKEN: Final = LOST | {
    "process-died",
    "no-progress",
    "stale-hwm",
    "nonmonotonic-send",
    "duplicate-sequence",
    "sequence-gap",
}
RAFT: Final = BROKEN | {"two-leaders-in-term", "log-mismatch", "digest-mismatch", "stale-commit", "hwm-regression"}


# ------------------------------------------------------------------------------------------------- logs
def _stamped_as_the_batch_before(
    original: Fault, log: PartitionLog, values: Sequence[StoredValue], done: Callable[[], None]
) -> None:
    if log.runs:
        values = [_restamped(log, stored) for stored in values]
    original(log, values, done)


def _restamped(log: PartitionLog, stored: StoredValue) -> StoredValue:
    epoch, batch = log.runs[-1].epoch, stored.batch
    value = build_value(log.pid, batch, parse_header(batch), stored.base, epoch, stored.ts_ns)
    return StoredValue(stored.base, stored.end, epoch, stored.ts_ns, value)


def _this_node_leads(_original: Fault, replica: Replica) -> bool:
    return replica.part.leader == replica._host.node_id


def _carries_on(_original: Fault, disk: FakeDisk, _error: BaseException) -> None:
    """What was to be committed is lost, and is reported as durable."""
    lost, disk._in_flight, disk._fail_next = disk._in_flight, [], None
    disk._unreported.extend(lost)
    if lost:
        disk._clock.call_soon(lambda: disk._report(lost[-1].seq))


def _right_to_its_end(_original: Fault, run: EpochRun, _history: Sequence[EpochStart]) -> Offset:
    return run.end


def _newer_stamps_are_wrong(
    original: Fault, runs: Sequence[EpochRun], log_start: Offset, end: Offset, history: Sequence[EpochStart]
) -> tuple[Offset, Offset | None]:
    right, wrong = original(runs, log_start, end, history)
    newer = next((run.start for run in runs if run.epoch > history[-1].epoch), None)
    return right, newer if wrong is None else wrong


def _appended_end(_original: Fault, replica: Replica) -> Offset:
    return replica._verified(replica.log.appended_end)


def _durable_end(_original: Fault, replica: Replica) -> Offset:
    return replica.durable_verified_end


def _clock_only(_original: Fault, replica: Replica) -> int:
    return replica._host.clock.wall_ns()


def _after_all_rows(original: Fault, pid: PartitionId, _ts_ns: int) -> bytes:
    key: bytes = original(pid, (1 << 64) - 1)
    return key


def _keeps_its_producers(original: Fault, log: PartitionLog, cut: Offset) -> bool:
    producers = log.producers
    is_cut: bool = original(log, cut)
    log._state.producers = producers
    return is_cut


_LOGS: Final = (
    PlantedBug(
        name="batch-stamped-anew",
        rule="1: a stored batch is never re-stamped with another epoch",
        faults=(replace(_LOG + "partition_log:PartitionLog.append_stored", by=_stamped_as_the_batch_before),),
        scenario="churn",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="no-incarnation-check",
        rule="2: a process leads only epochs given to its own incarnation (P5)",
        faults=(
            replace(_REPLICA + "is_appointed", by=_this_node_leads),
            # A fresh process has not heard from any peer, and would resign for that (rule 20): a second guard.
            replace(_PARTITION + "replicas:has_majority", by=returns(True)),
        ),
        scenario="quick_restarts",
        anomalies=BROKEN,
        watched="watched-log-differs",
    ),
    PlantedBug(
        name="goes-on-after-a-failed-commit",
        rule="2: a failed local commit ends the process",
        faults=(replace("smq.testing.virtual.disk:FakeDisk._die", by=_carries_on),),
        scenario="no_space",
        anomalies=RAFT,
    ),
    PlantedBug(
        name="lineage-not-checked",
        rule="3: a batch is right only if it lies in the range of its epoch",
        faults=(replace(_LOG + "lineage:_valid_end", by=_right_to_its_end),),
        scenario="churn",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="judging-newer-stamps",
        rule="4: never judge a batch stamped newer than the applied epoch",
        faults=(replace(_LOG + "lineage:verified_end", by=_newer_stamps_are_wrong),),
        scenario="power",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="truncation-leaves-time-rows",
        rule="5: truncation deletes the rows of the time index, too",
        faults=(replace(_LOG + "stored_batch:after_append_time", by=_after_all_rows),),
        scenario="churn",
        anomalies=BROKEN | {"wrong-time-offset"},
    ),
    PlantedBug(
        name="ack-before-fsync",
        rule="7: an acknowledgement is the verified end of the durable log (P1)",
        faults=(replace(_REPLICA + "durable_verified_end", by=_appended_end),),
        scenario="power",
        anomalies=BROKEN,
        seeds=60,
    ),
    PlantedBug(
        name="read-uncommitted",
        rule="13: nothing at or above the known commit point is served",
        faults=(replace(_REPLICA + "readable_end", by=_durable_end),),
        scenario="crashes",
        anomalies=frozenset({"read-above-hwm"}),
    ),
    PlantedBug(
        name="ts-from-clock-only",
        rule="15: ts_ns exceeds the last in the log and Raft's last",
        faults=(replace(_REPLICA + "_next_ts_ns", by=_clock_only),),
        scenario="clocks",
        anomalies=frozenset({"nonmonotonic-ts", "wrong-time-offset"}) | BROKEN,
    ),
    PlantedBug(
        name="producers-not-rolled-back",
        rule="16: producer state follows truncation",
        faults=(replace(_LOG + "partition_log:PartitionLog.truncate", by=_keeps_its_producers),),
        scenario="churn",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="no-duplicate-check",
        rule="16: a duplicate is answered from the log (P7)",
        faults=(replace(_PARTITION + "admission:SendOrder.check", by=nothing),),
        scenario="partitions",
        anomalies=frozenset({"duplicate-sequence"}),
    ),
)


# ------------------------------------------------------------------------------------------------- elections
def _leads_whatever_it_has(original: Fault, replica: Replica) -> None:
    history = replica.part.history
    own = history[-1]
    history[-1] = EpochStart(own.epoch, min(own.start, replica._judged_end))
    try:
        original(replica)
    finally:
        history[-1] = own


def _all_that_the_leader_has(original: Fault, hand_over: HandOver, target: NodeId) -> Any:
    end, incarnation = original(hand_over, target)
    return (end if end is None else hand_over._replica.log.appended_end), incarnation


def _longer_is_worse(original: Fault, controller: Controller, pid: PartitionId, node: NodeId, now_ns: int) -> Any:
    return controller._rounds[pid].reports[node].good, original(controller, pid, node, now_ns)


def _shortest(_original: Fault, ends: Sequence[Offset], _replicas: int) -> Offset:
    return min(ends)


def _from_the_mark(original: Fault, state: ClusterState, command: ElectLeader) -> Applied:
    applied: Applied = original(state, command)
    part = state.partition(command.partition)
    assert part is not None
    part.history.pop()
    elections._begin_epoch(part.history, EpochStart(part.epoch, part.hwm))
    part.next_offset = part.hwm
    return applied


EPOCH_STARTS_AT_THE_MARK: Final = replace(_HANDLERS + "elections:elect_leader", by=_from_the_mark)


def _drops_the_last(_original: Fault, history: list[EpochStart], beginning: EpochStart) -> None:
    if len(history) > 1:
        history.pop()
    history.append(beginning)


def _of_any_epoch(original: Fault, state: ClusterState, command: AdvanceHwms) -> Applied:
    epochs = [part.epoch if (part := state.partition(item.partition)) else item.epoch for item in command.items]
    items = tuple(dataclasses.replace(item, epoch=epoch) for item, epoch in zip(command.items, epochs, strict=True))
    applied: Applied = original(state, dataclasses.replace(command, items=items))
    return applied


def _mark_as_given(original: Fault, partition: PartitionState, item: HwmAdvance) -> bool:
    is_changed = bool(original(partition, item)) or partition.hwm != item.hwm
    partition.hwm = item.hwm
    return is_changed


MARK_AS_GIVEN: Final = replace(_HANDLERS + "partitions:_advance", by=_mark_as_given)


def _elects_here_only(original: Fault, host: Host, replicas: Any, part: PartitionState, target: NodeId) -> bool:
    return part.leader != host.node_id or bool(original(host, replicas, part, target))


def _keeps_its_id(original: Fault, disk: Any, _rng: Any, *rest: Any) -> Any:
    return original(
        disk, SimpleNamespace(randbytes=lambda _size: disk.get(Table.META, identity.DISK_KEY) or b""), *rest
    )


_NOTHING_IS_FORGOTTEN: Final = replace("smq.replication.raft.voters:has_forgotten", by=returns(False))


_ELECTIONS: Final = (
    PlantedBug(
        name="mark-as-given",
        rule="9: apply rejects an advance of another epoch, and takes the larger high water mark (P4)",
        faults=(replace(_HANDLERS + "partitions:advance_hwms", by=_of_any_epoch), MARK_AS_GIVEN),
        scenario="partitions",
        anomalies=frozenset({"hwm-regression"}),
        watched="watched-hwm-back",
    ),
    PlantedBug(
        name="shortest-log-elected",
        rule="11: a candidate has what a majority may have",
        faults=(
            replace("smq.raft_state.handlers.elections:commit_floor", by=_shortest),
            replace(_MEMBERSHIP + "controller:Controller._reluctance", by=_longer_is_worse),
        ),
        scenario="seals",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="epoch-starts-at-the-mark",
        rule="11: an epoch starts where its leader's log ends, because what is committed may lie beyond the mark",
        faults=(EPOCH_STARTS_AT_THE_MARK,),
        scenario="seals",
        anomalies=BROKEN,
        watched="watched-hwm-back",
    ),
    PlantedBug(
        name="hand-over-before-the-tail-is-stored",
        rule="12 and 26: a successor is proposed by what its log holds, and an appointed leader checks itself",
        faults=(
            replace(_PARTITION + "handover:HandOver._log_of", by=_all_that_the_leader_has),
            replace(_REPLICA + "_start_leading", by=_leads_whatever_it_has),
        ),
        scenario="handover",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="vote-of-a-replaced-disk",
        rule="18: a replaced disk is no Raft voter until the others have let it in",
        faults=(EVERY_DISK_COUNTS,),
        scenario="replaced_disk",
        anomalies=RAFT,
    ),
    PlantedBug(
        name="old-copy-not-recognized",
        rule="18: an old copy of a disk is recognized by what the disk had reported that it remembers",
        faults=(_NOTHING_IS_FORGOTTEN,),
        scenario="restored_disk",
        anomalies=RAFT,
    ),
    PlantedBug(
        name="rotten-journal-keeps-its-vote",
        rule="18: a disk that has lost what Raft had on it is another disk",
        faults=(
            replace(_MEMBERSHIP + "identity:replace_disk_id", by=_keeps_its_id),
            _NOTHING_IS_FORGOTTEN,  # else the disk is taken for an old copy, and rejoins as that
        ),
        scenario="rotten_journal",
        anomalies=RAFT,
        seeds=10,
    ),
    PlantedBug(
        name="epochs-with-records-dropped",
        rule="20: an epoch leaves the history only if its range is empty or below the log start",
        faults=(replace(_HANDLERS + "elections:_begin_epoch", by=_drops_the_last),),
        scenario="churn",
        anomalies=frozenset({"lost-write", "no-progress", "offset-reuse", "process-died"}),
    ),
    PlantedBug(
        name="elections-at-the-leader-only",
        rule="26: a leader hands over to the preferred replica whichever node an operator asks",
        faults=(replace(_MEMBERSHIP + "balancer:request_transfer", by=_elects_here_only),),
        scenario="elections",
        anomalies=frozenset({"no-progress"}),
    ),
    PlantedBug(
        name="raft-leader-counts-unsynced",
        rule="finding 2: the leader counts itself only once its entries are on its own disk",
        faults=(COUNTS_UNSYNCED,),
        scenario="raft_minority",
        anomalies=RAFT,
    ),
)


# ------------------------------------------------------------------------------------------------- answers, reads
def _append_is_lost(_original: Fault, waiters: Waiters, waiter: Waiter) -> None:
    if not waiter.answered:
        waiters._answer(waiter, SmqError(ErrorCode.APPEND_LOST, "no majority of replicas stored it in time"))


def _without_waiting(
    _original: Fault, _barriers: Any, _timeout_ms: int, done: Callable[[LogIndex], None]
) -> Callable[[], None]:
    done(LogIndex(0))
    return lambda: None


def _read_at_once(original: Fault, log: PartitionLog, offset: Offset, end: Offset, bytes_max: int) -> Any:
    found = original(log, offset, end, bytes_max)
    return log.read(offset, end, bytes_max) if found is None else found


def _stays_in_use(original: Fault, log: PartitionLog) -> None:
    original(log)
    log.is_dropped = False


def _unchecked(_original: Fault, _pid: PartitionId, value: bytes) -> StoredValue:
    ts_ns, header = parse_header_of(value, verify=None)
    base = Offset(header.base_offset)
    return StoredValue(base, Offset(header.end), Epoch(header.epoch), ts_ns, value)


def _of_any_partition(original: Fault, _pid: PartitionId, *rest: Any) -> Any:
    return original(PartitionId(bytes(20)), *rest)


def _header_of_any_partition(original: Fault, value: Buffer, *, verify: PartitionId | None) -> Any:
    return original(value, verify=None if verify is None else PartitionId(bytes(20)))


def _fails_for_nothing(original: Fault, pid: PartitionId, value: bytes) -> StoredValue:
    assert value, "EIO"
    stored: StoredValue = original(pid, value)
    return stored


_READS: Final = (
    PlantedBug(
        name="waiter-without-epoch",
        rule="10: a waiter is (epoch, base, end), never an offset alone",
        faults=(replace(_PARTITION + "waiters:epoch_end_of", by=nothing),),
        scenario="churn",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="time-outs-called-definite",
        rule="10: in doubt, an error is indefinite",
        faults=(replace(_PARTITION + "waiters:Waiters._expire", by=_append_is_lost),),
        scenario="slow",
        anomalies=frozenset({"aborted-read", "duplicate"}),
    ),
    PlantedBug(
        name="latest-without-barrier",
        rule="25: what a node says of the end, or of the state, comes after a read index that began after the question",
        faults=(replace("smq.replication.commands.coalescing:Barriers.wait", by=_without_waiting),),
        scenario="partitions",
        anomalies=frozenset({"stale-hwm", "false-out-of-range", "wrong-time-offset", "stale-commit"}),
    ),
    PlantedBug(
        name="rot-served",
        rule="every value carries a CRC that is checked on every read (P3)",
        faults=(replace(_LOG + "stored_batch:parse_value", by=_unchecked),),
        scenario="rot",
        anomalies=BROKEN,
    ),
    PlantedBug(
        name="batch-of-another-partition-served",
        rule="a batch is of the partition that it is stored in, whatever a damaged page number says (P3)",
        faults=(
            replace(_LOG + "stored_batch:build_value", by=_of_any_partition),
            replace(_LOG + "stored_batch:parse_value", by=_of_any_partition),
            replace(_LOG + "stored_batch:parse_header_of", by=_header_of_any_partition),
        ),
        scenario="rot",
        anomalies=frozenset({"inconsistent-offsets", "divergent-replica"}),
        seeds=12,
    ),
    PlantedBug(
        name="unreadable-batch-ends-the-process",
        rule="a batch that the medium cannot give is damaged, and is fetched again",
        faults=(replace(_LOG + "stored_batch:parse_value", by=_fails_for_nothing),),
        scenario="slow_reads",
        anomalies=frozenset({"process-died", "no-progress"}),
    ),
    PlantedBug(
        name="cold-reads-on-the-loop",
        rule="reads that may wait for the medium do not hold up the loop",
        faults=(replace(_LOG + "reader:LogReader.read_memory", by=_read_at_once),),
        scenario="slow_reads",
        anomalies=frozenset({"no-progress"}),
    ),
    PlantedBug(
        name="rows-of-a-deleted-topic-count-as-damaged",
        rule="rows that a deletion has removed during a read are no damage",
        faults=(
            replace(_PARTITION + "reads:Reads.fail_all", by=nothing),
            replace(_LOG + "partition_log:PartitionLog.drop", by=_stays_in_use),
        ),
        scenario="slow_reads",
        anomalies=frozenset({"false-damage"}),
        seeds=12,
    ),
)


# ------------------------------------------------------------------------------------------------- disks, queues, links
def _never_full(original: Fault, space: SpaceGuard) -> None:
    original(space)
    space.is_full = False


def _used_at_once(
    original: Fault,
    arrivals: Any,
    topic: Any,
    index: int,
    timeout_ms: int,
    fail: Any,
    use: Callable[[PartitionState], None],
) -> None:
    part = arrivals._lookup.known_partition(topic, index)
    if part is not None:
        use(part)
    else:
        original(arrivals, topic, index, timeout_ms, fail, use)


def _judges_its_age_first(original: Fault, replica: Replica, request: Any, batch: admission.PreparedBatch) -> None:
    if batch.times is not None:
        admission._check_times(*batch.times, replica._host.clock.wall_ns() // 1_000_000, batch.rules)
    original(replica, request, batch)


def _payload_as_it_is(original: Fault, reader: frames.FrameReader, payload: memoryview) -> memoryview:
    with suppress(frames.FrameDamaged):
        original(reader, payload)
    return payload


def _fields_as_they_are(original: Fault, reader: frames.FrameReader, head: Buffer) -> tuple[int, int]:
    with suppress(frames.FrameDamaged):
        original(reader, head)
    length, kind, _ = frames._FIELDS.unpack_from(head)
    return length, kind


_DISKS: Final = (
    PlantedBug(
        name="hung-leader-leads-on",
        rule="20: a leader whose disk hangs gives its partition to a follower that stores more",
        faults=(replace(_PARTITION + "handover:step_aside", by=nothing),),
        scenario="hung_disk",
        anomalies=frozenset({"no-progress"}),
    ),
    PlantedBug(
        name="records-use-the-reserve",
        rule="the reserve of the disk is Raft's; records are refused before a commit meets a full disk",
        faults=(replace("smq.replication.partition.intake:SpaceGuard.refresh", by=_never_full),),
        scenario="full_disk",
        anomalies=frozenset({"process-died"}),
        seeds=30,
    ),
    PlantedBug(
        name="damaged-frames-taken",
        rule="every frame between nodes carries a CRC, and one that fails it ends its session",
        faults=(
            replace("smq.replication.net.frames:FrameReader._checked", by=_payload_as_it_is),
            replace("smq.replication.net.frames:FrameReader._fields", by=_fields_as_they_are),
        ),
        scenario="damaged_links",
        anomalies=frozenset({"digest-mismatch", "log-mismatch", "no-progress", "process-died"}),
        seeds=10,
    ),
    PlantedBug(
        name="followers-queue-unbounded",
        rule="the records that wait for a disk are bounded: a follower takes appends while it has room",
        faults=(replace(_PARTITION + "intake:Intake.admits", by=returns(True)),),
        scenario="overload",
        anomalies=frozenset({"queue-over-bound"}),
        seeds=5,
    ),
    PlantedBug(
        name="overtaken-while-looked-up",
        rule="batches of one connection and partition are appended in order, also while the topic is looked up",
        faults=(replace("smq.replication.partition.producing:Arrivals.with_partition", by=_used_at_once),),
        scenario="new_topics",
        anomalies=frozenset({"overtaken"}),
        seeds=10,
    ),
    PlantedBug(
        name="repeated-batch-judged-by-its-age",
        rule="a batch that the log holds is answered as at its first attempt, whatever the clock says now (P7)",
        faults=(replace(_REPLICA + "produce", by=_judges_its_age_first),),
        scenario="late_batches",
        anomalies=frozenset({"repeat-refused"}),
    ),
    PlantedBug(
        name="mirrored-batch-appended-wherever-the-log-ends",
        rule="a mirrored batch is stored at the offset that it names, or not at all (P2)",
        faults=(replace(_PARTITION + "admission:check_place", by=nothing),),
        scenario="stale",
        anomalies=frozenset({"mirror-differs"}),
    ),
    PlantedBug(
        name="mirrored-batch-taken-for-what-is-there",
        rule="a mirrored batch that would change an offset is refused (P2)",
        faults=(replace("smq.records:is_same_batch", by=returns(True)),),
        scenario="stale",
        anomalies=frozenset({"mirror-differs"}),
    ),
)


PARTITION_BUGS: Final = (*_LOGS, *_ELECTIONS, *_READS, *_DISKS)
