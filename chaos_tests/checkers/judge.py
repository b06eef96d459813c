"""All judges over one history.

Owns their list. Used by the simulation, the live tests and the command line.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from chaos_tests.checkers import (
    administration,
    compaction,
    consumers,
    groups,
    lag,
    log,
    losses,
    membership,
    nodes,
    reads,
    retention,
    sends,
    transactions,
)
from chaos_tests.checkers.base import Facts, Violation, index
from chaos_tests.history import Event, pair

CHECKS: Final[tuple[Callable[[Facts], list[Violation]], ...]] = (
    log.check,
    losses.check,
    sends.check,
    groups.check,
    groups.check_changes,
    membership.check,
    consumers.check_groups,
    sends.check_assigned,
    administration.check,
    consumers.check,
    nodes.check,
    nodes.check_liveness,
    reads.check,
    retention.check,
    compaction.check,
    transactions.check,
    transactions.check_batches,
    reads.check_marks,
    lag.check,
)


def judge(events: Iterable[Event]) -> list[Violation]:
    """Every violation found in a history, in the order of the judges."""
    with _without_collector():
        history = pair(events)
        uncovered = compaction.uncover(history)  # before the index: it changes what was read
        facts = index(history)
        facts.uncovered = uncovered
        return [violation for check in CHECKS for violation in check(facts)]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Judging makes millions of objects and no cycles: the collector's search for cycles would take two thirds of the
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
