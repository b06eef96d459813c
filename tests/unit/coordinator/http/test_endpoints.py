"""/healthz, /readyz and /metrics of a real node."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from smq.testing.served import Served, served_node


async def get(served: Served, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{served.server.http_address[1]}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_a_serving_node_is_healthy_and_ready(served: Served) -> None:
    assert (await get(served, "/healthz"))[0] == 200
    status, text = await get(served, "/readyz")
    assert (status, '"ready": true' in text) == (200, True)
    assert (await get(served, "/absent"))[0] == 404


async def test_the_front_page_leads_on(served: Served) -> None:
    status, text = await get(served, "/")
    assert status == 200
    for page in re.findall('href="(.*?)"', text):
        assert (await get(served, page))[0] == 200
    assert "smq status" in text


async def test_a_connection_that_sends_half_a_request_is_closed_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smq.coordinator.http.endpoints.HTTP_FIRST_REQUEST_S_MAX", 0.2)

    async with served_node(tmp_path) as served:
        port = served.server.http_address[1]
        halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for (_, writer), sent in zip(halves, (b"GET /readyz HT", b"", b"POST / HTTP/1.1\r\nHost: x"), strict=True):
            writer.write(sent)
        kept_reader, kept = await asyncio.open_connection("127.0.0.1", port)
        kept.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await kept_reader.readuntil(b"}")
        for reader, writer in halves:
            try:
                async with asyncio.timeout(20):
                    assert b"200" not in await reader.read()
            except ConnectionResetError:
                pass  # closed, too
            writer.close()
        kept.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await kept_reader.readuntil(b"}")
        kept.close()


async def test_a_node_that_hands_over_is_healthy_but_not_ready(served: Served) -> None:
    stopping = asyncio.create_task(served.server.stop())
    await asyncio.sleep(0)
    status, text = await get(served, "/readyz")
    assert (status, "stopping" in text) == (503, True)
    await stopping


async def test_metrics_show_each_partitions_offsets(served: Served) -> None:
    await served.create(partitions=2)
    await served.fill([5, 3], partition=1)
    status, text = await get(served, "/metrics")
    assert status == 200
    values = {
        (sample.name, sample.labels.get("partition")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("smq_")
    }
    assert values["smq_partition_high_water_mark", "1"] == 8
    assert values["smq_partition_next_offset", "1"] == 8
    assert values["smq_partition_last_stable_offset", "1"] == 8
    assert values["smq_partition_lso_lag", "1"] == 0
    assert values["smq_partition_log_start_offset", "1"] == 0
    assert values["smq_partition_high_water_mark", "0"] == 0
    assert values["smq_partition_is_leader", "0"] == 1
    assert values["smq_partition_leader", "0"] == 1
    assert values["smq_partition_under_replicated", "0"] == 0
    assert values["smq_partition_size_bytes", "1"] > 0
    assert values["smq_node_ready", None] == 1
    assert values["smq_raft_applied_index", None] == values["smq_raft_commit_index", None] > 0


async def test_clients_that_speak_no_http_or_do_not_stay_write_nothing_into_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A gRPC client that takes this port for its own, and a scraper that hangs up."""

    port = served.server.http_address[1]
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"GET /\x00 HTTP/1.1\r\nHost : x\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await reader.read()
        writer.close()
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0)
        writer.transport.abort()
    await get(served, "/metrics")
    assert caplog.text == ""


async def test_a_fault_of_the_node_itself_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    node: Any = served.server.node
    node.status = None
    assert (await get(served, "/readyz"))[0] == 500
    assert "not callable" in caplog.text
