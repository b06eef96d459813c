"""The programs of the comparison: Kafka's jars by Maven, etcd, the NATS server and the load by Go.

Owns their versions (go.mod, KAFKA) and where they are kept: `.venv/peers`, so that the next run finds them. A program
that is not available is a `Missing` with the reason, and the comparison names it.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KAFKA: Final = "4.3.0"
HERE: Final = Path(__file__).parent
KEPT: Final = HERE.parents[1] / ".venv" / "peers"
BUILD_S: Final = 900  # downloads included
GO: Final = {
    "load": "./load",
    "etcd": "./etcd",
    "nats-server": "github.com/nats-io/nats-server/v2",
}
_POM: Final = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>smq</groupId><artifactId>peers</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{KAFKA}</version></dependency>
</dependencies></project>
"""


class Missing(RuntimeError):
    """A program that this machine lacks and cannot get. The message says why."""


@dataclass(frozen=True, slots=True)
class Jars:
    """Apache Kafka: its server and its tools."""

    directory: Path

    def command(self, main_class: str, *arguments: str, heap: str = "1g") -> list[str]:
        """Kafka's own start script gives its server 1 GB and G1, and its tools 512 MB."""
        java = ["java", f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
        logging = f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
        return [*java, logging, "-cp", f"{self.directory}/*", main_class, *arguments]


def kafka_jars() -> Jars:
    directory = KEPT / f"kafka-{KAFKA}"
    if not any(directory.glob("kafka_2.13-*.jar")):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pom.xml").write_text(_POM)
        _run(directory, "mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={directory}")
    return Jars(directory)


def go_program(name: str) -> Path:
    """One of GO."""
    KEPT.mkdir(parents=True, exist_ok=True)
    _run(HERE / "go", "go", "build", "-o", str(KEPT / name), GO[name])
    return KEPT / name


def _run(directory: Path, *command: str) -> None:
    if shutil.which(command[0]) is None:
        raise Missing(f"there is no {command[0]} on this machine")
    try:
        ran = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"{command[0]} took more than {BUILD_S} s") from None
    if ran.returncode:
        raise Missing(f"{' '.join(command)} ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}")
