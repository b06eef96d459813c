"""The configuration keys of a topic: their defaults, what values they take, what they mean.

Owns the table TOPIC_CONFIG, the source of validation, error messages and documentation. A new key is a new row of a new
feature level. Its default must be the present behaviour of topics without the key, since only differences from the
defaults are stored. A fixed key changes nothing. It takes every valid value that no promise depends on, stores none of
them, and says why. Any module may import it.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from smq.raft_state.config_keys import (
    INT32_MAX,
    INT64_MAX,
    ConfigKey,
    ConfigType,
    between,
    either,
    is_ratio,
    known_at,
    matching,
    one_of,
    signed_between,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import MESSAGE_BYTES_CAP, MESSAGE_BYTES_DEFAULT, QUOTED_CHARS_MAX
from smq.raft_state.refusal import Refused, quoted

AS_PRODUCED: Final = "producer"
CLEANUP_POLICY: Final = "cleanup.policy"
COMPACT: Final = "compact"
COMPRESSION_TYPE: Final = "compression.type"
CREATE_TIME: Final = "CreateTime"
LOG_APPEND_TIME: Final = "LogAppendTime"
DELETE: Final = "delete"
DELETE_RETENTION_MS: Final = "delete.retention.ms"
MAX_COMPACTION_LAG_MS: Final = "max.compaction.lag.ms"
MAX_MESSAGE_BYTES: Final = "max.message.bytes"
MIN_CLEANABLE_DIRTY_RATIO: Final = "min.cleanable.dirty.ratio"
MIN_COMPACTION_LAG_MS: Final = "min.compaction.lag.ms"
MIN_INSYNC_REPLICAS: Final = "min.insync.replicas"
MIRRORED: Final = "mirrored"
NO_LIMIT: Final = "-1"
_UNLIMITED: Final = int(NO_LIMIT)
RETENTION_BYTES: Final = "retention.bytes"
RETENTION_MS: Final = "retention.ms"
RETENTION_RECORDS: Final = "retention.records"
STORAGE: Final = "storage"
AFTER_MAX_MS_DEFAULT: Final = 3_600_000  # Kafka's: retention by time cannot remove what is dated later than now
TIMESTAMP_AFTER_MAX_MS: Final = "message.timestamp.after.max.ms"
TIMESTAMP_BEFORE_MAX_MS: Final = "message.timestamp.before.max.ms"
TIMESTAMP_TYPE: Final = "message.timestamp.type"
EXTERNAL: Final = "external"


def _fixed(
    default: str,
    type_: ConfigType,
    meaning: str,
    values: str,
    why: str,
    accepts: Callable[[str], bool] | None = None,
) -> ConfigKey:
    return ConfigKey(default, values, meaning, accepts or one_of(default), type_, is_fixed=True, why=why)


def _number(default: int, least: int, meaning: str, unit: str, why: str, *, most: int = INT64_MAX) -> ConfigKey:
    """A fixed key with a number that changes nothing. Numbers below `least` are negative ones with a meaning."""
    type_ = ConfigType.LONG if most == INT64_MAX else ConfigType.INT
    negative = [str(number) for number in range(least, 0)]
    values = ", ".join(
        [*negative, f"{'or ' if negative else ''}a whole number of {unit} from {max(least, 0)} to {most}"]
    )
    return _fixed(str(default), type_, meaning, values, why, either(one_of(*negative), between(max(least, 0), most)))


def _flag(meaning: str, why: str) -> ConfigKey:
    """A fixed key that is false, and may be set to true."""
    return _fixed("false", ConfigType.BOOLEAN, meaning, "true or false", why, one_of(*_TRUE, *_FALSE))


def _throttled(meaning: str) -> ConfigKey:
    return _fixed(
        "",
        ConfigType.LIST,
        meaning,
        'pairs "partition:node" with commas between, "*" for all, or nothing',
        "replication has no throttle, and tools remove this key when they are done",
        matching(r"\*|([0-9]+:[0-9]+(,[0-9]+:[0-9]+)*)?"),
    )


def _time(default: str, meaning: str, least: int) -> ConfigKey:
    values = f"a whole number of milliseconds from {least} to {INT64_MAX}"
    return ConfigKey(default, values, meaning, between(least, INT64_MAX), ConfigType.LONG)


def _limit(meaning: str, unit: str, least: int) -> ConfigKey:
    return ConfigKey(
        default=NO_LIMIT,
        values=f"-1 (without a limit) or a whole number of {unit} from {least} to {INT64_MAX}",
        meaning=meaning,
        accepts=either(one_of(NO_LIMIT), between(least, INT64_MAX)),
        type=ConfigType.LONG,
    )


def _level(codec: str, default: int, values: str, accepts: Callable[[str], bool]) -> ConfigKey:
    meaning = f"how hard the leader compresses what it converts to {codec}"
    return ConfigKey(str(default), values, meaning, accepts, ConfigType.INT)


def _span(direction: str, default: int) -> ConfigKey:
    return ConfigKey(
        default=str(default),
        values=f"a whole number of milliseconds from 0 to {INT64_MAX} (without a limit)",
        meaning=f"how far {direction} the timestamp of a record may be, with CreateTime",
        accepts=between(0, INT64_MAX),
        type=ConfigType.LONG,
    )


# As Kafka reads a boolean; Python's tools write True.
_TRUE: Final = ("true", "True", "TRUE")
_FALSE: Final = ("false", "False", "FALSE")
_CODECS: Final = ("uncompressed", "gzip", "snappy", "lz4", "zstd")  # Kafka's names; their place is Kafka's number
_NO_SEGMENTS: Final = "records lie in one file for all partitions, without segments"
_NO_INDEX_FILES: Final = "smq has an index entry for every batch, in the same file"
_SYNCED: Final = "each batch is synced before it is acknowledged"
_NO_TIERS: Final = "smq has no remote storage"

# Every key of Kafka 4.3, and smq's own.
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
        meaning="where the records are stored (a key of smq's own, which Kafka does not have)",
        accepts=one_of("log", EXTERNAL),
        type=ConfigType.STRING,
        is_fixed_at_creation=True,
    ),
    MIRRORED: ConfigKey(
        default="false",
        values='"true" (a mirror alone writes to it, at the offsets of another cluster) or "false"',
        meaning="whether the topic is a copy of another cluster's (a key of smq's own)",
        accepts=one_of("true", "false"),
        type=ConfigType.BOOLEAN,
    ),
    CLEANUP_POLICY: ConfigKey(
        default=DELETE,
        values='"delete" (what retention.* does not keep goes), "compact" (the last record of each key stays) or'
        ' "compact,delete"',
        meaning="how old records go",
        accepts=matching(r" *(delete|compact|delete *, *compact|compact *, *delete) *"),  # blanks as in Kafka's lists
        type=ConfigType.LIST,
    ),
    DELETE_RETENTION_MS: _time(
        str(24 * 3_600_000), "how long compaction keeps a tombstone after no replica has what it deletes any more", 0
    ),
    MAX_COMPACTION_LAG_MS: _time(str(INT64_MAX), "how old a record may get before compaction has looked at it", 1),
    MIN_COMPACTION_LAG_MS: _time("0", "how old a record must be before compaction may remove it", 0),
    MIN_CLEANABLE_DIRTY_RATIO: ConfigKey(
        default="0.5",
        values="a decimal number from 0 to 1",
        meaning="the part of a log, in bytes, that compaction must not have looked at yet before it begins",
        accepts=is_ratio,
        type=ConfigType.DOUBLE,
    ),
    COMPRESSION_TYPE: ConfigKey(
        default=AS_PRODUCED,
        values='"producer" (as they were sent), "uncompressed", "gzip", "snappy", "lz4" or "zstd" (batches that come'
        " otherwise are converted by the leader)",
        meaning="how records are compressed",
        accepts=one_of(AS_PRODUCED, *_CODECS),
        type=ConfigType.STRING,
    ),
    "compression.gzip.level": _level("gzip", -1, "-1 (zlib's own) or 1 to 9", either(one_of("-1"), between(1, 9))),
    "compression.lz4.level": _level("lz4", 9, "1 to 17", between(1, 17)),
    "compression.zstd.level": _level("zstd", 3, "-131072 to 22", signed_between(-131_072, 22)),
    "file.delete.delay.ms": _number(
        60_000, 0, "how long a file of deleted records stays", "milliseconds", _NO_SEGMENTS
    ),
    "flush.messages": _number(1, 1, "the records between two syncs to the disk", "records", _SYNCED),
    "flush.ms": _number(0, 0, "the time between two syncs to the disk", "milliseconds", _SYNCED),
    "follower.replication.throttled.replicas": _throttled("the replicas that are filled slowly"),
    "index.interval.bytes": _number(
        4_096, 0, "the bytes between two index entries", "bytes", _NO_INDEX_FILES, most=INT32_MAX
    ),
    "leader.replication.throttled.replicas": _throttled("the replicas that are read slowly by others"),
    "local.retention.bytes": _number(
        -2, -2, "the bytes that a partition keeps beside remote storage", "bytes", _NO_TIERS
    ),
    "local.retention.ms": _number(-2, -2, "how long records are kept beside remote storage", "milliseconds", _NO_TIERS),
    TIMESTAMP_AFTER_MAX_MS: _span("ahead of the leader's clock", AFTER_MAX_MS_DEFAULT),
    TIMESTAMP_BEFORE_MAX_MS: _span("behind the leader's clock", INT64_MAX),
    TIMESTAMP_TYPE: ConfigKey(
        default=CREATE_TIME,
        values='"CreateTime" (the producer\'s) or "LogAppendTime" (the leader\'s)',
        meaning="which timestamp a record has",
        accepts=one_of(CREATE_TIME, LOG_APPEND_TIME),
        type=ConfigType.STRING,
    ),
    MIN_INSYNC_REPLICAS: _fixed(
        "1",
        ConfigType.INT,
        "how many replicas have a record on disk before acks=all is answered",
        "a whole number from 1 to the majority of the replicas",
        "smq always waits for the majority",
        between(1, INT64_MAX),
    ),
    "preallocate": _flag("whether files are allocated in advance", _NO_SEGMENTS),
    "remote.log.copy.disable": _flag("whether no more records are copied to remote storage", _NO_TIERS),
    "remote.log.delete.on.disable": _flag("whether remote records go when remote storage is switched off", _NO_TIERS),
    "remote.storage.enable": _fixed(
        "false",
        ConfigType.BOOLEAN,
        "whether old records move to remote storage",
        "false",
        "smq has no remote storage: use retention.ms or retention.bytes to bound the disk",
        one_of(*_FALSE),
    ),
    RETENTION_BYTES: _limit("the bytes that each partition keeps: older batches are deleted", "bytes", 0),
    RETENTION_MS: _limit(
        "how long records are kept: batches whose newest record is older are deleted", "milliseconds", 0
    ),
    RETENTION_RECORDS: _limit(
        "the records that each partition keeps: older batches are deleted (a key of smq's own)", "records", 1
    ),
    "segment.bytes": _number(1 << 30, 1, "the size of a segment", "bytes", _NO_SEGMENTS, most=INT32_MAX),
    "segment.index.bytes": _number(10 << 20, 4, "the size of an index file", "bytes", _NO_INDEX_FILES, most=INT32_MAX),
    "segment.jitter.ms": _number(0, 0, "the spread of the times at which segments begin", "milliseconds", _NO_SEGMENTS),
    "segment.ms": _number(604_800_000, 1, "how long records go to one segment", "milliseconds", _NO_SEGMENTS),
    "unclean.leader.election.enable": _fixed(
        "false",
        ConfigType.BOOLEAN,
        "whether a replica that lacks committed records may lead",
        "false",
        "an acknowledged record is never given up",
        one_of(*_FALSE),
    ),
}


def check_key(key: str, level: int) -> None:
    """INVALID_CONFIG for a key that does not exist at a feature level."""
    known = known_at(TOPIC_CONFIG, level)
    if key not in known:
        near = difflib.get_close_matches(key[:QUOTED_CHARS_MAX], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
        raise Refused(ErrorCode.INVALID_CONFIG, f"unknown topic configuration {quoted(key)}: {hint}")


def check_value(key: str, value: str, level: int) -> None:
    """INVALID_CONFIG for a key that does not exist at a feature level, or for a value that no topic takes."""
    check_key(key, level)
    if not TOPIC_CONFIG[key].accepts(value):
        raise Refused(ErrorCode.INVALID_CONFIG, TOPIC_CONFIG[key].refusal(key, quoted(value)))


def checked_config(items: Iterable[tuple[str, str]], replicas: int, level: int) -> dict[str, str]:
    """The pairs as a dict. INVALID_CONFIG for an unknown key, a repeated key, or a value that a topic with
    this number of replicas does not take."""
    config: dict[str, str] = {}
    for key, value in items:
        check_value(key, value, level)
        if key in config:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is given twice")
        if key == MIN_INSYNC_REPLICAS and int(value) > majority(replicas):
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"{key} must be from 1 to {majority(replicas)}, the majority of {replicas} replicas, not {value}",
            )
        config[key] = value
    return config


def check_together(config: Mapping[str, str]) -> None:
    """INVALID_CONFIG if values of a topic's whole configuration contradict each other."""
    least, most = (int(config_value(config, key)) for key in (MIN_COMPACTION_LAG_MS, MAX_COMPACTION_LAG_MS))
    if least > most:
        raise Refused(
            ErrorCode.INVALID_CONFIG,
            f"{MIN_COMPACTION_LAG_MS} is {least}, above {MAX_COMPACTION_LAG_MS}, which is {most}",
        )
    if is_external(config) and is_mirrored(config):
        raise Refused(ErrorCode.INVALID_CONFIG, f"{STORAGE}={EXTERNAL} has no records that could be {MIRRORED}")
    if is_external(config) and is_compacted(config):
        raise Refused(
            ErrorCode.INVALID_CONFIG, f"{STORAGE}={EXTERNAL} has no records that {CLEANUP_POLICY} could compact"
        )


