"""docs/clients.md: its Python blocks run as they stand, against a cluster at another address."""

import importlib
import re
from pathlib import Path

import pytest

from smq.testing.fake.runner import cluster_in_thread

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
WRITTEN = "127.0.0.1:7401"  # the address on the page


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # a child made by spawn gets it, too
    # Groups and transactions need a coordinator: membership/test_blocking.py and tests/cluster/test_transactions.py
    # run their blocks.
    tour, _, _, children = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with cluster_in_thread(1) as cluster:
        (tmp_path / "smq_page_tour.py").write_text(tour.replace(WRITTEN, cluster.servers))
        (tmp_path / "smq_page_children.py").write_text(children)
        importlib.import_module("smq_page_tour")
        printed = capsys.readouterr().out
        assert all(f"b'{value}'" in printed for value in ("logged in", "one", "two", "three"))
        assert importlib.import_module("smq_page_children").in_a_child(cluster.servers) == ["events"]
