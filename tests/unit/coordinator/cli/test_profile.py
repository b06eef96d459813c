"""The profile of `smq login`: a file of its account alone, which stands in for variables that are not set."""

import os
from pathlib import Path

import pytest

from smq.coordinator.cli.profile import profile_path, use_profile, write_profile
from smq.raft_state.errors import SmqError
from tests.unit.coordinator.cli.conftest import Smq

KEPT = {"SMQ_BOOTSTRAP": "a:1", "SMQ_TLS_CA": "/ca", "SMQ_USER": "alice", "SMQ_OTHER": "x"}


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [*KEPT, "SMQ_PASSWORD_FILE", "SMQ_TLS_CERTIFICATE", "SMQ_TLS_KEY", "SMQ_PROFILE"]:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_profile(profile_path(), "secret", KEPT)
    return profile_path()


def test_a_profile_fills_in_the_variables_that_it_may(profile: Path) -> None:
    assert (profile.stat().st_mode & 0o777, profile.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    use_profile()
    assert {name: os.environ.get(name) for name in KEPT} == KEPT | {"SMQ_OTHER": None}
    assert os.environ["SMQ_PASSWORD_FILE"] == str(profile)


@pytest.mark.parametrize("name", ["SMQ_BOOTSTRAP", "SMQ_TLS_CERTIFICATE", "SMQ_USER"])
def test_nothing_of_a_profile_is_sent_to_another_cluster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "other")
    use_profile()
    assert "SMQ_PASSWORD_FILE" not in os.environ


def test_a_profile_that_others_may_read_is_refused(profile: Path) -> None:
    profile.chmod(0o644)
    with pytest.raises(SmqError, match="others may read"):
        use_profile()


def test_a_login_without_tls_is_refused_before_the_password_is_read(smq: Smq) -> None:
    refused = smq("login", "alice", input="secret")
    assert "a login needs TLS" in refused.output
    assert "secret" not in refused.output
