"""format("smq-speculated"): format("smq") whose attempts are noted in files, and may be held once they have staged.

Spark's Python workers import it.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.types import StructType

from smq.spark_connector.sink.write_options import sink_options
from smq.spark_connector.sink.writer import SmqStreamWriter, SmqWriter, Staged
from smq.spark_connector.source import SmqDataSource
from tests.spark import steps

BEGUN: Final = "begun"  # directories of notes, beside the armed file
DONE: Final = "done"


class SpeculatedSource(SmqDataSource):
    @classmethod
    def name(cls) -> str:
        return "smq-speculated"

    def writer(self, schema: StructType, overwrite: bool) -> "_Writer":
        return _Writer(sink_options(self.options, overwrite=overwrite, is_stream=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> "_StreamWriter":
        return _StreamWriter(sink_options(self.options, overwrite=overwrite, is_stream=True), schema)


class _Writer(SmqWriter):
    def write(self, iterator: Iterator[Any]) -> Staged:
        return _passing(super().write, iterator)


class _StreamWriter(SmqStreamWriter):
    def write(self, iterator: Iterator[Any]) -> Staged:
        return _passing(super().write, iterator)


def _passing(stage: Callable[[Iterator[Any]], Staged], iterator: Iterator[Any]) -> Staged:
    _note(BEGUN)
    staged = stage(iterator)
    steps.reach(steps.STAGED)
    _note(DONE)
    return staged


def _note(what: str) -> None:
    """The file's name is the attempt's partition, number and host."""
    context = TaskContext.get()
    assert context is not None
    directory = Path(os.environ[steps.ARMED]).parent / what
    directory.mkdir(exist_ok=True)
    (directory / f"{context.partitionId()} {context.attemptNumber()} {os.environ['SPARK_LOCAL_IP']}").touch()