def differing(config: Mapping[str, str]) -> dict[str, str]:
    """The entries of a checked configuration that differ from the defaults, in the order of the keys. What is stored
    under a key that this smq does not have stays."""
    return {key: config[key] for key in sorted(config) if _is_stored(TOPIC_CONFIG.get(key), config[key])}


def _is_stored(row: ConfigKey | None, value: str) -> bool:
    return row is None or (not row.is_fixed and value != row.default)


def config_value(config: Mapping[str, str], key: str) -> str:
    """The effective value: the topic's own or the default."""
    return config.get(key, TOPIC_CONFIG[key].default)


def shown_value(config: Mapping[str, str], key: str, replicas: int) -> str:
    """As `config_value`, of a topic with this number of replicas."""
    return str(majority(replicas)) if key == MIN_INSYNC_REPLICAS else config_value(config, key)


def majority(replicas: int) -> int:
    """How many of a topic's replicas acknowledge a record. 1 without replicas, where no record is stored."""
    return replicas // 2 + 1


class BatchRules(NamedTuple):
    """What a topic asks of the batches that its producers send."""

    bytes_max: int = MESSAGE_BYTES_DEFAULT
    codec: int | None = None  # Kafka's number of the one in which batches are stored. None: as they were sent
    level: int | None = None  # of the codec. None: its own default
    is_append_time: bool = False  # records have the leader's time, not the producer's
    before_ms: int = INT64_MAX  # how much older than the leader's clock a timestamp may be
    after_ms: int = AFTER_MAX_MS_DEFAULT  # how much later
    needs_keys: bool = False  # every record has a key
    is_mirrored: bool = False  # batches come from another cluster's log, at their offsets, and are stored as they are

    @property
    def has_time_limits(self) -> bool:
        """Whether each record's timestamp is looked at. By default only the largest in the batch's header is: retention
        goes by it, and a batch is not opened for less."""
        is_usual = self.before_ms == INT64_MAX and self.after_ms in (AFTER_MAX_MS_DEFAULT, INT64_MAX)
        return not is_usual and not self.is_append_time


