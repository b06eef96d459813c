"""The disks of a run's nodes, and their power cuts.

Owns plain directories (on any machine) and disk images (one ext4 file system on a loop device per node, if the machine
allows it). A power cut shuts the file system down without flushing its log: unsynced writes are gone, as when a machine
loses power. Mounts are private to the run's own mount namespace. It must never look into a file.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

_EXT4_IOC_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = 2
_IMAGE_MIB: Final = 1024  # sparse: unwritten blocks take no space
_TOOLS: Final = ("mkfs.ext4", "mount", "umount", "losetup")


class Power(Protocol):
    """The power supply of a run's disks."""

    def cut(self, node: int) -> None:
        """Unsynced writes are lost from now on. The caller kills the process, then calls `restore`."""

    def restore(self, node: int) -> None: ...


class Disks(Protocol):
    """The data directories of a run's nodes."""

    name: str
    power: Power | None  # None if it cannot be cut

    def prepare(self, node: int, data: Path) -> None:
        """Called before a node's first start; `data` does not exist yet."""

    def wipe(self, node: int) -> None:
        """Replaces the disk by an empty one. The node is not running."""

    def close(self) -> None: ...


class Directories:
    """Implements Disks: no power cuts, because the kernel keeps the writes of a dead process."""

    name = "directories"
    power: Power | None = None

    def __init__(self) -> None:
        self._data: dict[int, Path] = {}

    def prepare(self, node: int, data: Path) -> None:
        self._data[node] = data

    def wipe(self, node: int) -> None:
        shutil.rmtree(self._data[node], ignore_errors=True)

    def close(self) -> None:
        pass


class Images:
    """Implements Disks, and their Power."""

    name = "ext4 images"

    def __init__(self, root: Path) -> None:
        self.power: Power | None = self
        self._root = root
        self._data: dict[int, Path] = {}

    def prepare(self, node: int, data: Path) -> None:
        self._data[node] = data
        image = self._image(node)
        image.parent.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as f:
            f.truncate(_IMAGE_MIB << 20)
        _run("mkfs.ext4", "-q", "-F", str(image))
        data.mkdir(parents=True)
        self._mount(node)
        shutil.rmtree(data / "lost+found")

    def cut(self, node: int) -> None:
        fd = os.open(self._data[node], os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restore(self, node: int) -> None:
        _run("umount", str(self._data[node]))
        self._mount(node)

    def wipe(self, node: int) -> None:
        for entry in self._data[node].iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def close(self) -> None:
        """The nodes are down. The contents of the disks stay as plain directories, to investigate a finding."""
        for node, data in self._data.items():
            kept = data.with_name(f"{data.name}.kept")
            with suppress(OSError, shutil.Error):  # a disk without power cannot be read
                shutil.copytree(data, kept)
            subprocess.run(["umount", "--lazy", str(data)], capture_output=True, check=False)
            self._image(node).unlink(missing_ok=True)
            if kept.exists() and not any(data.iterdir()):
                kept.replace(data)

    def _image(self, node: int) -> Path:
        return self._root / f"disk-{node}.img"

    def _mount(self, node: int) -> None:
        _run("mount", "-o", "loop", str(self._image(node)), str(self._data[node]))


def why_no_images() -> str | None:
    """Why disk images are impossible here; None if they are possible."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed"
    return None if os.geteuid() == 0 else "only root may mount a disk image"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
