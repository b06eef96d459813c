"""Replacements: production functions that a planted bug replaces for the time of a run.

Owns the exchange. A fault is a small function: it is called with the original function, then with the arguments of the
call. It takes the place of the code object, so tables and imports that hold the function see the fault, too. A target
that has moved is an error that names it: the planted bug must follow the code. Production code must never know of this.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

Fault = Callable[..., Any]


class TargetError(AssertionError):
    """The target is no function, method or property, or is not where the bug looks for it."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """`target` is module:function, module:Class.method or module:Class.property."""

    target: str
    by: Fault

    def install(self) -> None:
        """Replaces the function for as long as the process lives."""
        function = function_of(self.target)
        function.__code__ = _standing_in(function, self.by)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Replaces the function for the time of a block."""
        function = function_of(self.target)
        own = function.__code__
        self.install()
        try:
            yield
        finally:
            function.__code__ = own


def replace(target: str, *, by: Fault) -> Replacement:
    return Replacement(target, by)


def returns(value: Any) -> Fault:
    """The fault that always returns this value."""
    return lambda *_arguments, **_named: value


nothing = returns(None)


def planted(replacements: Iterable[Replacement]) -> AbstractContextManager[Any]:
    """All of them, for the time of a block."""
    stack = ExitStack()
    for replacement in replacements:
        stack.enter_context(replacement.planted())
    return stack


def function_of(target: str) -> FunctionType:
    """The function that a target names; of a property, the getter. TargetError if it is not there."""
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = vars(found)[name]
    except (ImportError, KeyError, TypeError) as e:
        raise TargetError(f"there is no {target}: the code has moved, and the planted bug must follow") from e
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    if not isinstance(found, FunctionType):
        raise TargetError(f"{target} is no function, method or property, but {found!r}")
    return found


def _standing_in(function: FunctionType, fault: Fault) -> CodeType:
    """Code that calls the fault, which gets the function as it was."""
    own = function.__code__
    original = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    def called(*arguments: Any, **named: Any) -> Any:
        return fault(original, *arguments, **named)

    constants = tuple(called if constant == _CALLED else constant for constant in _template.__code__.co_consts)
    return _template.__code__.replace(co_consts=constants, co_name=own.co_name, co_freevars=own.co_freevars)


_CALLED = "called"


def _template(*arguments: Any, **named: Any) -> Any:
    function: Any = "called"  # the constant that `_standing_in` exchanges
    return function(*arguments, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """What all planted bugs have: a name, the rule that is broken, and the functions that are replaced."""

    name: str
    rule: str
    faults: tuple[Replacement, ...]

    def planted(self) -> AbstractContextManager[Any]:
        return planted(self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedBug(Bug):
    """Of a whole cluster. `anomalies`: any of them reveals it. `watched`: this the nodes themselves must note, too.
    `seeds`: the number of seeds of `scenario` within which it must be found."""

    scenario: str
    anomalies: frozenset[str]
    seeds: int = 8
    watched: str = ""
