"""Handler of CommitBatch, and the apps: several transactions become visible by one entry, once for each batch.

Owns the table of apps, each with the last batch that it has committed and that batch's fingerprint, and its bound and
expiry. A batch is all of its transactions or none: everything is checked before the first change. `transactions` owns
what a decision is. Only `command_table` and `expiry` import it.
"""

from collections.abc import Iterable

from smq.raft_state.cluster_config import offsets_retention_ms
from smq.raft_state.commands import CommitBatch, StagedTransaction
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.transactions import decide, note_end
from smq.raft_state.ids import PartitionId
from smq.raft_state.limits import APP_BYTES_MAX, APPS_MAX, BATCH_TRANSACTIONS_MAX
from smq.raft_state.refusal import Refused, find_transaction, quoted
from smq.raft_state.replies import Applied, BatchCommitted
from smq.raft_state.state import AppState, ClusterState, TransactionOutcome, TransactionPhase, TransactionState


def commit_batch(state: ClusterState, command: CommitBatch) -> Applied:
    """A batch that is not newer than the app's last has been committed: what is staged for it again is dropped, unless
    its fingerprint says that it has other rows. Then it is refused: dropped, they would be lost unnoticed."""
    _check_shape(command)
    app = state.apps.get(command.app)
    if app is not None and command.batch_id <= app.batch_id:
        _check_replay(app, command)
        app.used_ms = state.expiry_clock_ms
        dropped = [found for item in command.transactions if (found := _still_staged(state, item)) is not None]
        touched = _decide_all(state, dropped, TransactionOutcome.ABORTED)
        return Applied(reply=BatchCommitted(is_replay=True), touched=touched)
    staged = [_find_staged(state, item) for item in command.transactions]
    if command.app:
        _note(state, command)
    touched = _decide_all(state, staged, TransactionOutcome.COMMITTED)
    return Applied(reply=BatchCommitted(is_replay=False), touched=touched)


def _check_shape(command: CommitBatch) -> None:
    if len(command.app.encode()) > APP_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"the name of an app has at most {APP_BYTES_MAX} bytes")
    if command.batch_id < 0:
        raise Refused(ErrorCode.INVALID_REQUEST, f"batch id {command.batch_id} is negative")
    if command.fingerprint.rows < -1:
        raise Refused(ErrorCode.INVALID_REQUEST, f"a batch of {command.fingerprint.rows} rows")
    if len(command.transactions) > BATCH_TRANSACTIONS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a batch has at most {BATCH_TRANSACTIONS_MAX} transactions")
    if len({item.transactional_id for item in command.transactions}) < len(command.transactions):
        raise Refused(ErrorCode.INVALID_REQUEST, "the batch names a transactional id twice")


def _check_replay(app: AppState, command: CommitBatch) -> None:
    """BATCH_DIFFERS unless the rows are known to be the same. Of a batch before the last nothing is known any more."""
    if not command.fingerprint.is_known:
        return
    name = f"batch {command.batch_id} of {quoted(command.app)}"
    if command.batch_id < app.batch_id:
        raise Refused(
            ErrorCode.BATCH_DIFFERS, f"{name} is older than the last one, {app.batch_id}: its rows cannot be compared"
        )
    before, now = app.fingerprint, command.fingerprint
    if before.is_known and before != now:
        other = "other rows" if before.rows == now.rows else "rows"
        raise Refused(
            ErrorCode.BATCH_DIFFERS, f"{name} was committed with {before.rows} {other}, and this one has {now.rows}"
        )


def _find_staged(state: ClusterState, item: StagedTransaction) -> TransactionState:
    """The open transaction that the item names: the first one of its producer's epoch, so that a late command commits
    none that its caller had not staged. Otherwise the refusals of EndTransaction."""
    transaction = find_transaction(state, item.transactional_id, item.producer_id, item.producer_epoch)
    name = quoted(item.transactional_id)
    if transaction.has_outlived_one:
        raise Refused(
            ErrorCode.INVALID_TRANSACTION_STATE,
            f"the producer of {name} has ended a transaction in this epoch ({transaction.outcome.name}): it must start"
            " again before it stages another",
        )
    if transaction.phase is not TransactionPhase.ONGOING:
        raise Refused(ErrorCode.INVALID_TRANSACTION_STATE, f"{name} has no open transaction")
    if transaction.offsets:
        raise Refused(ErrorCode.INVALID_TRANSACTION_STATE, f"the transaction of {name} has offsets of groups")
    return transaction


def _still_staged(state: ClusterState, item: StagedTransaction) -> TransactionState | None:
    try:
        return _find_staged(state, item)
    except Refused:
        return None  # it is the one that was committed, or has been aborted: nothing is left to drop


def _decide_all(
    state: ClusterState, transactions: Iterable[TransactionState], outcome: TransactionOutcome
) -> tuple[PartitionId, ...]:
    touched: dict[PartitionId, None] = {}
    for transaction in transactions:
        transaction.changes += 1  # what its producer still has under way comes too late
        note_end(state, transaction, is_bumping=False)
        touched.update(dict.fromkeys(decide(state, transaction, outcome)))
    return tuple(touched)


# ------------------------------------------------------------------------------------------------------ the apps
def _note(state: ClusterState, command: CommitBatch) -> None:
    """LIMIT_EXCEEDED if there is no room for one more app. None is forgotten for its sake: its next batch would be
    taken for a new one."""
    if command.app not in state.apps and len(state.apps) >= APPS_MAX:
        way_out = "those without a batch for offsets.retention.minutes go by themselves"
        if not offsets_retention_ms(state.config):
            way_out = "none is ever forgotten, because offsets.retention.minutes is 0: set it, or use a known name"
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"there are {APPS_MAX} apps that commit batches, which is the limit: {way_out}"
        )
    state.apps[command.app] = AppState(
        batch_id=command.batch_id, used_ms=state.expiry_clock_ms, fingerprint=command.fingerprint
    )


def start_app_clock(state: ClusterState) -> None:
    """The clock has begun, at a time that nothing bounds: no app is older than it."""
    for app in state.apps.values():
        app.used_ms = state.expiry_clock_ms


def expire_apps(state: ClusterState) -> None:
    """An app's last batch is its position, and is kept for as long as a group's offsets."""
    retention_ms = offsets_retention_ms(state.config)
    if not retention_ms:
        return
    horizon_ms = state.expiry_clock_ms - retention_ms
    for name in [name for name, app in state.apps.items() if app.used_ms <= horizon_ms]:
        del state.apps[name]
