"""Spark's own Kafka connector for this Spark, by Maven: the jars that it needs beside those of PySpark.

Owns which artifacts, and what is taken where a registry lacks the version of this Spark: then the newest older one,
whose version the table names. Artifacts are asked for one by one, since only four are missing from PySpark's own jars.
"""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCALA: Final = "2.13"  # of Spark 4
OLDER: Final = ("4.2.0", "4.1.1", "4.1.0", "4.0.1", "4.0.0")  # run on a newer Spark 4, as far as the benchmark goes
KAFKA_CLIENTS: Final = "3.9.1"
COMMONS_POOL: Final = "2.12.0"
COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
TIMEOUT_S: Final = 120  # for one jar; the largest has 9 MB


class JarsMissing(RuntimeError):
    """There is no Maven, or it reaches no registry that has them; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaJars:
    """`version` is the connector's."""

    version: str
    jars: tuple[Path, ...]


def fetch_kafka_jars(spark_version: str, directory: Path) -> KafkaJars:
    """Copies the jars into `directory`. JarsMissing where that cannot be done."""
    if shutil.which("mvn") is None:
        raise JarsMissing("mvn is not installed")
    jars = [
        _copy("org.apache.kafka:kafka-clients", (KAFKA_CLIENTS,), directory)[0],
        _copy("org.apache.commons:commons-pool2", (COMMONS_POOL,), directory)[0],
    ]
    versions = (spark_version, *(v for v in OLDER if v != spark_version))
    for name in (f"spark-token-provider-kafka-0-10_{SCALA}", f"spark-sql-kafka-0-10_{SCALA}"):
        jar, version = _copy(f"org.apache.spark:{name}", versions, directory)
        jars.append(jar)
    return KafkaJars(version=version, jars=tuple(jars))


def _copy(artifact: str, versions: Sequence[str], directory: Path) -> tuple[Path, str]:
    """The jar of the first version that there is."""
    told = ""
    for version in versions:
        jar = directory / f"{artifact.partition(':')[2]}-{version}.jar"
        command = ["mvn", "-q", "-B", COPY, f"-Dartifact={artifact}:{version}", f"-DoutputDirectory={directory}"]
        try:
            ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=directory)
        except subprocess.TimeoutExpired:
            raise JarsMissing(f"Maven took more than {TIMEOUT_S} s over {artifact}:{version}") from None
        if jar.exists():
            return jar, version
        told = (ran.stdout or ran.stderr).strip().splitlines()[0][:300] if ran.stdout or ran.stderr else "no output"
    raise JarsMissing(f"Maven does not find {artifact} in {', '.join(versions)}: {told}")
