"""`python -m chaos_tests run`: live histories until the time or the count is over, each with its report.

Owns the choice of an environment that this machine allows, the seeds, the directory of a campaign and the exit code. A
campaign is resumable: one history is one directory, and a history with a summary is not run again.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from chaos_tests.live.environment import clocks, disks, namespaces
from chaos_tests.live.environment.links import Network
from chaos_tests.live.environment.proxies import ProxyNetwork
from chaos_tests.live.external_cluster import (
    ExternalCluster,
    ExternalDisks,
    ExternalNetwork,
    HooksError,
    described,
    read_hooks,
)
from chaos_tests.live.faults.plan import FAULTS_MIN, SCENARIOS, PlanError, Step, draw, draw_from, unavailable
from chaos_tests.live.faults.planted import PLANTED, command_of
from chaos_tests.live.fleet import Fleet
from chaos_tests.live.history_run import SPARK, TOPIC, HistoryRun, topics_of
from chaos_tests.live.load.kept import TUNING
from chaos_tests.live.report.campaign_page import INDEX, write_index
from chaos_tests.live.report.page import REPORT, write_report
from chaos_tests.live.report.summary import SUMMARY, Summary, new_summary, read_summary
from smq.clients.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, tls_from_environment
from smq.raft_state.errors import SmqError
from smq.testing.node_process import ClusterError

NODES: Final = (1, 3, 5)
_TLS: Final = (
    ("--tls-ca", CA_VARIABLE, "with --servers: the certificates that sign the nodes' certificates"),
    ("--tls-certificate", CERTIFICATE_VARIABLE, "with --servers: the client's certificate"),
    ("--tls-key", KEY_VARIABLE, "with --servers: its key"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", default="all", help=f"{', '.join(SCENARIOS)}, or one fault (default all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first history (default 1)")
    parser.add_argument("--histories", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--minutes", type=float, help="instead of a number: as many as fit into this time")
    parser.add_argument("--nodes", type=int, default=3, choices=NODES, help="nodes of the cluster (default 3)")
    parser.add_argument("--faults", type=int, help=f"faults per history (default {FAULTS_MIN}; `short`: 2)")
    parser.add_argument("--network", choices=("auto", "loopback", "namespaces"), default="auto")
    parser.add_argument("--disks", choices=("auto", "directories", "images"), default="auto")
    parser.add_argument("--servers", help="gRPC addresses of a cluster of your own: host:port,... (see --hooks)")
    parser.add_argument("--hooks", type=Path, help="TOML file of your own faults (format: docs/chaos.md)")
    for option, variable, says in _TLS:
        parser.add_argument(option, help=f"{says} (PEM; default ${variable})", metavar="FILE")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="plant a bug into the nodes: the run must find it")
    parser.add_argument("--no-kafka", action="store_true", help="without Kafka clients")
    parser.add_argument(
        "--spark", action="store_true", help="with a Spark streaming read (Java 17; some 30 s more per history)"
    )
    parser.add_argument("--keep-data", action="store_true", help="also keep data directories of runs without findings")
    parser.add_argument("--out", type=Path, default=Path("chaos-runs"), help="directory of the campaign")


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """0: everything held. 1: something did not, or a run was invalid. 2: these options cannot be run."""
    for option, variable, _ in _TLS:  # through the environment, because Spark's driver and workers need it, too
        given = vars(options)[option.removeprefix("--").replace("-", "_")]
        if given is not None:
            os.environ[variable] = given
    if options.faults is None:
        options.faults = len(SCENARIOS["short"]) if options.scenario == "short" else FAULTS_MIN
    try:
        if options.servers:
            _use_external_cluster(options)
        _steps(options, options.seed)
    except (PlanError, HooksError, ClusterError, SmqError) as e:
        print(e, file=sys.stderr)
        return 2
    if _needs_namespaces(options):
        namespaces.enter(arguments)
    give_up = time.monotonic() + options.minutes * 60 if options.minutes else None
    seed, done, bad = options.seed, 0, 0
    try:
        while time.monotonic() < give_up if give_up is not None else done < options.histories:
            kind = f"{options.scenario}-{options.nodes}-{options.plant or 'good'}"
            directory = options.out / f"{kind}-{seed:06d}"
            if (directory / SUMMARY).exists():
                holds = _has_held(directory)
            else:
                holds = run_one(options, directory, seed).holds
            write_index(options.out)
            bad += not holds
            seed, done = seed + 1, done + 1
    except KeyboardInterrupt:
        print(f"\nstopped after {done} histories; the same command continues from there", flush=True)
        return 130
    print(f"{done} histories, {bad} with findings or invalid; reports in {options.out / INDEX}")
    return 1 if bad else 0


def _use_external_cluster(options: argparse.Namespace) -> None:
    """The other options must suit an existing cluster. ClusterError if it does not answer."""
    if options.plant:
        raise PlanError("--plant breaks nodes that this command starts: it cannot be combined with --servers")
    options.nodes = len(described(_addresses(options), tls_from_environment()))
    options.scenario = "hooks" if options.hooks else "workload"


def _addresses(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(filter(None, options.servers.split(",")))


def _has_held(directory: Path) -> bool:
    """The verdict on a history that was run before. Prints it, and writes the report if that is missing."""
    if not (directory / REPORT).exists():
        write_report(directory)
    summary = read_summary(directory / SUMMARY)
    holds = not summary["violations"] and not summary["invalid"]
    verdict = "everything held" if holds else "NOT everything held"
    print(f"{directory.name} was run before, {verdict} (to run it again, remove {directory})", flush=True)
    return holds


def run_one(options: argparse.Namespace, directory: Path, seed: int) -> Summary:
    """One history in a fresh directory, with its report."""
    shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted run
    directory.mkdir(parents=True)
    topic = f"{TOPIC}-{seed}-{time.time_ns():x}" if options.servers else TOPIC
    fleet = _fleet(options, directory.resolve(), seed, topic)
    summary = new_summary(options.scenario, seed, fleet, options.plant)
    summary.unavailable = {} if options.servers else unavailable(_can(options))
    summary.replay = _replay(options, seed)
    steps = _steps(options, seed)
    plan = [{"fault": s.fault.name, "hold_s": s.hold_s, "calm_s": s.calm_s} for s in steps]
    (directory / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
    print(f"{directory.name}: {', '.join(s.fault.name for s in steps)}", flush=True)

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    run = HistoryRun(
        directory, fleet, steps, summary, say, with_kafka=not options.no_kafka, with_spark=options.spark, topic=topic
    )
    run.run()
    write_report(directory)
    if summary.holds and not options.keep_data:
        fleet.discard_data()
        shutil.rmtree(directory / SPARK, ignore_errors=True)
    _print_outcome(summary, directory)
    return summary


def _fleet(options: argparse.Namespace, directory: Path, seed: int, topic: str) -> Fleet:
    if options.servers:
        return ExternalCluster(
            directory,
            network=ExternalNetwork(),
            disks=ExternalDisks(),
            addresses=_addresses(options),
            topics=topics_of(topic),
            tls=tls_from_environment(),
        )
    network: Network
    if _needs_namespaces(options):
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
        tuning=TUNING,
    )
    if options.plant:
        fleet.serve = command_of(options.plant)
    return fleet


def _steps(options: argparse.Namespace, seed: int) -> list[Step]:
    """PlanError or HooksError if there are none."""
    if not options.servers:
        return draw(options.scenario, seed, _can(options), options.faults)
    return draw_from(read_hooks(options.hooks) if options.hooks else [], f"hooks/{seed}", options.faults)


def _print_outcome(summary: Summary, directory: Path) -> None:
    for violation in summary.violations:
        print(violation)
    for reason in summary.invalid:
        print(f"INVALID: {reason}")
    verdict = "everything held" if summary.holds else f"{len(summary.violations)} violations: {summary.replay}"
    print(
        f"  {len(summary.faults)} faults in {summary.seconds:.0f} s, {summary.acked_records} records acknowledged, "
        f"{summary.records_read} read, {summary.records_deleted} deleted, {summary.records_compacted} compacted away; "
        f"{verdict}; {directory / 'report.html'}",
        flush=True,
    )


def _needs_namespaces(options: argparse.Namespace) -> bool:
    if options.network == "loopback" or options.servers:
        return False
    missing = None if namespaces.is_inside() else namespaces.why_not()
    if options.network == "namespaces" and missing:
        raise SystemExit(f"no network namespaces here: {missing}; use --network loopback")
    return missing is None


def _can(options: argparse.Namespace) -> frozenset[str]:
    """The capabilities that this machine and these options allow."""
    can = set(namespaces.NamespaceNetwork.can if _needs_namespaces(options) else ProxyNetwork.can)
    # Mounts are made in the namespace of `enter`; without one they would be left behind.
    if options.disks != "directories" and disks.why_no_images() is None and _needs_namespaces(options):
        can.add("power")
    elif options.disks == "images":
        reason = disks.why_no_images() or "mounts need --network namespaces"
        raise SystemExit(f"no disk images here: {reason}; use --disks directories")
    if clocks.why_not() is None:
        can.add("clock")
    if shutil.which("strace") is not None and os.geteuid() == 0:
        can.add("strace")
    return frozenset(can)


def _replay(options: argparse.Namespace, seed: int) -> str:
    if options.servers:
        parts = ["python -m chaos_tests run", f"--servers {options.servers}", f"--seed {seed}"]
        parts += [f"--hooks {options.hooks}", f"--faults {options.faults}"] if options.hooks else []
        parts += [f"{option} {os.environ[name]}" for option, name, _ in _TLS if os.environ.get(name)]
    else:
        parts = ["python -m chaos_tests run", f"--scenario {options.scenario}", f"--seed {seed}"]
        parts += [f"--nodes {options.nodes}", f"--faults {options.faults}"]
        parts += [f"--network {options.network}", f"--disks {options.disks}"]
    parts += [word for word, is_set in (("--no-kafka", options.no_kafka), ("--spark", options.spark)) if is_set]
    if options.plant:
        parts.append(f"--plant {options.plant}")
    return " ".join(parts)