_PLAIN: Final = BatchRules()


def batch_rules(config: Mapping[str, str]) -> BatchRules:
    """For every batch that is produced, so the usual topic costs nothing."""
    if not config:
        return _PLAIN
    if is_mirrored(config):
        return BatchRules(bytes_max=int(config_value(config, MAX_MESSAGE_BYTES)), is_mirrored=True)
    codec_name = config_value(config, COMPRESSION_TYPE)
    level_key = f"compression.{codec_name}.level"
    level = config_value(config, level_key) if level_key in TOPIC_CONFIG else "-1"
    return BatchRules(
        bytes_max=int(config_value(config, MAX_MESSAGE_BYTES)),
        codec=None if codec_name == AS_PRODUCED else _CODECS.index(codec_name),
        level=None if level == "-1" and codec_name != "zstd" else int(level),
        is_append_time=config_value(config, TIMESTAMP_TYPE) == LOG_APPEND_TIME,
        before_ms=int(config_value(config, TIMESTAMP_BEFORE_MAX_MS)),
        after_ms=int(config_value(config, TIMESTAMP_AFTER_MAX_MS)),
        needs_keys=is_compacted(config),
    )


class Retention(NamedTuple):
    """What a topic keeps of each partition. None: without a limit."""

    ms: int | None = None
    bytes: int | None = None
    records: int | None = None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """As a command names them: -1 is no limit."""
        ms, size, records = (_UNLIMITED if limit is None else limit for limit in self)
        return ms, size, records


