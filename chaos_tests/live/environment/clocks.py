"""The wall clocks of the nodes, which a run may move: a small shim in C, preloaded into each node's process.

Owns the shim's build, and the file through which each node's clock is moved. Needs a C compiler; `why_not` says so if
there is none. It must never touch monotonic time.
"""

import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("clock_shim.c")
_SETTING: Final = struct.Struct("<qqq")  # offset ns, drift ppm, monotonic ns from which the drift counts


def why_not() -> str | None:
    return None if shutil.which("cc") else "there is no C compiler (cc) to build the clock shim with"


class Clocks:
    """One movable wall clock per node."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._shim = root / "clock_shim.so"
        built = subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._shim), str(_SOURCE), "-ldl"],
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            raise RuntimeError(f"the clock shim does not build: {built.stderr.strip()}")

    def environment(self, node: int) -> dict[str, str]:
        """The environment variables for a node's process."""
        if not self._file(node).exists():
            self.move(node)
        return {"LD_PRELOAD": str(self._shim), "CHAOS_CLOCK_FILE": str(self._file(node))}

    def move(self, node: int, *, offset_s: float = 0.0, drift_ppm: int = 0) -> None:
        """Sets the clock relative to the true time; without arguments it is correct again. A running clock jumps."""
        data = _SETTING.pack(int(offset_s * 1e9), drift_ppm, time.monotonic_ns())
        with self._file(node).open("r+b" if self._file(node).exists() else "w+b") as f:
            f.write(data)  # in place: the process has the file mapped

    def _file(self, node: int) -> Path:
        return self._root / f"clock-{node}"
