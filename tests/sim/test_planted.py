"""Each planted bug is found within its bound of seeds, by an anomaly that fits it."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from chaos_tests.sim import hunt as hunting
from chaos_tests.sim.faults.kinds import STRIKES
from chaos_tests.sim.hunt import ALL, HuntError, hunt, rows_of
from chaos_tests.sim.planted.catalogue import BUGS
from chaos_tests.sim.raft import planted as raft_planted
from chaos_tests.sim.replacement import Bug, Fault, PlantedBug, TargetError, function_of, replace, returns
from chaos_tests.sim.scenario import find
from docs.generate.evidence import rules
from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import EpochStart
from smq.raft_state.topic_config import Retention
from smq.replication.log.lineage import verified_end
from smq.replication.monitoring.anomalies import Kind
from tests.pages import ROOT

pytestmark = pytest.mark.sim


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_planted_bug_is_found(bug: PlantedBug) -> None:
    assert hunt(bug).seed is not None


def test_a_seed_that_fails_without_the_bug_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have found another bug, one of smq's own."""
    bug = next(bug for bug in BUGS if bug.name == "rows-of-a-deleted-topic-count-as-damaged")
    shown = SimpleNamespace(violations=[SimpleNamespace(anomaly="false-damage")])
    monkeypatch.setattr(hunting, "simulate", lambda *_: shown)
    with pytest.raises(HuntError, match="without rows-of-a-deleted-topic-count-as-damaged, too"):
        hunt(bug)


@pytest.mark.parametrize("bug", [*ALL, *raft_planted.BUGS.values()], ids=lambda b: b.name)
def test_planted_bug_still_fits_the_code(bug: Bug) -> None:
    with bug.planted():
        pass


def test_every_rule_promise_fault_and_kind_of_the_watch_has_a_planted_bug() -> None:
    told = " ".join(bug.rule for bug in ALL)
    numbered = {int(n) for bug in ALL for n in re.findall(r"^(\d+)(?: and (\d+))?:", bug.rule) for n in n if n}
    assert set(rules()) - numbered <= {17, 28}  # replica sets do not change yet, and 28 is retired
    assert set(re.findall(r"P\d", told)) == {f"P{n}" for n in range(1, 9)}
    struck = {fault.what for bug in BUGS for fault in find(bug.scenario).faults}
    assert set(STRIKES) - struck <= {"flip_file"}  # flip_file has a loop of its own
    noted = {anomaly for bug in BUGS for anomaly in (*bug.anomalies, bug.watched)}
    assert {f"watched-{kind.value}" for kind in Kind} <= noted


def test_the_page_has_every_planted_bug_with_its_rule_and_no_other() -> None:
    rows = rows_of((ROOT / "docs/reference/planted-bugs.md").read_text(encoding="utf-8"))
    assert list(rows) == [bug.name for bug in ALL]
    for bug in ALL:
        name, rule, _, seeds = rows[bug.name].strip("| ").split(" | ")
        assert (name, rule) == (bug.name, bug.rule)
        assert seeds != "not found", bug.name


def test_a_replacement_is_seen_where_the_function_was_imported_and_takes_itself_back() -> None:
    def later(original: Fault, *arguments: Any) -> tuple[Offset, Offset | None]:
        end, wrong = original(*arguments)
        return end + 7, wrong

    history = [EpochStart(Epoch(0), Offset(0))]
    with replace("smq.replication.log.lineage:verified_end", by=later).planted():
        assert verified_end([], Offset(3), Offset(99), history) == (10, None)
    assert verified_end([], Offset(3), Offset(99), history) == (3, None)


def test_methods_and_properties_are_replaced_and_the_original_has_its_defaults() -> None:
    with replace("smq.raft_state.topic_config:Retention.numbers", by=returns((1, 2, 3))).planted():
        assert Retention(None, None, None).numbers == (1, 2, 3)
    assert Retention(None, None, None).numbers != (1, 2, 3)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("smq.replication.log.lineage:no_such_function", "the code has moved"),
        ("smq.no_such_module:verified_end", "the code has moved"),
        ("smq.replication.log.lineage:EpochRun.start", "is no function, method or property"),
    ],
)
def test_a_target_that_has_moved_is_an_error_that_names_it(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=f"{target}.*{message}"):
        function_of(target)
