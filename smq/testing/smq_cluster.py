"""A cluster as a user starts it: `smq cluster`, and `smq serve` for a node that comes back.

Owns that one process and its ready file. The demo, the pipeline, the tests and the benchmarks use it.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smq.testing.processes import CLI, READY_S, ClusterError, Node, Nodes, end, tail, wait_for


@dataclass
class Cluster(Nodes):
    """Its nodes are children of `smq cluster` until they are killed and run again from here."""

    _parent: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        """What `smq cluster` has as its --data-dir."""
        return self.root / "data"

    @property
    def log(self) -> Path:
        return self.root / "cluster.log"

    def start(self, *options: str) -> "Cluster":
        """`smq cluster` on free ports; returns when every node is ready."""
        self.root.mkdir(parents=True, exist_ok=True)
        ready = self.root / "ready.json"
        command = [*CLI, "cluster", "--nodes", str(self.size), "--data-dir", str(self.directory)]
        command += ["--grpc-port", "0", "--http-port", "0", "--ready-file", str(ready), *options]
        with self.log.open("ab") as log:
            parent = self._parent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        def is_ready() -> bool:
            if parent.poll() is not None:
                raise ClusterError(f"smq cluster has ended ({parent.returncode}); its log ends:\n{tail(self.log)}")
            return ready.exists()

        wait_for(f"a ready cluster (its log is {self.log})", is_ready, READY_S)
        for told in json.loads(ready.read_text())["nodes"]:
            config = self.directory / f"node-{told['id']}" / "node.toml"
            self.nodes[told["id"]] = Node(
                id=told["id"],
                config=config,
                data_dir=Path(told["data_dir"]),
                log=config.with_name("node.log"),
                grpc=told["grpc"],
                http=told["http"],
                kafka=told["kafka"],
                pid=told["pid"],
            )
        return self

    def restart(self, *nodes: int, wait: bool = True) -> None:
        """Starts nodes that have ended again, on their old addresses and directories, as an operator would."""
        for node in nodes:
            self.run(node)
        if wait:
            self.wait_ready(*nodes)

    def stop(self) -> None:
        """Ends everything that was started from here, gently where that works."""
        for node in self.nodes:
            self.resume(node)
        if self._parent is not None:
            end(self._parent)  # as Ctrl-C, which it passes on to its nodes
        for member in self.nodes.values():
            if member.process is not None:
                end(member.process)
            elif member.is_alive():
                self.signal(member.id, signal.SIGKILL)
        self.close()


@contextmanager
def live_cluster(root: Path, size: int = 3) -> Iterator[Cluster]:
    """A running cluster that is gone afterwards, however the block ends."""
    cluster = Cluster(root, size)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
