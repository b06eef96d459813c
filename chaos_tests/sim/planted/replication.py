"""Planted bugs of replication: logs, elections, answers, reads, repairs and journals.

Owns these rows only. `catalogue` alone imports it.
"""

from chaos_tests.sim.mutation import Mutation, PlantedBug
from chaos_tests.sim.raft.planted import COUNTS_UNSYNCED, EVERY_DISK_COUNTS, NO_BARRIER, UNCONFIRMED_READS

_LINEAGE = "smq.replication.log.lineage:"
_SPACE = "smq.replication.storage.space:SpaceGuard."
_REPAIRS = "smq.replication.partition.repair:Repairs."
_CONTROLLER = "smq.replication.membership.controller:Controller."
_READS = "smq.replication.partition.reads:"
_HANDLERS = "smq.raft_state.handlers."
_REPLICA = "smq.replication.partition.replica:Replica."
_WAITERS = "smq.replication.partition.waiters:Waiters."
LOST = frozenset(
    {"lost-write", "offset-reuse", "inconsistent-offsets", "divergent-replica", "precommitted-read", "aborted-read"}
)
BROKEN = LOST | {"process-died", "no-progress", "stale-hwm", "nonmonotonic-send", "duplicate-sequence", "sequence-gap"}
RAFT = BROKEN | {"two-leaders-in-term", "log-mismatch", "digest-mismatch", "stale-commit", "hwm-regression"}


_NOTHING_IS_FORGOTTEN = Mutation(
    "smq.replication.raft.disk_marks:has_forgotten", "reported.start != start and reported.writes > base", "False"
)


NO_INCARNATION_CHECK = (
    Mutation(_REPLICA + "is_appointed", "and self.part.leader_incarnation == self._host.incarnation", ""),
    # A fresh process has not heard from any peer, and would resign for that (rule 20): a second guard.
    Mutation(
        "smq.replication.partition.replicas:Replicas._visit",
        "if not has_majority(replica.part, self._host.node_id, reachable):",
        "if False:",
    ),
)
SNAPSHOT_FORGETS_COMMITS = (
    Mutation(
        "smq.replication.applied_state:AppliedState.restore",
        "self.index = index\n",
        "self.index = index\n    self._machine.state.groups.clear()\n",
    ),
)

