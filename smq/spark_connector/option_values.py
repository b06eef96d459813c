"""Parses the text of one option: numbers, words, durations, addresses, JSON by topic and partition.

Owns parsing and the message of each refusal. It knows an option only by the name in its arguments, and no cluster.
`options` and `metadata_source` import it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from smq.spark_connector.errors import OptionError

EARLIEST: Final = -2  # as in the Kafka connector's JSON
LATEST: Final = -1
INT64_MAX: Final = 2**63 - 1
TopicOffsets: TypeAlias = dict[str, dict[int, int]]
OffsetSpec: TypeAlias = int | TopicOffsets  # EARLIEST or LATEST for all, or one offset for each partition

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]{1,15}) ?([a-z]*)")
SERVERS_ADVICE: Final = (
    "set .option('servers', 'host:port[,host:port]') to the gRPC addresses that `smq status` or the ready file names"
)
TOPICS_ADVICE: Final = (
    "set .option('subscribe', 'topic[,topic]'), .option('subscribePattern', 'regular expression'), or "
    ".option('assign', '{\"topic\": [0, 1]}') for single partitions"
)


# ------------------------------------------------------------------------------------------------ scalars
def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """A true/false option. OptionError for any other word."""
    text = options.get(name.lower())
    if text is None:
        return default
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise OptionError(f"option {name!r} must be true or false, not {text!r}")
    return word == "true"


def whole_number(options: Mapping[str, str], name: str, *, least: int = 1) -> int | None:
    """None if the option is absent. OptionError for anything but decimal digits of at least `least`."""
    text = options.get(name.lower())
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or not least <= int(digits) <= INT64_MAX:
        raise OptionError(f"option {name!r} must be a whole number of at least {least}, not {text!r}")
    return int(digits)


def duration_ms(options: Mapping[str, str], name: str) -> int | None:
    """Durations as Spark writes them: 500ms, 10s, 15m, 2h, 1d; a bare number is milliseconds."""
    text = options.get(name.lower())
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    unit = _UNITS_MS.get(match[2] or "ms") if match else None
    if match is None or unit is None:
        raise OptionError(f"option {name!r} must be a time such as 500ms, 10s, 15m, 2h or 1d, not {text!r}")
    return int(match[1]) * unit


def one_of(options: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """One of `words`, in any case; the first if the option is absent."""
    text = options.get(name.lower(), words[0])
    if text.strip().lower() not in words:
        raise OptionError(f"option {name!r} must be one of {', '.join(words)}, not {text!r}")
    return text.strip().lower()


def servers(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for server in found:
        host, _, port = server.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise OptionError(f"server {server!r} is not host:port; {SERVERS_ADVICE}")
    if not found:
        raise OptionError(f"option 'servers' is empty: {SERVERS_ADVICE}")
    return found


# ------------------------------------------------------------------------------------------------ what to read
def topics(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise OptionError(f"option 'subscribe' names no topic: {TOPICS_ADVICE}")
    return found


def pattern(text: str) -> str:
    """A regular expression that a whole topic name must match."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as e:
        raise OptionError(f"option 'subscribePattern' is not a regular expression ({e}): {text[:200]!r}") from e
    if not text:
        raise OptionError(f"option 'subscribePattern' is empty: {TOPICS_ADVICE}")
    return text


def assigned(text: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for topic, partitions in json_object("assign", text).items():
        if not isinstance(partitions, list) or not partitions or not all(map(_is_partition, partitions)):
            raise OptionError(f"option 'assign' needs a list of partitions >= 0 for topic {topic!r}: {TOPICS_ADVICE}")
        found[topic] = tuple(sorted(set(partitions)))
    if not found:
        raise OptionError(f"option 'assign' names no partition: {TOPICS_ADVICE}")
    return found


# ------------------------------------------------------------------------------------------------ where
def offsets(name: str, text: str, *, refused: int | None = None) -> OffsetSpec:
    """A word, or JSON {"topic": {"0": offset}} with -2 for earliest and -1 for latest. `refused`: the one of the two
    that makes no sense here."""
    advice = _offsets_advice(refused)
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        if word == refused:
            raise OptionError(f"a batch read cannot have {name} = {text!r}: {advice}")
        return word

    if not text.lstrip().startswith("{"):
        raise OptionError(f"option {name!r} is {text[:200]!r}, which is no such word and no JSON: {advice}")

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not EARLIEST <= value <= INT64_MAX:
            raise OptionError(f"option {name!r}: {value!r} is not an offset; {advice}")
        if value == refused:
            raise OptionError(f"option {name!r}: offset {value!r} cannot be used here; {advice}")
        return value

    return _by_partition(name, text, check, advice)


def times(name: str, text: str) -> TopicOffsets:
    """JSON {"topic": {"0": time}}."""
    advice = 'write JSON such as {"topic": {"0": 1700000000000}}, with a time for each partition'
    if not text.lstrip().startswith("{"):
        raise OptionError(f"option {name!r} is {text[:200]!r}, which is no JSON: {advice}")

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT64_MAX:
            raise OptionError(f"option {name!r}: {value!r} is not a time; {advice}")
        return value

    return _by_partition(name, text, check, advice)


def _by_partition(name: str, text: str, check: Callable[[object], int], advice: str) -> TopicOffsets:
    found: TopicOffsets = {}
    for topic, values in json_object(name, text).items():
        if not isinstance(values, dict):
            raise OptionError(f"option {name!r}: topic {topic!r} needs an object; {advice}")
        found[topic] = {_partition(name, key): check(value) for key, value in values.items()}
    return found


def _partition(name: str, key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise OptionError(f"option {name!r}: {key!r} is not a partition's number")
    return int(key)


def _offsets_advice(refused: int | None) -> str:
    word, number = ("latest", LATEST) if refused == EARLIEST else ("earliest", EARLIEST)
    return f'write \'{word}\', or JSON such as {{"topic": {{"0": 23, "1": {number}}}}} where {number} means {word}'


def json_object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise OptionError(f"option {name!r} is not JSON ({e}): {text[:200]!r}") from e
    if not isinstance(value, dict):
        raise OptionError(f"option {name!r} must be a JSON object, not {text[:200]!r}")
    return value


def _is_partition(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
