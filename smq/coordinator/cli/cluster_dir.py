"""A cluster on this machine, as stored in one directory: D/node-1/node.toml, D/node-1/data, and so on.

Owns the layout, the choice of ports, and the rule that the same directory is the same cluster. It starts nothing.
`cli.commands.cluster` and `cli.connect` import it.
"""

import fcntl
import os
import random
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from smq.coordinator.cli.connect import GRPC_PORT_DEFAULT, HTTP_PORT_DEFAULT, KAFKA_PORT_DEFAULT
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.config.node_toml import (
    HttpConfig,
    ListenerConfig,
    ServerConfig,
    TlsConfig,
    check_rack,
    check_settings,
    load_config,
    write_config,
)
from smq.coordinator.service.bound_ports import check_free
from smq.coordinator.tls.certificate_files import Identity, client_identity, tls_dir
from smq.coordinator.user_errors import ConfigError, UserError
from smq.raft_state.cluster_config import AUTO_CREATE, GROUP_INITIAL_DELAY_MS
from smq.raft_state.ids import NodeId

PORT_STEP: Final = 10  # between two nodes of one machine
NODES_MAX: Final = 9  # processes on one machine; a larger cluster belongs on more machines
_HOST: Final = "127.0.0.1"
OPERATORS: Final = "operators"  # the listener for the operator's certificate, beside those that ask for users
_OPERATORS_STEP: Final = 3  # from a node's gRPC port to its port for operators
_LOCK_FILE: Final = "cluster.lock"
_LOCK_CHARS_MAX: Final = 32  # a process id
# Below the ports of outgoing connections: Linux assigns those from 32768 up, gVisor (containers) from 16000.
_FREE_PORTS: Final = range(10_000, 16_000)
_HELD_MAX: Final = 128
_held: Final[deque[socket.socket]] = deque()  # the ports that this process has chosen last


