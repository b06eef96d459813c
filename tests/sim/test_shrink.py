"""Schedules: a run's recorded strikes replay it exactly, and Hypothesis cuts the list of a failing seed down."""

from dataclasses import replace
from pathlib import Path

import pytest

from chaos_tests.sim.faults.schedule import Strike
from chaos_tests.sim.planted.catalogue import find as find_bug
from chaos_tests.sim.run import simulate
from chaos_tests.sim.scenario import find
from chaos_tests.sim.shrink import ShrinkError, load_schedule, save_schedule, shrink

pytestmark = pytest.mark.sim


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
        found = shrink(short, 1, bug.anomalies, tries=25)
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
