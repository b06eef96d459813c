"""The firewall of deploy/systemd: for the ports of the walk-through, and what it lets through between real machines."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.testing.node_process import wait_for
from tests.deploy.machines import Machine, Network, why_not
from tests.skips import needs
from tests.unit.test_deploy import DEPLOY, walk_through

RULES = DEPLOY / "systemd/smq.nft"
NODES, CLIENTS, HTTP = ("7400",), ("7401", "9092"), ("7402",)
HERE = {  # the machines of the test: 1 has the firewall, 2 is another node, 3 a client, and the router a stranger
    "nodes": "10.77.0.1, 10.77.0.2",
    "nodes6": "fd77::1, fd77::2",
    "clients": "10.77.0.2/31",
    "clients6": "fd77::2/127",
}
LISTEN = """
import socket, sys, time
held = [socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True) for port in sys.argv[1:]]
print("listening", flush=True)
time.sleep(3600)
"""
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=30).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


def test_the_firewall_is_for_the_ports_of_the_walk_through() -> None:
    text, config = RULES.read_text(), walk_through(1)
    assert config.kafka_address is not None
    for ports, target in (
        ((config.nodes_listen[1],), "jump from_nodes"),
        ((config.grpc_address[1], config.kafka_address[1]), "jump from_clients"),
        ((config.http_address[1],), "reject"),
    ):
        (found,) = re.findall(rf"tcp dport (?:\{{ )?([\d, ]+?)(?: \}})? {target}", text)
        assert tuple(map(int, found.split(","))) == ports


def rules_of_here() -> str:
    text = RULES.read_text()
    for name, elements in HERE.items():
        text, count = re.subn(rf"(set {name} {{[^}}]*elements = {{) [^}}]* }}", rf"\1 {elements} }}", text)
        assert count == 1, name
    return text


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no machines of network namespaces here: {reason}")
    made = Network(tmp_path)
    try:
        yield made
    finally:
        made.close()


def reached(machine: Machine, *addresses: str) -> tuple[str, ...]:
    """The ports that answer this machine, the same at each address."""
    ports = sorted((*NODES, *CLIENTS, *HTTP))
    (found,) = {tuple(machine.run(sys.executable, "-c", CONNECT, address, *ports).split()) for address in addresses}
    return found


@needs("nft")
@pytest.mark.full
@pytest.mark.timeout(300)
def test_nodes_reach_nodes_clients_reach_the_client_ports_and_strangers_nothing(
    network: Network, tmp_path: Path
) -> None:
    one, outside = network.nodes[1], ("10.77.0.1", "fd77::1")
    with (tmp_path / "listening").open("wb") as log:
        one.start(sys.executable, "-c", LISTEN, *NODES, *CLIENTS, *HTTP, log=log)
    wait_for("the ports are open", lambda: (tmp_path / "listening").stat().st_size > 0, 60)
    everything = tuple(sorted((*NODES, *CLIENTS, *HTTP)))
    assert reached(network.router, *outside) == everything

    (tmp_path / "smq.nft").write_text(rules_of_here())
    for _ in range(2):  # the second time replaces the first
        one.run("nft", "-f", str(tmp_path / "smq.nft"))
    assert reached(network.nodes[2], *outside) == (*NODES, *CLIENTS)
    assert reached(network.nodes[3], *outside) == CLIENTS
    assert reached(network.router, *outside) == ()
    assert reached(one, "127.0.0.1", "::1") == everything


@needs("nft")
@pytest.mark.full
def test_nft_takes_the_file_as_it_is() -> None:
    done = subprocess.run(["nft", "--check", "--file", str(RULES)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
