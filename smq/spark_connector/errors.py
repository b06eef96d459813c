"""The errors of reads and writes in Spark: impossible options, lost records, unusable checkpoints, failed writes.

Owns the exceptions and the wording of the data-loss policy. It must never import another module of the connector; all
of them may import it. Messages say what to do, because Spark shows users nothing else.
"""

import logging

log = logging.getLogger(__name__)

DATA_LOSS_ADVICE = (
    "start at an offset that still exists (a stream: with a new checkpoint), or set "
    ".option('failOnDataLoss', 'false') to read what is left"
)


class OptionError(ValueError):
    """An option or a schema that the connector cannot serve; the message says which and what to write instead."""


class DataLossError(RuntimeError):
    """Records of the requested range no longer exist."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; {DATA_LOSS_ADVICE}")


class ReadError(RuntimeError):
    """The cluster could not be read in time; the message names the last error of each node."""


class SinkError(RuntimeError):
    """Rows that could not be written; nothing of their batch is visible."""


class CheckpointError(RuntimeError):
    """A position in the query's checkpoint from which the query cannot continue."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}: start with a new checkpointLocation, and with startingOffsets at this query's last position"
        )


def report_loss(message: str, *, fail: bool) -> None:
    """`failOnDataLoss`: raises DataLossError, or warns that only the remaining records are read."""
    if fail:
        raise DataLossError(message)
    log.warning("%s; the remaining records are read, because failOnDataLoss is false", message)
