"""Many seeds of the Raft group: `python -m chaos_tests sim --raft-group NODES --seed FIRST --seeds COUNT`.

Owns the loop and what it prints. Planted bugs are hunted by `chaos_tests/sim/hunt.py`.
"""

import time

from chaos_tests.sim.raft.group import Plan, run


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
