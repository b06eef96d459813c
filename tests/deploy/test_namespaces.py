"""Three machines that are not loopback: addresses of their own, advertised ones that differ, names, TLS, a router.

The nodes start as their unit or image would: `smq serve` with one file for all, and variables for what differs. The
clients are on another network, from which only the forwarded ports lead to the nodes. `pytest -s` shows the log.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from smq.coordinator.tls.certificates import make_authority, make_client, make_node
from smq.coordinator.tls.layout import Identity
from smq.raft_state.ids import NodeId
from tests.deploy.machines import Machine, Network, why_not

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = (1, 2, 3)
CLUSTER_ID = "namespaces"
TOKEN = "namespace-test-token-0123456789"
PATIENCE_S = 60.0
CONFIG = f"""
node_id = "hostname"
cluster_id = "{CLUSTER_ID}"
nodes_address = "[::]:7400"
grpc_address = "0.0.0.0:7401"
grpc_advertised = {{ 1 = "smq-0.smq:7401", 2 = "smq-1.smq:7401", 3 = "smq-2.smq:7401" }}
http_address = "[::]:7402"
http_advertised = {{ 1 = "smq-0.smq:7402", 2 = "smq-1.smq:7402", 3 = "smq-2.smq:7402" }}
kafka_address = "[::]:9092"
kafka_advertised = {{ 1 = "smq-0.smq:9092", 2 = "smq-1.smq:9092", 3 = "smq-2.smq:9092" }}

[peers]
1 = "smq-0.smq:7400"
2 = "smq-1.smq:7400"
3 = "smq-2.smq:7400"

[listeners.outside]
grpc_address = "[::]:7501"
grpc_advertised = {{ 1 = "n1.example.org:17501", 2 = "n2.example.org:17501", 3 = "n3.example.org:17501" }}
kafka_address = "0.0.0.0:9094"
kafka_advertised = {{ 1 = "n1.example.org:19094", 2 = "n2.example.org:19094", 3 = "n3.example.org:19094" }}

