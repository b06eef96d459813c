"""The simulation of transactions with five epochs to a producer id, so that producers use them up under faults."""

import importlib

import pytest

from chaos_tests.sim.replacement import Fault, replace
from chaos_tests.sim.run import simulate
from chaos_tests.sim.scenario import find
from smq.raft_state.handlers import transactions
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.state import TransactionState
from tests.sim.test_simulation import verdict

RETIRED = 5
USERS = ("limits", "state", "refusal", "invariants", "handlers.transactions", "handlers.producer_ids")


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS:
        module = importlib.import_module(f"smq.raft_state.{name}")
        assert module.PRODUCER_EPOCH_RETIRED > RETIRED
        monkeypatch.setattr(module, "PRODUCER_EPOCH_RETIRED", RETIRED)
    monkeypatch.setattr(transactions, "_EPOCH_LAST", RETIRED - 1)


@pytest.mark.sim
@pytest.mark.parametrize("seed", [1, 2])
def test_producers_go_on_under_fresh_ids(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    replaced = 0
    replace = transactions._give_fresh_id

    def counted(*arguments: object) -> None:
        nonlocal replaced
        replaced += 1
        replace(*arguments)  # type: ignore[arg-type] # as it came

    monkeypatch.setattr(transactions, "_give_fresh_id", counted)
    assert verdict(simulate(find("transactions"), seed)) == ""
    assert replaced > 20


@pytest.mark.sim
def test_markers_under_the_fresh_id_would_be_found() -> None:
    def fresh(_original: Fault, transaction: TransactionState) -> tuple[ProducerId, ProducerEpoch]:
        return transaction.producer_id, transaction.producer_epoch

    with replace("smq.raft_state.state:TransactionState.marked_as", by=fresh).planted():
        assert verdict(simulate(find("transactions"), 1)) != ""
