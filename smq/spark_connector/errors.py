"""The ways a Spark read fails on purpose: impossible options, records that are gone, positions that are not ours.

Owns the exceptions and the data-loss policy's wording. It must never import another module of the connector;
all of them may import it. Messages say what to do, since Spark shows users nothing else.
"""

import logging

log = logging.getLogger(__name__)

DATA_LOSS_ADVICE = (
    "start at an offset that is still there (a stream: with a new checkpoint), or set "
    ".option('failOnDataLoss', 'false') to read what is left"
)


class OptionError(ValueError):
    """An option or a schema that the connector cannot serve; the message says which and what to write instead."""


class DataLossError(RuntimeError):
    """Records of the asked range are not there any more."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; {DATA_LOSS_ADVICE}")


class ReadError(RuntimeError):
    """The cluster could not be read before the time was up; the message names the last error of each node."""


class CheckpointError(RuntimeError):
    """A position in the query's checkpoint that cannot be gone on from."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}: start with a new checkpointLocation, and with startingOffsets where this query got to"
        )


def report_loss(message: str, *, fail: bool) -> None:
    """`failOnDataLoss`: DataLossError, or a warning that what is left is read."""
    if fail:
        raise DataLossError(message)
    log.warning("%s; what is left is read, as failOnDataLoss is false", message)
