"""/healthz, /readyz and /metrics of a real node."""

import asyncio
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.coordinator.served import Served, serving


async def get(served: Served, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{served.server.http_address[1]}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def test_a_serving_node_is_healthy_and_ready(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        assert (await get(served, "/healthz"))[0] == 200
        status, text = await get(served, "/readyz")
        assert (status, '"ready": true' in text) == (200, True)
        assert (await get(served, "/absent"))[0] == 404

    serving(tmp_path, body)


def test_a_node_that_hands_over_is_healthy_but_not_ready(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        stopping = asyncio.create_task(served.server.stop())
        await asyncio.sleep(0)
        status, text = await get(served, "/readyz")
        assert (status, "stopping" in text) == (503, True)
        await stopping

    serving(tmp_path, body)


def test_metrics_tell_each_partitions_offsets(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
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
        assert values["smq_partition_log_start_offset", "1"] == 0
        assert values["smq_partition_high_water_mark", "0"] == 0
        assert values["smq_partition_is_leader", "0"] == 1
        assert values["smq_partition_leader", "0"] == 1
        assert values["smq_partition_under_replicated", "0"] == 0
        assert values["smq_partition_size_bytes", "1"] > 0
        assert values["smq_node_ready", None] == 1
        assert values["smq_raft_applied_index", None] == values["smq_raft_commit_index", None] > 0

    serving(tmp_path, body)
