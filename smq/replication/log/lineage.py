"""Whose batches are these: the epochs a log is stamped with, judged against the replicated history. Pure.

Owns rule 3 of replication: epoch e covers [start(e), start(next epoch)), and a batch stamped e is right only if it
lies wholly in that range and touches the batch before it. Works on runs (adjacent batches of one epoch), so that
judging a log costs its number of epochs and not its number of batches. It must never read a clock, a disk or a
position other than those given. The log store and the replica import it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import EpochStart


class EpochRun(NamedTuple):
    """Adjacent batches that bear one epoch: they cover [start, end)."""

    epoch: Epoch
    start: Offset
    end: Offset


def extend_runs(runs: list[EpochRun], epoch: Epoch, start: Offset, end: Offset) -> None:
    """Adds a batch behind the last run."""
    if runs:
        last = runs[-1]
        if last.epoch == epoch and last.end == start:
            runs[-1] = EpochRun(epoch, last.start, end)
            return
    runs.append(EpochRun(epoch, start, end))


def runs_from(runs: Sequence[EpochRun], first: Offset) -> list[EpochRun]:
    """What is left of the runs when everything before `first`, a batch's base, is gone."""
    return [EpochRun(run.epoch, max(run.start, first), run.end) for run in runs if run.end > first]


def verified_end(
    runs: Sequence[EpochRun], log_start: Offset, appended_end: Offset, history: Sequence[EpochStart]
) -> tuple[Offset, Offset | None]:
    """(end of the longest right prefix, offset from which the log is wrong or None where nothing is known wrong).

    `history` ascends in epoch and is not empty. Batches newer than its last epoch are not judged: the applied
    state is behind the log, so the prefix ends there and nothing is wrong. An empty log's end is `log_start`.
    """
    end = log_start
    for i, run in enumerate(runs):
        if run.epoch > history[-1].epoch:
            return end, None
        touches = run.start <= log_start if i == 0 else run.start == runs[i - 1].end
        right_end = _right_end(run, history) if touches else run.start
        if touches:
            end = max(end, right_end)
        if right_end < run.end:
            return min(end, appended_end), right_end
    return min(end, appended_end), None


def _right_end(run: EpochRun, history: Sequence[EpochStart]) -> Offset:
    """How far the run is right: its end where it is so wholly, its start where nothing of it is."""
    first = history[0]
    if run.epoch < first.epoch:  # pruned: an epoch is pruned only when its range ends at or below log_start
        return max(run.start, min(run.end, first.start))
    for i, entry in enumerate(history):
        if entry.epoch == run.epoch:
            if run.start < entry.start:
                return run.start
            stop = history[i + 1].start if i + 1 < len(history) else run.end
            return max(run.start, min(run.end, stop))
    return run.start  # an epoch that the history has passed over never led
