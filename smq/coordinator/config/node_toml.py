"""node.toml: the settings of one server process, read once at start.

Owns the file's format (the fields of its dataclasses, by their types), its checks and its writer. Unknown keys are
refused with the list of known ones. An address that is not loopback is refused without TLS and client certificates,
unless the operator says `insecure`. It must never open a socket, a certificate or the data directory. The composition
root and the CLI import it.
"""

import dataclasses
import json
import re
import socket
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_type_hints

from smq.clients import scram
from smq.coordinator.config.addresses import (
    Address,
    format_address,
    is_loopback,
    is_private,
    is_wildcard,
    parse_address,
)
from smq.coordinator.config.certificate_users import CertificateUsers
from smq.coordinator.config.environment import NODE_ID_OF_HOST, Key, overlay, variable_of
from smq.coordinator.limits import MIB, REQUEST_BYTES_MAX
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML
from smq.raft_state.commands import Listener
from smq.raft_state.handlers.users import name_fault
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import LISTENERS_MAX, RACK_BYTES_MAX
from smq.replication.node_config import NodeConfig

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")  # without hyphens: it is part of the names of variables
_NODE_ID_MAX: Final = 2**31 - 1
_CLOCK_SKEW_MS_MAX: Final = 600_000  # a token is usable for that much longer
_ORDINAL: Final = re.compile(r"-(\d{1,9})$")
_NOT_TUNABLE: Final = {"node_id", "cluster_id", "peers", "grpc_address", "http_address", "kafka_address", "rack"} | {
    "listeners",
    "feature_level_known",  # a fact of this smq
}
TUNABLE: Final = tuple(f.name for f in dataclasses.fields(NodeConfig) if f.name not in _NOT_TUNABLE)

