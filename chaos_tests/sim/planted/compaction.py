"""Planted bugs of compaction.

Owns these rows only. `catalogue` alone imports it.
"""

from typing import Final

from chaos_tests.sim.mutation import Mutation, PlantedBug

_LOST_IN_LEDGERS: Final = frozenset({"lost-key"})

COMPACTION_BUGS: Final[tuple[PlantedBug, ...]] = (
    PlantedBug(
        name="compaction-keeps-the-first-record",
        rule="compaction: the last record of each key stays",
        mutations=(
            Mutation(
                "smq.replication.log.cleaning:Cleaner._select",
                "offset >= next(newest)",
                "((first := next(newest)) < 0 or offset <= first)",
            ),
            Mutation(
                "smq.replication.log.cleaning:KeyScan.step",
                "if key is not None]",
                "if key is not None and self.table.newest([key]) == [-1]]",
            ),
        ),
        scenario="compaction",
        anomalies=frozenset({"lost-key"}),
        seeds=4,
    ),
    PlantedBug(
        name="tombstones-go-at-their-first-sight",
        rule="compaction: a tombstone stays for delete.retention.ms after no replica has what it deletes",
        mutations=(
            Mutation(
                "smq.replication.partition.compaction.tombstones:is_expired",
                "now_ms - segment.tombstones_ms >= limits.tombstones_ms",
                "True",
            ),
        ),
        scenario="compaction",
        anomalies=frozenset({"early-tombstone"}),
        seeds=4,
    ),
    PlantedBug(
        name="segments-installed-in-any-order",
        rule="compaction: a replica brings its lowest segment in line first",
        mutations=(
            Mutation(
                "smq.replication.partition.compaction.segments:lowest_behind",
                "enumerate(part.segments):",
                "reversed(list(enumerate(part.segments))):",
            ),
        ),
        scenario="compaction",
        anomalies=frozenset({"resurrected", "no-progress", "divergent-bytes", "late-compaction"}),
        seeds=24,
    ),
    PlantedBug(
        name="segment-taken-without-its-digest",
        rule="compaction: every replica ends with the same bytes",
        mutations=(
            Mutation(
                "smq.replication.partition.compaction.segments:held_end",
                "query.end if query.digest == NO_DIGEST else log.segments.end_of(query.start, query.digest)",
                "query.end",
            ),
            Mutation(
                "smq.replication.partition.compaction.segments:Segments.on_part",
                "digest_of(work.values) != work.digest",
                "False",
            ),
        ),
        scenario="compaction",
        anomalies=frozenset({"divergent-bytes", "late-compaction", "resurrected"}),
        seeds=12,
    ),
    PlantedBug(
        name="trimmed-inside-a-segment",
        rule="compaction: a segment is kept in whole until the log start has passed it",
        mutations=(
            Mutation(
                "smq.replication.log.partition_log:PartitionLog._slice_end",
                "min(self._boundary(self.log_start), self._trim_limit), 0",
                "self._boundary(self.log_start), 0",
            ),
        ),
        scenario="replaced_disk+compaction",
        anomalies=frozenset({"no-progress"}),
        seeds=12,
    ),
    PlantedBug(
        name="lost-bytes-are-waited-for",
        rule="compaction: agreed bytes that no replica holds are given up",
        mutations=(
            Mutation(
                "smq.replication.partition.compaction.passes:Compactor._give_up_lost",
                "if lacked_ns is None or behind is None",
                "if True or lacked_ns is None or behind is None",
            ),
        ),
        scenario="compaction",
        anomalies=frozenset({"no-progress"}),
        seeds=12,
    ),
    PlantedBug(
        name="aborted-records-are-versions-of-their-keys",
        rule="compaction: an aborted record supersedes nothing",
        mutations=(
            Mutation(
                "smq.replication.log.cleaning:is_aborted",
                "return aborted.covers(",
                "return False and aborted.covers(",
            ),
        ),
        scenario="transactions+compaction",
        anomalies=_LOST_IN_LEDGERS,
        seeds=8,
    ),
    PlantedBug(
        name="aborted-with-its-neighbours",
        rule="compaction: the records of committed transactions stay, also among those of aborted ones",
        mutations=(
            Mutation(
                "smq.replication.log.aborted:AbortedTransactions.covers",
                "own = self._of_producers.get(producer_id, [])",
                "own = self._entries",
            ),
        ),
        scenario="transactions+compaction",
        anomalies=_LOST_IN_LEDGERS,
        seeds=8,
    ),
    PlantedBug(
        name="last-control-batch-removed",
        rule="compaction: of a producer's control batches in a segment, the last one stays",
        mutations=(
            Mutation("smq.replication.log.rewriting:SegmentWriter._without_ends", "at >= own.last", "at > own.last"),
            Mutation(
                "smq.replication.log.rewriting:SegmentWriter._without_ends",
                "yield _plain(draft) if own.first_commits or at > own.first else draft",
                "yield draft",
            ),
        ),
        scenario="ended_transactions",
        anomalies=frozenset({"no-progress", "dirty-read", "skipped-record", "lost-key"}),
        seeds=8,
    ),
    PlantedBug(
        name="index-of-aborted-ahead-of-the-bytes",
        rule="compaction: an aborted transaction is known until its batches are replaced on disk",
        mutations=(
            Mutation(
                "smq.replication.log.aborted:AbortedTransactions._exchange",
                "self.put(start, end, either.values())",
                "self.put(start, end, new)",
            ),
        ),
        scenario="ended_transactions",
        anomalies=frozenset({"dirty-read", "skipped-record"}),
        seeds=80,
    ),
)
