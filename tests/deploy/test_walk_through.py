"""The three machines of deploy/README.md, step by step, in its own words: its commands, its file, the unit's command.

Each machine has an /etc, an /opt and a /var/lib of its own, so every path is the page's. Python may be in the home of
a user, so it is mounted where all users reach it. systemd itself does not run
here, so the test takes from the unit what to start, and makes its state directory. The firewall has a test of its own.
"""

import configparser
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.coordinator.server import self_check
from smq.testing.node_process import wait_for
from tests.deploy.machines import Machine, Network, why_not
from tests.skips import needs
from tests.unit.test_deploy import DEPLOY, UNIT, walk_through_config

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(600)]

NODES, OPERATOR = (1, 2, 3), 4
PATIENCE_S = 60.0
PAGE = (DEPLOY / "README.md").read_text()
AS_SMQ = "setpriv --reuid=smq --regid=smq --init-groups"
OVERLAY = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/python
mount --bind "$PYTHON" /mnt/python
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
mkdir -p /etc/sysusers.d /etc/tmpfiles.d
mount --bind "$HOSTS" /etc/hosts
mount --bind "$OPT" /opt
mount -t tmpfs -o mode=0755 tmpfs /var/lib
"""
# Nothing of the checkout; and an interpreter that is mounted elsewhere finds its library.
CLEAN = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1", "LD_LIBRARY_PATH": "/mnt/python/lib"}


def commands(step: str) -> list[str]:
    """The inline code of one step."""
    (text,) = re.findall(rf"^\d\. \*\*{step}\.\*\* (.*?)(?=^\d\. |^\S)", PAGE, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def command(step: str, beginning: str) -> str:
    (found,) = [code for code in commands(step) if code.startswith(beginning)]
    return found


class ThreeMachines:
    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        self.network = Network(directory, nodes=OPERATOR)
        self.network.publish_names({f"n{n}.example.org": f"10.77.0.{n}" for n in NODES}, {})
        self.operator = self.network.nodes[OPERATOR]
        self.machines = {n: self.network.nodes[n] for n in NODES}
        self.credentials: dict[str, str] = {}
        opt = directory / "opt"
        opt.mkdir()
        for machine in self.network.nodes.values():
            where = {"HOSTS": str(machine.hosts), "OPT": str(opt), "PYTHON": sys.base_prefix}
            machine.run("sh", "-ec", OVERLAY, env=where)
        self._install(wheel)

    def _install(self, wheel: Path) -> None:
        """The wheel in the page's place; its libraries are this environment's."""
        home, python = "/opt/smq/.venv", f"/mnt/python/bin/python{sysconfig.get_python_version()}"
        pip = f"{home}/bin/python -m pip install --quiet --no-deps --no-index {wheel}"
        self.operator.run("sh", "-ec", f"{python} -m venv {home} && {pip}", env=CLEAN, timeout_s=120)
        (site,) = (self.directory / "opt/smq/.venv").glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def shell(self, machine: Machine, line: str) -> str:
        """As a person there would type it."""
        script = f"export PATH=/opt/smq/.venv/bin:$PATH; cd {self.directory}; {line}"
        return machine.run("sh", "-ec", script, env=CLEAN | self.credentials, timeout_s=120)

    def write(self, machine: Machine, path: str, text: str) -> None:
        """A file of root's, with the usual mode."""
        source = self.directory / "written"
        source.write_text(text)
        machine.run("install", "-m", "0644", str(source), path)

    def start(self, node: int) -> None:
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read_string(UNIT.read_text())
        service = unit["Service"]
        machine, file = self.machines[node], service["EnvironmentFile"].removeprefix("-")
        machine.run("sh", "-ec", "mkdir -p /var/lib/$0 && chown smq:smq /var/lib/$0 && chmod 0700 /var/lib/$0", "smq")
        line = f"set -a; . {file}; umask {service['UMask']}; exec {service['ExecStart']}"
        with self.log(node).open("ab") as log:
            machine.start(*AS_SMQ.split(), "--pdeathsig", "SIGKILL", "sh", "-ec", line, log=log, env=CLEAN)

    def log(self, node: int) -> Path:
        return self.directory / f"node-{node}.log"

    def ended(self) -> dict[int, str]:
        """What the nodes that have ended wrote last."""
        polled = {n: process.poll() for n, machine in self.machines.items() for process in machine.processes[-1:]}
        return {n: f"{code}: {self.log(n).read_text()[-1500:]}" for n, code in polled.items() if code is not None}

    def wait_healthy(self, node: int, *options: str) -> None:
        line = f"set -a; . /etc/smq/environment; smq health --config /etc/smq/node.toml {' '.join(options)}"

        def is_healthy() -> bool:
            assert self.ended() == {}
            path = "export PATH=/opt/smq/.venv/bin:$PATH; "
            return self.machines[node].try_run("sh", "-c", path + line, env=CLEAN).returncode == 0

        wait_for(f"node {node} answers", is_healthy, PATIENCE_S)

    def wait_well(self) -> None:
        """Until `smq status` has nothing to say."""
        line = "export PATH=/opt/smq/.venv/bin:$PATH; " + command("First start", "smq status")

        def is_well() -> bool:
            assert self.ended() == {}
            return self.operator.try_run("sh", "-c", line, env=CLEAN | self.credentials).returncode == 0

        wait_for("smq status is content", is_well, PATIENCE_S)


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[ThreeMachines]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no machines of network namespaces here: {reason}")
    directory = tmp_path_factory.mktemp("walk-through")
    made = ThreeMachines(directory, wheel)
    try:
        yield made
    finally:
        made.network.close()


