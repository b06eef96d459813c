"""Settings from environment variables, by one rule.

A key of node.toml has the variable SMQ_ and the key in upper case. Two underscores stand between a table and its key;
in the names of settings, one stands for a dot: SMQ_NODE_ID, SMQ_PEERS__2, SMQ_LISTENERS__OUTSIDE__KAFKA_ADDRESS,
SMQ_SETTINGS__NUM_PARTITIONS. A variable wins over the file. A variable that is no key, but one or two letters away from
one, is refused, because a mistyped setting must not take effect as its default. Any other that begins with SMQ_ may be
of another program, and is only named in the log; the few that `smq` uses as a client are left alone.

Owns that rule. It reads no file and knows no meaning of a key: `node_toml` checks what results.
"""

import copy
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from smq.coordinator.user_errors import ConfigError
from smq.raft_state.ids import NodeId

Key = tuple[str, ...]

NODE_ID_OF_HOST: Final = "hostname"
_PREFIX: Final = "SMQ_"
_TYPING_ERRORS_MAX: Final = 2  # the letters by which a variable that is refused differs from one that is known
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
    for variable in _ours(environment):
        found = _found(variable, known)
        if found is not None:
            path, kind = found
            _put(merged, path, _value(variable, kind, environment[variable]))
            continue
        nearest = min(map(variable_of, known), key=lambda name: _letters_apart(variable.upper(), name))
        if _letters_apart(variable.upper(), nearest) <= _TYPING_ERRORS_MAX:
            raise ConfigError(f"{variable} is no setting of smq: did you mean {nearest}? Correct its name, or unset it")
    return merged


def strangers(environment: Mapping[str, str], known: Mapping[Key, Any]) -> dict[str, str]:
    """The variables that begin with SMQ_ and have no effect, each with a word of advice."""
    names = [name.removeprefix(_PREFIX) for name in (*map(variable_of, known), *_OTHERS)]
    return {variable: _advice(variable, names) for variable in _ours(environment) if _found(variable, known) is None}


def variable_of(key: Key) -> str:
    """The variable of a key."""
    return _PREFIX + "__".join(_word(part) for part in key)


def _word(part: str) -> str:
    return part.upper().replace(".", "_")


def _ours(environment: Mapping[str, str]) -> list[str]:
    return [variable for variable in sorted(environment) if variable.startswith(_PREFIX) and variable not in _OTHERS]


def _found(variable: str, known: Mapping[Key, Any]) -> tuple[Key, Any] | None:
    words = variable.removeprefix(_PREFIX).split("__")
    for key, kind in known.items():
        if len(key) == len(words) and all((k == "*" and w) or _word(k) == w for k, w in zip(key, words, strict=True)):
            return tuple(w.lower() if k == "*" else k for k, w in zip(key, words, strict=True)), kind
    return None


def _letters_apart(text: str, pattern: str) -> int:
    """How many letters of the text to add, drop or change until the pattern fits, whose "*" is one letter or more:
    Levenshtein's distance, of whose table the last row is kept."""
    before = list(range(len(pattern) + 1))
    for count, letter in enumerate(text, 1):
        row = [count]
        for i, wanted in enumerate(pattern):
            if wanted == "*":
                row.append(min(before[i], before[i + 1], row[i] + 1))
            else:
                row.append(min(before[i] + (letter != wanted), before[i + 1] + 1, row[i] + 1))
        before = row
    return before[-1]


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


def _advice(variable: str, names: Collection[str]) -> str:
    if _SERVICE_LINK.fullmatch(variable):
        return "it looks like one that Kubernetes sets for a Service: set enableServiceLinks: false in the pod's spec"
    close = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, n=1)
    return f"the nearest is {_PREFIX}{close[0]}" if close else "docs/addresses.md has the rule"