def retention(config: Mapping[str, str]) -> Retention | None:
    """None if everything is kept, or only compaction removes records."""
    if DELETE not in config_value(config, CLEANUP_POLICY) or not any(
        key in config for key in (RETENTION_MS, RETENTION_BYTES, RETENTION_RECORDS)
    ):
        return None  # only differences from the default are stored
    limits = (config_value(config, key) for key in (RETENTION_MS, RETENTION_BYTES, RETENTION_RECORDS))
    return Retention(*(None if value == NO_LIMIT else int(value) for value in limits))


class Compaction(NamedTuple):
    """What a compacted topic asks of its compaction. Times in milliseconds."""

    dirty_ratio: str
    lag_ms: int
    lag_ms_max: int
    tombstones_ms: int


def is_compacted(config: Mapping[str, str]) -> bool:
    """Whether the last record of each key stays, and older ones go."""
    return COMPACT in config_value(config, CLEANUP_POLICY)


def compaction(config: Mapping[str, str]) -> Compaction | None:
    """None if the topic is not compacted."""
    if not is_compacted(config):
        return None
    keys = (MIN_COMPACTION_LAG_MS, MAX_COMPACTION_LAG_MS, DELETE_RETENTION_MS)
    return Compaction(
        config_value(config, MIN_CLEANABLE_DIRTY_RATIO), *(int(config_value(config, key)) for key in keys)
    )


def times_ms(config: Mapping[str, str]) -> list[int]:
    """After which records of the topic may go, by the replicated clock."""
    kept = retention(config)
    times = [kept.ms] if kept is not None and kept.ms is not None else []
    limits = compaction(config)
    if limits is not None:
        times += [ms for ms in (limits.lag_ms, limits.lag_ms_max, limits.tombstones_ms) if ms]
    return times


def is_mirrored(config: Mapping[str, str]) -> bool:
    """Whether the topic's records come from another cluster, with their offsets."""
    return config_value(config, MIRRORED) == "true"


def is_external(config: Mapping[str, str]) -> bool:
    """Whether the topic's records are stored elsewhere, and only its offsets here."""
    return config_value(config, STORAGE) == EXTERNAL
