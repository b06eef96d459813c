"""A thousand damages of a node's LMDB file: it repairs itself, or is refused and replaced; nothing wrong is served."""

import pytest

from chaos_tests.sim.long_runs import damage_files

pytestmark = [pytest.mark.sim, pytest.mark.full]

FLIPS = 1_000


@pytest.mark.timeout(3600)
def test_a_thousand_flips_lose_nothing_and_serve_nothing_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, sums = damage_files(FLIPS)
    with capsys.disabled():
        for outcome, count in sorted(sums.outcomes.items()):
            print(f"  {count:5} {outcome}")  # noqa: T201 - the table is what this test is for
    assert sums.violations == []
    assert sums.outcomes.total() >= FLIPS
