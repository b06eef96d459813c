"""The assertion that a call fails with an error of one code, for tests of `smq.testing.node_client`.

Owns that assertion alone; the calls are the chaos harness's, so that tests and live histories call in one way.
"""

from collections.abc import Callable

import pytest

from smq.raft_state.errors import ErrorCode, SmqError


def raises(code: ErrorCode, call: Callable[[], object]) -> SmqError:
    """Asserts that `call` fails with `code`, and that the error says what was wrong and what to do."""
    with pytest.raises(SmqError) as raised:
        call()
    assert raised.value.code is code, str(raised.value)
    assert raised.value.message
    return raised.value
