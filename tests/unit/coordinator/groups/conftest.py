"""Every test of live groups also checks that their actions lead only where the table of transitions says."""

import pytest

from smq.coordinator.groups import live
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.transitions import LEADS_TO, Action


@pytest.fixture(autouse=True)
def _actions_lead_where_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for action, run in live.ACTIONS.items():

        def checked(memory: GroupMemory, subject: object, *, action: Action = action, run: live.Run = run) -> None:
            before = memory.phase
            run(memory, subject)
            assert memory.phase in LEADS_TO.get(action, frozenset()) | {before}, (action, before, memory.phase)

        monkeypatch.setitem(live.ACTIONS, action, checked)
