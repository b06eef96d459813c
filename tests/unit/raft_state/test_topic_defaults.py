"""The cluster's defaults of new topics: which topics take them, and when."""

from dataclasses import replace

import pytest

from smq.raft_state.cluster_config import CLUSTER_CONFIG, TOPIC_DEFAULTS
from smq.raft_state.commands import AlterTopicConfig, CreateTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.topic_config import TOPIC_CONFIG
from smq.raft_state.topic_rules import check_creation
from tests.unit.raft_state.support import Driver, cluster, settings, topic


@pytest.fixture
def driver() -> Driver:
    return cluster()


def config_of(driver: Driver, name: str = "t1") -> dict[str, str]:
    return driver.machine.state.topics[name].config


def with_config(number: int, *config: tuple[str, str]) -> CreateTopic:
    return replace(topic(number), config=config)


def test_every_key_that_acts_has_a_default_under_kafkas_name() -> None:
    acting = {key for key, row in TOPIC_CONFIG.items() if not row.is_read_only}
    assert set(TOPIC_DEFAULTS.values()) == acting
    names = {name for name, key in TOPIC_DEFAULTS.items() if name != key}
    assert names >= {"log.retention.ms", "log.retention.bytes", "message.max.bytes", "log.message.timestamp.type"}
    assert set(TOPIC_DEFAULTS) <= set(CLUSTER_CONFIG)


def test_a_new_topic_has_the_defaults_and_an_older_one_keeps_its_own(driver: Driver) -> None:
    driver.ok(topic(1))
    driver.ok(settings(log_retention_ms=1000, message_max_bytes=5))
    driver.ok(topic(2))
    driver.ok(settings("message.max.bytes", log_retention_ms=2000))
    driver.ok(topic(3))
    assert [config_of(driver, name) for name in ("t1", "t2", "t3")] == [
        {},
        {"max.message.bytes": "5", "retention.ms": "1000"},
        {"retention.ms": "2000"},
    ]


def test_what_the_creator_asks_for_wins(driver: Driver) -> None:
    driver.ok(settings(log_retention_ms=1000, log_retention_bytes=7))
    driver.ok(with_config(1, ("retention.ms", "-1")))
    assert config_of(driver) == {"retention.bytes": "7"}, "-1 is the default of a cluster without settings"


def test_a_reset_key_has_the_present_default(driver: Driver) -> None:
    driver.ok(with_config(1, ("retention.ms", "5"), ("compression.type", "lz4")))
    driver.ok(settings(log_retention_ms=1000, log_retention_bytes=7))
    driver.ok(AlterTopicConfig(name="t1", unset=("retention.ms", "compression.type")))
    assert config_of(driver) == {"retention.ms": "1000"}, "only what was reset"


def test_offsets_without_records_take_no_defaults(driver: Driver) -> None:
    driver.ok(settings(log_retention_ms=1000))
    external = replace(topic(1, replicas=0), config=(("storage", "external"),))
    driver.ok(external)
    assert config_of(driver) == {"storage": "external"}
    driver.ok(AlterTopicConfig(name="t1", unset=("retention.ms",)))
    assert config_of(driver) == {"storage": "external"}


def test_the_defaults_show_before_the_topic_is_made(driver: Driver) -> None:
    driver.ok(settings(compression_type="zstd"))
    assert check_creation(driver.machine.state, topic(1)) == {"compression.type": "zstd"}


@pytest.mark.parametrize(
    "command",
    [
        settings(log_retention_ms=-2),
        settings(message_max_bytes=0),
        settings(compression_type="brotli"),
        settings(compression_gzip_level=0),
        settings(log_segment_bytes=1_000_000),
        settings(log_retention_hours=168),
        settings(storage="external"),
    ],
    ids=str,
)
def test_a_default_that_no_topic_can_have_is_refused(driver: Driver, command: object) -> None:
    before = dict(driver.machine.state.config)
    driver.refused(command, ErrorCode.INVALID_CONFIG)  # type: ignore[arg-type]  # commands, by the parameters above
    assert driver.machine.state.config == before


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("retention.ms", "of new topics it is log.retention.ms"),
        ("max.message.bytes", "of new topics it is message.max.bytes"),
        ("log.retention.hours", "use log.retention.ms (milliseconds)"),
        ("segment.bytes", "the settings are num.partitions"),
        ("no.such.key", "the settings are num.partitions"),
    ],
)
def test_a_key_that_the_cluster_does_not_have_is_refused_with_the_one_to_use(
    driver: Driver, key: str, words: str
) -> None:
    assert words in driver.refused(settings(key), ErrorCode.INVALID_CONFIG).message
