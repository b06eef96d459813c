"""The configuration keys of a topic: their defaults, what values they take, what they mean.

Owns the table TOPIC_CONFIG, the source of validation, error messages and documentation. A new key is a new row of a new
feature level. Its default must be the present behaviour of topics without the key, since only differences from the
defaults are stored. A fixed key says what smq does for every topic: it takes only values that demand no more, and none
of them is stored. Any module may import it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from smq.raft_state.config_keys import INT64_MAX, ConfigKey, ConfigType, between, is_ratio, known_at, one_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import MESSAGE_BYTES_CAP, MESSAGE_BYTES_DEFAULT
from smq.raft_state.refusal import Refused, quoted

CLEANUP_POLICY: Final = "cleanup.policy"
COMPACT: Final = "compact"
DELETE: Final = "delete"
DELETE_RETENTION_MS: Final = "delete.retention.ms"
MAX_COMPACTION_LAG_MS: Final = "max.compaction.lag.ms"
MAX_MESSAGE_BYTES: Final = "max.message.bytes"
MIN_CLEANABLE_DIRTY_RATIO: Final = "min.cleanable.dirty.ratio"
MIN_COMPACTION_LAG_MS: Final = "min.compaction.lag.ms"
MIN_INSYNC_REPLICAS: Final = "min.insync.replicas"
NO_LIMIT: Final = "-1"
RETENTION_BYTES: Final = "retention.bytes"
RETENTION_MS: Final = "retention.ms"
RETENTION_RECORDS: Final = "retention.records"
STORAGE: Final = "storage"
EXTERNAL: Final = "external"


def _fixed(
    default: str, type_: ConfigType, meaning: str, values: str, accepts: Callable[[str], bool] | None = None
) -> ConfigKey:
    return ConfigKey(default, values, meaning, accepts or one_of(default), type_, is_fixed=True)


def _time(default: str, meaning: str, least: int) -> ConfigKey:
    values = f"a whole number of milliseconds from {least} to {INT64_MAX}"
    return ConfigKey(default, values, meaning, between(least, INT64_MAX), ConfigType.LONG)


def _limit(meaning: str, unit: str, least: int) -> ConfigKey:
    return ConfigKey(
        default=NO_LIMIT,
        values=f"-1 (without a limit) or a whole number of {unit} from {least} to {INT64_MAX}",
        meaning=meaning,
        accepts=lambda value: value == NO_LIMIT or between(least, INT64_MAX)(value),
        type=ConfigType.LONG,
    )


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
    CLEANUP_POLICY: ConfigKey(
        default=DELETE,
        values='"delete" (what retention.* does not keep goes), "compact" (the last record of each key stays) or'
        ' "compact,delete"',
        meaning="how old records go",
        accepts=one_of(DELETE, COMPACT, "compact,delete", "delete,compact"),
        type=ConfigType.LIST,
    ),
    DELETE_RETENTION_MS: _time(
        str(24 * 3_600_000), "how long compaction keeps a tombstone after it has deleted what was before it", 0
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
    "compression.type": _fixed(
        "producer", ConfigType.STRING, "how records are compressed", '"producer" (batches are stored as they were sent)'
    ),
    "flush.messages": _fixed(
        "1",
        ConfigType.LONG,
        "the records between two syncs to the disk",
        f"a whole number from 1 to {INT64_MAX} (each batch is synced before it is acknowledged)",
        between(1, INT64_MAX),
    ),
    "flush.ms": _fixed(
        "0",
        ConfigType.LONG,
        "the time between two syncs to the disk",
        f"a whole number of milliseconds from 0 to {INT64_MAX} (each batch is synced before it is acknowledged)",
        between(0, INT64_MAX),
    ),
    "message.timestamp.after.max.ms": _fixed(
        str(INT64_MAX), ConfigType.LONG, "how far ahead of the clock a record may be", f"{INT64_MAX} (without a limit)"
    ),
    "message.timestamp.before.max.ms": _fixed(
        str(INT64_MAX), ConfigType.LONG, "how far behind the clock a record may be", f"{INT64_MAX} (without a limit)"
    ),
    "message.timestamp.type": _fixed(
        "CreateTime", ConfigType.STRING, "which timestamp a record has", '"CreateTime" (the producer\'s)'
    ),
    MIN_INSYNC_REPLICAS: _fixed(
        "1",
        ConfigType.INT,
        "how many replicas have a record on disk before acks=all is answered",
        "a whole number from 1 to the majority of the replicas (which smq always waits for)",
        between(1, INT64_MAX),
    ),
    "preallocate": _fixed("false", ConfigType.BOOLEAN, "whether files are allocated in advance", "false"),
    "remote.storage.enable": _fixed("false", ConfigType.BOOLEAN, "whether old records move to other storage", "false"),
    RETENTION_BYTES: _limit("the bytes that each partition keeps: older batches are deleted", "bytes", 0),
    RETENTION_MS: _limit(
        "how long records are kept: batches whose newest record is older are deleted", "milliseconds", 0
    ),
    RETENTION_RECORDS: _limit(
        "the records that each partition keeps: older batches are deleted (a key of smq's own)", "records", 1
    ),
    "unclean.leader.election.enable": _fixed(
        "false", ConfigType.BOOLEAN, "whether a replica that lacks committed records may lead", "false"
    ),
}


def check_key(key: str, level: int) -> None:
    """INVALID_CONFIG for a key that does not exist at a feature level."""
    known = known_at(TOPIC_CONFIG, level)
    if key not in known:
        keys = ", ".join(known)
        raise Refused(ErrorCode.INVALID_CONFIG, f"unknown topic configuration {quoted(key)}: the keys are {keys}")


def check_value(key: str, value: str, level: int) -> None:
    """INVALID_CONFIG for a key that does not exist at a feature level, or for a value that no topic takes."""
    check_key(key, level)
    if not TOPIC_CONFIG[key].accepts(value):
        raise Refused(ErrorCode.INVALID_CONFIG, f"{key} must be {TOPIC_CONFIG[key].values}, not {quoted(value)}")


def checked_config(items: Iterable[tuple[str, str]], replicas: int, level: int) -> dict[str, str]:
    """The pairs as a dict. INVALID_CONFIG for an unknown key, a repeated key, or a value that a topic with so many
    replicas does not take."""
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
    """As `config_value`, of a topic with so many replicas."""
    return str(majority(replicas)) if key == MIN_INSYNC_REPLICAS else config_value(config, key)


def majority(replicas: int) -> int:
    """How many of a topic's replicas acknowledge a record. 1 without replicas, where no record is stored."""
    return replicas // 2 + 1


def max_message_bytes(config: Mapping[str, str]) -> int:
    """The largest record batch that a topic accepts, in bytes."""
    return int(config_value(config, MAX_MESSAGE_BYTES))


class Retention(NamedTuple):
    """What a topic keeps of each partition. None: without a limit."""

    ms: int | None = None
    bytes: int | None = None
    records: int | None = None


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


def is_external(config: Mapping[str, str]) -> bool:
    """Whether the topic's records are stored elsewhere, and only its offsets here."""
    return config_value(config, STORAGE) == EXTERNAL
