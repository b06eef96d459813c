"""The benchmark of the metrics' cost changes production code: what it takes out must still be there."""

import pytest

from benchmarks.metrics import WITH, WITHOUT
from chaos_tests.sim.mutation import Mutation, mutated


@pytest.mark.parametrize("mutations", [WITH, WITHOUT], ids=["with", "without"])
def test_what_the_benchmark_takes_out_is_in_the_code(mutations: tuple[Mutation, ...]) -> None:
    with mutated(mutations):
        pass
