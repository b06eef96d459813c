"""Campaigns: they count runs once, resume where they stopped, and never mix two states of the code."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from chaos_tests.sim.campaign import Order, campaign
from chaos_tests.sim.ledger import FILE, Ledger, LedgerError
from chaos_tests.sim.run import Result

pytestmark = pytest.mark.sim

ORDER = Order(first_seed=5, count=2, scenario="calm", jobs=1, trace=False, keep=None, needs_rare=False)


def made(seed: int, *, acked: int = 300, virtual_s: float = 21.0) -> Result:
    return Result(
        seed=seed,
        scenario="calm",
        violations=[],
        virtual_s=virtual_s,
        operations=400,
        acked=acked,
        events=1000,
        counts=Counter({"truncations": 1}),
    )


def test_campaign_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = replace(ORDER, folder=tmp_path)
    assert campaign(order, Ledger.open(tmp_path, "c0ffee", "calm")) == 0
    resumed = Ledger.open(tmp_path, "c0ffee", "calm")
    assert (resumed.done, resumed.totals.seeds) == ([[5, 7]], 2)
    assert campaign(replace(order, count=3), resumed) == 0
    assert Ledger.open(tmp_path, "c0ffee", "calm").done == [[5, 8]]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("commit c0ffee: 3 seeds, 0.0")
    assert "0 violations" in last


def test_ledger_of_another_commit_or_scenario_is_refused(tmp_path: Path) -> None:
    Ledger("c0ffee").save(tmp_path)
    with pytest.raises(LedgerError, match="commit c0ffee, the code is beef"):
        Ledger.open(tmp_path, "beef", None)
    with pytest.raises(LedgerError, match="scenario all, not churn"):
        Ledger.open(tmp_path, "c0ffee", "churn")
    assert Ledger.open(tmp_path, "c0ffee", None).totals.seeds == 0


def test_ledger_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"commit": "c0ffee"}), encoding="utf-8")
    with pytest.raises(LedgerError, match="not the state of a campaign"):
        Ledger.open(tmp_path, "c0ffee", None)


def test_seed_with_too_little_traffic_or_time_does_not_count() -> None:
    ledger = Ledger("c0ffee")
    ledger.add(made(1, acked=200, virtual_s=20.0))
    ledger.add(made(2, acked=199, virtual_s=30.0))
    ledger.add(made(3, acked=500, virtual_s=19.9))
    assert (ledger.totals.seeds, ledger.totals.short, ledger.totals.acked) == (1, 2, 899)
    assert ledger.totals.summary().startswith("1 seeds and 2 too short to count, 0.02 virtual hours")


def test_ranges_of_seeds_merge_and_what_is_left_is_run_next() -> None:
    ledger = Ledger("c0ffee")
    for seed in (3, 9, 4, 6, 5):
        ledger.add(made(seed))
    assert ledger.done == [[3, 7], [9, 10]]
    pending = ledger.pending(2)
    assert [next(pending) for _ in range(5)] == [2, 7, 8, 10, 11]
