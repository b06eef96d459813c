"""docs/reference/errors.md from the tables of error codes, so that page and code cannot differ."""

from docs.generate import table
from smq.coordinator.kafka.errors import CODES, KafkaError
from smq.raft_state.errors import ErrorCode

_HEAD = """\
# Errors

Generated from `smq/raft_state/errors.py` and `smq/coordinator/kafka/errors.py` by `make docs`; do not edit.

Every interface uses the same codes. gRPC calls carry an `ErrorDetail` in the trailing metadata `smq-error-bin`;
`PublishRecord` puts it into the answer to the failed request.

- **Definite: yes** means that the operation did not happen and will not. **No** means that it may have happened, or
  still may: repeat it with the same request id, or the same producer id and sequence, and it takes effect once.
- **Retry: yes** means that the same request may succeed later, perhaps at another node. smq's own clients retry by
  themselves until their deadline.
- **Kafka** is the code that a Kafka client gets: -1 UNKNOWN_SERVER_ERROR if there is none here.

"""


def render() -> str:
    rows = (
        (
            str(code.number),
            f"`{code.name}`",
            _word(code.is_definite),
            _word(code.is_retriable),
            _kafka(code),
            code.advice,
        )
        for code in sorted(ErrorCode, key=lambda code: code.number)
    )
    return _HEAD + table(("number", "code", "definite", "retry", "Kafka", "what to do"), rows)


def _kafka(code: ErrorCode) -> str:
    found = CODES[code]
    return "" if found is KafkaError.UNKNOWN_SERVER_ERROR else f"{found.value} `{found.name}`"


def _word(flag: bool) -> str:
    return "yes" if flag else "no"
