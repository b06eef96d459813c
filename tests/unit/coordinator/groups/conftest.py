"""Every test of live groups also checks that their actions lead only to phases that the table of transitions names."""

import pytest

from smq.coordinator.groups import live
from smq.coordinator.groups.memory import GroupMemory
from smq.coordinator.groups.transitions import LEADS_TO, Action


@pytest.fixture(autouse=True)
def _check_phases_after_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    for action, run in live.ACTIONS.items():

        def checked(memory: GroupMemory, subject: object, *, action: Action = action, run: live.Run = run) -> None:
            before = memory.phase
            run(memory, subject)
            assert memory.phase in LEADS_TO.get(action, frozenset()) | {before}, (action, before, memory.phase)

        monkeypatch.setitem(live.ACTIONS, action, checked)
