"""Three machines that are not loopback: addresses of their own, advertised ones that differ, names, TLS, a router.

The nodes start as their unit would: `smq serve` of an installed wheel, as a user without privileges, with the file of
deploy/README.md for all, and variables for what differs. The clients are on another network, from which only the
forwarded ports lead to the nodes. The tests are one history, in their order. `pytest -s` shows its log.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from smq.coordinator.config.addresses import format_address
from smq.coordinator.tls.certificates import make_authority, make_client, make_node
from smq.raft_state.ids import NodeId
from tests.deploy.machines import UNPRIVILEGED, USER, Machine, Network, why_not
from tests.unit.test_deploy import walk_through, walk_through_config

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = (1, 2, 3)
TOKEN = "namespace-test-token-0123456789"
PATIENCE_S = 60.0
PARTITIONS = 3
HTTP = {"ADDRESS": "[::]:7402", "_PROBES": "anyone", "_METRICS": "token", "_TOKEN_FILE": "/mnt/etc/token"}
OUTSIDE = {"GRPC": (7501, 17501), "KAFKA": (9094, 19094)}  # the ports that the nodes listen on, and those of the router
SMQ = (*UNPRIVILEGED, "/mnt/opt/bin/python", "-m", "smq.coordinator.cli.main")
SERVE = (*SMQ, "serve")
KAFKA = ",".join(f"n{n}.example.org:19094" for n in NODES)
GRPC = ",".join(f"n{n}.example.org:17501" for n in NODES)
PROBE = """
import ssl, sys, urllib.error, urllib.request
context = ssl._create_unverified_context()
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]} if sys.argv[2] else {})
try:
    with urllib.request.urlopen(request, context=context, timeout=5) as answer:
        print(answer.status, answer.read().decode()[:200].replace("\\n", " "))
except urllib.error.HTTPError as e:
    print(e.code, e.read().decode()[:200])
