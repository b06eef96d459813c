"""The alerts of deploy/monitoring: each fires for its condition, clears after it, and has a section in the runbook.

Prometheus's own promtool evaluates the rules, if it is installed (Debian's package prometheus has it) or PROMTOOL names
it. What needs no promtool is checked in any case.
"""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from docs.generate.metrics import names
from tests.skips import needs, program

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "deploy/monitoring"
RULES = (MONITORING / "alerts.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
needs_promtool = needs("promtool")

NODE = 'instance="n1",job="smq"'
PLACE = f'{NODE},topic="t",partition="0"'
OTHER_PLACE = 'instance="n2",job="smq",topic="t",partition="0"'
GROUP = f'{NODE},group="g",topic="t",partition="0"'
BEFORE_MIN, FAULT_MIN = 15, 120  # minutes of health, then of the fault; then health again


def series(name: str, good: float, bad: float, labels: str = NODE) -> dict[str, str]:
    """A gauge that has one value, then another, then the first again, once per minute."""
    values = f"{good}x{BEFORE_MIN} {bad}x{FAULT_MIN} {good}x300"
    return {"series": f"{name}{{{labels}}}", "values": values}


def counter(name: str, per_min: float, labels: str = NODE, *, healthy_per_min: float = 0) -> dict[str, str]:
    """A counter that grows faster during the fault."""
    at = healthy_per_min * BEFORE_MIN
    then = at + per_min * FAULT_MIN
    values = f"0+{healthy_per_min}x{BEFORE_MIN} {at}+{per_min}x{FAULT_MIN} {then}+{healthy_per_min}x300"
    return {"series": f"{name}{{{labels}}}", "values": values}


def histogram(name: str, slow_s: str, labels: str = NODE) -> list[dict[str, str]]:
    """Events that take less than 1 ms, and during the fault longer than `slow_s`."""
    fast, all_events = [
        counter(f"{name}_bucket", 0 if le == "0.001" else 60, f'{labels},le="{le}"', healthy_per_min=60)
        for le in ("0.001", "+Inf")
    ]
    middle = counter(f"{name}_bucket", 0, f'{labels},le="{slow_s}"', healthy_per_min=60)
    top = counter(f"{name}_bucket", 60, f'{labels},le="10"', healthy_per_min=60)
    return [fast, middle, top, all_events]


DAY_S = 86_400
CASES: dict[str, list[dict[str, str]]] = {
    "SmqNodeDown": [series("up", 1, 0)],
    "SmqNodeNotReady": [series("smq_node_ready", 1, 0)],
    "SmqQuorumLost": [series("smq_raft_leader", 2, 0), series("smq_raft_leader", 2, 0, 'instance="n2",job="smq"')],
    "SmqNodeFenced": [series("smq_cluster_nodes_fenced", 0, 1)],
    "SmqRaftUnstable": [counter("smq_raft_leader_changes_total", 1)],
    "SmqUpgradeNeeded": [series("smq_node_waits_for_upgrade", 0, 1)],
    "SmqStateLarge": [series("smq_raft_snapshot_bytes", 10**7, 2 * 10**8)],
    "SmqClustersMixed": [
        series("smq_cluster_info", 1, 1, f'{NODE},cluster_id="one"'),
        {
            "series": 'smq_cluster_info{instance="m1",job="smq",cluster_id="two"}',
            "values": f"_x{BEFORE_MIN} 1x{FAULT_MIN} stale",
        },
    ],
    "SmqMetricsOmitted": [series("smq_metrics_omitted", 0, 3, f'{NODE},of="groups"')],
    "SmqLoopBlocked": histogram("smq_loop_lag_seconds", "1"),
    "SmqPartitionWithoutLeader": [series("smq_partition_without_leader", 0, 1, PLACE)],
    "SmqUnderReplicated": [series("smq_partition_under_replicated", 0, 1, PLACE)],
    "SmqReplicaIncomplete": [series("smq_partition_incomplete_replicas", 0, 1, PLACE)],
    "SmqReplicaBehind": [
        series("smq_partition_verified_end_offset", 9, 5, PLACE),
        series("smq_partition_high_water_mark", 5, 5, PLACE),
        series("smq_partition_high_water_mark", 9, 9, OTHER_PLACE),
        series("smq_node_ready", 1, 1),
    ],
    "SmqHighWaterMarkStuck": [
        series("smq_partition_durable_end_offset", 5, 9, PLACE),
        series("smq_partition_high_water_mark", 5, 5, PLACE),
        series("smq_partition_is_leader", 1, 1, PLACE),
    ],
    "SmqExternalMarkStuck": [
        series("smq_partition_next_offset", 5, 9, PLACE),
        series("smq_partition_high_water_mark", 5, 5, PLACE),
        series("smq_partition_next_offset", 5, 9, OTHER_PLACE),
        series("smq_partition_high_water_mark", 5, 5, OTHER_PLACE),
    ],
    "SmqAdvancesRejected": [counter("smq_hwm_advances_total", 1, f'{NODE},result="rejected"')],
    "SmqHighWaterMarkWentBack": [series("smq_partition_high_water_mark", 9, 5, PLACE)],
    "SmqAnomaly": [counter("smq_anomalies_total", 1, f'{NODE},kind="hwm-back"')],
    "SmqProducersNearLimit": [series("smq_producers", 10, 95), series("smq_producers_max", 100, 100)],
    "SmqProduceErrors": [counter("smq_produce_batches_total", 60, f'{NODE},result="STORAGE_FULL"')],
    "SmqGroupBehind": [series("smq_group_lag_seconds", 1, 3_600, GROUP)],
    "SmqGroupLagGrows": [
        {
            "series": f"smq_group_lag{{{GROUP}}}",
            "values": f"0x{BEFORE_MIN} 1+10x{FAULT_MIN} 0x300",
        }
    ],
    "SmqTransactionOpen": [series("smq_cluster_oldest_transaction_seconds", 5, 1_800)],
    "SmqStableOffsetStuck": [
        series("smq_partition_lso_lag", 0, 4, PLACE),
        series("smq_partition_last_stable_offset", 5, 5, PLACE),
        series("smq_partition_is_leader", 1, 1, PLACE),
    ],
    "SmqCompactionOverdue": [series("smq_compaction_age_seconds", 20, 9_000)],
    "SmqDiskFull": [series("smq_disk_full", 0, 1)],
    "SmqDiskFills": [
        {
            "series": f"smq_disk_free_bytes{{{NODE}}}",
            "values": f"{10**9}x{BEFORE_MIN} {10**9}-8000000x{FAULT_MIN} {10**9}x300",
        },
        series("smq_disk_reusable_bytes", 0, 0),
    ],
    "SmqDiskHung": [series("smq_disk_hung", 0, 1)],
    "SmqWritesSlow": histogram("smq_disk_write_seconds", "1", f'{NODE},to="lmdb"'),
    "SmqDamageFound": [counter("smq_damage_found_total", 1)],
    "SmqDamageUnrepaired": [counter("smq_damage_unrepaired_total", 1)],
    "SmqCertificateEnds": [
        series("smq_tls_certificate_end_timestamp_seconds", 90 * DAY_S, 10 * DAY_S, f'{NODE},of="node"')
    ],
    "SmqCertificateUnusable": [series("smq_tls_reload_failing", 0, 1)],
    "SmqConnectionsRefused": [counter("smq_connections_refused_total", 60, f'{NODE},port="kafka"')],
    "SmqFramesDamaged": [counter("smq_peer_frames_damaged_total", 1, f'{NODE},peer="2"')],
}


def test_every_alert_has_a_case_a_runbook_section_and_a_severity() -> None:
    assert sorted(ALERTS) == sorted(CASES)
    headings = re.findall(r"^## (\w+)$", (ROOT / "deploy/monitoring/runbook.md").read_text(), re.MULTILINE)
    assert headings == ALERTS, "in the order of the rules"
    assert re.findall(r"runbook: runbook\.md#(\w+)", RULES) == [name.lower() for name in ALERTS]
    assert len(re.findall(r"severity: (?:page|warn)\}", RULES)) == len(ALERTS)


def test_every_metric_that_an_alert_reads_is_one_that_nodes_serve() -> None:
    served = set(names())
    read = {re.sub(r"_bucket$", "", name) for name in re.findall(r"\bsmq_\w+", _expressions())}
    assert len(read) > 20
    assert read - served == set()


def _expressions() -> str:
    """The text of all `expr`, which end before the next key of their rule."""
    return "\n".join(re.findall(r"expr: (.*?)\n        (?:for|labels):", RULES, re.DOTALL))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program("promtool")), *arguments], check=False, capture_output=True, text=True, cwd=MONITORING
    )


