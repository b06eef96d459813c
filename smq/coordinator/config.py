"""node.toml: the settings of one server process, read once at start.

Owns the file's format, its checks and its writer. Unknown keys are refused with the list of known ones. An address that
is not loopback is refused without TLS and client certificates, unless the operator says `insecure`. It must never open
a socket, a certificate or the data directory. The composition root and the CLI import it.
"""

import dataclasses
import ipaddress
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from smq.coordinator.limits import (
    MIB,
    REQUEST_BYTES_DEFAULT,
    REQUEST_BYTES_MAX,
)
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import RACK_BYTES_MAX
from smq.replication.config import NodeConfig

Address = tuple[str, int]

_NODE_ID_MAX: Final = 2**31 - 1
_NOT_TUNABLE: Final = {"node_id", "cluster_id", "peers", "grpc_address", "http_address", "kafka_address", "rack"} | {
    "feature_level_known"  # a fact of this smq
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
    """`peers` names every node with its address for the other nodes; this node listens at its own entry. The ports of
    `grpc_address`, `http_address` and `kafka_address` may be 0: the node then takes a free port and registers it with
    the cluster. Without a `kafka_address` the node has no Kafka listener."""

    node_id: NodeId
    cluster_id: str
    data_dir: Path
    peers: dict[NodeId, Address]
    grpc_address: Address = ("127.0.0.1", 0)
    http_address: Address = ("127.0.0.1", 0)
    kafka_address: Address | None = None
    rack: str = ""  # the node's location: a Kafka client of the same rack reads from it
    insecure: bool = False
    tls: TlsConfig | None = None
    request_bytes_max: int = REQUEST_BYTES_DEFAULT
    settings: dict[str, str] = field(default_factory=dict)  # own defaults of settings of the cluster, by Kafka's names
    tuning: dict[str, int] = field(default_factory=dict)

    def node_config(
        self, *, grpc_address: Address, http_address: Address, kafka_address: Address | None = None
    ) -> NodeConfig:
        """The settings of the node itself, with the ports that were actually bound."""
        config = NodeConfig(
            node_id=self.node_id,
            cluster_id=self.cluster_id,
            peers=dict(self.peers),
            grpc_address=format_address(grpc_address),
            http_address=format_address(http_address),
            kafka_address=format_address(kafka_address) if kafka_address is not None else "",
            rack=self.rack,
        )
        # Any: `replace` cannot know that the tunable fields, checked by name above, are the integers.
        tuning: dict[str, Any] = dict(self.tuning)
        return dataclasses.replace(config, **tuning)


_KEYS: Final = tuple(f.name for f in dataclasses.fields(ServerConfig))
_TLS_KEYS: Final = tuple(f.name for f in dataclasses.fields(TlsConfig))


# ---------------------------------------------------------------------------------------------------- reading
def load_config(path: Path, *, insecure: bool = False) -> ServerConfig:
    """ConfigError for a file that is missing or invalid. `insecure` is the command line's option."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror or e}; name a node.toml with --config") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8: {e.reason} at byte {e.start}; save it as UTF-8") from e
    try:
        return parse_config(text, base_dir=path.parent, insecure=insecure)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def parse_config(text: str, *, base_dir: Path, insecure: bool = False) -> ServerConfig:
    """`data_dir` may be relative to `base_dir`, the file's own directory."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"not valid TOML: {e}") from e
    _refuse_unknown("settings", raw, _KEYS)
    _refuse_unknown("settings under [tuning]", _table(raw, "tuning"), tuple(_TUNABLE))
    for key in ("node_id", "cluster_id", "data_dir", "peers"):
        if key not in raw:
            raise ConfigError(f"{key} is missing")
    defaults = {f.name: f.default for f in dataclasses.fields(ServerConfig)}
    config = ServerConfig(
        node_id=_node_id("node_id", raw["node_id"]),
        cluster_id=_string("cluster_id", raw["cluster_id"]),
        data_dir=base_dir / _string("data_dir", raw["data_dir"]),
        peers={_peer_id(k): parse_address(f"peers.{k}", v) for k, v in _table(raw, "peers").items()},
        grpc_address=parse_address("grpc_address", raw.get("grpc_address", "127.0.0.1:0")),
        http_address=parse_address("http_address", raw.get("http_address", "127.0.0.1:0")),
        kafka_address=parse_address("kafka_address", raw["kafka_address"]) if "kafka_address" in raw else None,
        rack=_string("rack", raw.get("rack", "")),
        insecure=_bool("insecure", raw.get("insecure", False)) or insecure,
        tls=_tls(_table(raw, "tls"), base_dir) if "tls" in raw else None,
        request_bytes_max=_integer("request_bytes_max", raw.get("request_bytes_max", defaults["request_bytes_max"])),
        settings=dict(_settings("", _table(raw, "settings"))),
        tuning={k: _integer(f"tuning.{k}", v) for k, v in _table(raw, "tuning").items()},
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
    if config.peers[config.node_id][1] == 0:
        raise ConfigError(f"peers.{config.node_id} needs a fixed port: the other nodes must know it")
    listens = {
        f"peers.{config.node_id}": config.peers[config.node_id],
        "grpc_address": config.grpc_address,
        "http_address": config.http_address,
    }
    if config.kafka_address is not None:
        listens["kafka_address"] = config.kafka_address
    for key, address in listens.items():
        if not config.insecure and not is_loopback(address[0]):
            _refuse_unprotected(key, address, config.tls)


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


def _refuse_unprotected(key: str, address: Address, tls: TlsConfig | None) -> None:
    """ConfigError if other machines reach the address and nothing keeps strangers out. Between nodes TLS is always
    mutual; a client is identified by its certificate alone."""
    if tls is None:
        advice = (
            "without TLS any client that reaches that port could read and delete everything. Make certificates "
            "(`smq cert --help`) and name them under [tls]"
        )
    elif not tls.client_certificates and not key.startswith("peers."):
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
        f"cluster_id = {_quoted(config.cluster_id)}",
        f"data_dir = {_quoted(str(config.data_dir))}",
        f"grpc_address = {_quoted(format_address(config.grpc_address))}",
        f"http_address = {_quoted(format_address(config.http_address))}",
        *([f"kafka_address = {_quoted(format_address(config.kafka_address))}"] if config.kafka_address else []),
        *([f"rack = {_quoted(config.rack)}"] if config.rack else []),
        f"insecure = {str(config.insecure).lower()}",
        f"request_bytes_max = {config.request_bytes_max}",
        "",
        "# Every node, this one included, and where the other nodes reach it.",
        "[peers]",
        *(f"{peer} = {_quoted(format_address(address))}" for peer, address in sorted(config.peers.items())),
    ]
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


def tls_table(ca: Path, certificate: Path, key: Path) -> list[str]:
    """The lines that name a node's files."""
    files = {"ca": ca, "certificate": certificate, "key": key}
    return ["[tls]", *(f"{name} = {_quoted(str(path))}" for name, path in files.items())]


def write_config(config: ServerConfig, path: Path) -> None:
    """Atomic: a crash leaves the old file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dump_config(config))
    temporary.replace(path)


# -------------------------------------------------------------------------------------------------- addresses
def parse_address(key: str, value: object) -> Address:
    """host:port, [v6]:port."""
    host, colon, port = _string(key, value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{key} is {value!r}: it must be host:port, such as 127.0.0.1:9092")
    return host, int(port)


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach the host. Names other than localhost do not count as loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------- values
def _refuse_unknown(what: str, table: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigError(f"unknown {what}: {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a table: [{key}]")
    return value


def _tls(table: Mapping[str, Any], base_dir: Path) -> TlsConfig:
    """Its files may be relative to `base_dir`, like `data_dir`."""
    _refuse_unknown("settings under [tls]", table, _TLS_KEYS)
    for key in ("ca", "certificate", "key"):
        if key not in table:
            raise ConfigError(f"tls.{key} is missing: name a PEM file")
    files = {key: base_dir / _string(f"tls.{key}", table[key]) for key in ("ca", "certificate", "key")}
    return TlsConfig(
        **files, client_certificates=_bool("tls.client_certificates", table.get("client_certificates", True))
    )


def _settings(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The pairs of a table as texts. Dots in keys have made tables of it, unless they are quoted."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _settings(f"{prefix}{key}.", value)
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _string(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}: it must be a string")
    return value


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} is {value!r}: it must be a whole number, 0 or more")
    return value


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}: it must be true or false")
    return value


def _node_id(key: str, value: object) -> NodeId:
    number = _integer(key, value)
    if not 1 <= number <= _NODE_ID_MAX:
        raise ConfigError(f"{key} is {number}: it must be 1 to {_NODE_ID_MAX}")
    return NodeId(number)


def _peer_id(key: str) -> NodeId:
    if not key.isascii() or not key.isdigit():
        raise ConfigError(f"[peers] has the key {key!r}: its keys are node ids")
    return _node_id(f"peers.{key}", int(key))


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes are a subset of TOML's."""
    return json.dumps(text)
