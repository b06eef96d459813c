"""The regular expressions of Kafka's tools and consumers, by Google's RE2: the only file that imports it.

Owns RE2's quirks. A client's pattern costs time in proportion to its length and the text's, never more. It must never
know what is matched. The lists of transactions and the consumer groups import it.
"""

from collections.abc import Callable
from typing import Final

import re2

_PROGRAM_BYTES_MAX: Final = 1 << 20  # of a compiled pattern: one with thousands of alternatives takes a tenth


class InvalidPattern(ValueError):
    """RE2 does not understand it, or it takes too much memory."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a whole text matches, as in Kafka."""
    options = re2.Options()
    options.log_errors = False  # to the node's standard error
    options.max_mem = _PROGRAM_BYTES_MAX
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as e:
        raise InvalidPattern(pattern) from e
    finally:
        re2.purge()  # otherwise it keeps what the last 128 clients have asked for
    return lambda text: compiled.fullmatch(text) is not None
