"""The image: built of the Containerfile, and run as the compose file runs it, on a read-only root without privileges.

Its base is made here, of Debian with its own Python 3.13. `pytest -s` shows sizes and times.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from smq import __version__
from smq.coordinator.tls.certificates import make_authority, make_node
from smq.raft_state.ids import NodeId
from smq.testing.node_process import wait_for
from tests.deploy.podman import ROOT, Missing, Podman, why_not

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(1800)]

CONTAINERFILE = ROOT / "deploy/container/Containerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy/container/compose.yaml").read_text())
NODE: dict[str, Any] = COMPOSE["services"]["node-1"]
IMAGE = f"smq:{__version__}"
SMQ = "/opt/smq/bin/smq"
ADDED_MB_MAX = 150
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "cargo", "rustc", "go", "pip", "pip3")


def report(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@dataclass(frozen=True, slots=True)
class Built:
    podman: Podman
    base: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no image is built here: {reason}")
    (base,) = set(re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE))
    assert base == "python:3.13-slim"  # Debian 13 has this Python itself
    podman = Podman(tmp_path_factory.mktemp("podman"))
    try:
        podman.make_base(base, "trixie", ("python3-venv", "ca-certificates"))
        began = time.monotonic()
        podman.build(CONTAINERFILE, IMAGE)
        report(f"the build took {time.monotonic() - began:.0f} s")
        yield Built(podman, base)
    except Missing as e:
        pytest.skip(f"no image is built here: {e}")
    finally:
        podman.close()


def options_of_compose(volume: Path) -> list[str]:
    """What the compose file gives node 1, which is alone here."""
    variables = {k: v for k, v in NODE["environment"].items() if k not in ("SMQ_PEERS__2", "SMQ_PEERS__3")}
    return [
        "--add-host=node-1:127.0.0.1",
        f"--volume={volume}:/var/lib/smq",
        f"--read-only={str(NODE['read_only']).lower()}",
        "--read-only-tmpfs=false",
        *(f"--tmpfs={path}" for path in NODE["tmpfs"]),
        *(f"--cap-drop={name}" for name in NODE["cap_drop"]),
        *(f"--security-opt={text.removesuffix(':true')}" for text in NODE["security_opt"]),
        *(f"--env={name}={value}" for name, value in variables.items()),
    ]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    made = tmp_path / "volume"
    made.mkdir()
    return made


def event(log: str, name: str) -> dict[str, Any]:
    """The one line of the log with this event."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (found,) = [line for line in lines if line["event"] == name]
    return dict(found)


def first_start(podman: Podman, container: str) -> None:
    """As the compose file says, in the node's own container, once it answers."""
    wait_for("the node begins a cluster", lambda: podman.try_run("exec", container, SMQ, "first-start").returncode == 0)


def is_ready(podman: Podman, container: str) -> bool:
    """By the compose file's own check."""
    kind, *command = NODE["healthcheck"]["test"]
    assert kind == "CMD"
    return podman.try_run("exec", container, *command).returncode == 0


def test_the_image_adds_little_and_no_compiler(built: Built) -> None:
    sizes = [int(built.podman.run("image", "inspect", "--format={{.Size}}", name)) for name in (IMAGE, built.base)]
    added = sizes[0] - sizes[1]
    report(f"{added / 1e6:.0f} MB are added to a base of {sizes[1] / 1e6:.0f} MB")
    assert 0 < added / 1e6 < ADDED_MB_MAX
    looked = f'for name in {" ".join(COMPILERS)}; do command -v "$name"; done; echo looked'
    container = built.podman.start("--entrypoint=sh", IMAGE, "-c", looked)
    assert built.podman.exit_code(container) == 0
    assert built.podman.logs(container).split() == ["looked"]


def test_the_entry_point_is_the_command(built: Built) -> None:
    container = built.podman.start("--read-only", "--cap-drop=ALL", IMAGE, "--version")
    assert built.podman.exit_code(container) == 0
    assert built.podman.logs(container).split()[-1] == __version__


