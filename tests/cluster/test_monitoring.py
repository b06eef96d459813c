"""A real Prometheus with the files of deploy/monitoring on a live cluster: an alert fires and clears, panels have data.

Needs the program `prometheus` (Debian's package of this name), in the path or named by PROMETHEUS.
"""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smq.clients import SyncAdmin, SyncProducer
from smq.coordinator.cli.cluster_dir import free_ports
from smq.testing.cluster import Cluster
from smq.testing.node_client import Unanswered
from smq.testing.node_process import end, tail, wait_for
from tests.skips import needs, program

MONITORING = Path(__file__).resolve().parents[2] / "deploy/monitoring"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Their limits depend on the machine, or they look back over minutes in which a busy machine has had elections.
LOAD_DEPENDENT = {"SmqGroupLagGrows", "SmqRaftUnstable", "SmqAdvancesRejected"} | set(
    re.findall(r"- alert: (\w+) # adjust", (MONITORING / "alerts.yml").read_text())
)
OF_A_DEAD_NODE = {"SmqNodeDown", "SmqNodeFenced", "SmqUnderReplicated"}
PATIENCE_S = 120  # nothing is measured by it: each wait ends with its condition

Ask = Callable[[str, str], Any]


@pytest.fixture
def ask(own_cluster: Cluster, tmp_path: Path) -> Iterator[Ask]:
    """Prometheus's HTTP API, beside a running cluster. Every period is a second, so that the test need not wait."""
    own_cluster.start()
    rules = re.sub(r"for: \d+[sm]$", "for: 1s", (MONITORING / "alerts.yml").read_text(), flags=re.MULTILINE)
    (tmp_path / "alerts.yml").write_text(rules)
    targets = json.dumps([node.http for node in own_cluster.nodes.values()])
    config = (MONITORING / "prometheus.yml").read_text().replace(": 15s", ": 1s")
    (tmp_path / "prometheus.yml").write_text(re.sub(r"targets: \[.*\]", f"targets: {targets}", config))
    (port,) = free_ports(1)
    address, log = f"127.0.0.1:{port}", tmp_path / "prometheus.log"
    command = [
        str(program("prometheus")),
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=out, stderr=out)

    def get(path: str, query: str = "") -> Any:
        assert process.poll() is None, tail(log)
        try:
            with NO_PROXY.open(f"http://{address}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError as e:
            raise Unanswered(f"Prometheus does not answer: {e}") from e

    def is_scraping() -> bool:
        targets = get("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    try:
        wait_for("Prometheus reads all nodes", is_scraping, PATIENCE_S)
        yield get
    finally:
        end(process)


def firing(ask: Ask) -> set[str]:
    return {alert["labels"]["alertname"] for alert in ask("alerts", "")["alerts"] if alert["state"] == "firing"}


@needs("prometheus")
@pytest.mark.timeout(700)  # all waits together, on a busy machine
def test_alerts_fire_when_a_node_dies_and_clear_when_it_is_back_and_every_panel_has_data(
    own_cluster: Cluster, ask: Ask
) -> None:
    topic = own_cluster.make_topic(3)
    kept = own_cluster.make_topic(1, config={"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
    servers = [node.grpc for node in own_cluster.nodes.values()]
    with SyncProducer(servers) as producer, SyncAdmin(servers) as admin:

        def work() -> None:
            for n in range(30):
                producer.send(topic, b"%d" % n)
                producer.send(kept, b"%d" % n, key=b"k")
            producer.flush()
            admin.commit_offsets("g", {(topic, partition): 1 for partition in range(3)})

        empty = {(panel["title"], t["expr"]) for panel in panels() for t in panel["targets"]}

        def have_data() -> bool:
            work()
            for title, expression in list(empty):
                query = expression.replace("$__rate_interval", "10s").replace("$node", ".*").replace("$cluster", ".*")
                if ask("query", urllib.parse.urlencode({"query": query}))["result"]:
                    empty.discard((title, expression))
            return not empty

        wait_for("data in every panel", have_data, PATIENCE_S)
        wait_for("no alert", lambda: not firing(ask) - LOAD_DEPENDENT, PATIENCE_S)
        victim = next(n for n in own_cluster.nodes if n != own_cluster.raft_leader())
        own_cluster.kill(victim)
        # Two nodes are a quorum. Raft may have another election now, so that there is no leader for a moment.
        wait_for("the alerts of a dead node", lambda: _is_one_node_down(firing(ask)), PATIENCE_S)
        own_cluster.restart(victim)
        wait_for("the alerts clear", lambda: not OF_A_DEAD_NODE & firing(ask), PATIENCE_S)


def _is_one_node_down(alerts: set[str]) -> bool:
    return alerts >= OF_A_DEAD_NODE and "SmqQuorumLost" not in alerts


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found
