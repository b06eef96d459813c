"""Options of format("smq"): what is accepted, and what each refusal tells the user to do."""

import logging
from collections.abc import Callable

import pytest

from smq.spark_connector.errors import OptionError
from smq.spark_connector.options import EARLIEST, LATEST, ReadOptions, check_given, read_options
from smq.spark_connector.source import SmqDataSource

BASE = {"servers": "h:1", "subscribe": "t"}


def parsed(**more: str) -> ReadOptions:
    return read_options({**BASE, **{k.lower(): v for k, v in more.items()}})


def test_defaults_are_those_of_the_kafka_connector_for_batches() -> None:
    options = parsed()
    assert (options.starting, options.ending) == (EARLIEST, LATEST)
    assert options.fail_on_data_loss
    assert options.partitions_min is None
    assert options.records_per_partition_max is None


def test_servers_and_topics_are_lists() -> None:
    options = read_options({"servers": " a:1, b:2 ,", "subscribe": "x, y ,x"})
    assert options.servers == ("a:1", "b:2")
    assert options.topics == ("x", "y")


@pytest.mark.parametrize("key", ["bootstrap.servers", "kafka.bootstrap.servers"])
def test_kafka_names_of_servers_are_aliases(key: str) -> None:
    assert read_options({key: "a:1", "subscribe": "t"}).servers == ("a:1",)


def test_aliases_that_differ_are_refused() -> None:
    with pytest.raises(OptionError, match="mean the same"):
        read_options({"servers": "a:1", "kafka.bootstrap.servers": "b:1", "subscribe": "t"})


@pytest.mark.parametrize("servers", ["", ",", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_servers_that_are_no_addresses_are_refused(servers: str) -> None:
    with pytest.raises(OptionError, match="host:port"):
        read_options({"servers": servers, "subscribe": "t"})


def test_missing_servers_say_what_to_set() -> None:
    with pytest.raises(OptionError, match=r"\.option\('servers', 'host:port.*CREATE TEMPORARY VIEW"):
        read_options({"subscribe": "t"})


def test_missing_topic_says_what_to_set() -> None:
    with pytest.raises(OptionError, match=r"\.option\('subscribe'.*'assign'"):
        read_options({"servers": "h:1"})


def test_source_without_options_can_be_made_because_create_table_does() -> None:
    assert SmqDataSource({}).schema().fieldNames()[:2] == ["key", "value"]


def test_subscribe_and_assign_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        parsed(assign='{"t":[0]}')


def test_assign_is_sorted_and_without_repeats() -> None:
    assert read_options({"servers": "h:1", "assign": '{"t":[3,1,3]}'}).assigned == {"t": (1, 3)}


@pytest.mark.parametrize(
    "text", ["", "t", "[]", "{}", '{"t":0}', '{"t":[]}', '{"t":[-1]}', '{"t":[true]}', '{"t":["0"]}']
)
def test_assign_that_is_no_map_of_partitions_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="assign"):
        read_options({"servers": "h:1", "assign": text})


@pytest.mark.parametrize(("word", "expected"), [("earliest", EARLIEST), ("EARLIEST", EARLIEST)])
def test_starting_word(word: str, expected: int) -> None:
    assert parsed(startingOffsets=word).starting == expected


def test_json_offsets_with_marks() -> None:
    options = parsed(startingOffsets='{"t":{"0":23,"1":-2}}', endingOffsets='{"t":{"0":9223372036854775807,"1":-1}}')
    assert options.starting == {"t": {0: 23, 1: EARLIEST}}
    assert options.ending == {"t": {0: 2**63 - 1, 1: LATEST}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startingOffsets", "latest"),
        ("startingOffsets", '{"t":{"0":-1}}'),
        ("endingOffsets", "earliest"),
        ("endingOffsets", '{"t":{"0":-2}}'),
        ("startingOffsets", '{"t":{"0":-3}}'),
        ("startingOffsets", '{"t":{"0":9223372036854775808}}'),
        ("startingOffsets", '{"t":{"0":1.5}}'),
        ("startingOffsets", '{"t":{"0":true}}'),
        ("startingOffsets", '{"t":{"zero":1}}'),
        ("startingOffsets", '{"t":{"-1":1}}'),
        ("startingOffsets", '{"t":[1]}'),
        ("startingOffsets", "[1]"),
        ("startingOffsets", "{"),
        ("startingOffsets", "[" * 100_000),
        ("startingOffsets", "yesterday"),
        ("startingOffsets", ""),
    ],
)
def test_offsets_that_make_no_sense_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=name):
        parsed(**{name: text})


@pytest.mark.parametrize("name", ["includeHeaders", "includeIndex", "failOnDataLoss"])
def test_flags_are_true_or_false_only(name: str) -> None:
    with pytest.raises(OptionError, match=rf"'{name}' is true or false, not 'yes'"):
        parsed(**{name: "yes"})


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition", "retryTimeoutMs"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "٣"])
def test_numbers_are_whole_and_positive(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=rf"'{name}' is a whole number"):
        parsed(**{name: text})


def test_unknown_option_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(OptionError, match=r"no option 'startingoffset'; did you mean 'startingOffsets'\?"):
        check_given({"startingoffset": "earliest"})


def test_unknown_option_far_from_any_lists_them() -> None:
    with pytest.raises(OptionError, match="known options: servers, "):
        check_given({"zzz": "1"})


@pytest.mark.parametrize("key", ["kafka.group.id", "kafka.security.protocol", "groupidprefix"])
def test_kafka_options_without_meaning_here_are_accepted_with_a_warning(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_given({key: "x"})
    assert "no effect" in caplog.text


CALLS: list[Callable[[SmqDataSource], object]] = [
    lambda source: source.streamReader(source.schema()),
    lambda source: source.writer(source.schema(), False),
    lambda source: source.streamWriter(source.schema(), False),
]


@pytest.mark.parametrize("call", CALLS, ids=["streamReader", "writer", "streamWriter"])
def test_what_is_not_there_yet_says_so(call: Callable[[SmqDataSource], object]) -> None:
    with pytest.raises(OptionError, match="does not support"):
        call(SmqDataSource(dict(BASE)))
