"""The public classes of `smq.clients` say what they do, in which units, and which errors come of it.

A reader of `help()` or of an editor's hint sees nothing else. Errors are named by their codes, as everywhere.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_origin

import pytest

import smq.clients
from smq.raft_state.errors import ErrorCode

UNITS = ("_ms", "_ns", "_s", "_bytes")  # in a parameter's name, which says the unit by itself
UNITLESS = {"timeout": "seconds"}  # names that the standard library has chosen
BLOCKING = {
    name: getattr(smq.clients, name.removeprefix("Sync")) for name in dir(smq.clients) if name.startswith("Sync")
}
CODES = {code.name for code in ErrorCode}


def public_classes() -> dict[str, type]:
    named = {name: getattr(smq.clients, name) for name in dir(smq.clients) if not name.startswith("_")}
    return {
        name: found
        for name, found in named.items()
        if inspect.isclass(found) and found.__module__.startswith("smq.clients")
    }


def methods() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(class, name, function) of every public method and property."""
    for owner, cls in public_classes().items():
        for name in dir(cls):
            found = inspect.getattr_static(cls, name)
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if not name.startswith("_") and inspect.isfunction(function):
                yield owner, name, function


def is_remote(owner: str, function: Callable[..., Any]) -> bool:
    """Whether it asks the cluster, or waits for it: coroutines do, and what stands for them in the blocking clients."""
    original = inspect.unwrap(getattr(BLOCKING.get(owner), function.__name__, function))
    return (
        inspect.iscoroutinefunction(original)
        or inspect.isasyncgenfunction(original)
        or (owner, function.__name__) in {("Delivery", "result"), ("Delivery", "exception")}
    )


def measured(function: Callable[..., Any]) -> list[str]:
    """Its parameters that are times or sizes (a Serde's functions `to_bytes` and `from_bytes` are neither)."""
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if (name.endswith(UNITS) or name in UNITLESS) and get_origin(parameter.annotation) is not Callable
    ]


def test_the_walk_finds_the_clients_and_their_methods() -> None:
    found = {(owner, name) for owner, name, _ in methods()}
    assert {"Producer", "Consumer", "Admin", "OffsetAssigner"} <= {cls.__name__ for cls in BLOCKING.values()}
    assert {("Consumer", "getmany"), ("SyncConsumer", "search"), ("SyncAdmin", "close"), ("Serde", "decode")} <= found
    assert len(found) > 120


@pytest.mark.parametrize("name", public_classes())
def test_every_public_class_has_a_docstring_of_its_own(name: str) -> None:
    doc = vars(public_classes()[name]).get("__doc__")
    assert doc
    assert not doc.startswith(f"{name}(")  # what a dataclass writes without one


def test_every_public_method_has_a_docstring() -> None:
    assert [f"{owner}.{name}" for owner, name, function in methods() if not function.__doc__] == []


def test_times_and_sizes_are_named_with_their_unit() -> None:
    for owner, method, function in methods():
        doc = function.__doc__ or ""
        for name in measured(function):
            assert re.search(rf"`{name}`", doc), (owner, method, name)
            assert UNITLESS.get(name, "") in doc, (owner, method, name)


@pytest.mark.parametrize("name", public_classes())
def test_times_and_sizes_of_the_options_are_named_in_the_class_docstring(name: str) -> None:
    doc = public_classes()[name].__doc__ or ""
    if name in BLOCKING:
        assert f"Options as {BLOCKING[name].__name__}'s." in doc
    assert [option for option in measured(public_classes()[name]) if f"`{option}`" not in doc] == []


def test_a_method_that_asks_the_cluster_names_its_errors() -> None:
    asking = [(owner, name, function) for owner, name, function in methods() if is_remote(owner, function)]
    named = re.compile(r"\b[A-Z_]{5,}\b")
    silent = [(o, name) for o, name, f in asking if not CODES.intersection(named.findall(f.__doc__ or ""))]
    assert silent == []
    assert len(asking) > 60


def test_an_error_that_is_named_exists() -> None:
    for owner, name, function in methods():
        documents = (function.__doc__ or "") + (public_classes()[owner].__doc__ or "")
        capitals = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", documents))
        assert capitals <= CODES.union(smq.clients.OFFSET_TYPES), (owner, name)
