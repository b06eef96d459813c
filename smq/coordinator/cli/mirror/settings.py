"""mirror.toml: the other cluster, and what of it is copied.

Owns the file's keys; it refuses what it does not know. The commands of `smq mirror` import it.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from smq.coordinator.user_errors import ConfigError

S = TypeVar("S", "KafkaSettings", "MirrorSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """How to reach a cluster by Kafka's protocol. Names and values are Kafka's."""

    bootstrap: str
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "SCRAM-SHA-512"
    username: str = ""
    password_file: str = ""  # its first line; a file of this account alone
    ca_file: str = ""  # PEM; without one, those of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    source: KafkaSettings
    topics: tuple[str, ...]  # names, or regular expressions of whole names
    groups: tuple[str, ...] = (".*",)
    target_kafka: KafkaSettings | None = None  # this cluster's Kafka port; if not set, as its nodes say, in plain text
    bytes_per_second: int = 0  # 0: as fast as it goes

    def wants_topic(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.topics)

    def wants_group(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.groups)


def load(path: Path) -> MirrorSettings:
    """ConfigError names the wrong key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {e}") from e
    for name in ("source", "target_kafka"):
        if name in raw:
            if not isinstance(raw[name], dict):
                raise ConfigError(f"{path}: {name} is a table: write [{name}]")
            raw[name] = _made(KafkaSettings, raw[name], f"{path}: [{name}]")
    settings = _made(MirrorSettings, raw, str(path))
    for pattern in (*settings.topics, *settings.groups):
        try:
            re.compile(pattern)
        except re.error as e:
            raise ConfigError(f"{path}: {pattern!r} is no regular expression: {e}") from e
    return settings


def _made(kind: type[S], values: Mapping[str, Any], where: str) -> S:
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(values.keys() - known.keys()):
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; the keys are {', '.join(known)}")
    if missing := [name for name, f in known.items() if f.default is MISSING and name not in values]:
        raise ConfigError(f"{where}: {', '.join(missing)} must be set")
    checked = {name: _checked(name, value, known[name].type, where) for name, value in values.items()}
    return kind(**checked)


def _checked(name: str, value: Any, type_: Any, where: str) -> Any:
    if type_ is str and not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is a text, not {value!r}")
    if type_ is int and not (type(value) is int and value >= 0):
        raise ConfigError(f"{where}: {name} is a number from 0, not {value!r}")
    if type_ is str or type_ is int:
        return value
    if not isinstance(value, list):
        return value  # a table that has been read
    if not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{where}: {name} is a list of texts")
    return tuple(value)
