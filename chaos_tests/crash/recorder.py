"""Records, with strace, the system calls with which a process writes the files of its store and its write-ahead file.

    python -m chaos_tests.crash.recorder OUT ENGINE SUBMISSIONS [OPTION=VALUE ...]
    python -m chaos_tests.crash.recorder OUT ENGINE compacting

Owns the reading of strace's output. An unknown call on these files is an error, so that no write can be missed; so are
two at a time on one file, because a sync need not wait for a write that began after it. It needs strace, but not root:
a process may trace its own child.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from chaos_tests.crash.stores import FILES
from chaos_tests.crash.trace import Acked, Sync, Trace, Truncate, Write, dump
from smq.replication.storage.engine import Engine
from smq.replication.storage.write_ahead import NEW, WRITE_AHEAD_FILE

CALLS: Final = "openat,pwrite64,pwritev,pwritev2,writev,write,lseek,fdatasync,fsync,ftruncate,fallocate,msync,close"
_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+)")
_BEGUN = re.compile(r"^(\w+)\((.*) <unfinished \.\.\.>$")  # another thread makes a call before this one ends
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


class RecordingError(Exception):
    """strace is missing, or its output is not understood."""


def record(submissions: int, options: tuple[str, ...] = (), engine: Engine = Engine.LMDB) -> Trace:
    return _recorded("workload", engine, str(submissions), *options)


def record_compaction(engine: Engine = Engine.LMDB) -> Trace:
    return _recorded("compacting", engine)


def _recorded(workload: str, engine: Engine, *arguments: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        log, directory = Path(folder) / "strace.log", Path(folder) / "node"
        worker = [sys.executable, "-m", f"chaos_tests.crash.{workload}", str(directory), engine, *arguments]
        strace = ["strace", "-f", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", str(log), *worker]
        try:
            subprocess.run(strace, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as e:
            raise RecordingError(f"strace could not record: {e}") from e
        with log.open() as lines:
            return Reader(directory, engine).read(lines)


class Reader:
    """Of strace's output."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        made = {WRITE_AHEAD_FILE + NEW: WRITE_AHEAD_FILE}  # renamed before the first acknowledgement
        names = {name: name for name in FILES[engine]} | made
        self._names = {_hex(str(directory / path)): name for path, name in names.items()}
        self._fds: dict[int, tuple[str, bool]] = {}  # of the files: the name, and whether it was opened with O_DSYNC
        self._at: dict[int, int] = {}
        self._trace = Trace()

    def read(self, lines: Iterable[str]) -> Trace:
        begun: dict[str, tuple[str, str]] = {}  # by thread: calls that have not ended
        for line in lines:
            thread, _, text = line.rstrip("\n").partition(" ")
            text = text.lstrip()
            if (found := _BEGUN.match(text)) is not None:
                self._refuse_overlap(found[1], found[2], begun)
                if not self._call_begins(found[1], found[2]):
                    begun[thread] = found[1], found[2]
                continue
            if (resumed := _RESUMED.match(text)) is not None:
                name, arguments = begun.pop(thread, ("", ""))
                text = f"{name}({arguments}{resumed[1]}"
            found = _CALL.match(text)
            if found is not None:
                self._refuse_overlap(found[1], found[2], begun)
                if not self._call_begins(found[1], found[2]):
                    self._call_ends(found[1], found[2], int(found[3]))
        return self._trace

    def _refuse_overlap(self, name: str, arguments: str, begun: dict[str, tuple[str, str]]) -> None:
        file = self._file_of(name, arguments)
        if file is not None and any(file == self._file_of(*other) for other in begun.values()):
            raise RecordingError(f"two calls at a time on {file}: {name}({arguments[:120]}")

    def _file_of(self, name: str, arguments: str) -> str | None:
        return None if name == "openat" else self._fds.get(_fd(arguments), (None, False))[0]

    def _call_begins(self, name: str, arguments: str) -> bool:
        """Whether it counts from its beginning on: what is printed may be read before the call has ended, and another
        thread may get a number that is being closed."""
        if name == "close":
            self._fds.pop(_fd(arguments), None)
            return True
        if name == "write" and _fd(arguments) == 1:
            self._acked(_bytes(arguments).decode())
            return True
        return False

    def _call_ends(self, name: str, arguments: str, result: int) -> None:
        if name == "openat":
            path = _STRING.search(arguments)
            if path is not None and path[1] in self._names and result >= 0:
                self._fds[result] = self._names[path[1]], "O_DSYNC" in arguments
        elif _fd(arguments) in self._fds:
            self._on_file(name, _fd(arguments), arguments, result)

    def _acked(self, text: str) -> None:
        for line in text.splitlines():
            if line.startswith("acked "):
                self._trace.events.append(Acked(*(int(n) for n in line.split()[1:])))

    def _on_file(self, name: str, fd: int, arguments: str, result: int) -> None:
        if name in ("fdatasync", "fsync"):
            self._trace.events.append(Sync(self._fds[fd][0]))
        elif name == "ftruncate":
            self._trace.events.append(Truncate(self._fds[fd][0], int(arguments.split(",")[1])))
        elif name == "lseek":
            self._at[fd] = result
        elif name in ("write", "writev"):
            self._write(fd, self._at.get(fd, 0), arguments, result)
            self._at[fd] = self._at.get(fd, 0) + result
        elif name in ("pwrite64", "pwritev", "pwritev2"):
            self._write(fd, int(re.sub(r".*, (\d+)(?:, \w+)?$", r"\1", arguments, flags=re.DOTALL)), arguments, result)
        else:
            raise RecordingError(f"{name} of the data file is not understood")

    def _write(self, fd: int, offset: int, arguments: str, size: int) -> None:
        data = _bytes(arguments)
        if len(data) != size:
            raise RecordingError(f"a write of {size} bytes shows {len(data)}")
        file, is_synced = self._fds[fd]
        self._trace.events.append(Write(file, offset, data, is_synced))


def _fd(arguments: str) -> int:
    return int(arguments.split(",", 1)[0])


def _bytes(arguments: str) -> bytes:
    return b"".join(bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(arguments))


def _hex(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


if __name__ == "__main__":
    out, chosen, what, *given = sys.argv[1:]
    is_compaction = what == "compacting"
    made = record_compaction(Engine(chosen)) if is_compaction else record(int(what), tuple(given), Engine(chosen))
    Path(out).write_bytes(dump(made))
