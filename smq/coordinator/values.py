"""Typed values of a TOML table, and the one sentence that says which key is wrong.

Owns the wording. It knows no key. The modules of the configuration import it.
"""

import json
from collections.abc import Mapping
from typing import Any

from smq.coordinator.user_errors import ConfigError


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
