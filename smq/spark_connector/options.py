"""The options of `format("smq")`: Spark's Kafka connector's names and meanings, validated on the driver.

Owns their names, defaults and precedence, and which of them a batch or a stream accepts. Does no I/O and knows no
cluster. Option keys arrive lower-cased from Spark. Only `read_options` and `stream_options` complain about a missing
option, because `CREATE TABLE ... USING smq` builds a source without options and passes them at the SELECT.
"""

import difflib
import enum
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from smq.clients.login import Login, login_from_environment
from smq.clients.scram import BY_NAME
from smq.clients.tls import Tls, tls_from_environment
from smq.spark_connector import option_values as values
from smq.spark_connector.errors import OptionError
from smq.spark_connector.option_values import EARLIEST, LATEST, OffsetSpec, TopicOffsets, flag

__all__ = ["EARLIEST", "LATEST", "OffsetSpec", "TopicOffsets", "flag"]

log = logging.getLogger(__name__)

SERVER_KEYS: Final = ("servers", "bootstrap", "bootstrap.servers", "kafka.bootstrap.servers")
_SELECTIONS: Final = ("subscribe", "subscribePattern", "assign")
TLS_KEYS: Final = ("tls.ca", "tls.certificate", "tls.key")
LOGIN_KEYS: Final = ("user", "password.file")
KAFKA_LOGIN_KEYS: Final = ("kafka.security.protocol", "kafka.sasl.mechanism", "kafka.sasl.jaas.config")
_JAAS: Final = re.compile(r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s;"']+))""")
_FLAGS: Final = ("includeHeaders", "includeIndex", "failOnDataLoss", "pushdown")
_NUMBERS: Final = (
    "minPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "retryTimeoutMs",
)
_BATCH_ONLY: Final = (
    "endingOffsets",
    "endingTimestamp",
    "endingTimestampNs",
    "endingOffsetsByTimestamp",
    "endingOffsetsByTimestampNs",
)
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_STARTS: Final = (
    "startingOffsets",
    "startingTimestamp",
    "startingTimestampNs",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampNs",
)
# Options of a write, each with the option to use in a read instead. Their values are checked by `sink.write_options`.
_WRITE_OPTIONS: Final = {
    "topic": "name topics by 'subscribe'",
    "checkpointlocation": "set it on writeStream",
    "txnappid": "a read is not counted",
    "txnversion": "a read is not counted",
    "transactiontimeoutms": "a read has no transaction",
    "kafka.compression.type": "every codec can be read",
}
_NO_EFFECT: Final = {
    "groupIdPrefix": "a query of smq joins no consumer group; its position is in its checkpoint",
    "kafkaConsumer.pollTimeoutMs": "set retryTimeoutMs, which says how long a read keeps trying",
    "fetchOffset.numRetries": "set retryTimeoutMs, which says how long a read keeps trying",
    "fetchOffset.retryIntervalMs": "set retryTimeoutMs, which says how long a read keeps trying",
    "kafka.group.id": "a query of smq joins no consumer group; its position is in its checkpoint",
    "kafka.isolation.level": "reads of smq are always read_committed",
    "kafka.acks": "what is written is always on the disks of a majority before it counts",
    "kafka.linger.ms": "a task sends its rows in large batches",
}
KNOWN: Final = (
    *SERVER_KEYS,
    *_SELECTIONS,
    *_STARTS,
    "startingOffsetsByTimestampStrategy",
    *_BATCH_ONLY,
    *_FLAGS,
    *_NUMBERS,
    "maxTriggerDelay",
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    *TLS_KEYS,
    *LOGIN_KEYS,
    *KAFKA_LOGIN_KEYS,
)
_BY_LOWER_NAME: Final = {name.lower(): name for name in KNOWN}
_NO_EFFECT_BY_LOWER_NAME: Final = {name.lower(): why for name, why in _NO_EFFECT.items()}
_IGNORED_BY_SPARK: Final = frozenset({"path", "__datasource__"})
READ_ONLY: Final = (
    *_SELECTIONS,
    *_STARTS,
    "startingOffsetsByTimestampStrategy",
    *_BATCH_ONLY,
    # A write has its own failOnDataLoss, and takes includeHeaders as the Kafka sink does: headers are a column.
    *(name for name in _FLAGS if name not in ("includeHeaders", "failOnDataLoss")),
    *(name for name in _NUMBERS if name != "retryTimeoutMs"),
    "maxTriggerDelay",
)
RETRY_TIMEOUT_MS_DEFAULT: Final = 60_000  # outlasts a failover (seconds) and a node's restart with recovery
TRIGGER_DELAY_MS_DEFAULT: Final = 15 * 60_000  # the Kafka connector's
_LOST_OPTIONS_ADVICE: Final = (
    "(OPTIONS of CREATE TABLE do not reach a Python source in Spark: use CREATE TEMPORARY VIEW ... USING smq "
    "OPTIONS (...), or SELECT ... FROM t WITH (option = 'value'))"
)


