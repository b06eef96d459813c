"""The regular expressions of Kafka's tools and consumers, by Google's RE2: the only file that imports it.

Owns RE2's quirks. A client's pattern costs time in proportion to its program and the text's length, never more, and no
groups are captured: to keep a thousand of them at each step took seconds for one name. It must never
know what is matched. The lists of transactions and the consumer groups import it.
"""

from collections.abc import Callable
from typing import Final

import re2

from smq.raft_state.limits import PATTERN_BYTES_MAX

_PROGRAM_BYTES_MAX: Final = 1 << 18  # of a compiled pattern: one with thousands of alternatives takes less than half


class InvalidPattern(ValueError):
    """RE2 does not understand it, or it is too long, or takes too much memory."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a whole text matches, as in Kafka."""
    if len(pattern.encode()) > PATTERN_BYTES_MAX:  # megabytes take seconds, and RE2 complains of them line by line
        raise InvalidPattern(pattern[:PATTERN_BYTES_MAX])
    options = re2.Options()
    options.log_errors = False  # to the node's standard error
    options.never_capture = True
    options.max_mem = _PROGRAM_BYTES_MAX
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as e:
        raise InvalidPattern(pattern) from e
    finally:
        re2.purge()  # otherwise it keeps what the last 128 clients have asked for
    return lambda text: compiled.fullmatch(text) is not None
