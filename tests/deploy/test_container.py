"""The image's recipe, the compose file, and the node as in the image: on a read-only root, without privileges."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ServerConfig, load_config
from smq.testing.node_process import wait_for
from tests.deploy.machines import environment
from tests.deploy.programs import go_program
from tests.kafka.foreign.clients import Missing
from tests.skips import needs, program
from tests.unit.coordinator.server.test_self_check import shared_by

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "deploy/container"
MONITORING = ROOT / "deploy/monitoring"
CONTAINERFILE = (CONTAINER / "Containerfile").read_text()
PATIENCE_S = 120.0  # nothing is compiled yet, so a busy machine needs half a minute for a start


# ---------------------------------------------------------------------------------------------------- the recipe
def stages() -> list[list[tuple[str, str]]]:
    """Per stage its instructions, without comments and with continued lines joined."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest.strip()))
    return found


def test_the_image_has_no_compiler_and_runs_without_privileges() -> None:
    build, image = stages()
    assert image[0] == ("FROM", build[0][1].removesuffix(" AS build"))
    assert image[0][1].endswith("-slim")
    assert not [rest for word, rest in image if word == "RUN" and re.search(r"apt|pip|gcc|curl", rest)]
    given = dict(image)
    assert given["USER"] == "65532:65532"
    assert (given["ENTRYPOINT"], given["CMD"]) == ('["/opt/smq/bin/smq"]', '["serve"]')  # no shell between the signals
    assert given["STOPSIGNAL"] == "SIGTERM"


def test_the_image_and_the_compose_file_ask_the_node_by_its_own_settings(compose: dict[str, Any]) -> None:
    *options, command = dict(stages()[1])["HEALTHCHECK"].partition(" CMD ")[::2]
    assert json.loads(command) == ["/opt/smq/bin/smq", "health"]
    given = dict(option.removeprefix("--").split("=") for option in options[0].split())
    for name, (service, _) in nodes_of(compose).items():
        check = dict(service["healthcheck"])
        assert check.pop("test") == ["CMD", *json.loads(command), "--ready"], name
        assert {key.replace("_", "-"): value for key, value in check.items()} == given


def test_the_image_is_built_of_files_that_are_there_and_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in stages()[0] if word == "COPY"]
    sources = {source for paths in copied for source in paths}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_the_constraints_of_the_build_are_the_lock_without_hashes(tmp_path: Path) -> None:
    (command,) = re.findall(r"sed (.*?) server\.txt", CONTAINERFILE)
    made = subprocess.run(
        f"sed {command} server.txt", shell=True, cwd=ROOT / "locks", capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in made.splitlines() if not line.startswith("#")]
    assert lines == re.findall(r"^\S+==[^\\\n]*?(?= \\)", (ROOT / "locks/server.txt").read_text(), re.MULTILINE)
    assert any(line.startswith("lmdb==") for line in lines)


# ------------------------------------------------------------------------------------------------------- compose
@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    return found


def nodes_of(compose: dict[str, Any]) -> dict[str, tuple[dict[str, Any], ServerConfig]]:
    """Each node's service, and what its node reads."""
    found = {}
    for name, service in compose["services"].items():
        if name.startswith("node-"):
            variables = {"SMQ_DATA_DIR": "/var/lib/smq/data", **service["environment"]}
            found[name] = service, load_config(None, environment=variables)
    return found


def test_smq_reads_what_each_container_gets(compose: dict[str, Any]) -> None:
    nodes = nodes_of(compose)
    assert [config.node_id for _, config in nodes.values()] == [1, 2, 3]
    for name, (service, config) in nodes.items():
        assert config.peers[config.node_id] == (name, config.nodes_listen[1])
        assert config.peers == nodes["node-1"][1].peers
        assert (service["read_only"], service["cap_drop"], service["tmpfs"]) == (True, ["ALL"], ["/tmp"])


