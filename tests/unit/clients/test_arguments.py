"""Every wrong argument is refused at the call, by an error that names it, and nothing else is affected."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from smq.clients import (
    Admin,
    Consumer,
    InvalidRequest,
    OffsetAssigner,
    Producer,
    SmqError,
    StartAt,
    SyncConsumer,
    SyncProducer,
)
from smq.clients.arguments import instant_ms, instant_ns, milliseconds
from smq.clients.positions import parse_start
from smq.testing.fake.runner import cluster_in_thread, cluster_of

WHERE = "127.0.0.1:1"
NO_DURATIONS: list[Any] = ["5", None, True, math.nan, math.inf, -1, 1 << 31, timedelta(days=25), timedelta(seconds=-1)]


@pytest.mark.parametrize("bootstrap", [None, 7401, b"127.0.0.1:1", [None], [7401], {}, "", ",", "host", ":1", "h:0"])
@pytest.mark.parametrize("client", [Producer, Consumer, Admin, OffsetAssigner])
def test_a_bootstrap_that_names_no_node_is_refused(client: Callable[[Any], object], bootstrap: Any) -> None:
    with pytest.raises(InvalidRequest, match="bootstrap"):
        client(bootstrap)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://node:7402", "write node:7402"),
        ("http://node", "write node:7401"),
        ("grpc://node:1/x", "write node:1 .*without grpc://"),
    ],
)
def test_a_url_as_bootstrap_is_answered_by_what_to_write(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Admin(url)


@pytest.mark.parametrize("value", NO_DURATIONS)
@pytest.mark.parametrize(
    ("client", "name"),
    [
        (Producer, "linger_ms"),
        (Producer, "request_timeout_ms"),
        (Producer, "delivery_timeout_ms"),
        (Producer, "connect_timeout_ms"),
        (Consumer, "max_wait_ms"),
        (Consumer, "request_timeout_ms"),
        (Consumer, "stall_timeout_ms"),
        (Admin, "timeout_ms"),
        (OffsetAssigner, "timeout_ms"),
    ],
)
def test_a_wrong_duration_is_refused_by_its_name(client: Callable[..., object], name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        client(WHERE, **{name: value})


@pytest.mark.parametrize(
    ("client", "name", "value"),
    [
        (Producer, "acks", "most"),
        (Producer, "acks", 1),
        (Producer, "compression", "rar"),
        (Producer, "compression", None),
        (Producer, "idempotent", "no"),
        (Producer, "batch_bytes", 0),
        (Producer, "batch_bytes", 1.5),
        (Producer, "buffer_bytes", 0),
        (Producer, "buffer_bytes", -1),
        (Producer, "max_in_flight", 0),
        (Producer, "max_in_flight", 6),
        (Producer, "max_in_flight", True),
        (Producer, "tls", "ca.pem"),
        (Consumer, "group", ""),
        (Consumer, "group", 7),
        (Consumer, "group", "\udcff"),
        (Consumer, "from_replica", "1"),
        (Consumer, "from_replica", 0),
        (Consumer, "auto_offset_reset", "newest"),
        (Consumer, "fetch_max_bytes", 0),
        (Consumer, "partition_max_bytes", 1 << 31),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(client: Callable[..., object], name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        client(WHERE, **{name: value})


BAD_RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("topic", {"topic": None}),
    ("topic", {"topic": 7}),
    ("topic", {"topic": b"t"}),
    ("topic", {"topic": ["t"]}),
    ("topic", {"topic": ""}),
    ("topic", {"topic": "\udcff"}),
    ("value", {"value": "text"}),
    ("value", {"value": 1}),
    ("key", {"key": "text"}),
    ("key", {"key": 1.5}),
    ("headers", {"headers": {"a": b"b"}}),
    ("headers", {"headers": [("a", "b")]}),
    ("headers", {"headers": [(b"a", b"b")]}),
    ("headers", {"headers": [("a",)]}),
    ("headers", {"headers": 7}),
    ("partition", {"partition": "0"}),
    ("partition", {"partition": -1}),
    ("partition", {"partition": 1.0}),
    ("partition", {"partition": True}),
    ("timestamp_ms", {"timestamp_ms": -1}),
    ("timestamp_ms", {"timestamp_ms": 1.5}),
    ("timestamp_ms", {"timestamp_ms": "now"}),
    ("timestamp_ms", {"timestamp_ms": True}),
    ("timestamp_ms", {"timestamp_ms": 1 << 63}),
    ("timestamp_ms", {"timestamp_ms": datetime(2026, 1, 1)}),  # noqa: DTZ001 a time without a zone is the test
    ("timestamp_ms", {"timestamp_ms": datetime(1969, 1, 1, tzinfo=UTC)}),
]


async def test_a_wrong_record_is_refused_at_the_call_and_delays_no_other() -> None:
    """A topic that was no str used to raise in the sending loop again and again: nothing was sent any more."""

    async with cluster_of(1, t=1) as cluster, Producer(cluster.servers) as producer:
        for name, wrong in BAD_RECORDS:
            with pytest.raises(InvalidRequest, match=f"^INVALID_REQUEST: {name}"):
                producer.send(**{"topic": "t", "value": b"v", **wrong})
            assert (await producer.send("t", b"good")).offset >= 0
        await producer.flush()
        assert len(cluster.stored_values("t")[0]) == len(BAD_RECORDS)


def test_the_blocking_producer_refuses_the_same_records_at_the_call() -> None:
    with cluster_in_thread(1, t=1) as cluster, SyncProducer(cluster.servers) as producer:
        for name, wrong in BAD_RECORDS:
            with pytest.raises(InvalidRequest, match=f"^INVALID_REQUEST: {name}"):
                producer.send(**{"topic": "t", "value": b"v", **wrong})
        assert producer.send("t", b"good").result(20).offset == 0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("values", {"values": b"abc"}),
        ("values", {"values": (v for v in (b"a",))}),
        ("values", {"values": []}),
        ("values", {"values": None}),
        (r"values\[1\]", {"values": [b"a", "b"]}),
        ("keys", {"keys": [b"k", b"l"]}),
        (r"keys\[0\]", {"keys": ["k"]}),
        ("timestamp_ms", {"timestamp_ms": [1, 2]}),
        ("timestamp_ms", {"timestamp_ms": [1.5]}),
        ("timestamp_ms", {"timestamp_ms": -1}),
        ("timestamp_ms", {"timestamp_ms": "1"}),
        ("partition", {"partition": "0"}),
        ("topic", {"topic": 7}),
    ],
)
async def test_a_wrong_bulk_send_is_refused_as_a_whole(name: str, wrong: dict[str, Any]) -> None:
    async with cluster_of(1, t=1) as cluster, Producer(cluster.servers) as producer:
        with pytest.raises(InvalidRequest, match=name):
            await producer.send_many(**{"topic": "t", "values": [b"v"], **wrong})
        await producer.flush()
        assert cluster.stored_values("t") == {0: []}


async def test_headers_of_a_generator_are_stored_although_the_topic_is_not_known_yet() -> None:
    """They are read once for the check and once for the batch."""

    async with cluster_of(1) as cluster, Producer(cluster.servers) as producer, Consumer(cluster.servers) as reader:
        cluster.create("late", 1)
        sent: Any = (("n", b"%d" % n) for n in range(2))
        await producer.send("late", b"v", headers=sent)
        await reader.assign("late")
        assert list((await anext(reader)).headers) == [("n", b"0"), ("n", b"1")]


@pytest.mark.parametrize(
    "partitions", [b"t", None, 7, [7], [("t",)], [("t", "0")], [("t", -1)], [(7, 0)], {"t": "x"}, [""], ""]
)
async def test_a_wrong_assignment_is_refused_and_the_old_one_stays(partitions: Any) -> None:
    async with cluster_of(1, t=1) as cluster, Consumer(cluster.servers) as consumer:
        await consumer.assign("t")
        with pytest.raises(InvalidRequest, match=r"partitions|offset type"):
            await consumer.assign(partitions)
        assert consumer.assignment() == [("t", 0)]


@pytest.mark.parametrize("start", [True, 1.5, b"earliest", "newest", (), ("EXACT_OFFSET",), ("EXACT_OFFSET", "1")])
def test_a_wrong_start_is_refused(start: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_start(start, group=None)


def test_starts_are_spelled_one_way_in_any_case_and_in_kafkas_words() -> None:
    for spelling in ("earliest", "EARLIEST", "reset_to_earliest", "RESET_TO_EARLIEST"):
        assert parse_start(spelling, group=None).type == "RESET_TO_EARLIEST"
    assert parse_start("latest", group=None).type == "RESET_TO_LATEST"
    assert parse_start(("exact_offset", 5), group=None) == parse_start(
        StartAt(type="EXACT_OFFSET", value=5), group=None
    )


def test_a_time_is_a_datetime_an_age_or_a_number() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert instant_ms("x", noon) == 1_767_268_800_000
    assert instant_ms("x", noon.astimezone(None)) == 1_767_268_800_000
    assert instant_ns("x", noon + timedelta(microseconds=1_234)) == 1_767_268_800_001_234_000
    assert parse_start(noon, group=None).timestamp_ms == 1_767_268_800_000
    assert parse_start(("EXACT_TS_NS", noon), group=None).value == 1_767_268_800_000_000_000
    ago = parse_start(timedelta(hours=1), group=None).timestamp_ms
    assert ago is not None
    assert abs(instant_ms("x", datetime.now(UTC)) - 3_600_000 - ago) < 60_000
    assert milliseconds("x", timedelta(seconds=1.5)) == 1_500.0


async def test_wrong_arguments_of_the_admin_are_named() -> None:
    async with cluster_of(1, t=1) as cluster, Admin(cluster.servers) as admin:
        calls: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
            ("name", lambda bad: admin.create_topic(bad), [7, None, b"u", ["u"], "\udcff"]),
            ("partition_count", lambda bad: admin.create_topic("u", bad), ["1", 1.0, True, 1 << 31]),
            ("config", lambda bad: admin.create_topic("u", config=bad), [{"retention.ms": 5}, "a=b", {1: "x"}]),
            ("start_offset", lambda bad: admin.create_topic("u", start_offset=bad), ["0", 0.5, 1 << 63]),
            ("before_offset", lambda bad: admin.delete_records("t", 0, bad), ["0", 0.0, 1 << 63]),
            ("node", lambda bad: admin.set_node_drained(bad, True), ["1", 1.0]),
            ("drained", lambda bad: admin.set_node_drained(1, bad), [1, "yes"]),
            ("set", lambda bad: admin.alter_topic("t", set=bad), [{"a": 1}, "a"]),
            ("unset", lambda bad: admin.alter_topic("t", unset=bad), ["a", [1], 7]),
            ("topics", lambda bad: admin.describe_cluster(bad), ["t", [7], 7]),
            ("starts", lambda bad: admin.list_offsets(bad), ["t", [("t", 0)], {"t": 0}]),
            ("group", lambda bad: admin.commit_offsets(bad, {("t", 0): 1}), ["", 7]),
            ("offset", lambda bad: admin.commit_offsets("g", bad), ["t", {"t": 1}, {("t", 0): "1"}]),
            ("partitions", lambda bad: admin.fetch_offsets("g", bad), ["t", [("t", "0")], 7]),
        ]
        for name, call, wrongs in calls:
            for wrong in wrongs:
                with pytest.raises(InvalidRequest, match=name):
                    await call(wrong)
        assert cluster.applied == [], "nothing took effect"


async def test_a_topic_stands_for_all_its_partitions() -> None:
    async with cluster_of(1, t=3, u=2) as cluster, Consumer(cluster.servers) as consumer:
        assert await consumer.assign("t") == {("t", 0): 0, ("t", 1): 0, ("t", 2): 0}
        assert set(await consumer.assign(["t", ("u", 1)])) == {("t", 0), ("t", 1), ("t", 2), ("u", 1)}
        cluster.topics["t"][1].hwm = 7
        found = await consumer.assign({"t": "latest", ("t", 0): "earliest"})
        assert found == {("t", 0): 0, ("t", 1): 7, ("t", 2): 0}
        with pytest.raises(SmqError, match="no topic 'nope'"):
            await consumer.assign("nope")


def test_options_of_the_blocking_clients_are_those_of_the_others() -> None:
    """mypy checks them by these dictionaries; at run time the asyncio client does."""
    import inspect

    from smq.clients.admin import AdminOptions
    from smq.clients.consumer import ConsumerOptions
    from smq.clients.groups.member_options import MemberOptions
    from smq.clients.producer import ProducerOptions

    pairs = [(Producer, ProducerOptions), (Consumer, ConsumerOptions), (Admin, AdminOptions)]
    for client, options in [*pairs, (OffsetAssigner, AdminOptions)]:
        known = inspect.signature(client).parameters
        own = [n for n, p in known.items() if p.kind is p.KEYWORD_ONLY]
        of_members = list(MemberOptions.__annotations__) if client is Consumer else []
        assert list(options.__annotations__) == of_members + own
    with pytest.raises(TypeError, match="lingerr_ms"):
        SyncProducer(WHERE, lingerr_ms=5)  # type: ignore[call-arg] # mypy sees it, too: this ignore is the test
    with pytest.raises(TypeError, match="grup"):
        SyncConsumer(WHERE, grup="g")  # type: ignore[call-arg] # as above
