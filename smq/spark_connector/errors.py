"""The two ways a Spark read fails on purpose: options that cannot be right, and records that are gone.

Owns the exceptions and the data-loss policy's wording. It must never import another module of the connector;
all of them may import it. Messages say what to do, since Spark shows users nothing else.
"""


class OptionError(ValueError):
    """An option or a schema that the connector cannot serve; the message says which and what to write instead."""


class DataLossError(RuntimeError):
    """Records of the asked range are not there any more."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; {DATA_LOSS_ADVICE}")


DATA_LOSS_ADVICE = (
    "start at an offset that is still there, or set .option('failOnDataLoss', 'false') to read what is left"
)


class ReadError(RuntimeError):
    """The cluster could not be read before the time was up; the message names the last error of each node."""
