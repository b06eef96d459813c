"""Files with secrets, and those that say who may come in: a node takes none that any account may read or write."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from smq.coordinator.http.access import read_token
from smq.coordinator.service.tokens import Tokens
from tests.unit.coordinator.service.test_tokens import ISSUER_KEYS, config
from tests.unit.coordinator.tls.authorities import Authorities, authorities, node_tls

__all__ = ("authorities",)  # a fixture


def key(path: Path, a: Authorities) -> tuple[Path, Callable[[], object]]:
    identity = a.node(1)
    return identity.key, lambda: node_tls(identity, 1)


def token(path: Path, _: Authorities) -> tuple[Path, Callable[[], object]]:
    path.write_text("t" * 32)
    return path, lambda: read_token(path)


def jwks(path: Path, _: Authorities) -> tuple[Path, Callable[[], object]]:
    path.write_text(json.dumps(ISSUER_KEYS.jwks()))
    return path, lambda: Tokens(config(str(path)))


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [(key, (0o600, 0o440), (0o604, 0o602)), (token, (0o600, 0o440), (0o604, 0o602)), (jwks, (0o644,), (0o646,))],
)
def test_what_any_account_may_read_or_write_is_refused(
    authorities: Authorities,
    tmp_path: Path,
    make: Callable[[Path, Authorities], tuple[Path, Callable[[], object]]],
    good: tuple[int, ...],
    bad: tuple[int, ...],
) -> None:
    path, load = make(tmp_path / "file", authorities)
    for mode in good:
        path.chmod(mode)
        load()
    for mode in bad:
        path.chmod(mode)
        with pytest.raises(Exception, match=r"any account of this machine may (read|write) .*chmod o="):
            load()
