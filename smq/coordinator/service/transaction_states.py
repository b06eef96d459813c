"""What tools and metrics show of transactions: the names of their states, and how long they have been open.

Owns both. It must never change anything. The ports and the metrics import it.
"""

from typing import Final

from smq.raft_state.state import ClusterState, TransactionOutcome, TransactionPhase, TransactionState

_PHASES: Final = {
    TransactionPhase.ONGOING: "Ongoing",
    TransactionPhase.COMMITTING: "PrepareCommit",
    TransactionPhase.ABORTING: "PrepareAbort",
}
_OUTCOMES: Final = {
    TransactionOutcome.NONE: "Empty",
    TransactionOutcome.COMMITTED: "CompleteCommit",
    TransactionOutcome.ABORTED: "CompleteAbort",
}
STATE_NAMES: Final = (*_PHASES.values(), *_OUTCOMES.values())


def state_name(transaction: TransactionState) -> str:
    """Kafka's name of the state."""
    return _PHASES.get(transaction.phase, _OUTCOMES[transaction.outcome])


def open_ms(state: ClusterState, transaction: TransactionState) -> int | None:
    """How long it has been open, by the clock of expiry; None if it is not open."""
    if transaction.phase is not TransactionPhase.ONGOING:
        return None
    return state.expiry_clock_ms - (transaction.started_ms or state.expiry_clock_ms)


def all_open_ms(state: ClusterState) -> list[int]:
    """How long each open transaction has been open."""
    if not state.transaction_items:
        return []
    found = (open_ms(state, transaction) for transaction in state.transactions.values())
    return [since for since in found if since is not None]
