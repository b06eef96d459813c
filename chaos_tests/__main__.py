"""The command line of the harness: `python -m chaos_tests COMMAND`; --help lists the commands.

Owns the arguments. It must work from a clone with only the dev extras installed.
"""

import argparse
import sys
from pathlib import Path

from chaos_tests.checkers.judge import judge
from chaos_tests.history import HistoryError, read_jsonl


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos_tests", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim", help="run seeds of the deterministic simulation")
    sim.add_argument("--seed", type=int, default=1, help="the first seed (default 1)")
    sim.add_argument("--seeds", type=int, default=1, help="how many (default 1)")
    sim.add_argument("--scenario", help="one scenario by name or file (default: all, in rotation)")
    sim.add_argument("--raft-group", type=int, metavar="NODES", help="Raft alone, in groups of this many nodes")
    sim.add_argument("--one-partition", action="store_true", help="random schedules of one partition alone")
    sim.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    sim.add_argument("--trace", action="store_true", help="also keep the trace of every message")
    sim.add_argument("--keep", type=Path, default=Path("sim-failures"), help="where failing seeds are kept")
    sim.add_argument("--resume", type=Path, metavar="DIR", help="keep the progress in DIR, and continue from there")
    sim.add_argument("--shrink", action="store_true", help="reduce the faults of a failing --seed to the needed ones")
    sim.add_argument("--schedule", type=Path, metavar="FILE", help="use these strikes, as written by --shrink")
    sim.add_argument("--require-rare", action="store_true", help="fail if a rare event was never reached")
    check = commands.add_parser("judge", help="judge a history in JSON lines")
    check.add_argument("history", type=Path)
    planted = commands.add_parser("planted", help="hunt for planted bugs and print the table")
    planted.add_argument("names", nargs="*", help="only these (default: all)")
    planted.add_argument("--write", type=Path, help="write the table to this file; rows of others stay")
    live = commands.add_parser("run", help="live histories: real processes, real faults, a report")
    _live_arguments(live)
    report = commands.add_parser("report", help="make a run's report.html again, or those of a directory of runs")
    report.add_argument("directory", type=Path)
    ledger = commands.add_parser("ledger", help="keep a campaign's summaries and make docs/reliability.md again")
    ledger.add_argument(
        "--keep", type=Path, help="directory of live histories, of `sim --resume`, or of `images` and `flips`"
    )
    images = commands.add_parser("images", help="crash images of a node's file: power loss in the middle of commits")
    images.add_argument("--count", type=int, default=10_000, help="how many (default 10000)")
    images.add_argument("--out", type=Path, default=Path("crash-images"), help="directory for run.json")
    flips = commands.add_parser("flips", help="damage to a node's file that a simulated cluster must survive")
    flips.add_argument("--count", type=int, default=1_000, help="how many (default 1000)")
    flips.add_argument("--out", type=Path, default=Path("bit-flips"), help="directory for run.json")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.command == "run":
        from chaos_tests.live.command import run

        return run(options, given)
    if options.command == "report":
        from chaos_tests.live.report.campaign_page import write_reports

        return write_reports(options.directory)
    if options.command == "ledger":
        from chaos_tests.live.report.ledger import keep, write_page

        if options.keep is not None:
            if not options.keep.is_dir():
                print(f"there is no directory {options.keep}", file=sys.stderr)
                return 2
            print(f"{keep(options.keep)} lines kept")
        print(write_page(Path()))
        return 0
    if options.command == "sim":
        return _sim(options)
    if options.command == "planted":
        return _planted(options)
    if options.command in ("images", "flips"):
        return _long_run(options)
    return _judge(options.history)


def _live_arguments(parser: argparse.ArgumentParser) -> None:
    from chaos_tests.live.command import add_arguments

    add_arguments(parser)


