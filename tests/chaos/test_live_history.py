"""Live histories end to end: healthy runs pass, and planted bugs are found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.history import read_jsonl
from chaos_tests.live.environment import disks, namespaces
from chaos_tests.live.faults.catalogue import CATALOGUE, NEEDS
from chaos_tests.live.faults.plan import SCENARIOS, draw
from chaos_tests.live.faults.planted import PLANTED
from chaos_tests.live.load.kept import KEPT
from smq.clients.tls import Tls
from smq.coordinator.tls.certificate_files import client_identity
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_client import RawNode

pytestmark = pytest.mark.timeout(1500)  # a history is a minute or two, and machines are busy
HISTORIES_MAX = 5  # two of three find the bug that is hardest to see
ANYWHERE = ("--network", "loopback", "--disks", "directories")


def run(out: Path, *arguments: str, timeout_s: float = 900) -> tuple[int, dict[str, Any], str]:
    """One history in a process of its own: exit code, summary, what it printed."""
    command = [sys.executable, "-m", "chaos_tests", "run", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    found = sorted(out.glob("*/summary.json"))
    assert found, f"no summary:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.returncode, json.loads(found[-1].read_text()), done.stdout + done.stderr


def require_everything() -> None:
    """Skips, with the reason, where the machine allows neither namespaces nor disk images."""
    for reason in (namespaces.why_not(), disks.why_no_images()):
        if reason is not None:
            pytest.skip(reason)


def check_holds(code: int, summary: dict[str, Any], printed: str) -> None:
    assert summary["violations"] == [], printed[-6000:]
    assert summary["invalid"] == [], printed[-6000:]
    assert code == 0


def test_a_short_history_without_root_holds_and_makes_its_report(tmp_path: Path) -> None:
    code, summary, printed = run(tmp_path, *ANYWHERE, "--scenario", "short")
    check_holds(code, summary, printed)
    assert len(summary["faults"]) == len(SCENARIOS["short"])
    assert summary["acked_sends"] >= 200
    assert {"send", "poll", "hwm", "commit", "fetch", "assign", "kpoll", "gsync"} <= summary["operations"].keys()
    assert "kafka-cg-chaos-team has read all" in printed
    assert summary["records_deleted"] > 0
    assert summary["records_compacted"] > 0
    (history,) = tmp_path.glob("*/history.jsonl")
    consumed = {event["k"] for event in read_jsonl(history) if event["f"] == "kpoll" and "k" in event}
    assert consumed == {f"chaos-{kept.name}/0" for kept in KEPT}
    assert summary["seed"] == 1
    assert "--seed 1" in summary["replay"]
    (report,) = tmp_path.glob("*/report.html")
    assert report.name in (tmp_path / "index.html").read_text()
    text = report.read_text()
    assert "everything held" in text
    assert "<svg" in text
    assert all(fault["recovery_ms"] is not None for fault in summary["faults"])
    report.unlink()  # as if it had been killed just before
    again, _, printed = run(tmp_path, *ANYWHERE, "--scenario", "short")
    assert again == 0
    assert "was run before, everything held" in printed
    assert report.exists()


@pytest.mark.full
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "short"])
def test_every_scenario_holds(scenario: str, tmp_path: Path) -> None:
    require_everything()
    check_holds(*run(tmp_path, "--scenario", scenario, "--seed", "7"))


@pytest.mark.full
def test_five_nodes_hold(tmp_path: Path) -> None:
    require_everything()
    check_holds(*run(tmp_path, "--nodes", "5", "--seed", "11"))


@pytest.mark.full
def test_a_spark_stream_through_faults_has_every_record_once(tmp_path: Path) -> None:
    code, summary, printed = run(tmp_path, *ANYWHERE, "--spark", "--scenario", "kills", "--faults", "3")
    check_holds(code, summary, printed)
    assert "--spark" in summary["replay"]
    assert "spark has read all" in printed


@pytest.mark.full
def test_a_cluster_of_ones_own_is_struck_by_ones_own_hooks(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.toml"
    with live_cluster(tmp_path / "theirs") as theirs:
        for node in theirs.nodes.values():
            (tmp_path / f"pid-{node.id}").write_text(str(node.pid))
        pid = f"$(cat {tmp_path}/pid-{{node}})"
        hooks.write_text(f"""[[fault]]
name = "freeze"
strike = "kill -STOP {pid}"
undo = "kill -CONT {pid}"
target = "leader"
family = "pause"
""")
        code, summary, printed = run(
            tmp_path / "out", "--servers", theirs.servers, "--hooks", str(hooks), "--faults", "2"
        )
        check_holds(code, summary, printed)
        assert len(theirs.alive()) == len(theirs.nodes), "it is not ours to end"
    assert [fault["name"] for fault in summary["faults"]] == ["freeze"] * 2
    assert all(fault["failover_ms"] for fault in summary["faults"])
    assert summary["network"] == "a cluster given by its addresses"


@pytest.mark.full
def test_a_cluster_of_ones_own_may_have_tls(tmp_path: Path) -> None:
    """Workload and checkers alone; gRPC and Kafka clients both show a certificate. Nothing of the run is left there."""
    theirs = Cluster(tmp_path / "theirs")
    try:
        theirs.start("--tls")
        files = client_identity(theirs.directory / "tls")
        tls = ("--tls-ca", files.ca, "--tls-certificate", files.certificate, "--tls-key", files.key)
        arguments = ("--servers", theirs.servers, *map(str, tls))
        code, summary, printed = run(tmp_path / "out", *arguments)
        check_holds(code, summary, printed)
        assert summary["workload"] == ["gRPC", "Kafka"]
        raw = RawNode(theirs.nodes[1].grpc, Tls(ca=files.ca, certificate=files.certificate, key=files.key))
        assert [topic.name for topic in raw.describe(linearizable=True).topics] == []
        raw.close()
    finally:
        theirs.stop()


def test_a_cluster_that_does_not_answer_is_reported_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chaos_tests", "run", "--servers", "127.0.0.1:1", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none of 127.0.0.1:1 answers" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_in_real_processes(name: str, tmp_path: Path) -> None:
    """A power cut takes only what the last commits of a majority held, so not every history shows a loss."""
    require_everything()
    plant, printed = PLANTED[name], ""
    for seed in range(1, 1 + HISTORIES_MAX):
        arguments = ("--plant", name, "--scenario", plant.scenario, "--faults", "3", "--seed", str(seed))
        code, summary, printed = run(tmp_path, *arguments)
        if plant.anomalies & summary["anomalies"].keys():
            assert code == 1
            return
    raise AssertionError(f"not found in {HISTORIES_MAX} histories; the last one: {printed[-6000:]}")


def test_the_plan_of_a_seed_is_always_the_same() -> None:
    can = frozenset({"block", "delay"})

    def names(seed: int) -> Sequence[str]:
        return [step.fault.name for step in draw("all", seed, can)]

    assert names(3) == names(3)
    assert len({tuple(names(seed)) for seed in range(20)}) > 10


def test_every_fault_belongs_to_a_scenario_and_needs_what_is_known() -> None:
    in_some = {name for scenario, names in SCENARIOS.items() if scenario != "all" for name in names}
    assert in_some == set(CATALOGUE)
    assert set().union(*(fault.needs for fault in CATALOGUE.values())) <= set(NEEDS)


def test_an_unknown_scenario_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "chaos_tests",
        "run",
        *ANYWHERE,
        "--scenario",
        "earthquake",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kill-leader" in done.stderr
