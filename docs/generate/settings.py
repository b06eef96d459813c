"""docs/reference/settings.md from node.toml's known keys, the code's defaults and the comments of deploy/node.toml.

A key of [tuning] that the sample does not show has the comment of its field. A key without either is an error here.
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

from docs.generate import ROOT, cell, table
from smq.coordinator.config import node_toml
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.environment import Key, variable_of
from smq.coordinator.config.node_toml import HttpConfig, ListenerConfig
from smq.raft_state.cluster_config import CLUSTER_CONFIG
from smq.replication.node_config import NodeConfig

_HEAD: Final = """\
# Settings

Generated from `smq/coordinator/config/node_toml.py` and `deploy/node.toml` by `make docs`; do not edit.

Every key of node.toml, by its table. `deploy/node.toml` is a sample that explains the usual ones in their order. A
variable of the environment wins over the file, and `smq serve --set` over both, for the keys of `[settings]`
([addresses.md](../addresses.md)). Unknown keys are refused at the start. An `..._advertised` key is an address, or a
table by node id: `{ 2 = "host:7401" }`, or `SMQ_GRPC_ADVERTISED__2`.

Settings of the whole cluster and of topics are in [kafka.md](../kafka.md#configuration).
"""
_TITLES: Final = {
    "": "The node",
    "peers": "`[peers]`",
    "tls": "`[tls]`",
    "listeners": "`[listeners.NAME]`",
    "http": "`[http]`",
    "audit": "`[audit]`",
    "oauth": "`[oauth]`",
    "settings": "`[settings]`",
    "tuning": "`[tuning]`",
}
_OWNERS: Final[dict[str, type[Any]]] = {
    "": node_toml.ServerConfig,
    "tls": node_toml.TlsConfig,
    "listeners": ListenerConfig,
    "http": HttpConfig,
    "audit": node_toml.AuditConfig,
    "oauth": node_toml.OAuthConfig,
    "tuning": NodeConfig,
}
_TABLE: Final = re.compile(r"(?:# )?\[([a-z]+)[\w.]*\]")
_LINE: Final = re.compile(r"(?:# )?([a-z0-9_.]+) = \S.*")


def render() -> str:
    texts = _of_sample((ROOT / "deploy/node.toml").read_text(encoding="utf-8"))
    fields = _of_fields(NodeConfig)
    parts = [_HEAD]
    for name, title in _TITLES.items():
        parts += [f"## {title}\n", *([f"{cell(texts[name, ''])}\n"] if name else [])]
        keys = [key for key in node_toml.known_keys() if _is_row(key) and _table_of(key) == name]
        rows = ((f"`{_shown(key)}`", _default(key), _text(key, texts, fields), f"`{_variable(key)}`") for key in keys)
        parts.append(table(("key", "default", "meaning", "variable"), rows))
    return "\n".join(parts)


def _table_of(key: Key) -> str:
    return key[0] if key[1:] else ""


def _is_row(key: Key) -> bool:
    """Not the tables by node id, which the head of the page explains."""
    return key[-1] != "*" or key[0] == "peers"


def _shown(key: Key) -> str:
    return "N" if key[0] == "peers" else key[-1]


def _variable(key: Key) -> str:
    return variable_of(key).replace("*", "N" if key[0] == "peers" else "NAME")


def _default(key: Key) -> str:
    """As node.toml writes it."""
    name = _table_of(key)
    if name == "settings":
        return f"`{CLUSTER_CONFIG[key[-1]].default}`"
    if name == "peers":
        return "must be set"
    field = {f.name: f for f in dataclasses.fields(_OWNERS[name])}[key[-1]]
    if field.default is dataclasses.MISSING:
        return "must be set"
    if field.default in (None, ()):
        return "none"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple):
        return f'`"{format_address(field.default)}"`'
    return f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default}`"


def _text(key: Key, texts: dict[Key, str], fields: dict[str, str]) -> str:
    name, last = _table_of(key), key[-1]
    if name == "settings":
        return cell(CLUSTER_CONFIG[last].documentation)
    found = texts.get((name, _shown(key))) or (fields.get(last) if name == "tuning" else None)
    if found is None:
        raise LookupError(f"neither deploy/node.toml nor a comment says what {'.'.join(key)} means")
    return cell(found[0].upper() + found[1:])


def _of_sample(text: str) -> dict[Key, str]:
    """What the sample says of (table, key), and of a table as (table, ""). Keys that follow one another without a
    comment between them share the one before."""
    texts: dict[Key, str] = {}
    name, comment, is_complete = "", "", False
    for line in text.splitlines():
        heading, assigned = _TABLE.fullmatch(line), _LINE.fullmatch(line)
        if heading:
            name = heading[1]
            texts[name, ""] = comment
            comment, is_complete = "", True
        elif assigned:
            texts[name, "N" if name == "peers" else assigned[1]] = comment
            is_complete = True
        elif not line:
            comment, is_complete = "", False
        else:
            said = line.removeprefix("#").strip()
            comment, is_complete = (said if is_complete else f"{comment} {said}".strip()), False
    return texts


def _of_fields(owner: type[Any]) -> dict[str, str]:
    """The comment of each field of a dataclass: the lines before it, or what stands beside it."""
    source = inspect.getsource(owner)
    lines = source.splitlines()
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    texts = {}
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = lines[node.lineno - 1].partition("  # ")[2]
            said = beside or " ".join(_before(lines, node.lineno - 1))
            if said:
                texts[node.target.id] = said
    return texts


def _before(lines: list[str], number: int) -> Iterator[str]:
    """The lines of the comment that ends right before a line."""
    first = number
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    yield from (line.strip().removeprefix("# ") for line in lines[first:number])