def test_clients_on_the_machine_get_the_published_ports(compose: dict[str, Any]) -> None:
    told = []
    for service, config in nodes_of(compose).values():
        machine = config.listeners["machine"]
        assert machine.grpc_address is not None
        assert machine.kafka_address is not None
        for listened, advertised in (
            (machine.grpc_address, machine.grpc_advertised),
            (machine.kafka_address, machine.kafka_advertised),
        ):
            assert advertised is not None
            assert f"{format_address(advertised)}:{listened[1]}" in service["ports"]
            told.append(advertised)
    assert len(set(told)) == 6
    assert shared_by(config for _, config in nodes_of(compose).values()) == []
    assert all(port.startswith("127.0.0.1:") for s in compose["services"].values() for port in s["ports"])


def test_prometheus_scrapes_every_node(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["scrape_configs"]
    advertised = [config.http_advertised for _, config in nodes_of(compose).values()]
    assert job["static_configs"][0]["targets"] == [format_address(a) for a in advertised if a is not None]
    (source,) = yaml.safe_load((CONTAINER / "grafana-datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def mounts_of(compose: dict[str, Any], service: str) -> dict[PurePosixPath, Path]:
    """Where the container sees which file of this project. Other volumes are of a name."""
    found = {}
    for volume in compose["services"][service]["volumes"]:
        source, target, *options = volume.split(":")
        if "/" in source:
            assert options == ["ro"], volume
            found[PurePosixPath(target)] = CONTAINER / source
        else:
            assert source in compose["volumes"], volume
    return found


def test_every_file_that_a_container_mounts_is_there(compose: dict[str, Any]) -> None:
    mounted = [path for service in compose["services"] for path in mounts_of(compose, service).values()]
    assert len(mounted) >= 5
    assert [path for path in mounted if not path.is_file()] == []  # compose would make a directory of that name


def test_prometheus_has_the_alerts_and_grafana_the_dashboard(compose: dict[str, Any]) -> None:
    home = PurePosixPath("/etc/prometheus")
    rules = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["rule_files"]
    mounts = mounts_of(compose, "prometheus")
    assert mounts[home / "prometheus.yml"] == CONTAINER / "prometheus.yml"
    assert [mounts[home / rule].resolve() for rule in rules] == [MONITORING / "alerts.yml"]

    mounts = mounts_of(compose, "grafana")
    provisioning = PurePosixPath("/etc/grafana/provisioning")
    assert mounts[provisioning / "datasources/smq.yml"] == CONTAINER / "grafana-datasource.yml"
    (provider,) = yaml.safe_load(mounts[provisioning / "dashboards/smq.yml"].read_text())["providers"]
    shown = [path for target, path in mounts.items() if target.parent == PurePosixPath(provider["options"]["path"])]
    assert [path.resolve() for path in shown] == [MONITORING / "dashboard.json"]


@needs("promtool")
def test_prometheus_takes_its_files_as_they_are_mounted(compose: dict[str, Any], tmp_path: Path) -> None:
    for target, path in mounts_of(compose, "prometheus").items():
        shutil.copy(path, tmp_path / target.name)
    command = [str(program("promtool")), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "1 rule files found" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(1800)  # the parser is built first
def test_the_compose_specification_has_every_key(tmp_path: Path) -> None:
    """By the parser that `docker compose config` uses."""
    try:
        parser = go_program("compose", tmp_path)
    except Missing as e:
        pytest.skip(f"the parser of compose files cannot be built here: {e}")

    def parse(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(parser), str(path)], capture_output=True, text=True, check=False, timeout=60)

    text = (CONTAINER / "compose.yaml").read_text()
    good = parse(CONTAINER / "compose.yaml")
    assert good.returncode == 0, good.stderr
    assert yaml.safe_load(good.stdout)["services"].keys() == yaml.safe_load(text)["services"].keys()
    for right, wrong, complaint in (
        ("read_only:", "readonly:", r"services\.node-[123]\.readonly"),
        ("networks: [smq]", "networks: [other]", "undefined network other"),
    ):
        (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong))
        assert re.search(complaint, parse(tmp_path / "wrong.yaml").stderr)


# --------------------------------------------------------------------------------- the node as in the container
# A root that cannot be written, an empty /tmp, and a user without any capability: as the image's user is.
_CONTAINED = """
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/volume /mnt/venv
mount --bind "$VOLUME" /mnt/volume
mount --bind "$VENV" /mnt/venv
mount -t tmpfs tmpfs /tmp
mount -o remount,bind,ro /
cd /
exec unshare --user --map-user=65532 --map-group=65532 "$@"
"""


def why_not() -> str | None:
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    probe = ["unshare", "--mount", "unshare", "--user", "--map-user=65532", "true"]
    tried = subprocess.run(probe, capture_output=True, check=False)
    return None if tried.returncode == 0 else "this user may not make namespaces (root may)"


class Contained:
    """The entry point of the image on a volume, without a container."""

    def __init__(self, volume: Path, installed: Path) -> None:
        reason = why_not()
        if reason is not None:
            pytest.skip(f"no read-only root here: {reason}")
        peer, self.grpc, self.http = free_ports(3)
        self._env = environment(
            {
                "VOLUME": str(volume),
                "VENV": str(installed.parent),
                "SMQ_NODE_ID": "1",
                "SMQ_CLUSTER_ID": "c",
                "SMQ_DATA_DIR": "/mnt/volume/data",
                "SMQ_PEERS__1": f"127.0.0.1:{peer}",
                "SMQ_GRPC_ADDRESS": f"127.0.0.1:{self.grpc}",
                "SMQ_HTTP_ADDRESS": f"127.0.0.1:{self.http}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": "",
            }
        )

    def start(self, log: Path, *command: str, data_dir: str = "/mnt/volume/data") -> subprocess.Popen[bytes]:
        command = command or ("/mnt/venv/bin/python", "-m", "smq.coordinator.cli.main", "serve", "--first-start")
        arguments = ["unshare", "--mount", "sh", "-ec", _CONTAINED, "sh", *command]
        with log.open("wb") as file:
            env = self._env | {"SMQ_DATA_DIR": data_dir}
            return subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def is_ready(self) -> bool:
        code = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{self.http}/readyz', timeout=2)"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    made = tmp_path / "volume"
    made.mkdir()
    return made


@pytest.mark.full
@pytest.mark.cluster
def test_the_entry_point_runs_on_a_read_only_root_and_ends_on_sigterm(
    volume: Path, installed: Path, tmp_path: Path
) -> None:
    node, log = Contained(volume, installed), tmp_path / "node.log"
    began = time.monotonic()
    process = node.start(log)
    try:
        wait_for("the node is ready", node.is_ready, PATIENCE_S)
        sys.stdout.write(f"ready {time.monotonic() - began:.1f} s after its start\n")
        assert (volume / "data" / "data.mdb").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    touched = node.start(log, "touch", "/opt/x")
    assert touched.wait(PATIENCE_S) != 0
    assert "Read-only file system" in log.read_text()


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("mode", "data_dir"), [(0o755, "/mnt/volume/data"), (0o700, "/mnt/volume"), (0o777, "/mnt/volume")]
)
def test_a_volume_of_another_user_is_refused_with_both_users(
    volume: Path, installed: Path, tmp_path: Path, mode: int, data_dir: str
) -> None:
    node, log = Contained(volume, installed), tmp_path / "node.log"
    volume.chmod(mode)
    shutil.chown(volume, 1234, 1234)
    process = node.start(log, data_dir=data_dir)
    assert process.wait(PATIENCE_S) == 1
    assert re.search(
        r"belongs to user \d+, and this process is user 65532: give it to that user \(chown\)", log.read_text()
    )
