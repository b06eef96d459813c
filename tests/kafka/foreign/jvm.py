"""A Java program that runs beside a cluster: started, killed, and read by the lines that it prints.

Owns the process. What was built for it, and what its lines mean, is the caller's.
"""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from smq.testing.node_process import ClusterError, end, tail, wait_for

JVM_S = 120.0  # a JVM, its first rebalance and its tables, on a busy machine


class Jvm:
    """One run of a program. Its output and its log are both in the file `log`."""

    def __init__(self, command: Sequence[str], log: Path, directory: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["java", "-Xmx256m", *command],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL: it leaves no group, ends no transaction and writes nothing any more."""
        self.check()
        end(self._process, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, or SIGKILL after a while."""
        end(self._process, signal.SIGTERM)

    def check(self) -> None:
        """ClusterError with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise ClusterError(f"it has ended ({self._process.returncode}); its log ends:\n{tail(self._log)}")

    def lines(self, first_word: str) -> list[list[str]]:
        """The words of each line that begins with this one."""
        split = (line.split() for line in self._log.read_text(errors="replace").splitlines())
        return [words for words in split if words[:1] == [first_word]]

    def wait_line(self, first_word: str) -> None:
        """Returns once it has printed such a line; ClusterError if it ends before."""

        def has_line() -> bool:
            self.check()
            return bool(self.lines(first_word))

        wait_for(f'a line "{first_word}" in {self._log}', has_line, JVM_S)