class TimeUnit(enum.Enum):
    """Which of a record's two times, and its unit."""

    CREATE_MS = "timestamp"  # the producer's, in milliseconds: finds the first record that is not older
    APPEND_NS = "ts_ns"  # the leader's, in nanoseconds: strictly increasing, so it cuts exactly


class Security(NamedTuple):
    """How the nodes, and the user, are proven to each other."""

    tls: Tls | None = None
    login: Login | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpec:
    """A start or an end by time: one for all partitions, or one for each. `name` is the option it came from."""

    name: str
    unit: TimeUnit
    times: int | TopicOffsets


PositionSpec: TypeAlias = OffsetSpec | TimeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What batch and stream share. Exactly one of `topics`, `pattern` and `assigned` says what is read."""

    servers: tuple[str, ...]
    topics: tuple[str, ...]
    pattern: str | None
    assigned: dict[str, tuple[int, ...]]
    starting: PositionSpec
    latest_if_no_match: bool  # startingOffsetsByTimestampStrategy: where no record is that young
    fail_on_data_loss: bool
    partitions_min: int | None
    records_per_partition_max: int | None
    retry_timeout_ms: int
    security: Security


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """A validated batch read."""

    source: SourceOptions
    ending: PositionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """A validated streaming read; the limits are of one micro-batch."""

    source: SourceOptions
    rows_max: int | None
    bytes_max: int | None
    rows_min: int | None
    delay_ms_max: int  # how long a micro-batch is postponed for `rows_min`


def check_given(options: Mapping[str, str]) -> None:
    """OptionError for unknown keys and for impossible values, before anything is read."""
    for key in options:
        _check_key(key)
    _selection(options)
    for name in _FLAGS:
        flag(options, name, default=False)
    for name in _NUMBERS:
        values.whole_number(options, name)
    values.duration_ms(options, "maxTriggerDelay")
    _latest_if_no_match(options)
    _position(options, "starting", EARLIEST)
    _position(options, "ending", LATEST, refused=EARLIEST)
    if any(options.get(key) is not None for key in SERVER_KEYS):
        servers_of(options)
    security_of(options)


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a batch read. OptionError if one is missing or wrong."""
    check_given(options)
    for name in _STREAM_ONLY:
        if options.get(name.lower()) is not None:
            log.warning("option %r has no effect in a batch read", name)
    starting = _position(options, "starting", EARLIEST, refused=LATEST)
    ending = _position(options, "ending", LATEST, refused=EARLIEST)
    return ReadOptions(source=_source_options(options, starting), ending=ending)


