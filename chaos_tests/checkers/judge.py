"""All judges over one history.

Owns their list. Used by the simulation, the live tests and the command line.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from chaos_tests.checkers import (
    assignments,
    group_reads,
    groups,
    kafka,
    liveness,
    log,
    losses,
    marks,
    membership,
    raft,
    reads,
    sends,
)
from chaos_tests.checkers.base import Facts, Violation, index
from chaos_tests.history import Event, pair

Checks: TypeAlias = tuple[Callable[[Facts], list[Violation]], ...]

CHECKS: Final[Checks] = (
    log.check,
    losses.check,
    sends.check,
    groups.check,
    membership.check,
    group_reads.check,
    assignments.check,
    kafka.check,
    raft.check,
    liveness.check,
    reads.check,
    marks.check,
)
OTHER_HALF: Final[Checks] = CHECKS[-2:]  # of the work, about
SHARED_MIN: Final = 200_000  # operations: fewer are judged before another process has begun


def judge(events: Iterable[Event], *, may_fork: bool = False) -> list[Violation]:
    """Every violation found in a history, in the order of the judges. `may_fork`: a large one is judged by two
    processes (never from one with threads, which a fork leaves in the middle of whatever they do)."""
    with _without_collector():
        facts = index(pair(events))
        if may_fork and facts.history.count >= SHARED_MIN and len(os.sched_getaffinity(0)) > 1:
            return _judged_by_two(facts)
        return _judged(facts, CHECKS)


def _judged(facts: Facts, checks: Checks) -> list[Violation]:
    return [violation for check in checks for violation in check(facts)]


def _judged_by_two(facts: Facts) -> list[Violation]:
    """The other process begins with the same facts in its memory, so that only what it finds has to be told."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    other = context.Process(target=lambda: theirs.send(_judged(facts, OTHER_HALF)), daemon=True)
    other.start()
    theirs.close()
    found = _judged(facts, CHECKS[: -len(OTHER_HALF)])
    try:
        found += ours.recv()
    except EOFError as e:
        other.join()
        raise RuntimeError(f"the process that judged the other half ended with {other.exitcode}") from e
    other.join()
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """Judging makes millions of objects and no cycles: looking for cycles would take two thirds of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
