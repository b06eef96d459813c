"""Podman with a storage of its own, and a base for images that comes from Debian's packages.

Owns the commands, the containers that were started here, and their end. No registry of images is asked: the base has
the name that a Containerfile gives, and stands for it. It needs root.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TOOLS: Final = ("podman", "mmdebstrap")
CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"
# More than a user without CAP_SYS_RESOURCE may have is podman's default.
LIMITS: Final = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
BASE_S, BUILD_S, COMMAND_S = 600, 900, 120  # downloads included


class Missing(RuntimeError):
    """No image can be built here. The message says why."""


def why_not() -> str | None:
    """Why there are no containers here; None if there are."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + (["runc"] if runtime() is None else [])
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install {' '.join(missing)})"
    return None if os.geteuid() == 0 else "only root may make a root directory of Debian's packages"


def runtime() -> str | None:
    """What runs containers here: runc, or crun, which knows only one hierarchy of cgroups."""
    names = ["runc", "crun"] if Path("/sys/fs/cgroup/cgroup.controllers").exists() else ["runc"]
    return next((name for name in names if shutil.which(name)), None)


class Podman:
    """Everything that it keeps is in the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._containers: list[str] = []
        own = [f"--{name}={directory / name}" for name in ("root", "runroot", "tmpdir")]
        self._command = ["podman", *own, "--storage-driver=vfs", "--cgroup-manager=cgroupfs", f"--runtime={runtime()}"]

    def run(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Its output; AssertionError with everything that it wrote if it fails."""
        done = self.try_run(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"podman {arguments}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def try_run(self, *arguments: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        command = [*self._command, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT)

    def make_base(self, name: str, release: str, packages: Sequence[str]) -> None:
        """An image of Debian with these packages, and `python` for its Python. `Missing` without a mirror."""
        archive = self._directory / "base.tar"
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(packages)}", release, str(archive)]
        command.insert(1, '--customize-hook=ln -s python3 "$1/usr/bin/python"')
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BASE_S)
        except subprocess.TimeoutExpired as e:
            raise Missing(f"mmdebstrap took more than {BASE_S} s") from e
        if done.returncode:
            raise Missing(f"mmdebstrap ended with {done.returncode}: {done.stderr[-500:]}")
        self.run("import", str(archive), name)
        archive.unlink()

    def build(self, containerfile: Path, image: str) -> None:
        """From the root of the project, with the certificates that this machine trusts."""
        options = ["--format=docker", "--pull=never", "--network=host", "--layers=false", *LIMITS]
        if Path(CERTIFICATES).exists():
            options.append(f"--volume={CERTIFICATES}:{CERTIFICATES}:ro")
        self.run("build", *options, f"--file={containerfile}", f"--tag={image}", ".", timeout_s=BUILD_S)

    def start(self, *arguments: str) -> str:
        """The id of a new container, which runs without any network but its own loopback."""
        made = self.run("create", "--network=none", *LIMITS, *arguments)
        self._containers.append(made)
        self.run("start", made)
        return made

    def stop(self, container: str) -> tuple[int, float]:
        """By the image's own signal: its exit code, and the seconds until its end."""
        began = time.monotonic()
        self.run("stop", "--time=60", container)
        took_s = time.monotonic() - began
        return self.exit_code(container), took_s

    def exit_code(self, container: str) -> int:
        """Of a container that has ended, or ends soon."""
        return int(self.run("wait", container))

    def is_healthy(self, container: str) -> bool:
        """By the image's own check."""
        return self.try_run("healthcheck", "run", container).returncode == 0

    def started_ms(self, container: str) -> int:
        return int(self.run("inspect", "--format={{.State.StartedAt.UnixMilli}}", container))

    def logs(self, container: str) -> str:
        done = self.try_run("logs", container)
        return done.stdout + done.stderr

    def close(self) -> None:
        for container in self._containers:
            self.try_run("rm", "--force", "--time=0", container)
        shutil.rmtree(self._directory)
