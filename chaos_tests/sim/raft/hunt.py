"""Many seeds of the Raft simulation from the command line, with or without a planted bug.

python -m chaos_tests.sim.raft.hunt --seeds 0-999 [--nodes 5] [--bug NAME]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from chaos_tests.sim.raft import planted
from chaos_tests.sim.raft.group import Plan, World, run


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs the Raft simulation over many seeds.")
    parser.add_argument("--seeds", default="0-99", help="first-last")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--bug", choices=sorted(planted.BUGS))
    args = parser.parse_args(argv)
    first, last = (int(part) for part in args.seeds.split("-"))
    failures, acked, started = 0, 0, time.process_time()
    for seed in range(first, last + 1):
        try:
            acked += len(_run(seed, args.nodes, args.bug).acked)
        except Exception as e:  # noqa: BLE001  # every failing seed is reported, whatever it failed with
            failures += 1
            _say(f"seed {seed}: {type(e).__name__}: {str(e)[:200]}")
    seconds = time.process_time() - started
    _say(f"{last - first + 1} seeds, {acked} acks, {failures} failed, {seconds:.0f} s of processor")
    return 1 if failures else 0


def _run(seed: int, nodes: int, bug: str | None) -> World:
    plan = Plan(seed=seed, nodes=nodes, inspects_wire=bug is None, repeats_votes=bug == "duplicate-votes")
    with planted.BUGS[bug]() if bug else nullcontext():
        return run(plan)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