@needs_promtool
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    assert promtool("check", "rules", "alerts.yml").returncode == 0
    config = promtool("check", "config", "prometheus.yml")
    assert config.returncode == 0, config.stderr


def firing(name: str) -> str:
    return f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'


def expectation(name: str, minute: int, count: int) -> dict[str, Any]:
    return {"expr": firing(name), "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": count}]}


@needs_promtool
@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires_during_its_fault_and_clears_after_it(name: str, tmp_path: Path) -> None:
    """JSON is YAML, so no library is needed to write promtool's input."""
    end = BEFORE_MIN + FAULT_MIN
    expected = [
        expectation(name, BEFORE_MIN - 1, 0),
        expectation(name, BEFORE_MIN + 60 if name != "SmqHighWaterMarkWentBack" else BEFORE_MIN + 8, 1),
        expectation(name, end + 200, 0),
    ]
    evaluate({"interval": "1m", "input_series": CASES[name], "promql_expr_test": expected}, tmp_path)


@needs_promtool
def test_a_group_that_keeps_up_with_its_topic_is_no_alert(tmp_path: Path) -> None:
    """Lag that comes and goes, as with any group that polls."""
    lag = {"series": f"smq_group_lag{{{GROUP}}}", "values": " ".join(["0 40 10 90"] * 60)}
    never_fires("SmqGroupLagGrows", [lag], tmp_path)