Owner = TypeVar("Owner", TlsConfig, HttpConfig, ListenerConfig)  # of paths
Secure: TypeAlias = Callable[[Path, Sequence[ServerConfig]], list[ServerConfig]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of node 1. None keeps what the directory has (or the default of a new one); 0 picks free ports."""

    grpc: int | None = None
    http: int | None = None
    kafka: int | None = None

    @property
    def are_free(self) -> bool:
        """Whether other ports may be chosen if one turns out to be taken."""
        return 0 in (self.grpc, self.http, self.kafka)


def prepare_cluster(
    directory: Path,
    node_count: int,
    ports: Ports,
    *,
    new_peer_ports: bool = False,
    racks: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    secure: Secure | None = None,
    sasl: tuple[str, ...] | None = None,
    are_ports_checked: bool = False,
) -> list[Path]:
    """Creates or updates the nodes' node.toml files and returns their paths, node 1 first. ConfigError if the directory
    holds another cluster than the requested one. The user does not choose the ports between nodes: they are free ports,
    and stay the same unless `new_peer_ports` says that one was taken meanwhile. `racks` are those of the nodes, in
    order; if it is empty, they stay as they are. So do mechanisms of SASL that are None, and the settings that
    `settings` does not name. `secure` gives TLS to nodes that have none. With `are_ports_checked` nothing is written
    for ports that are taken: PortTaken. A port that stays as it was is left to its node, which may find that it runs
    already."""
    found = find_nodes(directory)
    before = [load_config(path) for path in found]
    configs = before or _new_cluster(node_count)
    if node_count != len(configs):
        raise ConfigError(
            f"{directory} holds a cluster of {len(configs)} nodes, not {node_count}: use --nodes {len(configs)}, or "
            "choose another directory"
        )
    _check_ports(ports, len(configs))
    configs = _with_kafka(configs, is_free=ports.are_free)
    configs = _with_ports(configs, ports, new_peer_ports)
    configs = _with_racks(configs, racks)
    if settings:
        check_settings(settings)
        configs = [replace(c, settings={**c.settings, **settings}) for c in configs]
    if are_ports_checked:
        known = {address for c in before for _, address in _client_ports(c)}
        check_free(port for c in configs for port in _client_ports(c) if port[1] not in known)
    if secure is not None:
        configs = secure(directory, configs)
    if sasl is not None:
        configs = [replace(c, sasl=sasl, http=replace(c.http, users=True)) for c in configs]
    configs = _with_operators(configs, ports)
    paths = [_node_dir(directory, c.node_id) / "node.toml" for c in configs]
    for path, config in zip(paths, configs, strict=True):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_config(_relative(config, path.parent), path)
    return paths


@contextmanager
def hold_directory(directory: Path) -> Iterator[None]:
    """Locks the directory against another `smq cluster` or `smq dev`, which would rewrite the ports of running nodes.
    The lock ends with the process, whatever ends it. Single nodes are protected by the lock on their own data. After a
    UserError, a directory that was made here and has got no cluster is gone again."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_file = (directory / _LOCK_FILE).open("a+")
    except OSError as e:
        reason = f"{e.strerror or e} ({e.filename})"
        raise ConfigError(f"{directory} cannot be used as a data directory: {reason}; choose another one") from e
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read(_LOCK_CHARS_MAX).strip() or "unknown"
            raise ConfigError(
                f"{directory} is in use by process {owner}: stop it first, or choose another directory"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        except UserError:
            if made and os.listdir(directory) == [_LOCK_FILE]:
                (directory / _LOCK_FILE).unlink()
                for path in made:
                    path.rmdir()
            raise


def find_nodes(directory: Path) -> list[Path]:
    """The node.toml files of a directory, by node id."""
    found = {}
    for path in directory.glob("node-*/node.toml"):
        number = path.parent.name.removeprefix("node-")
        if number.isdigit():
            found[int(number)] = path
    return [found[number] for number in sorted(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How an operator reaches the cluster of a directory: gRPC addresses, and a certificate under TLS."""

    bootstrap: str
    identity: Identity | None


def reach_of(directory: Path) -> Reach:
    """ConfigError if the directory holds no cluster."""
    configs = [load_config(path) for path in find_nodes(directory)]
    if not configs:
        raise ConfigError(f"{directory} holds no cluster: name the --data-dir of `smq cluster` or `smq dev`")
    return Reach(
        bootstrap=",".join(format_address(_of_operators(c)) for c in configs),
        identity=client_identity(tls_dir(directory)) if configs[0].tls is not None else None,
    )


def _of_operators(config: ServerConfig) -> Address:
    way = config.listeners.get(OPERATORS)
    return way.grpc_address if way is not None and way.grpc_address is not None else config.grpc_address


def _node_dir(directory: Path, node_id: NodeId) -> Path:
    return directory / f"node-{node_id}"


def _client_ports(config: ServerConfig) -> list[tuple[str, Address]]:
    ports = [("gRPC", config.grpc_address), ("HTTP", config.http_address)]
    return ports if config.kafka_address is None else [*ports, ("Kafka", config.kafka_address)]


def _new_cluster(node_count: int) -> list[ServerConfig]:
    if not 1 <= node_count <= NODES_MAX:
        raise ConfigError(f"--nodes is {node_count}: it must be 1 to {NODES_MAX}")
    cluster_id = f"smq-{secrets.token_hex(8)}"
    ids = [NodeId(n) for n in range(1, node_count + 1)]
    peers: dict[NodeId, Address] = dict.fromkeys(ids, (_HOST, 0))
    return [
        ServerConfig(
            node_id=n,
            cluster_id=cluster_id,
            data_dir=Path("data"),
            peers=peers,
            grpc_address=(_HOST, GRPC_PORT_DEFAULT + PORT_STEP * (n - 1)),
            http_address=(_HOST, HTTP_PORT_DEFAULT + PORT_STEP * (n - 1)),
        )
        for n in ids
    ]


def _relative(config: ServerConfig, home: Path) -> ServerConfig:
    """With the paths of its files relative, like the data directory, so that the whole directory can be moved."""

    def moved(path: Path | None) -> Path | None:
        return Path(os.path.relpath(path, home)) if path is not None else None

    def with_files(owner: Owner, *names: str) -> Owner:
        files: dict[str, Any] = {name: moved(getattr(owner, name)) for name in names}
        return replace(owner, **files)

    files = ("ca", "certificate", "key")
    return replace(
        config,
        data_dir=Path("data"),
        tls=with_files(config.tls, *files) if config.tls is not None else None,
        http=with_files(config.http, "token_file"),
        listeners={name: with_files(listener, *files) for name, listener in config.listeners.items()},
    )


def _with_kafka(configs: Sequence[ServerConfig], *, is_free: bool) -> list[ServerConfig]:
    """Gives nodes without a Kafka port one: a free port (0, until it is chosen) if the other ports were requested to be
    free, so that several test clusters do not collide at the default. Topics are created on first use, as developers
    expect."""
    return [
        c
        if c.kafka_address is not None
        else replace(
            c,
            kafka_address=(_HOST, 0 if is_free else KAFKA_PORT_DEFAULT + PORT_STEP * i),
            # On a developer's machine no other consumer is about to join.
            settings={AUTO_CREATE: "true", GROUP_INITIAL_DELAY_MS: "0"} | c.settings,
        )
        for i, c in enumerate(configs)
    ]


def _with_operators(configs: list[ServerConfig], ports: Ports) -> list[ServerConfig]:
    """A way in for the operator's certificate, where a node's own addresses ask for users."""
    missing = [c for c in configs if c.sasl and OPERATORS not in c.listeners]
    free = iter(free_ports(len(missing)) if ports.are_free else ())
    for c in missing:
        host, port = c.grpc_address
        way = ListenerConfig(name=OPERATORS, grpc_address=(host, next(free, port + _OPERATORS_STEP)))
        configs[configs.index(c)] = replace(c, listeners={**c.listeners, OPERATORS: way})
    return configs


def _with_racks(configs: list[ServerConfig], racks: Sequence[str]) -> list[ServerConfig]:
    if not racks:
        return configs
    if len(racks) != len(configs):
        raise ConfigError(f"--racks names {len(racks)}: name one for each of the {len(configs)} nodes")
    for rack in racks:
        check_rack(rack)  # before it is in a file that the next start could not read
    return [replace(c, rack=rack) for c, rack in zip(configs, racks, strict=True)]


def _check_ports(ports: Ports, node_count: int) -> None:
    for name, port in (
        ("--grpc-port", ports.grpc),
        ("--http-port", ports.http),
        ("--kafka-port", ports.kafka),
    ):
        if port is not None and not 0 <= port <= 65535 - PORT_STEP * (node_count - 1):
            raise ConfigError(
                f"{name} is {port}: with {node_count} nodes it must be 0 (free ports) to "
                f"{65535 - PORT_STEP * (node_count - 1)}"
            )


def _with_ports(configs: Sequence[ServerConfig], ports: Ports, new_peer_ports: bool) -> list[ServerConfig]:
    """The requested ports: free ones for 0, and for the peers of a cluster that is new or moves."""
    moves = new_peer_ports or ports.are_free or any(address[1] == 0 for c in configs for address in c.peers.values())
    peers = configs[0].peers
    free = iter(free_ports(4 * len(configs)))
    if moves:
        peers = {c.node_id: (_HOST, next(free)) for c in configs}
    return [
        replace(
            c,
            peers=peers,
            grpc_address=_moved(c.grpc_address, ports.grpc, i, free),
            http_address=_moved(c.http_address, ports.http, i, free),
            kafka_address=_kafka_moved(c.kafka_address, ports.kafka, i, free),
        )
        for i, c in enumerate(configs)
    ]


def _moved(address: Address, first_port: int | None, index: int, free: Iterator[int]) -> Address:
    if first_port is None:
        return address
    return address[0], next(free) if first_port == 0 else first_port + PORT_STEP * index


def _kafka_moved(address: Address | None, first_port: int | None, index: int, free: Iterator[int]) -> Address | None:
    if address is None:
        return None
    return _moved(address, 0 if address[1] == 0 and first_port is None else first_port, index, free)


def free_ports(count: int) -> list[int]:
    """Ports without a listener, below the range that the kernel uses for outgoing connections: a node that is down for
    a while could lose such a port to a client. On Linux they stay bound here, in a way that lets a listener have them
    and no other choice: clusters that start at the same time would take each other's."""
    chosen: dict[int, socket.socket] = {}
    with ExitStack() as closing:
        for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
            if len(chosen) == count:
                break
            sock = closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with suppress(OSError):
                sock.bind((_HOST, port))
                chosen[port] = sock
        if len(chosen) < count:
            last = _FREE_PORTS.stop - 1
            raise ConfigError(f"no {count} free ports in {_FREE_PORTS.start} to {last}: stop some servers")
        if sys.platform == "linux":
            _hold(chosen.values())
    return list(chosen)


def _hold(bound: Iterable[socket.socket]) -> None:
    for sock in bound:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(sock.dup())
    while len(_held) > _HELD_MAX:
        _held.popleft().close()
