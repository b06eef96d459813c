"""The ways in to a node, as node.toml writes them: where a port listens, which address clients get, what they show.

Owns the named listeners, the rule of the HTTP port, and the checks of both. It never opens a socket or a file. `config`
imports it.

An address that is listened to and the one that is advertised are two settings: behind NAT, in a container and under a
load balancer they differ. Without the second, the first is advertised.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from smq.coordinator.addresses import Address, format_address, is_loopback, is_private, is_wildcard, parse_address
from smq.coordinator.user_errors import ConfigError
from smq.coordinator.values import boolean, choice, quoted, refuse_unknown, string, table
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import LISTENERS_MAX

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")  # without hyphens: it is part of the names of variables
_FILES: Final = ("ca", "certificate", "key")
_KEYS: Final = (
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
    refuse_unknown(f"settings under [listeners.{name}]", raw, _KEYS)
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
    for name in _KEYS:
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
