"""docs/reference/errors.md from the table of error codes, so that the two cannot differ."""

from docs.generate import table
from smq.raft_state.errors import ErrorCode

_HEAD = """\
# Errors

Generated from `smq/raft_state/errors.py` by `make docs`; do not edit.

Every interface uses the same codes. gRPC calls carry an `ErrorDetail` in the trailing metadata `smq-error-bin`;
`PublishRecord` puts it into the answer to the failed request.

- **Definite: yes** means that the operation did not happen and will not. **No** means that it may have happened, or
  still may: repeat it with the same request id, or the same producer id and sequence, and it takes effect once.
- **Retry: yes** means that the same request may succeed later, perhaps at another node. smq's own clients retry by
  themselves until their deadline.

"""


def render() -> str:
    rows = (
        (str(code.number), f"`{code.name}`", _word(code.is_definite), _word(code.is_retriable), code.advice)
        for code in sorted(ErrorCode, key=lambda code: code.number)
    )
    return _HEAD + table(("number", "code", "definite", "retry", "what to do"), rows)


def _word(flag: bool) -> str:
    return "yes" if flag else "no"
