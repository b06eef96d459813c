"""A node that has lost its quorum: a clear, retriable error within the deadline, never a hang; works after the heal.

And what the command line says without a quorum, or without a leader.
"""

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode, Unanswered
from smq.testing.node_process import run_cli, wait_for

ASKED_MS = 1_500
HANG_S = 12.0  # far beyond what was asked, on whatever machine; a call that is forgotten ends at its own 15 s
ATTEMPTS = 5  # of a call whose only limit is the client's own deadline: a busy server may answer just too late
RETRIABLE = (
    ErrorCode.NO_QUORUM,
    ErrorCode.TIMED_OUT,
    ErrorCode.NODE_NOT_READY,
    ErrorCode.LEADER_UNAVAILABLE,
    ErrorCode.NOT_LEADER,
    ErrorCode.OFFSET_NOT_AVAILABLE,
)


@pytest.fixture
def lonely(fault_cluster: Cluster) -> Iterator[tuple[str, RawNode]]:
    """A topic with one record, led by a node whose two peers are frozen; thawed afterwards."""
    topic = fault_cluster.make_topic()
    leader = fault_cluster.wait_leader(topic, 0)
    raw = fault_cluster.nodes[leader].raw
    raw.publish_values(topic, 0, [b"before"])
    fault_cluster.wait_converged(topic, 1)
    others = [node for node in fault_cluster.nodes if node != leader]
    for other in others:
        fault_cluster.signal(other, signal.SIGSTOP)
    try:
        yield topic, raw
    finally:
        for other in others:
            fault_cluster.signal(other, signal.SIGCONT)
        fault_cluster.wait_ready()


def _linearizable_calls(topic: str, node: RawNode) -> dict[str, Callable[[], object]]:
    """Everything that needs a majority."""
    producer_id = pb.StartPublishSessionRequest(
        session_id=secrets.token_hex(8), topic=topic, request_id=secrets.token_bytes(16)
    )
    return {
        "publish": lambda: node.publish_values(topic, 0, [b"x"], timeout_ms=ASKED_MS),
        "range": lambda: node.range_info(topic, 0, timeout_ms=ASKED_MS),
        "commit": lambda: node.commit("g", topic, 0, 1, timeout_ms=ASKED_MS),
        "create": lambda: node.create_topic(f"{topic}-new", timeout_ms=ASKED_MS),
        "session": lambda: node.call(node.agent.StartPublishSession, producer_id, ASKED_MS / 1000),
    }


@pytest.mark.parametrize("what", ["publish", "range", "commit", "create", "session"])
def test_call_without_quorum_ends_in_time_with_a_retriable_error(lonely: tuple[str, RawNode], what: str) -> None:
    topic, node = lonely
    call = _linearizable_calls(topic, node)[what]
    error: Exception
    for _ in range(ATTEMPTS if what in ("session", "commit") else 1):  # the node may name a coordinator that hangs
        began = time.monotonic()
        with pytest.raises((SmqError, Unanswered)) as raised:
            call()
        assert time.monotonic() - began < HANG_S
        error = raised.value
        if isinstance(error, SmqError):
            break
    assert isinstance(error, SmqError), f"no typed error: {error}"
    assert error.code in RETRIABLE
    assert error.code.is_retriable


def test_committed_records_stay_readable_without_quorum(lonely: tuple[str, RawNode]) -> None:
    topic, node = lonely
    assert node.read_all(topic, 0) == {0: b"before"}


def test_requests_refused_for_lack_of_a_quorum_work_after_the_heal(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic()
    survivor = fault_cluster.wait_leader(topic, 0)
    others = [node for node in fault_cluster.nodes if node != survivor]
    fault_cluster.kill(*others)
    with pytest.raises(SmqError) as raised:
        fault_cluster.nodes[survivor].raw.publish_values(topic, 0, [b"maybe"], timeout_ms=ASKED_MS)
    assert raised.value.code in RETRIABLE
    fault_cluster.restart(*others)

    def publish() -> object:
        # The survivor may just be stepping down, after its time alone: retriable, as the error says.
        leader = fault_cluster.nodes[fault_cluster.wait_leader(topic, 0)].raw
        return leader.publish_values(topic, 0, [b"after"])

    wait_for("a publish that works", publish)
    fault_cluster.wait_converged(topic, 1)
    copies = [node.raw.read_all(topic, 0) for node in fault_cluster.alive()]
    assert copies[0] == copies[1] == copies[2]
    assert list(copies[0].values())[-1] == b"after"
    assert set(copies[0].values()) <= {b"maybe", b"after"}


def test_readyz_reports_that_the_quorum_is_gone_and_that_it_is_back(fault_cluster: Cluster) -> None:
    leader = fault_cluster.raft_leader()
    survivor = min(set(fault_cluster.nodes) - {leader})
    others = [node for node in fault_cluster.nodes if node != survivor]
    assert fault_cluster.http_status(survivor, "/readyz") == 200
    fault_cluster.kill(*others)
    fault_cluster.wait_http(survivor, "/readyz", 503)
    assert not fault_cluster.nodes[survivor].raw.status().HasField("raft_leader"), "it names a leader that is dead"
    assert fault_cluster.http_status(survivor, "/healthz") == 200
    fault_cluster.restart(*others)
    fault_cluster.wait_http(survivor, "/readyz", 200)


def _run_together(where: tuple[str, ...], second: list[str], topic: str) -> list[subprocess.CompletedProcess[str]]:
    """Two commands that wait for their own time-outs, produce and the given one, and then status: by then the nodes
    have noticed what is down."""
    with ThreadPoolExecutor() as pool:
        produce = partial(run_cli, "produce", topic, "--delivery-timeout", "3s", *where, input="x\n")
        running = [pool.submit(produce), pool.submit(run_cli, *second, *where)]
        return [*(each.result() for each in running), run_cli("status", *where)]


def test_the_command_line_says_that_a_partition_has_no_leader_and_fails(fault_cluster: Cluster) -> None:
    topic = fault_cluster.make_topic(replication_factor=1)
    leader = fault_cluster.wait_leader(topic, 0)
    fault_cluster.kill(leader)
    where = ("--bootstrap", ",".join(node.grpc for node in fault_cluster.alive()))
    sent, read, status = _run_together(where, ["consume", topic], topic)
    assert sent.stderr.startswith(f"waiting for a leader of {topic}/0")
    assert "`smq status` shows which nodes are up" in sent.stderr.splitlines()[-1]
    (why,) = read.stderr.splitlines()
    assert "`smq status`" in why
    assert f"1 partition ({topic}/0) without a leader" in status.stdout
    assert [sent.returncode, read.returncode, status.returncode] == [1, 1, 1]


def test_the_command_line_says_that_there_is_no_quorum_and_fails(lonely: tuple[str, RawNode]) -> None:
    topic, node = lonely
    where = ("--bootstrap", node.address)
    sent, made, status = _run_together(where, ["topic", "create", f"{topic}-u"], topic)
    assert sent.stderr.startswith("waiting for ")
    (why,) = made.stderr.splitlines()
    assert "NO_QUORUM" in why
    assert "`smq status`" in why
    assert "does not answer" in status.stdout
    assert ", leaders not known" in status.stdout
    assert "1 of 3 nodes answer, and 2 must run" in status.stdout
    assert [sent.returncode, made.returncode, status.returncode] == [1, 1, 1]
