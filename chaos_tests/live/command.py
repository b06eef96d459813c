"""`python -m chaos_tests run`: live histories until the time or the count is over, each with its report.

Owns the choice of what this machine allows, the seeds, the directory of a campaign and the exit code. A campaign is
resumable: one history is one directory, and what has a summary is not run again.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from chaos_tests.live import clocks, disks, namespaces
from chaos_tests.live.fleet import Fleet
from chaos_tests.live.history_run import SPARK, TOPIC, HistoryRun
from chaos_tests.live.network import Network
from chaos_tests.live.own import HooksError, OwnCluster, TheirDisks, TheirNetwork, read_hooks
from chaos_tests.live.plan import FAULTS_MIN, SCENARIOS, PlanError, Step, draw, draw_from, unavailable
from chaos_tests.live.planted import PLANTED, command_of
from chaos_tests.live.proxies import ProxyNetwork
from chaos_tests.live.report import write_report
from chaos_tests.live.summary import Summary, new_summary

NODES: Final = (1, 3, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", default="all", help=f"{', '.join(SCENARIOS)}, or one fault (default all)")
    parser.add_argument("--seed", type=int, default=1, help="of the first history (default 1)")
    parser.add_argument("--histories", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--minutes", type=float, help="as many as fit into this time, instead of a number")
    parser.add_argument("--nodes", type=int, default=3, choices=NODES, help="nodes of the cluster (default 3)")
    parser.add_argument("--faults", type=int, help=f"faults a history (default {FAULTS_MIN}; of `short`, its two)")
    parser.add_argument("--network", choices=("auto", "loopback", "namespaces"), default="auto")
    parser.add_argument("--disks", choices=("auto", "directories", "images"), default="auto")
    parser.add_argument("--servers", help="gRPC addresses of a cluster of your own: host:port,... (see --hooks)")
    parser.add_argument("--hooks", type=Path, help="TOML file of your own faults (docs/chaos.md tells its form)")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="break the nodes on purpose: the run must find it")
    parser.add_argument("--no-kafka", action="store_true", help="without Kafka clients")
    parser.add_argument(
        "--spark", action="store_true", help="with a Spark streaming read (Java 17; 20 s more a history)"
    )
    parser.add_argument("--keep-data", action="store_true", help="keep data directories of runs without findings, too")
    parser.add_argument("--out", type=Path, default=Path("chaos-runs"), help="directory of the campaign")


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """0: everything held. 1: something did not, or a run was invalid. 2: it cannot be run like this."""
    if options.faults is None:
        options.faults = len(SCENARIOS["short"]) if options.scenario == "short" else FAULTS_MIN
    try:
        _steps(options, options.seed)
    except (PlanError, HooksError) as e:
        print(e, file=sys.stderr)
        return 2
    if _wants_namespaces(options):
        namespaces.enter(arguments)
    give_up = time.monotonic() + options.minutes * 60 if options.minutes else None
    seed, done, bad = options.seed, 0, 0
    while time.monotonic() < give_up if give_up is not None else done < options.histories:
        directory = options.out / f"{options.scenario}-{options.nodes}-{options.plant or 'good'}-{seed:06d}"
        if (directory / "summary.json").exists():
            print(f"{directory} is there already", flush=True)
        else:
            summary = run_one(options, directory, seed)
            bad += not summary.holds
        seed, done = seed + 1, done + 1
    print(f"{done} histories, {bad} with findings or invalid; reports in {options.out}")
    return 1 if bad else 0


def run_one(options: argparse.Namespace, directory: Path, seed: int) -> Summary:
    """One history in a fresh directory, its report beside it."""
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was interrupted
    directory.mkdir(parents=True)
    fleet = _fleet(options, directory.resolve(), seed)
    summary = new_summary(options.scenario, seed, fleet, options.plant)
    summary.unavailable = {} if options.servers else unavailable(_can(options))
    summary.replay = _replay(options, seed)
    steps = _steps(options, seed)
    plan = [{"fault": s.fault.name, "hold_s": s.hold_s, "calm_s": s.calm_s} for s in steps]
    (directory / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    print(f"{directory.name}: {', '.join(s.fault.name for s in steps)}", flush=True)

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    topic = f"{TOPIC}-{seed}-{time.time_ns():x}" if options.servers else TOPIC
    run = HistoryRun(
        directory, fleet, steps, summary, say, with_kafka=not options.no_kafka, with_spark=options.spark, topic=topic
    )
    run.run()
    write_report(directory)
    if summary.holds and not options.keep_data:
        fleet.discard_data()
        shutil.rmtree(directory / SPARK, ignore_errors=True)
    _tell(summary, directory)
    return summary


def _fleet(options: argparse.Namespace, directory: Path, seed: int) -> Fleet:
    if options.servers:
        addresses = tuple(filter(None, options.servers.split(",")))
        return OwnCluster(directory, network=TheirNetwork(), disks=TheirDisks(), addresses=addresses)
    network: Network
    if _wants_namespaces(options):
        network = namespaces.NamespaceNetwork(seed, options.nodes)
    else:
        network = ProxyNetwork(seed)
    has_images = "power" in _can(options)
    fleet = Fleet(
        directory,
        options.nodes,
        network=network,
        disks=disks.Images(directory / "disks") if has_images else disks.Directories(),
        clocks=clocks.Clocks(directory / "clocks") if clocks.why_not() is None else None,
    )
    if options.plant:
        fleet.serve = command_of(options.plant)
    return fleet


def _steps(options: argparse.Namespace, seed: int) -> list[Step]:
    """PlanError or HooksError where they cannot be had."""
    if not options.servers:
        return draw(options.scenario, seed, _can(options), options.faults)
    return draw_from(read_hooks(options.hooks) if options.hooks else [], f"hooks/{seed}", options.faults)


def _tell(summary: Summary, directory: Path) -> None:
    for violation in summary.violations:
        print(violation)
    for reason in summary.invalid:
        print(f"INVALID: {reason}")
    verdict = "everything held" if summary.holds else f"{len(summary.violations)} violations: {summary.replay}"
    print(
        f"  {len(summary.faults)} faults in {summary.seconds:.0f} s, {summary.acked_records} records acknowledged, "
        f"{summary.records_read} read; {verdict}; {directory / 'report.html'}",
        flush=True,
    )


def _wants_namespaces(options: argparse.Namespace) -> bool:
    if options.network == "loopback" or options.servers:
        return False
    missing = None if namespaces.is_inside() else namespaces.why_not()
    if options.network == "namespaces" and missing:
        raise SystemExit(f"no network namespaces here: {missing}; say --network loopback")
    return missing is None


def _can(options: argparse.Namespace) -> frozenset[str]:
    """What this machine and these options allow."""
    can = set(namespaces.NamespaceNetwork.can if _wants_namespaces(options) else ProxyNetwork.can)
    # Mounts are made in the namespace that `enter` makes; without one they would stay behind.
    if options.disks != "directories" and disks.why_no_images() is None and _wants_namespaces(options):
        can.add("power")
    elif options.disks == "images":
        reason = disks.why_no_images() or "mounts need --network namespaces"
        raise SystemExit(f"no disk images here: {reason}; say --disks directories")
    if clocks.why_not() is None:
        can.add("clock")
    if shutil.which("strace") is not None and os.geteuid() == 0:
        can.add("strace")
    return frozenset(can)


def _replay(options: argparse.Namespace, seed: int) -> str:
    parts = ["python -m chaos_tests run", f"--scenario {options.scenario}", f"--seed {seed}"]
    parts += [f"--nodes {options.nodes}", f"--faults {options.faults}"]
    parts += [f"--network {options.network}", f"--disks {options.disks}"]
    if options.servers:
        parts.append(f"--servers {options.servers} --hooks {options.hooks}")
    parts += [word for word, is_asked in (("--no-kafka", options.no_kafka), ("--spark", options.spark)) if is_asked]
    if options.plant:
        parts.append(f"--plant {options.plant}")
    return " ".join(parts)
