"""How long transactions have been open: of those that are open, by the replicated clock."""

from smq.coordinator.service.transaction_states import all_open_ms
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.state import ClusterState, TransactionPhase, TransactionState


def transaction(phase: TransactionPhase, started_ms: int) -> TransactionState:
    return TransactionState(
        transactional_id="",
        producer_id=ProducerId(1),
        producer_epoch=ProducerEpoch(0),
        timeout_ms=60_000,
        phase=phase,
        started_ms=started_ms,
    )


def test_decided_and_empty_ones_are_not_open_and_one_without_a_step_of_the_clock_is_new() -> None:
    state = ClusterState()
    assert all_open_ms(state) == []
    state.expiry_clock_ms, state.transaction_items = 10_000, 2
    for name, phase, started_ms in (
        ("old", TransactionPhase.ONGOING, 4_000),
        ("new", TransactionPhase.ONGOING, 0),
        ("decided", TransactionPhase.COMMITTING, 1_000),
        ("idle", TransactionPhase.EMPTY, 1_000),
    ):
        state.transactions[name] = transaction(phase, started_ms)
    assert sorted(all_open_ms(state)) == [0, 6_000]
