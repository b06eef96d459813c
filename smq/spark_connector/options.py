"""The options of `format("smq")`: Spark's Kafka connector's names and meanings, parsed and validated on the driver.

Owns their names, defaults and error sentences. Does no I/O and knows no cluster. Option keys arrive lower-cased
from Spark. What is merely missing is judged by `read_options`, because `CREATE TABLE ... USING smq` builds a
source without options and gives them at the SELECT.
"""

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.spark_connector.errors import OptionError

log = logging.getLogger(__name__)

EARLIEST: Final = -2  # as in the Kafka connector's JSON
LATEST: Final = -1
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}

TopicOffsets: TypeAlias = dict[str, dict[int, int]]
OffsetSpec: TypeAlias = int | TopicOffsets  # EARLIEST or LATEST for all, or one offset for each partition

KNOWN: Final = (
    "servers",
    "bootstrap.servers",
    "kafka.bootstrap.servers",
    "subscribe",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "includeHeaders",
    "includeIndex",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "retryTimeoutMs",
    "groupIdPrefix",
)
_SERVER_KEYS: Final = ("servers", "bootstrap.servers", "kafka.bootstrap.servers")
_BY_LOWER_NAME: Final = {name.lower(): name for name in KNOWN}
_IGNORED_BY_SPARK: Final = frozenset({"path", "__datasource__"})
RETRY_TIMEOUT_MS_DEFAULT: Final = 60_000  # outlasts a failover (seconds) and a node's restart with recovery
_SERVERS_ADVICE: Final = (
    "set .option('servers', 'host:port[,host:port]') to the gRPC addresses that `smq status` or the ready file names"
)
_TOPICS_ADVICE: Final = (
    "set .option('subscribe', 'topic[,topic]'), or .option('assign', '{\"topic\": [0, 1]}') for single partitions"
)
_LOST_OPTIONS_ADVICE: Final = (
    "(OPTIONS of CREATE TABLE do not reach a Python source in Spark: use CREATE TEMPORARY VIEW ... USING smq "
    "OPTIONS (...), or SELECT ... FROM t WITH (option = 'value'))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """A validated batch read. Exactly one of `topics` and `assigned` is not empty."""

    servers: tuple[str, ...]
    topics: tuple[str, ...]
    assigned: dict[str, tuple[int, ...]]
    starting: OffsetSpec
    ending: OffsetSpec
    fail_on_data_loss: bool
    partitions_min: int | None
    records_per_partition_max: int | None
    retry_timeout_ms: int


def check_given(options: Mapping[str, str]) -> None:
    """OptionError for keys nobody knows and for values that cannot be right, before anything is read."""
    for key in options:
        _check_key(key)
    if options.get("subscribe") is not None and options.get("assign") is not None:
        raise OptionError(f"'subscribe' and 'assign' exclude each other: {_TOPICS_ADVICE}")
    if (subscribe := options.get("subscribe")) is not None:
        _parse_topics(subscribe)
    if (assign := options.get("assign")) is not None:
        _parse_assign(assign)
    for name, refused in (("startingOffsets", LATEST), ("endingOffsets", EARLIEST)):
        if (text := options.get(name.lower())) is not None:
            _parse_offsets(name, text, refused=refused)
    for name in ("includeHeaders", "includeIndex", "failOnDataLoss"):
        flag(options, name, default=False)
    for name in ("minPartitions", "maxRecordsPerPartition", "retryTimeoutMs"):
        _positive(options, name)
    if any(options.get(key) is not None for key in _SERVER_KEYS):
        _servers(options)


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """All that a batch read needs. OptionError where something is missing or wrong."""
    check_given(options)
    subscribe, assign = options.get("subscribe"), options.get("assign")
    if subscribe is None and assign is None:
        raise OptionError(f"format('smq') does not know what to read: {_TOPICS_ADVICE} {_LOST_OPTIONS_ADVICE}")
    starting = options.get("startingoffsets", "earliest")
    ending = options.get("endingoffsets", "latest")
    return ReadOptions(
        servers=_servers(options),
        topics=_parse_topics(subscribe) if subscribe is not None else (),
        assigned=_parse_assign(assign) if assign is not None else {},
        starting=_parse_offsets("startingOffsets", starting, refused=LATEST),
        ending=_parse_offsets("endingOffsets", ending, refused=EARLIEST),
        fail_on_data_loss=flag(options, "failOnDataLoss", default=True),
        partitions_min=_positive(options, "minPartitions"),
        records_per_partition_max=_positive(options, "maxRecordsPerPartition"),
        retry_timeout_ms=_positive(options, "retryTimeoutMs") or RETRY_TIMEOUT_MS_DEFAULT,
    )


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """A true/false option. OptionError for any other word."""
    text = options.get(name.lower())
    if text is None:
        return default
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise OptionError(f"option {name!r} is true or false, not {text!r}")
    return word == "true"


def _check_key(key: str) -> None:
    lower = key.lower()
    if lower in _BY_LOWER_NAME:
        if lower == "groupidprefix":
            log.warning("option 'groupIdPrefix' has no effect: batch reads of smq join no consumer group")
        return
    if lower.startswith("kafka."):
        log.warning("option %r has no effect: smq is read over gRPC, not by a Kafka client", key)
        return
    if lower in _IGNORED_BY_SPARK:
        return
    near = difflib.get_close_matches(lower, list(_BY_LOWER_NAME), n=1)
    hint = f"did you mean {_BY_LOWER_NAME[near[0]]!r}?" if near else f"known options: {', '.join(KNOWN)}"
    raise OptionError(f"format('smq') has no option {key!r}; {hint}")


def _servers(options: Mapping[str, str]) -> tuple[str, ...]:
    given = [options[key] for key in _SERVER_KEYS if options.get(key) is not None]
    if not given:
        raise OptionError(f"format('smq') does not know where the cluster is: {_SERVERS_ADVICE} {_LOST_OPTIONS_ADVICE}")
    if len(set(given)) > 1:
        raise OptionError(f"{', '.join(_SERVER_KEYS)} mean the same, but differ here: give one of them")
    servers = tuple(part.strip() for part in given[0].split(",") if part.strip())
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise OptionError(f"server {server!r} is not host:port; {_SERVERS_ADVICE}")
    if not servers:
        raise OptionError(f"option 'servers' is empty: {_SERVERS_ADVICE}")
    return servers


def _parse_topics(text: str) -> tuple[str, ...]:
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise OptionError(f"option 'subscribe' names no topic: {_TOPICS_ADVICE}")
    return topics


def _parse_assign(text: str) -> dict[str, tuple[int, ...]]:
    value = _json_object("assign", text)
    assigned: dict[str, tuple[int, ...]] = {}
    for topic, partitions in value.items():
        if not isinstance(partitions, list) or not partitions or not all(map(_is_partition, partitions)):
            raise OptionError(f"option 'assign' wants a list of partitions >= 0 for topic {topic!r}: {_TOPICS_ADVICE}")
        assigned[topic] = tuple(sorted(set(partitions)))
    if not assigned:
        raise OptionError(f"option 'assign' names no partition: {_TOPICS_ADVICE}")
    return assigned


def _parse_offsets(name: str, text: str, *, refused: int) -> OffsetSpec:
    """A word, or JSON {"topic": {"0": offset}} with -2 earliest and -1 latest; `refused` is the senseless one."""
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        if word == refused:
            raise OptionError(f"a batch read cannot have {name} = {text!r}: {_offsets_advice(name, refused)}")
        return word
    spec: TopicOffsets = {}
    for topic, offsets in _json_object(name, text).items():
        if not isinstance(offsets, dict):
            raise OptionError(f"option {name!r}: topic {topic!r} wants an object; {_offsets_advice(name, refused)}")
        spec[topic] = {_partition(name, key): _offset(name, value, refused) for key, value in offsets.items()}
    return spec


def _partition(name: str, key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise OptionError(f"option {name!r}: {key!r} is not a partition's number")
    return int(key)


def _offset(name: str, value: object, refused: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not EARLIEST <= value < 2**63 or value == refused:
        raise OptionError(f"option {name!r}: offset {value!r} cannot be used here; {_offsets_advice(name, refused)}")
    return value


def _offsets_advice(name: str, refused: int) -> str:
    word, number = ("earliest", EARLIEST) if refused == LATEST else ("latest", LATEST)
    return f'write \'{word}\', or JSON such as {{"topic": {{"0": 23, "1": {number}}}}} where {number} means {word}'


def _json_object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise OptionError(f"option {name!r} is not JSON ({e}): {text[:200]!r}") from e
    if not isinstance(value, dict):
        raise OptionError(f"option {name!r} must be a JSON object, not {text[:200]!r}")
    return value


def _is_partition(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not (text.strip().isascii() and text.strip().isdigit()) or int(text) < 1:
        raise OptionError(f"option {name!r} is a whole number of at least 1, not {text!r}")
    return int(text)
