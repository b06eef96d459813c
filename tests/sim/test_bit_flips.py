"""A thousand damages of a node's LMDB file: it repairs itself, or is refused and replaced; nothing wrong is served."""

from collections import Counter
from pathlib import Path

import pytest

from chaos_tests.sim.run import simulate
from chaos_tests.sim.scenario import load

pytestmark = [pytest.mark.sim, pytest.mark.full]

SCENARIO = load(Path(__file__).parent / "bit_flips.toml")
FLIPS = 1_000


@pytest.mark.timeout(3600)
def test_a_thousand_flips_lose_nothing_and_serve_nothing_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes: Counter[str] = Counter()
    seed = 0
    while outcomes.total() < FLIPS:
        seed += 1
        result = simulate(SCENARIO, seed)
        assert [str(violation) for violation in result.violations[:5]] == [], f"seed {seed}"
        outcomes.update(note["outcome"] for note in result.history if note.get("what") == "flip-file")
    with capsys.disabled():
        for outcome, count in sorted(outcomes.items()):
            print(f"  {count:5} {outcome}")  # noqa: T201 - the table is what this test is for