def _sim(options: argparse.Namespace) -> int:
    # Imported here because judging a history needs neither a cluster nor its dependencies.
    from chaos_tests.sim.campaign import RARE_SEEDS_MIN, Order, campaign
    from chaos_tests.sim.ledger import Ledger, LedgerError, code_commit
    from chaos_tests.sim.scenario import ScenarioError

    if options.seeds < 1 or options.jobs < 1:
        print("--seeds and --jobs must be at least 1", file=sys.stderr)
        return 2
    if options.raft_group is not None:
        from chaos_tests.sim.raft.seeds import run_seeds

        return run_seeds(options.seed, options.seeds, options.raft_group)
    if options.one_partition:
        from chaos_tests.sim.partition.chance import run_seeds as run_schedules

        return run_schedules(options.seed, options.seeds)
    if options.shrink or options.schedule is not None:
        return _one_schedule(options)
    order = Order(
        first_seed=options.seed,
        count=options.seeds,
        scenario=options.scenario,
        jobs=options.jobs,
        trace=options.trace,
        keep=options.keep,
        needs_rare=options.require_rare or (options.scenario is None and options.seeds >= RARE_SEEDS_MIN),
        folder=options.resume,
    )
    try:
        if order.folder is None:
            return campaign(order, Ledger("", order.scenario))
        return campaign(order, Ledger.open(order.folder, code_commit(), order.scenario))
    except (ScenarioError, LedgerError) as e:
        print(e, file=sys.stderr)
        return 2


def _one_schedule(options: argparse.Namespace) -> int:
    """One seed: shrinks its schedule, or replaces its schedule by another."""
    from chaos_tests.sim.campaign import replay_line, save
    from chaos_tests.sim.run import simulate
    from chaos_tests.sim.scenario import ScenarioError, find, load_all, scenario_of
    from chaos_tests.sim.shrink import ShrinkError, load_schedule, save_schedule, shrink

    try:
        scenario = find(options.scenario) if options.scenario else scenario_of(options.seed, load_all())
        folder = options.keep / f"{scenario.name}-{options.seed}"
        if options.shrink:
            found = shrink(scenario, options.seed)
            print(f"{len(found.strikes)} of {found.strikes_before} strikes show {', '.join(found.anomalies)}:")
            for line in found.describe():
                print(f"  {line}")
            path = folder / "schedule.json"
            save_schedule(path, found.strikes)
            print(f"replay: {replay_line(options.seed, scenario.name)} --schedule {path}")
            return 1
        result = simulate(scenario, options.seed, trace=options.trace, schedule=load_schedule(options.schedule))
    except (ScenarioError, ShrinkError) as e:
        print(e, file=sys.stderr)
        return 2
    for violation in result.violations:
        print(violation)
    if result.violations or options.trace:
        save(result, folder)
        print(f"kept in {folder}")
    print(f"{len(result.strikes)} strikes, {result.operations} operations, {len(result.violations)} violations")
    return 1 if result.violations else 0


def _long_run(options: argparse.Namespace) -> int:
    from chaos_tests.crash.recorder import RecordingError
    from chaos_tests.sim.ledger import LedgerError
    from chaos_tests.sim.long_runs import bit_flips, crash_images

    if options.count < 1:
        print("--count must be at least 1", file=sys.stderr)
        return 2
    try:
        if options.command == "images":
            return crash_images(options.count, options.out)
        return bit_flips(options.count, options.out)
    except (LedgerError, RecordingError) as e:
        print(e, file=sys.stderr)
        return 2


def _planted(options: argparse.Namespace) -> int:
    from chaos_tests.sim.hunt import hunt_all, rows_of, table

    catches = []
    for catch in hunt_all(options.names):
        catches.append(catch)
        outcome = f"seed {catch.seed}: {', '.join(catch.shown)}" if catch.seed is not None else "NOT FOUND"
        print(f"{catch.bug.name} ({catch.seconds:.0f} s): {outcome}", flush=True)
    if options.write is not None:
        known = rows_of(options.write.read_text(encoding="utf-8")) if options.write.exists() else {}
        options.write.write_text(table(catches, known), encoding="utf-8")
    missed = sum(catch.seed is None for catch in catches)
    print(f"{len(catches)} planted bugs, {missed} not found within their bounds")
    return 1 if missed or not catches else 0


def _judge(path: Path) -> int:
    try:
        violations = judge(read_jsonl(path))
    except (OSError, HistoryError) as e:
        print(f"cannot judge {path}: {e}", file=sys.stderr)
        return 2
    for violation in violations:
        print(violation)
    print(f"{len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
