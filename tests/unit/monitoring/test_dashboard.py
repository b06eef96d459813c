"""The Grafana dashboard of deploy/monitoring: it is laid out without overlaps, and reads only what nodes serve.

tests/cluster/test_monitoring.py runs its queries on a live cluster.
"""

import json
import re
from pathlib import Path
from typing import Any

from docs.generate.metrics import names

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/monitoring/dashboard.json").read_text())
OF_THE_PROCESS = {"process_cpu_seconds_total"}  # prometheus-client's own


def test_panels_have_titles_texts_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["description"].endswith(".") for panel in panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells |= own


def test_every_metric_that_a_panel_reads_is_one_that_nodes_serve() -> None:
    served = set(names())
    read = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"\b(?:smq|process)_\w+", target["expr"]):
                stem = re.sub(r"_(bucket|sum|count)$", "", name)
                read.add(name if name in served else stem)
    assert len(read) > 20
    assert read - served - OF_THE_PROCESS == set()


def test_every_query_is_of_the_chosen_clusters_only() -> None:
    assert "cluster" in {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\b(?:smq|process)_\w+", target["expr"])
            assert len(names) == target["expr"].count('{cluster=~"$cluster"'), target["expr"]
