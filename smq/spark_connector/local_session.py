"""A Spark session on this machine, with the settings that suit `format("smq")`.

Owns the settings, and the environment that must exist before the Java virtual machine starts. Users import it through
`smq.spark_connector.session`; the data source never does.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from smq.spark_connector.java import find_java_home

log = logging.getLogger(__name__)

SETTINGS: Final[dict[str, str]] = {
    # Loopback only: otherwise Spark binds the address of the machine's host name, and opens ports there.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.daemon.module": "smq.spark_connector.daemon",
    # A task costs 109 ms over TCP and 50 ms over unix sockets (15 ms together with the reader's gc.freeze).
    "spark.python.unix.domain.socket.enabled": "true",
    # The default of 200 shuffle partitions suits clusters; a local job spends more time starting them than on its data.
    "spark.sql.shuffle.partitions": "8",
}

# For a process that lives for minutes: on few cores Java's optimising compiler and parallel collector cost more than
# they save (start and first query took 8.5 CPU seconds instead of 14). Add it to `conf` if that fits.
SHORT_LIVED: Final[dict[str, str]] = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def build_session(app_name: str, *, master: str, conf: Mapping[str, str]) -> SparkSession:
    """Starts Spark, or returns the running session. JavaNotFound if there is no Java of version 17 or newer."""
    settings = {**SETTINGS, **conf, "spark.app.name": app_name, "spark.master": master}
    if SparkContext._active_spark_context is not None:
        log.warning("a Spark context is running already: its master, Python and Java stay as they are")
    else:
        prepare_environment()
        start_java(settings)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def start_java(settings: Mapping[str, str]) -> None:
    """Starts the Java virtual machine and a Spark context in it.

    PySpark would run a Python function between fork and exec. That triggers gRPC's fork handlers in a process with open
    clients, and killed 4 starts of 150 (JAVA_GATEWAY_EXITED). Without that function the handlers do not run.
    """
    spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    gateway = None
    if SparkContext._gateway is None:
        launch: Callable[..., Any] = launch_gateway  # PySpark leaves it without annotations
        gateway = launch(spark_conf, popen_kwargs=_StartOptions(process_group=0))
    SparkContext(conf=spark_conf, gateway=gateway)


class _StartOptions(dict[str, Any]):
    """Options of Popen that refuse `preexec_fn`, which PySpark always sets to make Java ignore Ctrl-C. A process group
    of its own has the same effect."""

    def __setitem__(self, name: str, value: object) -> None:
        if name != "preexec_fn":
            super().__setitem__(name, value)


def prepare_environment() -> None:
    """Sets this interpreter for driver and workers (Spark would run `python3` from PATH, which may lack smq), and sets
    JAVA_HOME. The user's own settings for Python stay. What Spark starts connects back immediately (`startup`)."""
    folders = [str(Path(__file__).parent / "startup"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the driver binds it before it reads its settings
    os.environ["JAVA_HOME"] = str(find_java_home())
