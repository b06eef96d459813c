"""All judges over one history.

Owns their list. Used by the simulation, the live tests and the command line.
"""

from collections.abc import Callable, Iterable
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
    mirrors,
    nodes,
    ownership,
    reads,
    retention,
    sends,
    transactions,
)
from chaos_tests.checkers.base import Facts, Violation, index
from chaos_tests.history import Event, pair, uncollected

CHECKS: Final[tuple[Callable[[Facts], list[Violation]], ...]] = (
    log.check,
    losses.check,
    sends.check,
    groups.check,
    groups.check_changes,
    membership.check,
    ownership.check,
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
    mirrors.check,
)


def judge(events: Iterable[Event]) -> list[Violation]:
    """Every violation found in a history, in the order of the judges."""
    with uncollected():
        history = pair(events)
        uncovered = compaction.uncover(history)  # before the index: it changes what was read
        facts = index(history)
        facts.uncovered = uncovered
        return [violation for check in CHECKS for violation in check(facts)]
