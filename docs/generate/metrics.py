"""docs/reference/metrics.md from the tables of the metrics: no metric is without a line, and no line without one."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

from prometheus_client.core import Metric

from docs.generate import table
from smq.coordinator.http import group_metrics, partition_metrics
from smq.coordinator.http.collectors import ConnectionCollector, family_of
from smq.coordinator.http.metrics import CLUSTER_INFO, NODE_GAUGES, OMITTED_HELP, STORAGE_COUNTERS, STORAGE_GAUGES
from smq.coordinator.limits import METRICS_GROUPS_MAX, METRICS_PARTITIONS_MAX
from smq.replication.monitoring.measures import (
    DiskMeasures,
    GroupMeasures,
    NodeMeasures,
    ProcessMeasures,
    all_instruments,
)

_HEAD: Final = f"""\
# Metrics

Generated from the code by `make docs`; do not edit. Every node serves them at `/metrics` on its HTTP port, in
Prometheus's text format. Names follow Prometheus: base units, `_total` for counters, `_seconds` and `_bytes` for units.
A histogram has the series `_bucket`, `_sum` and `_count`. The process's own (`process_...`, `python_...`) come from
prometheus-client.

The number of series is bounded. At most {METRICS_PARTITIONS_MAX:,} partitions have series on one node. Of the groups of
each coordinator the first {METRICS_GROUPS_MAX:,} by name have series, all of theirs: on the coordinator, and on the
nodes that lead their partitions. Each node shows at most {METRICS_PARTITIONS_MAX:,} pairs of group and partition of
either kind. What is left out is counted in `smq_metrics_omitted`.
All other labels have few values: names of APIs, error codes, stages, ports. No label holds a client's id, an address or
a key.

Alerts, a dashboard and [a runbook](../../deploy/monitoring/runbook.md), which says what to do about each, are in
`deploy/monitoring`.
"""


Row = tuple[str, str, str, str]


def render() -> str:
    node = SimpleNamespace(ends_s=0, ca_ends_s=0, is_reload_failing=False)
    tls: Any = SimpleNamespace(node=node, listeners={})
    name, text = CLUSTER_INFO
    gauges = [(name, "cluster_id", "gauge", text)]
    gauges += [(name, "", "gauge", text) for name, text, _ in NODE_GAUGES]
    gauges += [(name, "", "gauge", text) for name, text, _ in STORAGE_GAUGES]
    gauges += [(f"{name}_total", "", "counter", text) for name, text, _ in STORAGE_COUNTERS]
    return (
        _HEAD
        + _section("Of the work", _instruments())
        + _section("Of the node and its disk", gauges)
        + _section("Of connections and certificates", map(_row, ConnectionCollector({}, {}, tls).collect()))
        + _section("Of partitions and groups", _families())
    )


def _families() -> list[Row]:
    omitted = ("smq_metrics_omitted", "of", "gauge", OMITTED_HELP)
    return [*partition_metrics.FAMILIES, *group_metrics.FAMILIES, omitted]


def names() -> list[str]:
    """Every family's name as the table has it."""
    return [line.split("`")[1] for line in render().splitlines() if line.startswith("| `")]


def _instruments() -> list[Row]:
    groups = (NodeMeasures(), DiskMeasures(), GroupMeasures(), ProcessMeasures())
    return [_row(family_of(instrument)) for instrument in all_instruments(groups)]


def _row(family: Metric) -> Row:
    labels: Iterable[str] = getattr(family, "_labelnames", ())
    suffix = "_total" if family.type == "counter" else ""
    return family.name + suffix, ", ".join(labels), family.type, family.documentation


def _section(title: str, rows: Iterable[Row]) -> str:
    lines = ((f"`{name}`", kind, labels, text) for name, labels, kind, text in rows)
    return f"\n## {title}\n\n{table(('name', 'type', 'labels', 'meaning'), lines)}"
