"""Every test of live groups also checks that their actions lead only to phases that the table of transitions names."""

import pytest

from smq.coordinator.groups.live import LiveGroup, Run
from smq.coordinator.groups.transitions import LEADS_TO, Action


@pytest.fixture(autouse=True)
def _check_phases_after_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    for action, run in LiveGroup.actions.items():

        def checked(group: LiveGroup, subject: object, *, action: Action = action, run: Run = run) -> None:
            before = group.phase
            run(group, subject)
            assert group.phase in LEADS_TO.get(action, frozenset()) | {before}, (action, before, group.phase)

        monkeypatch.setitem(LiveGroup.actions, action, checked)
