"""Which groups have series: of each coordinator the first ones, by what every node knows."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from smq.coordinator.groups import shown
from smq.raft_state.coordinators import coordinator_of
from tests.unit.raft_state.support import advance, advances, cluster, commit, pid, topic

NAMES = [f"g{number:02}" for number in range(20)]


def test_each_coordinators_first_groups_have_series_whichever_node_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cluster(kafka=True)
    driver.ok(topic(1, "t"))
    driver.ok(advances(advance(pid(1, 0), 0, hwm=10)))
    for name in reversed(NAMES):
        driver.ok(commit(name, (pid(1, 0), 4)))
    monkeypatch.setattr(shown, "METRICS_GROUPS_MAX", 3)
    node = SimpleNamespace(state=driver.machine.state)
    found = list(shown.shown_groups(node))
    assert [name for name, _, _ in found] == NAMES
    of_node = defaultdict(list)
    for name, owner, is_shown in found:
        assert owner == coordinator_of(driver.machine.state, name).node
        of_node[owner].append(is_shown)
    assert len(of_node) > 1
    for flags in of_node.values():
        assert flags == [True] * 3 + [False] * (len(flags) - 3)