[http]
probes = "anyone"
metrics = "token"
"""
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

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.began_s = time.monotonic()
        self.network = Network(directory)
        self.logs: dict[int, Path] = {n: directory / f"node-{n}.log" for n in NODES}
        self.hosts = {n: n for n in NODES}
        self.config = directory / "node.toml"
        self.config.write_text(CONFIG)
        self.token = directory / "token"
        self.token.write_text(TOKEN)
        make_authority(directory, "the test's authority")
        self.identities: dict[int, Identity] = {
            n: make_node(
                directory, cluster_id=CLUSTER_ID, node_id=NodeId(n), hosts=(f"smq-{n - 1}.smq", f"n{n}.example.org")
            )
            for n in NODES
        }
        self.client = make_client(directory, "outside")
        self.name_all()
        ports = ((7501, 17501), (9094, 19094))
        self._forwarder_log = (directory / "router.log").open("wb")
        pairs = [(f"203.0.113.{n}:{out}", f"smq-{n - 1}.smq:{port}") for n in NODES for port, out in ports]
        self.network.forward(pairs, self._forwarder_log)

    def report(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self.began_s:6.1f} s] {text}\n")
        sys.stdout.flush()

    def name_all(self) -> None:
        inside = {f"smq-{n - 1}.smq": f"10.77.0.{self.hosts[n]}" for n in NODES}
        self.network.publish_names(inside, {f"n{n}.example.org": f"203.0.113.{n}" for n in NODES})

    # ------------------------------------------------------------------------------------------------- nodes
    def variables(self, node: int) -> dict[str, str]:
        identity = self.identities[node]
        return {
            "SMQ_CONFIG": str(self.config),
            "SMQ_DATA_DIR": str(self.directory / f"data-{node}"),
            "SMQ_HTTP__TOKEN_FILE": str(self.token),
            "SMQ_TLS__CA": str(identity.ca),
            "SMQ_TLS__CERTIFICATE": str(identity.certificate),
            "SMQ_TLS__KEY": str(identity.key),
        }

    def start(self, node: int) -> None:
        log = self.logs[node].open("ab")
        process = self.network.nodes[node].start(
            sys.executable, "-m", "smq.coordinator.cli.main", "serve", log=log, env=self.variables(node)
        )
        log.close()
        self.report(f"node {node}: `smq serve` at 10.77.0.{self.hosts[node]}, process {process.pid}")

    def kill(self, node: int) -> None:
        process = self.network.nodes[node].processes.pop()
        process.kill()
        process.wait()
        self.report(f"node {node} is killed")

    def ask(self, machine: Machine, url: str, token: str = "") -> str:
        return machine.run(sys.executable, "-c", PROBE, url, token).strip()

    def is_ready(self, node: int) -> bool:
        return (
            "200"
            in self.network.router.try_run(
                sys.executable, "-c", PROBE, f"https://10.77.0.{self.hosts[node]}:7402/readyz", ""
            ).stdout
        )

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
        self.report(f"clients: {' '.join(arguments)} -> {found}")
        return found

    def start_client(self, *arguments: str, log: IO[bytes]) -> Any:
        return self.network.clients.start(*self.client_command(*arguments), log=log, env=self.client_variables)

    def close(self) -> None:
        self.network.close()
        self._forwarder_log.close()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no machines of network namespaces here: {reason}")
    made = Deployment(tmp_path_factory.mktemp("namespaces"))
    try:
        for node in NODES:
            made.start(node)
        made.wait_ready(*NODES)
        made.run_client("create", GRPC, "3")
        yield made
    finally:
        made.close()


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
    command = (sys.executable, "-m", "smq.coordinator.cli.main", "serve")
    ports = {"NODES_ADDRESS": 8400, "GRPC_ADDRESS": 8401, "HTTP_ADDRESS": 8402, "KAFKA_ADDRESS": 8403}
    twin = deployment.variables(1) | {f"SMQ_{key}": f"[::]:{port}" for key, port in ports.items()}
    outside = {f"SMQ_LISTENERS__OUTSIDE__{kind}_ADDRESS": f"[::]:85{i}" for i, kind in ((10, "GRPC"), (11, "KAFKA"))}
    twin |= {"SMQ_NODE_ID": "1", "SMQ_DATA_DIR": str(deployment.directory / "twin"), **outside}
    refused = machine.try_run(*command, env=twin)
    assert refused.returncode == 1
    assert "another process runs as node 1 of this cluster, at smq-0.smq:7400" in refused.stderr
    deployment.report(refused.stderr.strip().splitlines()[-1])
    refused = machine.try_run(*command, env=deployment.variables(3) | {"SMQ_KAFKA_ADRESS": "[::]:1"})
    assert refused.returncode == 2
    assert "did you mean SMQ_KAFKA_ADDRESS" in refused.stderr
    deployment.report(refused.stderr.strip().splitlines()[-1])
    assert all(deployment.is_ready(node) for node in NODES)


def test_a_node_comes_back_under_another_address_while_producers_go_on(deployment: Deployment) -> None:
    """As a pod does. Names alone lead to it: the other nodes and the router resolve them again."""
    stop = deployment.directory / "stop"
    with (deployment.directory / "producer.log").open("wb+") as log:
        producer = deployment.start_client("produce_until", GRPC, str(stop), log=log)
        assert deployment.run_client("produce", KAFKA, "0", "3000") == {"acked": 3000, "failed": []}
        deployment.kill(3)
        deployment.network.move(3, 33)
        deployment.hosts[3] = 33
        deployment.name_all()
        deployment.report("node 3's machine moves from 10.77.0.3 to 10.77.0.33")
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


def _led(deployment: Deployment, node: int) -> str:
    """The partitions of the topic that a node leads, as lines of its metrics."""
    code = PROBE.replace("[:200]", "").replace('.replace("\\n", " ")', "")
    url = f"https://10.77.0.{deployment.hosts[node]}:7402/metrics"
    lines = deployment.network.router.run(sys.executable, "-c", code, url, TOKEN).splitlines()
    led = (line for line in lines if line.startswith("smq_partition_is_leader{"))
    return "\n".join(line for line in led if float(line.split()[-1]) == 1)
