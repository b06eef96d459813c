"""The repairs go through pysyncobj's private names: this fails when one of them moves."""

import ast
import inspect
import re
from pathlib import Path

import pysyncobj
import pytest
from pysyncobj import syncobj
from pysyncobj.journal import Journal
from pysyncobj.version import VERSION

import smq.replication
from smq.replication.raft import engine_pysyncobj
from smq.replication.raft.journal import RaftJournal

ENGINE = Path(engine_pysyncobj.__file__)
LIBRARY_SOURCE = Path(syncobj.__file__).read_text()
PRIVATE_NAMES = sorted(set(re.findall(r"_SyncObj(__\w+)", ENGINE.read_text())))
MODULE_GLOBALS = ["monotonicTime", "random", "createPoller", "createJournal", "PIPE_NOTIFIER_ENABLED", "pickle"]


def test_the_installed_version_is_the_one_the_repairs_are_for() -> None:
    assert VERSION == "0.3.17"


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_is_still_there(name: str) -> None:
    assert re.search(rf"def {name}\(|self\.{name} = ", LIBRARY_SOURCE), f"SyncObj.{name} is gone"


def test_enough_private_names_were_found_to_mean_something() -> None:
    assert len(PRIVATE_NAMES) >= 15


@pytest.mark.parametrize("name", MODULE_GLOBALS)
def test_a_replaced_global_is_still_read_by_the_library(name: str) -> None:
    assert len(re.findall(rf"\b{name}\b", LIBRARY_SOURCE)) >= 2
    assert getattr(syncobj, name) is not None


@pytest.mark.parametrize("name", ["_applyCommand", "_checkCommandsToApply", "_onTick"])
def test_a_method_we_call_or_replace_takes_what_it_did(name: str) -> None:
    ours = inspect.signature(getattr(engine_pysyncobj._Library, name))
    theirs = inspect.signature(getattr(syncobj.SyncObj, name))
    assert list(ours.parameters) == list(theirs.parameters)


def test_the_journal_has_every_method_of_the_librarys() -> None:
    for name, theirs in inspect.getmembers(Journal, inspect.isfunction):
        if name == "__init__":
            continue
        ours = inspect.signature(getattr(RaftJournal, name))
        assert len(ours.parameters) == len(inspect.signature(theirs).parameters), name


def test_nothing_else_imports_the_library() -> None:
    package = Path(smq.__path__[0])
    importers = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == pysyncobj.__name__ for name in names):
                importers.append(path)
    assert set(importers) == {ENGINE}


def test_the_librarys_pickle_is_out_of_reach() -> None:
    with pytest.raises(Exception, match="unpickle"):
        syncobj.pickle.loads(b"")
    with pytest.raises(Exception, match="unpickle"):
        syncobj.pickle.dumps(())
