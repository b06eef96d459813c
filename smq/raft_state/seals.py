"""What the seals of an epoch prove (rule 11 of the replication rules). Pure.

A batch is committed once a majority of the replicas has it on disk. A replica that has sealed acknowledges nothing more
in the epoch. Owns the two numbers that follow. Apply checks elections by them, and the controller chooses by them.
"""

from collections.abc import Iterable

from smq.raft_state.ids import Offset


def majority_of(replicas: int) -> int:
    return replicas // 2 + 1


def seals_needed(replicas: int) -> int:
    """How many sealed replicas leave no majority that could still commit anything."""
    return replicas - majority_of(replicas) + 1


def commit_floor(ends: Iterable[Offset], replicas: int) -> Offset:
    """The end of the longest log that a majority may have, if every replica without a seal counts as having all.
    There must be at least `seals_needed` ends."""
    known = sorted(ends, reverse=True)
    return known[majority_of(replicas) - (replicas - len(known)) - 1]
