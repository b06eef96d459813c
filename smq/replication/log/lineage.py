"""Lineage: checks the epochs that a log's batches are stamped with against the replicated epoch history. Pure.

Owns rule 3 of replication: epoch e covers [start(e), start(next epoch)), and a batch stamped e is valid only if it
lies wholly in that range and touches the batch before it. Works on runs (adjacent batches of one epoch), so the cost
of checking a log grows with its epochs, not with its batches. It must never read a clock, a disk or a position other
than those given. The log store and the replica import it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import EpochStart, PartitionState
from smq.replication.log.stored_batch import StoredValue


class EpochRun(NamedTuple):
    """Adjacent batches stamped with one epoch: they cover [start, end)."""

    epoch: Epoch
    start: Offset
    end: Offset


def extend_runs(runs: list[EpochRun], epoch: Epoch, start: Offset, end: Offset) -> None:
    """Adds a batch after the last run."""
    if runs:
        last = runs[-1]
        if last.epoch == epoch and last.end == start:
            runs[-1] = EpochRun(epoch, last.start, end)
            return
    runs.append(EpochRun(epoch, start, end))


def runs_to(runs: Sequence[EpochRun], end: Offset) -> list[EpochRun]:
    """The runs without everything from `end` on."""
    return [EpochRun(run.epoch, run.start, min(run.end, end)) for run in runs if run.start < end]


def runs_from(runs: Sequence[EpochRun], first: Offset) -> list[EpochRun]:
    """The runs without everything before `first`, the base of a batch."""
    return [EpochRun(run.epoch, max(run.start, first), run.end) for run in runs if run.end > first]


def fits(part: PartitionState, batch: StoredValue, log_start: Offset, log_end: Offset) -> bool:
    """Whether the batch is a valid one (rule 3) that starts at the end of the log, or contains the start of an empty
    one."""
    covered = part.epoch_range(batch.epoch)
    contains_start = log_end == log_start and batch.base <= log_start < batch.end
    if covered is None or not (batch.base == log_end or contains_start):
        return False
    start, end = covered
    return start <= batch.base and (end is None or batch.end <= end)


def verified_end(
    runs: Sequence[EpochRun], log_start: Offset, appended_end: Offset, history: Sequence[EpochStart]
) -> tuple[Offset, Offset | None]:
    """(end of the longest valid prefix, offset from which the log is wrong or None if nothing is known to be wrong).

    `history` ascends in epoch and is not empty. Batches newer than its last epoch cannot be checked: the applied
    state is behind the log, so the prefix ends there and nothing is wrong. An empty log's end is `log_start`.
    """
    end = log_start
    for i, run in enumerate(runs):
        if run.epoch > history[-1].epoch:
            return end, None
        touches = run.start <= log_start if i == 0 else run.start == runs[i - 1].end
        valid_end = _valid_end(run, history) if touches else run.start
        if touches:
            end = max(end, valid_end)
        if valid_end < run.end:
            return min(end, appended_end), valid_end
    return min(end, appended_end), None


def _valid_end(run: EpochRun, history: Sequence[EpochStart]) -> Offset:
    """How far the run is valid: its end if all of it is, its start if none of it is."""
    first = history[0]
    if run.epoch < first.epoch:  # pruned: an epoch is pruned only when its range ends below log_start
        return max(run.start, min(run.end, first.start))
    for i, entry in enumerate(history):
        if entry.epoch == run.epoch:
            if run.start < entry.start:
                return run.start
            stop = history[i + 1].start if i + 1 < len(history) else run.end
            return max(run.start, min(run.end, stop))
    return run.start  # the history skips this epoch: its range was empty