@needs_promtool
def test_a_partition_that_is_written_all_the_time_is_no_alert(tmp_path: Path) -> None:
    """Every scrape finds records on their way to a majority."""
    written = [
        {"series": f"smq_partition_durable_end_offset{{{PLACE}}}", "values": "9+100x240"},
        {"series": f"smq_partition_high_water_mark{{{PLACE}}}", "values": "5+100x240"},
        series("smq_partition_is_leader", 1, 1, PLACE),
    ]
    never_fires("SmqHighWaterMarkStuck", written, tmp_path)


@needs_promtool
def test_a_partition_of_one_transaction_after_another_is_no_alert(tmp_path: Path) -> None:
    """Every scrape finds one that is open. Nor is a follower, which may be behind."""
    busy = [
        series("smq_partition_lso_lag", 7, 7, PLACE),
        {"series": f"smq_partition_last_stable_offset{{{PLACE}}}", "values": "9+100x240"},
        series("smq_partition_is_leader", 1, 1, PLACE),
    ]
    follower = [
        series("smq_partition_lso_lag", 7, 7, PLACE),
        series("smq_partition_last_stable_offset", 9, 9, PLACE),
        series("smq_partition_is_leader", 0, 0, PLACE),
    ]
    for found in (busy, follower):
        never_fires("SmqStableOffsetStuck", found, tmp_path)