T = TypeVar("T")
Advertised = Annotated[Address, "advertised"]  # in the file also a table by node id, so that all nodes can share one
Probes = Literal["clients", "anyone"]
Metrics = Literal["clients", "token", "anyone"]
Sasl = Annotated[tuple[str, ...], "mechanisms"]
Names = Annotated[tuple[str, ...], "names"]
FileOrUrl = Annotated[str, "https"]  # a file, or a URL by https
BEARER: Final = "OAUTHBEARER"
HTTPS: Final = "https://"
_SECRET_IN_CLEAR: Final = ("PLAIN", BEARER)
PASSWORD_MECHANISMS: Final = (*scram.BY_NAME, "PLAIN")
SASL_MECHANISMS: Final = (*PASSWORD_MECHANISMS, BEARER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """One way in. The node's own addresses are the one without a name. A client that came through a listener gets the
    addresses that the nodes advertise for the listener of that name. None leaves security to [tls]."""

    name: str = ""  # of the table, not a key in it
    grpc_address: Address | None = None
    grpc_advertised: Advertised | None = None
    kafka_address: Address | None = None
    kafka_advertised: Advertised | None = None
    tls: bool | None = None
    client_certificates: bool | None = None
    sasl: Sasl = ()  # mechanisms: with any, a client has to prove a user, and needs no certificate. gRPC takes SCRAM
    sasl_session_ms: int | None = None  # after this time it has to do so again; None for never
    ca: Path | None = None  # these three: of a certificate of its own, such as one that browsers trust
    certificate: Path | None = None
    key: Path | None = None
    certificate_users: Names | None = None  # for `ca`: its certificates may name other users than those of [tls]

    def setting(self, name: str) -> str:
        """The setting as the file names it."""
        return f"listeners.{self.name}.{name}" if self.name else name

    @property
    def ports(self) -> Iterator[tuple[str, Address, Address | None]]:
        """(key, listened to, advertised) of each port that it opens."""
        if self.grpc_address is not None:
            yield self.setting("grpc_address"), self.grpc_address, self.grpc_advertised
        if self.kafka_address is not None:
            yield self.setting("kafka_address"), self.kafka_address, self.kafka_advertised


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Which callers get an answer on the HTTP port. "clients": those that may use the node's other ports. `tls`: None
    leaves it to [tls]. The token is in a file, so that it is in no process list and in no copy of this one."""

    tls: bool | None = None
    probes: Probes = "clients"  # "anyone": /healthz and /readyz then say no more than yes or no to strangers
    metrics: Metrics = "clients"  # or "token" (and clients), or "anyone" at an address that is not public
    token_file: Path | None = None
    users: bool = False  # whether users log in: for the console, and for /metrics
    console_changes: bool = False  # whether an operator may change the cluster through the console


def told(listened: Address, advertised: Address | None) -> Address:
    """The address for others, given the one that was bound. Port 0 stands for the bound port."""
    if advertised is None:
        return listened
    return advertised[0], advertised[1] or listened[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files: `ca` (one or more trusted certificates), this node's `certificate` and its `key`. Between nodes both
    sides always present a certificate; `client_certificates` says whether clients must, too."""

    ca: Path
    certificate: Path
    key: Path
    client_certificates: bool = True
    certificate_users: Names = ()  # rules by which a client's certificate names a user; without: it may do everything


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthConfig:
    """Which tokens OAUTHBEARER accepts: signed by a key of `jwks`, from `issuer`, for one of `audience`, with all of
    `scopes`."""

    jwks: FileOrUrl
    ca: Path | None = None  # the authorities that may sign the certificate of the URL; None for the system's
    issuer: str
    audience: Names
    scopes: Names = ()
    principal_claim: str = "sub"  # whose value is the user's name
    clock_skew_ms: int = 30_000  # by which the issuer's clock may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The log of administrative acts and refusals."""

    file: Path | None = None  # None: audit.jsonl in the data directory
    file_bytes_max: int = 16 << 20  # then the next file begins
    files: int = 8  # the newest ones are kept; 0: no log


Peers = dict[NodeId, Address]
Listeners = dict[str, ListenerConfig]
Settings = dict[str, str]
Tuning = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`peers` names every node with its address for the other nodes; this node listens at its own entry, or at
    `nodes_address`. The ports of `grpc_address`, `http_address` and `kafka_address` may be 0: the node then takes a
    free port. Without a `kafka_address` the node has no Kafka listener. Others get the `_advertised` address, or
    the address itself without one."""

    node_id: NodeId
    cluster_id: str
    data_dir: Path
    peers: Peers
    nodes_address: Address | None = None
    grpc_address: Address = ("127.0.0.1", 0)
    grpc_advertised: Advertised | None = None
    http_address: Address = ("127.0.0.1", 0)
    http_advertised: Advertised | None = None
    kafka_address: Address | None = None
    kafka_advertised: Advertised | None = None
    sasl: Sasl = ()
    sasl_session_ms: int | None = None
    super_users: Names = ()  # that may do everything
    oauth: OAuthConfig | None = None
    listeners: Listeners = field(default_factory=dict)  # further ways in, by name
    http: HttpConfig = field(default_factory=HttpConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    rack: str = ""  # the node's location: a Kafka client of the same rack reads from it
    insecure: bool = False
    tls: TlsConfig | None = None
    request_bytes_max: int = REQUEST_BYTES_MAX
    settings: Settings = field(default_factory=dict)  # own defaults of settings of the cluster, by Kafka's names
    tuning: Tuning = field(default_factory=dict)

    @property
    def nodes_listen(self) -> Address:
        """Where this node listens for the others."""
        return self.nodes_address or self.peers[self.node_id]

    @property
    def ways_in(self) -> list[ListenerConfig]:
        """The node's own addresses for clients, as a listener without a name, and then the named ones."""
        own = ListenerConfig(
            grpc_address=self.grpc_address,
            grpc_advertised=self.grpc_advertised,
            kafka_address=self.kafka_address,
            kafka_advertised=self.kafka_advertised,
            sasl=self.sasl,
            sasl_session_ms=self.sasl_session_ms,
        )
        return [own, *self.listeners.values()]

    def tls_of(self, listener: ListenerConfig) -> TlsConfig | None:
        """The security of one way in: what it says itself, and [tls] for the rest."""
        if self.tls is None or listener.tls is False:
            return None
        names = ("ca", "certificate", "key", "client_certificates", "certificate_users")
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


# ----------------------------------------------------------------------------------------------------- format
def kinds_of(owner: type[Any]) -> dict[str, Any]:
    """The keys of a table with the types of their values. None is none of these: it stands for a key left out."""
    kinds = get_type_hints(owner, include_extras=True)
    if owner is ListenerConfig:
        del kinds["name"]
    return {key: get_args(kind)[0] if NoneType in get_args(kind) else kind for key, kind in kinds.items()}


def known_keys(owner: type[Any] = ServerConfig, path: Key = ()) -> dict[Key, Any]:
    """Every key of node.toml as its path of tables, with "*" for a node's id or a listener's name; and its type."""
    inner: dict[Any, Collection[str]] = {Peers: "*", Settings: IN_NODE_TOML, Tuning: TUNABLE}
    found: dict[Key, Any] = {}
    for name, kind in kinds_of(owner).items():
        key = (*path, name)
        if kind in inner:
            found |= {(*key, each): get_args(kind)[1] for each in inner[kind]}
        elif kind == Listeners:
            found |= known_keys(ListenerConfig, (*key, "*"))
        elif kind in (AuditConfig, HttpConfig, OAuthConfig, TlsConfig):
            found |= known_keys(kind, key)
        else:
            found[key] = kind
            if kind == Advertised:
                found[*key, "*"] = Address
    return found


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
    """Paths may be relative to `base_dir`, the file's own directory."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"not valid TOML: {e}") from e
    raw = overlay(raw, environment or {}, known_keys())
    if raw.get("node_id") == NODE_ID_OF_HOST:
        raw["node_id"] = _ordinal(socket.gethostname())
    config = _read(base_dir, raw)
    config = dataclasses.replace(config, insecure=config.insecure or insecure)
    check_config(config)
    return config


def _read(base_dir: Path, raw: Mapping[str, Any]) -> ServerConfig:
    """What the file and the environment say, read by the types of the fields."""

    def table(owner: type[Any], key: str, value: object) -> Any:
        kinds, given = kinds_of(owner), _known(key, value, kinds_of(owner))
        for f in dataclasses.fields(owner):
            if f.name not in given and f.default is f.default_factory:  # neither: both are MISSING
                how = f"set it in node.toml, or as {variable_of((*filter(None, (key,)), f.name))}"
                if owner is TlsConfig:
                    how = "name a PEM file"
                raise ConfigError(f"{_join(key, f.name)} is missing: {how}")
        return owner(**{k: readers[kind](_join(key, k), given[k]) for k, kind in kinds.items() if k in given})

    def listeners(key: str, value: object) -> Listeners:
        found = {name: table(ListenerConfig, _join(key, name), v) for name, v in _named(key, value).items()}
        return {name: dataclasses.replace(found[name], name=name) for name in sorted(found)}

    readers: dict[Any, Callable[[str, Any], Any]] = {
        **{kind: partial(_plain, kind) for kind in _PLAIN},
        Probes: partial(_choice, get_args(Probes)),
        Metrics: partial(_choice, get_args(Metrics)),
        Sasl: _sasl,
        Names: _names,
        FileOrUrl: lambda key, value: _file_or_url(base_dir, key, value),
        NodeId: _node_id,
        Path: lambda key, value: base_dir / _plain(str, key, value),
        Address: parse_address,
        Advertised: lambda key, value: parse_address(key, _of_node(key, value, raw["node_id"])),
        Peers: lambda key, value: {_peer_id(k): parse_address(_join(key, k), v) for k, v in _table(key, value).items()},
        Listeners: listeners,
        HttpConfig: partial(table, HttpConfig),
        AuditConfig: partial(table, AuditConfig),
        OAuthConfig: partial(table, OAuthConfig),
        TlsConfig: partial(table, TlsConfig),
        Settings: lambda key, value: dict(_settings("", _table(key, value))),
        Tuning: lambda key, value: {k: _plain(int, _join(key, k), v) for k, v in _known(key, value, TUNABLE).items()},
    }
    config: ServerConfig = table(ServerConfig, "", raw)
    return config


_PLAIN: Final = {str: "a string", bool: "true or false", int: "a whole number, 0 or more"}


def _join(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _plain(kind: type[T], key: str, value: Any) -> T:
    if type(value) is not kind or (kind is int and value < 0):  # type: ignore[operator] # an integer then
        raise ConfigError(f"{key} is {value!r}: it must be {_PLAIN[kind]}")
    return value


def _choice(choices: tuple[str, ...], key: str, value: object) -> str:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}: it must be {' or '.join(map(repr, choices))}")
    return str(value)


def _names(key: str, value: object) -> Names:
    """A list; of a variable of the environment, a text with commas."""
    found = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f"{key} is {value!r}: it must be a list of names")
    return tuple(found)


def _file_or_url(base_dir: Path, key: str, value: object) -> FileOrUrl:
    text = _plain(str, key, value)
    if text.startswith(HTTPS):
        return text
    if "://" in text:
        raise ConfigError(f"{key} is {text!r}: it must be a file, or a URL that begins with {HTTPS}")
    return str(base_dir / text)


def _sasl(key: str, value: object) -> Sasl:
    """A list; of a variable of the environment, a text with commas."""
    found = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{key} is {value!r}: it must be a list of {', '.join(SASL_MECHANISMS)}")
    for name in found:
        if name not in SASL_MECHANISMS:
            raise ConfigError(f"{key} names {name!r}: known are {', '.join(SASL_MECHANISMS)}")
    if len(set(found)) < len(found):
        raise ConfigError(f"{key} names a mechanism twice")
    return tuple(found)


def _table(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a table: [{key}]")
    return value


def _known(key: str, value: object, known: Collection[str]) -> dict[str, Any]:
    """The table, if it has no other keys."""
    unknown = sorted(set(_table(key, value)) - set(known))
    if unknown:
        what = f"settings under [{key}]" if key else "settings"
        raise ConfigError(f"unknown {what}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return _table(key, value)


def _named(key: str, value: object) -> dict[str, Any]:
    """The tables of the listeners, by name."""
    found = _table(key, value)
    for name, listener in found.items():
        if not isinstance(listener, dict):
            raise ConfigError(
                f"{key}.{name} is {listener!r}: a listener needs a name. Write a table [listeners.NAME], such as "
                "[listeners.outside], with its addresses"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a listener: use up to 32 of a-z, 0-9 and '_', a letter first, such as outside"
            )
    if len(found) > LISTENERS_MAX:
        raise ConfigError(f"[listeners] has {len(found)} entries: a node may have {LISTENERS_MAX}")
    return found


def _of_node(key: str, value: object, node_id: int) -> object:
    """This node's address of a table by node id, with which all nodes can share one file."""
    if not isinstance(value, dict):
        return value
    seen: dict[object, str] = {}
    for node, address in value.items():
        _check_digits(key, node)
        if address in seen:
            raise ConfigError(f"{key} gives nodes {seen[address]} and {node} the same address {address!r}")
        seen[_plain(str, _join(key, node), address)] = node
    if str(node_id) not in value:
        raise ConfigError(f'{key} names no address for node {node_id}: add {node_id} = "HOST:PORT"')
    return value[str(node_id)]


def _settings(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The pairs of a table as texts. Dots in keys have made tables of it, unless they are quoted."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _settings(f"{prefix}{key}.", value)
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _node_id(key: str, value: object) -> NodeId:
    number = _plain(int, key, value)
    if not 1 <= number <= _NODE_ID_MAX:
        raise ConfigError(f"{key} is {number}: it must be 1 to {_NODE_ID_MAX}")
    return NodeId(number)


def _ordinal(host: str) -> NodeId:
    """A StatefulSet names its pods smq-0, smq-1 and so on; nodes are numbered from 1."""
    found = _ORDINAL.search(host)
    if found is None:
        raise ConfigError(
            f'node_id is "{NODE_ID_OF_HOST}", and the host name {host!r} does not end in a hyphen and a number, as a '
            "StatefulSet's smq-0: give the node's number instead"
        )
    return NodeId(int(found[1]) + 1)


def _peer_id(key: str) -> NodeId:
    _check_digits("[peers]", key)
    return _node_id(f"peers.{key}", int(key))


def _check_digits(table: str, key: str) -> None:
    if not key.isascii() or not key.isdigit():
        raise ConfigError(f"{table} has the key {key!r}: its keys are node ids")


# ----------------------------------------------------------------------------------------------------- checks
def check_config(config: ServerConfig) -> None:
    """ConfigError for settings that contradict each other."""
    if config.node_id not in config.peers:
        raise ConfigError(f'[peers] must name this node too: add {config.node_id} = "127.0.0.1:PORT"')
    check_cluster_id(config.cluster_id)
    check_rack(config.rack)
    if not MIB <= config.request_bytes_max <= REQUEST_BYTES_MAX:
        raise ConfigError(f"request_bytes_max is {config.request_bytes_max}: it must be {MIB} to {REQUEST_BYTES_MAX}")
    check_settings(config.settings)
    for listener in config.ways_in:
        _check_listener(listener)
    _check_users(config)
    _check_protection(config)
    _check_addresses(config)


def _check_listener(listener: ListenerConfig) -> None:
    table = f"[listeners.{listener.name}]"
    if (listener.certificate is None) != (listener.key is None) or (listener.ca and not listener.certificate):
        raise ConfigError(f"{table} needs a certificate and its key together; ca is for these alone")
    if listener.grpc_address is None and listener.kafka_address is None:
        raise ConfigError(f"{table} opens no port: give it a grpc_address or a kafka_address, or remove it")
    if listener.sasl_session_ms is not None and not listener.sasl:
        raise ConfigError(f"{listener.setting('sasl_session_ms')} is set, but {listener.setting('sasl')} is not")
    for kind in ("grpc", "kafka"):
        if getattr(listener, f"{kind}_advertised") is not None and getattr(listener, f"{kind}_address") is None:
            advertised, address = listener.setting(f"{kind}_advertised"), listener.setting(f"{kind}_address")
            raise ConfigError(f"{advertised} is set, but {address} is not: set it to the address to listen on")


def _check_addresses(config: ServerConfig) -> None:
    """ConfigError for addresses that nothing could connect to, or that two things share."""
    own = config.peers[config.node_id]
    if own[1] == 0 or (config.nodes_address is not None and config.nodes_address[1] == 0):
        raise ConfigError(f"peers.{config.node_id} needs a fixed port: the other nodes must know it")
    peers = {f"peers.{node}": address for node, address in sorted(config.peers.items())}
    _refuse_same("peers", peers)
    for key, address in peers.items():
        if is_wildcard(address[0]):
            raise ConfigError(
                f"{key} is {format_address(address)}, to which no node can connect: name a host there, and the "
                "address to listen on as nodes_address"
            )
    listened, advertised = {"nodes_address": config.nodes_listen}, {f"peers.{config.node_id}": own}
    ports = [port for listener in config.ways_in for port in listener.ports]
    for key, address, others in (*ports, ("http_address", config.http_address, config.http_advertised)):
        others_key = key.removesuffix("address") + "advertised"
        if others is not None and is_wildcard(others[0]):
            raise ConfigError(
                f"{others_key} is {format_address(others)}, to which no client can connect: name the host by which "
                "clients reach this node"
            )
        if others is None and is_wildcard(address[0]):
            raise ConfigError(
                f"{key} is {format_address(address)}: no client can connect to that address. Set {others_key} to the "
                "HOST:PORT by which clients reach this node"
            )
        listened[key] = address
        advertised[key if others is None else others_key] = told(address, others)
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
    users: set[str] = set()  # keys of ports that ask for them
    for listener in config.ways_in:
        if config.tls is None and (listener.tls or listener.client_certificates or listener.certificate):
            raise ConfigError(f"[listeners.{listener.name}] asks for TLS: name the node's certificates under [tls]")
        listens += [(key, address, config.tls_of(listener)) for key, address, _ in listener.ports]
        if listener.sasl:
            _check_sasl(listener, config.tls_of(listener))
            users |= {key for key, _, _ in listener.ports}
    if config.tls is None and config.http.tls:
        raise ConfigError("http.tls is true: name the node's certificates under [tls]")
    if config.http.metrics == "clients" or config.http.probes == "clients":
        listens.append(("http_address", config.http_address, config.http_tls))
    _check_http(config)
    if config.http.users:
        users.add("http_address")
    for key, address, tls in listens:
        if not is_loopback(address[0]) and not config.insecure:
            _refuse_unprotected(key, address, tls, is_identified=key == own or key in users)


def _check_sasl(listener: ListenerConfig, tls: TlsConfig | None) -> None:
    """ConfigError for what would send passwords, or the tokens of gRPC's users, in clear. `insecure` allows neither."""
    key = listener.setting("sasl")
    for name in _SECRET_IN_CLEAR:
        if name in listener.sasl and tls is None:
            what = "tokens" if name == BEARER else "passwords"
            raise ConfigError(f"{key} has {name}, which sends {what}: turn on TLS there, or take it out")
    if listener.grpc_address is None:
        return
    port = listener.setting("grpc_address")
    if tls is None:
        raise ConfigError(
            f"{key} asks for users, and without TLS their tokens at {port} could be read on the way: turn on TLS, "
            "or give the Kafka port a listener of its own ([listeners.NAME])"
        )
    if not set(listener.sasl) & set(scram.BY_NAME):
        raise ConfigError(f"{key} has no mechanism for {port}, which takes {' and '.join(scram.BY_NAME)}: add one")


def _check_users(config: ServerConfig) -> None:
    """ConfigError for users that cannot be, and for tokens that no rule could refuse, or accept."""
    for way in config.ways_in:
        if BEARER in way.sasl and config.oauth is None:
            raise ConfigError(f"{way.setting('sasl')} has {BEARER}: say under [oauth] which tokens are accepted")
    for name in config.super_users:
        if (fault := name_fault(name)) is not None:
            raise ConfigError(f"super_users: {fault}")
    _check_certificate_users(config)
    if config.oauth is None:
        return
    for key in ("jwks", "issuer", "audience", "principal_claim"):
        if not getattr(config.oauth, key):
            raise ConfigError(f"oauth.{key} is empty: without it, tokens of others would be accepted")
    if config.oauth.clock_skew_ms > _CLOCK_SKEW_MS_MAX:
        raise ConfigError(f"oauth.clock_skew_ms is more than {_CLOCK_SKEW_MS_MAX}: set the clocks instead")
    if config.oauth.ca is not None and not config.oauth.jwks.startswith(HTTPS):
        raise ConfigError("oauth.ca is set, but oauth.jwks is a file")


def _check_certificate_users(config: ServerConfig) -> None:
    """ConfigError for rules that are none, for a port on which a client without a certificate may do more than one with
    it, and for an authority of one listener that could name the users of another's."""
    if config.tls is None:
        return
    for way in config.ways_in:
        tls, key = config.tls_of(way), way.setting("certificate_users")
        if way.certificate_users and way.ca is None:
            raise ConfigError(
                f"{key} is set, but {way.setting('ca')} is not: for the other authorities [tls] has the rules"
            )
        if tls is None or not tls.certificate_users or way.sasl:
            continue
        if way.ca is not None and way.certificate_users is None:
            raise ConfigError(f"{way.setting('ca')} could name any user of [tls], super users included: set {key}, too")
        try:
            CertificateUsers(tls.certificate_users)
        except ConfigError as e:
            raise ConfigError(f"{key if way.certificate_users else 'tls.certificate_users'}: {e}") from e
        if not tls.client_certificates:
            raise ConfigError(
                f"tls.certificate_users makes users of certificates, and {way.setting('client_certificates')} is "
                "false: a client without one could do everything. Set it to true, or give the listener sasl"
            )


def _check_http(config: ServerConfig) -> None:
    """ConfigError if a stranger could change the cluster through the console; or, unless that is allowed by `insecure`,
    read /metrics or its token."""
    http, tls, shown = config.http, config.http_tls, format_address(config.http_address)
    if http.users and tls is None:
        raise ConfigError(
            "http.users is true, and passwords could be read on the way: turn on TLS there, or take it out"
        )
    is_anonymous = tls is None or not (tls.client_certificates or http.users)
    if http.console_changes and is_anonymous and not is_loopback(config.http_address[0]):
        raise ConfigError(
            f"http.console_changes is true, and anyone who reaches http_address {shown} could change the cluster: ask "
            "browsers for certificates ([tls] with client_certificates = true, without http.tls = false), listen on "
            "127.0.0.1, or set console_changes = false"
        )
    if config.insecure:
        return
    if http.metrics == "token" and http.token_file is None:
        raise ConfigError('http.metrics is "token": name the file with the token as http.token_file')
    if http.metrics != "token" and http.token_file is not None:
        raise ConfigError(f'http.token_file is set, but http.metrics is {http.metrics!r}: set metrics = "token"')
    if http.metrics == "anyone" and not is_private(config.http_address[0]):
        raise ConfigError(
            f'http.metrics is "anyone", and http_address {shown} may be public: listen on a private address, such as '
            '127.0.0.1 or 10.0.0.5, or set metrics = "token"'
        )
    if http.metrics == "token" and tls is None and not is_private(config.http_address[0]):
        raise ConfigError(
            f"http_address {shown} may be public, and without TLS the token of /metrics could be read on the way: turn "
            "on http.tls, or listen on a private address"
        )


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


def _refuse_unprotected(key: str, address: Address, tls: TlsConfig | None, *, is_identified: bool) -> None:
    """ConfigError if other machines reach the address and nothing keeps strangers out. `is_identified`: by more than a
    certificate that [tls] asks clients for. Between nodes TLS is always mutual; and SASL without TLS protects only the
    password."""
    if tls is None:
        advice = (
            "without TLS any client that reaches that port could read and delete everything. Make certificates "
            "(`smq cert --help`) and name them under [tls]"
        )
    elif not tls.client_certificates and not is_identified:
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
    lines = _lines(_values(config))
    lines += ["", "# Every node, this one included, and where the other nodes reach it."]
    lines += dump_table("peers", {str(peer): address for peer, address in sorted(config.peers.items())})
    tables = {f"listeners.{name}": _values(listener) for name, listener in config.listeners.items()}
    tables["http"] = _values(config.http) if config.http != HttpConfig() else {}
    tables["audit"] = _values(config.audit) if config.audit != AuditConfig() else {}
    tables["oauth"] = _values(config.oauth) if config.oauth is not None else {}
    tables["tls"] = _values(config.tls) if config.tls is not None else {}
    # Numbers and booleans (see CLUSTER_CONFIG) without quotes. TOML reads the dots of their keys as tables.
    tables["settings"] = {key: json.loads(value) for key, value in sorted(config.settings.items())}
    tables["tuning"] = dict(sorted(config.tuning.items()))
    for name, values in tables.items():
        if values:
            lines += ["", *dump_table(name, values)]
    return "\n".join(lines) + "\n"


def dump_table(name: str, values: Mapping[str, object]) -> list[str]:
    return [f"[{name}]", *_lines(values)]


def _values(
    table: ServerConfig | ListenerConfig | AuditConfig | HttpConfig | OAuthConfig | TlsConfig,
) -> dict[str, object]:
    return {key: getattr(table, key) for key in kinds_of(type(table))}


def _lines(values: Mapping[str, object]) -> list[str]:
    """What is set, without tables."""
    return [
        f"{key} = {_toml(v)}"
        for key, v in values.items()
        if isinstance(v, int | str | Path | tuple) and v not in ("", ())
    ]


def _toml(value: object) -> str:
    if isinstance(value, int):
        return str(value).lower()
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return json.dumps(value)  # mechanisms; an address has a port
    text = format_address(value) if isinstance(value, tuple) else str(value)
    return json.dumps(text)  # a TOML basic string: JSON's escapes are a subset of TOML's


def write_config(config: ServerConfig, path: Path) -> None:
    """Atomic: a crash leaves the old file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dump_config(config))
    temporary.replace(path)
