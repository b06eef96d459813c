"""Options of format("smq"): which are accepted, and the advice in each refusal."""

import logging
import pickle
import subprocess
import sys

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadMaxRows

from smq.clients.login import Login
from smq.clients.tls import Tls
from smq.spark_connector.errors import OptionError
from smq.spark_connector.option_values import offsets
from smq.spark_connector.options import (
    EARLIEST,
    LATEST,
    ReadOptions,
    Security,
    StreamOptions,
    TimeSpec,
    TimeUnit,
    check_given,
    read_options,
    stream_options,
)
from smq.spark_connector.source import SmqDataSource

BASE = {"servers": "h:1", "subscribe": "t"}


def parsed(**more: str) -> ReadOptions:
    return read_options({**BASE, **{k.lower(): v for k, v in more.items()}})


def streamed(**more: str) -> StreamOptions:
    return stream_options({**BASE, **{k.lower(): v for k, v in more.items()}})


def test_defaults_are_those_of_the_kafka_connector_for_batches() -> None:
    options = parsed()
    assert (options.source.starting, options.ending) == (EARLIEST, LATEST)
    assert options.source.fail_on_data_loss
    assert options.source.partitions_min is None
    assert options.source.records_per_partition_max is None


def test_defaults_are_those_of_the_kafka_connector_for_streams() -> None:
    options = streamed()
    assert options.source.starting == LATEST
    assert (options.rows_max, options.bytes_max, options.rows_min) == (None, None, None)
    assert options.delay_ms_max == 15 * 60_000


def test_servers_and_topics_are_lists() -> None:
    options = read_options({"servers": " a:1, b:2 ,", "subscribe": "x, y ,x"}).source
    assert options.servers == ("a:1", "b:2")
    assert options.topics == ("x", "y")


@pytest.mark.parametrize("key", ["bootstrap", "bootstrap.servers", "kafka.bootstrap.servers"])
def test_kafka_names_of_servers_are_aliases(key: str) -> None:
    assert read_options({key: "a:1", "subscribe": "t"}).source.servers == ("a:1",)


def test_aliases_that_differ_are_refused() -> None:
    with pytest.raises(OptionError, match="mean the same"):
        read_options({"servers": "a:1", "kafka.bootstrap.servers": "b:1", "subscribe": "t"})


def test_tls_files_reach_the_reader_and_half_of_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMQ_TLS_CA", "SMQ_TLS_CERTIFICATE", "SMQ_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert parsed().source.security.tls is None
    assert parsed(**{"tls.ca": "/ca"}).source.security.tls == Tls(ca="/ca")
    whole = {"tls.ca": "/ca", "tls.certificate": "/c", "tls.key": "/k"}
    assert parsed(**whole).source.security.tls == Tls(ca="/ca", certificate="/c", key="/k")
    for lost, says in (("tls.ca", "needs 'tls.ca'"), ("tls.key", "together: a certificate")):
        with pytest.raises(OptionError, match=says):
            parsed(**{key: value for key, value in whole.items() if key != lost})
    monkeypatch.setenv("SMQ_TLS_CA", "/of/the/driver")
    assert parsed().source.security.tls == Tls(ca="/of/the/driver")


SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"
JAAS = f'{SCRAM} username="alice" password="pen\\"cil;";'
BY_KAFKA = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "SCRAM-SHA-256", "tls.ca": "/ca"}


