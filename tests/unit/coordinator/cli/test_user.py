"""`smq user`: a password comes from a terminal, a file or standard input, and is in no output and no argument."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from smq.testing.fake.cluster import FakeCluster
from tests.unit.coordinator.cli.conftest import Smq

SECRET = "hörse battery"


def test_users_are_made_listed_and_deleted(smq: Smq, cluster: FakeCluster, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    assert "no users" in smq("user", "list").stdout
    outputs = [
        smq("user", "create", "alice", "--password-from", file),
        smq("user", "create", "bob", "--password-from", "-", "--json", input=SECRET),
        smq("user", "create", "carol", input=f"{SECRET}\r\nnot this"),
        smq("user", "passwd", "bob", "--json", input=SECRET),
        smq("user", "list", "--json"),
        smq("user", "list"),
        smq("user", "delete", "alice", "--json"),
    ]
    assert [output.exit_code for output in outputs] == [0] * len(outputs)
    assert not any(SECRET in output.output for output in outputs)
    both = {"SCRAM-SHA-256": 16_384, "SCRAM-SHA-512": 16_384}
    assert json.loads(outputs[1].stdout) == {"user": "bob", "created": True}
    assert json.loads(outputs[3].stdout) == {"user": "bob", "changed": True}
    assert json.loads(outputs[4].stdout) == [{"name": name, "mechanisms": both} for name in ("alice", "bob", "carol")]
    assert "alice" in outputs[5].stdout
    assert json.loads(outputs[6].stdout) == {"user": "alice", "deleted": True}
    assert set(cluster.users) == {"bob", "carol"}


@pytest.mark.parametrize(
    ("arguments", "given", "reason"),
    [
        (("create", "alice"), SECRET, "USER_EXISTS"),
        (("passwd", "bob"), SECRET, "UNKNOWN_USER"),
        (("delete", "bob"), "", "UNKNOWN_USER"),
        (("create", "bob"), "", "the password is empty"),
        (("create", "bob"), "\n", "the password is empty"),
        (("create", "bob"), "x" * 5_000, "longer than"),
        (("create", "bob", SECRET), "", "unexpected extra argument"),
        (("create", "bob", "--password", SECRET), "", "No such option"),
    ],
)
def test_what_cannot_be_done_is_said_without_the_password(
    smq: Smq, cluster: FakeCluster, arguments: tuple[str, ...], given: str, reason: str
) -> None:
    smq("user", "create", "alice", input="first")
    refused = smq("user", *arguments, input=given)
    assert refused.exit_code != 0
    assert reason in refused.output
    assert set(cluster.users) == {"alice"}
    assert not given.strip() or given not in refused.output


def test_a_person_is_asked_twice_and_sees_nothing(
    smq: Smq, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smq.coordinator.cli.passwords.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: 1)))
    typed = smq("user", "create", "alice", input=f"{SECRET}\nother\n{SECRET}\n{SECRET}\n")
    assert (typed.exit_code, set(cluster.users)) == (0, {"alice"})
    assert "do not match" in typed.output
    assert SECRET not in typed.output
    assert sys.stdin is not None
