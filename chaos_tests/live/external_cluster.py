"""An external cluster: reached by its addresses, struck by its operator's own commands.

Owns the hooks file (TOML) and a Fleet without processes. A hook is a shell command; {node} in it becomes a node's id:

    [[fault]]
    name = "kill"
    says = "the service killed on one machine"     # for the report
    strike = "ssh node{node} sudo systemctl kill -s KILL smq"
    undo = "ssh node{node} sudo systemctl start smq"
    target = "leader"                               # or "any"
    family = "kill"                                 # or "isolate", "pause": its failover is measured
    keeps_majority = true                           # whether writes must continue during the fault
    hold_s = [2, 5]

Without hooks the run is workload and checkers alone. It uses topics and groups of its own, and deletes the topics after
a run without findings.
"""

import secrets
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chaos_tests.live.environment.disks import Power
from chaos_tests.live.environment.links import Links
from chaos_tests.live.faults.kinds import FAILOVERS, Arena, Fault, Undo
from chaos_tests.live.fleet import Fleet
from smq.clients.pb import smq_pb2 as pb
from smq.clients.tls import Tls
from smq.raft_state.errors import SmqError
from smq.testing.node_client import RawNode, Unanswered
from smq.testing.node_process import ClusterError, Node

_HOOK_S: Final = 120.0
_KNOWN: Final = {"name", "says", "strike", "undo", "target", "family", "keeps_majority", "hold_s"}
_HOLD_S: Final = [2.0, 5.0]
_TARGETS: Final = ("any", "leader")
_HOOK: Final = "hook"  # the family if a hook names none


class HooksError(ValueError):
    """The hooks file is wrong; the message says where."""


@dataclass
class ExternalNetwork:
    """Implements network.Network for a cluster whose network is not ours."""

    name: str = "a cluster given by its addresses"
    can: frozenset[str] = frozenset()

    def prepare(self, configs: list[Path]) -> None: ...

    def command(self, node: int, command: list[str]) -> list[str]:
        raise ClusterError("the nodes of this cluster are not started from here")

    def impose(self, links: Links) -> None: ...

    def close(self) -> None: ...


@dataclass
class ExternalDisks:
    """Implements disks.Disks for such a cluster."""

    name: str = "disks of its own"
    power: Power | None = None

    def prepare(self, node: int, data: Path) -> None: ...

    def wipe(self, node: int) -> None: ...

    def close(self) -> None: ...


class ExternalNode(Node):
    """A node whose process is not ours: assumed to run, because only its answers show whether it does."""

    def is_alive(self) -> bool:
        return True


@dataclass(kw_only=True)
class ExternalCluster(Fleet):
    """`addresses` are gRPC addresses; the nodes that answer report the others."""

    addresses: tuple[str, ...] = field(default=())
    topics: tuple[str, ...] = ()  # created by the run
    tls: Tls | None = None

    def start(self) -> None:
        for node in described(self.addresses, self.tls):
            self.nodes[node.node] = ExternalNode(
                id=node.node,
                config=self.root,
                data_dir=self.root,
                log=self.root / f"node-{node.node}.log",
                grpc=node.grpc_address,
                http=node.http_address,
                kafka=node.kafka_address,
                tls=self.tls,
            )
        self.size = len(self.nodes)
        self.wait_ready()

    def run(self, node: int, *, before: Sequence[str] = ()) -> None:
        """Does nothing: the fault's hook starts the node."""

    def kill(self, *nodes: int) -> None:
        raise ClusterError("the nodes of this cluster are not killed from here")

    def wait_complete(self, timeout_s: float) -> None:
        """Does nothing: the metrics may be out of reach. An `undo` that replaces a disk waits for that."""

    def heal(self) -> None:
        """Does nothing: each fault has been undone by its hook."""

    def close(self) -> None:
        for member in self.nodes.values():
            member.raw.close()

    def discard_data(self) -> None:
        """Deletes the topics of the run, and the groups' offsets with them."""
        for member in self.nodes.values():
            raw = RawNode(member.grpc, self.tls)
            try:
                for topic in self.topics:
                    request = pb.DeleteTopicRequest(name=topic, request_id=secrets.token_bytes(16), timeout_ms=5000)
                    raw.call(raw.admin.DeleteTopic, request)
            except (SmqError, Unanswered):
                continue
            finally:
                raw.close()
            return


def described(addresses: Sequence[str], tls: Tls | None) -> Sequence[pb.NodeInfo]:
    """The nodes of the cluster, as reported by one of these addresses; ClusterError if none of them answers."""
    for address in addresses:
        raw = RawNode(address, tls)
        try:
            return raw.describe(linearizable=True).nodes
        except (SmqError, Unanswered):
            continue
        finally:
            raw.close()
    raise ClusterError(
        f"none of {', '.join(addresses)} answers: name the gRPC addresses of running nodes"
        + ("" if tls is not None else ", and the files for TLS (--tls-ca) if the nodes use it")
    )


def read_hooks(path: Path) -> list[Fault]:
    """HooksError for a file that is missing or wrong."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("fault", [])
    except (OSError, tomllib.TOMLDecodeError) as e:
        raise HooksError(f"{path}: {e}") from e
    found = []
    for number, entry in enumerate(entries, 1):
        unknown = sorted(entry.keys() - _KNOWN)
        missing = sorted({"name", "strike", "undo"} - entry.keys())
        if unknown or missing:
            problem = f"unknown keys: {', '.join(unknown)}" if unknown else f"missing keys: {', '.join(missing)}"
            raise HooksError(f"{path}: fault {number}: {problem}; known keys: {', '.join(sorted(_KNOWN))}")
        if entry.get("family", _HOOK) not in (*FAILOVERS, _HOOK):
            raise HooksError(f"{path}: fault {number}: its family must be one of {', '.join(FAILOVERS)}, or left out")
        if entry.get("target", "any") not in _TARGETS:
            raise HooksError(f"{path}: fault {number}: its target must be one of {', '.join(_TARGETS)}")
        hold = entry.get("hold_s", _HOLD_S)
        if not (isinstance(hold, list) and len(hold) == 2 and all(isinstance(s, int | float) for s in hold)):
            raise HooksError(f"{path}: fault {number}: hold_s must be two numbers of seconds, [shortest, longest]")
        found.append(_fault(entry))
    return found


def _fault(entry: dict[str, Any]) -> Fault:
    def strike(arena: Arena) -> list[int]:
        node = arena.leader() if entry.get("target", "any") == "leader" else arena.any_node()
        _shell(entry["strike"], node)
        return [node]

    def undo(arena: Arena, nodes: list[int]) -> None:
        for node in nodes:
            _shell(entry["undo"], node)

    low, high = entry.get("hold_s", _HOLD_S)
    undone: Undo = undo
    return Fault(
        entry["name"],
        entry.get("family", _HOOK),
        entry.get("says", entry["strike"]),
        strike,
        undone,
        keeps_majority=bool(entry.get("keeps_majority", True)),
        hold_s=(float(low), float(high)),
    )


def _shell(command: str, node: int) -> None:
    filled = command.replace("{node}", str(node))
    done = subprocess.run(filled, shell=True, capture_output=True, text=True, timeout=_HOOK_S, check=False)
    if done.returncode:
        raise ClusterError(f"the hook {shlex.quote(filled)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
