"""Machines made of network namespaces: nodes on a network of their own, clients on another, and a router between.

Owns the namespaces, their addresses, their hosts files and the forwarders. Each machine has its own network, mounts and
host name. The router is the only way between the two networks, and it forwards single ports, as a container's or a
load balancer's port mapping does: no address of one network leads anywhere in the other. Everything ends with the
processes that were started here; nothing of it is visible outside. It needs root.

    nodes: 10.77.0.N, fd77::N  --  router: 10.77.0.254 | 203.0.113.N  --  clients: 203.0.113.100
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).resolve().parents[2]
_TOOLS: Final = ("unshare", "nsenter", "setpriv", "ip", "mount", "hostname")
_UNSHARE: Final = ("unshare", "--net", "--mount", "--uts")
_KILLED_WITH_US: Final = ("setpriv", "--pdeathsig", "SIGKILL")
# As the unit's user, with its capabilities: none. A change of user forgets what the parent's death does.
USER: Final = 64123
UNPRIVILEGED: Final = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
    *("--inh-caps=-all", "--bounding-set=-all", "--pdeathsig", "SIGKILL"),
)
_START_S: Final = 10.0
ROUTER_INSIDE: Final = "10.77.0.254"


def why_not() -> str | None:
    """Why such machines are impossible here; None if they are possible."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed"
    tried = subprocess.run([*_UNSHARE, "ip", "link", "add", "v0", "type", "veth"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "this user may not make network namespaces (root may)"


class Machine:
    """One namespace of each kind. It lives while its holder sleeps."""

    def __init__(self, name: str, hosts: Path) -> None:
        self.name = name
        self.hosts = hosts
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self.holder = subprocess.Popen([*_KILLED_WITH_US, *_UNSHARE, "sleep", "infinity"])
        self.processes: list[subprocess.Popen[bytes]] = []
        self._wait_apart()
        self.run("mount", "--bind", str(hosts), "/etc/hosts")
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def _wait_apart(self) -> None:
        """Until the holder is in namespaces of its own."""
        deadline = time.monotonic() + _START_S
        for kind in ("net", "mnt", "uts"):
            own = os.readlink(f"/proc/self/ns/{kind}")
            while os.readlink(f"/proc/{self.holder.pid}/ns/{kind}") == own:
                assert time.monotonic() < deadline, "the machine's holder is not in namespaces of its own"
                time.sleep(0.01)

    def command(self, *arguments: str) -> list[str]:
        spaces = f"/proc/{self.holder.pid}/ns/"
        enter = [f"--net={spaces}net", f"--mount={spaces}mnt", f"--uts={spaces}uts"]
        return [*_KILLED_WITH_US, "nsenter", *enter, *arguments]

    def mount(self, directories: Mapping[str, Path]) -> None:
        """Puts these below /mnt, under their names, on this machine alone."""
        self.run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/mnt")
        for name, directory in directories.items():
            self.run("mkdir", f"/mnt/{name}")
            self.run("mount", "--bind", str(directory), f"/mnt/{name}")

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Its output; AssertionError with everything that it wrote if it fails."""
        done = self.try_run(*arguments, env=env, timeout_s=timeout_s)
        assert done.returncode == 0, f"{self.name}: {arguments}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_run(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environment(env or {}),
            cwd=ROOT,
        )

    def start(self, *arguments: str, log: IO[bytes], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(env or {}),
            cwd=ROOT,
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in (*self.processes, self.holder):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a process on a machine: nothing of this project's own variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SMQ_")}
    return kept | {"PYTHONPATH": str(ROOT)} | dict(more)


class Network:
    """Three machines for nodes, one for clients, and the router. `names` is the DNS of both networks."""

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        self._directory = directory
        self._stack = ExitStack()
        try:
            self.router = self._machine("router")
            self.clients = self._machine("client")
            self.nodes = {n: self._machine(f"smq-{n - 1}") for n in range(1, nodes + 1)}
            self._connect()
        except BaseException:  # an interrupt, too, may leave no namespace behind
            self.close()
            raise

    def _machine(self, name: str) -> Machine:
        machine = Machine(name, self._directory / f"{name}.hosts")
        self._stack.callback(machine.close)
        return machine

    def _connect(self) -> None:
        router = self.router
        router.run("ip", "link", "add", "inside", "type", "bridge")
        router.run("ip", "addr", "add", f"{ROUTER_INSIDE}/24", "dev", "inside")
        router.run("ip", "addr", "add", "fd77::254/64", "dev", "inside", "nodad")
        router.run("ip", "link", "set", "inside", "up")
        for number in self.nodes:
            self._plug(number, number)
        self._cable(self.clients, "outside")
        self.clients.run("ip", "addr", "add", "203.0.113.100/24", "dev", "eth0")
        for number in self.nodes:
            router.run("ip", "addr", "add", f"203.0.113.{number}/24", "dev", "outside")

    def _plug(self, node: int, host: int) -> None:
        self._cable(self.nodes[node], f"node{node}")
        self.router.run("ip", "link", "set", f"node{node}", "master", "inside")
        self.move(node, host)

    def replace(self, node: int, host: int) -> Machine:
        """The machine of a node is gone, with everything that ran on it, and a new one has its name."""
        name = self.nodes[node].name
        self.nodes[node].close()
        self.nodes[node] = self._machine(name)
        self._plug(node, host)
        return self.nodes[node]

    def _cable(self, machine: Machine, name: str) -> None:
        """From the machine's eth0 to the router's `name`."""
        self.router.run(
            "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(machine.holder.pid)
        )
        self.router.run("ip", "link", "set", name, "up")
        machine.run("ip", "link", "set", "eth0", "up")

    def move(self, node: int, host: int, *, has_ipv4: bool = True) -> None:
        """Gives the machine of a node other addresses, as a pod that comes back has."""
        machine = self.nodes[node]
        machine.run("ip", "addr", "flush", "dev", "eth0")
        if has_ipv4:
            machine.run("ip", "addr", "add", f"10.77.0.{host}/24", "dev", "eth0")
        machine.run("ip", "addr", "add", f"fd77::{host}/64", "dev", "eth0", "nodad")

    def publish_names(self, inside: Mapping[str, str], outside: Mapping[str, str]) -> None:
        """Writes every machine's hosts file in place: it is mounted."""
        known = "127.0.0.1 localhost\n::1 localhost\n"
        for machine, names in (
            *((machine, inside) for machine in (self.router, *self.nodes.values())),
            (self.clients, outside),
        ):
            own = f"127.0.0.1 {machine.name}\n" if machine is self.clients else ""
            lines = [f"{address} {name}\n" for name, address in names.items()]
            machine.hosts.write_text(known + own + "".join(lines))

    def forward(self, pairs: Sequence[tuple[str, str]], log: IO[bytes]) -> None:
        """Makes the router hand each connection to LISTEN on to TARGET, whose name it resolves each time."""
        arguments = [f"{listen}={target}" for listen, target in pairs]
        self.router.start(sys.executable, "-m", "tests.deploy.forwarder", *arguments, log=log)

    def close(self) -> None:
        self._stack.close()
