"""`smq dev` as a user of the package starts it, by any command that leads to it.

Owns the process: its free ports, its ready file, and its end by SIGTERM, after which nothing of it may run.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from smq.testing.node_process import wait_for

END_S = 30
PORTS = ("--grpc-port", "0", "--http-port", "0", "--kafka-port", "0")


@contextmanager
def running_dev(
    smq: list[str], directory: Path, env: Mapping[str, str], *, ready_within_s: float = 60.0
) -> Iterator[str]:
    """The gRPC address of a node that serves. It has to end by itself when SIGTERM reaches what was started here."""
    ready, log = directory / "ready.json", directory / "dev.log"
    command = [*smq, "dev", "--ephemeral", *PORTS, "--ready-file", str(ready)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=directory, env=env, stdout=out, stderr=out, start_new_session=True)

    def is_ready() -> bool:
        assert process.poll() is None, f"{command} ended with {process.returncode}: {log.read_text()[-3000:]}"
        return ready.exists()

    try:
        wait_for(f"{' '.join(smq)} dev is ready", is_ready, ready_within_s)
        (node,) = json.loads(ready.read_text())["nodes"]
        yield node["grpc"]
        process.terminate()
        code = process.wait(END_S)
        assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), log.read_text()[-3000:]
        wait_for("the node has ended as well", lambda: not Path(f"/proc/{node['pid']}").exists(), END_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
