"""The garbage collector's setting in Spark's Python workers, and in no other process."""

import gc
import subprocess
import sys

import pytest

from smq.spark_connector.garbage_collection import freeze_loaded_modules
from smq.spark_connector.local_session import SETTINGS

# Spark runs its workers in children of `python -m` with this module. The script takes its name instead of forking.
AS_WORKER = """
import gc, sys
from types import SimpleNamespace
sys.modules["__main__"].__spec__ = SimpleNamespace(name=sys.argv[1])
from smq.spark_connector.source import SmqDataSource
counts = []
more = []
for _ in range(5):
    SmqDataSource({"servers": "127.0.0.1:1", "subscribe": "t"})
    counts.append(gc.get_freeze_count())
    more.append([[] for _ in range(1000)])
print(counts[0] > 10_000, counts[0] < counts[1] < counts[2], counts[2] == counts[3] == counts[4])
"""


@pytest.mark.parametrize("daemon", ["pyspark.daemon", SETTINGS["spark.python.daemon.module"]])
def test_spark_worker_collects_no_modules_and_freezes_them_a_few_times_only(daemon: str) -> None:
    ran = subprocess.run([sys.executable, "-c", AS_WORKER, daemon], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True"] * 3


def test_other_processes_keep_their_collector() -> None:
    before = gc.get_freeze_count()
    freeze_loaded_modules()
    assert gc.get_freeze_count() == before
