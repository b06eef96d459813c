"""Takes the picture of the dashboard in docs/pictures: `python -m docs.take_dashboard`, in the root of the repository.

Owns the picture only: the scene is that of take_pictures.py, read by a Prometheus, and drawn by the panels of Grafana's
own library (docs/panels). No server of Grafana takes part. Needs Debian's packages chromium, npm and prometheus; npm
fetches the library. It must never be a test, and never write a picture in which a panel has no series.
"""

import html
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from chaos_tests.demo.flights import load_flights
from docs.take_pictures import PICTURES, play
from smq.clients import SyncAdmin, SyncProducer
from smq.coordinator.cli.cluster_dir import free_ports
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.node_process import end

ROOT: Final = Path(__file__).resolve().parents[1]
MONITORING: Final = ROOT / "deploy/monitoring"
SCRAPE_S, RATE_S, WRITE_S = 5, 20, 0.01
WIDTH, ROW = 1600, 38  # a row of Grafana's grid
UNDRAWN: Final = re.compile(r'<html[^>]* data-undrawn="([^"]*)"')
NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answered(address: str, panels: list[dict[str, Any]], start: float) -> dict[str, Any]:
    """What `panels.jsx` draws: the answers to the queries of each panel, since `start`."""
    now = time.time()
    answers: dict[int, list[Any]] = {}
    for panel in panels:
        for target in panel["targets"]:
            query = (
                target["expr"]
                .replace("$__rate_interval", f"{RATE_S}s")
                .replace("$node", ".*")
                .replace("$cluster", ".*")
            )
            asked = urlencode({"query": query, "start": start, "end": now, "step": SCRAPE_S})
            with NO_PROXY.open(f"http://{address}/api/v1/query_range?{asked}", timeout=30) as answer:
                answers.setdefault(panel["id"], []).append(json.load(answer)["data"]["result"])
    return {"panels": panels, "answers": answers, "start": start, "end": now, "width": WIDTH, "row": ROW}


def keep_latest(cluster: Cluster, stop: threading.Event) -> None:
    """Writes to a compacted topic until `stop`, record by record.

    Without it the panel of compaction has no series. Nodes time few of their batches, and the scene alone has not many.
    """
    flights = load_flights(1_000)
    with SyncAdmin(cluster.servers) as admin, SyncProducer(cluster.servers) as producer:
        admin.create_topic("latest", 3, config={"cleanup.policy": "compact"})
        for key, value in itertools.cycle(zip(flights.keys, flights.values, strict=True)):
            producer.send("latest", value, key=key).result()
            if stop.wait(WRITE_S):
                return


def watched(directory: Path) -> dict[str, Any]:
    """The scene, as Prometheus has seen it."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    with live_cluster(directory / "cluster") as cluster:
        targets = json.dumps([node.http for node in cluster.nodes.values()])
        config = (MONITORING / "prometheus.yml").read_text().replace(": 15s", f": {SCRAPE_S}s")
        (directory / "prometheus.yml").write_text(re.sub(r"targets: \[.*\]", f"targets: {targets}", config))
        shutil.copy(MONITORING / "alerts.yml", directory)
        (port,) = free_ports(1)
        address = f"127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--web.listen-address={address}"]
        process = subprocess.Popen([*command, f"--storage.tsdb.path={directory}/tsdb"], stderr=subprocess.DEVNULL)
        try:
            start = time.time()
            with ThreadPoolExecutor(1) as pool:
                stop = threading.Event()
                writing = pool.submit(keep_latest, cluster, stop)
                try:
                    play(cluster)
                finally:
                    stop.set()
                writing.result()
            return answered(address, panels, start)
        finally:
            end(process)


def draw(directory: Path, scene: dict[str, Any]) -> None:
    """Writes the picture, if each panel has drawn a series: the page that is pictured says so itself."""
    shutil.copytree(ROOT / "docs/panels", directory, dirs_exist_ok=True)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps"], cwd=directory, check=True)
    options = ["--bundle", "--minify", "--outfile=out.js", "--jsx=automatic", "--loader:.ttf=dataurl"]
    options.append('--define:process.env.NODE_ENV="production"')
    subprocess.run(["node_modules/.bin/esbuild", "panels.jsx", *options], cwd=directory, check=True)
    data = json.dumps(scene).replace("</", "<\\/")
    head = '<meta charset="utf-8"><link rel="stylesheet" href="out.css">'
    page = directory / "page.html"
    page.write_text(f'{head}<div id="root"></div><script>SCENE = {data}</script><script src="out.js"></script>')
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in scene["panels"])
    options = [f"--user-data-dir={directory}/profile", f"--window-size={WIDTH},{rows * ROW}", "--headless"]
    options += ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    file = directory / "dashboard.png"
    options += ["--dump-dom", f"--screenshot={file}"]
    drawn = subprocess.run(["chromium", *options, page.as_uri()], check=True, stdout=subprocess.PIPE, timeout=120)
    found = UNDRAWN.search(drawn.stdout.decode())
    if found is None:
        sys.exit("no picture: the page of the panels did not run")
    if found[1]:
        sys.exit(f"no picture: these panels have drawn no series: {html.unescape(found[1])}")
    shutil.copy(file, PICTURES)


def main() -> None:
    missing = [program for program in ("chromium", "npm", "prometheus") if shutil.which(program) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; install Debian's packages of these names")
    with tempfile.TemporaryDirectory() as directory:
        draw(Path(directory) / "panels", watched(Path(directory)))


if __name__ == "__main__":
    main()
