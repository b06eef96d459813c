"""The configuration keys of a topic: their defaults, what values they take, what they mean.

Owns the table TOPIC_CONFIG, the source of validation, error messages and documentation. A new key is a new row. Its
default must be the present behaviour of topics without the key, since only differences from the defaults are stored.
Any module may import it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from smq.raft_state.config_keys import ConfigKey, ConfigType, between, one_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import MESSAGE_BYTES_CAP, MESSAGE_BYTES_DEFAULT
from smq.raft_state.refusal import Refused, quoted

MAX_MESSAGE_BYTES: Final = "max.message.bytes"
STORAGE: Final = "storage"
EXTERNAL: Final = "external"

TOPIC_CONFIG: Final[dict[str, ConfigKey]] = {
    MAX_MESSAGE_BYTES: ConfigKey(
        default=str(MESSAGE_BYTES_DEFAULT),
        values=f"a whole number of bytes from 1 to {MESSAGE_BYTES_CAP} (100 MiB)",
        meaning="the largest record batch that is accepted, in its compressed size",
        accepts=between(1, MESSAGE_BYTES_CAP),
        type=ConfigType.INT,
    ),
    STORAGE: ConfigKey(
        default="log",
        values='"log" (smq stores the records) or "external" (smq assigns offsets only), fixed at creation',
        meaning="where the records are stored",
        accepts=one_of("log", EXTERNAL),
        type=ConfigType.STRING,
    ),
}


def known_keys() -> str:
    """All keys, for a message."""
    return ", ".join(TOPIC_CONFIG)


def check_key(key: str) -> None:
    """INVALID_CONFIG for a key that does not exist."""
    if key not in TOPIC_CONFIG:
        raise Refused(
            ErrorCode.INVALID_CONFIG, f"unknown topic configuration {quoted(key)}: the keys are {known_keys()}"
        )


def checked_config(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The pairs as a dict. INVALID_CONFIG for an unknown key, a repeated key, or an invalid value."""
    config: dict[str, str] = {}
    for key, value in items:
        check_key(key)
        if key in config:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is given twice")
        if not TOPIC_CONFIG[key].accepts(value):
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} must be {TOPIC_CONFIG[key].values}, not {quoted(value)}")
        config[key] = value
    return config


def differing(config: Mapping[str, str]) -> dict[str, str]:
    """The entries of a checked configuration that differ from the defaults, in the order of the keys."""
    return {key: config[key] for key in sorted(config) if config[key] != TOPIC_CONFIG[key].default}


def config_value(config: Mapping[str, str], key: str) -> str:
    """The effective value: the topic's own or the default."""
    return config.get(key, TOPIC_CONFIG[key].default)


def max_message_bytes(config: Mapping[str, str]) -> int:
    """The largest record batch that a topic accepts, in bytes."""
    return int(config_value(config, MAX_MESSAGE_BYTES))


def is_external(config: Mapping[str, str]) -> bool:
    """Whether the topic's records are stored elsewhere, and only its offsets here."""
    return config_value(config, STORAGE) == EXTERNAL
