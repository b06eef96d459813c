"""A program that ends without close(): its records are delivered, or it says how many are not."""

import subprocess
import sys

import pytest

from smq.clients import SyncConsumer
from smq.testing.fake.runner import cluster_in_thread

BLOCKING = """
import os, sys, threading, time
from smq.clients import SyncProducer
def send_all(producer):
    for i in range(1000):
        producer.send("t", b"%d" % i)
def in_function(address):
    send_all(SyncProducer(address))
def forked(address):
    producer = SyncProducer(address)
    send_all(producer)
    if (child := os.fork()) == 0:
        sys.exit()  # the child delivers nothing of its parent's
    os.waitpid(child, 0)
def late_thread(address):
    producer = SyncProducer(address)
    threading.Thread(target=lambda: (time.sleep(0.3), send_all(producer))).start()
"""
LOOP = """
import asyncio, sys
from smq.clients import Producer
async def main(address):
    producer = Producer(address, linger_ms=60_000)
    await producer.start()
    for i in range(1000):
        producer.send("t", b"%d" % i)
asyncio.run(main(sys.argv[1]))
"""


def _run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("producer = SyncProducer(sys.argv[1]); send_all(producer)", 0),
        ("in_function(sys.argv[1])", 0),
        ("producer = SyncProducer(sys.argv[1]); send_all(producer); sys.exit(3)", 3),
        ("producer = SyncProducer(sys.argv[1]); send_all(producer); raise ValueError", 1),
        ("late_thread(sys.argv[1])", 0),
        ("forked(sys.argv[1])", 0),
    ],
    ids=["global", "dropped", "SystemExit", "exception", "thread", "fork"],
)
def test_what_was_sent_is_delivered_at_the_end_of_the_program(ending: str, status: int) -> None:
    with cluster_in_thread(1, t=1) as cluster:
        done = _run(BLOCKING + ending, cluster.servers)
        assert (done.returncode, "acknowledged" in done.stderr) == (status, False), done.stderr
        with SyncConsumer(cluster.servers) as consumer:
            consumer.assign("t", end_offset="latest")
            assert [r.value for r in consumer] == [b"%d" % i for i in range(1000)]


def test_a_program_says_how_many_records_it_could_not_deliver() -> None:
    cut_short = "import smq.clients.sync.producer as p; p.EXIT_TIMEOUT_S = p.EXIT_SILENCE_S = 0.3\n"
    with cluster_in_thread(1, t=1) as cluster:
        ending = "producer = SyncProducer(sys.argv[1]); print(flush=True); sys.stdin.read(); send_all(producer)"
        command = [sys.executable, "-c", BLOCKING + cut_short + ending, cluster.servers]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
    _, errors = process.communicate(timeout=60)  # the cluster has gone
    assert "waiting for the acknowledgement of 1000 records" in errors
    assert "1000 records were not acknowledged when the program ended" in errors
    assert process.returncode == 0


def test_an_event_loop_that_ends_before_its_producer_says_how_many_records_are_lost() -> None:
    with cluster_in_thread(1, t=1) as cluster:
        done = _run(LOOP, cluster.servers)
    assert "1000 records were not acknowledged, because the event loop ended" in done.stderr
