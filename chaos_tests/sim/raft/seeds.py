"""Seeds of the Raft group: `python -m chaos_tests sim --raft-group NODES --seed FIRST --seeds COUNT`.

Owns the run of one seed, with its faults and small limits, and the loop over many seeds and what it prints. Bugs
planted in Raft are hunted by `chaos_tests/sim/hunt.py`.
"""

import time
from contextlib import ExitStack
from random import Random
from unittest.mock import patch

from chaos_tests.sim.raft.faults import Faults
from chaos_tests.sim.raft.group import Plan, World
from smq.replication.raft import leader as raft_leader


def run(plan: Plan) -> World:
    """One seed, with everything small that is large in production, so that its edges are met."""
    rng = Random(plan.seed)
    with ExitStack() as stack:
        stack.enter_context(patch.object(raft_leader, "APPEND_BYTES_MAX", rng.choice([40, 600, 5000])))
        stack.enter_context(patch.object(raft_leader, "CHUNK_BYTES_MAX", rng.choice([100, 3000, 100_000])))
        stack.enter_context(patch.object(raft_leader, "WINDOW_BYTES_MAX", rng.choice([800, 5000, 1 << 20])))
        try:
            return World(plan).run(lambda world: Faults(world).schedule())
        except Exception as e:
            e.add_note(f"seed {plan.seed}, {plan.nodes} nodes")
            raise


def run_seeds(first: int, count: int, nodes: int) -> int:
    """Every seed that fails is reported, whatever it failed with. The exit code."""
    failures, acked, started = 0, 0, time.process_time()
    for seed in range(first, first + count):
        try:
            acked += len(run(Plan(seed=seed, nodes=nodes)).acked)
        except Exception as e:  # noqa: BLE001  # it is what the run is for
            failures += 1
            print(f"seed {seed}: {type(e).__name__}: {str(e)[:200]}", flush=True)
    seconds = time.process_time() - started
    print(f"{count} seeds, {acked} acknowledgements, {failures} failed, {seconds:.0f} s of processor")
    return 1 if failures else 0
