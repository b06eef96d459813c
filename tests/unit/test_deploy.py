"""The files of deploy/ are valid: the server's parser reads the sample configuration, and systemd the unit."""

import configparser
import dataclasses
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from smq import __version__
from smq.coordinator.config.node_toml import ServerConfig, TlsConfig, known_keys, load_config, parse_config
from smq.replication.node_config import NodeConfig
from tests.skips import needs
from tests.unit.coordinator.server.test_self_check import shared_by

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/smq.service"


def test_sample_configuration_is_accepted_by_the_server() -> None:
    config = load_config(DEPLOY / "node.toml")
    assert sorted(config.peers) == [1, 2, 3]
    assert config.data_dir == Path("/var/lib/smq")


def test_sample_configuration_shows_every_key_and_its_real_default() -> None:
    text = (DEPLOY / "node.toml").read_text()
    for field in dataclasses.fields(ServerConfig):
        assert re.search(rf"^(# )?{field.name} =|^(# )?\[{field.name}[].]", text, re.MULTILINE), field.name
    keys = {key[-1] for key in known_keys() if key[0] in ("listeners", "http", "tls") and key[-1] != "*"}
    assert {key for key in keys if not re.search(rf"^(# )?{key} = ", text, re.MULTILINE)} == set()
    uncommented = re.sub(r"^# (\w+ = |\[)", r"\1", text, flags=re.MULTILINE)
    config = parse_config(uncommented, base_dir=DEPLOY)
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    assert config.tls is not None
    assert config.tls.client_certificates is TlsConfig.__dataclass_fields__["client_certificates"].default
    assert config.insecure is defaults["insecure"]
    assert config.request_bytes_max == defaults["request_bytes_max"]
    tuned = {field.name: field.default for field in dataclasses.fields(NodeConfig)}
    assert config.tuning
    assert {key: tuned[key] for key in config.tuning} == config.tuning


def test_unit_starts_the_command_with_the_sample_directory_and_no_privileges() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys keep their case
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert service["ExecStart"].endswith("smq serve --config /etc/smq/node.toml")
    assert f"/var/lib/{service['StateDirectory']}" == str(load_config(DEPLOY / "node.toml").data_dir)
    (audit,) = re.findall(r'^# file = "(.*)/audit.jsonl"$', (DEPLOY / "node.toml").read_text(encoding="utf-8"), re.M)
    assert f"/var/log/{service['LogsDirectory']}" == audit, "all else is read-only for the service"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"


@needs("systemd-analyze")
def test_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    """`verify` looks for the executable, so it is replaced by one that exists here."""
    unit = tmp_path / "smq.service"
    unit.write_text(UNIT.read_text().replace("/opt/smq/.venv/bin/smq", "/bin/true"))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], check=False, capture_output=True, text=True
    )
    if "Failed to" in result.stderr and "smq.service" not in result.stderr:
        pytest.skip(f"systemd-analyze does not work here: {result.stderr.strip()[:200]}")
    complaints = [line for line in result.stderr.splitlines() if "smq.service" in line and "does not exist" not in line]
    assert complaints == []


def walk_through_config() -> str:
    """`/etc/smq/node.toml` of the three machines in deploy/README.md."""
    text = (DEPLOY / "README.md").read_text()
    (block,) = re.findall(r"`/etc/smq/node.toml`:\n\n +<!--.*-->\n +```toml\n((?: {3}.*\n|\n)+?) {3}```", text)
    return textwrap.dedent(block)


def walk_through(node: int) -> ServerConfig:
    """What a node of them reads."""
    return parse_config(walk_through_config(), base_dir=DEPLOY, environment={"SMQ_NODE_ID": str(node)})


@needs("make")
def test_the_walk_through_installs_what_a_server_needs_and_nothing_else(tmp_path: Path) -> None:
    """`make setup` brought 1.5 GB, Spark and linters among them."""
    (target,) = re.findall(r"Put the project at `/opt/smq` and run `make (\w+)`", (DEPLOY / "README.md").read_text())
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(re.findall(r"locks/(\w+)\.txt", done.stdout)) == {"server", "uv"}
    assert "[" not in " ".join(re.findall(r"--editable \S+", done.stdout))  # no extra beside the lock


def test_the_walk_through_of_three_machines_has_a_configuration_that_each_of_them_accepts() -> None:
    text = (DEPLOY / "README.md").read_text()
    for node in (1, 2, 3):
        config = walk_through(node)
        assert config.kafka_advertised == (f"n{node}.example.org", 9092)
        assert config.peers[config.node_id] == (f"n{node}.example.org", 7400)
    assert "SMQ_NODE_ID=1` in `/etc/smq/environment`" in text
    assert "EnvironmentFile=-/etc/smq/environment" in UNIT.read_text()


def test_no_node_of_the_walk_through_ends_for_an_address_of_another() -> None:
    assert shared_by(walk_through(node) for node in (1, 2, 3)) == []


@pytest.mark.parametrize(
    ("tool", "file"),
    [
        pytest.param(tool, file, marks=needs(tool))
        for tool, file in (("systemd-sysusers", "smq.sysusers.conf"), ("systemd-tmpfiles", "smq.tmpfiles.conf"))
    ],
)
def test_the_user_and_the_directories_are_valid_for_systemd(tool: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\nsmq:x:990:\n")
    path = DEPLOY / "systemd" / file
    command = [tool, f"--root={tmp_path}", *(["--create"] if tool == "systemd-tmpfiles" else []), str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if tool == "systemd-tmpfiles":
        assert (tmp_path / "etc/smq/tls").is_dir()
    else:
        assert re.search(
            r"^smq:.*:/var/lib/smq:/usr/sbin/nologin$", (tmp_path / "etc/passwd").read_text(), re.MULTILINE
        )


def test_images_and_packages_are_named_with_the_version_of_the_code() -> None:
    files = [path for room in ("deploy", "docs") for path in (ROOT / room).rglob("*") if path.is_file()]
    named = {
        (path.relative_to(ROOT).as_posix(), version)
        for path in (*files, ROOT / "README.md")
        for version in re.findall(r"\bsmq(?::|_log-)([0-9]+\.[0-9]+\.[0-9]+\w*)", path.read_text(errors="replace"))
    }
    assert {path for path, _ in named} >= {"deploy/README.md", "deploy/container/compose.yaml", "docs/operations.md"}
    assert {(path, version) for path, version in named if version != __version__} == set()
