"""One network namespace per node, connected by the switch of `switch.py`.

Owns the namespaces, the switch's process and the addresses 10.77.0.N. All of it lives inside a network namespace that
the harness has entered itself (`enter`), so nothing reaches the machine's own network and nothing is left behind. Needs
root, `unshare`, `nsenter` and `ip`; `why_not` names the missing ones.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from chaos_tests.live.environment.links import Links
from smq.coordinator.config.node_toml import load_config, write_config
from smq.raft_state.ids import NodeId

_ENTERED: Final = "CHAOS_NAMESPACE"
_TOOLS: Final = ("unshare", "nsenter", "ip")
# A process namespace, too, so that the end of the run, however it comes, ends its nodes and its namespaces.
_UNSHARE: Final = (
    *("unshare", "--net", "--mount", "--propagation", "private"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
_SUBNET: Final = "10.77.0"
_HARNESS_HOST: Final = 254
_PORTS: Final = {"peer": 7400, "grpc": 7401, "http": 7402, "kafka": 9092}


def why_not() -> str | None:
    """Why namespaces are impossible here; None if they are possible."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "this user may not make network namespaces (root may)"


def enter(arguments: list[str]) -> None:
    """Runs the same command again inside namespaces of its own (network, mounts, processes) and does not return, unless
    it is already inside."""
    if os.environ.get(_ENTERED) == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    os.environ[_ENTERED] = "1"
    os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, "-m", "chaos_tests", *arguments])


def is_inside() -> bool:
    return os.environ.get(_ENTERED) == "1"


class NamespaceNetwork:
    """Implements network.Network. Port i of the switch is node i; port 0 is the harness with the clients."""

    name = "network namespaces"
    can = frozenset({"block", "delay", "loss"})

    def __init__(self, seed: int, nodes: int) -> None:
        self._nodes = list(range(1, nodes + 1))
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        names = [f"smq{port}" for port in (0, *self._nodes)]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "chaos_tests.live.environment.switch", str(seed), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._expect("ready")
            for node in self._nodes:
                self._make(node)
            self._address("smq0", _HARNESS_HOST, None)
        except BaseException:  # not even an interrupt may leave a namespace behind
            self.close()
            raise

    # -------------------------------------------------------------------------------------------------- port
    def prepare(self, configs: list[Path]) -> None:
        hosts = {NodeId(node): f"{_SUBNET}.{node}" for node in self._nodes}
        peers = {node: (host, _PORTS["peer"]) for node, host in hosts.items()}
        for path in configs:
            config = load_config(path)
            host = hosts[config.node_id]
            moved = replace(
                config,
                peers=peers,
                grpc_address=(host, _PORTS["grpc"]),
                http_address=(host, _PORTS["http"]),
                kafka_address=(host, _PORTS["kafka"]) if config.kafka_address is not None else None,
                insecure=True,  # only this run is on this network
                data_dir=Path(config.data_dir.name),
            )
            write_config(moved, path)

    def command(self, node: int, command: list[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[node].pid}/ns/net", *command]

    def impose(self, links: Links) -> None:
        rules: list[tuple[int, int, dict[str, Any]]] = []
        for (sender, receiver), link in sorted(links.rules.items()):
            rules.append((sender, receiver, {f: getattr(link, f) for f in link.__slots__}))
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps({"rules": rules}) + "\n")
        self._switch.stdin.flush()
        self._expect("ok")

    def close(self) -> None:
        self._switch.kill()
        self._switch.wait()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        for stream in (self._switch.stdin, self._switch.stdout):
            if stream is not None:
                stream.close()

    # ------------------------------------------------------------------------------------------------ set-up
    def _make(self, node: int) -> None:
        """Makes a node's namespace: it lives while a process sleeps in it."""
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders[node] = holder
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            assert holder.poll() is None, "the namespace's holder has ended"
        _run("ip", "link", "set", f"smq{node}", "netns", str(holder.pid))
        self._address(f"smq{node}", node, node)

    def _address(self, device: str, host: int, node: int | None) -> None:
        inside = self.command(node, []) if node is not None else []
        _run(*inside, "ip", "link", "set", device, "address", f"02:00:00:00:00:{host:02x}")
        _run(*inside, "ip", "addr", "add", f"{_SUBNET}.{host}/24", "dev", device)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", device, "up")

    def _expect(self, word: str) -> None:
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline().strip()
        if line != word:
            raise RuntimeError(f"the switch printed {line!r} instead of {word!r} (exit {self._switch.poll()})")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
