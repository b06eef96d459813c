"""smq.spark_connector.session(): its settings, and Java's start in a process with open gRPC clients."""

import os
import sys

import pytest
from pyspark.sql import SparkSession

from smq.spark_connector import session

pytestmark = pytest.mark.spark


def test_java_is_no_child_of_a_python_function_between_fork_and_exec(spark: SparkSession) -> None:
    """Without preexec_fn, Java would stay in our process group; our start gives it a group of its own."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc.pid
    assert os.getpgid(java) == java


def test_workers_run_this_interpreter(spark: SparkSession) -> None:
    assert spark.sparkContext.pythonExec == sys.executable


def test_driver_listens_on_loopback_only(spark: SparkSession) -> None:
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


def test_settings_of_the_caller_come_before_ours(spark: SparkSession) -> None:
    assert spark.conf.get("spark.log.level") == "ERROR"
    assert spark.sparkContext.master == "local[2,3]"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_second_session_is_the_one_that_runs(spark: SparkSession) -> None:
    assert session("other").sparkContext is spark.sparkContext
