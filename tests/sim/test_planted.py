"""Each planted bug is found within its bound of seeds, by an anomaly that fits it."""

from types import SimpleNamespace

import pytest

from chaos_tests.sim import hunt as hunting
from chaos_tests.sim.hunt import ALL, HuntError, hunt, rows_of
from chaos_tests.sim.mutation import Mutation, MutationError, PlantedBug, mutated
from chaos_tests.sim.planted.catalogue import BUGS
from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import EpochStart
from smq.replication.log import lineage
from tests.pages import ROOT

pytestmark = pytest.mark.sim

QUICK_SEEDS = 8  # bugs bounded by this many (most take one) are part of every test run, the others of the full one


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", [b for b in BUGS if b.seeds <= QUICK_SEEDS], ids=lambda b: b.name)
def test_planted_bug_is_found(bug: PlantedBug) -> None:
    assert hunt(bug).seed is not None


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", [b for b in BUGS if b.seeds > QUICK_SEEDS], ids=lambda b: b.name)
def test_rarer_planted_bug_is_found(bug: PlantedBug) -> None:
    assert hunt(bug).seed is not None


def test_a_seed_that_fails_without_the_bug_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seed 22 of slow_reads was for a-busy-replica-counts-as-damaged: it had found another bug, one of smq's own."""
    bug = next(bug for bug in BUGS if bug.name == "a-busy-replica-counts-as-damaged")
    shown = SimpleNamespace(violations=[SimpleNamespace(anomaly="false-damage")])
    monkeypatch.setattr(hunting, "simulate", lambda *_: shown)
    with pytest.raises(HuntError, match="without a-busy-replica-counts-as-damaged, too"):
        hunt(bug)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_planted_bug_still_fits_the_code(bug: PlantedBug) -> None:
    with bug.planted():
        pass


def test_the_page_has_every_planted_bug_with_its_rule_and_no_other() -> None:
    rows = rows_of((ROOT / "docs/reference/planted-bugs.md").read_text(encoding="utf-8"))
    assert list(rows) == [bug.name for bug in ALL]
    for bug in ALL:
        name, rule, _, seeds, *_ = rows[bug.name].split(" | ")
        assert (name, rule) == (f"| {bug.name}", bug.rule)
        assert seeds != "not found", bug.name


def test_mutation_changes_the_function_and_takes_itself_back() -> None:
    history = [EpochStart(Epoch(0), Offset(0))]
    mutation = Mutation(
        "smq.replication.log.lineage:verified_end", "end = log_start\n", "end = Offset(log_start + 7)\n"
    )
    with mutated([mutation]):
        assert lineage.verified_end([], Offset(3), Offset(99), history) == (10, None)
    assert lineage.verified_end([], Offset(3), Offset(99), history) == (3, None)


def test_mutation_of_a_text_that_has_moved_is_an_error() -> None:
    mutation = Mutation("smq.replication.log.lineage:verified_end", "no such text", "")
    with pytest.raises(MutationError, match="0 times"), mutated([mutation]):
        pass