def stream_options(options: Mapping[str, str]) -> StreamOptions:
    """The options of a streaming read. OptionError if one is missing or wrong, or only for batch reads."""
    if "metadata" in options:
        raise OptionError("option 'metadata' is only for batch reads: it shows one moment; read it with spark.read")
    check_given(options)
    for name in _BATCH_ONLY:
        if options.get(name.lower()) is not None:
            raise OptionError(f"option {name!r} is only for batch reads: a stream has no end, so leave it out")
    if flag(options, "pushdown", default=False):
        raise OptionError(
            "option 'pushdown' is only for batch reads: Spark pushes no filters into a stream; leave it out"
        )
    rows_max = values.whole_number(options, "maxOffsetsPerTrigger")
    rows_min = values.whole_number(options, "minOffsetsPerTrigger")
    if rows_max is not None and rows_min is not None and rows_min > rows_max:
        raise OptionError(f"minOffsetsPerTrigger {rows_min} is more than maxOffsetsPerTrigger {rows_max}: swap them")
    delay_ms = values.duration_ms(options, "maxTriggerDelay")
    return StreamOptions(
        source=_source_options(options, _position(options, "starting", LATEST)),
        rows_max=rows_max,
        bytes_max=values.whole_number(options, "maxBytesPerTrigger"),
        rows_min=rows_min,
        delay_ms_max=TRIGGER_DELAY_MS_DEFAULT if delay_ms is None else delay_ms,
    )


def _source_options(options: Mapping[str, str], starting: PositionSpec) -> SourceOptions:
    for name, advice in _WRITE_OPTIONS.items():
        if options.get(name) is not None:
            raise OptionError(f"option {name!r} is only for writes: {advice}")
    topics, pattern, assigned = _selection(options)
    if not (topics or pattern or assigned):
        raise OptionError(f"format('smq') does not know what to read: {values.TOPICS_ADVICE} {_LOST_OPTIONS_ADVICE}")
    return SourceOptions(
        servers=servers_of(options),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=starting,
        latest_if_no_match=_latest_if_no_match(options),
        fail_on_data_loss=flag(options, "failOnDataLoss", default=True),
        partitions_min=values.whole_number(options, "minPartitions"),
        records_per_partition_max=values.whole_number(options, "maxRecordsPerPartition"),
        retry_timeout_ms=values.whole_number(options, "retryTimeoutMs") or RETRY_TIMEOUT_MS_DEFAULT,
        security=security_of(options),
    )


def _check_key(key: str) -> None:
    lower = key.lower()
    if lower in SERVER_KEYS or lower in _IGNORED_BY_SPARK or lower in _WRITE_OPTIONS:
        return
    if lower in _NO_EFFECT_BY_LOWER_NAME:
        log.warning("option %r has no effect: %s", key, _NO_EFFECT_BY_LOWER_NAME[lower])
    elif lower.startswith("kafka.") and lower not in KAFKA_LOGIN_KEYS:
        log.warning("option %r has no effect: the connector speaks gRPC, and has no Kafka client", key)
    elif lower not in _BY_LOWER_NAME:
        near = difflib.get_close_matches(lower, list(_BY_LOWER_NAME), n=1)
        hint = f"did you mean {_BY_LOWER_NAME[near[0]]!r}?" if near else f"known options: {', '.join(KNOWN)}"
        raise OptionError(f"format('smq') has no option {key!r}; {hint}")


def servers_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """The cluster's addresses. OptionError if they are missing or malformed."""
    given = [options[key] for key in SERVER_KEYS if options.get(key) is not None]
    if not given:
        raise OptionError(
            f"format('smq') does not know where the cluster is: {values.SERVERS_ADVICE} {_LOST_OPTIONS_ADVICE}"
        )
    if len(set(given)) > 1:
        raise OptionError(f"{', '.join(SERVER_KEYS)} mean the same, but differ here: give one of them")
    return values.servers(given[0])


def _selection(options: Mapping[str, str]) -> tuple[tuple[str, ...], str | None, dict[str, tuple[int, ...]]]:
    """Topics, pattern, assigned partitions: at most one of them."""
    given = [name for name in _SELECTIONS if options.get(name.lower()) is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(map(repr, given))} exclude each other: {values.TOPICS_ADVICE}")
    text = options[given[0].lower()] if given else ""
    return (
        values.topics(text) if given == ["subscribe"] else (),
        values.pattern(text) if given == ["subscribePattern"] else None,
        values.assigned(text) if given == ["assign"] else {},
    )


