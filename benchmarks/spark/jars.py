"""Spark's own Kafka connector for this Spark, fetched by Maven: the jars that it needs beside those of PySpark.

Owns the list of artifacts and the choice of versions: if a registry lacks the version of this Spark, the newest older
one is taken, and the table names it. Artifacts are fetched one by one, as PySpark's own jars lack only four.
"""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCALA: Final = "2.13"  # the version of Spark 4
OLDER: Final = ("4.2.0", "4.1.1", "4.1.0", "4.0.1", "4.0.0")  # they serve a newer Spark 4 well enough for the benchmark
KAFKA_CLIENTS: Final = "3.9.1"
COMMONS_POOL: Final = "2.12.0"
COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
TIMEOUT_S: Final = 120  # per jar; the largest has 9 MB


class JarsMissing(RuntimeError):
    """Maven is missing, or reaches no registry that has the jars; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaJars:
    """`version` is that of the connector."""

    version: str
    jars: tuple[Path, ...]


def fetch_kafka_jars(spark_version: str, directory: Path) -> KafkaJars:
    """Copies the jars into `directory`. JarsMissing if that fails."""
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
    """The jar of the first version that exists."""
    output = ""
    for version in versions:
        jar = directory / f"{artifact.partition(':')[2]}-{version}.jar"
        command = ["mvn", "-q", "-B", COPY, f"-Dartifact={artifact}:{version}", f"-DoutputDirectory={directory}"]
        try:
            ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=directory)
        except subprocess.TimeoutExpired:
            raise JarsMissing(f"Maven took more than {TIMEOUT_S} s over {artifact}:{version}") from None
        if jar.exists():
            return jar, version
        output = (ran.stdout or ran.stderr).strip().splitlines()[0][:300] if ran.stdout or ran.stderr else "no output"
    raise JarsMissing(f"Maven does not find {artifact} in {', '.join(versions)}: {output}")