def test_a_container_is_healthy_keeps_its_records_and_ends_on_sigterm(built: Built, volume: Path) -> None:
    podman = built.podman
    volume.chmod(0o777)
    container = podman.start(*options_of_compose(volume), IMAGE)
    first_start(podman, container)
    wait_for("the node is ready", lambda: is_ready(podman, container), timeout_s=60)
    served_ms = datetime.fromisoformat(event(podman.logs(container), "serving")["timestamp"]).timestamp() * 1000
    report(f"the node serves {served_ms - podman.started_ms(container):.0f} ms after its container's start")

    def smq(*arguments: str) -> str:
        return podman.run("exec", container, SMQ, *arguments, "--bootstrap=node-1:7401")

    assert podman.is_healthy(container)
    smq("topic", "create", "t")
    podman.run("exec", container, "sh", "-c", f"seq 100 | {SMQ} produce t --bootstrap node-1:7401")
    code, took_s = podman.stop(container)
    log = podman.logs(container)
    assert code == 0, log
    assert event(log, "stopped")["node"] == 1
    report(f"`podman stop` took {took_s:.1f} s")
    assert not podman.is_healthy(container)

    podman.run("start", container)
    wait_for("the node is ready again", lambda: is_ready(podman, container), timeout_s=60)
    assert smq("consume", "t").split() == [str(number) for number in range(1, 101)]


def test_a_container_has_no_privileges_and_cannot_write_its_root(built: Built, volume: Path) -> None:
    podman = built.podman
    volume.chmod(0o777)
    container = podman.start(*options_of_compose(volume), IMAGE)
    first_start(podman, container)
    wait_for("the node is ready", lambda: is_ready(podman, container), timeout_s=60)
    status = dict(line.split(":\t", 1) for line in podman.run("exec", container, "cat", "/proc/1/status").splitlines())
    assert status["Name"] == "smq"
    assert status["Uid"].split() == ["65532"] * 4
    assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert status["NoNewPrivs"] == "1"
    for path in ("/x", "/opt/smq/x", "/var/x", "/etc/x"):
        refused = podman.try_run("exec", container, "touch", path)
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stderr
    podman.run("exec", container, "touch", "/tmp/x", "/var/lib/smq/x")


def test_the_images_own_check_fits_a_node_with_tls(built: Built, volume: Path, tmp_path: Path) -> None:
    """A file of settings instead of variables, and probes for clients with a certificate alone."""
    podman, files = built.podman, tmp_path / "files"
    volume.chmod(0o777)
    make_authority(files, "the test's authority")
    made = make_node(files, cluster_id="tls", node_id=NodeId(1), hosts=("node-1",)).directory
    (made / "node.toml").write_text(
        'node_id = 1\ncluster_id = "tls"\ndata_dir = "/var/lib/smq/data"\nhttp_address = "[::]:7402"\n'
        'http_advertised = "node-1:7402"\n[peers]\n1 = "127.0.0.1:7400"\n'
        '[tls]\nca = "ca.crt"\ncertificate = "tls.crt"\nkey = "tls.key"\n'
    )
    for path in (made, *made.iterdir()):
        os.chown(path, 65532, 65532)
    options = (f"--volume={volume}:/var/lib/smq", f"--volume={made}:/etc/smq:ro", "--env=SMQ_CONFIG=/etc/smq/node.toml")
    container = podman.start("--read-only", "--cap-drop=ALL", *options, IMAGE)
    first_start(podman, container)
    wait_for("the node is ready", lambda: is_ready(podman, container), timeout_s=60)
    assert podman.is_healthy(container)
    plain = "--env=SMQ_HTTP__TLS=false"
    assert podman.try_run("exec", plain, container, SMQ, "health").returncode == 1


def test_a_volume_that_belongs_to_root_is_refused(built: Built, volume: Path) -> None:
    container = built.podman.start(*options_of_compose(volume), IMAGE)
    assert built.podman.exit_code(container) == 1
    assert "belongs to user 0, and this process is user 65532" in built.podman.logs(container)
