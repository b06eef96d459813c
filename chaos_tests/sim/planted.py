"""Planted bugs: production functions with one line changed, to prove that the simulation would notice.

Owns the list, and the mutation itself: the source of a function is taken, a text in it replaced, and the result put
in its place for the time of a run. A text that is not found exactly once is an error: the code has moved, and the
planted bug must follow it. Nothing of this exists in production code.
"""

import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


class MutationError(AssertionError):
    """The text to change is not there exactly once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """`target` is module:Class.method or module:function."""

    target: str
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        owner, name = self._locate()
        original = inspect.getattr_static(owner, name)
        setattr(owner, name, self._mutated(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    def _locate(self) -> tuple[Any, str]:
        module_name, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def _mutated(self, original: Any) -> Any:
        is_property = isinstance(original, property)
        function = original.fget if is_property else original
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise MutationError(f"{self.target} contains {self.old!r} {source.count(self.old)} times, not once")
        lines = source.replace(self.old, self.new).splitlines()
        while lines[0].startswith("@"):
            lines.pop(0)
        scope: dict[str, Any] = {}
        # The mutated text sees the module's own names; filename and line help in a traceback.
        exec(compile("\n".join(lines), f"<planted in {self.target}>", "exec"), function.__globals__, scope)
        mutated = functools.wraps(function)(scope[function.__name__])
        return property(mutated) if is_property else mutated


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedBug:
    """`anomalies`: what may give it away. `seeds`: within how many seeds of `scenario` it must be found."""

    name: str
    rule: str
    mutations: tuple[Mutation, ...]
    scenario: str
    anomalies: frozenset[str]
    seeds: int

    @contextmanager
    def planted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for mutation in self.mutations:
                stack.enter_context(mutation.applied())
            yield