@needs_promtool
def test_a_mark_that_lies_behind_is_no_alert_of_external_storage_if_the_records_are_here(tmp_path: Path) -> None:
    """SmqHighWaterMarkStuck is about those."""
    own = [
        series("smq_partition_next_offset", 5, 9, PLACE),
        series("smq_partition_high_water_mark", 5, 5, PLACE),
        series("smq_partition_size_bytes", 1, 1, PLACE),
    ]
    never_fires("SmqExternalMarkStuck", own, tmp_path)


@needs_promtool
def test_a_replica_that_follows_a_busy_leader_is_no_alert(tmp_path: Path) -> None:
    """It is always a little behind."""
    follows = [
        {"series": f"smq_partition_verified_end_offset{{{PLACE}}}", "values": "0+100x240"},
        {"series": f"smq_partition_high_water_mark{{{OTHER_PLACE}}}", "values": "150+100x240"},
        series("smq_node_ready", 1, 1),
    ]
    never_fires("SmqReplicaBehind", follows, tmp_path)


@needs_promtool
def test_marks_of_a_dead_epoch_are_no_alert_right_after_an_election(tmp_path: Path) -> None:
    once = {"series": f'smq_hwm_advances_total{{{NODE},result="rejected"}}', "values": "0x30 700x300"}
    never_fires("SmqAdvancesRejected", [once], tmp_path, minutes=range(28, 60))


def of_cluster(cluster: str, input_series: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same nodes, in a cluster with this label and with addresses of its own."""
    return [
        each | {"series": each["series"].replace('instance="', f'cluster="{cluster}",instance="{cluster}-')}
        for each in input_series
    ]


def healthy(input_series: list[dict[str, str]]) -> list[dict[str, str]]:
    """The series as they were before the fault, to the end."""
    return [each | {"values": each["values"].split()[0].partition("x")[0] + "x500"} for each in input_series]


# What happens in one cluster is compared with nothing there that another cluster could lack.
@needs_promtool
@pytest.mark.parametrize("name", [name for name in ALERTS if name != "SmqClustersMixed"])
def test_a_healthy_cluster_does_not_hide_the_fault_of_another(name: str, tmp_path: Path) -> None:
    own = of_cluster("sick", CASES[name])
    beside = of_cluster("well", healthy(CASES[name]))
    minute = BEFORE_MIN + 60 if name != "SmqHighWaterMarkWentBack" else BEFORE_MIN + 8
    query = f'count by (cluster) (ALERTS{{alertname="{name}",alertstate="firing"}}) > bool 0'
    sick = {"labels": '{cluster="sick"}', "value": 1}
    expected = [{"expr": query, "eval_time": f"{minute}m", "exp_samples": [sick]}]
    evaluate({"interval": "1m", "input_series": [*beside, *own], "promql_expr_test": expected}, tmp_path)


@needs_promtool
def test_two_clusters_with_labels_of_their_own_are_not_mixed(tmp_path: Path) -> None:
    labels = [f'instance="{name}-n",cluster="{name}",cluster_id="smq-{name}"' for name in ("a", "b")]
    never_fires("SmqClustersMixed", [series("smq_cluster_info", 1, 1, each) for each in labels], tmp_path)


def test_no_rule_joins_the_series_of_two_clusters() -> None:
    text = re.sub(r"\s+", " ", _expressions())
    groupings = re.findall(r"\b(?:by|on) \(([^)]*)\)", text)
    assert len(groupings) > 20
    assert [g for g in groupings if not g.startswith("cluster")] == []
    assert re.findall(r"\b(?:max|min|sum|count|avg|topk) ?\(", text) == [], "without `by`"


def never_fires(
    name: str, input_series: list[dict[str, str]], directory: Path, minutes: Iterable[int] = (40, 90, 200)
) -> None:
    expected = [expectation(name, minute, 0) for minute in minutes]
    evaluate({"interval": "1m", "input_series": input_series, "promql_expr_test": expected}, directory)


def evaluate(test: dict[str, Any], directory: Path) -> None:
    case = {"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m", "tests": [test]}
    file = directory / "case.json"
    file.write_text(json.dumps(case))
    result = promtool("test", "rules", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
