"""Planted bugs of what logs retain, and of compaction.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Any, Final

from chaos_tests.sim.replacement import Fault, PlantedBug, replace, returns
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.replica import Replica

_LOG: Final = "smq.replication.log."
_COMPACTION: Final = "smq.replication.partition.compaction."
_RETAINED: Final = "smq.replication.partition.log_search:LookUps.retained_start"
_EARLY: Final = frozenset({"early-deletion"})


# ------------------------------------------------------------------------------------------------- retention
def _by_its_own_clock(
    original: Fault, look_ups: LookUps, replica: Replica, limits: Any, _now_ms: int, done: Any
) -> Any:
    return original(look_ups, replica, limits, look_ups._host.clock.wall_ns() // 1_000_000, done)


# ------------------------------------------------------------------------------------------------- compaction
def _one_too_far(original: Fault, *arguments: Any) -> list[int]:
    return [offset + 1 for offset in original(*arguments)]


LAST_RECORDS_GO: Final = replace(_LOG + "compaction.key_table:KeyTable.newest", by=_one_too_far)


LOG_BUGS: Final = (
    PlantedBug(
        name="retention-by-a-nodes-own-clock",
        rule="retention: the replicated clock decides how old a record is",
        faults=(replace(_RETAINED, by=_by_its_own_clock),),
        scenario="retention_age",
        anomalies=_EARLY,
    ),
    PlantedBug(
        name="retention-deletes-nothing",
        rule="retention: what is not to be kept goes",
        faults=(replace("smq.replication.partition.retention:_may_be_exceeded", by=returns(False)),),
        scenario="retention",
        anomalies=frozenset({"late-deletion"}),
    ),
    PlantedBug(
        name="last-record-of-a-key-removed",
        rule="compaction: the last record of each key stays",
        faults=(LAST_RECORDS_GO,),
        scenario="compaction",
        anomalies=frozenset({"lost-key"}),
        seeds=4,
    ),
    PlantedBug(
        name="tombstones-go-at-their-first-sight",
        rule="compaction: a tombstone stays for delete.retention.ms after no replica has what it deletes",
        faults=(replace(_COMPACTION + "tombstones:is_expired", by=returns(True)),),
        scenario="compaction",
        anomalies=frozenset({"early-tombstone"}),
        seeds=4,
    ),
    PlantedBug(
        name="segment-taken-without-its-digest",
        rule="compaction: every replica ends with the same bytes",
        faults=(
            replace(_LOG + "segments:digest_of", by=returns(b"\x01" * SEGMENT_DIGEST_BYTES)),
            replace(_LOG + "segments:own_digest", by=returns(b"\x01" * SEGMENT_DIGEST_BYTES)),
        ),
        scenario="compaction",
        anomalies=frozenset({"divergent-bytes", "late-compaction", "resurrected"}),
        seeds=12,
    ),
)
