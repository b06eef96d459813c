"""Settings from environment variables, by one rule.

A key of node.toml has the variable SMQ_ and the key in upper case. Two underscores stand between a table and its key;
in the names of settings, one stands for a dot: SMQ_NODE_ID, SMQ_PEERS__2, SMQ_LISTENERS__OUTSIDE__KAFKA_ADDRESS,
SMQ_SETTINGS__NUM_PARTITIONS. A variable wins over the file. A variable that begins with SMQ_ and is no key is refused,
because a mistyped setting must not go unnoticed; the few that `smq` uses as a client are left alone.

Owns that rule. It reads no file and knows no meaning of a key: `node_toml` checks what results. Only it imports this.
"""

import copy
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from smq.coordinator.user_errors import ConfigError
from smq.raft_state.ids import NodeId

Key = tuple[str, ...]

NODE_ID_OF_HOST: Final = "hostname"
_PREFIX: Final = "SMQ_"
# Of `smq` as a client (smq.clients.tls, cli.connect), and of `smq serve` itself.
_OTHERS: Final = frozenset(
    {"SMQ_BOOTSTRAP", "SMQ_CLUSTER_DIR", "SMQ_CONFIG", "SMQ_TLS_CA", "SMQ_TLS_CERTIFICATE", "SMQ_TLS_KEY"}
)
# Kubernetes sets these in a pod for every Service, and for one that is named smq, or smq-..., they look like ours.
_SERVICE_LINK: Final = re.compile(r"SMQ_(.*_)?(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP|SCTP).*)?)")


def overlay(raw: Mapping[str, Any], environment: Mapping[str, str], known: Mapping[Key, Any]) -> dict[str, Any]:
    """A copy of the file's content with the variables' values in it. `known` has every key as its path of tables, in
    which "*" stands for what an operator names, a node id or a listener; and the type of its value."""
    merged = copy.deepcopy(dict(raw))
    for variable, text in sorted(environment.items()):
        if variable.startswith(_PREFIX) and variable not in _OTHERS:
            path, kind = _found(variable, known)
            _put(merged, path, _value(variable, kind, text))
    return merged


def variable_of(key: Key) -> str:
    """The variable of a key."""
    return _PREFIX + "__".join(_word(part) for part in key)


def _word(part: str) -> str:
    return part.upper().replace(".", "_")


def _found(variable: str, known: Mapping[Key, Any]) -> tuple[Key, Any]:
    words = variable.removeprefix(_PREFIX).split("__")
    for key, kind in known.items():
        if len(key) == len(words) and all((k == "*" and w) or _word(k) == w for k, w in zip(key, words, strict=True)):
            return tuple(w.lower() if k == "*" else k for k, w in zip(key, words, strict=True)), kind
    raise ConfigError(_unknown(variable, known))


def _value(variable: str, kind: Any, text: str) -> object:
    """The text as the type that TOML would give it. Everything else is a text."""
    if kind is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{variable} is {text!r}: it must be true or false")
        return text == "true"
    if kind is int or (kind is NodeId and text != NODE_ID_OF_HOST):
        if not text.isascii() or not text.isdigit():
            raise ConfigError(f"{variable} is {text!r}: it must be a whole number, 0 or more")
        return int(text)
    return text


def _put(merged: dict[str, Any], path: Key, value: object) -> None:
    """A table takes the place of what was no table: addresses by node, of one address for all."""
    *tables, last = path
    found = merged
    for name in tables:
        inner = found.get(name)
        found[name] = found = inner if isinstance(inner, dict) else {}
    found[last] = value


def _unknown(variable: str, keys: Iterable[Key]) -> str:
    if _SERVICE_LINK.fullmatch(variable):
        return (
            f"{variable} is no setting. It looks like one that Kubernetes sets for a Service: set enableServiceLinks: "
            "false in the pod's spec"
        )
    close = difflib.get_close_matches(variable, [variable_of(key) for key in keys], n=1)
    hint = f"did you mean {close[0]}?" if close else "docs/addresses.md has the rule"
    return f"{variable} is no setting of smq, and every variable that begins with {_PREFIX} must be one: {hint}"
