"""node.toml: the settings of one server process, read once at start.

Owns the file's format, its checks and its writer. Unknown keys are refused with the list of known ones. An address that
is not loopback is refused without TLS and client certificates, unless the operator says `insecure`. It must never open
a socket, a certificate or the data directory. The composition root and the CLI import it.
"""

import dataclasses
import json
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from smq.coordinator.config.addresses import (
    Address,
    format_address,
    is_loopback,
    is_private,
    is_wildcard,
    parse_address,
)
from smq.coordinator.config.environment import Key, overlay, variable_of
from smq.coordinator.limits import (
    MIB,
    REQUEST_BYTES_DEFAULT,
    REQUEST_BYTES_MAX,
)
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML
from smq.raft_state.commands import Listener
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import LISTENERS_MAX, RACK_BYTES_MAX
from smq.replication.config import NodeConfig
from smq.replication.storage.engine import Engine


def table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The table of that key; empty if there is none."""
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a table: [{key}]")
    return value


def string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}: it must be a string")
    return value


def integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} is {value!r}: it must be a whole number, 0 or more")
    return value


def boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}: it must be true or false")
    return value


def choice(key: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}: it must be {' or '.join(map(repr, choices))}")
    return str(value)


def refuse_unknown(what: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"unknown {what}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's."""
    return json.dumps(text)


