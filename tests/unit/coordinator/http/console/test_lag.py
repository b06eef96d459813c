"""A group's page: totals of which a part is not known, and each member's own lag."""

import re
from typing import Any
from urllib.parse import quote

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.service import group_lag
from smq.coordinator.service.name_lookup import known_ranges
from smq.replication.api import PartitionRange
from smq.testing.served import Served
from tests.unit.coordinator.grpc.test_group_lag import assigned
from tests.unit.coordinator.http.console.test_pages import EVIL, fill, get


async def test_a_lag_of_which_a_part_is_not_known_is_so_much_or_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_one(*arguments: Any) -> dict[tuple[str, int], PartitionRange]:
        """The leader of t/1 does not answer."""
        return {place: range_ for place, range_ in (await known_ranges(*arguments)).items() if place != ("t", 1)}

    await fill(served)
    path = f"groups/{quote(EVIL, safe='')}"
    assert "Lag 5 " in (await get(served, path)).text
    monkeypatch.setattr(group_lag, "known_ranges", without_one)
    assert "Lag 5 or more " in (await get(served, path)).text


async def test_a_member_is_shown_with_its_own_lag(served: Served) -> None:
    await served.create(partitions=2)
    await served.fill([3])
    await assigned(served, 0)
    page = await get(served, "groups/g")
    assert "Partitions Lag Records Bytes Time" in page.text
    (row,) = re.findall(r"test 127\.0\.0\.1 1 3 3 (\d+) B ", page.text)
    status = await served.admin.NodeStatus(pb.NodeStatusRequest())
    assert int(row) == next(r.size_bytes for r in status.replicas if r.partition == 0)
