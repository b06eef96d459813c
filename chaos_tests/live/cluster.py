"""A cluster of real node processes on this machine: started, killed, restarted and cleaned up.

Owns the processes it starts and the questions asked of one node alone. It kills by process id only. The demo and
the Spark tests use it; it never looks into a node's files.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import grpc

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc as pb_grpc

START_TIMEOUT_S: Final = 60.0  # three Pythons start within seconds; a loaded machine takes longer
STOP_TIMEOUT_S: Final = 20.0  # a node hands its leaderships over before it ends
POLL_S: Final = 0.05
LOG_TAIL_BYTES: Final = 4000
CALL_TIMEOUT_S: Final = 10.0
CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 128 << 20),  # a batch comes whole, and may be configured up to 100 MiB
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # nodes are killed and restarted here: notice it at once
    ("grpc.max_reconnect_backoff_ms", 200),
)


class LiveClusterError(RuntimeError):
    """The cluster did not do what was waited for; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    node: int
    pid: int
    grpc_address: str
    data_dir: Path


class LiveCluster:
    """`smq cluster` in a child process, and `smq serve` for nodes that are restarted."""

    def __init__(self, data_dir: Path, node_count: int = 3) -> None:
        self._data_dir = data_dir
        self._node_count = node_count
        self._nodes_dir = data_dir / "nodes"
        self._log_path = data_dir / "cluster.log"
        self._log: IO[bytes] | None = None
        self._parent: subprocess.Popen[bytes] | None = None
        self._restarted: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, grpc.Channel] = {}
        self.nodes: dict[int, LiveNode] = {}

    @property
    def servers(self) -> str:
        return ",".join(node.grpc_address for node in self.nodes.values())

    def start(self) -> None:
        """Returns when every node is ready. LiveClusterError when they are not within START_TIMEOUT_S."""
        ready_file = self._data_dir / "ready.json"
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("ab")
        self._parent = self._spawn(
            "cluster",
            *("--nodes", str(self._node_count), "--data-dir", str(self._nodes_dir)),
            *("--grpc-port", "0", "--http-port", "0", "--ready-file", str(ready_file)),
        )
        self._wait("a ready cluster", ready_file.exists, self._parent)
        for told in json.loads(ready_file.read_text())["nodes"]:
            node = LiveNode(
                node=told["id"], pid=told["pid"], grpc_address=told["grpc"], data_dir=Path(told["data_dir"])
            )
            self.nodes[node.node] = node

    def kill(self, node: int) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        os.kill(self.nodes[node].pid, signal.SIGKILL)

    def restart(self, node: int) -> None:
        """Starts a killed node again from its own configuration; returns when it is ready."""
        old = self.nodes[node]
        previous = self._restarted.pop(node, None)
        if previous is not None:
            previous.wait(STOP_TIMEOUT_S)
        process = self._spawn("serve", "--config", str(self._nodes_dir / f"node-{node}" / "node.toml"))
        self._restarted[node] = process
        self.nodes[node] = LiveNode(node=node, pid=process.pid, grpc_address=old.grpc_address, data_dir=old.data_dir)
        self._wait(f"node {node} ready again", lambda: self._is_ready(node), process)

    def broker(self, node: int) -> pb_grpc.BrokerStub:
        return pb_grpc.BrokerStub(self._channel(node))

    def admin(self, node: int) -> pb_grpc.AdminStub:
        return pb_grpc.AdminStub(self._channel(node))

    def stop(self) -> None:
        """Ends all processes, by force where they do not end by themselves."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        processes = [*self._restarted.values(), *([self._parent] if self._parent else [])]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # as Ctrl-C, which `smq cluster` passes on to its nodes
        for process in processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass  # by force, below
            try:
                os.killpg(process.pid, signal.SIGKILL)  # each child leads a group of its own
            except ProcessLookupError:
                pass  # the usual case: the group is empty
            process.wait()
        if self._log is not None:
            self._log.close()

    def log_tail(self) -> str:
        data = self._log_path.read_bytes() if self._log_path.exists() else b""
        return data[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "smq.coordinator.cli", *arguments]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def _wait(self, what: str, is_done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not is_done():
            if process.poll() is not None:
                raise LiveClusterError(f"waited for {what}, but it ended ({process.returncode}):\n{self.log_tail()}")
            if time.monotonic() > give_up_at:
                raise LiveClusterError(f"waited {START_TIMEOUT_S:g} s for {what}:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def _is_ready(self, node: int) -> bool:
        try:
            return self.admin(node).NodeStatus(pb.NodeStatusRequest(), timeout=CALL_TIMEOUT_S).is_ready
        except grpc.RpcError:
            return False

    def _channel(self, node: int) -> grpc.Channel:
        if node not in self._channels:
            self._channels[node] = grpc.insecure_channel(self.nodes[node].grpc_address, options=CHANNEL_OPTIONS)
        return self._channels[node]


@contextmanager
def live_cluster(data_dir: Path, node_count: int = 3) -> Iterator[LiveCluster]:
    """A running cluster that is gone afterwards, however the block ends."""
    cluster = LiveCluster(data_dir, node_count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
