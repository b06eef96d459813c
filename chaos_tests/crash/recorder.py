"""Records, with strace, the system calls with which a process writes the files of its data directory.

    python -m chaos_tests.crash.recorder OUT SUBMISSIONS [OPTION=VALUE ...]
    python -m chaos_tests.crash.recorder OUT compacting

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

from chaos_tests.crash.trace import Acked, Named, NamesSynced, Sync, Trace, Truncate, Write, dump
from smq.replication.storage.index import DATA_FILE
from smq.replication.storage.node_log import LOG_DIRECTORY

CALLS: Final = (
    "openat,pwrite64,pwritev,pwritev2,writev,write,lseek,fdatasync,fsync,ftruncate,fallocate,msync,close,rename,unlink"
)
_CALL = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+)")
_BEGUN = re.compile(r"^(\w+)\((.*) <unfinished \.\.\.>$")  # another thread makes a call before this one ends
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_NAMES: Final = "names"  # as if it were a file: what a directory's descriptor syncs


class RecordingError(Exception):
    """strace is missing, or its output is not understood."""


def record(submissions: int, options: tuple[str, ...] = ()) -> Trace:
    return _recorded("workload", str(submissions), *options)


def record_compaction() -> Trace:
    return _recorded("compacting")


def _recorded(workload: str, *arguments: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        log, directory = Path(folder) / "strace.log", Path(folder) / "node"
        worker = [sys.executable, "-m", f"chaos_tests.crash.{workload}", str(directory), *arguments]
        strace = ["strace", "-f", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", str(log), *worker]
        try:
            subprocess.run(strace, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as e:
            raise RecordingError(f"strace could not record: {e}") from e
        with log.open() as lines:
            return Reader(directory).read(lines)


class Reader:
    """Of strace's output."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._labels: dict[str, str] = {}  # by name: of the files that are there
        self._fds: dict[int, tuple[str, bool]] = {}  # of the files: the label, and whether it was opened with O_DSYNC
        self._at: dict[int, int] = {}
        self._sizes: dict[str, int] = {}
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
        if name in ("rename", "unlink"):
            return _NAMES if self._name_of(_paths(arguments)[0]) is not None else None
        return None if name == "openat" else self._fds.get(_fd(arguments), (None, False))[0]

    def _name_of(self, path: str) -> str | None:
        """Of a file that the node's rows are in."""
        if not path.startswith(self._directory + "/"):
            return None
        name = path.removeprefix(self._directory + "/")
        return name if name == DATA_FILE or name.startswith(LOG_DIRECTORY + "/") else None

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
        if result < 0:
            return
        if name == "openat":
            self._opened(_paths(arguments)[0], arguments, result)
        elif name == "rename":
            old, new = map(self._name_of, _paths(arguments))
            if old is not None and new is not None:
                self._labels[new] = self._labels.pop(old)
                self._trace.events.append(Named(new, self._labels[new], old))
        elif name == "unlink":
            if (gone := self._name_of(_paths(arguments)[0])) is not None:
                self._labels.pop(gone)
                self._trace.events.append(Named(gone, None))
        elif _fd(arguments) in self._fds:
            self._on_file(name, _fd(arguments), arguments, result)

    def _opened(self, path: str, arguments: str, fd: int) -> None:
        if path in (self._directory, f"{self._directory}/{LOG_DIRECTORY}"):
            self._fds[fd] = _NAMES, False
        elif (name := self._name_of(path)) is not None:
            if name not in self._labels:
                label = self._labels[name] = f"{name}#{len(self._sizes)}"
                self._sizes[label] = 0
                self._trace.events.append(Named(name, label))
            self._fds[fd] = self._labels[name], "O_DSYNC" in arguments

    def _acked(self, text: str) -> None:
        for line in text.splitlines():
            if line.startswith("acked "):
                self._trace.events.append(Acked(*(int(n) for n in line.split()[1:])))

    def _on_file(self, name: str, fd: int, arguments: str, result: int) -> None:
        label = self._fds[fd][0]
        if name in ("fdatasync", "fsync"):
            self._trace.events.append(NamesSynced() if label == _NAMES else Sync(label))
        elif name == "ftruncate":
            self._resized(label, int(arguments.split(",")[1]))
        elif name == "fallocate":
            at, size = (int(number) for number in arguments.split(",")[2:])
            self._resized(label, max(self._sizes[label], at + size))
        elif name == "lseek":
            self._at[fd] = result
        elif name in ("write", "writev"):
            self._write(fd, self._at.get(fd, 0), arguments, result)
            self._at[fd] = self._at.get(fd, 0) + result
        elif name in ("pwrite64", "pwritev", "pwritev2"):
            arguments = arguments.removesuffix(", 0") if name == "pwritev2" else arguments  # no flags
            self._write(fd, int(re.sub(r".*, (\d+)(?:, \w+)?$", r"\1", arguments, flags=re.DOTALL)), arguments, result)
        else:
            raise RecordingError(f"{name} of the data file is not understood")

    def _resized(self, label: str, size: int) -> None:
        self._sizes[label] = size
        self._trace.events.append(Truncate(label, size))

    def _write(self, fd: int, offset: int, arguments: str, size: int) -> None:
        data = _bytes(arguments)
        if len(data) != size:
            raise RecordingError(f"a write of {size} bytes shows {len(data)}")
        file, is_synced = self._fds[fd]
        self._sizes[file] = max(self._sizes[file], offset + size)
        self._trace.events.append(Write(file, offset, data, is_synced))


def _fd(arguments: str) -> int:
    return int(arguments.split(",", 1)[0])


def _bytes(arguments: str) -> bytes:
    return b"".join(bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(arguments))


def _paths(arguments: str) -> list[str]:
    return [bytes.fromhex(text.replace("\\x", "")).decode(errors="replace") for text in _STRING.findall(arguments)]


if __name__ == "__main__":
    out, what, *given = sys.argv[1:]
    made = record_compaction() if what == "compacting" else record(int(what), tuple(given))
    Path(out).write_bytes(dump(made))
