"""The modules that an executor or a small script loads when it imports the clients."""

import subprocess
import sys

import pytest

import smq.clients
from smq.raft_state.errors import ErrorCode, SmqError

FORBIDDEN = ("lmdb", "pysyncobj", "pyspark", "uvloop", "click", "rich", "pyarrow", "pandas", "structlog")

INTERNAL_CODES = {  # between nodes only
    ErrorCode.STALE_EPOCH,
    ErrorCode.STALE_INCARNATION,
    ErrorCode.ELECTION_REJECTED,
    ErrorCode.ALREADY_INITIALIZED,
}


def _loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(' '.join(sorted(m.partition('.')[0] for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_clients_import_nothing_from_server_or_spark() -> None:
    names = ", ".join(smq.clients._MODULES)
    assert not _loaded_after(f"from smq.clients import {names}") & set(FORBIDDEN)


def test_package_itself_is_light() -> None:
    loaded = _loaded_after("import smq.clients")
    assert not loaded & {*FORBIDDEN, "grpc", "google", "aiokafka", "asyncio"}


def test_a_star_imports_every_public_name() -> None:
    found: dict[str, object] = {}
    exec("from smq.clients import *", found)
    errors = {name for name, kind in vars(smq.clients).items() if isinstance(kind, type) and issubclass(kind, SmqError)}
    assert found.keys() - {"__builtins__"} == {*smq.clients._MODULES, *errors, "ErrorCode"}


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in INTERNAL_CODES])
def test_every_error_that_a_caller_can_meet_has_a_class_of_its_own(code: ErrorCode) -> None:
    """So that `except` can name it."""
    kind = type(SmqError(code, "what"))
    assert kind is not SmqError
    assert getattr(smq.clients, kind.__name__) is kind
    others = [other for other in ErrorCode if other is not code and type(SmqError(other, "what")) is kind]
    assert others == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Prodcuer'"):
        smq.clients.Prodcuer  # noqa: B018 the access is the test
