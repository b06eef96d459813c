"""Text, JSON and one's own format as bytes and back."""

import struct

import pytest

from smq.clients import JSON, STRING, InvalidRequest, Serde, SyncConsumer, SyncProducer
from smq.testing.fake.runner import cluster_in_thread


def test_values_go_through_a_topic_in_the_format_that_was_chosen() -> None:
    point = Serde[tuple[int, int]](lambda p: struct.pack(">ii", *p), lambda b: struct.unpack(">ii", b))
    with cluster_in_thread(1, t=1) as cluster:
        with SyncProducer(cluster.servers) as producer:
            producer.send("t", JSON.encode({"ü": [1, None]}), key=STRING.encode("clé"))
            producer.send("t", point.encode((3, -4)), key=STRING.encode(None))
            producer.flush()
            producer.send_many("t", STRING.encode_all(["x", None]))
        with SyncConsumer(cluster.servers) as consumer:
            consumer.assign("t")
            first, second, third, fourth = [record for _, record in zip(range(4), consumer, strict=False)]
    assert (STRING.decode(first.key), JSON.decode(first.value)) == ("clé", {"ü": [1, None]})
    assert first.value == '{"ü":[1,null]}'.encode()
    assert (STRING.decode(second.key), point.decode(second.value)) == (None, (3, -4))
    assert [STRING.decode(r.value) for r in (third, fourth)] == ["x", None]


def test_a_record_that_does_not_decode_stops_no_reader() -> None:
    """It would, if the consumer decoded: it could return neither that record nor those behind it."""
    with cluster_in_thread(1, t=1) as cluster:
        with SyncProducer(cluster.servers) as producer:
            producer.send_many("t", [b'"a"', b"{", b'"c"'])
        found, broken = [], []
        with SyncConsumer(cluster.servers, group="g") as consumer:
            consumer.assign("t", end_offset="latest")
            for record in consumer:
                try:
                    found.append(JSON.decode(record.value))
                except InvalidRequest:
                    broken.append(record.offset)
            consumer.commit()
            assert consumer.committed()["t", 0].offset == 3
    assert (found, broken) == (["a", "c"], [1])


def test_what_a_format_cannot_hold_is_a_typed_error() -> None:
    for wrong in (object(), float("nan")):
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            JSON.encode(wrong)
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        STRING.encode("\udcff")
    for serde, data in ((JSON, b"{"), (STRING, b"\xff")):
        with pytest.raises(InvalidRequest, match="cannot be decoded"):
            serde.decode(data)