"""


class Deployment:
    """The nodes' files, their processes, and the clients."""

    def __init__(self, directory: Path, installed: Path) -> None:
        self.directory = directory
        self.installed = installed
        self.began_s = time.monotonic()
        self.network = Network(directory)
        self.logs: dict[int, Path] = {n: directory / f"node-{n}.log" for n in NODES}
        self.addresses = {n: f"10.77.0.{n}" for n in NODES}
        make_authority(directory, "the test's authority")
        self.client = make_client(directory, "outside")
        self.etc = self._made_etc()
        for node in NODES:
            self.furnish(node)
        self.name_all()
        self._forwarder_log = (directory / "router.log").open("wb")
        ports = OUTSIDE.values()
        pairs = [(f"203.0.113.{n}:{out}", f"n{n}.example.org:{port}") for n in NODES for port, out in ports]
        self.network.forward(pairs, self._forwarder_log)

    def _made_etc(self) -> Path:
        """What each machine has in /etc/smq, of root and readable by the user: the file for all, and certificates."""
        etc = self.directory / "etc"
        etc.mkdir()
        (etc / "node.toml").write_text(walk_through_config())
        (etc / "token").write_text(TOKEN)
        for n in NODES:
            hosts = (f"n{n}.example.org",)
            made = make_node(self.directory, cluster_id=walk_through(n).cluster_id, node_id=NodeId(n), hosts=hosts)
            shutil.copytree(made.directory, etc / f"tls-{n}")
        for path in (etc, *etc.rglob("*")):
            os.chown(path, 0, USER)
            path.chmod(0o750 if path.is_dir() else 0o640)
        return etc

    def furnish(self, node: int) -> None:
        """What is on the disks of a new machine: the wheel, the configuration, and an empty directory for data."""
        var = self.directory / f"var-{node}"
        shutil.rmtree(var, ignore_errors=True)
        var.mkdir(mode=0o700)
        os.chown(var, USER, USER)
        self.network.nodes[node].mount({"opt": self.installed.parent, "etc": self.etc, "var": var})

    def report(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self.began_s:6.1f} s] {text}\n")
        sys.stdout.flush()

    def name_all(self) -> None:
        inside = {f"n{n}.example.org": self.addresses[n] for n in NODES}
        self.network.publish_names(inside, {f"n{n}.example.org": f"203.0.113.{n}" for n in NODES})

    # ------------------------------------------------------------------------------------------------- nodes
    def variables(self, node: int) -> dict[str, str]:
        files = {"CA": "ca.crt", "CERTIFICATE": "tls.crt", "KEY": "tls.key"}
        tls = {f"SMQ_TLS__{key}": f"/mnt/etc/tls-{node}/{name}" for key, name in files.items()}
        http = {f"SMQ_HTTP_{key}": value for key, value in HTTP.items()}
        http["SMQ_HTTP_ADVERTISED"] = f"n{node}.example.org:7402"
        outside = {}
        for kind, (port, told) in OUTSIDE.items():
            outside[f"SMQ_LISTENERS__OUTSIDE__{kind}_ADDRESS"] = f"[::]:{port}"
            outside[f"SMQ_LISTENERS__OUTSIDE__{kind}_ADVERTISED"] = f"n{node}.example.org:{told}"
        own = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}  # nothing of the checkout
        files = {"SMQ_CONFIG": "/mnt/etc/node.toml", "SMQ_DATA_DIR": "/mnt/var/data"}
        return {"SMQ_NODE_ID": "hostname", **files, **tls, **http, **outside, **own}

    def start(self, node: int) -> None:
        log = self.logs[node].open("ab")
        self.network.nodes[node].start(*SERVE, log=log, env=self.variables(node))
        log.close()
        self.report(f"node {node}: `smq serve` as user {USER} at {self.addresses[node]}")

    def begin(self) -> None:
        """`smq first-start` on one machine, as its user. To run it again does no harm."""
        command = (*SMQ, "first-start")
        for _ in range(2):
            self.report(self.network.nodes[1].run(*command, env=self.variables(1)).strip())

    def kill(self, node: int) -> None:
        process = self.network.nodes[node].processes.pop()
        process.kill()
        process.wait()
        self.report(f"node {node} is killed")

    def ask(self, machine: Machine, url: str, token: str = "") -> str:
        return machine.run(sys.executable, "-c", PROBE, url, token).strip()

    def url(self, node: int, path: str) -> str:
        return f"https://{format_address((self.addresses[node], 7402))}{path}"

    def is_ready(self, node: int) -> bool:
        return "200" in self.network.router.try_run(sys.executable, "-c", PROBE, self.url(node, "/readyz"), "").stdout

    def wait_ready(self, *nodes: int) -> None:
        for node in nodes:
            self.wait(f"node {node} is ready", lambda node=node: self.is_ready(node), node)  # type: ignore[misc] # a default

    def wait(self, what: str, condition: Callable[[], bool], node: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            log = self.logs[node].read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{log}"
            time.sleep(0.2)
        self.report(what)

    # ----------------------------------------------------------------------------------------------- clients
    def client_command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.deploy.clients", *arguments]

    @property
    def client_variables(self) -> dict[str, str]:
        files = {"CA": self.client.ca, "CERTIFICATE": self.client.certificate, "KEY": self.client.key}
        return {f"SMQ_TLS_{name}": str(path) for name, path in files.items()} | {"SPARK_LOCAL_IP": "127.0.0.1"}

    def run_client(self, *arguments: str, timeout_s: float = 180.0) -> dict[str, Any]:
        printed = self.network.clients.run(
            *self.client_command(*arguments), env=self.client_variables, timeout_s=timeout_s
        )
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        self.report(f"clients: {' '.join(argument.partition(',')[0] for argument in arguments)} -> {found}")
        return found

    def smq(self, *arguments: str) -> str:
        """What the command prints on the machine of the clients."""
        command = (sys.executable, "-m", "smq.coordinator.cli.main", *arguments, "--bootstrap", GRPC)
        return self.network.clients.try_run(*command, env=self.client_variables).stdout

    def lag(self, node: int) -> int | None:
        """How many records it lacks, as `smq status` shows it; None while it is not ready. (The command ends with 1: no
        node reaches the addresses of the outside, and each says so.)"""
        nodes = json.loads(self.smq("status", "--json") or "{}").get("nodes", [])
        (found,) = [status for described in nodes if (status := described["status"]) and status["node"] == node] or [{}]
        if not found.get("is_ready") or len(found["replicas"]) < PARTITIONS:
            return None
        return sum(max(int(replica["hwm"]) - int(replica["verified_end"]), 0) for replica in found["replicas"])

    def records(self, *options: str) -> list[str]:
        """Partition, offset and value of everything that is stored."""
        return sorted(self.smq("consume", "flights", "--output", "%p %o %v", *options).splitlines())

    def start_client(self, *arguments: str, log: IO[bytes]) -> Any:
        return self.network.clients.start(*self.client_command(*arguments), log=log, env=self.client_variables)

    def close(self) -> None:
        self.network.close()
        self._forwarder_log.close()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Iterator[Deployment]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no machines of network namespaces here: {reason}")
    made = Deployment(tmp_path_factory.mktemp("namespaces"), installed)
    try:
        for node in NODES:
            made.start(node)
        made.begin()
        made.wait_ready(*NODES)
        made.run_client("create", GRPC, str(PARTITIONS))
        yield made
    finally:
        made.close()


def test_nodes_run_from_the_wheel_without_privileges(deployment: Deployment) -> None:
    for machine in deployment.network.nodes.values():
        (process,) = machine.processes
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert (status["Uid"].split(), status["Gid"].split()) == ([str(USER)] * 4, [str(USER)] * 4)
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert (status["NoNewPrivs"], status["Groups"].split()) == ("1", [])
    find = (*SERVE[: SERVE.index("-m")], "-c", "import smq; print(smq.__file__)")
    found = deployment.network.nodes[1].run(*find, env=deployment.variables(1))
    assert found.startswith("/mnt/opt/lib/")


def test_clients_outside_get_the_addresses_of_the_outside(deployment: Deployment) -> None:
    assert deployment.run_client("brokers", KAFKA) == {str(n): f"n{n}.example.org:19094" for n in NODES}
    assert deployment.run_client("nodes", GRPC) == {str(n): f"n{n}.example.org:17501" for n in NODES}


def test_the_network_of_the_nodes_is_closed_to_the_clients(deployment: Deployment) -> None:
    """So whatever a client reaches, it reaches by an advertised address."""
    tried = deployment.network.clients.try_run("ip", "route", "get", "10.77.0.1")
    assert tried.returncode != 0, tried.stdout


def test_probes_need_no_certificate_and_metrics_need_the_token(deployment: Deployment) -> None:
    router = deployment.network.router
    for address in ("10.77.0.1", "[fd77::1]"):  # the same listener, over IPv4 and IPv6
        assert deployment.ask(router, f"https://{address}:7402/healthz") == '200 {"status": "ok"}'
        assert deployment.ask(router, f"https://{address}:7402/readyz") == '200 {"ready": true}'
        assert deployment.ask(router, f"https://{address}:7402/metrics").startswith("401")
        assert deployment.ask(router, f"https://{address}:7402/metrics", TOKEN).startswith("200 # HELP")
    deployment.report("probes answer without a certificate, /metrics by the token, over IPv4 and IPv6")


def test_a_second_process_of_a_node_and_a_mistyped_variable_are_refused(deployment: Deployment) -> None:
    machine = deployment.network.nodes[3]
    ports = {"NODES_ADDRESS": 8400, "GRPC_ADDRESS": 8401, "HTTP_ADDRESS": 8402, "KAFKA_ADDRESS": 8403}
    twin = deployment.variables(1) | {f"SMQ_{key}": f"[::]:{port}" for key, port in ports.items()}
    outside = {f"SMQ_LISTENERS__OUTSIDE__{kind}_ADDRESS": f"[::]:85{i}" for i, kind in ((10, "GRPC"), (11, "KAFKA"))}
    twin |= {"SMQ_NODE_ID": "1", "SMQ_DATA_DIR": "/mnt/var/twin", **outside}
    refused = machine.try_run(*SERVE, env=twin)
    assert refused.returncode == 1
    assert "another process runs as node 1 of this cluster, at n1.example.org:7400" in refused.stderr
    deployment.report(refused.stderr.strip().splitlines()[-1])
    refused = machine.try_run(*SERVE, env=deployment.variables(3) | {"SMQ_KAFKA_ADRESS": "[::]:1"})
    assert refused.returncode == 2
    assert "did you mean SMQ_KAFKA_ADDRESS" in refused.stderr
    deployment.report(refused.stderr.strip().splitlines()[-1])
    assert all(deployment.is_ready(node) for node in NODES)


def test_a_node_comes_back_under_another_address_while_producers_go_on(deployment: Deployment) -> None:
    """As a pod does. Names alone lead to it: the other nodes and the router resolve them again. The machine's only new
    address is of IPv6, and so nodes, gRPC and Kafka reach it by IPv6."""
    stop = deployment.directory / "stop"
    with (deployment.directory / "producer.log").open("wb+") as log:
        producer = deployment.start_client("produce_until", GRPC, str(stop), log=log)
        assert deployment.run_client("produce", KAFKA, "0", "3000") == {"acked": 3000, "failed": []}
        deployment.kill(3)
        deployment.network.move(3, 33, has_ipv4=False)
        deployment.addresses[3] = "fd77::33"
        deployment.name_all()
        deployment.report("node 3's machine moves from 10.77.0.3 to fd77::33")
        assert deployment.run_client("produce", KAFKA, "3000", "3000") == {"acked": 3000, "failed": []}
        deployment.start(3)
        deployment.wait_ready(3)
        deployment.wait("node 3 leads again", lambda: "smq_partition_is_leader" in _led(deployment, 3), 3)
        assert deployment.run_client("produce", KAFKA, "6000", "3000") == {"acked": 3000, "failed": []}
        stop.touch()
        assert producer.wait(120) == 0, log.read()
        log.seek(0)
        acked = json.loads(log.read().splitlines()[-1])["acked"]
    deployment.report(f"the producer over gRPC had {acked} records acknowledged meanwhile")
    found = deployment.run_client("spark", GRPC, timeout_s=300)
    assert found == {"rows": 9000 + acked, "values": 9000 + acked, "gapless": True}


def test_a_machine_that_is_lost_for_good_is_replaced_by_an_empty_one(deployment: Deployment) -> None:
    """By step 8 of the walk-through: the same number, certificate and name, and an empty data directory."""
    deployment.kill(3)
    deployment.network.replace(3, 43)
    deployment.addresses[3] = "10.77.0.43"
    deployment.report("node 3's machine is gone with its disk; an empty one, 10.77.0.43, gets its name")
    assert deployment.run_client("produce", KAFKA, "9000", "3000") == {"acked": 3000, "failed": []}
    assert deployment.lag(3) is None
    deployment.furnish(3)
    deployment.name_all()
    deployment.start(3)
    deployment.wait("`smq status` shows node 3 ready, without lag", lambda: deployment.lag(3) == 0, 3)
    stored = deployment.records()
    assert len(stored) >= 12_000
    itself = f"node 3 itself serves the same {len(stored)} records"
    deployment.wait(itself, lambda: deployment.records("--from-replica", "3") == stored, 3)


def _led(deployment: Deployment, node: int) -> str:
    """The partitions of the topic that a node leads, as lines of its metrics."""
    code = PROBE.replace("[:200]", "").replace('.replace("\\n", " ")', "")
    url = deployment.url(node, "/metrics")
    lines = deployment.network.router.run(sys.executable, "-c", code, url, TOKEN).splitlines()
    led = (line for line in lines if line.startswith("smq_partition_is_leader{"))
    return "\n".join(line for line in led if float(line.split()[-1]) == 1)