@pytest.mark.parametrize(
    ("options", "login"),
    [
        ({"tls.ca": "/ca", "user": "alice", "password.file": "/p"}, Login(user="alice", password_file="/p")),
        (
            BY_KAFKA | {"kafka.sasl.jaas.config": JAAS},
            Login(user="alice", password='pen"cil;', mechanism="SCRAM-SHA-256"),
        ),
        ({"tls.ca": "/ca", "kafka.security.protocol": "SSL"}, None),
        ({"kafka.security.protocol": "PLAINTEXT", "user": "alice", "password.file": "/p"}, "a login needs SASL_SSL"),
        ({"user": "alice", "password.file": "/p"}, "a login needs TLS"),
        ({"tls.ca": "/ca", "user": "alice"}, "'user' and 'password.file' together"),
        (BY_KAFKA, "name the user in 'kafka.sasl.jaas.config'"),
        (BY_KAFKA | {"kafka.security.protocol": "SASL_PLAINTEXT"}, "a login needs SASL_SSL"),
        (BY_KAFKA | {"kafka.security.protocol": "PLAINTEXT"}, "a login needs SASL_SSL"),
        (BY_KAFKA | {"kafka.sasl.mechanism": "PLAIN"}, "speaks gRPC, with SCRAM"),
        (BY_KAFKA | {"kafka.sasl.jaas.config": 'x required username="alice";'}, "has no username"),
    ],
)
def test_a_user_comes_by_own_names_or_by_kafkas_and_never_in_clear(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], login: Login | str | None
) -> None:
    for name in ("SMQ_TLS_CA", "SMQ_USER", "SMQ_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)
    if not isinstance(login, str):
        assert parsed(**options).source.security == Security(Tls(ca="/ca"), login)
        return
    with pytest.raises(OptionError, match=login) as refused:
        parsed(**options)
    assert "cil" not in str(refused.value)


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


def test_source_can_be_made_without_options_as_create_table_does() -> None:
    assert SmqDataSource({}).schema().fieldNames()[:2] == ["key", "value"]


def test_subscribe_and_assign_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        parsed(assign='{"t":[0]}')


def test_assign_is_sorted_and_without_repeats() -> None:
    assert read_options({"servers": "h:1", "assign": '{"t":[3,1,3]}'}).source.assigned == {"t": (1, 3)}


@pytest.mark.parametrize(
    "text", ["", "t", "[]", "{}", '{"t":0}', '{"t":[]}', '{"t":[-1]}', '{"t":[true]}', '{"t":["0"]}']
)
def test_assign_that_is_not_a_map_of_partitions_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="assign"):
        read_options({"servers": "h:1", "assign": text})


@pytest.mark.parametrize("wrong", ["erliest", "5", "now", ""])
def test_a_misspelled_word_is_answered_by_the_words_there_are(wrong: str) -> None:
    with pytest.raises(OptionError, match=r"no such word and no JSON: write 'earliest', or JSON such as"):
        offsets("startingOffsets", wrong)
    with pytest.raises(OptionError, match="write 'latest'"):
        offsets("endingOffsets", wrong, refused=EARLIEST)


@pytest.mark.parametrize(("word", "expected"), [("earliest", EARLIEST), ("EARLIEST", EARLIEST)])
def test_starting_word(word: str, expected: int) -> None:
    assert parsed(startingOffsets=word).source.starting == expected


def test_json_offsets_with_marks() -> None:
    options = parsed(startingOffsets='{"t":{"0":23,"1":-2}}', endingOffsets='{"t":{"0":9223372036854775807,"1":-1}}')
    assert options.source.starting == {"t": {0: 23, 1: EARLIEST}}
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
def test_meaningless_offsets_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=name):
        parsed(**{name: text})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingTimestamp": "7"}, TimeSpec(name="startingTimestamp", unit=TimeUnit.CREATE_MS, times=7)),
        ({"startingTimestampNs": "7"}, TimeSpec(name="startingTimestampNs", unit=TimeUnit.APPEND_NS, times=7)),
        (
            {"startingOffsetsByTimestampNs": '{"t":{"0":7}}'},
            TimeSpec(name="startingOffsetsByTimestampNs", unit=TimeUnit.APPEND_NS, times={"t": {0: 7}}),
        ),
    ],
)
def test_times_are_in_milliseconds_or_by_name_in_nanoseconds(options: dict[str, str], expected: TimeSpec) -> None:
    assert parsed(**options).source.starting == expected
    assert streamed(**options).source.starting == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startingTimestamp", "-1"),
        ("endingTimestamp", "yesterday"),
        ("startingTimestampNs", "9223372036854775808"),
        ("startingOffsetsByTimestamp", '{"t":{"0":-1}}'),
        ("endingOffsetsByTimestamp", '{"t":[0]}'),
        ("startingOffsetsByTimestampNs", "latest"),
        ("startingOffsetsByTimestampStrategy", "earliest"),
        ("subscribePattern", "["),
        ("maxTriggerDelay", "soon"),
        ("maxTriggerDelay", "5y"),
        ("maxTriggerDelay", "-5s"),
    ],
)
def test_meaningless_values_are_refused_by_name(name: str, text: str) -> None:
    given = {name.lower(): text} if name == "subscribePattern" else {**BASE, name.lower(): text}
    for check in (check_given, stream_options if not name.startswith("ending") else read_options):
        with pytest.raises(OptionError, match=name):
            check(given)


def test_milliseconds_and_nanoseconds_of_one_place_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="'startingTimestamp' and 'startingTimestampNs' exclude each other"):
        parsed(startingTimestamp="1", startingTimestampNs="1")