def _latest_if_no_match(options: Mapping[str, str]) -> bool:
    return values.one_of(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest"


def _position(options: Mapping[str, str], side: str, default: int, *, refused: int | None = None) -> PositionSpec:
    """Where a read starts or ends (`side`). As in the Kafka connector, a time for all partitions takes precedence over
    times per partition, and those over offsets. Milliseconds and nanoseconds of one option exclude each other."""
    chosen: PositionSpec | None = None
    for form, is_each in ((f"{side}Timestamp", False), (f"{side}OffsetsByTimestamp", True)):
        given = [name for name in (form, f"{form}Ns") if options.get(name.lower()) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(map(repr, given))} exclude each other: give one of them")
        for name in given:
            unit = TimeUnit.APPEND_NS if name.endswith("Ns") else TimeUnit.CREATE_MS
            found: int | TopicOffsets | None
            if is_each:
                found = values.times(name, options[name.lower()])
            else:
                found = values.whole_number(options, name, least=0)
            assert found is not None
            chosen = chosen or TimeSpec(name=name, unit=unit, times=found)
    text = options.get(f"{side}offsets")
    offsets = default if text is None else values.offsets(f"{side}Offsets", text, refused=refused)
    return offsets if chosen is None else chosen


def security_of(options: Mapping[str, str]) -> Security:
    """OptionError if some of the options are missing, or would send what proves the user in clear."""
    found = Security(tls_of(options), _login_of(options))
    if found.login is not None and found.tls is None:
        raise OptionError("a login needs TLS: name the certificates (PEM) that sign the nodes' as option 'tls.ca'")
    return found


def _login_of(options: Mapping[str, str]) -> Login | None:
    """By the connector's own options, or by those of Spark's Kafka connector. Without options, that in the driver's
    environment. The password's file must be there on the driver and on every executor."""
    protocol, mechanism, jaas = (options.get(name) for name in KAFKA_LOGIN_KEYS)
    user, path = (options.get(name) for name in LOGIN_KEYS)
    if protocol is not None and protocol.upper() == "PLAINTEXT" and not (user or jaas or options.get(TLS_KEYS[0])):
        return None
    if protocol is not None and protocol.upper() not in ("SASL_SSL", "SSL"):
        raise OptionError(
            f"option 'kafka.security.protocol' is {protocol!r}: a login needs SASL_SSL, and TLS alone SSL"
        )
    if mechanism is not None and mechanism.upper() not in BY_NAME:
        known = " and ".join(BY_NAME)
        raise OptionError(f"option 'kafka.sasl.mechanism' is {mechanism!r}: the connector speaks gRPC, with {known}")
    how = {"mechanism": mechanism.upper()} if mechanism is not None else {}
    if (user is None) != (path is None):
        raise OptionError("give options 'user' and 'password.file' together")
    if user is not None:
        return Login(user=user, password_file=path, **how)
    if jaas is not None:
        given = {key: _unquoted(*value) for key, *value in _JAAS.findall(jaas)}
        if not given.get("username") or not given.get("password"):
            raise OptionError('option \'kafka.sasl.jaas.config\' has no username="..." and password="..."')
        return Login(user=given["username"], password=given["password"], **how)
    if protocol is not None and protocol.upper() == "SASL_SSL":
        raise OptionError("option 'kafka.security.protocol' is SASL_SSL: name the user in 'kafka.sasl.jaas.config'")
    return login_from_environment()


def _unquoted(double: str, single: str, plain: str) -> str:
    return re.sub(r"\\(.)", r"\1", double) or single or plain


def tls_of(options: Mapping[str, str]) -> Tls | None:
    """The paths of the files, which must be valid on the driver and on every executor. Without options, those in the
    driver's environment. OptionError if some are missing."""
    ca, certificate, key = (options.get(name) for name in TLS_KEYS)
    if ca is None and certificate is None and key is None:
        return tls_from_environment()
    if ca is None:
        raise OptionError("option 'tls.certificate' needs 'tls.ca': the certificates (PEM) that sign the nodes'")
    if (certificate is None) != (key is None):
        raise OptionError("give options 'tls.certificate' and 'tls.key' together: a certificate and its key")
    return Tls(ca=ca, certificate=certificate, key=key)