REPLICATION_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        name="hwm-without-epoch-check",
        rule="9: apply rejects an advance of another epoch",
        mutations=(
            Mutation(
                _HANDLERS + "partitions:advance_hwms",
                "partition.epoch == item.epoch",
                "partition.epoch >= item.epoch",
            ),
        ),
        scenario="two_rounds",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="ack-before-fsync",
        rule="7: an acknowledgement is the verified end of the durable log",
        mutations=(
            Mutation(_REPLICA + "durable_verified_end", "self.log.durable_end", "self._judged_end"),
            Mutation(
                _REPLICA + "_take",
                "intake.append(log, fitting, self.on_durable)",
                "intake.append(log, fitting, self.on_durable)\n            self.on_durable()",
            ),
        ),
        scenario="power",
        anomalies=BROKEN,
        seeds=15,
    ),
    PlantedBug(
        name="waiter-without-epoch",
        rule="10: a waiter is (epoch, base, end), never an offset alone",
        mutations=(
            Mutation(_WAITERS + "_verdict", "if epoch_end is not None and waiter.end > epoch_end:", "if False:"),
        ),
        scenario="churn",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="ack-before-apply",
        rule="10: in two-round mode, success only once the HWM has been applied",
        mutations=(
            Mutation(
                _WAITERS + "_verdict",
                "waiter.end <= self._replica.known_commit_point():",
                "waiter.end <= (self._replica.majority_end() if self._replica.leading is not None else part.hwm):",
            ),
            Mutation(
                _REPLICA + "_recount",
                "end = self.majority_end()\n",
                "end = self.majority_end()\n    self._waiters.settle()\n",
            ),
        ),
        scenario="two_rounds",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="unverified-ack",
        rule="4 and 7: wrong batches are dropped, and what a follower reports is verified",
        mutations=(
            Mutation(_REPLICA + "judge", "self.is_end_hidden |= not self.log.truncate(wrong)", "pass"),
            Mutation(_REPLICA + "judge", "self._judged_end = right", "self._judged_end = self.log.appended_end"),
        ),
        scenario="churn",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="no-incarnation-check",
        rule="2: a process leads only epochs given to its own incarnation",
        mutations=NO_INCARNATION_CHECK,
        scenario="quick_restarts",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="batches-share-append-times",
        rule="15: ts_ns increases from record to record",
        mutations=(Mutation("smq.replication.log.state:LogState.add", "TsNs(ts_ns + end - base - 1)", "ts_ns"),),
        scenario="clocks",
        anomalies=frozenset({"nonmonotonic-ts", "wrong-time-offset"}),
        seeds=8,
    ),
    PlantedBug(
        name="ts-from-clock-only",
        rule="15: ts_ns exceeds the last in the log and Raft's last",
        mutations=(
            Mutation(
                _REPLICA + "_next_ts_ns", "self.log.last_ts_ns + 1, self.part.ts_ns + 1", "self.log.last_ts_ns + 1"
            ),
            Mutation(
                "smq.replication.log.state:LogState.add",
                "self.last_ts_ns = TsNs(ts_ns + end - base - 1)",
                "self.last_ts_ns = 0",
            ),
        ),
        scenario="clocks",
        anomalies=frozenset({"nonmonotonic-ts", "wrong-time-offset"}) | BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="read-without-lineage",
        rule="4 and 13: wrong batches are dropped, and only right ones are served",
        mutations=(
            Mutation(_REPLICA + "judge", "self.is_end_hidden |= not self.log.truncate(wrong)", "pass"),
            Mutation(
                _REPLICA + "readable_end",
                "self._verified(self.log.appended_end)",
                "self.log.appended_end",
            ),
        ),
        scenario="churn",
        anomalies=LOST,
        seeds=20,
    ),
    PlantedBug(
        name="read-uncommitted",
        rule="13: nothing at or above the HWM is served",
        mutations=(
            Mutation(
                _REPLICA + "readable_end",
                "min(self._verified(self.log.appended_end), self.known_commit_point())",
                "self.durable_verified_end",
            ),
        ),
        scenario="crashes",
        anomalies=frozenset({"read-above-hwm"}),
        seeds=8,
    ),
    PlantedBug(
        name="judging-newer-stamps",
        rule="4: never judge a batch stamped newer than the applied epoch",
        mutations=(Mutation(_LINEAGE + "verified_end", "if run.epoch > history[-1].epoch:", "if False:"),),
        scenario="power",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="no-truncation",
        rule="4: everything from the first wrong batch is dropped",
        mutations=(Mutation(_REPLICA + "judge", "if wrong is not None:", "if False:"),),
        scenario="stale",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="producers-not-rolled-back",
        rule="16: producer state follows truncation",
        mutations=(
            Mutation(
                "smq.replication.log.partition_log:PartitionLog.truncate",
                "    self._state = state\n    if self.segments",
                "    state.producers = self._state.producers\n    self._state = state\n    if self.segments",
            ),
        ),
        scenario="churn",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="no-duplicate-check",
        rule="16: a duplicate is answered from the log",
        mutations=(
            Mutation(
                _REPLICA + "produce",
                "cached = self._owner.send_order.check(self.pid, header, log.producers, self.part.producers_start)",
                "cached = None",
            ),
        ),
        scenario="partitions",
        anomalies=frozenset({"duplicate-sequence"}),
        seeds=8,
    ),
    PlantedBug(
        name="duplicate-answered-at-once",
        rule="16: a duplicate is answered through rule 10",
        mutations=(
            Mutation(
                _WAITERS + "_verdict",
                "is_acked = may_precede_mark and",
                "is_acked = waiter.duplicate or may_precede_mark and",
            ),
        ),
        scenario="two_rounds",
        anomalies=BROKEN,
        seeds=10,
    ),
    PlantedBug(
        name="election-without-hwm-check",
        rule="11 and 12: apply rejects a candidate below the HWM, and an appointed leader checks itself",
        mutations=(
            Mutation(
                _HANDLERS + "elections:_check_reaches",
                "if command.end < at_least:",
                "if False:",
            ),
            Mutation(_CONTROLLER + "_decide", "and live[n].good >= floor", ""),
            Mutation(_REPLICA + "_start_leading", "self._judged_end >= self.part.history[-1].start and ", ""),
        ),
        scenario="churn",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="empty-log-ends-at-zero",
        rule="14: an empty log's end is log_start",
        mutations=(
            Mutation(
                _LINEAGE + "verified_end",
                "end = log_start\n",
                "end = log_start if runs else Offset(0)\n",
            ),
        ),
        scenario="log_start",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="stale-look-up",
        rule="linearizable reads pass a barrier",
        mutations=(
            Mutation(
                "smq.replication.lookup:Lookup.after_barrier",
                "self._barriers.wait(clipped(timeout_ms), read)",
                "read(LogIndex(0))",
            ),
        ),
        scenario="partitions",
        anomalies=frozenset({"stale-commit", "wrong-time-offset"}),
        seeds=8,
    ),
    PlantedBug(
        name="read-index-unconfirmed",
        rule="finding 12: a leader gives a read index once a majority has answered what it sent after the read began",
        mutations=(
            UNCONFIRMED_READS,
            # A second guard: without it a cut-off leader believes for half a second only that it leads.
            Mutation(
                "smq.replication.raft.leader:Leader.hears_from_majority",
                "return 2 * heard > len(self._progress) + 1",
                "return True",
            ),
        ),
        scenario="partitions",
        anomalies=frozenset({"stale-hwm", "stale-commit", "wrong-time-offset", "false-out-of-range"}),
        seeds=20,
    ),
    PlantedBug(
        name="raft-votes-not-durable",
        rule="persist, then speak",
        mutations=(NO_BARRIER,),
        scenario="power",
        anomalies=RAFT,
        seeds=12,
    ),
    PlantedBug(
        name="raft-leader-counts-unsynced",
        rule="finding 2: the leader counts itself only once its entries are on its own disk",
        mutations=(COUNTS_UNSYNCED,),
        scenario="raft_minority",
        anomalies=RAFT,
        seeds=8,
    ),
    PlantedBug(
        name="vote-of-a-replaced-disk",
        rule="18: a replaced disk is no Raft voter until the others have let it in",
        mutations=(EVERY_DISK_COUNTS,),
        scenario="replaced_disk",
        anomalies=RAFT,
        seeds=15,
    ),
    PlantedBug(
        name="old-copy-not-recognized",
        rule="18: an old copy of a disk is recognized by what the disk had reported that it remembers",
        mutations=(_NOTHING_IS_FORGOTTEN,),
        scenario="restored_disk",
        anomalies=RAFT,
        seeds=8,
    ),
    PlantedBug(
        name="time-outs-called-definite",
        rule="in doubt, an error is indefinite",
        mutations=(Mutation(_WAITERS + "_expire", "ErrorCode.TIMED_OUT", "ErrorCode.APPEND_LOST"),),
        scenario="partitions",
        anomalies=frozenset({"aborted-read", "duplicate"}),
        seeds=15,
    ),
    PlantedBug(
        name="sequences-unchecked",
        rule="P7: sequences of a producer follow one another",
        mutations=(
            Mutation(
                "smq.replication.log.producers:ProducerTable.check", "if header.base_sequence != expected:", "if False:"
            ),
        ),
        scenario="churn",
        anomalies=frozenset({"sequence-gap", "duplicate-sequence"}),
        seeds=8,
    ),
    PlantedBug(
        name="truncation-leaves-time-rows",
        rule="5: truncation deletes the time-index rows, too",
        mutations=(
            Mutation(
                "smq.replication.log.partition_log:PartitionLog.truncate",
                "Delete(Table.TIMES, after_append_time(pid, state.last_ts_ns), times_range(pid, TIME_APPEND)[1]),",
                "",
            ),
        ),
        scenario="churn",
        anomalies=BROKEN | {"wrong-time-offset"},
        seeds=8,
    ),
    PlantedBug(
        name="jump-without-producers",
        rule="16: producer state survives a log start that passed a replica by",
        mutations=(
            Mutation(
                "smq.replication.log.partition_log:PartitionLog.advance_log_start",
                "self.has_producers = False",
                "pass",
            ),
        ),
        scenario="log_start",
        anomalies=frozenset({"duplicate-sequence", "sequence-gap", "inconsistent-offsets"}),
        seeds=25,
    ),
    PlantedBug(
        name="index-rows-taken-for-batches",
        rule="5: a look-up by time reads the batch that its index row names",
        mutations=(Mutation("smq.replication.partition.look_ups:_within", "found[0].batch", "info.batch"),),
        scenario="clocks",
        anomalies=frozenset({"no-progress"}),
        seeds=4,
    ),
    PlantedBug(
        name="snapshot-forgets-commits",
        rule="snapshot and restore are exact",
        mutations=SNAPSHOT_FORGETS_COMMITS,
        scenario="snapshots",
        anomalies=frozenset({"digest-mismatch", "stale-commit"}),
        seeds=8,
    ),
    PlantedBug(
        name="no-reply-cache",
        rule="a retried command answers as the first did",
        mutations=(Mutation("smq.raft_state.machine:Machine.apply", "command.request_id != NO_REQUEST", "False"),),
        scenario="remade",
        anomalies=frozenset({"process-died"}),
        seeds=20,
    ),
    PlantedBug(
        name="old-requests-run-again",
        rule="a request whose reply may have been forgotten is refused rather than run twice",
        mutations=(
            Mutation("smq.raft_state.machine:Machine._run_once", "if before >= 0 and cache", "if False and cache"),
        ),
        scenario="remade",
        anomalies=frozenset({"process-died"}),
        seeds=60,
    ),
    PlantedBug(
        name="rotten-journal-keeps-its-vote",
        rule="18: a disk that has lost what Raft had on it is another disk",
        mutations=(
            Mutation(
                "smq.replication.membership.identity:replace_disk_id",
                "DiskId(rng.randbytes(DISK_ID_BYTES))",
                "DiskId(disk.get(Table.META, DISK_KEY) or b'')",
            ),
            _NOTHING_IS_FORGOTTEN,  # else the disk is taken for an old copy, and rejoins as that
        ),
        scenario="rotten_journal",
        anomalies=RAFT,
        seeds=10,
    ),
    PlantedBug(
        name="rot-served",
        rule="every value carries a CRC that is checked on every read",
        mutations=(
            Mutation("smq.replication.log.codec:parse_value", "!= crc:", "!= crc and False:"),
            Mutation("smq.replication.log.codec:parse_value", "!= batch_crc:", "!= batch_crc and False:"),
        ),
        scenario="rot",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="rot-not-repaired",
        rule="a replica whose bytes fail their CRC fetches them again from another replica",
        mutations=(Mutation(_REPAIRS + "_ask_next", "while repair.unasked_peers:", "while False:"),),
        scenario="rot",
        anomalies=BROKEN,
        seeds=8,
    ),
    PlantedBug(
        name="full-for-ever",
        rule="a full disk is an error to producers, until there is room again",
        mutations=(Mutation(_SPACE + "refresh", "self.is_full = outside", "self.is_full |= outside"),),
        scenario="full_disk",
        anomalies=frozenset({"no-progress"}),
        seeds=8,
    ),
    PlantedBug(
        name="records-use-the-reserve",
        rule="the reserve of the disk is Raft's; records are refused before a commit meets a full disk",
        mutations=(
            Mutation(
                _SPACE + "refresh",
                "self.is_full = outside < needed",
                "self.is_full = False",
            ),
        ),
        scenario="full_disk",
        anomalies=frozenset({"process-died"}),
        seeds=20,
    ),
    PlantedBug(
        name="hand-over-before-the-tail-is-stored",
        rule="11 and 26: a successor is proposed by what its log holds, and apply checks that against the mark",
        mutations=(
            Mutation(
                "smq.replication.partition.handover:HandOver.drive",
                "if incarnation is None or end != end_of_log or not is_committed:",
                "if incarnation is None or end is None:",
            ),
            Mutation(
                "smq.replication.partition.handover:HandOver.drive",
                "end=end,",
                "end=end_of_log,",
            ),
            Mutation(
                _REPLICA + "_start_leading",
                "self._judged_end >= self.part.history[-1].start and is_whole and self._cut_damage()",
                "self._cut_damage()",
            ),
        ),
        scenario="handover",
        anomalies=BROKEN,
        seeds=40,
    ),
)
