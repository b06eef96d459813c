"""docs/clients.md: its Python blocks run as they stand, against a cluster at another address."""

import importlib
from pathlib import Path

import pytest

from smq.testing.fake.runner import cluster_in_thread
from tests.pages import claimed

WRITTEN = "127.0.0.1:7401"  # the address on the page


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # a child made by spawn gets it, too
    # Groups and transactions need a coordinator: other tests run their blocks, as the page says.
    tour, counting, children = claimed("docs/clients.md", __file__)
    with cluster_in_thread(1) as cluster:
        (tmp_path / "smq_page_tour.py").write_text(tour.replace(WRITTEN, cluster.servers))
        (tmp_path / "smq_page_children.py").write_text(children)
        importlib.import_module("smq_page_tour")
        printed = capsys.readouterr().out
        assert all(f"b'{value}'" in printed for value in ("logged in", "one", "two", "three"))
        exec(compile(counting.replace(WRITTEN, cluster.servers), "docs/clients.md", "exec"), {})
        assert capsys.readouterr().out == "1 sent, 0 failed, b'1' attempt\n"
        assert importlib.import_module("smq_page_children").in_a_child(cluster.servers) == ["events"]
