"""A standalone Spark cluster on this machine with a worker on each of two hosts, and a job on it that speculates.

Spark starts a second attempt of a task only on another host. Its local modes have one host, so that neither `local` nor
`local-cluster` ever does so. The workers here have two addresses of the loopback network: to Spark these are two hosts.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyspark

from smq.spark_connector.java import find_java_home
from smq.testing.node_process import wait_for
from tests.spark import steps

ROOT: Final = Path(__file__).parents[3]  # the job and its source are modules of the tests
HOSTS: Final = ("127.0.0.2", "127.0.0.3")
PATIENCE_S: Final = 180
_MASTER: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED: Final = re.compile(r"(Successfully registered) with master")


class Program:
    """A process in a group of its own, and its log."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str], **options: Any) -> None:
        self._log = log
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | environment | {"PYTHONPATH": path}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output, env=env, start_new_session=True, **options)

    def wait_logged(self, what: str, pattern: re.Pattern[str]) -> str:
        """The first group of the pattern's first match."""

        def found() -> str | None:
            assert self.process.poll() is None, self.log()
            match = pattern.search(self._log.read_text())
            return match[1] if match is not None else None

        return wait_for(what, found, PATIENCE_S)

    def log(self) -> str:
        return self._log.read_text()[-5000:]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def standalone(root: Path) -> Iterator[str]:
    """The address of its master. Each worker has an executor with one core."""
    home = Path(pyspark.__file__).parent
    environment = {
        "JAVA_HOME": str(find_java_home()),
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.master.rest.enabled=false",
        steps.ARMED: str(armed(root)),  # executors and their Python workers inherit it
    }
    programs: list[Program] = []

    def start(kind: str, host: str, *arguments: str) -> Program:
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        command += ["--host", host, "--port", "0", "--webui-port", "0", *arguments]
        log = root / f"{kind}-{host}.log"
        programs.append(Program(command, log, environment | {"SPARK_LOCAL_IP": host}, stdout=subprocess.DEVNULL))
        return programs[-1]

    try:
        master = start("master.Master", "127.0.0.1").wait_logged("the master", _MASTER)
        for host in HOSTS:
            arguments = ("--cores", "1", "--memory", "1g", "--work-dir", str(root / f"work-{host}"), master)
            start("worker.Worker", host, *arguments).wait_logged(f"the worker on {host}", _REGISTERED)
        yield master
    finally:
        for program in reversed(programs):
            program.kill()


def armed(root: Path) -> Path:
    return root / "armed"


class SpeculatingJob:
    """The program of job.py, which writes what its commands say."""

    def __init__(self, root: Path, master: str) -> None:
        command = [sys.executable, "-m", "tests.spark.speculation.job", master, str(root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._program = Program(command, root / "job.log", {}, **pipes)

    def begin(self, **write: str) -> None:
        pipe = self._program.process.stdin
        assert pipe is not None
        pipe.write(json.dumps(write) + "\n")
        pipe.flush()

    def wait_written(self) -> None:
        pipe = self._program.process.stdout
        assert pipe is not None
        assert pipe.readline() == "written\n", self._program.log()

    def stop(self) -> None:
        if self._program.process.poll() is None:
            steps.kill_driver(self._program.process.pid)
        self._program.process.wait(30)
