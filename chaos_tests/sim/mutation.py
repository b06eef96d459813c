"""Mutations: production functions with one line changed for the time of a run.

Owns the mutation: it takes the source of a function, replaces a text in it, and puts the result in its place. A text
that is not found exactly once is an error. Only the benchmark of the metrics' cost uses it.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any


class MutationError(AssertionError):
    """The text to replace does not occur exactly once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """`target` is module:Class.method or module:function."""

    target: str
    old: str
    new: str


def _function(target: str) -> Any:
    """The function that a target names; of a property, the getter."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    for name in path.split("."):
        owner = inspect.getattr_static(owner, name)
    return owner.fget if isinstance(owner, property) else owner


def _mutated(function: Any, mutations: list[Mutation]) -> CodeType:
    """The code of the function with all texts replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    for mutation in mutations:
        if source.count(mutation.old) != 1:
            times = source.count(mutation.old)
            raise MutationError(f"{mutation.target} contains {mutation.old!r} {times} times, not once")
        source = source.replace(mutation.old, mutation.new)
    lines = source.splitlines()
    while lines[0].startswith("@"):
        lines.pop(0)
    scope: dict[str, Any] = {}
    name = f"<planted in {mutations[0].target}>"
    exec(compile("\n".join(lines), name, "exec", dont_inherit=True), function.__globals__, scope)
    code: CodeType = scope[function.__name__].__code__
    return code


def compiled(mutations: Iterable[Mutation]) -> dict[str, CodeType]:
    """The changed code of each target."""
    by_target: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        by_target.setdefault(mutation.target, []).append(mutation)
    return {target: _mutated(_function(target), changes) for target, changes in by_target.items()}


@contextmanager
def mutated(mutations: Iterable[Mutation]) -> Iterator[None]:
    """Changes the functions for the time of a block."""
    with replaced(compiled(mutations)):
        yield


@contextmanager
def replaced(changed: Mapping[str, CodeType]) -> Iterator[None]:
    """Changes the functions in place, so that tables that hold them see the change too."""
    originals = {target: _function(target).__code__ for target in changed}
    for target, code in changed.items():
        _function(target).__code__ = code
    try:
        yield
    finally:
        for target, code in originals.items():
            _function(target).__code__ = code
