"""The shell blocks of the pages, typed line by line on a cluster, and the recorded session."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.clients import SyncAdmin, SyncConsumer, TopicExists
from smq.testing.cluster import Cluster, live_cluster
from tests.pages import ROOT, claimed

WRITTEN = "127.0.0.1:7401"  # the address on the pages
ENDLESS = re.compile(r"^smq (?:top\b|group watch\b|consume\b.* -f\b)")  # until Ctrl-C
INTERRUPT_S = 4
RUN_S = 200

# What a page takes for granted.
CLI = """
for topic in events users copies; do smq topic create $topic --partitions 2; done
smq topic create greetings || true  # the test of Kafka's page may have made it
seq 2100 | smq produce events --partition 0 --key user-7 -H type=login
printf 'one\\ntwo\\n' > lines.txt
echo 'user-7:{"name":"Ada"}' > users.txt
printf 'user,value\\nada,1\\n' > events.csv
"""
MONITORING = """
smq topic create orders --partitions 3
for partition in 0 1 2; do seq 10 | smq produce orders --partition $partition; done
smq consume orders -g NAME --commit > /dev/null
smq consume orders -g invoices --commit > /dev/null
printf '#!/bin/sh\\nexit 1\\n' > send-an-alert
chmod +x send-an-alert
"""
OPERATIONS = f"""
smq topic create TOPIC
{sys.executable} -c 'import os
from smq.clients import SyncProducer
producer = SyncProducer(os.environ["SMQ_BOOTSTRAP"], transactional_id="ID")
producer.begin()
producer.send("TOPIC", b"open").result()
os._exit(0)'
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes for all pages, which use the same names as other tests."""
    with live_cluster(tmp_path_factory.mktemp("pages")) as made:
        yield made


def environment(servers: str, directory: Path) -> dict[str, str]:
    paths = (str(Path(sys.executable).parent), str(directory), os.environ["PATH"])
    return dict(os.environ, PATH=os.pathsep.join(paths), PYTHONPATH=str(ROOT), SMQ_BOOTSTRAP=servers)


def typed(block: str) -> str:
    """The block for `sh -e`: a command that waits for Ctrl-C gets it, while the others run."""
    lines = ["waiting="]
    for line in block.replace("\\\n", " ").splitlines():
        if ENDLESS.match(line):
            command = line.partition("  #")[0]
            lines += [f'timeout -s INT {INTERRUPT_S} {command} & waiting="$waiting $!"']
        else:
            lines.append(line)
    # 124: the command had not ended by itself, as it must not.
    return "\n".join([*lines, "for each in $waiting; do wait $each || [ $? -eq 124 ]; done\n"])


def run(script: str, servers: str, directory: Path) -> str:
    """Standard output; the test fails if a command does."""
    ran = subprocess.run(
        ["sh", "-e", "-x", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(servers, directory),
        timeout=RUN_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_line_of_the_command_lines_page_runs(own: Cluster, tmp_path: Path) -> None:
    blocks = claimed("docs/cli.md", __file__)
    printed = run(CLI + typed("".join(blocks)), own.servers, tmp_path)
    assert len(blocks) == 2
    assert "user-7" in printed


def test_the_kafka_producer_of_its_page_stores_a_record(own: Cluster) -> None:
    [block] = claimed("docs/kafka.md", __file__)
    with SyncAdmin(own.servers) as admin, contextlib.suppress(TopicExists):
        admin.create_topic("greetings", 1)
    exec(compile(block.replace("127.0.0.1:9092", own.nodes[1].kafka), "docs/kafka.md", "exec"), {})
    with SyncConsumer(own.servers) as consumer:
        consumer.assign("greetings", "earliest", end_offset="latest")
        assert b"hello" in [record.value for record in consumer]


@pytest.mark.full
@pytest.mark.parametrize(("page", "before"), [("docs/monitoring.md", MONITORING), ("docs/operations.md", OPERATIONS)])
def test_every_line_of_a_page_for_operators_runs(page: str, before: str, own: Cluster, tmp_path: Path) -> None:
    blocks = claimed(page, __file__)
    assert len(blocks) >= 5
    try:
        run(before, own.servers, tmp_path)
        for block in blocks:
            run(typed(block.replace(WRITTEN, own.servers)), own.servers, tmp_path)
    finally:
        run("smq config unset auto.create.topics.enable log.retention.ms", own.servers, tmp_path)


# ------------------------------------------------------------------------------------------------- the session
def steps(session: str) -> Iterator[tuple[str, str]]:
    """Each command, and what it printed."""
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, output = step.partition("\n")
        yield command, output


def shape(output: str) -> str:
    """Without what differs from run to run: numbers and ids, and so the widths of columns."""
    plain = re.sub(r"\b[0-9a-f]{16}\b|\d+(?:\.\d+)?(?: m?s\b)?", "N", output)
    return re.sub(r"[ -]+", " ", plain).strip()


@pytest.mark.full
def test_the_session_prints_what_its_page_says(tmp_path: Path) -> None:
    with live_cluster(tmp_path / "node", 1) as cluster:
        servers = cluster.servers
        [session] = claimed("docs/walkthrough.md", __file__)
        for command, expected in steps(session):
            ran = subprocess.run(
                ["bash", "-c", command.replace(WRITTEN, servers)],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=environment(servers, tmp_path),
                timeout=RUN_S,
            )
            assert shape(ran.stdout) == shape(expected), command