@needs("systemd-sysusers")
@needs("systemd-tmpfiles")
def test_three_machines_by_the_page_stay_up_and_are_upgraded(three: ThreeMachines) -> None:
    tmpfiles = command("User and directories", "systemd-tmpfiles") + " --prefix=/etc/smq"  # not what others have there
    for machine in three.machines.values():
        for kind in ("sysusers", "tmpfiles"):
            three.write(machine, f"/etc/{kind}.d/smq.conf", (DEPLOY / f"systemd/smq.{kind}.conf").read_text())
        three.shell(machine, command("User and directories", "systemd-sysusers"))
        three.shell(machine, tmpfiles)

    three.shell(three.operator, command("Certificates", "smq cert init"))
    three.shell(three.operator, command("Certificates", "smq cert client"))
    certificate = command("Certificates", "smq cert node")
    for node, machine in three.machines.items():
        own = certificate.replace("--node 1", f"--node {node}").replace("n1.", f"n{node}.")
        three.shell(three.operator, own)
        three.shell(machine, f"cp CA/node-{node}/* /etc/smq/tls")
        three.shell(machine, tmpfiles)
        three.write(machine, "/etc/smq/node.toml", walk_through_config())
        three.write(machine, "/etc/smq/environment", command("Configuration", "SMQ_NODE_ID").replace("1", str(node)))
        three.start(node)

    for node in NODES:
        three.wait_healthy(node)
    three.shell(three.machines[1], command("First start", "sudo").replace("sudo -u smq", AS_SMQ))
    (client,) = (three.directory / "CA").glob("client-*")
    files = {"CA": "ca.crt", "CERTIFICATE": "tls.crt", "KEY": "tls.key"}
    three.credentials = {f"SMQ_TLS_{key}": str(client / name) for key, name in files.items()}
    three.wait_well()
    until = time.monotonic() + self_check._TRIES * self_check._CHECK_S + 5  # addresses that two nodes share end one
    while time.monotonic() < until:
        assert three.ended() == {}
        time.sleep(0.5)
    three.wait_well()

    at = "--bootstrap n2.example.org:7401"
    three.shell(three.operator, f"smq topic create t {at}; seq 100 | smq produce t {at}")
    one = f"--bootstrap {command('First start', 'smq status').split()[-1]}"
    three.shell(three.operator, f"{command('First upgrade', 'smq node drain')} {one}")
    assert "systemctl restart smq" in commands("First upgrade")
    (process,) = three.machines[1].processes
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    three.start(1)
    three.wait_healthy(1, "--ready")
    three.shell(three.operator, f"{command('First upgrade', 'smq node undrain')} {one}")
    three.wait_well()
    assert three.shell(three.operator, f"smq consume t {one}").split() == [str(n) for n in range(1, 101)]