_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")  # without hyphens: it is part of the names of variables
_FILES: Final = ("ca", "certificate", "key")
_LISTENER_KEYS: Final = (
    *("grpc_address", "grpc_advertised", "kafka_address", "kafka_advertised"),
    *("tls", "client_certificates", *_FILES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """One way in. The node's own addresses are the one without a name. A client that came through a listener gets the
    addresses that the nodes advertise for the listener of that name. None leaves security to [tls]."""

    name: str
    grpc_address: Address | None = None
    grpc_advertised: Address | None = None
    kafka_address: Address | None = None
    kafka_advertised: Address | None = None
    tls: bool | None = None
    client_certificates: bool | None = None
    ca: Path | None = None  # these three: of a certificate of its own, such as one that browsers trust
    certificate: Path | None = None
    key: Path | None = None

    def setting(self, name: str) -> str:
        """The setting as the file names it."""
        return f"listeners.{self.name}.{name}" if self.name else name

    @property
    def ports(self) -> Iterator[tuple[str, Address, Address | None]]:
        """(key, listened to, advertised) of each port that it opens."""
        for kind, address, advertised in (
            ("grpc", self.grpc_address, self.grpc_advertised),
            ("kafka", self.kafka_address, self.kafka_advertised),
        ):
            if address is not None:
                yield self.setting(f"{kind}_address"), address, advertised


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Which callers get an answer on the HTTP port. "clients": those that may use the node's other ports. `tls`: None
    leaves it to [tls]. The token is in a file, so that it is in no process list and in no copy of this one."""

    tls: bool | None = None
    probes: str = "clients"  # or "anyone": /healthz and /readyz then say no more than yes or no to strangers
    metrics: str = "clients"  # or "token" (and clients), or "anyone" at an address that is not public
    token_file: Path | None = None
    console_changes: bool = False  # whether an operator may change the cluster through the console


PROBES: Final = ("clients", "anyone")
METRICS: Final = ("clients", "token", "anyone")
_HTTP_KEYS: Final = ("tls", "probes", "metrics", "token_file", "console_changes")


def told(listened: Address, advertised: Address | None) -> Address:
    """The address for others, given the one that was bound. Port 0 stands for the bound port."""
    if advertised is None:
        return listened
    return advertised[0], advertised[1] or listened[1]


# ---------------------------------------------------------------------------------------------------- reading
def read_listeners(raw: Mapping[str, Any], node_id: NodeId, base_dir: Path) -> dict[str, ListenerConfig]:
    """[listeners.NAME], by name. ConfigError for anything that is not such a table."""
    found = table(raw, "listeners")
    for name, value in found.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"listeners.{name} is {value!r}: a listener needs a name. Write a table [listeners.NAME], such as "
                "[listeners.outside], with its addresses"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a listener: use up to 32 of a-z, 0-9 and '_', a letter first, such as outside"
            )
    if len(found) > LISTENERS_MAX:
        raise ConfigError(f"[listeners] has {len(found)} entries: a node may have {LISTENERS_MAX}")
    return {name: _listener(name, found[name], node_id, base_dir) for name in sorted(found)}


def _listener(name: str, raw: Mapping[str, Any], node_id: NodeId, base_dir: Path) -> ListenerConfig:
    refuse_unknown(f"settings under [listeners.{name}]", raw, _LISTENER_KEYS)
    prefix = f"listeners.{name}."
    made = ListenerConfig(
        name=name,
        grpc_address=_optional(f"{prefix}grpc_address", raw.get("grpc_address")),
        grpc_advertised=read_advertised(prefix, "grpc", raw, node_id),
        kafka_address=_optional(f"{prefix}kafka_address", raw.get("kafka_address")),
        kafka_advertised=read_advertised(prefix, "kafka", raw, node_id),
        tls=boolean(f"{prefix}tls", raw["tls"]) if "tls" in raw else None,
        client_certificates=(
            boolean(f"{prefix}client_certificates", raw["client_certificates"])
            if "client_certificates" in raw
            else None
        ),
        **{key: base_dir / string(f"{prefix}{key}", raw[key]) for key in _FILES if key in raw},
    )
    if (made.certificate is None) != (made.key is None) or (made.ca is not None and made.certificate is None):
        raise ConfigError(f"[listeners.{name}] needs a certificate and its key together; ca is for these alone")
    if made.grpc_address is None and made.kafka_address is None:
        raise ConfigError(f"[listeners.{name}] opens no port: give it a grpc_address or a kafka_address, or remove it")
    return made


def read_advertised(prefix: str, kind: str, raw: Mapping[str, Any], node_id: NodeId) -> Address | None:
    """KIND_advertised: an address, or one per node id, so that all nodes can share one file."""
    key = f"{prefix}{kind}_advertised"
    value = raw.get(f"{kind}_advertised")
    if value is None:
        return None
    if raw.get(f"{kind}_address") is None and kind == "kafka":
        raise ConfigError(f"{key} is set, but {prefix}{kind}_address is not: set it to the address to listen on")
    if isinstance(value, dict):
        value = _of_node(key, value, node_id)
    address = parse_address(key, value)
    if is_wildcard(address[0]):
        raise ConfigError(
            f"{key} is {format_address(address)}, to which no client can connect: name the host by which clients reach "
            "this node"
        )
    return address


def _of_node(key: str, by_node: Mapping[str, Any], node_id: NodeId) -> object:
    seen: dict[object, str] = {}
    for node, address in by_node.items():
        if not node.isascii() or not node.isdigit():
            raise ConfigError(f"{key} has the key {node!r}: its keys are node ids")
        if address in seen:
            raise ConfigError(f"{key} gives nodes {seen[address]} and {node} the same address {address!r}")
        seen[string(f"{key}.{node}", address)] = node
    if str(node_id) not in by_node:
        raise ConfigError(f'{key} names no address for node {node_id}: add {node_id} = "HOST:PORT"')
    return by_node[str(node_id)]


def _optional(key: str, value: object) -> Address | None:
    return None if value is None else parse_address(key, value)


def read_http(raw: Mapping[str, Any], base_dir: Path) -> HttpConfig:
    found = table(raw, "http")
    refuse_unknown("settings under [http]", found, _HTTP_KEYS)
    return HttpConfig(
        tls=boolean("http.tls", found["tls"]) if "tls" in found else None,
        probes=choice("http.probes", found.get("probes", "clients"), PROBES),
        metrics=choice("http.metrics", found.get("metrics", "clients"), METRICS),
        token_file=base_dir / string("http.token_file", found["token_file"]) if "token_file" in found else None,
        console_changes=boolean("http.console_changes", found.get("console_changes", False)),
    )


# ----------------------------------------------------------------------------------------------------- checks
def check_told(key: str, address: Address, advertised: Address | None) -> None:
    """ConfigError if clients would get an address that stands for all."""
    if advertised is None and is_wildcard(address[0]):
        raise ConfigError(
            f"{key} is {format_address(address)}: no client can connect to that address. Set "
            f"{key.removesuffix('address')}advertised to the HOST:PORT by which clients reach this node"
        )


def check_http(http: HttpConfig, address: Address, *, has_tls: bool) -> None:
    """ConfigError if a stranger could read /metrics, or a token, on an address that others can reach."""
    if http.metrics == "token" and http.token_file is None:
        raise ConfigError('http.metrics is "token": name the file with the token as http.token_file')
    if http.metrics != "token" and http.token_file is not None:
        raise ConfigError(f'http.token_file is set, but http.metrics is {http.metrics!r}: set metrics = "token"')
    if is_private(address[0]):
        return
    shown = format_address(address)
    if http.metrics == "anyone":
        raise ConfigError(
            f'http.metrics is "anyone", and http_address {shown} may be public: listen on a private address, such as '
            '127.0.0.1 or 10.0.0.5, or set metrics = "token"'
        )
    if http.metrics == "token" and not has_tls:
        raise ConfigError(
            f"http_address {shown} may be public, and without TLS the token of /metrics could be read on the way: turn "
            "on http.tls, or listen on a private address"
        )


def check_console(http: HttpConfig, address: Address, *, asks_certificates: bool) -> None:
    """ConfigError if a stranger could change the cluster through the console, even with `insecure`."""
    if http.console_changes and not is_loopback(address[0]) and not asks_certificates:
        raise ConfigError(
            f"http.console_changes is true, and anyone who reaches http_address {format_address(address)} could change "
            "the cluster: ask browsers for certificates ([tls] with client_certificates = true, without http.tls = "
            "false), listen on 127.0.0.1, or set console_changes = false"
        )


# ---------------------------------------------------------------------------------------------------- writing
def dump_listener(listener: ListenerConfig) -> list[str]:
    lines = ["", f"[listeners.{listener.name}]"]
    for name in _LISTENER_KEYS:
        value = getattr(listener, name)
        if isinstance(value, bool):
            lines.append(f"{name} = {str(value).lower()}")
        elif isinstance(value, Path):
            lines.append(f"{name} = {quoted(str(value))}")
        elif value is not None:
            lines.append(f"{name} = {quoted(format_address(value))}")
    return lines


def dump_http(http: HttpConfig) -> list[str]:
    if http == HttpConfig():
        return []
    lines = ["", "[http]", f"probes = {quoted(http.probes)}", f"metrics = {quoted(http.metrics)}"]
    if http.tls is not None:
        lines.append(f"tls = {str(http.tls).lower()}")
    if http.console_changes:
        lines.append("console_changes = true")
    if http.token_file is not None:
        lines.append(f"token_file = {quoted(str(http.token_file))}")
    return lines


_NODE_ID_MAX: Final = 2**31 - 1
_NODE_ID_OF_HOST: Final = "hostname"
_ORDINAL: Final = re.compile(r"-(\d{1,9})$")
_NOT_TUNABLE: Final = {"node_id", "cluster_id", "peers", "grpc_address", "http_address", "kafka_address", "rack"} | {
    "listeners",
    "feature_level_known",  # a fact of this smq
}
_TUNABLE: Final = {f.name: f.type for f in dataclasses.fields(NodeConfig) if f.name not in _NOT_TUNABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files: `ca` (one or more trusted certificates), this node's `certificate` and its `key`. Between nodes both
    sides always present a certificate; `client_certificates` says whether clients must, too."""

    ca: Path
    certificate: Path
    key: Path
    client_certificates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`peers` names every node with its address for the other nodes; this node listens at its own entry, or at
    `nodes_address`. The ports of `grpc_address`, `http_address` and `kafka_address` may be 0: the node then takes a
    free port. Without a `kafka_address` the node has no Kafka listener. Others get the `_advertised` address, or
    the address itself without one."""

    node_id: NodeId
    cluster_id: str
    data_dir: Path
    storage_engine: Engine = Engine.LMDB
    peers: dict[NodeId, Address]
    nodes_address: Address | None = None
    grpc_address: Address = ("127.0.0.1", 0)
    grpc_advertised: Address | None = None
    http_address: Address = ("127.0.0.1", 0)
    http_advertised: Address | None = None
    kafka_address: Address | None = None
    kafka_advertised: Address | None = None
    listeners: dict[str, ListenerConfig] = field(default_factory=dict)  # further ways in, by name
    http: HttpConfig = field(default_factory=HttpConfig)
    rack: str = ""  # the node's location: a Kafka client of the same rack reads from it
    insecure: bool = False
    tls: TlsConfig | None = None
    request_bytes_max: int = REQUEST_BYTES_DEFAULT
    settings: dict[str, str] = field(default_factory=dict)  # own defaults of settings of the cluster, by Kafka's names
    tuning: dict[str, int] = field(default_factory=dict)

    @property
    def nodes_listen(self) -> Address:
        """Where this node listens for the others."""
        return self.nodes_address or self.peers[self.node_id]

    @property
    def ways_in(self) -> list[ListenerConfig]:
        """The node's own addresses for clients, as a listener without a name, and then the named ones."""
        own = ListenerConfig(
            name="",
            grpc_address=self.grpc_address,
            grpc_advertised=self.grpc_advertised,
            kafka_address=self.kafka_address,
            kafka_advertised=self.kafka_advertised,
        )
        return [own, *self.listeners.values()]

    def tls_of(self, listener: ListenerConfig) -> TlsConfig | None:
        """The security of one way in: what it says itself, and [tls] for the rest."""
        if self.tls is None or listener.tls is False:
            return None
        names = ("ca", "certificate", "key", "client_certificates")
        own: dict[str, Any] = {name: getattr(listener, name) for name in names if getattr(listener, name) is not None}
        return dataclasses.replace(self.tls, **own)

    @property
    def http_tls(self) -> TlsConfig | None:
        return None if self.http.tls is False else self.tls

    def node_config(
        self,
        *,
        grpc_address: Address,
        http_address: Address,
        kafka_address: Address | None = None,
        listeners: tuple[Listener, ...] = (),
    ) -> NodeConfig:
        """The settings of the node itself, with the addresses that were actually bound."""
        config = NodeConfig(
            node_id=self.node_id,
            cluster_id=self.cluster_id,
            peers=dict(self.peers),
            grpc_address=format_address(told(grpc_address, self.grpc_advertised)),
            http_address=format_address(told(http_address, self.http_advertised)),
            kafka_address=format_address(told(kafka_address, self.kafka_advertised)) if kafka_address else "",
            rack=self.rack,
            listeners=listeners,
        )
        # Any: `replace` cannot know that the tunable fields, checked by name above, are the integers.
        tuning: dict[str, Any] = dict(self.tuning)
        return dataclasses.replace(config, **tuning)


_KEYS: Final = tuple(f.name for f in dataclasses.fields(ServerConfig))
_TLS_KEYS: Final = tuple(f.name for f in dataclasses.fields(TlsConfig))


def known_keys() -> Iterator[Key]:
    """Every key of node.toml as its path of tables, with "*" for a node's id or a listener's name."""
    tables = ("peers", "listeners", "http", "tls", "settings", "tuning")
    yield from ((key,) for key in _KEYS if key not in tables)
    yield from ((key, "*") for key in _KEYS if key.endswith("_advertised"))
    yield ("peers", "*")
    for f in dataclasses.fields(ListenerConfig):
        if f.name != "name":
            yield ("listeners", "*", f.name)
        if f.name.endswith("_advertised"):
            yield ("listeners", "*", f.name, "*")
    yield from (("http", f.name) for f in dataclasses.fields(HttpConfig))
    yield from (("tls", key) for key in _TLS_KEYS)
    yield from (("settings", key) for key in IN_NODE_TOML)
    yield from (("tuning", key) for key in _TUNABLE)


# ---------------------------------------------------------------------------------------------------- reading
def load_config(
    path: Path | None, *, insecure: bool = False, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """ConfigError for a file that is missing or invalid, or for a variable of `environment` that is. Without a file
    everything comes from there. `insecure` is the command line's option."""
    if path is None:
        try:
            return parse_config("", base_dir=Path.cwd(), insecure=insecure, environment=environment)
        except ConfigError as e:
            raise ConfigError(f"without --config, all settings come from the environment: {e}") from e
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror or e}; name a node.toml with --config") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8: {e.reason} at byte {e.start}; save it as UTF-8") from e
    try:
        return parse_config(text, base_dir=path.parent, insecure=insecure, environment=environment)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def parse_config(
    text: str, *, base_dir: Path, insecure: bool = False, environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """`data_dir` may be relative to `base_dir`, the file's own directory."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"not valid TOML: {e}") from e
    refuse_unknown("settings", raw, _KEYS)
    raw = overlay(raw, environment or {}, known_keys())
    refuse_unknown("settings under [tuning]", table(raw, "tuning"), tuple(_TUNABLE))
    for key in ("node_id", "cluster_id", "data_dir", "peers"):
        if key not in raw:
            raise ConfigError(f"{key} is missing: set it in node.toml, or as {variable_of((key,))}")
    defaults = {f.name: f.default for f in dataclasses.fields(ServerConfig)}
    node_id = _node_id("node_id", raw["node_id"])
    config = ServerConfig(
        node_id=node_id,
        cluster_id=string("cluster_id", raw["cluster_id"]),
        data_dir=base_dir / string("data_dir", raw["data_dir"]),
        storage_engine=_engine(string("storage_engine", raw.get("storage_engine", Engine.LMDB))),
        peers={_peer_id(k): parse_address(f"peers.{k}", v) for k, v in table(raw, "peers").items()},
        nodes_address=parse_address("nodes_address", raw["nodes_address"]) if "nodes_address" in raw else None,
        grpc_address=parse_address("grpc_address", raw.get("grpc_address", "127.0.0.1:0")),
        grpc_advertised=read_advertised("", "grpc", raw, node_id),
        http_address=parse_address("http_address", raw.get("http_address", "127.0.0.1:0")),
        http_advertised=read_advertised("", "http", raw, node_id),
        kafka_address=parse_address("kafka_address", raw["kafka_address"]) if "kafka_address" in raw else None,
        kafka_advertised=read_advertised("", "kafka", raw, node_id),
        listeners=read_listeners(raw, node_id, base_dir),
        http=read_http(raw, base_dir),
        rack=string("rack", raw.get("rack", "")),
        insecure=boolean("insecure", raw.get("insecure", False)) or insecure,
        tls=_tls(table(raw, "tls"), base_dir) if "tls" in raw else None,
        request_bytes_max=integer("request_bytes_max", raw.get("request_bytes_max", defaults["request_bytes_max"])),
        settings=dict(_settings("", table(raw, "settings"))),
        tuning={k: integer(f"tuning.{k}", v) for k, v in table(raw, "tuning").items()},
    )
    check_config(config)
    return config


def check_config(config: ServerConfig) -> None:
    """ConfigError for settings that contradict each other."""
    if config.node_id not in config.peers:
        raise ConfigError(f'[peers] must name this node too: add {config.node_id} = "127.0.0.1:PORT"')
    check_cluster_id(config.cluster_id)
    check_rack(config.rack)
    if not MIB <= config.request_bytes_max <= REQUEST_BYTES_MAX:
        raise ConfigError(f"request_bytes_max is {config.request_bytes_max}: it must be {MIB} to {REQUEST_BYTES_MAX}")
    check_settings(config.settings)
    _check_protection(config)
    _check_addresses(config)


def _check_addresses(config: ServerConfig) -> None:
    """ConfigError for addresses that nothing could connect to, or that two things share."""
    own = config.peers[config.node_id]
    if own[1] == 0 or (config.nodes_address is not None and config.nodes_address[1] == 0):
        raise ConfigError(f"peers.{config.node_id} needs a fixed port: the other nodes must know it")
    _refuse_same("peers", {f"peers.{node}": address for node, address in sorted(config.peers.items())})
    for node, address in sorted(config.peers.items()):
        if is_wildcard(address[0]):
            raise ConfigError(
                f"peers.{node} is {format_address(address)}, to which no node can connect: name a host there, and the "
                "address to listen on as nodes_address"
            )
    listened, advertised = {"nodes_address": config.nodes_listen}, {f"peers.{config.node_id}": own}
    ports = [port for listener in config.ways_in for port in listener.ports]
    for key, address, others in (*ports, ("http_address", config.http_address, config.http_advertised)):
        check_told(key, address, others)
        listened[key] = address
        advertised[key.removesuffix("address") + "advertised" if others is not None else key] = told(address, others)
    _refuse_same("listened to", listened)
    _refuse_same("advertised", advertised)


def _refuse_same(what: str, addresses: Mapping[str, Address]) -> None:
    seen: dict[Address, str] = {}
    for key, address in addresses.items():
        if address[1] and address in seen:
            raise ConfigError(
                f"{seen[address]} and {key} are both {format_address(address)} ({what}): one address leads to one port"
            )
        seen[address] = key


def _check_protection(config: ServerConfig) -> None:
    """ConfigError for an address that other machines reach if strangers could use what is there."""
    own = "nodes_address" if config.nodes_address is not None else f"peers.{config.node_id}"
    listens = [(own, config.nodes_listen, config.tls)]
    for listener in config.ways_in:
        if config.tls is None and (listener.tls or listener.client_certificates or listener.certificate):
            raise ConfigError(f"[listeners.{listener.name}] asks for TLS: name the node's certificates under [tls]")
        listens += [(key, address, config.tls_of(listener)) for key, address, _ in listener.ports]
    if config.tls is None and config.http.tls:
        raise ConfigError("http.tls is true: name the node's certificates under [tls]")
    if config.http.metrics == "clients" or config.http.probes == "clients":
        listens.append(("http_address", config.http_address, config.http_tls))
    asks_certificates = config.http_tls is not None and config.http_tls.client_certificates
    check_console(config.http, config.http_address, asks_certificates=asks_certificates)
    if config.insecure:
        return
    check_http(config.http, config.http_address, has_tls=config.http_tls is not None)
    for key, address, tls in listens:
        if not is_loopback(address[0]):
            _refuse_unprotected(key, address, tls, is_of_nodes=key == own)


def check_cluster_id(cluster_id: str) -> None:
    """ConfigError for the empty text. Any other text is valid: certificates escape what a URI cannot carry."""
    if not cluster_id:
        raise ConfigError("cluster_id must not be empty: all nodes of a cluster share one")


def check_rack(rack: str) -> None:
    """ConfigError for a name that does not fit into a registration."""
    try:
        size = len(rack.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"rack is {rack!a}: it must be valid Unicode") from None
    if size > RACK_BYTES_MAX:
        raise ConfigError(f"rack has {size} bytes: it must have at most {RACK_BYTES_MAX}")


def check_settings(settings: Mapping[str, str]) -> None:
    """ConfigError for settings that a node cannot have of its own, or for their values."""
    for key, value in settings.items():
        if key in CLUSTER_CONFIG and key not in IN_NODE_TOML:
            raise ConfigError(f"{key} is the same on all nodes: set it with `smq config set {key}=...`")
        if key not in CLUSTER_CONFIG:
            raise ConfigError(f"unknown setting {key!r}: known are {', '.join(IN_NODE_TOML)}")
        if not CLUSTER_CONFIG[key].accepts(value):
            raise ConfigError(CLUSTER_CONFIG[key].refusal(key, repr(value)))


def _refuse_unprotected(key: str, address: Address, tls: TlsConfig | None, *, is_of_nodes: bool) -> None:
    """ConfigError if other machines reach the address and nothing keeps strangers out. Between nodes TLS is always
    mutual; a client is identified by its certificate alone."""
    if tls is None:
        advice = (
            "without TLS any client that reaches that port could read and delete everything. Make certificates "
            "(`smq cert --help`) and name them under [tls]"
        )
    elif not tls.client_certificates and not is_of_nodes:
        advice = (
            "TLS without client certificates admits any client that reaches that port. Set client_certificates = true"
        )
    else:
        return
    raise ConfigError(
        f"{key} is {format_address(address)}, which is not a loopback address: {advice}, use 127.0.0.1, or set "
        "insecure = true (--insecure) on a network that you trust"
    )


# ---------------------------------------------------------------------------------------------------- writing
def dump_config(config: ServerConfig) -> str:
    """The text that `parse_config` reads back as the same settings."""
    lines = [
        f"node_id = {config.node_id}",
        f"cluster_id = {quoted(config.cluster_id)}",
        f"data_dir = {quoted(str(config.data_dir))}",
        f"storage_engine = {quoted(config.storage_engine)}",
        *_address_lines(config),
        *([f"rack = {quoted(config.rack)}"] if config.rack else []),
        f"insecure = {str(config.insecure).lower()}",
        f"request_bytes_max = {config.request_bytes_max}",
        "",
        "# Every node, this one included, and where the other nodes reach it.",
        "[peers]",
        *(f"{peer} = {quoted(format_address(address))}" for peer, address in sorted(config.peers.items())),
    ]
    lines += [line for listener in config.listeners.values() for line in dump_listener(listener)]
    lines += dump_http(config.http)
    if config.tls is not None:
        lines += [
            "",
            *tls_table(config.tls.ca, config.tls.certificate, config.tls.key),
            f"client_certificates = {str(config.tls.client_certificates).lower()}",
        ]
    if config.settings:
        # Without quotes: every value is a number or a boolean (see CLUSTER_CONFIG), and TOML reads dots as tables.
        lines += ["", "[settings]", *(f"{key} = {value}" for key, value in sorted(config.settings.items()))]
    if config.tuning:
        lines += ["", "[tuning]", *(f"{key} = {value}" for key, value in sorted(config.tuning.items()))]
    return "\n".join(lines) + "\n"


def _address_lines(config: ServerConfig) -> Iterator[str]:
    for key in _KEYS:
        if key.endswith(("_address", "_advertised")) and getattr(config, key) is not None:
            yield f"{key} = {quoted(format_address(getattr(config, key)))}"


def tls_table(ca: Path, certificate: Path, key: Path) -> list[str]:
    """The lines that name a node's files."""
    files = {"ca": ca, "certificate": certificate, "key": key}
    return ["[tls]", *(f"{name} = {quoted(str(path))}" for name, path in files.items())]


def write_config(config: ServerConfig, path: Path) -> None:
    """Atomic: a crash leaves the old file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dump_config(config))
    temporary.replace(path)


# ----------------------------------------------------------------------------------------------------- values
def _tls(table: Mapping[str, Any], base_dir: Path) -> TlsConfig:
    """Its files may be relative to `base_dir`, like `data_dir`."""
    refuse_unknown("settings under [tls]", table, _TLS_KEYS)
    for key in ("ca", "certificate", "key"):
        if key not in table:
            raise ConfigError(f"tls.{key} is missing: name a PEM file")
    files = {key: base_dir / string(f"tls.{key}", table[key]) for key in ("ca", "certificate", "key")}
    return TlsConfig(
        **files, client_certificates=boolean("tls.client_certificates", table.get("client_certificates", True))
    )


def _engine(name: str) -> Engine:
    try:
        return Engine(name)
    except ValueError:
        raise ConfigError(f"storage_engine is {name!r}: it must be {' or '.join(Engine)}") from None


def _settings(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The pairs of a table as texts. Dots in keys have made tables of it, unless they are quoted."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _settings(f"{prefix}{key}.", value)
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _node_id(key: str, value: object) -> NodeId:
    if value == _NODE_ID_OF_HOST:
        return _ordinal(socket.gethostname())
    number = integer(key, value)
    if not 1 <= number <= _NODE_ID_MAX:
        raise ConfigError(f"{key} is {number}: it must be 1 to {_NODE_ID_MAX}")
    return NodeId(number)


def _ordinal(host: str) -> NodeId:
    """A StatefulSet names its pods smq-0, smq-1 and so on; nodes are numbered from 1."""
    found = _ORDINAL.search(host)
    if found is None:
        raise ConfigError(
            f'node_id is "{_NODE_ID_OF_HOST}", and the host name {host!r} does not end in a hyphen and a number, as a '
            "StatefulSet's smq-0: give the node's number instead"
        )
    return NodeId(int(found[1]) + 1)


def _peer_id(key: str) -> NodeId:
    if not key.isascii() or not key.isdigit():
        raise ConfigError(f"[peers] has the key {key!r}: its keys are node ids")
    return _node_id(f"peers.{key}", int(key))
