"""Takes the pictures in docs/pictures: `python docs/take_pictures.py`.

Owns the scene of the console and of `smq top`: three nodes, flights written to them bit by bit, a group that falls
behind and catches up, a transaction that is open, a node that is killed and comes back. It takes five minutes, as the
console draws a point every half minute. Needs Debian's package chromium; CHROMIUM
may name the program instead. It must never be a test.
"""

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos_tests.demo.flights import load_flights
from smq.clients import SyncAdmin, SyncConsumer, SyncProducer
from smq.testing.cluster import Cluster, live_cluster

PICTURES = Path(__file__).parent / "pictures"
PAGES = {
    "cluster": ("", 760),
    "topic": ("topics/flights", 700),
    "records": ("topics/flights/messages?partition=0&offset=100&format=json", 760),
    "transaction": ("transactions", 420),
    "group": ("groups/departures", 620),
    "events": ("events", 620),
}
WIDTH = 1100
ROUNDS, ROUND_S, KILLED_IN_ROUND = 11, 30.0, 6
ROWS = 3_000  # per round
READ = [3_000, 3_000, 2_000, 500, 100, 1_000, 2_000, 6_000, 6_000, 3_000, 3_000]  # per round


def play(cluster: Cluster) -> None:
    """What the pictures show. A transaction is left open."""
    flights = load_flights(ROUNDS * ROWS)
    servers = cluster.servers
    with SyncAdmin(servers) as admin, SyncProducer(servers) as producer:
        admin.create_topic("flights", 6, replication_factor=3)
        with SyncConsumer(servers, group="departures") as consumer:
            consumer.assign("flights")
            for number in range(ROUNDS):
                sys.stderr.write(f"round {number + 1} of {ROUNDS}\n")
                rows = range(number * ROWS, (number + 1) * ROWS)
                for row in rows:
                    producer.send("flights", flights.values[row], key=flights.keys[row])
                producer.flush()
                count = 0
                while count < READ[number]:
                    count += sum(map(len, consumer.getmany(timeout_ms=1_000, max_records=500).values()))
                consumer.commit()
                if number == KILLED_IN_ROUND:
                    leader = cluster.wait_leader("flights", 0)
                    cluster.kill(leader)
                    cluster.restart(leader)
                time.sleep(ROUND_S)


def take(program: str, cluster: Cluster, profile: str) -> None:
    node = cluster.nodes[2]  # the first leader of partition 0 is node 1, which has been killed
    for name, (path, height) in PAGES.items():
        for scheme, number in (("light", 1), ("dark", 0)):
            if scheme == "dark" and name != "cluster":
                continue
            file = PICTURES / f"console-{name}{'-dark' if scheme == 'dark' else ''}.png"
            shoot(program, f"http://{node.http}/console/{path}", file, height, profile, scheme=number)


def shoot(program: str, url: str, file: Path, height: int, profile: str, *, scheme: int) -> None:
    options = [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", f"--screenshot={file}"]
    options += ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += ["--hide-scrollbars", f"--blink-settings=preferredColorScheme={scheme}"]
    subprocess.run([program, *options, url], check=True, stderr=subprocess.DEVNULL, timeout=60)


def take_top(program: str, cluster: Cluster, directory: Path, profile: str) -> None:
    """What the command prints, in the colours of a terminal. The second look has rates."""
    smq = [sys.executable, "-m", "smq.coordinator.cli.main", "top", "--count", "2", "--bootstrap", cluster.servers]
    printed = subprocess.run(smq, check=True, capture_output=True, text=True, timeout=60).stdout
    shown = "$ smq top\n" + "cluster " + printed.rpartition("\ncluster ")[2]
    style = "margin:0;padding:16px;font:13px/1.4 monospace;background:#16181d;color:#d7dae0"
    ground = "<style>body { margin: 0; background: #16181d }</style>"
    page = directory / "top.html"
    page.write_text(f'<!doctype html><meta charset="utf-8">{ground}<pre style="{style}">{html.escape(shown)}</pre>')
    height = 50 + 19 * shown.count("\n")
    shoot(program, page.as_uri(), PICTURES / "top.png", height, profile, scheme=1)


def take_console(program: str, directory: Path) -> None:
    with live_cluster(directory / "cluster") as cluster:
        play(cluster)
        with SyncProducer(cluster.servers, transactional_id="billing-1") as producer:
            producer.begin()
            producer.send("flights", b"an open transaction", key=b"UA").result()
            take(program, cluster, str(directory / "profile"))
            take_top(program, cluster, directory, str(directory / "profile"))
            producer.abort()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        sys.exit("the program chromium is not installed; install it, or name it by CHROMIUM")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        take_console(program, Path(directory))


if __name__ == "__main__":
    main()
