"""Campaigns count runs once, resume where they stopped, and never mix two states of the code. A failing seed's schedule
replays it, and is cut down."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from chaos_tests.sim.campaign import Order, campaign
from chaos_tests.sim.faults.schedule import Strike
from chaos_tests.sim.ledger import FILE, Ledger, LedgerError
from chaos_tests.sim.planted.catalogue import find as find_bug
from chaos_tests.sim.run import Result, simulate
from chaos_tests.sim.scenario import find
from chaos_tests.sim.shrink import ShrinkError, load_schedule, save_schedule, shrink

# ------------------------------------------------------------------------------------------------------------ campaign
# Campaigns: they count runs once, resume where they stopped, and never mix two states of the code.
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


# -------------------------------------------------------------------------------------------------------------- shrink
# Schedules: a run's recorded strikes replay it exactly, and Hypothesis cuts the list of a failing seed down.


def test_strikes_by_the_list_are_those_of_the_dice() -> None:
    scenario = find("partitions")
    by_dice = simulate(scenario, 6)
    by_list = simulate(scenario, 6, schedule=by_dice.strikes)
    assert len(by_dice.strikes) > 5
    assert sorted(by_list.strikes, key=str) == sorted(by_dice.strikes, key=str)
    struck = [[e for e in r.history if e["f"] == "fault" and e["what"] == "partition"] for r in (by_dice, by_list)]
    assert [(e["shape"], e["cuts"]) for e in struck[0]] == [(e["shape"], e["cuts"]) for e in struck[1]]


def test_run_without_strikes_sees_no_fault() -> None:
    calm = simulate(find("partitions"), 6, schedule=())
    assert not [e for e in calm.history if e["f"] == "fault" and e["what"] == "partition"]
    assert calm.violations == []


@pytest.mark.timeout(400)
def test_schedule_of_a_planted_bug_shrinks() -> None:
    bug, scenario = find_bug("waiter-without-epoch"), find("churn")
    short = replace(scenario, cluster=replace(scenario.cluster, seconds=3.0))
    with bug.planted():
        found = shrink(short, 2, bug.anomalies, tries=25)
    assert len(found.strikes) <= found.strikes_before / 2
    assert set(found.anomalies) & bug.anomalies


def test_seed_that_does_not_fail_has_nothing_to_shrink() -> None:
    with pytest.raises(ShrinkError, match="no anomaly"):
        shrink(find("calm"), 1)


def test_schedule_survives_its_file(tmp_path: Path) -> None:
    strikes = (Strike(at_ms=12.5, fault=1, number=0, stretch=0.3), Strike(at_ms=99.0, fault=0, number=2))
    save_schedule(tmp_path / "deep" / "schedule.json", strikes)
    assert load_schedule(tmp_path / "deep" / "schedule.json") == strikes


def test_file_that_is_no_schedule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('[{"when": 3}]', encoding="utf-8")
    with pytest.raises(ShrinkError, match="no schedule"):
        load_schedule(tmp_path / "bad.json")
