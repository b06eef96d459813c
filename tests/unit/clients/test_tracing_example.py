"""examples/tracing.py: its program runs, and its interceptors do what they say."""

import re

import pytest

from examples.tracing import HEADER, WriteTrace, continued, current, main, trace_of
from smq.clients import ConsumerRecord, ProducerRecord
from smq.testing.fake.runner import cluster_in_thread

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_each_order_and_its_invoice_share_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster_in_thread(1) as cluster:
        main(cluster.servers)
        main(cluster.servers)
    printed = capsys.readouterr().out
    found = re.findall(r"^orders/(\d) -> invoices/(\d) in trace ([0-9a-f]{32})$", printed, re.MULTILINE)
    assert [(order, invoice) for order, invoice, _ in found] == [(str(i), str(i)) for i in range(6)]
    assert len({trace for *_, trace in found}) == 6
    assert printed.count("3 traces, 3 invoices") == 2


def test_the_header_is_that_of_the_standard_and_a_record_keeps_its_own() -> None:
    sent = ProducerRecord("t", b"v", None, [("a", b"b")], None, 0)
    [first, (name, value)] = WriteTrace().on_send(sent).headers
    assert (first, name) == (("a", b"b"), HEADER)
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", value or b"")
    traced = sent._replace(headers=[(HEADER, b"00-" + TRACE.encode() + b"-00f067aa0ba902b7-01")])
    assert WriteTrace().on_send(traced) == traced


@pytest.mark.parametrize("value", [None, b"", b"00", b"00-short-00f067aa0ba902b7-01"])
def test_what_is_no_trace_continues_none(value: bytes | None) -> None:
    record = ConsumerRecord("t", 0, 0, 0, 0, None, b"v", [(HEADER, value)])
    assert trace_of(record) is None
    with continued(record._replace(headers=[(HEADER, f"00-{TRACE}-00f067aa0ba902b7-01".encode())])):
        assert current.get() == TRACE
    assert current.get() is None
