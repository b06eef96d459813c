"""How many examples a model test takes: all of them in a full run, a third in every other.

Hypothesis draws others each time, so a third finds in three runs what all find in one. The longest of these tests took
a quarter of a minute each, and most of what they find they find in their first examples.
"""

import os
from typing import Final

FULL: Final = "TESTS_ARE_FULL"  # set by tests/conftest.py before any test is imported; a node refuses SMQ_...


def examples(of_full_run: int) -> int:
    return of_full_run if os.environ.get(FULL) else -(-of_full_run // 3)