@pytest.mark.parametrize(
    ("text", "ms"),
    [("250", 250), ("500ms", 500), ("10s", 10_000), ("15m", 900_000), ("2 min", 120_000), ("1H", 3_600_000)],
)
def test_trigger_delay_is_written_as_spark_writes_times(text: str, ms: int) -> None:
    assert streamed(maxTriggerDelay=text).delay_ms_max == ms


def test_limits_of_a_micro_batch() -> None:
    options = streamed(maxOffsetsPerTrigger="10", minOffsetsPerTrigger="10", maxBytesPerTrigger="5")
    assert (options.rows_max, options.rows_min, options.bytes_max) == (10, 10, 5)
    with pytest.raises(OptionError, match="minOffsetsPerTrigger 11 is more than maxOffsetsPerTrigger 10"):
        streamed(maxOffsetsPerTrigger="10", minOffsetsPerTrigger="11")


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestampNs", "pushdown"])
def test_batch_only_options_are_refused_in_a_stream(name: str) -> None:
    value = {"endingOffsets": "latest", "pushdown": "true"}.get(name, "{}" if "By" in name else "1")
    with pytest.raises(OptionError, match=f"'{name}' is only for batch reads"):
        streamed(**{name: value})


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"])
def test_stream_only_options_are_ignored_in_a_batch_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parsed(**{name: "5"})
    assert f"'{name}' has no effect in a batch" in caplog.text


def test_stream_may_start_at_latest_by_word_and_by_mark() -> None:
    assert streamed(startingOffsets="latest").source.starting == LATEST
    assert streamed(startingOffsets='{"t":{"0":-1}}').source.starting == {"t": {0: LATEST}}


@pytest.mark.parametrize("name", ["includeHeaders", "includeIndex", "failOnDataLoss", "pushdown"])
def test_flags_are_true_or_false_only(name: str) -> None:
    with pytest.raises(OptionError, match=rf"'{name}' must be true or false, not 'yes'"):
        parsed(**{name: "yes"})


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition", "retryTimeoutMs", "maxBytesPerTrigger"])
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "٣"])
def test_numbers_are_whole_and_positive(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=rf"'{name}' must be a whole number"):
        parsed(**{name: text})


def test_unknown_option_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(OptionError, match=r"no option 'startingoffset'; did you mean 'startingOffsets'\?"):
        check_given({"startingoffset": "earliest"})


def test_unknown_option_far_from_any_lists_them() -> None:
    with pytest.raises(OptionError, match="known options: servers, "):
        check_given({"zzz": "1"})


@pytest.mark.parametrize(
    "key",
    [
        "kafka.group.id",
        "kafka.ssl.truststore.location",
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
    ],
)
def test_kafka_options_without_meaning_here_are_accepted_with_a_warning(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_given({key: "x"})
    assert "no effect" in caplog.text


def test_trap_looking_a_source_up_imports_next_to_nothing() -> None:
    """Trap: Spark imports every pyspark_* module to find any source, and one that breaks hides them all."""
    script = (
        "import pyspark_smq, sys; assert pyspark_smq.DefaultSource.name() == 'smq'; "
        "print(*sorted({'grpc', 'google', 'pyarrow', 'aiokafka', 'numpy', 'smq.clients'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == ""


def test_trap_sources_survive_pickling_and_take_schema_by_keyword() -> None:
    """Trap: Spark pickles the source, gives option keys in lower case, and calls with `schema=`."""
    given = {"servers": "h:1", "subscribe": "t", "startingoffsets": "earliest", "maxoffsetspertrigger": "5"}
    source: SmqDataSource = pickle.loads(pickle.dumps(SmqDataSource(CaseInsensitiveDict(given))))
    reader = source.reader(schema=source.schema())
    stream = source.streamReader(schema=source.schema())
    assert stream.getDefaultReadLimit() == ReadMaxRows(5)
    for made in (reader, stream):
        assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_options_of_a_write_are_refused_in_a_read_with_what_to_write_instead() -> None:
    check_given({"topic": "t", "checkpointlocation": "/tmp/c"})
    with pytest.raises(OptionError, match="'topic' is only for writes: name topics by 'subscribe'"):
        parsed(topic="t")
    with pytest.raises(OptionError, match="'checkpointlocation' is only for writes: set it on writeStream"):
        streamed(checkpointLocation="/tmp/c")
