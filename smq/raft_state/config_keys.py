"""What a row of a configuration table is: a key's default, its valid values, its meaning and its type.

Owns the row and the usual checks of a value. `topic_config` and `cluster_config` have the tables. It must never know a
single key. Any module may import it.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1  # Kafka's way to write "without a limit"
# Not \d or int(): they accept other scripts' digits, signs, blanks and underscores. No key needs more than nineteen
# digits.
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,18}")


_RATIO: Final = re.compile(r"0|0?\.[0-9]{1,9}|1(\.0{1,9})?")


class ConfigType(enum.IntEnum):
    """Kafka's numbers of the types."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """`accepts` is true for a valid value; `values` describes the valid values."""

    default: str
    values: str
    meaning: str
    accepts: Callable[[str], bool]
    type: ConfigType
    is_fixed: bool = False  # no accepted value changes anything, and none is stored
    is_fixed_at_creation: bool = False
    why: str = ""  # of a fixed key: why it changes nothing
    since: int = 1  # the feature level that introduced the key; below it there is no such key

    @property
    def is_read_only(self) -> bool:
        return self.is_fixed or self.is_fixed_at_creation

    @property
    def documentation(self) -> str:
        """What the key means, what it takes and, if it is fixed, why it changes nothing."""
        return f"{self.meaning}: {self.values}{f'; without effect: {self.why}' if self.is_fixed else ''}"

    def refusal(self, key: str, quoted_value: str) -> str:
        """The message for a value that is not accepted."""
        return f"{key} must be {self.values}, not {quoted_value}{f': {self.why}' if self.is_fixed else ''}"


def known_at(table: Mapping[str, ConfigKey], level: int) -> dict[str, ConfigKey]:
    """The rows that a cluster of this feature level has. An smq that is older than a row must come to the same result
    as this one, to the letter of a refusal, as long as the level is below."""
    return {key: row for key, row in table.items() if row.since <= level}


def between(lo: int, hi: int) -> Callable[[str], bool]:
    """A whole number in this range."""
    return lambda value: _DECIMAL.fullmatch(value) is not None and lo <= int(value) <= hi


def is_ratio(value: str) -> bool:
    """A decimal number from 0 to 1. The state never computes with it: it has no floats."""
    return _RATIO.fullmatch(value) is not None


def signed_between(lo: int, hi: int) -> Callable[[str], bool]:
    """A whole number in this range, whose lower end may be negative."""
    return lambda value: _DECIMAL.fullmatch(value.removeprefix("-")) is not None and lo <= int(value) <= hi


def one_of(*values: str) -> Callable[[str], bool]:
    """One of these words."""
    return lambda value: value in values


def either(*checks: Callable[[str], bool]) -> Callable[[str], bool]:
    """What at least one of these checks accepts."""
    return lambda value: any(check(value) for check in checks)


def matching(pattern: str) -> Callable[[str], bool]:
    """The whole of a value, of ASCII characters: other scripts' digits differ between versions of Python."""
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: compiled.fullmatch(value) is not None
