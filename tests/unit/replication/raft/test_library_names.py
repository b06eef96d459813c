"""The repairs go through pysyncobj's private names: this fails when one of them moves."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from pysyncobj import syncobj
from pysyncobj.journal import Journal
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from smq.replication.raft import pysyncobj_adapter

ADAPTER = Path(pysyncobj_adapter.__file__)
LIBRARY_SOURCE = Path(syncobj.__file__).read_text()
PRIVATE_NAMES = sorted(set(re.findall(r"_SyncObj(__\w+)", ADAPTER.read_text())))
METHODS = {
    name
    for name, _ in [
        *inspect.getmembers(Journal, inspect.isfunction),
        *inspect.getmembers(Transport, inspect.isfunction),
    ]
    if re.search("[a-z][A-Z]", name)
}
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
    ours = inspect.signature(getattr(pysyncobj_adapter.Library, name))
    theirs = inspect.signature(getattr(syncobj.SyncObj, name))
    assert list(ours.parameters) == list(theirs.parameters)


def test_the_journal_has_every_method_of_the_librarys() -> None:
    for name, theirs in inspect.getmembers(Journal, inspect.isfunction):
        if name == "__init__":
            continue
        ours = inspect.signature(getattr(pysyncobj_adapter._Journal, name))
        assert len(ours.parameters) == len(inspect.signature(theirs).parameters), name


# What the library calls its own, or what we would call in its place. `term`, `voters` and the like are Raft's.
LIBRARY_WORDS = re.compile(r"_SyncObj__|pysyncobj|SyncObj\b|_RAFT_STATE|FAIL_REASON|_COMMAND_TYPE|\braft[A-Z]\w+")


def test_nothing_else_of_raft_knows_a_name_of_the_library() -> None:
    """So that another library takes one file. Docstrings may say why something is not left to it."""
    for path in sorted(ADAPTER.parent.glob("*.py")):
        if path == ADAPTER:
            continue
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef | ast.ClassDef | ast.arg | ast.keyword):
                name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
                name = name or getattr(node, "arg", None) or ""
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                name = node.value
            else:
                continue
            assert not LIBRARY_WORDS.search(name), f"{path.name} names {name}"
            assert name not in METHODS, f"{path.name} has {name}, which is the library's shape"


def test_the_librarys_pickle_is_out_of_reach() -> None:
    with pytest.raises(Exception, match="unpickle"):
        syncobj.pickle.loads(b"")
    with pytest.raises(Exception, match="unpickle"):
        syncobj.pickle.dumps(())
